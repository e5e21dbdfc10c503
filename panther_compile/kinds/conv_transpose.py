"""nn.ConvTranspose1d, 2d and 3d become SketchedConvTranspose1d, 2d and 3d.

Before:
    %y : call_module[target=up](args = (%x,))    up: ConvTranspose2d(I, O, kernel_size=(4, 4), stride=2)
After:
    %y : call_module[target=up](args = (%x,))    up: SketchedConvTranspose2d(Conv2d, ConvTranspose2d)
"""

# I in_channels, O out_channels, G groups, K numbers of a kernel
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from panther_compile.config import SketchConfig
from panther_compile.factorization.candidates import Candidate, LinearCandidate, kept_energies
from panther_compile.factorization.cost import device_class
from panther_compile.factorization.factorize import singular_values
from panther_compile.factorization.fit_matrix import FittedPair
from panther_compile.factorization.moments import thinned
from panther_compile.factorization.pivot import to_pivoted
from panther_compile.kinds.base import Functional, OnnxForm
from panther_compile.kinds.conv_calls import each
from panther_compile.kinds.convolution import ConvolutionKind
from panther_compile.kinds.view import LinearView
from panther_compile.kinds.weights import can_compute_spectrum, fit_matrix, fitted_record, numbers_of
from panther_compile.layers.base import SketchedLayer
from panther_compile.layers.conv_transpose import (
    SketchedConvTranspose,
    SketchedConvTranspose1d,
    SketchedConvTranspose2d,
    SketchedConvTranspose3d,
)
from panther_compile.records import Choice, Fitted, Unit

_LARGEST_METRIC = 2048  # rows of the matrix, above which errors of all patches count alike


class GroupedCandidate(Candidate):
    """The matrices (G, O / G K, I / G) of the groups as plain pairs of one rank.

    Args:
        matrices: the weight, or a meta tensor of its shape.
        energies: whether to compute what each rank keeps.
    """

    scheme = "channel"

    def __init__(self, matrices: Tensor, *, energies: bool) -> None:
        self._groups, self._rows, self._columns = matrices.shape
        self.max_rank = min(self._rows, self._columns)
        values = singular_values(matrices) if energies else None  # (G, max_rank)
        self.energies = None if values is None else kept_energies(values.square().sum(0).sqrt())

    def numbers(self, rank: int) -> int:
        """G r (O / G K + I / G)."""
        return self._groups * rank * (self._rows + self._columns)

    def macs(self, rank: int) -> int:
        """One multiply-add per stored weight and input position."""
        return self.numbers(rank)


class ConvTransposeView(LinearView):
    """A transposed convolution without groups: pixels times a matrix (O K, I); the bias stays."""

    is_linear = False

    def __init__(self, layer: nn.Module, layer_type: type[SketchedConvTranspose]) -> None:
        super().__init__(layer)
        self._layer_type = layer_type
        self._dense = cast(Any, layer)
        self.channel_dim = -1 - len(self._dense.kernel_size)

    @property
    def outputs(self) -> int:
        """Output channels, which each have K rows of the matrix."""
        return int(self._dense.out_channels)

    def weight_and_bias(self) -> tuple[Tensor, Tensor | None]:
        """The matrix; a pixel adds to many outputs, so that no shift of its mean is one of the bias."""
        return self._dense.weight.flatten(1).t(), None

    def rows(self, x: Tensor, kept: Tensor | None) -> Tensor:
        """The pixels."""
        pixels = x.movedim(self.channel_dim, -1)
        return thinned(pixels.reshape(-1, pixels.shape[-1]))

    def metric(self, gradient: Tensor | None) -> Tensor | None:
        """G at each number of a kernel, overlaps aside."""
        taps = math.prod(self._dense.kernel_size)
        if gradient is None or self.outputs * taps > _LARGEST_METRIC:
            return None
        return torch.kron(gradient, torch.eye(taps, dtype=gradient.dtype, device=gradient.device))

    def build(self, found: FittedPair) -> SketchedLayer:
        """See `LinearView`."""
        assert found.right is not None
        left, right = found.left.unsqueeze(0), found.right.unsqueeze(0)
        return self._layer_type.from_stored(left, right, self._dense.bias, self.layer, start=found.start)


