"""The weights of a site, whatever its kind: their units, their sketches, and the site put together."""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import nn

from panther_compile.config import SketchConfig
from panther_compile.errors import WeightError
from panther_compile.factorization.factorize import decomposition_work
from panther_compile.kinds.base import Kind
from panther_compile.kinds.plain_form import note_origin
from panther_compile.kinds.registry import kind_of
from panther_compile.layers.base import SketchedLayer, take_over
from panther_compile.names import dotted
from panther_compile.records import Choice, Fitted, Site, Unit

Ready = Mapping[str, tuple[SketchedLayer, Fitted]]
"""Layers that were fitted elsewhere, on data, by the name of the unit, and what came of them."""

NOTHING_READY: Ready = MappingProxyType({})


def unit_name(site: Site, suffix: str) -> str:
    """The name of one weight of a site, as plans name it."""
    return dotted(site.name, suffix)


def scheme_of_parts(shape: tuple[int, ...]) -> str:
    """The scheme in which weights (O, I) of several parts store the factor of their longer side once."""
    return "pair" if shape[0] > shape[1] else "pivoted"


def parts_of(site: Site, kind: Kind) -> dict[str, nn.Module]:
    """The dense layers of one weight each that a site is made of, by the names of their units."""
    return {unit_name(site, suffix): part for suffix, part in kind.parts(site.module).items()}


def units_of(parts: Mapping[str, nn.Module], *, energies: bool) -> tuple[Unit, ...]:
    """The weights of some parts, by name, and the ways to store them; `energies` asks for their spectra."""
    named = parts.items()
    return tuple(kind_of(part).unit(name, part, energies=energies) for name, part in named)


def work_on(site: Site, kind: Kind) -> float:
    """What decompositions of all weights of a site take, in proportion; see `decomposition_work`."""
    units = units_of(parts_of(site, kind), energies=False)
    return sum(decomposition_work(unit.shape[0], math.prod(unit.shape[1:])) for unit in units)


def sketch_site(
    site: Site,
    kind: Kind,
    choices: Mapping[str, Choice],
    config: SketchConfig,
    ready: Ready = NOTHING_READY,
    put: Callable[[nn.Module], object] | None = None,
) -> tuple[nn.Module, dict[str, Fitted]] | None:
    """The replacement of a site, and what came of each weight chosen; None if none of its weights is.

    Args:
        site: what is replaced.
        kind: of its module.
        choices: by the names of units, of any site.
        config: the options.
        ready: layers to take as they are.
        put: see `sketch_parts`.

    Raises:
        WeightError: factors of a weight exceed its dtype.
    """
    fitted: dict[str, Fitted] = {}
    layers: dict[str, nn.Module] = {}
    dense = kind.parts(site.module)
    names = {suffix: unit_name(site, suffix) for suffix in dense}
    waiting = {names[suffix]: part for suffix, part in dense.items() if names[suffix] not in ready}
    made = sketch_parts(waiting, choices, config, put)
    for suffix, name in names.items():
        if name in ready or name in made:
            layers[suffix], fitted[name] = ready[name] if name in ready else made[name]
            _check_finite(layers[suffix], dense[suffix], name)
    return (kind.assemble(site.module, dense | layers, config), fitted) if layers else None


def sketch_parts(
    parts: Mapping[str, nn.Module],
    choices: Mapping[str, Choice],
    config: SketchConfig,
    put: Callable[[nn.Module], object] | None = None,
) -> dict[str, tuple[SketchedLayer, Fitted]]:
    """The replacements of the layers chosen, by name, from their weights alone, and what came of each.

    `put` is called with each as soon as it is made.
    """
    made: dict[str, tuple[SketchedLayer, Fitted]] = {}
    for name, part in parts.items():
        choice = choices.get(name)
        if choice is None or name in made:
            continue
        if choice.sharing:
            together = {one: parts[one] for one in choice.sharing}
            new = kind_of(part).sketch_together(together, choice, config)
        else:
            new = {name: kind_of(part).sketch(name, part, choice, config)}
        if put is not None:
            for layer, _ in new.values():
                put(layer)
        made |= new
    return made


def replacements_of(site: Site, kind: Kind, layer: nn.Module) -> dict[nn.Module, nn.Module]:
    """The replacement of a site, and of the modules tied to it, by the dense module."""
    new = {site.module: layer}
    note_origin(site.module, layer)
    for _, other in site.tied:
        assert isinstance(layer, SketchedLayer)
        new[other] = kind.share(layer, other)
    return new


def _check_finite(layer: nn.Module, dense: nn.Module, name: str) -> None:
    """Raise WeightError if what is stored exceeds its dtype."""
    for parameter in layer.parameters():
        if not bool(torch.isfinite(parameter).all()):
            largest = max(float(one.abs().max()) for one in dense.parameters() if one.numel())
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise WeightError(
                f"{name or 'the model'}: its weight holds numbers up to {largest:.3g}, factors of it exceed "
                f"{dtype}: give it smaller weights, or exclude the layer"
            )


def empty_site(
    site: Site, kind: Kind, choices: Mapping[str, Choice], config: SketchConfig
) -> nn.Module | None:
    """The replacement of a site by its shape alone, on the meta device; see `sketch_site`."""
    layers: dict[str, nn.Module] = {}
    dense = kind.parts(site.module)
    for suffix, part in dense.items():
        choice = choices.get(unit_name(site, suffix))
        if choice is not None:
            layer = empty_sketch(part, choice, "meta")
            take_over(layer, part, next(part.parameters()).requires_grad)
            layers[suffix] = layer
    return kind.assemble(site.module, dense | layers, config) if layers else None


def empty_sketch(layer: nn.Module, choice: Choice, device: torch.device | str) -> SketchedLayer:
    """The replacement of one dense layer with initial numbers, or with none on the meta device.

    Args:
        layer: of one weight.
        choice: how its weight is to be stored.
        device: where the numbers are made; their dtype is the dense weight's.
    """
    return kind_of(layer).empty(layer, choice, device)
