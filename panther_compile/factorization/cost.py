"""Whether a sketched layer will be faster than the dense one: a roofline in plain arithmetic.

    seconds = launches + multiply-adds / rate + activations moved / bandwidth + weights read / bandwidth

summed over the products of a layer. Activations are what enters and leaves each product; multiply-adds
count an output width rounded up to the vector width, TILE, because convolutions on a CPU compute
in blocks of 16 channels: rank 49 costs as much as rank 64.

The constants of CPU were fitted to 1,176 measurements: the convolutions of ResNet-50 at 75, 50 and 25 %,
every scheme, ranks exact and rounded down to 16, batch 1 and 32, both memory formats, float32, torch 2.13
(oneDNN), one core of an AMD EPYC. The predicted speed-up is within 10 % of the measured one in half of the
cases and within 45 % in nine of ten. Whether it is below 0.9 is predicted right in 97 %: of the 41 that
are, it finds 26, among them all strided ones but the stem, and it names 18 that are not. It misses inputs of
50 MB and more, where memory allocation decides, and the stem of 3 channels, for which there is a rule
(`STEM_CHANNELS`). Linear layers of 384 to 768 features at batch 1 to 512 come within 30 %. On the 180
convolutions of docs/benchmarks/layers.md, timed later, it was right in 96 % and found 5 of the 12 slower
ones; most others are the stem. Grouped convolutions and GPUs were not measured.
"""

import math
from dataclasses import dataclass, replace

import torch

from panther_compile.factorization.candidates import Candidate
from panther_compile.factorization.conv2d import BASIS_SHARE, is_multiplied_out

TILE = 16
# A sketch predicted to run at less than this share of the dense speed is not worth its place.
WORTHWHILE = 0.9
# A convolution of so few input channels, the stem of an image model, ran at .5 to .8 of the dense speed with
# every scheme at batch 32. The roofline does not show it, so it is a rule.
STEM_CHANNELS, STEM_SPEEDUP = 4, 0.7
# Schemes with a product ahead of the stride ran at .45 to .9 of the dense speed at batch 32 now and then,
# where the roofline says up to 1.3; "channel" strides in its first product and was never slower.
AHEAD_OF_STRIDE, STRIDED_SPEEDUP = ("spatial", "tucker2"), 0.7


@dataclass(frozen=True, slots=True)
class Device:
    """What one class of devices does in a second.

    Attributes:
        macs_per_second: float32 multiply-adds in a large product.
        activation_bytes_per_second: effective, layout changes and allocation included.
        weight_bytes_per_second: of weights, which are small and stay in cache.
        launch_seconds: fixed time of one operation.
        positions: rows, or output positions, of one call where they are not known.
    """

    macs_per_second: float
    activation_bytes_per_second: float
    weight_bytes_per_second: float
    launch_seconds: float
    positions: int


CPU = Device(60e9, 8e9, 100e9, 8e-6, 784)
# Order of magnitude of a data centre card, from data sheets; not measured.
CUDA = Device(30e12, 1.5e12, 3e12, 5e-6, 16384)


def device_class(device: torch.device) -> Device:
    """The class of a torch device; what is neither a CPU nor a GPU counts as a CPU."""
    return CUDA if device.type == "cuda" else CPU


@dataclass(frozen=True, slots=True)
class Product:
    """One product: so many numbers read and written, so many weights, so many multiply-adds."""

    macs: float
    activations: float
    weights: float


def seconds(products: tuple[Product, ...], device: Device = CPU, itemsize: int = 4) -> float:
    """Predicted time of the products, one after the other."""
    return sum(
        device.launch_seconds
        + product.macs / device.macs_per_second
        + product.activations * itemsize / device.activation_bytes_per_second
        + product.weights * itemsize / device.weight_bytes_per_second
        for product in products
    )


def speedup(
    candidate: Candidate,
    rank: int,
    shape: tuple[int, ...],
    *,
    groups: int = 1,
    stride: tuple[int, int] = (1, 1),
    positions: int | None = None,
    device: Device = CPU,
) -> float:
    """Predicted time of the dense layer over that of the candidate at a rank; rules for stems and strides.

    Args:
        candidate: of a linear layer or a convolution.
        rank: in 1..candidate.max_rank.
        shape: of the dense weight, (O, I) or (O, I/G, kh, kw).
        groups: G.
        stride: of the convolution.
        positions: rows of the input, or output positions times batch; the device's default if None.
        device: the class of device.
    """
    if len(shape) == 4 and shape[1] * groups <= STEM_CHANNELS:
        return STEM_SPEEDUP
    if stride != (1, 1) and candidate.scheme in AHEAD_OF_STRIDE:
        return STRIDED_SPEEDUP
    positions = device.positions if positions is None else positions
    dense = dense_products(shape, groups, stride, positions)
    sketched = sketched_products(candidate.scheme, candidate.ranks(rank), shape, groups, stride, positions)
    return seconds(dense, device) / seconds(sketched, device)


