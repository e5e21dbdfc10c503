"""Factors in int8 and fp8 by products that torch has, to be timed beside ours; no kernel of ours is in them.

    stored    q = w / s, rounded to int8 or e4m3; s = max |w| / 127, or / 448, for each row of w
    product   more than 16 rows: x is stored likewise, and torch._int_mm or torch._scaled_mm multiplies
              16 rows and fewer: (x qᵀ) s, with q widened to the type of x; reading q is what takes the time

torchao's Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig and
Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()) come to the same operators
(tests/integrations/test_torchao.py); this needs nothing but torch.
"""

# B rows, I in_features, O out_features

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

KINDS = ("int8", "fp8")
LARGEST = {"int8": 127.0, "fp8": 448.0}
FEW_ROWS = 16  # torch._int_mm wants more


def stored(kind: str, w_OI: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers (O, I) in int8 or float8_e4m3fn, and the scale (O,) of each row in float32."""
    wide = w_OI.float()
    scale_O = wide.abs().amax(1).clamp_min(1e-12) / LARGEST[kind]
    scaled = wide / scale_O[:, None]
    return (scaled.round().to(torch.int8) if kind == "int8" else scaled.to(torch.float8_e4m3fn)), scale_O


def product(kind: str, x_BI: Tensor, numbers_OI: Tensor, scale_O: Tensor) -> Tensor:
    """Multiply x (B, I) by the transpose of what was stored: (B, O), in the type of x."""
    if x_BI.shape[0] <= FEW_ROWS:
        return F.linear(x_BI, numbers_OI.to(x_BI.dtype)) * scale_O.to(x_BI.dtype)
    rows_BI, scale_B = stored(kind, x_BI)
    scale_B1 = scale_B[:, None]
    if kind == "int8":
        return (torch._int_mm(rows_BI, numbers_OI.t()).float() * scale_B1 * scale_O).to(x_BI.dtype)
    return torch._scaled_mm(
        rows_BI, numbers_OI.t(), scale_a=scale_B1, scale_b=scale_O[None, :], out_dtype=x_BI.dtype
    )


def stored_layers(kind: str, factors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Numbers and scales of every factor, one after the other."""
    return tuple(part for factor in factors for part in stored(kind, factor))


def layers_of(kind: str, starts: Sequence[int | None]) -> Callable[..., tuple[Tensor, ...]]:
    """A function of x, a bias or None, and `stored_layers` of every down and up, that gives all outputs.

    Args:
        kind: one of KINDS.
        starts: first column of the pivot slice of each layer, 0, or None of a plain pair.
    """

    def run(x: Tensor, bias: Tensor | None, *parts: Tensor) -> tuple[Tensor, ...]:
        outputs = []
        for place, start in enumerate(starts):
            down, down_scale, up, up_scale = parts[4 * place : 4 * place + 4]
            rank = down.shape[0]
            z = product(kind, x if start is None else x[:, rank:], down, down_scale)
            y = product(kind, z if start is None else x[:, :rank] + z, up, up_scale)
            outputs.append(y if bias is None else y + bias)
        return tuple(outputs)

    return run
