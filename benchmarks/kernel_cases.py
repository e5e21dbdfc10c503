"""What `kernels.py` times: the operations of some models, at which sizes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from kernel_low_precision import KINDS as LOW_PRECISION
from kernel_low_precision import layers_of, stored_layers
from torch import Tensor

from panther_compile.kernels import dispatch, reference
from panther_compile.kernels.plain_attention import favor_attention_forward
from panther_compile.ops import (
    Factors,
    favor_attention,
    sketched_conv2d,
    sketched_linear,
    sketched_multi_linear,
)

# model -> (in_features, out_features)
LINEAR = {
    "BERT-base": ((768, 768), (768, 3072), (3072, 768)),
    "ViT-L": ((1024, 1024), (1024, 4096), (4096, 1024)),
    "Llama-1B": ((2048, 2048), (2048, 512), (2048, 8192), (8192, 2048)),
    "Llama-7B": ((4096, 4096), (4096, 11008), (11008, 4096)),
    "Llama-70B": ((8192, 8192), (8192, 1024), (8192, 28672), (28672, 8192)),
}
# (in_features, outputs of q, k and v)
PROJECTIONS = {
    "BERT-base": (768, (768, 768, 768)),
    "Llama-1B": (2048, (2048, 512, 512)),
    "Llama-7B": (4096, (4096, 4096, 4096)),
    "Llama-70B": (8192, (8192, 1024, 1024)),
}
# (channels in, out, taps, stride, height and width)
CONV2D = {
    "ResNet-50": (
        (64, 64, 3, 1, 56),
        (128, 128, 3, 1, 28),
        (256, 256, 3, 1, 14),
        (512, 512, 3, 1, 7),
        (3, 64, 7, 2, 224),
    )
}
# (heads, head_dim, features)
ATTENTION = {"BERT-base": (12, 64, 256), "Llama-7B": (32, 128, 256)}
MODELS = (*LINEAR, *CONV2D)
ROWS = (1, 4, 8, 16, 128, 512, 2048, 4096, 16384)
RATIOS = (0.75, 0.5, 0.25)
IMAGES = (1, 32)
LENGTHS = (512, 2048, 8192)
# The first tier, which shows most: two ratios of these models, at these rows and lengths.
FIRST_MODELS = ("BERT-base", "Llama-1B", "Llama-7B", "Llama-70B", "ResNet-50")
FIRST_RATIOS = (0.5, 0.25)
FIRST_ROWS = (1, 16, 512, 4096)
FIRST_LENGTHS = (512, 2048)
# The most telling first. "tf32" is float32 with products in TF32, "fp32" with IEEE products.
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32, "fp32": torch.float32}
CHEAP, LOW, COMPILED = "cheap", "low precision", "compiled"
PASSES = ("forward", "backward")
LABELS = ("op", "model", "shape", "rows", "form", "ratio", "rank")


@dataclass(frozen=True)
class Draw:
    """Where random leaves come from."""

    device: torch.device
    dtype: torch.dtype

    def __call__(self, *shape: int, layout: torch.memory_format = torch.contiguous_format) -> Tensor:
        """A random leaf."""
        drawn = (torch.randn(shape, device=self.device) * shape[-1] ** -0.5).to(self.dtype)
        return drawn.contiguous(memory_format=layout).requires_grad_()


class Run(NamedTuple):
    """A function and what it is called with, all leaves that want a gradient."""

    function: Callable[..., Any]
    inputs: tuple[Tensor, ...]


class Runs(NamedTuple):
    """The ways to do one operation: our operator, plain torch, and what is replaced."""

    ours: Run
    plain: Run
    dense: Run


@dataclass(frozen=True)
class Case:
    """One operation at one size.

    Attributes:
        labels: the values of LABELS, for the table; they tell cases apart.
        sizes: what the dispatch function of this op is asked with.
        vectors: rows of its products, positions of a convolution.
        width: the fewest features that go in or come out of a product; 0 for attention.
        operations: of the sketched forward, two to a multiply-add.
        traffic: numbers that its forward reads and writes, without the latent.
        build: makes the inputs, in memory, and returns the ways to run.
        compiled: whether torch.compile is tried.
        quantize: makes of the inputs of plain torch a run in one of LOW_PRECISION; None where there is none.
    """

    labels: dict[str, Any]
    sizes: dict[str, Any]
    vectors: int
    width: int
    operations: float
    traffic: int
    build: Callable[[Draw], Runs]
    compiled: bool = True
    quantize: Callable[[str, tuple[Tensor, ...]], Run] | None = None

    @property
    def is_model(self) -> bool:
        """Whether it is a whole model, in inference."""
        return bool(self.labels["op"] == "model")

    def passes(self, contender: str) -> tuple[str, ...]:
        """What of a contender is timed."""
        return PASSES[:1] if self.is_model or contender in LOW_PRECISION else PASSES

    @property
    def tier(self) -> int:
        """0 for what shows most, else 1."""
        first = {"favor": FIRST_LENGTHS, "conv2d": IMAGES}.get(self.labels["op"], FIRST_ROWS)
        first_tier = self.is_model or (
            self.labels["rows"] in first and self.labels["ratio"] in (None, *FIRST_RATIOS)
        )
        return int(not first_tier or self.labels["model"] not in FIRST_MODELS)

    def contenders(self, stage: str, dtype: str, *, on_cuda: bool) -> list[str]:
        """Who takes part in a stage, in one of DTYPES."""
        if stage == COMPILED:
            return ["compiled", *(["compiled dense"] if self.is_model else [])]
        if stage == LOW:  # scales for each row go with bfloat16 alone
            return [*LOW_PRECISION] if dtype == "bf16" else []
        if not on_cuda:
            return ["operator", "two products", "dense"]
        if self.is_model:
            return ["triton", "auto", "two products", "dense"]
        # Which device makes no difference where a kernel is asked for.
        found = choice(self.labels["op"], self.sizes, dispatch.DeviceClass(), dtype, forced="triton")
        return [*(["triton"] if found != "torch" else []), "two products", "dense"]

    def picks(self, dtype: str, device: dispatch.DeviceClass | None, *, trains: bool = False) -> str:
        """The contender that a layer is served by under PANTHER_COMPILE_KERNEL=auto; None is a CPU.

        As `has_kernel` of the operators says it of inference in a CUDA graph.
        """
        if self.is_model and device is not None:
            return "auto"
        if device is None or choice(self.labels["op"], self.sizes, device, dtype, trains=trains) == "torch":
            return "two products"
        return "triton"


def choice(
    op: str,
    sizes: dict[str, Any],
    device: dispatch.DeviceClass,
    dtype: str,
    forced: str = "auto",
    *,
    trains: bool = False,
) -> str:
    """What kernels/dispatch.py answers for a case in one of DTYPES: "fused", "decode" or "torch"."""
    kind = DTYPES[dtype]
    if op == "favor":
        return dispatch.choose_attention(device, kind, **sizes, forced=forced, backward=trains)
    if op == "conv2d":
        return dispatch.choose_conv2d(kind, **sizes, forced=forced)
    options = {"captured": not trains, "forced": forced}
    return dispatch.choose_linear(device, kind, **sizes, **options)


def labels(*values: Any) -> dict[str, Any]:
    """The values of LABELS, by name."""
    return dict(zip(LABELS, values, strict=True))


def rounded(rank: int) -> int:
    """A rank as a plan for CUDA rounds it: to 64, or 16, where that is fine enough."""
    step = 64 if rank >= 512 else 16 if rank >= 32 else 1
    return max(1, rank - rank % step)


def pair_rank(inputs: int, outputs: int, ratio: float) -> int:
    """The largest r with r (I + O) <= ratio I O, rounded."""
    return rounded(int(ratio * inputs * outputs / (inputs + outputs)))


def pivoted_rank(inputs: int, outputs: int, ratio: float) -> int:
    """The largest r with r (I + O - r) <= ratio I O, rounded."""
    total = inputs + outputs
    root = math.sqrt(total * total - 4 * ratio * inputs * outputs)
    return rounded(min(inputs - 1, int((total - root) / 2)))


def linear_case(model: str, inputs: int, outputs: int, rows: int, ratio: float, form: str) -> Case:
    """One layer, as a plain pair or pivoted."""
    start = 0 if form == "pivoted" else None
    rank = (pair_rank if start is None else pivoted_rank)(inputs, outputs, ratio)
    columns = inputs if start is None else inputs - rank

    def ours(x: Tensor, down: Tensor, up: Tensor, bias: Tensor) -> Tensor:
        return sketched_linear(x, down, up, bias, start=start)

    def plain(x: Tensor, down: Tensor, up: Tensor, bias: Tensor) -> Tensor:
        if start is None:
            return reference.pair_linear(x, down, up, bias)
        if torch.compiler.is_compiling():  # as the layer does
            return reference.pivoted_linear_by_rows(x, down, up, bias, start=start)
        return reference.pivoted_linear(x, down, up, bias, start=start)

    def build(draw: Draw) -> Runs:
        x, bias = draw(rows, inputs), draw(outputs)
        given = (x, draw(rank, columns), draw(outputs, rank), bias)
        return Runs(Run(ours, given), Run(plain, given), Run(F.linear, (x, draw(outputs, inputs), bias)))

    stored = rank * (columns + outputs)
    return Case(
        labels("linear", model, f"{inputs}->{outputs}", rows, form, ratio, rank),
        {"rows": rows, "ranks": (rank,), "features": (inputs, outputs)},
        rows,
        min(inputs, outputs),
        2.0 * rows * stored,
        rows * (inputs + outputs) + stored + outputs,
        build,
        quantize=quantizer([start]) if not any(size % 16 for size in (inputs, outputs, rank)) else None,
    )


def quantizer(starts: Sequence[int | None]) -> Callable[[str, tuple[Tensor, ...]], Run]:
    """Makes of x and the factors of layers, with a bias or without, a run in one of LOW_PRECISION."""

    def quantize(kind: str, inputs: tuple[Tensor, ...]) -> Run:
        x, *factors = (one.detach() for one in inputs)
        bias = factors.pop() if len(factors) % 2 else None
        return Run(layers_of(kind, starts), (x, bias, *stored_layers(kind, factors)))

    return quantize


def projections_case(model: str, inputs: int, outputs: Sequence[int], rows: int, ratio: float) -> Case:
    """The projections of attention, plain pairs; dense they are one layer."""
    ranks = tuple(pair_rank(inputs, out, ratio) for out in outputs)

    def ours(x: Tensor, *factors: Tensor) -> tuple[Tensor, ...]:
        layers = [Factors(down, up, None, None) for down, up in zip(factors[::2], factors[1::2], strict=True)]
        return tuple(sketched_multi_linear(x, layers))

    def plain(x: Tensor, *factors: Tensor) -> tuple[Tensor, ...]:
        pairs = zip(factors[::2], factors[1::2], strict=True)
        return tuple(reference.pair_linear(x, down, up, None) for down, up in pairs)

    def build(draw: Draw) -> Runs:
        x = draw(rows, inputs)
        given = [x]
        for out, rank in zip(outputs, ranks, strict=True):
            given += [draw(rank, inputs), draw(out, rank)]
        dense = (x, draw(sum(outputs), inputs))
        return Runs(Run(ours, tuple(given)), Run(plain, tuple(given)), Run(F.linear, dense))

    stored = sum(rank * (inputs + out) for out, rank in zip(outputs, ranks, strict=True))
    shape = f"{inputs}->{'+'.join(map(str, outputs))}"
    return Case(
        labels("multi_linear", model, shape, rows, "pair", ratio, list(ranks)),
        {"rows": rows, "ranks": ranks, "features": (inputs, sum(outputs))},
        rows,
        min(inputs, *outputs),
        2.0 * rows * stored,
        rows * (inputs + sum(outputs)) + stored,
        build,
        quantize=quantizer([None] * len(ranks)) if not any(rank % 16 for rank in ranks) else None,
    )


def conv2d_case(model: str, shape: tuple[int, ...], images: int, ratio: float) -> Case:
    """A convolution as kh x kw -> 1 x 1, channels last."""
    inputs, outputs, taps, stride, size = shape
    rank, pad = pair_rank(inputs * taps * taps, outputs, ratio), taps // 2
    side = (size + 2 * pad - taps) // stride + 1
    positions = images * side * side

    def ours(x: Tensor, down: Tensor, up: Tensor, bias: Tensor) -> Tensor:
        return sketched_conv2d(x, down, up, bias, stride=(stride, stride), padding=(pad, pad))

    def plain(x: Tensor, down: Tensor, up: Tensor, bias: Tensor) -> Tensor:
        return F.conv2d(F.conv2d(x, down, None, stride, pad), up, bias)

    def dense(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.conv2d(x, weight, bias, stride, pad)

    def build(draw: Draw) -> Runs:
        # The weights too, as model.to(memory_format=...) would have them, else cuDNN copies them each time.
        last = torch.channels_last
        x, bias = draw(images, inputs, size, size, layout=last), draw(outputs)
        down, up = draw(rank, inputs, taps, taps, layout=last), draw(outputs, rank, 1, 1, layout=last)
        weight = draw(outputs, inputs, taps, taps, layout=last)
        given = (x, down, up, bias)
        return Runs(Run(ours, given), Run(plain, given), Run(dense, (x, weight, bias)))

    stored = rank * (inputs * taps * taps + outputs)
    return Case(
        labels(
            "conv2d",
            model,
            f"{inputs}->{outputs} {taps}x{taps}/{stride} {size}",
            images,
            "channel",
            ratio,
            rank,
        ),
        {"rank": rank},
        positions,
        min(inputs, outputs),
        2.0 * positions * stored,
        images * inputs * size * size + positions * outputs + stored + outputs,
        build,
    )


def attention_case(model: str, length: int, causal: bool) -> Case:
    """Random-feature attention; "dense" is exact attention, "two products" the reference in torch."""
    heads, head_dim, features = ATTENTION[model]
    form = "causal" if causal else "both"

    def build(draw: Draw) -> Runs:
        given = tuple(draw(1, heads, length, head_dim) for _ in range(3))
        generator = torch.Generator().manual_seed(0)
        directions = reference.favor_directions(features, head_dim, generator).to(draw.device, draw.dtype)

        def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return favor_attention(q, k, v, directions, causal=causal)

        def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return favor_attention_forward(q, k, v, directions, None, causal=causal)

        def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

        return Runs(Run(ours, given), Run(plain, given), Run(exact, given))

    return Case(
        labels("favor", model, f"{heads}x{head_dim}, {features} features", length, form, None, features),
        {"head_dim": head_dim, "columns": head_dim},
        length,
        0,
        2.0 * heads * length * features * 4 * head_dim,
        4 * heads * length * head_dim,
        build,
        compiled=not causal,  # its loop over chunks is unrolled: minutes of compiling for one number
    )
