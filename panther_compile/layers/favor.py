"""FavorAttention: softmax attention in time linear in the length, estimated by random features."""

# N batch, L queries, S keys, H heads, D head_dim, M random features
import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from panther_compile.errors import ConfigError, LayerError
from panther_compile.kernels import reference
from panther_compile.layers.attention_masks import Masks
from panther_compile.layers.capture import is_exporting
from panther_compile.ops.attention import favor_attention, has_attention_kernel


class FavorAttention(nn.Module):
    """The attention between the projections, by the positive features of FAVOR+.

    Choromanski et al., "Rethinking Attention with Performers", ICLR 2021; the maths is in
    `kernels/reference.py`. Key padding and causal masks have a linear-time form and are taken;
    whether an attention mask is causal is read off the hint or the values, which graph capture
    cannot see: give the hint there. Half types are computed in float32.

    Dropout drops keys, the same ones for every query of a head: each weight is dropped as often as
    in exact attention, and the mean is the same.

    The estimate is good only where attention is nearly uniform, so measure before use. Relative
    Frobenius error of the weights, Gaussian q and k, D = 32, S = 512, next to that of plain averaging:

        deviation of the logits   M = 64   M = 256   M = 1024   all weights 1/S
        0.1                       0.13     0.06      0.03       0.10
        0.25                      0.42     0.25      0.13       0.25
        0.5                       1.27     0.97      0.66       0.47
        1                         2.46     2.26      1.94       0.80

    Milliseconds against `F.scaled_dot_product_attention` (N = 1, H = 4, D = 32, float32, 2 shared
    CPU cores, torch 2.13, best of 15 or more), full and causal:

        length   exact        M = 64       M = 256
        512      1.1, 1.1     0.9, 1.6     11, 12
        2048     31, 18       9, 24        61, 63
        8192     505, 273     57, 99       286, 300

    Args:
        head_dim: D.
        features: M, positive.
        seed: of the directions, a buffer (M, D).
        device: where the buffer is made.
        dtype: of the buffer.

    Raises:
        ConfigError: `features` is not positive.
    """

    directions: Tensor

    def __init__(
        self,
        head_dim: int,
        features: int,
        seed: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if features < 1:
            raise ConfigError(f"{features=}, wanted 1 or more")
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if device is not None and torch.device(device).type == "meta":  # it is to be filled from elsewhere
            directions = torch.empty(features, head_dim, device=device, dtype=dtype)
        else:
            # Drawn on the CPU in float32, so that a seed means the same everywhere.
            generator = torch.Generator().manual_seed(seed)
            directions = reference.favor_directions(features, head_dim, generator)
        self.register_buffer("directions", directions.to(device=device, dtype=dtype))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, masks: Masks, dropout: float, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from q (N, H, L, D) to k and v (N, H, S, D).

        Returns:
            The heads (N, H, L, D), and the implied weights (N, H, L, S), at quadratic cost, if they
            are needed. A query that may attend to nothing gets 0.

        Raises:
            LayerError: the attention mask is not causal, or is and does not cover every key.
        """
        causal = masks.causal()
        if causal and masks.appended:
            raise LayerError('attention="favor" is not causal with add_bias_kv or add_zero_attn')
        dtype, wide = v.dtype, torch.promote_types(v.dtype, torch.float32)
        keys = None if masks.keys is None else masks.keys.squeeze(2)
        with _without_autocast(v.device):
            is_half = q.dtype == k.dtype == dtype == self.directions.dtype != wide
            served = is_half and not need_weights and _has_kernel(q, k, v, keys)
            computed = dtype if served else wide  # the operator widens half types itself
            q, k, v, directions = (x.to(computed) for x in (q, k, v, self.directions))
            key_mask = None if keys is None else keys.to(computed)
            kept = F.dropout(v.new_ones(v.shape[:-1]), dropout)
            if not need_weights:
                v = v * kept.unsqueeze(-1)
                served = served or _has_kernel(q, k, v, key_mask)
                attend = favor_attention if served else reference.favor_attention
                return attend(q, k, v, directions, key_mask, causal=causal).to(dtype), None
            weights = reference.favor_weights(q, k, directions, key_mask, causal=causal)
            weights = weights * kept.unsqueeze(-2)
            return (weights @ v).to(dtype), weights.to(dtype)

    def extra_repr(self) -> str:
        """The shape of the directions."""
        features, head_dim = self.directions.shape
        return f"head_dim={head_dim}, features={features}"


def _has_kernel(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> bool:
    """Whether the operator serves this; it stays out of exported graphs, and gives masks no gradient."""
    if q.is_cuda is not True or is_exporting():
        return False
    trains_mask = key_mask is not None and key_mask.requires_grad and torch.is_grad_enabled()
    return not trains_mask and has_attention_kernel(q, k, v)


def _without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Autocast off, on devices that have it (meta has not)."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()
