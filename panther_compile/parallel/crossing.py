"""Shapes and dtypes of what crosses between stages, under the autocast that a step is called under.

A plan is made for the dtypes of the example. Under `torch.autocast`, or a mixed-precision policy of
`fully_shard`, other dtypes cross. Every rank finds them alike: it runs all stages once on fake tensors, which
hold no data, under the precision that it is asked for.
"""

import copy
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import MixedPrecisionPolicy

from panther_compile.partition import Partition, TensorSpec
from panther_compile.partition.graph.capture import Precision


class CrossingTensors:
    """Finds what crosses; holds no data of the model."""

    def __init__(
        self, graphs: Iterable[fx.GraphModule], part: Partition, policy: MixedPrecisionPolicy | None
    ) -> None:
        """Keep the stages without data.

        Args:
            graphs: of all stages, whole.
            part: that they are of.
            policy: of `fully_shard`, which casts parameters and inputs of each stage.
        """
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._policy = policy
        self._records = part.stages
        self._planned = part.captured.precision
        seen: dict[int, Tensor] = {}
        self._stages = [self._without_data(graph, seen) for graph in graphs]

    def find(self, precision: Precision) -> list[tuple[TensorSpec, ...]]:
        """Inputs of the first stage, what crosses behind each stage, and outputs of the last.

        Args:
            precision: that the stages will run under.
        """
        ends = [self._records[0].inputs]
        if precision.dtype is self._planned.dtype and self._policy is None:
            return ends + [record.outputs for record in self._records]
        with self._fake, torch.enable_grad(), torch.random.fork_rng(devices=[]), precision.context():
            values = [spec.empty(precision.device_type) for spec in ends[0]]
            for stage, record in zip(self._stages, self._records, strict=True):
                values = list(stage(*(self._cast_input(value) for value in values)))
                values = [self._cast_output(value) for value in values]
                ends.append(
                    tuple(
                        replace(
                            spec,
                            shape=tuple(value.shape),
                            dtype=str(value.dtype).removeprefix("torch."),
                            requires_grad=value.requires_grad,
                        )
                        for spec, value in zip(record.outputs, values, strict=True)
                    )
                )
                values = [value.detach().requires_grad_(value.requires_grad) for value in values]
        return ends

    def _without_data(self, graph: fx.GraphModule, seen: dict[int, Tensor]) -> fx.GraphModule:
        """A copy whose parameters and buffers are fake, in the dtype that the policy computes in."""
        memo = {}
        for tensor in (*graph.parameters(), *graph.buffers()):
            if id(tensor) not in seen:
                made: Tensor = self._fake.from_tensor(tensor.detach(), static_shapes=True)
                if isinstance(tensor, nn.Parameter):
                    with self._fake:
                        made = nn.Parameter(self._cast_parameter(made), requires_grad=tensor.requires_grad)
                seen[id(tensor)] = made
            memo[id(tensor)] = seen[id(tensor)]
        return copy.deepcopy(graph, memo)

    def _cast_parameter(self, tensor: Tensor) -> Tensor:
        dtype = self._policy.param_dtype if self._policy is not None else None
        return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)

    def _cast_input(self, tensor: Tensor) -> Tensor:
        is_cast = self._policy is not None and self._policy.cast_forward_inputs
        return self._cast_parameter(tensor) if is_cast else tensor

    def _cast_output(self, tensor: Tensor) -> Tensor:
        dtype = self._policy.output_dtype if self._policy is not None else None
        return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)
