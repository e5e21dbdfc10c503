"""nn.Conv1d and nn.Conv3d become SketchedConv1d and 3d, by a convolution of two axes that computes the same.

Before:
    %y : call_module[target=conv](args = (%x,))      conv: Conv3d(I, O, kernel_size=(3, 3, 3))
After:
    %y : call_module[target=conv](args = (%x,))      conv: SketchedConv3d(down: Conv3d, up: Conv3d)

A kernel of three axes, kd x kh x kw, is one of kd x (kh kw) that steps along its width by kh kw, over an
input in which the kh kw pixels that it reads at one position lie beside each other.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from panther_compile.config import SketchConfig
from panther_compile.factorization.fit_matrix import FittedPair
from panther_compile.kinds.base import OnnxForm
from panther_compile.kinds.conv2d import Conv2dKind, Conv2dView, fit_node
from panther_compile.kinds.conv_calls import functional, of_node
from panther_compile.kinds.convolution import ConvolutionKind
from panther_compile.kinds.fit_conv2d import fit_conv2d_to
from panther_compile.kinds.kernel_metric import KernelSums, PatchMoments
from panther_compile.kinds.view import LinearView
from panther_compile.kinds.windows import rows_read
from panther_compile.layers.base import SketchedLayer
from panther_compile.layers.conv2d import SketchedConv2d
from panther_compile.layers.conv_on_plane import (
    SketchedConv1d,
    SketchedConv3d,
    SketchedOnPlane,
    on_plane,
)
from panther_compile.models.watched import Arrival, rows_of
from panther_compile.records import Choice, Fitted, Unit

_PLANE = Conv2dKind()


def as_plane(conv: nn.Conv1d | nn.Conv3d) -> nn.Conv2d:
    """The convolution of two axes that has the same kernel, laid on a plane; views of its tensors."""
    kernel = on_plane(conv.kernel_size)
    plane = nn.Conv2d(
        conv.in_channels,
        conv.out_channels,
        kernel,
        (conv.stride[0], kernel[1]),
        0,
        (conv.dilation[0], 1),
        conv.groups,
        conv.bias is not None,
        device="meta",
    )
    weight = conv.weight.detach()
    plane.weight = nn.Parameter(weight.reshape(*weight.shape[:2], *kernel), conv.weight.requires_grad)
    plane.bias = None if conv.bias is None else nn.Parameter(conv.bias.detach(), conv.bias.requires_grad)
    return plane


class OnPlaneView(LinearView):
    """See `Conv2dView`."""

    is_linear = False
    layer: nn.Conv1d | nn.Conv3d

    def __init__(self, layer: nn.Conv1d | nn.Conv3d) -> None:
        super().__init__(layer)
        self._plane = Conv2dView(as_plane(layer))
        self.is_matrix = self._plane.is_matrix
        self.channel_dim = -1 - len(layer.kernel_size)

    def weight_and_bias(self) -> tuple[Tensor, Tensor | None]:
        """See `LinearView`."""
        return self._plane.weight_and_bias()

    def rows(self, x: Tensor, kept: Tensor | None) -> Tensor:
        """See `LinearView`."""
        return rows_read(self.layer, x)

    def build(self, found: FittedPair) -> SketchedLayer:
        """See `LinearView`."""
        return _from_plane(self._plane.build(found), self.layer)

    def input_sums(self, *, centred: bool | None = None) -> KernelSums:
        """See `LinearView`."""
        return KernelSums(self._plane.layer, self.layer, centred=centred)

    def cut(
        self,
        name: str,
        choice: Choice,
        config: SketchConfig,
        moments: PatchMoments,
        gradient: Tensor | None,
    ) -> SketchedLayer:
        """See `LinearView`."""
        return _from_plane(self._plane.cut(name, choice, config, moments, gradient), self.layer)

    def fit(
        self,
        name: str,
        choice: Choice,
        config: SketchConfig,
        arrivals: Sequence[Arrival],
        masks: Sequence[Tensor | None],
        gradient: Tensor | None,
        ridge: float,
        stored: bool,
    ) -> tuple[SketchedLayer, float, int]:
        """See `LinearView`."""
        layer, error = fit_conv2d_to(
            self._plane.layer, name, choice, config, arrivals, gradient, ridge, self.layer, whole=stored
        )
        return _from_plane(layer, self.layer), error, rows_of(arrivals, self.channel_dim)


class _OnPlaneKind(ConvolutionKind):
    """See the module's docstring."""

    _speed: ClassVar[float] = 1.0  # see `Unit`

    def view(self, module: nn.Module) -> OnPlaneView:
        """See `Kind.view`."""
        return OnPlaneView(_dense(module))

    def unit(self, name: str, module: nn.Module, *, energies: bool) -> Unit:
        """See `Kind.unit`."""
        dense = _dense(module)
        unit = _PLANE.unit(name, as_plane(dense), energies=energies)
        without = _layer_type(dense).without
        return replace(
            unit,
            shape=tuple(dense.weight.shape),
            candidates=tuple(one for one in unit.candidates if one.scheme != without),
            stride=on_plane(dense.stride),
            cost_shape=unit.shape,
            speed=self._speed,
        )

    def sketch(
        self, name: str, module: nn.Module, choice: Choice, config: SketchConfig
    ) -> tuple[SketchedLayer, Fitted]:
        """See `Kind.sketch`."""
        dense = _dense(module)
        plane, fitted = _PLANE.sketch(name, as_plane(dense), choice, config)
        return _from_plane(plane, dense), fitted

    def empty(self, module: nn.Module, choice: Choice, device: torch.device | str) -> SketchedLayer:
        """See `Kind.empty`."""
        dense = _dense(module)
        layer_type = _layer_type(dense)
        return layer_type(
            **layer_type.geometry(dense),
            rank=choice.ranks if choice.scheme == "tucker2" else choice.ranks[0],
            scheme=choice.scheme,
            device=device,
            dtype=dense.weight.dtype,
        )


