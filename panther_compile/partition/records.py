"""What a partition is made of: the mesh, one record a stage, the tensors between them, what is shared."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from panther_compile.config import is_integer
from panther_compile.errors import ConfigTypeError, MeshError

# As devices are numbered, the slowest first; and those of what `parallelize_model` runs.
AXES = ("dp", "pp", "cp", "tp")
RUN_AXES = ("dp", "pp", "tp")


@dataclass(frozen=True, slots=True)
class Mesh:
    """Devices in four axes, numbered with tp fastest, then cp, as `init_device_mesh` numbers them.

    Attributes:
        dp: replicas of the model, each with its own data.
        pp: devices along the pipeline.
        tp: devices that share a stage.
        cp: devices that divide the sequences of a replica.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    cp: int = 1

    @classmethod
    def read(cls, mesh: Mapping[str, int], devices: int | None = None) -> "Mesh":
        """Read {"dp": 2, "pp": 2}; axes not named are 1.

        Args:
            mesh: size of each axis.
            devices: the number that it must multiply to, if given.
        """
        if not isinstance(mesh, Mapping):
            raise ConfigTypeError(
                f"mesh is a {type(mesh).__name__}, wanted a mapping from axes to sizes: {{'dp': 1, 'pp': 4}}"
            )
        unknown = sorted(set(mesh) - set(AXES), key=str)
        if unknown:
            raise MeshError(f"mesh has the axes {unknown}; there are 'dp', 'pp', 'cp' and 'tp'")
        for axis, size in mesh.items():
            if not is_integer(size) or size < 1:
                raise MeshError(f"mesh[{axis!r}] is {size!r}, wanted a whole number of devices, 1 or more")
        found = cls(**{axis: int(size) for axis, size in mesh.items()})
        if devices is not None and found.devices != devices:
            raise MeshError(f"mesh {found} is of {found.devices} devices, and devices={devices}")
        return found

    @property
    def devices(self) -> int:
        """Number of devices."""
        return math.prod((self.dp, self.pp, self.tp, self.cp))

    @property
    def replicas(self) -> int:
        """Devices that hold the same parameters, and sum their gradients: over dp and cp."""
        return self.dp * self.cp

    def rank(self, dp: int, pp: int, tp: int = 0, cp: int = 0) -> int:
        """The number of a device."""
        return ((dp * self.pp + pp) * self.cp + cp) * self.tp + tp

    def __str__(self) -> str:
        axes = AXES if self.cp > 1 else RUN_AXES
        return " x ".join(f"{axis} {getattr(self, axis)}" for axis in axes)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that enters or leaves a stage, of one microbatch.

    Attributes:
        name: the graph node that makes it.
        shape: that of the tensor.
        dtype: "float32", "int64", ...
        requires_grad: whether a gradient comes back for it.
        made_in: stage that makes it; None for an input of the model.
        used_in: stages that use it; those between only hand it on.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    made_in: int | None
    used_in: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype, as torch has it."""
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def empty(self, device: torch.device | str) -> Tensor:
        """A tensor of this form, with no numbers in it."""
        return torch.empty(
            self.shape, dtype=self.torch_dtype, device=device, requires_grad=self.requires_grad
        )


@dataclass(frozen=True, slots=True)
class SharedParameter:
    """A parameter that several stages use.

    Attributes:
        name: the user's.
        stages: stages that hold it, with the same values.
        gradient_bytes: bytes to be summed over those stages before each optimizer step.
    """

    name: str
    stages: tuple[int, ...]
    gradient_bytes: int


@dataclass(frozen=True, slots=True)
class Collective:
    """Communication between the devices that share a stage, for one microbatch.

    Attributes:
        stage: the stage that it happens in.
        tensor: graph node, or parameter, that is summed or gathered; words for several in one message.
        kind: "all_reduce", "all_gather" or "reduce_scatter".
        phase: "forward", or "backward" where the tensor's gradient is meant.
        bytes: bytes of the whole tensor.
    """

    stage: int
    tensor: str
    kind: str
    phase: str
    bytes: int


@dataclass(frozen=True, slots=True)
class ShardedLayer:
    """A layer that is divided over the tp axis.

    Attributes:
        name: name of the layer.
        kind: "column", "row", "vocabulary"; of other operations with parameters "sharded", or "sequence" if
            they run on shards of the sequence.
        node: the node of the graph.
        parameters: axis that each is sharded along; None for those that every device holds.
        blocks: parts of that axis that are sharded each, as queries, keys and values stored together.
        collectives: collectives that bring its operands and result where they are needed.
    """

    name: str
    kind: str
    node: str
    parameters: Mapping[str, int | None]
    blocks: int
    collectives: tuple[Collective, ...]


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of one of a stage's devices at its peak.

    Attributes:
        states: parameters, gradients and optimizer states that this replica holds.
        activations: kept for the backward, of all microbatches in flight.
        buffers: what the stage receives and sends.
        recomputed: bytes of the unit that is computed again.
        gathered: bytes of units whose parameters, or gradients, are whole for a while.
    """

    states: int
    activations: int
    buffers: int
    recomputed: int = 0
    gathered: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.states + self.activations + self.buffers + self.recomputed + self.gathered


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of the pipeline. Seconds and bytes are of one microbatch on one of the stage's devices.

    Attributes:
        index: along the model.
        device: along the pp axis.
        forward_seconds: time of the operations, and of collectives between the stage's devices.
        backward_seconds: time of the same in the backward, recomputation included.
        receive_seconds: time of what comes from the stage before, and gradients from the stage after.
        send_seconds: time of what goes to the stage after, and gradients to the stage before.
        parameter_bytes: bytes of parameters and buffers, whole over the replicas.
        gradient_bytes: bytes of their gradients, likewise.
        optimizer_bytes: bytes of their optimizer states, likewise, master weights included.
        activation_bytes: saved for the backward.
        in_flight: microbatches held at once, at most.
        memory: memory of a device at its peak.
        received_bytes: activations from the stage before.
        sent_bytes: activations to the stage after.
        gradient_sent_bytes: gradients to the stage before.
        parameters: names, the user's.
        buffers: names, the user's.
        nodes: nodes of the graph, in order.
        inputs: tensors, in the order of the stage's arguments.
        outputs: tensors, in the order of what the stage returns.
    """

    index: int
    device: int
    forward_seconds: float
    backward_seconds: float
    receive_seconds: float
    send_seconds: float
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    in_flight: int
    memory: StageMemory
    received_bytes: int
    sent_bytes: int
    gradient_sent_bytes: int
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    nodes: tuple[str, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @property
    def memory_bytes(self) -> int:
        """Bytes of a device at its peak."""
        return self.memory.total

    @property
    def compute_seconds(self) -> float:
        """Forward and backward."""
        return self.forward_seconds + self.backward_seconds

    @property
    def seconds(self) -> float:
        """Everything: the slowest stage sets the pace of the pipeline."""
        return self.compute_seconds + self.receive_seconds + self.send_seconds
