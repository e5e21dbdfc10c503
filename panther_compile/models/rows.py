"""Tensors as rows: padded positions left out."""

from torch import Tensor


def kept_rows(tensor: Tensor, kept: Tensor | None) -> Tensor:
    """The tensor (..., F) as rows (n, F), without those at padded positions.

    Args:
        tensor: a tensor whose first two dimensions, or the first one that is their product, are the mask's;
            of another shape it is taken whole.
        kept: bool `(batch, length)`, or None.
    """
    rows = tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() else tensor.reshape(1, 1)
    if kept is None or tensor.dim() < 2:
        return rows
    if tensor.dim() == 3 and tensor.shape[:2] == kept.shape:
        return rows[kept.reshape(-1)]
    if tensor.dim() == 3 and tensor.shape[:2] == kept.T.shape:  # (length, batch, F)
        return rows[kept.T.reshape(-1)]
    if tensor.dim() == 2 and tensor.shape[0] == kept.numel():
        return rows[kept.reshape(-1)]
    return rows
