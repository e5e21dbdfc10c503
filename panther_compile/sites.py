"""Find what can be sketched in a model, and say of everything else why it is left alone."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from panther_compile.config import Selector, SketchConfig, selectors, selects
from panther_compile.errors import SelectorError
from panther_compile.layers.base import SketchedLayer
from panther_compile.passes.base import SketchPass
from panther_compile.passes.default import SKETCH_PASSES
from panther_compile.records import LayerPlan, Site
from panther_compile.trace import Reading


@dataclass(frozen=True, slots=True)
class Found:
    """The sites of a model, each with its pass, the layers left alone, and the order of all their names."""

    sites: tuple[tuple[Site, SketchPass], ...]
    skipped: tuple[LayerPlan, ...]
    order: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Target:
    name: str
    module: nn.Module
    kind: str
    owner: SketchPass


def find_sites(model: nn.Module, config: SketchConfig, reading: Reading) -> Found:
    """Match every module of the tree once.

    A module that several names reach is one site; modules that share a weight are one site, with the
    others `tied` to it. Parts of a site, such as the output projection of an attention, are not sites.

    Args:
        model: any module.
        config: the selectors and limits.
        reading: what the model's graph tells, if it has one.

    Raises:
        SelectorError: a selector matches no layer that could be sketched.
    """
    targets = list(_targets(model))
    _check_selectors(targets, config)
    users = _users_of_weights(model)
    head = _output_head(model, targets)
    reasons = {
        target.name: _not_selected(target, config)
        or _left_alone_by_default(target, head, config)
        or target.owner.why_not(target.module)
        or _read_directly(target, reading)
        for target in targets
    }
    sites: list[tuple[Site, SketchPass]] = []
    skipped: list[LayerPlan] = []
    tied_names: set[str] = set()
    for target in targets:
        if target.name in tied_names:
            continue
        tied = _tied_to(target, targets)
        reason = (
            reasons[target.name]
            or _unsafe_tie(target, tied, reasons, users)
            or _too_small(target, config)
        )
        if reason is None:
            others = tuple((other.name, other.module) for other in tied)
            tied_names.update(name for name, _ in others)
            sites.append((Site(target.name, target.module, target.kind, others), target.owner))
        else:
            skipped.append(_stays_dense(target, reason))
    return Found(tuple(sites), tuple(skipped), tuple(target.name for target in targets))


def weight_names(module: nn.Module) -> tuple[str, ...]:
    """The parameters of a dense layer that are matrices or kernels, not biases."""
    named = module.named_parameters()
    return tuple(name for name, parameter in named if not name.endswith("bias") and parameter.dim() > 1)


def _targets(
    module: nn.Module, name: str = "", seen: set[int] | None = None
) -> Iterator[_Target]:
    """Every module that a pass knows, parents before children, each once, without their parts."""
    seen = set() if seen is None else seen
    if id(module) in seen or isinstance(module, SketchedLayer):
        return
    seen.add(id(module))
    for owner in SKETCH_PASSES:
        kind = owner.kind(module)
        if kind is not None:
            seen.update(id(part) for part in module.modules())
            yield _Target(name, module, kind, owner)
            return
    for child_name, child in module.named_children():
        yield from _targets(child, f"{name}.{child_name}" if name else child_name, seen)


def _check_selectors(targets: list[_Target], config: SketchConfig) -> None:
    options = {"include": selectors(config.include), "exclude": selectors(config.exclude)}
    if not isinstance(config.ratio, float | int):
        options["ratio"] = tuple(config.ratio)
    for option, given in options.items():
        for selector in given:
            if targets and not any(selects(selector, t.module, t.name) for t in targets):
                names = ", ".join(target.name for target in targets[:5])
                raise SelectorError(
                    f"{option}: {selector!r} matches none of the {len(targets)} layers that could be "
                    f"sketched ({names}{', ...' if len(targets) > 5 else ''})"
                )


def _not_selected(target: _Target, config: SketchConfig) -> str | None:
    if _any(selectors(config.exclude), target):
        return "excluded"
    if config.include is not None and not _asked_for(target, config):
        return "not included"
    if not _any(tuple(selector for selector, _ in config.ratios()), target):
        return "matches no selector of ratio"
    return None


def _left_alone_by_default(target: _Target, head: nn.Module | None, config: SketchConfig) -> str | None:
    if _asked_for(target, config):
        return None
    if isinstance(target.module, nn.Embedding):
        return "embedding: left alone unless included"
    if target.module is head:
        return "output head: left alone unless included"
    return None


def _read_directly(target: _Target, reading: Reading) -> str | None:
    for name in weight_names(target.module):
        full = f"{target.name}.{name}" if target.name else name
        if full in reading.direct:
            return f"forward uses its {name} directly: sketch torch.fx.symbolic_trace(model) instead"
    return None


def _asked_for(target: _Target, config: SketchConfig) -> bool:
    return _any(selectors(config.include), target)


def _any(given: tuple[Selector, ...], target: _Target) -> bool:
    return any(selects(selector, target.module, target.name) for selector in given)


def _output_head(model: nn.Module, targets: list[_Target]) -> nn.Module | None:
    """The layer that makes the model's output, if it is told apart from the others.

    Hugging Face models name theirs. Elsewhere it is the last linear layer, if there are others, it changes
    the number of features, and it is not one of a list of equal blocks.
    """
    if hasattr(model, "get_output_embeddings"):
        named = model.get_output_embeddings()  # type: ignore[operator]
        if isinstance(named, nn.Module):
            return named
    linears = [target for target in targets if isinstance(target.module, nn.Linear)]
    if len(linears) < 2:
        return None
    last = linears[-1]
    assert isinstance(last.module, nn.Linear)
    parents = last.name.split(".")[:-1]
    blocks = (model.get_submodule(".".join(parents[: i + 1])) for i in range(len(parents)))
    in_blocks = any(isinstance(block, nn.ModuleList) for block in blocks)
    same_width = last.module.in_features == last.module.out_features
    return None if in_blocks or same_width else last.module


def _users_of_weights(model: nn.Module) -> dict[int, list[tuple[str, nn.Module]]]:
    """Which modules hold each parameter: by the parameter's id."""
    users = defaultdict(list)
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                users[id(parameter)].append((name, module))
    return users


