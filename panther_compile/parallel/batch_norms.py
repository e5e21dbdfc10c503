"""Batch norms that take their statistics over the rows of all replicas, on any backend.

    torch's `nn.SyncBatchNorm` runs on GPUs only, and is a module, which no graph has. Here each replica
    gathers the mean, the sum of squared deviations and the number of rows of every other (n, m and s below),
    by one differentiable collective, and joins them (Chan, Golub and LeVeque 1983):

        N = sum n_i        mean = sum n_i m_i / N        variance = sum (s_i + n_i (m_i - mean)^2) / N

    Rows may be uneven over replicas, or none. The backward is autograd's: one reduce-scatter.

What is normalised together are the rows of one microbatch of each replica.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from panther_compile.errors import ConfigError

# Torch 2.13 has a new name for it.
_gather: Any = (
    getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd
)
BATCH_NORM = torch.ops.aten.batch_norm.default


def synchronized_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
    group: str,
) -> Tensor:
    """`aten::batch_norm` with the statistics of all ranks of a group; the same call on each of them.

    Args:
        x: (rows, channels, ...), of as many rows as this rank has.
        weight: (channels).
        bias: (channels).
        running_mean: (channels), written in place in training.
        running_var: likewise, of the unbiased variance.
        training: take statistics of x; else the running ones are used, and nothing is sent.
        momentum: share of the new statistics in the running ones.
        eps: added to the variance.
        cudnn_enabled: of `aten::batch_norm`; it chooses a kernel.
        group: name of the process group.
    """
    if not training:
        return torch.batch_norm(
            x, weight, bias, running_mean, running_var, False, momentum, eps, cudnn_enabled
        )
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    others = [axis for axis in range(x.ndim) if axis != 1]
    count = x.numel() // x.shape[1]
    if count:
        variance, mean = torch.var_mean(wide, others, correction=0)
    else:
        variance = mean = wide.sum(others)  # zeros, so that its backward takes part
    counted = mean.new_full((1,), float(count))
    gathered = _gather(torch.cat([mean, variance * count, counted]).unsqueeze(0), 0, group)
    means, deviations, counts = collectives.wait_tensor(gathered).split([len(mean), len(mean), 1], dim=1)
    total = counts.sum()
    mean = (means * counts).sum(0) / total
    variance = (deviations + counts * (means - mean).square()).sum(0) / total
    with torch.no_grad():
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        if running_var is not None:
            running_var.lerp_((variance * (total / (total - 1))).to(running_var.dtype), momentum)
    scale = torch.rsqrt(variance + eps)
    if weight is not None:
        scale = scale * weight
    shift = -mean * scale if bias is None else bias - mean * scale
    shape = [1, -1] + [1] * (x.ndim - 2)
    return (wide * scale.view(shape) + shift.view(shape)).to(x.dtype)


class _Synchronized(_BatchNorm):
    """A batch norm of the user's tree, with the statistics of a group in train mode.

    Attributes:
        group: name of the process group.
    """

    group: str

    def forward(self, input: Tensor) -> Tensor:
        """Normalise (rows, channels, ...)."""
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        share = 0.0 if self.momentum is None else self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:  # the mean of all batches
                share = 1.0 / float(self.num_batches_tracked)
        held = (self.running_mean, self.running_var) if self.track_running_stats else (None, None)
        return synchronized_batch_norm(
            input, self.weight, self.bias, *held, True, share, self.eps, False, self.group
        )


class SynchronizedBatchNorm1d(_Synchronized, nn.BatchNorm1d):
    """`nn.BatchNorm1d` over all replicas."""


class SynchronizedBatchNorm2d(_Synchronized, nn.BatchNorm2d):
    """`nn.BatchNorm2d` over all replicas."""


class SynchronizedBatchNorm3d(_Synchronized, nn.BatchNorm3d):
    """`nn.BatchNorm3d` over all replicas."""


_CLASSES: dict[type, type] = {
    nn.BatchNorm1d: SynchronizedBatchNorm1d,
    nn.BatchNorm2d: SynchronizedBatchNorm2d,
    nn.BatchNorm3d: SynchronizedBatchNorm3d,
}


def check_batch_norms(model: nn.Module, graphs: Iterable[fx.GraphModule], *, is_own: bool) -> None:
    """Refuse batch norms whose statistics cannot be taken over replicas.

    Args:
        model: the user's.
        graphs: all stages of it.
        is_own: whether the model itself is run, and not its graph.

    Raises:
        ConfigError: a batch norm is of a class of its own, or a call of the user's own code, by its name.
    """
    nodes = [node for graph in graphs for node in graph.graph.nodes]
    runs_modules = is_own or any(node.op == "call_module" for node in nodes)
    for name, module in model.named_modules() if runs_modules else ():
        if isinstance(module, _BatchNorm) and type(module) not in _CLASSES:
            raise ConfigError(
                f"sync_batchnorm=True, and {name or 'the model'} is a {type(module).__name__}, whose own "
                "forward is run: only BatchNorm1d, 2d and 3d of torch.nn are synchronised there"
            )
    for node in nodes:
        called = node.target is F.batch_norm
        if is_own and node.target is BATCH_NORM:
            called = type(model.get_submodule(_ran_in(node))) not in _CLASSES
        if called:
            raise ConfigError(
                f"sync_batchnorm=True, and {node.name} is a call of F.batch_norm in the model's own code, "
                "which cannot be synchronised there; use torch.nn's BatchNorm modules"
            )


def synchronize_batch_norms(module: nn.Module, group: str) -> None:
    """Take the statistics of batch norms over a group, in place: of modules, and of the calls of a graph.

    Args:
        module: the user's tree, or a flat stage; `check_batch_norms` has passed it.
        group: name of the process group.
    """
    for one in module.modules():
        if type(one) in _CLASSES:
            one.__class__ = _CLASSES[type(one)]
            one.group = group  # type: ignore[assignment]
    if not isinstance(module, fx.GraphModule):
        return
    calls = [node for node in module.graph.nodes if node.target is BATCH_NORM]
    for node in calls:
        node.args = (*node.args, group)
        node.target = synchronized_batch_norm
    if calls:
        module.recompile()


def _ran_in(node: fx.Node) -> str:
    """Name of the innermost module that a node ran in."""
    stack: dict[Any, tuple[str, Any]] = node.meta.get("nn_module_stack") or {}
    name = next(reversed(stack.values()), ("", None))[0]
    return name.partition("@")[0]
