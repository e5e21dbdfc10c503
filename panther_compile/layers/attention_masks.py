"""What `nn.MultiheadAttention` accepts, checked as torch checks it, and its masks in one form."""

# N batch, L queries, S keys, H heads
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from panther_compile.errors import LayerError


class Masks(NamedTuple):
    """What is added to the logits, 0 or -inf where the masks were bool.

    Attributes:
        keys: `(N, 1, 1, S)`, the key padding mask, or None.
        pairs: `(N or 1, H or 1, L, S)`, the attention mask, or None.
        is_causal: the caller's hint that `pairs` is causal; without `pairs`, it stands for it.
        appended: the last keys, not the caller's, that every query sees.
    """

    keys: Tensor | None
    pairs: Tensor | None
    is_causal: bool
    appended: int

    def merged(self) -> Tensor | None:
        """Both as one mask that broadcasts to (N, H, L, S)."""
        if self.keys is None or self.pairs is None:
            return self.pairs if self.keys is None else self.keys
        return self.pairs + self.keys

    def causal(self) -> bool:
        """Whether `pairs` is causal, by the hint or by its values; False if it hides nothing.

        Raises:
            LayerError: it is neither.
        """
        if self.is_causal or self.pairs is None or not self.pairs.any():
            return self.is_causal
        pairs = self.pairs[..., : self.pairs.shape[-1] - self.appended]
        if (pairs == torch.full_like(pairs, -torch.inf).triu(1)).all():
            return True
        raise LayerError(
            'attention="favor" was given an attn_mask that is not causal: only key padding and '
            "causal masks have a linear-time form"
        )


def make_masks(
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    *,
    sizes: tuple[int, int, int, int],
    appended: int,
    is_causal: bool,
    need_weights: bool,
    dtype: torch.dtype,
) -> Masks:
    """Bring the masks of a call into one form.

    Args:
        key_padding_mask: (N, S), or (S,) if N is 1; bool, where True hides, or float.
        attn_mask: (L, S) or (N H, L, S), likewise.
        sizes: N, H, L, S.
        appended: keys that the layer adds after the S given.
        is_causal: the hint. As in torch it is believed, and the mask it describes not looked at, where
            a kernel can do with it alone: without key padding and without weights.
        need_weights: whether weights are wanted.
        dtype: of masks that were bool.

    Raises:
        AssertionError, RuntimeError: a mask has the wrong shape or dtype, or the hint comes alone.
    """
    if is_causal and attn_mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
    N, H, L, S = sizes
    keys = F._canonical_mask(  # type: ignore[attr-defined]
        mask=key_padding_mask,
        mask_name="key_padding_mask",
        other_type=None if attn_mask is None else attn_mask.dtype,
        other_name="attn_mask",
        target_type=dtype,
    )
    pairs = F._canonical_mask(  # type: ignore[attr-defined]
        attn_mask, "attn_mask", None, "", target_type=dtype, check_other=False
    )
    if is_causal and keys is None and not need_weights:
        pairs = None
    if keys is not None:
        if keys.shape not in ((N, S), (S,)):
            raise AssertionError(
                f"Expected key_padding_mask shape to be {(N, S)}, but got {tuple(keys.shape)}"
            )
        keys = F.pad(keys.view(N, 1, 1, S), (0, appended))
    if pairs is not None:
        wanted = (L, S) if pairs.dim() == 2 else (N * H, L, S)
        if pairs.shape != wanted:
            raise RuntimeError(
                f"The shape of the {pairs.dim()}D attn_mask is {tuple(pairs.shape)}, but should be {wanted}."
            )
        pairs = pairs.view(1, 1, L, S) if pairs.dim() == 2 else pairs.view(N, H, L, S)
        pairs = F.pad(pairs, (0, appended))
    return Masks(keys, pairs, is_causal, appended)


def check_inputs(query: Tensor, key: Tensor, value: Tensor, embed_dim: int, batch_dim: int) -> None:
    """Check three-dimensional inputs; a wrong width of key or value is left to its projection.

    Raises:
        AssertionError, RuntimeError: shapes do not match, as in torch.
    """
    if query.shape[-1] != embed_dim:
        raise AssertionError(f"was expecting embedding dimension of {embed_dim}, but got {query.shape[-1]}")
    if key.shape[:2] != value.shape[:2]:
        raise AssertionError(f"key shape {key.shape} does not match value shape {value.shape}")
    if key.shape[batch_dim] != query.shape[batch_dim]:
        raise RuntimeError(f"key shape {key.shape} does not match query shape {query.shape}")