def _tied_to(target: _Target, targets: list[_Target]) -> list[_Target]:
    weight = getattr(target.module, "weight", None)
    if not isinstance(weight, torch.Tensor):
        return []
    return [
        other
        for other in targets
        if other is not target and getattr(other.module, "weight", None) is weight
    ]


def _unsafe_tie(
    target: _Target,
    tied: list[_Target],
    reasons: dict[str, str | None],
    users: dict[int, list[tuple[str, nn.Module]]],
) -> str | None:
    """Why a weight that others use must stay dense, or None."""
    parts = {id(part) for part in target.module.modules()}
    parts.update(id(other.module) for other in tied)
    for name, parameter in target.module.named_parameters():
        if name in weight_names(target.module):
            for user, module in users[id(parameter)]:
                if id(module) not in parts:
                    return f"its {name} is shared with {user or 'the model itself'}, which stays dense"
    for other in tied:
        if isinstance(other.module, nn.Embedding) and reasons[other.name] is not None:
            return f"tied to the embedding {other.name}: left alone unless both are included"
        if reasons[other.name] is not None:
            return f"its weight is tied to {other.name}, which stays dense ({reasons[other.name]})"
        if not target.owner.can_share(target.module, other.module):
            return f"its weight is tied to {other.name}, a {other.kind}"
    return None


def _too_small(target: _Target, config: SketchConfig) -> str | None:
    named = dict(target.module.named_parameters())
    numbers = sum(named[name].numel() for name in weight_names(target.module))
    if numbers < config.min_params:
        return f"small: {numbers:,} numbers, min_params is {config.min_params:,}"
    return None


def _stays_dense(target: _Target, reason: str) -> LayerPlan:
    named = dict(target.module.named_parameters())
    shapes = [tuple(named[name].shape) for name in weight_names(target.module)]
    numbers = sum(parameter.numel() for parameter in named.values())
    return LayerPlan(target.name, target.kind, shapes[0] if shapes else (), numbers, None, reason)
