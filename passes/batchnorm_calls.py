"""The functional forms of batch norm, by argument name."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

STATISTICS = ("running_mean", "running_var", "weight", "bias")
_DEFAULTS = {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5}
_NAMES: dict[Any, tuple[str, ...]] = {
    F.batch_norm: ("input", *STATISTICS, "training", "momentum", "eps"),
    torch.ops.aten.batch_norm.default: (
        *("input", "weight", "bias", "running_mean", "running_var"),
        *("training", "momentum", "eps", "cudnn_enabled"),
    ),
}


def read_batchnorm(node: fx.Node) -> dict[str, Any] | None:
    """The arguments of a functional batch norm by name, defaults included; None for any other node."""
    if node.op != "call_function" or node.target not in _NAMES:
        return None
    return _DEFAULTS | dict(zip(_NAMES[node.target], node.args, strict=False)) | dict(node.kwargs)
