"""Find what can be sketched in a model, and say of everything else why it is left alone."""

from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from panther_compile.config import SketchConfig, check_is_module
from panther_compile.errors import WrappedModelError
from panther_compile.factorization.values import check_values
from panther_compile.kinds.base import Kind
from panther_compile.kinds.match import is_adapter
from panther_compile.kinds.plain_form import plain_form
from panther_compile.kinds.registry import KINDS, find_kind
from panther_compile.layers.base import SketchedLayer, outermost
from panther_compile.layers.linear_replacement import LinearReplacement
from panther_compile.layers.own_weights import Matrices, OwnWeight
from panther_compile.models.written_weights import written_weights
from panther_compile.names import dotted
from panther_compile.planning.asked_types import asked_types
from panther_compile.planning.routers import ROUTER, expert_counts, is_router
from panther_compile.planning.selection import (
    HEAD,
    Selectable,
    check_selectors,
    is_picked,
    of_site,
    why_not_selected,
    why_too_small,
)
from panther_compile.planning.trace import Reading
from panther_compile.records import ALREADY_SKETCHED, LayerPlan, Site


@dataclass(frozen=True, slots=True)
class Found:
    """The sites of a model, each with its kind, the layers left alone, and the order of all their names.

    Attributes:
        sites: what may be sketched.
        skipped: what is left alone, and why.
        order: names of both, as the model has them.
    """

    sites: tuple[tuple[Site, Kind], ...]
    skipped: tuple[LayerPlan, ...]
    order: tuple[str, ...]

    @property
    def numbers(self) -> int:
        """How many may be sketched."""
        return sum(p.numel() for site, _ in self.sites for p in site.module.parameters())


@dataclass(frozen=True, slots=True)
class _Match:
    name: str
    module: nn.Module
    kind: str
    owner: Kind
    aliases: tuple[str, ...]
    plain: nn.Module  # what it stands for: itself, or a layer of the weight that it makes

    @property
    def selectable(self) -> Selectable:
        """What selectors see of it."""
        return self.module, (self.name, *self.aliases)


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
    names = _Names(model)
    matches = list(_matches(model, names))
    sketched = [(names.first(layer), layer) for layer in outermost(model)]
    layers, already = [one.selectable for one in matches], [(layer, (name,)) for name, layer in sketched]
    check_selectors(config, layers, "layers that could be sketched", already)
    users = _users_of_weights(model)
    head, counts = _output_head(model, matches, sketched), expert_counts(model)
    adapters = [name for name, module in model.named_modules() if is_adapter(module)]
    asked = written_weights(model) | asked_types(model)
    reasons = {
        match.name: why_not_selected(match.selectable, config)
        or _part_of_adapter(match, adapters)
        or _left_alone_by_default(match, head, config)
        or match.owner.why_not(match.plain)
        or _router(model, match, counts, config)
        or asked.get(match.module)
        or _read_directly(match, reading)
        for match in matches
    }
    sites: list[tuple[Site, Kind]] = []
    skipped = [_stays_sketched(name, layer) for name, layer in sketched]
    for group in _tied_groups(matches):
        leader = next((match for match in group if _can_lead(match, group)), None)
        why = {
            match.name: reasons[match.name]
            or _unsafe_tie(match, group, leader, reasons, users)
            or why_too_small(_numbers(match.module), config)
            for match in group
        }
        if leader is None or any(why.values()):
            skipped.extend(_stays_dense(t.name, t.module, t.kind, why[t.name] or "") for t in group)
        else:
            others = tuple((other.name, other.module) for other in group if other is not leader)
            site = Site(leader.name, leader.module, leader.kind, others, leader.aliases)
            sites.append((site, leader.owner))
    known = {match.name for match in matches} | {name for name, _ in sketched}
    return Found(tuple(sites), tuple(skipped), tuple(name for name in names.in_order() if name in known))


