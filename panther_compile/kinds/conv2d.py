"""nn.Conv2d becomes SketchedConv2d, a chain of two or three convolutions.

Before:
    %y : call_module[target=conv](args = (%x,))      conv: Conv2d(I, O, kernel_size=(3, 3))
After:
    %y : call_module[target=conv](args = (%x,))      conv: SketchedConv2d(down: Conv2d, up: Conv2d)
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from panther_compile.config import SketchConfig
from panther_compile.factorization.conv2d import conv_candidates
from panther_compile.factorization.cost import device_class
from panther_compile.factorization.fit_matrix import FittedPair
from panther_compile.kinds.base import OnnxForm
from panther_compile.kinds.conv_calls import functional, of_node
from panther_compile.kinds.convolution import ConvolutionKind
from panther_compile.kinds.fit_conv2d import cut_conv2d, fit_conv2d_to, fit_kernel
from panther_compile.kinds.kernel_metric import KernelSums, PatchMoments
from panther_compile.kinds.view import LinearView
from panther_compile.kinds.weights import can_compute_spectrum, fit_matrix, fitted_record, numbers_of
from panther_compile.kinds.windows import Convolution, rows_read
from panther_compile.layers.base import SketchedLayer, copy_into
from panther_compile.layers.conv2d import SketchedConv2d
from panther_compile.models.watched import Arrival, rows_of
from panther_compile.records import Choice, Fitted, Unit


class Conv2dView(LinearView):
    """A convolution: a matrix on pixels where it is 1 x 1 without groups, else a kernel (O, I taps)."""

    channel_dim = -3
    is_linear = False
    layer: nn.Conv2d

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__(layer)
        self.is_matrix = layer.kernel_size == (1, 1) and layer.groups == 1

    def weight_and_bias(self) -> tuple[Tensor, Tensor | None]:
        """See `LinearView`."""
        return self.layer.weight.flatten(1), self.layer.bias

    def rows(self, x: Tensor, kept: Tensor | None) -> Tensor:
        """The pixels that are read, of a k x k kernel all of them; no mask is for pixels."""
        return rows_read(self.layer, x)

    def build(self, found: FittedPair) -> SketchedLayer:
        """See `LinearView`."""
        assert found.right is not None
        kernels = (found.right[..., None, None], found.left[..., None, None])
        scheme = "channel" if found.start is None else "pivoted"
        conv = SketchedConv2d.from_kernels(scheme, kernels, self.layer, start=found.start or 0)
        if found.bias is not None and conv.up.bias is not None:
            copy_into(conv.up.bias, found.bias)
        return conv

    def input_sums(self, *, centred: bool | None = None) -> KernelSums:
        """See `LinearView`."""
        return KernelSums(self.layer, centred=centred)

    def cut(
        self,
        name: str,
        choice: Choice,
        config: SketchConfig,
        moments: PatchMoments,
        gradient: Tensor | None,
    ) -> SketchedConv2d:
        """See `LinearView`."""
        return cut_conv2d(self.layer, name, choice, config, moments, gradient)

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
            self.layer, name, choice, config, arrivals, gradient, ridge, whole=stored
        )
        return layer, error, rows_of(arrivals, self.channel_dim)


class Conv2dKind(ConvolutionKind):
    """See the module's docstring."""

    wanted = "nn.Conv2d"
    layers = (SketchedConv2d,)

    def view(self, module: nn.Module) -> Conv2dView:
        """See `Kind.view`."""
        assert isinstance(module, nn.Conv2d)
        return Conv2dView(module)

    def unit(self, name: str, module: nn.Module, *, energies: bool) -> Unit:
        """See `Kind.unit`."""
        assert isinstance(module, nn.Conv2d)
        weight, bias_numbers = module.weight.detach(), numbers_of(module.bias)
        energies = energies and can_compute_spectrum(weight)
        return Unit(
            name,
            tuple(weight.shape),
            weight.numel() + bias_numbers,
            bias_numbers,
            conv_candidates(weight, module.groups, compute_energies=energies),
            device_class(weight.device),
            module.groups,
            module.stride,  # type: ignore[arg-type]
        )

    def sketch(
        self, name: str, module: nn.Module, choice: Choice, config: SketchConfig
    ) -> tuple[SketchedLayer, Fitted]:
        """See `Kind.sketch`; a 1 x 1 kernel is a matrix."""
        assert isinstance(module, nn.Conv2d)
        weight = module.weight.detach()
        if choice.scheme == "pivoted":
            matrix = weight.flatten(1)
            low_rank = fit_matrix(matrix, name, choice.rank, config)
            residual, method = low_rank.residual(matrix), low_rank.method
            layer = SketchedConv2d.from_factors(low_rank.left, low_rank.right, module, residual=residual)
        else:
            on_device = weight if config.device is None else weight.to(config.device)
            found = fit_kernel(on_device, module.groups, name, choice, config)
            layer, method = SketchedConv2d.from_kernels(choice.scheme, found.kernels, module), found.method
        return layer, fitted_record(layer, weight, name, method, config)

    def empty(self, module: nn.Module, choice: Choice, device: torch.device | str) -> SketchedLayer:
        """See `Kind.empty`."""
        assert isinstance(module, nn.Conv2d)
        return SketchedConv2d(
            **SketchedConv2d.geometry(module),
            rank=choice.ranks if choice.scheme == "tucker2" else choice.ranks[0],
            scheme=choice.scheme,
            device=device,
            dtype=module.weight.dtype,
        )


def fit_node(
    dense: nn.Module,
    has_bias: bool,
    name: str,
    choice: Choice,
    config: SketchConfig,
    arrivals: Sequence[Arrival],
    reads: Convolution | None = None,
) -> tuple[SketchedLayer, Tensor | None, float]:
    """Fit the kernel of an ONNX node to inputs whose padding is done; half types in float32.

    See `OnnxForm.fit`, and `fit_conv2d_to` for the last argument.
    """
    assert isinstance(dense, nn.Conv2d)
    kernel = dense.weight.detach()
    dtype = torch.promote_types(kernel.dtype, torch.float32)
    conv = nn.Conv2d(
        dense.in_channels,
        dense.out_channels,
        dense.kernel_size,  # type: ignore[arg-type]
        dense.stride,  # type: ignore[arg-type]
        0,
        dense.dilation,  # type: ignore[arg-type]
        dense.groups,
        bias=has_bias,
        device="meta",
        dtype=dtype,
    )
    conv = conv.to_empty(device="cpu").requires_grad_(False)
    conv.weight.copy_(kernel)
    if conv.bias is not None:
        conv.bias.zero_()
    given = [Arrival(one.batch, one.x.to(dtype), one.z.to(dtype)) for one in arrivals]
    found, error = fit_conv2d_to(conv, name, choice, config, given, None, reads=reads)
    factors = [getattr(found, factor).weight for factor in found.stages]
    layer = SketchedConv2d.from_kernels(choice.scheme, tuple(factors), dense)
    return layer, None if found.up.bias is None else found.up.bias.detach(), error


_TARGETS = F.conv2d, torch.ops.aten.conv2d.default, torch.ops.aten.conv2d.padding
_OF_NODE = partial(of_node, nn.Conv2d, "a 1 x 1 kernel")
Conv2dKind.functionals = (functional(nn.Conv2d, 2, _TARGETS),)
Conv2dKind.onnx = OnnxForm(("Conv",), 4, "a 2-D convolution", _OF_NODE, fit=fit_node)
