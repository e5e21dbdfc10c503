"""The operators in plain PyTorch, forward and backward: the CPU, and cuBLAS and cuDNN on a GPU.

They have the names, arguments and results of the launchers. The forward arithmetic is reference.py's;
here it also gives up what the backward keeps, and the backward is written out, because an operator's
implementation runs below autograd.
"""

# B rows, I in_features, O out_features, R rank, S = I - R in the pivoted form, else I
# N batch, C channels, H x W in, P x Q out

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from panther_compile.kernels import reference
from panther_compile.kernels.factor_set import Factors, LinearGrads, Needs

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
    rank, width = layer.down.shape
    if layer.start is None:
        return F.linear(x_BI, layer.down)
    return torch.addmm(
        x_BI.narrow(1, layer.start, rank), x_BI.narrow(1, layer.rest, width), layer.down.t()
    )


def sketched_linear_forward(
    x_BI: Tensor,
    layers: Sequence[Factors],
    *,
    activation: str = "none",
    keep: bool = False,
    precision: str = "ieee",
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs (B, O) of every layer, and the latents (B, R) if they are kept, else (0, R).

    The precision is torch's own setting here.
    """
    latents = [latent(x_BI, layer) for layer in layers]
    outs = [
        ACTIVATIONS[activation](F.linear(z, layer.up, layer.bias))
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
    needs: Needs,
    precision: str = "ieee",
) -> tuple[Tensor | None, list[LinearGrads]]:
    """Gradients of x and of every layer from those of the outputs (B, O); latents as kept (B, R)."""
    gx: Tensor | None = None
    found = []
    for grad, z, layer in zip(grads, latents, layers, strict=True):
        rank, width = layer.down.shape
        if activation != "none":
            s = F.linear(z, layer.up, layer.bias)
            grad = _ACTIVATION_GRADS[activation](grad, s)
        gdown = gup = gbias = None
        if needs.up:
            gup = grad.t() @ z
        if needs.bias and layer.bias is not None:
            gbias = grad.sum(0)
        if needs.x or needs.down:
            gz = grad @ layer.up
            if needs.down:
                gdown = gz.t() @ x_BI.narrow(1, layer.rest, width)
            if needs.x and layer.start is None:
                gx = gz @ layer.down if gx is None else gx.addmm_(gz, layer.down)
            elif needs.x:
                gx = torch.zeros_like(x_BI) if gx is None else gx
                gx.narrow(1, layer.start, rank).add_(gz)
                gx.narrow(1, layer.rest, width).addmm_(gz, layer.down)
        found.append(LinearGrads(gdown, gup, gbias))
    return gx, found


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
