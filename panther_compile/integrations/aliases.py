"""Parameters of a model that have several names."""

from torch import nn


def parameter_aliases(model: nn.Module) -> dict[str, str]:
    """{other name: first name} of the parameters that have several."""
    first: dict[int, str] = {}
    names = ((name, id(p)) for name, p in model.named_parameters(remove_duplicate=False))
    return {name: first[key] for name, key in names if first.setdefault(key, name) != name}
