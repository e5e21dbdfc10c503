"""What a cluster is made of: how fast one device computes, how much it holds, how fast it talks.

The arithmetic of one device is that of `panther_compile.factorization.cost`; it weighs sketched layers too.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from panther_compile.config import is_integer
from panther_compile.errors import ConfigError
from panther_compile.factorization import cost

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BINARY = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


@dataclass(frozen=True, slots=True)
class Link:
    """One class of links between devices.

    Attributes:
        bytes_per_second: rate in one direction, of one device.
        latency_seconds: time of a message, however short.
    """

    bytes_per_second: float
    latency_seconds: float

    def seconds(self, moved_bytes: float) -> float:
        """Time of one message; nothing sent takes no time."""
        return self.latency_seconds + moved_bytes / self.bytes_per_second if moved_bytes else 0.0

    def seconds_of_each(self, moved_bytes: NDArray[np.float64]) -> NDArray[np.float64]:
        """The same of many messages."""
        result: NDArray[np.float64] = moved_bytes / self.bytes_per_second
        return result + self.latency_seconds * (moved_bytes > 0)


NO_LINK = Link(float("inf"), 0.0)


@dataclass(frozen=True, slots=True)
class Context:
    """Devices that divide the sequences of a replica (context parallelism), in a ring.

    Attributes:
        devices: number of them.
        link: between them.
    """

    devices: int = 1
    link: Link = NO_LINK

    def seconds(self, size: float) -> float:
        """An all-gather, or a reduce-scatter, of so many bytes: each device sends its part on and on."""
        return (self.devices - 1) * self.link.seconds(size / self.devices)


ALONE = Context()


@dataclass(frozen=True, slots=True)
class Rate:
    """What one kind of operation takes on one device; of `measure_hardware`.

    Attributes:
        kind: one of `observe.KINDS`.
        phase: "forward" or "backward".
        launch_seconds: however small it is.
        seconds_per_mac: time of each of its multiply-adds.
        seconds_per_byte: time of each byte that it reads and writes.
    """

    kind: str
    phase: str
    launch_seconds: float
    seconds_per_mac: float
    seconds_per_byte: float


@dataclass(frozen=True, slots=True)
class Hardware:
    """A cluster of equal devices, several to a node.

    Attributes:
        name: what the report calls it.
        flops_per_second: rate of large matrix products in the precision that is trained in, as reached.
        memory_bytes_per_second: rate for activations and weights, as reached.
        memory_bytes: memory of one device.
        intra_node: links between devices of one node.
        inter_node: links between nodes.
        devices_per_node: devices that share the fast links.
        launch_seconds: fixed time of one operation.
        weight_bytes_per_second: rate for weights, where they come faster than activations (from a cache).
        rates: rates of kinds of operations, in place of a roofline of the numbers above, where measured.
        overlap: whether a device computes while the replicas' gradients and parameters are sent.
        fp8_flops_per_second: rate of large products in eight bits, as reached; None where there are none.
        attention_flops_per_second: rate of fused attention, as reached; None for that of products.
    """

    name: str
    flops_per_second: float
    memory_bytes_per_second: float
    memory_bytes: int
    intra_node: Link
    inter_node: Link
    devices_per_node: int = 8
    launch_seconds: float = 5e-6
    weight_bytes_per_second: float | None = None
    rates: tuple[Rate, ...] = ()
    overlap: bool = False
    fp8_flops_per_second: float | None = None
    attention_flops_per_second: float | None = None

    def __post_init__(self) -> None:
        for field in ("flops_per_second", "memory_bytes_per_second", "memory_bytes", "devices_per_node"):
            if getattr(self, field) <= 0:
                raise ConfigError(f"Hardware.{field} is {getattr(self, field)}, wanted a positive number")
        for field in ("fp8_flops_per_second", "attention_flops_per_second"):
            if getattr(self, field) is not None and getattr(self, field) <= 0:
                raise ConfigError(f"Hardware.{field} is {getattr(self, field)}, wanted a positive number")
        for link in (self.intra_node, self.inter_node):
            if link.bytes_per_second <= 0 or link.latency_seconds < 0:
                raise ConfigError(f"Hardware: {link} needs a positive rate and a latency of zero or more")

    @property
    def device(self) -> cost.Device:
        """One device, as `cost.seconds` takes it; an itemsize of 1 makes its numbers bytes."""
        return cost.Device(
            macs_per_second=self.flops_per_second / 2,
            activation_bytes_per_second=self.memory_bytes_per_second,
            weight_bytes_per_second=self.weight_bytes_per_second or self.memory_bytes_per_second,
            launch_seconds=self.launch_seconds,
            positions=1,
        )

    @property
    def fp8_device(self) -> cost.Device:
        """The same for products in eight bits."""
        return self._device_at(self.fp8_flops_per_second)

    @property
    def attention_device(self) -> cost.Device:
        """The same for fused attention."""
        return self._device_at(self.attention_flops_per_second)

    def _device_at(self, flops_per_second: float | None) -> cost.Device:
        """One device at another rate of multiply-adds; None for that of products."""
        return replace(self.device, macs_per_second=(flops_per_second or self.flops_per_second) / 2)

    def link(self, first: int, second: int) -> Link:
        """The link between two devices, numbered through the cluster node by node."""
        return self.intra_node if self.same_node(first, second) else self.inter_node

    def same_node(self, first: int, second: int) -> bool:
        """Whether two devices share the fast links of a node."""
        return first // self.devices_per_node == second // self.devices_per_node


def slowest_of(several: Sequence[Hardware]) -> Hardware:
    """One that is no faster than any of several, and holds no more; one of a kind comes back as it is.

    Raises:
        ConfigError: their nodes are of other numbers of devices.
    """
    kinds = list(dict.fromkeys(several))
    if len(kinds) == 1:
        return kinds[0]
    if len({one.devices_per_node for one in kinds}) > 1:
        sizes = ", ".join(f"{one.name} {one.devices_per_node}" for one in kinds)
        raise ConfigError(f"hardware: devices_per_node is {sizes}; in one mesh it has to be the same")
    attention = (one.attention_flops_per_second or one.flops_per_second for one in kinds)
    return replace(
        min(kinds, key=lambda one: one.flops_per_second),
        name=" + ".join(one.name for one in kinds),
        memory_bytes=min(one.memory_bytes for one in kinds),
        intra_node=min((one.intra_node for one in kinds), key=lambda link: link.bytes_per_second),
        inter_node=min((one.inter_node for one in kinds), key=lambda link: link.bytes_per_second),
        overlap=all(one.overlap for one in kinds),
        fp8_flops_per_second=min(one.fp8_flops_per_second or 0 for one in kinds) or None,
        attention_flops_per_second=min(attention),
    )


# One core, as `cost.CPU` was fitted; processes of one machine that talk through shared memory, and
# machines on 10 Gbit/s Ethernet.
CPU = Hardware(
    name="cpu",
    flops_per_second=2 * cost.CPU.macs_per_second,
    memory_bytes_per_second=cost.CPU.activation_bytes_per_second,
    memory_bytes=16 * 2**30,
    intra_node=Link(4e9, 20e-6),
    inter_node=Link(1e9, 50e-6),
    devices_per_node=64,
    launch_seconds=cost.CPU.launch_seconds,
    weight_bytes_per_second=cost.CPU.weight_bytes_per_second,
)
# NVIDIA's data sheets of the SXM boards: 989 TFLOP/s in bf16 and 1,979 in fp8 without sparsity, and 60 % of
# it taken as reached; 80 % of 3.35 and 4.8 TB/s; 80 % of NVLink's 450 GB/s a direction, and of one 400 Gbit/s
# port a device between nodes. Attention is FlashAttention-2's forward and backward (arXiv 2307.08691, section
# 4.1). Latencies are orders of magnitude. Nothing here was measured.
_NVLINK, _INFINIBAND = Link(360e9, 5e-6), Link(40e9, 10e-6)
H100 = Hardware(
    "h100",
    0.6 * 989e12,
    0.8 * 3.35e12,
    80 * 10**9,
    _NVLINK,
    _INFINIBAND,
    overlap=True,
    fp8_flops_per_second=0.6 * 1979e12,
    attention_flops_per_second=335e12,
)
H200 = replace(H100, name="h200", memory_bytes_per_second=0.8 * 4.8e12, memory_bytes=141 * 10**9)

PRESETS = {hardware.name: hardware for hardware in (CPU, H100, H200)}


def find_hardware(hardware: Hardware | str) -> Hardware:
    """A preset by its name, or the hardware itself."""
    if isinstance(hardware, Hardware):
        return hardware
    if hardware not in PRESETS:
        raise ConfigError(
            f"hardware={hardware!r} is no preset; there are {sorted(PRESETS)}, or give a Hardware"
        )
    return PRESETS[hardware]


def read_bytes(size: int | str) -> int:
    """A number of bytes, from an int or from text as "40GiB" (2**30) or "40GB" (10**9)."""
    if is_integer(size) and size > 0:
        return int(size)
    match = re.fullmatch(r"\s*([\d.]+)\s*([kmgt]?)(i?)b\s*", str(size), flags=re.IGNORECASE)
    if match is None or match[1].count(".") > 1 or not re.search(r"[1-9]", match[1]):
        raise ConfigError(f"memory_per_device={size!r} is no size; write 40 * 2**30, '40GiB' or '40GB'")
    factor = (_BINARY if match[3] else _UNITS)[match[2].lower()]
    return int(float(match[1]) * factor)