class Conv1dKind(_OnPlaneKind):
    """See the module's docstring."""

    wanted, layers = "nn.Conv1d", (SketchedConv1d,)


class Conv3dKind(_OnPlaneKind):
    """See the module's docstring."""

    wanted, layers = "nn.Conv3d", (SketchedConv3d,)
    # Of r3d_18's convolutions at half and nine tenths of their numbers "channel" ran at .7 to 1.07 of what
    # `cost.py` predicts, "tucker2" at .6 to .96, "spatial" at .54 to .83: one core of an AMD EPYC.
    _speed = 0.75


def _dense(module: nn.Module) -> nn.Conv1d | nn.Conv3d:
    assert isinstance(module, nn.Conv1d | nn.Conv3d)
    return module


def _layer_type(conv: nn.Conv1d | nn.Conv3d) -> type[SketchedOnPlane]:
    """The type of its replacement."""
    return SketchedConv1d if isinstance(conv, nn.Conv1d) else SketchedConv3d


def _from_plane(plane: SketchedLayer, like: nn.Conv1d | nn.Conv3d) -> SketchedOnPlane:
    assert isinstance(plane, SketchedConv2d)
    return _layer_type(like).from_plane(plane, like)


def _fit_node(
    dense: nn.Module,
    has_bias: bool,
    name: str,
    choice: Choice,
    config: SketchConfig,
    arrivals: Sequence[Arrival],
) -> tuple[SketchedLayer, Tensor | None, float]:
    conv = _dense(dense)
    layer, shift, error = fit_node(as_plane(conv), has_bias, name, choice, config, arrivals, conv)
    return _from_plane(layer, conv), shift, error


_ATEN = torch.ops.aten
_of_node_1d, _of_node_3d = (partial(of_node, one, "a kernel of 1") for one in (nn.Conv1d, nn.Conv3d))
Conv1dKind.functionals = (functional(nn.Conv1d, 1, (F.conv1d, _ATEN.conv1d.default, _ATEN.conv1d.padding)),)
Conv3dKind.functionals = (functional(nn.Conv3d, 3, (F.conv3d, _ATEN.conv3d.default, _ATEN.conv3d.padding)),)
Conv1dKind.onnx = OnnxForm(("Conv",), 3, "a 1-D convolution", _of_node_1d, fit=_fit_node)
Conv3dKind.onnx = OnnxForm(("Conv",), 5, "a 3-D convolution", _of_node_3d, fit=_fit_node)
