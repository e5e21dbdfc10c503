"""Which implementation serves a shape on a GPU: a Triton kernel, or cuBLAS and cuDNN through torch.

"auto" takes a kernel where it was measured to win, on an H200 in bfloat16 (docs/benchmarks/kernels.md):

- A few rows while a CUDA graph is captured: the decode kernels, 1.1 to 4.7 times as fast as two products for
  one row. In eager mode their launches, from Python, take longer than they save.
- Random-feature attention in half types: 2.3 to 14 times as fast as plain torch, whose steps are many. Its
  backward wins up to a width of 64.
- Convolutions: torch. The kernel wins at 64 and 128 channels of large images, less than its launch takes.
- All other linear layers by the model of bytes and operations below. The fused kernel was timed only behind
  launches ten times as long as today's, which may have been in its times: it reached a fifth of the rate of
  cuBLAS at best. With that share the model takes torch.

The model:

- Two products of cuBLAS take max(operations / rate, bytes / bandwidth) each, the latent z written by the
  first and read by the second; what follows a layer (an activation, a gate) moves y twice more.
- The fused kernel moves x, y and the weights once. Its operations count the rank that it computes, in pieces,
  and run at a share of the rate of cuBLAS; its programs fill the multiprocessors in whole waves.
- Sizes that are no multiples of 16 it would load element by element: torch.
- It has to gain MARGIN, and the products to take LAUNCH_SECONDS: its operator is written in Python.

`benchmarks/kernels.py` prints what to put here.
"""

from dataclasses import dataclass

import torch

MODES = ("auto", "triton", "torch")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# By bytes of an element: the float32 sums of a block of rows have to fit the registers.
MAX_FUSED_RANK = {2: 256, 4: 128}
MAX_CONV2D_RANK = 128
MAX_DECODE_ROWS = 16
# Of several rows: every block of ranks reads x again, and at 28,672 features two products won.
MAX_DECODE_FEATURES = 16384
MAX_HEAD_DIM, MAX_OTHER_HEAD_DIM = 128, 64  # forward in half types; backward, and float32
MARGIN = 1.05
LAUNCH_SECONDS = 40e-6


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """What one class of GPUs does in a second.

    Attributes:
        half_rate: operations of cuBLAS, two to a multiply-add, at half precision.
        tf32_rate: the same of TF32.
        ieee_rate: the same of float32.
        bandwidth: bytes read or written.
        multiprocessors: how many.
        half_share: rate of the fused kernel over that of cuBLAS at half precision; 0 takes no kernel.
        tf32_share: the same of TF32.
        ieee_share: the same of float32.
        decode_rows: the most rows of half types that the decode kernels serve in a CUDA graph.
        attention: whether random-feature attention in half types is served by its kernels.
    """

    half_rate: float
    tf32_rate: float
    ieee_rate: float
    bandwidth: float
    multiprocessors: int
    half_share: float
    tf32_share: float
    ieee_share: float
    decode_rows: int = 0
    attention: bool = False

    def rates(self, dtype: torch.dtype, precision: str) -> tuple[float, float]:
        """Operations a second of cuBLAS and of the fused kernel, for products of this kind."""
        kind = "half" if dtype != torch.float32 else "tf32" if precision == "tf32" else "ieee"
        rate: float = getattr(self, f"{kind}_rate")
        return rate, rate * float(getattr(self, f"{kind}_share"))


# By compute capability: 0.7 of the operations and 0.9 of the bandwidth of NVIDIA's data sheets, A100 40 GB
# (312, 156, 19.5 TFLOP/s, 1.555 TB/s) and H100 SXM (989, 495, 67 TFLOP/s, 3.35 TB/s). An H200 reached
# 705 TFLOP/s and 4.2 TB/s. The shares are not known, see above.
_CLASSES = {
    8: DeviceClass(218e12, 109e12, 13.6e12, 1.4e12, 108, 0.2, 0.2, 0.2),
    9: DeviceClass(692e12, 346e12, 47e12, 3.0e12, 132, 0.2, 0.2, 0.2, decode_rows=16, attention=True),
}
_DEFAULT = _CLASSES[8]


def device_class(device: torch.device) -> DeviceClass:
    """The class of a CUDA device; an unknown one counts as an A100."""
    if torch.version.hip is not None:
        return _DEFAULT
    return _CLASSES.get(torch.cuda.get_device_capability(device)[0], _DEFAULT)


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured, in which nothing may synchronise."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def precision_of(setting: str) -> str:
    """The precision of float32 products that goes with torch's own setting, "ieee" unless that is TF32."""
    return "tf32" if setting == "tf32" else "ieee"


