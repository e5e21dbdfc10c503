"""Linear and convolution layers as matrices, and what takes their place.

A convolution is the matrix (O, C k k) that acts on its unfolded input; factored it is a k x k convolution to
r channels and a 1 x 1 convolution, and pivoted likewise.
"""

from collections.abc import Iterable

import scipy.linalg
import torch
from torch import Tensor, nn
from torch.nn import functional as F

# O outputs, I inputs, r rank, N rows of a calibration batch


class UnfoldedAttention(nn.Module):
    """`nn.MultiheadAttention` with a linear layer for each projection; the same outputs.

    The attributes that `nn.TransformerEncoder` asks for before its fast path are there, and turn it off.
    """

    batch_first = True
    in_proj_bias = None
    _qkv_same_embed_dim = False

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        if not attention.batch_first or attention.in_proj_weight is None or attention.bias_k is not None:
            raise ValueError("wanted batch-first attention with equal widths and without extra keys")
        self.heads = attention.num_heads
        weights = attention.in_proj_weight.chunk(3)
        biases = attention.in_proj_bias.chunk(3)
        self.q_proj, self.k_proj, self.v_proj = (
            linear_layer(*pair) for pair in zip(weights, biases, strict=True)
        )
        self.out_proj = linear_layer(attention.out_proj.weight, attention.out_proj.bias)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **_: object
    ) -> tuple[Tensor, None]:
        """(B, T, E) thrice to (B, T, E); the weights are not returned."""
        heads = [
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, x in ((self.q_proj, query), (self.k_proj, key), (self.v_proj, value))
        ]
        mixed = F.scaled_dot_product_attention(*heads, attn_mask=attn_mask)
        return self.out_proj(mixed.transpose(1, 2).flatten(2)), None


def unfold_attention(model: nn.Module) -> None:
    """Replace every `nn.MultiheadAttention`, in place, so that all its weights are those of linear layers."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.MultiheadAttention):
            model.set_submodule(name, UnfoldedAttention(module))


class Factored(nn.Sequential):
    """To r channels, and from them to the outputs."""


class Pivoted(nn.Module):
    """r rows of the matrix, and how the others follow from them.

    Args:
        first: to r outputs.
        second: from those to the other O - r.
        order: (O,) where in cat(first, second) each output is.
        bias: (O,) or None.
    """

    def __init__(self, first: nn.Module, second: nn.Module, order: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.register_buffer("order", order)
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """As the layer replaced."""
        channels = 1 if isinstance(self.first, nn.Conv2d) else -1
        pivots = self.first(x)
        y = torch.cat([pivots, self.second(pivots)], channels).index_select(channels, self.order)
        if self.bias is None:
            return y
        return y + (self.bias[:, None, None] if channels == 1 else self.bias)


def weight_matrix(layer: nn.Module) -> Tensor:
    """(O, I) in float64."""
    return layer.weight.detach().flatten(1).double()


def input_rows(layer: nn.Module, x: Tensor) -> Tensor:
    """(N, I): what the weight matrix is multiplied with."""
    if isinstance(layer, nn.Linear):
        return x.flatten(0, -2)
    unfolded = F.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    return unfolded.transpose(1, 2).flatten(0, 1)


def input_key(layer: nn.Module, x: Tensor) -> tuple[object, ...]:
    """Equal for layers whose rows are the same."""
    if isinstance(layer, nn.Linear):
        return (id(x),)
    return (id(x), layer.kernel_size, layer.dilation, layer.padding, layer.stride)


def check_layers(model: nn.Module, names: Iterable[str]) -> None:
    """Raise unless each is a linear layer or an ungrouped convolution; `plan_sketch` has read its forward."""
    for name in names:
        layer = model.get_submodule(name)
        if type(layer) is nn.Linear:
            continue
        if not isinstance(layer, nn.Conv2d) or layer.groups != 1 or layer.padding_mode != "zeros":
            raise ValueError(f"{name} is a {layer}, wanted an nn.Linear or a plain nn.Conv2d")


def factored(layer: nn.Module, left_Or: Tensor, right_rI: Tensor) -> nn.Module:
    """The layer with the matrix left right, stored as the two; each gets half of every singular value."""
    left, right = balanced(left_Or, right_rI)
    return Factored(first_layer(layer, right), _tail(layer, left, layer.bias))


def balanced(left_Or: Tensor, right_rI: Tensor) -> tuple[Tensor, Tensor]:
    """The same product, half of every singular value in each factor."""
    balance = (left_Or.norm(dim=0) / right_rI.norm(dim=1).clamp_min(1e-30)).clamp_min(1e-30).sqrt()
    return left_Or / balance, right_rI * balance[:, None]


def pivoted(layer: nn.Module, left_Or: Tensor, right_rI: Tensor) -> nn.Module:
    """The same, stored as r of its rows and coefficients for the rest.

    PIFA (Zhao et al., "Pivoting Factorization", ICML 2025): W' = P [Wp; C Wp]. The pivots are chosen by QR
    with column pivoting of the left factor, whose rows are independent where those of W' are.
    """
    rank = right_rI.shape[0]
    triangle, columns = scipy.linalg.qr(left_Or.T.numpy(), mode="r", pivoting=True)
    triangle_rO, order = torch.from_numpy(triangle), torch.from_numpy(columns).long()
    coefficients = torch.linalg.solve_triangular(triangle_rO[:, :rank], triangle_rO[:, rank:], upper=True).T
    first = first_layer(layer, left_Or[order[:rank]] @ right_rI)
    return Pivoted(first, _tail(layer, coefficients, None), order.argsort(), layer.bias)


def with_matrix(layer: nn.Module, matrix_OI: Tensor) -> nn.Module:
    """The layer itself, its weight overwritten."""
    with torch.no_grad():
        layer.weight.copy_(matrix_OI.view_as(layer.weight))
    return layer


def linear_layer(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """The layer of a weight (O, I) and a bias, in float32."""
    new = nn.Linear(weight.shape[1], weight.shape[0], bias is not None)
    with torch.no_grad():
        new.weight.copy_(weight)
        if bias is not None:
            new.bias.copy_(bias)
    return new


def first_layer(layer: nn.Module, matrix_rI: Tensor) -> nn.Module:
    """What brings the layer's input to r channels."""
    if isinstance(layer, nn.Linear):
        return linear_layer(matrix_rI, None)
    geometry = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    new = nn.Conv2d(layer.in_channels, len(matrix_rI), *geometry, bias=False)
    return with_matrix(new, matrix_rI)


def _tail(layer: nn.Module, matrix: Tensor, bias: Tensor | None) -> nn.Module:
    if isinstance(layer, nn.Linear):
        return linear_layer(matrix, bias)
    new = nn.Conv2d(matrix.shape[1], matrix.shape[0], 1, bias=bias is not None)
    if bias is not None:
        new.bias = nn.Parameter(bias.detach().clone())
    return with_matrix(new, matrix)
