"""What the configs of transformers and of diffusers have in common that tell of a sketch."""

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from panther_compile.errors import CheckpointVersionError


def check_format(version: int, known: int) -> None:
    """Raise CheckpointVersionError if a newer version than the one that is known wrote a config."""
    if version > known:
        raise CheckpointVersionError(
            f"config.json: a sketch in format {version}, this panther_compile reads up to {known}: upgrade it"
        )


def models_within(model: nn.Module, home: str, cls: str) -> Iterator[Any]:
    """The modules of a class of another library, by its name; none if its home was not imported."""
    found = getattr(sys.modules.get(home), cls, ())
    return (module for module in model.modules() if isinstance(module, found))


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
