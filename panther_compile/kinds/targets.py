"""The layers of a model that data can fit, and copies of the model in which layers are watched."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor, nn

from panther_compile.factorization.fit_matrix import FittedPair
from panther_compile.kinds.parts import scheme_of_parts, unit_name
from panther_compile.kinds.registry import kind_of
from panther_compile.kinds.row_space import view_within_memory
from panther_compile.kinds.view import LinearView
from panther_compile.layers.base import SketchedLayer
from panther_compile.models.watched import Follower, Side, Watched, copy_sharing
from panther_compile.records import Site


@dataclass(frozen=True, slots=True)
class Target:
    """One weight that data can fit.

    Attributes:
        name: name of its unit, as plans have it.
        suffix: end of the name, among the parts of the site; empty where the site is no composite.
        site: the site that it belongs to.
        layer: the dense one, of one weight; a part of a composite layer is made for it.
        view: what data sees of it.
        together: names of parts of the site that may share a factor, its own among them; each has inputs of
            its own. Empty where there are none.
        ties: what data sees of the other layers that have its weight, by name.
    """

    name: str
    suffix: str
    site: Site
    layer: nn.Module
    view: LinearView
    together: tuple[str, ...] = ()
    ties: Mapping[str, LinearView] = field(default_factory=dict)

    @property
    def shared_scheme(self) -> str:
        """The scheme in which it may share a factor: the input factor of layers of one input."""
        return scheme_of_parts(self.shape) if self.together else "pivoted"

    @property
    def outputs(self) -> int:
        """Output features of the layer."""
        return self.view.outputs

    @property
    def shape(self) -> torch.Size:
        """Output and input features (O, I): the shape of the weight, seen as a matrix."""
        return self.weight_and_bias()[0].shape

    def weight_and_bias(self) -> tuple[Tensor, Tensor | None]:
        """The weight as a matrix (O, I), and the bias."""
        return self.view.weight_and_bias()

    def rows(self, x: Tensor, kept: Tensor | None) -> Tensor:
        """The layer's input as rows (n, I), padded positions left out."""
        return self.view.rows(x, kept)

    def build(self, found: FittedPair) -> SketchedLayer:
        """The replacement that stores what was fitted."""
        return self.view.build(found)


def most_are(targets: Iterable[Target], holds: Callable[[Target], bool]) -> bool:
    """Whether it holds of the targets that have most of the numbers."""
    sizes = [(target.shape.numel(), holds(target)) for target in targets]
    return 2 * sum(size for size, is_so in sizes if is_so) > sum(size for size, _ in sizes)


def find_targets(sites: Sequence[Site]) -> tuple[dict[str, Target], dict[str, str]]:
    """Every weight of the sites that data can fit, by the name of its unit; why it leaves the others alone.

    A weight that several layers use is not any one layer's to fit, but a table is, see `ties`.
    """
    found: dict[str, Target] = {}
    left_alone: dict[str, str] = {}
    for site in sites:
        kind = kind_of(site.module)
        sets = [tuple(unit_name(site, one) for one in names) for names in kind.may_share(site.module)]
        together = {name: names for names in sets for name in names}
        for suffix, part in kind.parts(site.module).items():
            view = view_within_memory(kind_of(part), part)
            name = unit_name(site, suffix)
            if isinstance(view, str):
                left_alone[name] = view
            elif site.tied and not view.is_table:
                left_alone[name] = "several layers use it"
            else:
                ties = {other: _seen(layer) for other, layer in site.tied}
                found[name] = Target(name, suffix, site, part, view, together.get(name, ()), ties)
    return found, left_alone


def _seen(layer: nn.Module) -> LinearView:
    """What data sees of a layer that has a table in common with others, a table too or a linear one."""
    view = kind_of(layer).view(layer)
    assert isinstance(view, LinearView)
    return view


def watch(
    model: nn.Module, targets: Mapping[str, Target], others: Mapping[str, nn.Module] = MappingProxyType({})
) -> Side:
    """A copy of the model, sharing its tensors, in which the layer of each target is watched.

    Layers that have its weight follow it.

    Args:
        model: is left as it is.
        targets: by name.
        others: modules of the model that are watched too, by names that no target has.

    Raises:
        ConfigTypeError: the model cannot be copied.
    """
    layers = {one.name: (one.site.module, one.suffix, one.layer) for one in targets.values()}
    tied = {one.name: dict(one.site.tied) for one in targets.values() if one.ties}
    return watch_layers(model, layers, tied, others)


def watch_layers(
    model: nn.Module,
    layers: Mapping[str, tuple[nn.Module, str, nn.Module]],
    tied: Mapping[str, Mapping[str, nn.Module]] = MappingProxyType({}),
    others: Mapping[str, nn.Module] = MappingProxyType({}),
) -> Side:
    """The same for any layers.

    Args:
        model: is left as it is.
        layers: by name, the module of the model that each is a part of, its suffix there, and itself.
        tied: modules of the model that have the weight of one of these, by its name and their own.
        others: see `watch`.

    Raises:
        ConfigTypeError: the model cannot be copied.
    """
    watched: dict[str, Watched] = {}
    of_module: dict[nn.Module, dict[str, nn.Module]] = defaultdict(dict)
    for name, (module, suffix, layer) in layers.items():
        watched[name] = of_module[module][suffix] = Watched(name, copy_sharing(layer, {}))
    new: dict[nn.Module, nn.Module] = {}
    for module, own in of_module.items():
        kind = kind_of(module)
        new[module] = kind.assemble(module, own if set(own) == {""} else kind.parts(module) | own)
    for name, module in others.items():
        new[module] = watched[name] = Watched(name, copy_sharing(module, {}))
    followers: dict[str, Watched] = {}
    for leader, others in tied.items():
        share = kind_of(layers[leader][0]).share
        for name, module in others.items():
            follower = Follower(name, copy_sharing(module, {}), watched[leader], share)
            new[module] = followers[name] = follower
    return Side(copy_sharing(model, new), watched, followers)
