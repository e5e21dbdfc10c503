"""The operators in plain PyTorch, forward and backward: the CPU, and cuBLAS and cuDNN on a GPU.

They have the names, arguments and results of the launchers. Beside the arithmetic of reference.py they
give what a backward keeps, and the backward is written out: an operator's implementation runs below
autograd. The tests hold both against reference.py and its autograd in float64.
"""

# B rows, I in_features, O out_features, R rank, S = I - R in the pivoted form, else I
# N batch, C channels, H x W in, P x Q out

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from panther_compile.kernels.factor_set import Factors, LinearGrads, Needs
from panther_compile.kernels.reference import gate_and_add

_aten = torch.ops.aten
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda s: s,
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda s: F.gelu(s, approximate="tanh"),
}
_ACTIVATION_GRADS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "none": lambda grad, s: grad,
    "relu": lambda grad, s: _aten.threshold_backward(grad, s, 0),
    "silu": _aten.silu_backward,
    "gelu": _aten.gelu_backward,
    "gelu_tanh": lambda grad, s: _aten.gelu_backward(grad, s, approximate="tanh"),
}


def latent(x_BI: Tensor, layer: Factors) -> Tensor:
    """The latent z (B, R): x downᵀ, or x₁ + x₂ downᵀ."""
    if layer.start is None:
        return F.linear(x_BI, layer.down)
    others = x_BI[:, layer.rest : layer.rest + layer.down.shape[1]]
    return torch.addmm(_pivots(x_BI, layer), others, layer.down.t())


def _pivots(x_BI: Tensor, layer: Factors) -> Tensor:
    """The columns x₁ of x."""
    assert layer.start is not None
    return x_BI[:, layer.start : layer.start + layer.down.shape[0]]


def sketched_linear_forward(
    x_BI: Tensor,
    layers: Sequence[Factors],
    *,
    activation: str = "none",
    multiplier: Tensor | None = None,
    residual: Tensor | None = None,
    keep: bool = False,
    precision: str = "ieee",
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs (B, O) of every layer, and the latents (B, R) if they are kept, else (0, R).

    Only a single layer can have a multiplier and a residual. The precision is torch's own setting here.
    """
    latents = [latent(x_BI, layer) for layer in layers]
    outs = [
        gate_and_add(ACTIVATIONS[activation](F.linear(z, layer.up, layer.bias)), multiplier, residual)
        for z, layer in zip(latents, layers, strict=True)
    ]
    return outs, latents if keep else [z.new_empty(0, z.shape[1]) for z in latents]


def sketched_linear_backward(
    grads: Sequence[Tensor],
    x_BI: Tensor,
    layers: Sequence[Factors],
    latents: Sequence[Tensor],
    *,
    activation: str = "none",
    multiplier: Tensor | None = None,
    needs: Needs,
    precision: str = "ieee",
) -> tuple[Tensor | None, list[LinearGrads]]:
    """Gradients of x and of every layer from those of the outputs (B, O); latents as kept (B, R)."""
    gx: Tensor | None = None
    found = []
    for grad, z, layer in zip(grads, latents, layers, strict=True):
        width = layer.down.shape[1]
        gdown = gup = gbias = gmultiplier = None
        if activation != "none" or multiplier is not None:
            s = F.linear(z, layer.up, layer.bias)
            if multiplier is not None and needs.multiplier:
                gmultiplier = grad * ACTIVATIONS[activation](s)
            grad = grad if multiplier is None else grad * multiplier
            grad = _ACTIVATION_GRADS[activation](grad, s)
        if needs.up:
            gup = grad.t() @ z
        if needs.bias and layer.bias is not None:
            gbias = grad.sum(0)
        if needs.x or needs.down:
            pivoted, gz_out = layer.start is not None, None
            if needs.x and pivoted and gx is None:
                # Both products are written where they belong: gz into the columns x₁, the other into x₂.
                gx = x_BI.new_empty(x_BI.shape)
                gz_out = _pivots(gx, layer)
            gz = torch.mm(grad, layer.up, out=gz_out)
            others = slice(layer.rest, layer.rest + width)
            if needs.down:
                gdown = gz.t() @ x_BI[:, others]
            if gz_out is not None and gx is not None:
                torch.mm(gz, layer.down, out=gx[:, others])
            elif needs.x and gx is None:
                gx = gz @ layer.down
            elif needs.x and gx is not None:
                gx[:, others].addmm_(gz, layer.down)
                if pivoted:
                    _pivots(gx, layer).add_(gz)
        found.append(LinearGrads(gdown, gup, gbias, gmultiplier))
    return gx, found


def conv2d_size(
    x_shape: Sequence[int],
    down_shape: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> tuple[int, int]:
    """Height and width (P, Q) of the output, from the shapes of x (N, C, H, W) and of `down`."""
    height, width = (
        (x_shape[axis] + 2 * pad - step * (down_shape[axis] - 1) - 1) // jump + 1
        for axis, pad, step, jump in zip((2, 3), padding, dilation, stride, strict=True)
    )
    return height, width


def layout_of(x: Tensor) -> torch.memory_format:
    """The memory format of images x (N, C, H, W), contiguous where it is ambiguous or neither."""
    if x.is_contiguous() or not x.is_contiguous(memory_format=torch.channels_last):
        return torch.contiguous_format
    return torch.channels_last


def sketched_conv2d_forward(
    x: Tensor,
    down: Tensor,
    up: Tensor,
    bias: Tensor | None,
    *,
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    keep: bool = False,
    precision: str = "ieee",
) -> tuple[Tensor, Tensor]:
    """The output (N, O, P, Q), and the latent (N, R, P, Q) if it is kept, else (0, R, P, Q)."""
    z = F.conv2d(x, down, None, stride, padding, dilation)
    return F.conv2d(z, up, bias), z if keep else z.new_empty(0, *z.shape[1:])


def sketched_conv2d_backward(
    grad: Tensor,
    x: Tensor,
    down: Tensor,
    up: Tensor,
    z: Tensor,
    *,
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    needs: Needs,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, down, up and the bias (O,), None where none is wanted."""
    wanted = [needs.x or needs.down, needs.up, needs.bias]
    gz, gup, gbias = _aten.convolution_backward(
        grad, z, up, [up.shape[0]], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, wanted
    )
    gx = gdown = None
    if wanted[0]:
        gx, gdown, _ = _aten.convolution_backward(
            gz, x, down, None, stride, padding, dilation, False, [0, 0], 1, [needs.x, needs.down, False]
        )
    return gx, gdown, gup, gbias
