"""EoRA: Liu et al., "EoRA: Compensation for Compressed LLM with Eigenspace Low-Rank Approximation", 2024.

arXiv 2410.21271. With the second moments of a layer's inputs X Xᵀ = Q Λ Qᵀ and what its weight lacks, D =
W - W', the branch of rank r is B A with B A' = [D Q Λ^½]ᵣ by truncated SVD and A = A' Λ^-½ Qᵀ. Each layer is
taken for itself, on the inputs that the dense model gives it, and errors at all its outputs count alike.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

_CLAMP = 1e-9  # relative, of eigenvalues


def eora_factors(lacking: Tensor, moments: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """B (O, r) and A (r, I) for what a weight lacks (O, I) and the moments of its inputs (I, I), float64."""
    values, vectors = torch.linalg.eigh(moments)
    roots = values.clamp_min(_CLAMP * values[-1]).sqrt()
    u, s, vh = torch.linalg.svd(lacking @ (vectors * roots), full_matrices=False)
    half = s[:rank].sqrt()
    return u[:, :rank] * half, half[:, None] * vh[:rank] @ (vectors / roots).T


@torch.no_grad()
def input_moments(
    model: nn.Module, names: list[str], batches: list[Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """E[x xᵀ] (I, I), float64, of what reaches some layers; positions of padding do not count."""
    sums: dict[str, Tensor] = {}
    kept: Tensor | None = None

    def see(name: str, x: Tensor) -> None:
        rows = x.flatten(0, -2) if kept is None or x.shape[:2] != kept.shape else x[kept]
        sums[name] = sums.get(name, 0.0) + (rows.T @ rows).double()

    handles = [
        model.get_submodule(name).register_forward_pre_hook(lambda _, given, name=name: see(name, given[0]))
        for name in names
    ]
    for batch in batches:
        kept = batch["attention_mask"].bool() if "attention_mask" in batch else None
        model(**batch)
    for handle in handles:
        handle.remove()
    return sums