class _ConvTransposeKind(ConvolutionKind):
    """See the module's docstring."""

    methods = ("forward",)
    _layer_type: ClassVar[type[SketchedConvTranspose]]

    def view(self, module: nn.Module) -> ConvTransposeView | str:
        """See `Kind.view`."""
        return ConvTransposeView(module, self._layer_type) if module.groups == 1 else "a grouped kernel"

    def unit(self, name: str, module: nn.Module, *, energies: bool) -> Unit:
        """See `Kind.unit`; pivoted without groups."""
        dense: Any = module
        matrices, bias_numbers = _matrices(dense), numbers_of(dense.bias)
        groups, rows, columns = matrices.shape
        energies = energies and can_compute_spectrum(matrices[0])
        candidates: tuple[Candidate, ...] = ()
        if min(rows, columns) > 1:
            values = singular_values(matrices[0]) if energies and groups == 1 else None
            candidates = (
                LinearCandidate(rows, columns, "pivoted", singular_values=values)
                if groups == 1
                else GroupedCandidate(matrices, energies=energies),
            )
        return Unit(
            name,
            tuple(dense.weight.shape),
            dense.weight.numel() + bias_numbers,
            bias_numbers,
            candidates,
            device_class(dense.weight.device),
            groups,
            cost_shape=(groups * rows, columns),
        )

    def sketch(
        self, name: str, module: nn.Module, choice: Choice, config: SketchConfig
    ) -> tuple[SketchedLayer, Fitted]:
        """See `Kind.sketch`."""
        dense: Any = module
        matrices = _matrices(dense)
        pairs = [fit_matrix(matrix, name, choice.rank, config) for matrix in matrices]
        start = None
        left, right = torch.stack([one.left for one in pairs]), torch.stack([one.right for one in pairs])
        if choice.scheme == "pivoted":
            residual = pairs[0].residual(matrices[0])
            found = to_pivoted(left[0], right[0], dtype=dense.weight.dtype, residual=residual)
            assert found is not None
            left, right, start = found.left.unsqueeze(0), found.right.unsqueeze(0), found.start
        layer = self._layer_type.from_stored(left, right, dense.bias, module, start=start)
        return layer, fitted_record(layer, dense.weight, name, pairs[0].method, config)

    def empty(self, module: nn.Module, choice: Choice, device: torch.device | str) -> SketchedLayer:
        """See `Kind.empty`."""
        dense: Any = module
        return self._layer_type(
            **self._layer_type.geometry(module),
            rank=choice.ranks[0],
            scheme=choice.scheme,
            device=device,
            dtype=dense.weight.dtype,
        )


def _matrices(dense: Any) -> Tensor:
    """The weight (I, O / G, ...) as matrices (G, O / G K, I / G)."""
    weight: Tensor = dense.weight.detach()
    return weight.reshape(dense.groups, dense.in_channels // dense.groups, -1).transpose(1, 2)


class ConvTranspose1dKind(_ConvTransposeKind):
    """See the module's docstring."""

    wanted, _layer_type, layers = "nn.ConvTranspose1d", SketchedConvTranspose1d, (SketchedConvTranspose1d,)


class ConvTranspose2dKind(_ConvTransposeKind):
    """See the module's docstring."""

    wanted, _layer_type, layers = "nn.ConvTranspose2d", SketchedConvTranspose2d, (SketchedConvTranspose2d,)


class ConvTranspose3dKind(_ConvTransposeKind):
    """See the module's docstring."""

    wanted, _layer_type, layers = "nn.ConvTranspose3d", SketchedConvTranspose3d, (SketchedConvTranspose3d,)


def _from_call(
    dense_type: type[nn.Module], axes: int, weight: Tensor, has_bias: bool, options: Mapping[str, Any]
) -> nn.Module | None:
    if weight.dim() != 2 + axes:
        return None
    kernel, given = tuple(weight.shape[2:]), {k: each(v, axes) for k, v in options.items()}
    outputs = weight.shape[1] * options.get("groups", 1)
    return dense_type(len(weight), outputs, kernel, bias=has_bias, device="meta", **given)


def _from_node(dense_type: type[nn.Module], weight: Tensor, attributes: Mapping[str, Any]) -> nn.Module:
    """The layer of a node, padding aside, which the node keeps."""
    groups = attributes.get("group", 1)
    names = {"stride": "strides", "dilation": "dilations"}
    given = {name: tuple(attributes[old]) for name, old in names.items() if old in attributes}
    size = len(weight), weight.shape[1] * groups, tuple(weight.shape[2:])
    layer = dense_type(*size, groups=groups, bias=False, device="meta", **given)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
_ATEN = torch.ops.aten
_calls: tuple[Callable[..., Any], ...]
for _axes, _kind, _calls in (
    (1, ConvTranspose1dKind, (F.conv_transpose1d, _ATEN.conv_transpose1d.default)),
    (2, ConvTranspose2dKind, (F.conv_transpose2d, _ATEN.conv_transpose2d.input)),
    (3, ConvTranspose3dKind, (F.conv_transpose3d, _ATEN.conv_transpose3d.input)),
):
    _dense_type, _what = _kind._layer_type.dense_type, f"a {_axes}-D transposed convolution"
    _kind.functionals = (Functional(_calls, _ARGUMENTS, partial(_from_call, _dense_type, _axes)),)
    _of_node = partial(_from_node, _dense_type)
    _kind.onnx = OnnxForm(("ConvTranspose",), 2 + _axes, _what, _of_node, pads_input=False)
