"""nn.Conv1d becomes SketchedConv1d: a convolution of two axes, the second one of length 1.

Before:
    %y : call_module[target=conv](args = (%x,))      conv: Conv1d(I, O, kernel_size=(3,))
After:
    %y : call_module[target=conv](args = (%x,))      conv: SketchedConv1d(down: Conv1d, up: Conv1d)
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from panther_compile.config import SketchConfig
from panther_compile.factorization.fit_matrix import FittedPair
from panther_compile.kinds.base import Functional, Kind, OnnxForm
from panther_compile.kinds.conv2d import Conv2dKind, Conv2dView, why_not_convolution
from panther_compile.kinds.kernel_metric import KernelSums
from panther_compile.kinds.view import LinearView
from panther_compile.layers.base import SketchedLayer
from panther_compile.layers.conv1d import SketchedConv1d, geometry
from panther_compile.layers.conv2d import SketchedConv2d
from panther_compile.models.watched import Arrival
from panther_compile.records import Choice, Fitted, Unit

_PLANE = Conv2dKind()


def as_plane(conv: nn.Conv1d) -> nn.Conv2d:
    """The same convolution with a second axis of length 1, on views of its tensors."""
    (kernel,), (stride,), (dilation,) = conv.kernel_size, conv.stride, conv.dilation
    plane = nn.Conv2d(
        conv.in_channels,
        conv.out_channels,
        (kernel, 1),
        (stride, 1),
        conv.padding if isinstance(conv.padding, str) else (conv.padding[0], 0),
        (dilation, 1),
        conv.groups,
        conv.bias is not None,
        conv.padding_mode,  # type: ignore[arg-type]
        device="meta",
    )
    plane.weight = nn.Parameter(conv.weight.detach().unsqueeze(-1), conv.weight.requires_grad)
    plane.bias = None if conv.bias is None else nn.Parameter(conv.bias.detach(), conv.bias.requires_grad)
    return plane


class Conv1dView(LinearView):
    """See `Conv2dView`."""

    channel_dim = -2
    is_linear = False
    layer: nn.Conv1d

    def __init__(self, layer: nn.Conv1d) -> None:
        super().__init__(layer)
        self._plane = Conv2dView(as_plane(layer))
        self.is_matrix = self._plane.is_matrix

    def weight_and_bias(self) -> tuple[Tensor, Tensor | None]:
        """See `LinearView`."""
        return self._plane.weight_and_bias()

    def rows(self, x: Tensor, kept: Tensor | None) -> Tensor:
        """See `LinearView`."""
        return self._plane.rows(x.unsqueeze(-1), kept)

    def build(self, found: FittedPair) -> SketchedLayer:
        """See `LinearView`."""
        return _on_line(self._plane.build(found), self.layer)

    def kernel_sums(self) -> KernelSums:
        """See `LinearView`."""
        return _LineSums(self._plane.layer)

    def fit(
        self,
        name: str,
        choice: Choice,
        config: SketchConfig,
        arrivals: Sequence[Arrival],
        gradient: Tensor | None,
        ridge: float,
    ) -> tuple[SketchedLayer, float]:
        """See `LinearView`."""
        layer, error = self._plane.fit(name, choice, config, _on_plane(arrivals), gradient, ridge)
        return _on_line(layer, self.layer), error


class _LineSums(KernelSums):
    """Sums over inputs (N, I, L)."""

    def add(self, x: Tensor) -> None:
        """See `KernelSums`."""
        super().add(x.unsqueeze(-1))


class Conv1dKind(Kind):
    """See the module's docstring."""

    wanted = "nn.Conv1d"
    layers = (SketchedConv1d,)
    why_no_ties = "convolutions that share a kernel stay dense"

    def matches(self, module: nn.Module) -> str | None:
        """Called "Conv1d"."""
        return "Conv1d" if isinstance(module, nn.Conv1d) else None

    def why_not(self, module: nn.Module) -> str | None:
        """See `Kind.why_not`."""
        assert isinstance(module, nn.Conv1d)
        return why_not_convolution(module, nn.Conv1d)

    def view(self, module: nn.Module) -> Conv1dView:
        """See `Kind.view`."""
        assert isinstance(module, nn.Conv1d)
        return Conv1dView(module)

    def unit(self, name: str, module: nn.Module, config: SketchConfig, *, energies: bool) -> Unit:
        """See `Kind.unit`."""
        assert isinstance(module, nn.Conv1d)
        unit = _PLANE.unit(name, as_plane(module), config, energies=energies)
        return replace(unit, shape=tuple(module.weight.shape), cost_shape=unit.shape)

    def sketch(
        self, name: str, module: nn.Module, choice: Choice, config: SketchConfig
    ) -> tuple[SketchedLayer, Fitted]:
        """See `Kind.sketch`."""
        assert isinstance(module, nn.Conv1d)
        plane, fitted = _PLANE.sketch(name, as_plane(module), choice, config)
        return _on_line(plane, module), fitted

    def empty(self, module: nn.Module, choice: Choice, device: torch.device | str) -> SketchedLayer:
        """See `Kind.empty`."""
        assert isinstance(module, nn.Conv1d)
        return SketchedConv1d(
            **geometry(module),
            rank=choice.ranks if choice.scheme == "tucker2" else choice.ranks[0],
            scheme=choice.scheme,
            device=device,
            dtype=module.weight.dtype,
        )


