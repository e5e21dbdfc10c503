"""Parameters of a model that have several names."""

from torch import nn


def parameter_aliases(model: nn.Module, body: str = "") -> dict[str, str]:
    """{other name: first name} of the parameters that have several.

    Args:
        model: that has them.
        body: name of a part whose names are the first ones, as it may be loaded without the rest.
    """
    named = [(name, id(p)) for name, p in model.named_parameters(remove_duplicate=False)]
    named.sort(key=lambda one: not one[0].startswith(f"{body}.") if body else False)
    first: dict[int, str] = {}
    return {name: first[key] for name, key in named if first.setdefault(key, name) != name}
