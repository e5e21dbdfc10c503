"""The weight of errors at a layer's outputs: G (O, O), or its diagonal (O,) where that would be too large."""

# O out_features
import torch
from torch import Tensor


def weighed(metric: Tensor, x: Tensor) -> Tensor:
    """G x, of x (O, ...)."""
    return metric[:, None] * x if metric.dim() == 1 else metric @ x


def rooted(root: Tensor, x: Tensor) -> Tensor:
    """Kᵀ x, of x (O, n), from K of G = K Kᵀ, lower triangular (O, O), or its diagonal (O,)."""
    return root[:, None] * x if root.dim() == 1 else root.T @ x


def unrooted(root: Tensor, x: Tensor) -> Tensor:
    """K⁻ᵀ x, likewise."""
    if root.dim() == 1:
        return x / root[:, None]
    return torch.linalg.solve_triangular(root.T, x, upper=True)


def among(metric: Tensor, places: Tensor) -> Tensor:
    """The metric among some outputs."""
    return metric[places] if metric.dim() == 1 else metric[places][:, places]


def whole(metric: Tensor) -> Tensor:
    """G (O, O)."""
    return torch.diag(metric) if metric.dim() == 1 else metric
