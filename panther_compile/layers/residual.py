"""A quantized linear layer and, beside it, a low-rank branch for what it lacks of the dense one."""

# O out_features, I in_features
from typing import Any

import torch
from torch import Tensor, nn

from panther_compile.layers.base import check_rank
from panther_compile.layers.lazy_weight import lazy_weight

MADE_FOR = "made_for"
_PROBES = 32
MADE_FOR_BYTES = 4 * _PROBES
_NEAR = 3e-3  # below what two ways to round to int8 differ by, above what half types do


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
        dense_type: the class whose sizes it has by the same names.
        made_for: what tells the weight of f from others, the bits of float32 numbers in int32 `(32,)`; zeros
            unless it was remembered.

    Raises:
        RankError: the rank is not in 1..min(I, O).
    """

    dense_type = nn.Linear
    made_for: Tensor

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
        self.register_buffer(MADE_FOR, torch.zeros(_PROBES, dtype=torch.int32, device=options["device"]))
        self.train(quantized.training)

    def forward(self, input: Tensor) -> Tensor:
        """`(..., I)` to `(..., O)`, in the dtype that f gives; the branch may be of another."""
        y: Tensor = self.quantized(input)
        more: Tensor = self.up(self.down(input.to(self.down.weight.dtype)))
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

    def remember_weight(self) -> None:
        """Keep what tells the weight of f from others; a state dict has it."""
        self.made_for.copy_(self._probed()[0].view(torch.int32))

    def has_weight_of(self, made_for: Tensor) -> bool:
        """Whether a `made_for` is of the weight of f, but for rounding; true of one that holds nothing."""
        found, size = self._probed()
        known = made_for.to(found.device).view(torch.float32)
        off = (found - known).square().mean().sqrt()
        return not bool(made_for.any()) or bool(off <= _NEAR * size)

    def _probed(self) -> tuple[Tensor, Tensor]:
        """uᵢᵀ W vᵢ of normal vectors, float32 `(32,)`, about as large as the norm of W; and that."""
        like = self.down.weight.new_empty(0, self.in_features, dtype=torch.float32)
        matrix = matrix_of(self.quantized, like).double()
        sizes = (self.out_features, self.in_features)
        drawn: Any = {"generator": torch.Generator().manual_seed(0), "dtype": torch.float64, "device": "cpu"}
        left, right = (torch.randn(n, _PROBES, **drawn) for n in sizes)
        products = (matrix @ right.to(matrix)) * left.to(matrix)
        return products.sum(0).float(), matrix.norm()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        state_dict.setdefault(prefix + MADE_FOR, self.made_for)  # of a version that kept none
        super()._load_from_state_dict(state_dict, prefix, *rest)

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
