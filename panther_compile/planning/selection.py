"""Layers that the options select among those that could be sketched: by name, type, function or size."""

from collections.abc import Mapping, Sequence

from torch import nn

from panther_compile.config import Selector, SketchConfig, selectors, selects
from panther_compile.errors import SelectorError
from panther_compile.records import Site

NOT_INCLUDED = "not included"
HEAD = "output head: left alone unless included"

Selectable = tuple[nn.Module, tuple[str, ...]]
"""A layer, and all the names under which a selector may know it, the first one for messages."""


def of_site(site: Site) -> Selectable:
    """What selectors see of a site."""
    return site.module, (site.name, *site.aliases)


def is_picked(given: Selector | Sequence[Selector] | None, layer: Selectable) -> bool:
    """Whether one of some selectors picks a layer."""
    module, names = layer
    return any(selects(selector, module, name) for selector in selectors(given) for name in names)


def why_not_selected(layer: Selectable, config: SketchConfig) -> str | None:
    """Why the selectors leave a layer alone, or None if they do not."""
    if is_picked(config.exclude, layer):
        return "excluded"
    if config.include is not None and not is_picked(config.include, layer):
        return NOT_INCLUDED
    if not is_picked([selector for selector, _ in config.ratios()], layer):
        return "matches no selector of ratio"
    return None


def why_too_small(numbers: int, config: SketchConfig) -> str | None:
    """Why a weight of so many numbers is left alone, or None."""
    if numbers == 0:
        return "empty: its weight holds no numbers"
    if numbers < config.min_params:
        return f"small: {numbers:,} numbers, min_params is {config.min_params:,}"
    return None


def check_selectors(
    config: SketchConfig, layers: Sequence[Selectable], what: str, others: Sequence[Selectable] = ()
) -> None:
    """Raise SelectorError for a selector that matches none of some layers, and none of others either.

    Args:
        config: the options.
        layers: that could be sketched.
        what: they are, in words.
        others: that are sketched already.
    """
    options = {"include": selectors(config.include), "exclude": selectors(config.exclude)}
    if isinstance(config.ratio, Mapping):
        options["ratio"] = tuple(config.ratio)
    for option, given in options.items():
        for selector in given:
            if layers and not any(is_picked(selector, layer) for layer in (*layers, *others)):
                names = ", ".join(names[0] for _, names in layers[:5])
                more = ", ..." if len(layers) > 5 else ""
                raise SelectorError(
                    f"{option}: {selector!r} matches none of the {len(layers)} {what} ({names}{more})"
                )