def dense_products(
    shape: tuple[int, ...], groups: int, stride: tuple[int, int], positions: int
) -> tuple[Product, ...]:
    """The dense layer; see `speedup` for the arguments."""
    outputs, inputs, kh, kw = _four(shape)
    entering = positions * stride[0] * stride[1]
    return (_product(inputs * groups, outputs, kh * kw, groups, entering, positions),)


def sketched_products(
    scheme: str,
    ranks: tuple[int, ...],
    shape: tuple[int, ...],
    groups: int,
    stride: tuple[int, int],
    positions: int,
) -> tuple[Product, ...]:
    """The products of a scheme; see `speedup` for the arguments.

    What runs ahead of a stride sees more positions: the first product of "tucker2", and along the width the
    first of "spatial".
    """
    outputs, inputs, kh, kw = _four(shape)
    inputs, first, last = inputs * groups, ranks[0] * groups, ranks[-1] * groups
    entering, between = positions * stride[0] * stride[1], positions * stride[1]
    if scheme == "pivoted":
        down = _product(inputs - first, first, 1, 1, entering, positions)
        pivots = first * (entering + positions)  # read with the input, then written and added to
        down = replace(down, activations=down.activations + pivots)
        return down, _product(first, outputs, 1, 1, positions, positions)
    if scheme == "spatial":
        return (
            _product(inputs, first, kh, groups, entering, between),
            _product(first, outputs, kw, groups, between, positions),
        )
    if scheme == "basis" and is_multiplied_out(ranks[0], kh * kw, outputs // groups):
        size = math.prod(shape)
        made = Product(size * ranks[0], size, ranks[0] * (kh * kw + outputs * inputs // groups))
        return made, *dense_products(shape, groups, stride, positions)
    if scheme == "basis":
        filtered = _product(1, ranks[0], kh * kw, 1, entering * inputs, positions * inputs)
        mixed = _product(inputs * ranks[0], outputs, 1, groups, positions, positions)
        return _slower(filtered), _slower(mixed)
    up = _product(last, outputs, 1, groups, positions, positions)
    if scheme == "tucker2":
        return (
            _product(inputs, first, 1, groups, entering, entering),
            _product(first, last, kh * kw, groups, entering, positions),
            up,
        )
    return _product(inputs, first, kh * kw, groups, entering, positions), up  # "channel", "pair"


def _slower(product: Product) -> Product:
    return replace(product, macs=product.macs / BASIS_SHARE, activations=product.activations / BASIS_SHARE)


def rank_step(candidate: Candidate, device: Device | None = None) -> int:
    """The multiple to which ranks should be rounded, inside the budget.

    Convolutions of k x k run in blocks of 16 channels, so that ranks between cost as much as the next
    multiple. Matrix products gain some 3 % from multiples of 8 on a CPU. On CUDA rows of factors are loaded
    16 bytes at a time, and multiplied 64 columns at a time, only where their length is a multiple of that.
    """
    if device is CUDA and candidate.max_rank >= 4 * TILE:
        return 4 * TILE if candidate.max_rank >= 64 * TILE else TILE
    if candidate.scheme in ("channel", "spatial", "tucker2"):
        return TILE if candidate.max_rank >= 4 * TILE else 1
    return 8 if candidate.max_rank >= 120 else 4 if candidate.max_rank >= 60 else 1


def finest_step(candidate: Candidate, device: Device | None = None) -> int:
    """The multiple to which ranks are rounded where `rank_step` would miss the budget."""
    if device is not CUDA or candidate.max_rank < 4 * TILE:
        return 1
    return TILE if candidate.max_rank >= 8 * TILE else TILE // 4  # of small layers launching takes the time


def _product(inputs: int, outputs: int, taps: int, groups: int, entering: int, leaving: int) -> Product:
    """A convolution of so many taps; `entering` and `leaving` are positions."""
    inputs_per_group, outputs_per_group = inputs // groups, outputs // groups
    tiled = groups * (-(-outputs_per_group // TILE) * TILE)
    return Product(
        macs=leaving * inputs_per_group * taps * tiled,
        activations=entering * inputs + leaving * outputs,
        weights=inputs_per_group * outputs * taps,
    )


def _four(shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """A weight's shape as that of a convolution."""
    outputs, inputs, kh, kw = (*shape, 1, 1)[:4]
    return outputs, inputs, kh, kw