def _on_line(plane: SketchedLayer, like: nn.Conv1d) -> SketchedConv1d:
    assert isinstance(plane, SketchedConv2d)
    return SketchedConv1d.from_plane(plane, like)


def _on_plane(arrivals: Sequence[Arrival]) -> list[Arrival]:
    return [replace(one, x=one.x.unsqueeze(-1), z=one.z.unsqueeze(-1), residuals=None) for one in arrivals]


def _from_call(weight: Tensor, has_bias: bool, options: Mapping[str, Any]) -> nn.Module | None:
    if weight.dim() != 3:
        return None
    groups = options.get("groups", 1)
    given = {key: _one(options[key]) for key in ("stride", "padding", "dilation") if key in options}
    size = weight.shape[1] * groups, len(weight), weight.shape[2]
    return nn.Conv1d(*size, groups=groups, bias=has_bias, device="meta", **given)


def _one(value: Any) -> Any:
    return value[0] if isinstance(value, list | tuple) else value


def _from_node(weight: Tensor, attributes: Mapping[str, Any]) -> nn.Module | str:
    outputs, inputs, kernel = weight.shape
    if kernel == 1 and any(attributes.get("pads", ())):
        return "a kernel of 1 with padding"
    groups = attributes.get("group", 1)
    stride, dilation = (_one(attributes.get(name, 1)) for name in ("strides", "dilations"))
    layer = nn.Conv1d(
        inputs * groups, outputs, kernel, stride, 0, dilation, groups, bias=False, device="meta"
    )
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def _fit_node(
    dense: nn.Module,
    has_bias: bool,
    name: str,
    choice: Choice,
    config: SketchConfig,
    arrivals: Sequence[Arrival],
) -> tuple[SketchedLayer, Tensor | None, float]:
    assert isinstance(dense, nn.Conv1d)
    assert _PLANE.onnx is not None
    assert _PLANE.onnx.fit is not None
    plane = as_plane(dense)
    layer, shift, error = _PLANE.onnx.fit(plane, has_bias, name, choice, config, _on_plane(arrivals))
    return _on_line(layer, dense), shift, error


Conv1dKind.functionals = (
    Functional(
        (F.conv1d, torch.ops.aten.conv1d.default, torch.ops.aten.conv1d.padding),
        ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
        _from_call,
    ),
)
Conv1dKind.onnx = OnnxForm(("Conv",), 3, "a 1-D convolution", _from_node, fit=_fit_node)
