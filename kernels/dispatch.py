"""The implementation that serves a shape on a GPU: a Triton kernel, or cuBLAS and cuDNN through torch.

"auto" takes a kernel where it was measured to win, in bfloat16 on an H100 and an H200
(docs/benchmarks/kernels.md):

- Linear layers only while a CUDA graph is captured. In eager mode a launch of ours, from Python, takes the
  processor 250 to 650 microseconds, two products 45 to 80: more than either takes the device.
- There, a few rows: the decode kernels, 1.1 to 4.4 times as fast as two products for one row, and in float32
  1.1 to 3.2 times; of more rows in float32 it takes two products.
- There, many rows: two products of cuBLAS. The fused kernel, which keeps the latent on the chip, reaches a
  third of their rate; it wins where launches and memory are what takes the time: layers of one narrow input
  together (1.2 to 1.6 times), and very many rows of a low rank (1.1 to 1.3). In float32 it never does.
- Random-feature attention in half types: 2.3 to 14 times as fast as plain torch, whose steps are many. Its
  backward wins up to a width of 64.
- Convolutions: torch. The kernel wins at 64 and 128 channels of large images, less than its launch takes.

Sizes that are no multiples of 16 a kernel would load element by element: torch.
"""

import functools
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
# Where the fused kernel wins: several layers of one input at most so wide, of ranks at most so large ...
MAX_TOGETHER_FEATURES, MAX_TOGETHER_RANK = 1024, 192
# ... or one of at least so many rows and features, and of a rank between these.
MIN_FUSED_ROWS, MIN_FUSED_FEATURES, LOW_RANKS = 16384, 768, range(33, 65)
MAX_HEAD_DIM, MAX_OTHER_HEAD_DIM = 128, 64  # forward in half types; backward, and float32


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """What was measured on one class of GPUs.

    Attributes:
        linear: whether linear layers of half types, or of one row, are served by kernels in a CUDA graph.
        attention: whether random-feature attention in half types is served by its kernels.
    """

    linear: bool = False
    attention: bool = False


_MEASURED = {9: DeviceClass(linear=True, attention=True)}  # by compute capability


@functools.cache
def device_class(device: torch.device) -> DeviceClass:
    """The class of a CUDA device."""
    if torch.version.hip is not None:
        return DeviceClass()
    return _MEASURED.get(torch.cuda.get_device_capability(device)[0], DeviceClass())


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured, in which nothing may synchronise."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def precision_of(setting: str) -> str:
    """The precision of float32 products that goes with torch's own setting, "ieee" unless that is TF32."""
    return "tf32" if setting == "tf32" else "ieee"


def is_left_to_torch(forced: str) -> bool:
    """Whether `choose_linear` says "torch" whatever is asked of it: quick, for in eager mode a GPU waits."""
    return forced == "torch" or (forced == "auto" and not is_capturing())


def choose_linear(
    device: DeviceClass,
    dtype: torch.dtype,
    *,
    rows: int,
    ranks: tuple[int, ...],
    features: tuple[int, int],
    captured: bool,
    forced: str,
) -> str:
    """Return "fused", "decode" or "torch" for linear layers of one input.

    Args:
        device: see `device_class`.
        dtype: of all tensors.
        rows: B.
        ranks: of every layer.
        features: I, and O of all layers together.
        captured: whether this is inference that is captured in a CUDA graph, whose launches are free.
        forced: one of MODES.
    """
    if forced == "torch" or dtype not in DTYPES:
        return "torch"
    few, fits = rows <= MAX_DECODE_ROWS, max(ranks) <= MAX_FUSED_RANK[dtype.itemsize]
    if forced == "triton":
        return "decode" if few else "fused" if fits else "torch"
    measured = device.linear and captured and (dtype.itemsize == 2 or rows == 1)
    if not measured or any(size % 16 for size in (*ranks, *features)):
        return "torch"
    if few:
        return "decode" if rows == 1 or features[0] <= MAX_DECODE_FEATURES else "torch"
    return "fused" if fits and _fusing_wins(rows, ranks, features) else "torch"


def _fusing_wins(rows: int, ranks: tuple[int, ...], features: tuple[int, int]) -> bool:
    """Whether the fused kernel was the faster one at such sizes; see `choose_linear` for the arguments."""
    if len(ranks) > 1:
        return features[0] <= MAX_TOGETHER_FEATURES and max(ranks) <= MAX_TOGETHER_RANK
    return rows >= MIN_FUSED_ROWS and min(features) >= MIN_FUSED_FEATURES and ranks[0] in LOW_RANKS


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
