"""The layers of a model that data can fit, and copies of the model in which they are watched."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from panther_compile.calibration.fit_conv2d import channel_rows
from panther_compile.calibration.outputs import kept_rows
from panther_compile.calibration.watched import Side, Watched, copy_sharing
from panther_compile.layers.attention import (
    PROJECTIONS,
    SketchedMultiheadAttention,
    dense_projection,
    projection_weights,
)
from panther_compile.passes.sketch_linear import weight_and_bias
from panther_compile.records import Site


@dataclass(frozen=True, slots=True)
class Target:
    """One weight that data can fit.

    Attributes:
        name: of its unit, as plans name it.
        site: that it belongs to.
        layer: `nn.Linear`, `Conv1D` or `nn.Conv2d` with the dense weight; a projection of an attention is
            an `nn.Linear` made for it.
    """

    name: str
    site: Site
    layer: nn.Module

    @property
    def is_matrix(self) -> bool:
        """Whether its weight is a matrix: a linear layer, or a 1 x 1 convolution without groups."""
        layer = self.layer
        return not isinstance(layer, nn.Conv2d) or (layer.kernel_size == (1, 1) and layer.groups == 1)

    @property
    def outputs(self) -> int:
        """Output features, O."""
        return len(self.weight_and_bias()[0])

    @property
    def channel_dim(self) -> int:
        """Which dimension of its output has the output features."""
        return -3 if isinstance(self.layer, nn.Conv2d) else -1

    def weight_and_bias(self) -> tuple[Tensor, Tensor | None]:
        """The weight (O, I), of a convolution (O, I taps), and the bias."""
        if isinstance(self.layer, nn.Conv2d):
            return self.layer.weight.flatten(1), self.layer.bias
        return weight_and_bias(self.layer)

    def rows(self, x: Tensor, kept: Tensor | None) -> Tensor:
        """The layer's input as rows (n, I), padded positions left out."""
        if isinstance(self.layer, nn.Conv2d):
            return channel_rows(self.layer, x)
        return kept_rows(x, kept)


def find_targets(sites: Sequence[Site]) -> dict[str, Target]:
    """Every weight of the sites that data can fit, by the name of its unit.

    Look-ups are no matter of data, and a weight that several layers use is not any one layer's to fit.
    """
    found: list[Target] = []
    for site in sites:
        if site.tied:
            continue
        if isinstance(site.module, nn.MultiheadAttention):
            prefix = f"{site.name}." if site.name else ""
            for name, (weight, bias) in projection_weights(site.module).items():
                found.append(Target(prefix + name, site, dense_projection(weight, bias)))
        elif site.kind != "Embedding":
            found.append(Target(site.name, site, site.module))
    return {target.name: target for target in found}


def watch(model: nn.Module, targets: Mapping[str, Target]) -> Side:
    """A copy of the model, sharing its tensors, that has a stand-in for each target.

    Raises:
        ConfigTypeError: the model cannot be copied.
    """
    watched: dict[str, Watched] = {}
    new: dict[nn.Module, nn.Module] = {}
    for target in targets.values():
        watched[target.name] = Watched(target.name, copy_sharing(target.layer, {}))
        if not isinstance(target.site.module, nn.MultiheadAttention):
            new[target.site.module] = watched[target.name]
    for site in {target.site.module: target.site for target in targets.values()}.values():
        attention = site.module
        if isinstance(attention, nn.MultiheadAttention):
            prefix = f"{site.name}." if site.name else ""
            dense = projection_weights(attention)
            projections = {
                name: watched[prefix + name] if prefix + name in watched else dense_projection(*dense[name])
                for name in PROJECTIONS
            }
            new[attention] = SketchedMultiheadAttention.from_projections(attention, projections)
    return Side(copy_sharing(model, new), watched)