def without_uncalled(found: Found, uncalled: frozenset[str]) -> Found:
    """The same, with the sites left alone whose weights the model uses without calling them, see `read_run`.

    A sketch of them would be multiplied out in every call.
    """
    sites: list[tuple[Site, Kind]] = []
    skipped: list[LayerPlan] = []
    for site, owner in found.sites:
        layers = ((site.name, site.module), *site.tied)
        names = [(name, one) for name, layer in layers for one in weight_names(layer)]
        read = next((one for name, one in names if f"{name}.{one}" in uncalled), None)
        if read is None:
            sites.append((site, owner))
        else:
            reason = f"forward uses its {read} directly, and never called the layer on the data"
            skipped.extend(_stays_dense(name, layer, site.kind, reason) for name, layer in layers)
    return replace(found, sites=tuple(sites), skipped=(*found.skipped, *skipped))


def without_head(model: nn.Module, found: Found, head: str | None, config: SketchConfig) -> Found:
    """The same, without the layer that was seen to make the logits, unless it is included.

    The only linear layer, behind convolutions, is sketched as a plan made without inputs says: it is a large
    part of such models and the cheapest to cut. At .5 CREPE keeps .69 of the pitches with it, .56 without.
    """
    named = [site for site, _ in found.sites if site.name == head]
    gone = [site for site in named if not is_picked(config.include, of_site(site))]
    sites = tuple((site, owner) for site, owner in found.sites if site not in gone)
    sketched = any(isinstance(layer, LinearReplacement) for layer in outermost(model))
    if not gone or not (sketched or any(_is_linear(*one) for one in sites)):
        return found
    layers = [(name, layer, site) for site in gone for name, layer in ((site.name, site.module), *site.tied)]
    skipped = [_stays_dense(name, layer, site.kind, HEAD) for name, layer, site in layers]
    return replace(found, sites=sites, skipped=(*found.skipped, *skipped))


def _is_linear(site: Site, owner: Kind) -> bool:
    """Whether data sees rows of features reach it, as they are, whatever the kind is called."""
    view = owner.view(site.module)
    return not isinstance(view, str) and view.is_linear


def check_module(model: nn.Module) -> None:
    """Check that this is a plain, unwrapped module.

    Raises:
        ConfigTypeError: it is no module.
        WrappedModelError: it, or a part of it, is wrapped in DDP, FSDP or torch.compile.
    """
    check_is_module("model", model)
    advice = {
        "DistributedDataParallel": "give model.module first, then wrap the result",
        "DataParallel": "give model.module first, then wrap the result",
        "FullyShardedDataParallel": "give the plain model first, then wrap the result",
        "FSDPModule": "give the plain model first, then call fully_shard on the result",
        "OptimizedModule": "give the model that was compiled (model._orig_mod), then compile the result",
        "ScriptModule": "give the plain model first, then script or trace the result",
    }
    for name, module in model.named_modules():
        for base in type(module).__mro__:
            if base.__name__ in advice and base.__module__.startswith("torch."):
                where = f"its part {name}" if name else "the model"
                raise WrappedModelError(f"{where} is a {base.__name__}: {advice[base.__name__]}")


def check_weights(found: Found, *, meta_allowed: bool) -> None:
    """Check the weights of all sites.

    Raises:
        WeightError: one holds NaN or Inf, or has no data and that is not allowed.
    """
    layers = [layer for site, _ in found.sites for layer in ((site.name, site.module), *site.tied)]
    for layer_name, layer in layers:
        for name, parameter in layer.named_parameters():
            if not (parameter.is_meta and meta_allowed):
                check_values(parameter, dotted(layer_name, name))


def weight_names(module: nn.Module) -> tuple[str, ...]:
    """The parameters of a dense layer that are matrices or kernels, not biases."""
    named = _filled_parameters(module).items()
    return tuple(name for name, parameter in named if not name.endswith("bias") and parameter.dim() > 1)


def _filled_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that have a shape: those of a lazy layer get theirs with the first batch."""
    named = module.named_parameters()
    return {name: p for name, p in named if not isinstance(p, UninitializedTensorMixin)}


class _Names:
    """The names under which modules are registered in a model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._first = {module: name for name, module in model.named_modules()}
        self._places: dict[nn.Module, list[tuple[nn.Module, str]]] = defaultdict(list)
        for module in self._first:
            for key, child in module._modules.items():
                if child is not None:
                    self._places[child].append((module, key))

    def in_order(self) -> Iterator[str]:
        """The first name of each module, in the order of the model."""
        return iter(self._first.values())

    def first(self, module: nn.Module) -> str:
        """The name that `named_modules` gives it."""
        return self._first[module]

    def all(self, module: nn.Module, below: tuple[nn.Module, ...] = ()) -> Iterator[str]:
        """Every name, also those through a container that several names reach."""
        if module is self._model:
            yield ""
        elif module not in below:  # a module may be registered inside itself
            for parent, key in self._places[module]:
                for name in self.all(parent, (*below, module)):
                    yield dotted(name, key)


