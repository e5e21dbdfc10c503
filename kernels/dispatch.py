"""Which implementation serves a shape on a GPU: a Triton kernel, or cuBLAS and cuDNN through torch.

NOT YET MEASURED. Every number is from data sheets, and every rule is an argument in plain arithmetic:

- A fused kernel saves the traffic of z and a launch, and multiplies less efficiently than cuBLAS. So it is
  taken where memory is the limit: multiply-adds of the pair for each byte of x and y below the
  balance of the device (for two linear layers in half precision that says: rank below the balance).
- It has one program to 64 rows or so: below FILL of them the device stands half empty, and cuBLAS splits.
- At 16 rows or fewer both read every weight once. The Triton pair of launches is taken where it
  replaces more than two: several layers, an activation, or the sum of the pivoted form.
- Random-feature attention in torch writes its features (length x M) five times or more: always Triton.

`benchmarks/kernels.py` prints what to put here.
"""

from dataclasses import dataclass

import torch

MODES = ("auto", "triton", "torch")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_FUSED_RANK = 512  # BLOCK_M x rank float32 sums have to fit the registers
MAX_DECODE_ROWS = 16
MAX_HEAD_DIM = 128


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """Thresholds for one class of GPUs.

    Attributes:
        half_balance: operations for each byte of memory traffic, at half precision.
        tf32_balance: the same of TF32.
        ieee_balance: the same of float32.
        fill: rows that fill half of the device with programs of 64.
    """

    half_balance: float
    tf32_balance: float
    ieee_balance: float
    fill: int

    def balance(self, dtype: torch.dtype, precision: str) -> float:
        """Operations for each byte, of products of this kind."""
        if dtype != torch.float32:
            return self.half_balance
        return self.tf32_balance if precision == "tf32" else self.ieee_balance


# By compute capability: A100 40 GB (312, 156, 19.5 TFLOP/s over 1.555 TB/s, 108 multiprocessors) and
# H100 SXM (989, 495, 67 TFLOP/s over 3.35 TB/s, 132 of them). NVIDIA data sheets; not measured.
_CLASSES = {
    8: DeviceClass(200.0, 100.0, 12.5, 3456),
    9: DeviceClass(295.0, 148.0, 20.0, 4224),
}
_DEFAULT = _CLASSES[8]


def device_class(device: torch.device) -> DeviceClass:
    """The class of a CUDA device; an unknown one counts as an A100."""
    if torch.version.hip is not None:
        return _DEFAULT
    return _CLASSES.get(torch.cuda.get_device_capability(device)[0], _DEFAULT)


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
    extra: bool,
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
        extra: whether torch would need more than the two products: an activation, or pivots.
        forced: one of MODES.
    """
    if forced == "torch" or dtype not in DTYPES:
        return "torch"
    few = rows <= MAX_DECODE_ROWS
    if forced == "triton":
        return "decode" if few else "fused" if max(ranks) <= MAX_FUSED_RANK else "torch"
    if few:
        return "decode" if extra or len(ranks) > 1 else "torch"
    operations = 2 * sum(ranks) * (features[0] + features[1] / len(ranks))
    traffic = dtype.itemsize * sum(features)
    memory_bound = operations < device.balance(dtype, precision) * traffic
    fits = max(ranks) <= MAX_FUSED_RANK and rows * len(ranks) >= device.fill
    return "fused" if memory_bound and fits else "torch"


def choose_conv2d(
    device: DeviceClass,
    dtype: torch.dtype,
    precision: str,
    *,
    positions: int,
    rank: int,
    channels: tuple[int, int],
    taps: int,
    forced: str,
) -> str:
    """Return "fused" or "torch" for a kh x kw convolution followed by a 1 x 1 one.

    Args:
        device: see `device_class`.
        dtype: of all tensors.
        precision: of float32 products.
        positions: of the output, over the batch.
        rank: channels between the two.
        channels: in and out.
        taps: kh kw.
        forced: one of MODES.
    """
    if forced == "torch" or dtype not in DTYPES or rank > MAX_FUSED_RANK:
        return "torch"
    operations = 2 * rank * (channels[0] * taps + channels[1])
    memory_bound = operations < device.balance(dtype, precision) * dtype.itemsize * sum(channels)
    return "fused" if forced == "triton" or (memory_bound and positions >= device.fill) else "torch"


def choose_attention(dtype: torch.dtype, *, head_dim: int, columns: int, forced: str) -> str:
    """Return "fused" or "torch" for random-feature attention: dtype and width of q and of v."""
    if forced == "torch" or dtype not in DTYPES or max(head_dim, columns) > MAX_HEAD_DIM:
        return "torch"
    return "fused"
