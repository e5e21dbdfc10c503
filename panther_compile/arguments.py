"""Options of the command line that are fields of `SketchConfig`, made from the class itself.

min_params: int = 4096       --min-params N
narrow: bool = True          --narrow, --no-narrow
method: str = "auto"         --method {auto,svd,randomized}
include: Selector | ...      --include GLOB, repeated
"""

import argparse
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Any, get_args, get_type_hints

from panther_compile.config import ATTENTIONS, OBJECTIVES, OUTPUTS, REFINEMENTS, SketchConfig
from panther_compile.factorization.factorize import METHODS
from panther_compile.factorization.sketches import SKETCH_KINDS

_CHOICES = {
    "method": METHODS,
    "sketch": SKETCH_KINDS,
    "attention": ATTENTIONS,
    "objective": OBJECTIVES,
    "output": tuple(OUTPUTS),
    "refine": REFINEMENTS,
}
_SELECTORS = ("include", "exclude")
_OTHERWISE = ("ratio", "inplace")  # read by the commands themselves

NAMES = tuple(field.name for field in fields(SketchConfig) if field.name not in _OTHERWISE)


def add_options(
    command: argparse.ArgumentParser,
    names: Collection[str] = NAMES,
    choices: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> None:
    """Add an option for each of some fields; one that is not given is not in the namespace.

    Args:
        command: the parser.
        names: of the fields.
        choices: by field, the values that the command can do something with, where those are not all.
    """
    hints, texts = get_type_hints(SketchConfig), _described()
    for name in names:
        allowed = {hints[name], *get_args(hints[name])}
        how: dict[str, Any] = {"metavar": "TEXT"}
        if name in _SELECTORS:
            how = {"action": "append", "metavar": "GLOB"}
        elif name in _CHOICES:
            how = {"choices": choices.get(name, _CHOICES[name])}
        elif bool in allowed:
            how = {"action": argparse.BooleanOptionalAction}
        elif int in allowed:
            how = {"type": int, "metavar": "N"}
        elif float in allowed:
            how = {"type": float, "metavar": "X"}
        option = "--" + name.replace("_", "-")
        command.add_argument(option, dest=name, default=argparse.SUPPRESS, help=texts.get(name), **how)


def given_options(options: argparse.Namespace) -> dict[str, Any]:
    """The options of `SketchConfig` that were given, by field."""
    return {name: getattr(options, name) for name in NAMES if hasattr(options, name)}


def _described() -> Mapping[str, str]:
    """What the docstring of the class says of each field; nothing where Python leaves docstrings out."""
    section = (SketchConfig.__doc__ or "").partition("Args:")[2].partition("Raises:")[0]
    found = re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", section, flags=re.MULTILINE)
    return {name: " ".join(text.split()).rstrip(".").replace("%", "%%") for name, text in found}