def _matches(
    module: nn.Module,
    names: _Names,
    name: str = "",
    seen: set[int] | None = None,
    parent: nn.Module | None = None,
) -> Iterator[_Match]:
    """Every module of a known kind, parents before children, each once, without their parts."""
    seen = set() if seen is None else seen
    if id(module) in seen or isinstance(module, SketchedLayer):
        return
    seen.add(id(module))
    owner = find_kind(module)
    if owner is not None:
        seen.update(id(part) for part in module.modules())
        aliases = tuple(alias for alias in names.all(module) if alias != name)
        if isinstance(parent, OwnWeight):
            aliases += parent.other_names(name.rpartition(".")[0])
        yield _Match(name, module, owner.matches(module) or "", owner, aliases, plain_form(module))
        return
    for child_name, child in module.named_children():
        yield from _matches(child, names, dotted(name, child_name), seen, module)


def _left_alone_by_default(match: _Match, head: nn.Module | None, config: SketchConfig) -> str | None:
    if is_picked(config.include, match.selectable):
        return None
    if match.owner.unless_included is not None:
        return match.owner.unless_included
    if match.module is head:
        return HEAD
    return None


def _router(model: nn.Module, match: _Match, counts: Container[int], config: SketchConfig) -> str | None:
    if not match.owner.may_be_head or is_picked(config.include, match.selectable):
        return None
    outputs, inputs = match.plain.weight.shape[:2]  # type: ignore[union-attr, index]
    return ROUTER if outputs in counts and is_router(model, match.name, outputs, inputs) else None


def _part_of_adapter(match: _Match, adapters: Sequence[str]) -> str | None:
    for name in adapters:
        if match.name.startswith(f"{name}." if name else ""):
            return f"part of the PEFT adapter {name or 'that the model is'}: call merge_and_unload() first"
    return None


def _read_directly(match: _Match, reading: Reading) -> str | None:
    if not match.name:
        return None  # the model is the layer itself, and its own forward was read
    made = match.plain is not match.module
    names = [name for name, _ in match.module.named_parameters()] if made else weight_names(match.module)
    for name in names:
        full = f"{match.name}.{name}"
        if full in reading.direct and reading.is_of_graph:
            return f"the graph uses its {name} elsewhere too, not as a layer"
        if full in reading.direct:
            if full in reading.opaque:
                return f"forward uses its {name} directly; torch.export.export(model, args) may show a layer"
            return f"forward uses its {name} directly: sketch torch.fx.symbolic_trace(model) instead"
    return None


def _output_head(
    model: nn.Module, matches: list[_Match], sketched: Sequence[tuple[str, SketchedLayer]]
) -> nn.Module | None:
    """The dense layer that makes the model's output, if it can be distinguished from the others.

    Hugging Face models name theirs. Elsewhere it is the last linear layer, if there are others, sketched
    ones among them, it changes the number of features, it is not one of a list of equal blocks, and no
    convolution is behind it, as in the decoder of a variational autoencoder.
    """
    if any(base.__name__ == "PreTrainedModel" for base in type(model).__mro__):
        named = model.get_output_embeddings()  # type: ignore[operator]
        if isinstance(named, nn.Module):
            return named
    linears = {match.module: match for match in matches if match.owner.may_be_head}
    made = {layer_type for kind in KINDS if kind.may_be_head for layer_type in kind.layers}
    stand_ins: set[nn.Module] = {layer for _, layer in sketched if type(layer) in made}
    candidates = stand_ins.union(linears)
    layers = [one for one in model.modules() if one in candidates or isinstance(one, _ConvNd)]
    if len(candidates) < 2 or layers[-1] not in linears:
        return None
    last = linears[layers[-1]]
    weight = last.plain.weight
    assert isinstance(weight, Tensor)
    if isinstance(weight, UninitializedTensorMixin):
        return None
    vocabularies = {one.num_embeddings for one in model.modules() if isinstance(one, nn.Embedding)}
    same_width = weight.shape[0] == weight.shape[1] and weight.shape[0] not in vocabularies
    return None if same_width or _is_in_blocks(model, last.name) else last.module


