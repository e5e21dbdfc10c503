"""A quantized linear layer and, beside it, a low-rank branch for what it lacks of the dense one."""

# O out_features, I in_features
from typing import Any

import torch
from torch import Tensor, nn

from panther_compile.layers.base import check_rank
from panther_compile.layers.lazy_weight import lazy_weight


class ResidualLinear(nn.Module):
    """y = f(x) + U (V x) + c: a layer f as it was, and a branch of ordinary linear layers, zero at first.

    Args:
        quantized: f, of I inputs and O outputs; any module.
        in_features: I.
        out_features: O.
        rank: of the branch.
        device: of the branch.
        dtype: likewise.

    Attributes:
        quantized: f.
        down: V, `nn.Linear(I, rank, bias=False)`.
        up: U and c, `nn.Linear(rank, O)`.

    Raises:
        RankError: the rank is not in 1..min(I, O).
    """

    def __init__(
        self,
        quantized: nn.Module,
        in_features: int,
        out_features: int,
        rank: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_rank(rank, min(in_features, out_features), f"a branch beside {out_features} x {in_features}")
        self.in_features, self.out_features, self.rank = in_features, out_features, rank
        self.quantized = quantized
        options: dict[str, Any] = {"device": device or torch.get_default_device(), "dtype": dtype}
        self.down = nn.utils.skip_init(nn.Linear, in_features, rank, bias=False, **options)
        self.up = nn.utils.skip_init(nn.Linear, rank, out_features, **options)
        for parameter in (*self.down.parameters(), *self.up.parameters()):
            nn.init.zeros_(parameter)
        self.train(quantized.training)

    def forward(self, x: Tensor) -> Tensor:
        """`(..., I)` to `(..., O)`, in the dtype that f gives; the branch may be of another."""
        y: Tensor = self.quantized(x)
        more: Tensor = self.up(self.down(x.to(self.down.weight.dtype)))
        return y + more.to(y.dtype)

    @property
    def weight(self) -> Tensor:
        """The weight (O, I) of both together; read-only, made when it is read."""
        return lazy_weight((self.out_features, self.in_features), self.up.weight, self._sum)

    @property
    def bias(self) -> Tensor | None:
        """The bias of f; that of the branch, c, is `up.bias`."""
        found: Tensor | None = getattr(self.quantized, "bias", None)
        return found

    def extra_repr(self) -> str:
        """The rank."""
        return f"rank={self.rank}"

    def _sum(self) -> Tensor:
        return matrix_of(self.quantized, self.down.weight) + self.up.weight @ self.down.weight


@torch.no_grad()
def matrix_of(layer: nn.Module, like: Tensor) -> Tensor:
    """The weight (O, I) of any linear layer: its own, dequantized, or what it makes of the unit vectors.

    Its own is what an `nn.Linear` multiplies by; other classes may scale or round theirs, and are asked.

    Args:
        layer: of I inputs.
        like: `(..., I)`; gives the dtype and the device.
    """
    weight = getattr(layer, "weight", None)
    if type(layer).forward is nn.Linear.forward and isinstance(weight, Tensor):
        if weight.is_quantized or type(weight).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            return weight.dequantize().to(like)  # type: ignore[no-untyped-call]
        if weight.is_floating_point() and weight.element_size() > 1:
            return weight.detach().to(like)
    units = torch.eye(like.shape[-1], dtype=_taken_by(layer) or like.dtype, device=like.device)
    answers: Tensor = layer(units) - layer(torch.zeros_like(units[:1]))
    return answers.T.to(like)


def _taken_by(layer: nn.Module) -> torch.dtype | None:
    """The floating dtype of what a layer holds, those of eight bits aside; None if there are several."""
    held = {
        tensor.dtype
        for tensor in (*layer.parameters(), *layer.buffers())
        if tensor.is_floating_point() and tensor.element_size() > 1
    }
    return held.pop() if len(held) == 1 else None