def choose_linear(
    device: DeviceClass,
    dtype: torch.dtype,
    precision: str,
    *,
    rows: int,
    ranks: tuple[int, ...],
    features: tuple[int, int],
    extra: int,
    captured: bool,
    forced: str,
) -> str:
    """Return "fused", "decode" or "torch" for linear layers of one input.

    Args:
        device: see `device_class`.
        dtype: of all tensors.
        precision: of float32 products.
        rows: B.
        ranks: of every layer.
        features: I, and O of all layers together.
        extra: numbers of a row that torch moves besides the products: 2 O for an activation or a gate.
        captured: whether this is inference that is captured in a CUDA graph, whose launches are free.
        forced: one of MODES.
    """
    if forced == "torch" or dtype not in DTYPES:
        return "torch"
    few, fits = rows <= MAX_DECODE_ROWS, max(ranks) <= MAX_FUSED_RANK[dtype.itemsize]
    if forced == "triton":
        return "decode" if few else "fused" if fits else "torch"
    if any(size % 16 for size in (*ranks, *features)):
        return "torch"
    if few:
        measured = dtype.itemsize == 2 and (rows == 1 or features[0] <= MAX_DECODE_FEATURES)
        return "decode" if captured and measured and rows <= device.decode_rows else "torch"
    if not fits:
        return "torch"
    plain = products_seconds(device, dtype, precision, rows, ranks, features, extra)
    fused = fused_seconds(device, dtype, precision, rows, ranks, features)
    return "fused" if plain >= max(LAUNCH_SECONDS, MARGIN * fused) else "torch"


def products_seconds(
    device: DeviceClass,
    dtype: torch.dtype,
    precision: str,
    rows: int,
    ranks: tuple[int, ...],
    features: tuple[int, int],
    extra: int,
) -> float:
    """Predicted time of two products for each layer; see `choose_linear` for the arguments."""
    rate, _ = device.rates(dtype, precision)
    inputs, outputs = features[0], features[1] / len(ranks)
    total = rows * extra * dtype.itemsize / device.bandwidth
    for rank in ranks:
        for wide in (inputs, outputs):
            moved = (rows * (wide + rank) + rank * wide) * dtype.itemsize
            total += max(2 * rows * rank * wide / rate, moved / device.bandwidth)
    return total


def fused_seconds(
    device: DeviceClass,
    dtype: torch.dtype,
    precision: str,
    rows: int,
    ranks: tuple[int, ...],
    features: tuple[int, int],
) -> float:
    """Predicted time of the fused kernel; see `choose_linear` for the arguments."""
    _, rate = device.rates(dtype, precision)
    if rate == 0.0:
        return float("inf")
    inputs, outputs = features[0], features[1] / len(ranks)
    # Every layer of a launch computes the rank of the widest.
    operations = 2 * rows * len(ranks) * padded_rank(max(ranks)) * (inputs + outputs)
    block = 128 if rows * len(ranks) >= 128 * device.multiprocessors else 64
    programs = -(-rows // block) * len(ranks)
    waves = -(-programs // device.multiprocessors)
    busy = programs / (waves * device.multiprocessors)
    weights = sum(rank * (inputs + outputs) for rank in ranks)
    moved = (rows * sum(features) + weights) * dtype.itemsize
    return max(operations / (rate * busy), moved / (device.bandwidth * min(1.0, 2 * busy)))


def padded_rank(rank: int) -> int:
    """The rank that the fused kernel computes: a power of two to 64, or a multiple of 64."""
    return max(16, 1 << (rank - 1).bit_length()) if rank <= 64 else -(-rank // 64) * 64


def choose_conv2d(dtype: torch.dtype, *, rank: int, forced: str) -> str:
    """Return "fused" or "torch" for a kh x kw convolution to so many channels followed by a 1 x 1 one.

    Only PANTHER_COMPILE_KERNEL=triton takes the kernel, see the head of the file.
    """
    fits = dtype in DTYPES and rank <= MAX_CONV2D_RANK
    return "fused" if forced == "triton" and fits else "torch"


def choose_attention(
    device: DeviceClass,
    dtype: torch.dtype,
    *,
    head_dim: int,
    columns: int,
    forced: str,
    backward: bool = False,
) -> str:
    """Return "fused" or "torch" for random-feature attention.

    Args:
        device: see `device_class`.
        dtype: of all tensors.
        head_dim: width of q and k.
        columns: width of v.
        forced: one of MODES.
        backward: whether gradients are computed, or will be.
    """
    widest = MAX_HEAD_DIM if dtype.itemsize == 2 and not backward else MAX_OTHER_HEAD_DIM
    if forced == "torch" or dtype not in DTYPES or max(head_dim, columns) > widest:
        return "torch"
    measured = device.attention and dtype.itemsize == 2 and head_dim % 16 == columns % 16 == 0
    return "fused" if forced == "triton" or measured else "torch"