def _is_in_blocks(model: nn.Module, name: str) -> bool:
    """Whether a layer is inside a module of a list, or of a sequence of equal modules, or is of a stack."""
    parent = model
    for key in name.split(".")[:-1]:
        child = parent.get_submodule(key)
        if isinstance(parent, nn.ModuleList):
            return True
        others = parent.children() if isinstance(parent, nn.Sequential) else ()
        if any(one is not child and _sizes(one) == _sizes(child) for one in others):
            return True
        parent = child
    return isinstance(parent, nn.ModuleList | Matrices)


def _sizes(module: nn.Module) -> tuple[object, ...]:
    return type(module), [(name, one.shape) for name, one in _filled_parameters(module).items()]


def _users_of_weights(model: nn.Module) -> dict[int, list[tuple[str, nn.Module]]]:
    """Modules that hold each parameter, by the parameter's id."""
    users = defaultdict(list)
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                users[id(parameter)].append((name, module))
    return users


def _tied_groups(matches: list[_Match]) -> list[list[_Match]]:
    """The matches, those that have one weight in common together."""
    groups: dict[int, list[_Match]] = {}
    for match in matches:
        weight = match.module._parameters.get("weight")
        own = weight is None or match.plain._parameters["weight"] is not weight  # made of it
        groups.setdefault(id(match.module if own else weight), []).append(match)
    return list(groups.values())


def _can_lead(match: _Match, group: list[_Match]) -> bool:
    """Whether all others of the group can use the factors of this one's replacement."""
    others = (other for other in group if other is not match)
    return all(match.owner.can_share(match.module, other.module) for other in others)


def _unsafe_tie(
    match: _Match,
    group: list[_Match],
    leader: _Match | None,
    reasons: dict[str, str | None],
    users: dict[int, list[tuple[str, nn.Module]]],
) -> str | None:
    """Why a weight that others use must stay dense, or None."""
    parts = {id(part) for part in match.module.modules()}
    parts.update(id(other.module) for other in group)
    for name, parameter in match.module.named_parameters():
        if name in weight_names(match.module):
            for user, module in users[id(parameter)]:
                if id(module) not in parts:
                    return f"its {name} is shared with {user or 'the model itself'}, which stays dense"
    bias = match.module._parameters.get("bias")
    if bias is not None and match.plain._parameters.get("bias") is not bias:
        others = [user for user, module in users[id(bias)] if id(module) not in parts]
        if others:
            return f"the bias that it makes is of one that {others[0] or 'the model itself'} has too"
    for other in group:
        if other is match:
            continue
        if other.owner.unless_included is not None and reasons[other.name] is not None:
            return f"tied to {other.name}, an {other.kind}: left alone unless both are included"
        if reasons[other.name] is not None:
            return f"its weight is tied to {other.name}, which stays dense ({reasons[other.name]})"
        if leader is None and match.owner is other.owner and match.owner.why_no_ties is not None:
            return f"its weight is shared with {other.name}; {match.owner.why_no_ties}"
        if leader is None:
            return f"its weight is tied to {other.name}, a {other.kind}"
    return None


def _numbers(module: nn.Module) -> int:
    """How many numbers the weights of a dense layer hold, its biases aside."""
    named = _filled_parameters(module)
    return sum(named[name].numel() for name in weight_names(module))


def _stays_dense(name: str, module: nn.Module, kind: str, reason: str) -> LayerPlan:
    named = _filled_parameters(module)
    shapes = [tuple(named[weight].shape) for weight in weight_names(module)]
    numbers = sum(parameter.numel() for parameter in named.values())
    return LayerPlan(name, kind, shapes[0] if shapes else (), numbers, None, reason)


def _stays_sketched(name: str, layer: SketchedLayer) -> LayerPlan:
    return LayerPlan(name, type(layer).__name__, (), layer.stored_numbers, None, ALREADY_SKETCHED)
