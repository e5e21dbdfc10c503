"""Whole models for `kernels.py`: an encoder like BERT-base, and a decoder like Llama-1B, in inference.

Plain torch with random weights, on which times do not depend; no other library need be there. Every linear
layer of a block is sketched at half its numbers, in the pivoted form and with ranks rounded as on CUDA.

    encode    (B, L) tokens                         -> hidden states (B, L, H)
    prefill   (B, L) tokens, causal                 -> logits (B, 1, vocabulary) of the last
    decode    (B, 1) tokens, `before` in a cache    -> logits; one CUDA graph, replayed

"dense" is the model, "two products" its sketch in plain torch, "triton" with our kernels wherever they run,
"auto" as dispatch has it; "compiled" and "compiled dense" are torch.compile of the sketch and the model.
"""

# B batch, L tokens, H hidden, N heads, D head_dim

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from kernel_cases import Case, Draw, Run, Runs, labels, pivoted_rank
from torch import Tensor, nn

from panther_compile.layers import SketchedLinear

RATIO = 0.5


@dataclass(frozen=True)
class Widths:
    """The size of a model.

    Attributes:
        layers: blocks.
        hidden: H.
        heads: of queries.
        shared: heads of keys and values.
        inner: features within a feed-forward block.
        vocabulary: tokens.
        decoder: causal, with rotary embeddings, a gate and a head; else an encoder with biases and GELU.
    """

    layers: int
    hidden: int
    heads: int
    shared: int
    inner: int
    vocabulary: int
    decoder: bool

    @property
    def head_dim(self) -> int:
        """D."""
        return self.hidden // self.heads

    def linear(self) -> Iterator[tuple[int, int]]:
        """In and out features of the linear layers of a block."""
        wide, narrow = self.heads * self.head_dim, self.shared * self.head_dim
        yield from ((self.hidden, wide), (self.hidden, narrow), (self.hidden, narrow), (wide, self.hidden))
        yield from [(self.hidden, self.inner)] * (2 if self.decoder else 1)
        yield self.inner, self.hidden


WIDTHS = {
    "BERT-base": Widths(12, 768, 12, 12, 3072, 30522, decoder=False),
    "Llama-1B": Widths(16, 2048, 32, 8, 8192, 128256, decoder=True),
}
TINY = {
    "BERT-base": Widths(2, 64, 4, 4, 96, 99, decoder=False),
    "Llama-1B": Widths(2, 64, 4, 2, 96, 99, decoder=True),
}
# (what, B, L, tokens before)
CALLS: dict[str, tuple[tuple[str, int, int, int], ...]] = {
    "BERT-base": (("encode", 1, 128, 0), ("encode", 32, 128, 0)),
    "Llama-1B": (
        ("prefill", 1, 512, 0),
        ("prefill", 8, 1024, 0),
        ("decode", 1, 1, 1023),
        ("decode", 8, 1, 1023),
    ),
}


def layer(inputs: int, outputs: int, widths: Widths, sketched: bool) -> nn.Module:
    """A linear layer of a block, or its sketch."""
    bias = not widths.decoder
    if not sketched:
        return nn.Linear(inputs, outputs, bias=bias)
    return SketchedLinear(inputs, outputs, pivoted_rank(inputs, outputs, RATIO), bias=bias, form="pivoted")


class Block(nn.Module):
    """Attention and a feed-forward block, each added to its input, normed before."""

    def __init__(self, widths: Widths, sketched: bool) -> None:
        super().__init__()
        self.widths = widths
        made = [layer(*sizes, widths, sketched) for sizes in widths.linear()]
        self.q, self.k, self.v, self.o = made[:4]
        self.feed = nn.ModuleList(made[4:])
        self.norms = nn.ModuleList(nn.LayerNorm(widths.hidden) for _ in range(2))

    def forward(self, x: Tensor, turns: Tensor | None, cache: Tensor | None) -> Tensor:
        """Map (B, L, H); `turns` (2, L, D / 2) rotate q and k; the last of a cache (2, B, N, S, D) is set."""
        normed = self.norms[0](x)
        q, k, v = (
            one(normed).unflatten(-1, (-1, self.widths.head_dim)).transpose(1, 2)
            for one in (self.q, self.k, self.v)
        )
        if turns is not None:
            q, k = rotated(q, turns), rotated(k, turns)
        if cache is not None:
            cache[0, :, :, -1:], cache[1, :, :, -1:] = k, v
            k, v = cache.unbind()
        causal = self.widths.decoder and cache is None
        grouped = self.widths.shared < self.widths.heads
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        normed = self.norms[1](x)
        *first, last = self.feed
        inner = F.silu(first[0](normed)) * first[1](normed) if len(first) == 2 else F.gelu(first[0](normed))
        return x + last(inner)


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    """Rotary embeddings of (B, N, L, D) by cosines and sines (2, L, D / 2)."""
    (a, b), (cos, sin) = x.chunk(2, -1), turns
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def turns_of(widths: Widths, first: int, length: int, draw: Draw) -> Tensor:
    """Cosines and sines (2, L, D / 2) of L places from the first on."""
    places = torch.arange(first, first + length, device=draw.device)
    pairs = torch.arange(widths.head_dim // 2, device=draw.device)
    angles = places[:, None] / 1e4 ** (2 * pairs / widths.head_dim)
    return torch.stack([angles.cos(), angles.sin()]).to(draw.dtype)


class Model(nn.Module):
    """Tokens (B, L) to logits of the last (decoder), or to hidden states (encoder)."""

    def __init__(self, widths: Widths, sketched: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(widths.vocabulary, widths.hidden)
        self.blocks = nn.ModuleList(Block(widths, sketched) for _ in range(widths.layers))
        self.norm = nn.LayerNorm(widths.hidden)
        self.head = nn.Linear(widths.hidden, widths.vocabulary, bias=False) if widths.decoder else None

    def forward(self, tokens: Tensor, turns: Tensor | None, caches: Tensor | None) -> Tensor:
        """See `Block`; `caches` (blocks, 2, B, N, S, D)."""
        x = self.embedding(tokens)
        for place, block in enumerate(self.blocks):
            x = block(x, turns, None if caches is None else caches[place])
        return self.norm(x) if self.head is None else self.head(self.norm(x[:, -1:]))


def made(widths: Widths, sketched: bool, draw: Draw) -> Model:
    """A model of random weights, made on the device that they are on."""
    with torch.device("meta"):
        model = Model(widths, sketched).to(draw.dtype)
    model = model.to_empty(device=draw.device).eval().requires_grad_(False)
    for weight in model.parameters():
        if weight.dim() == 1:
            nn.init.ones_(weight)
        else:
            nn.init.normal_(weight, std=0.3 * weight.shape[1] ** -0.5)
    return model


def model_case(model: str, widths: Widths, call: tuple[str, int, int, int]) -> Case:
    """One call of a whole model."""
    what, batch, length, before = call

    def build(draw: Draw) -> Runs:
        tokens = torch.randint(widths.vocabulary, (batch, length), device=draw.device)
        turns = turns_of(widths, before, length, draw) if widths.decoder else None
        caches = None
        if before:
            sizes = (widths.layers, 2, batch, widths.shared, before + 1, widths.head_dim)
            caches = draw(*sizes).detach()

        def run(sketched: bool) -> Run:
            one = made(widths, sketched, draw)

            def call(tokens: Tensor) -> Tensor:
                return one(tokens, turns, caches)

            return Run(call, (tokens,))

        small = run(True)
        return Runs(small, small, run(False))

    numbers = RATIO * widths.layers * sum(inputs * outputs for inputs, outputs in widths.linear())
    head = widths.vocabulary * widths.hidden if widths.decoder else 0
    tokens, context = batch * length, before + length
    pairs = tokens * context / (2 if what == "prefill" else 1)
    attention = 4.0 * pairs * widths.heads * widths.head_dim * widths.layers
    cached = 2 * widths.layers * batch * context * widths.shared * widths.head_dim
    ranks = sorted({pivoted_rank(*sizes, RATIO) for sizes in widths.linear()})
    shape = f"{what} {length}" if not before else f"{what} after {before}"
    return Case(
        labels("model", model, f"{shape} of {widths.layers}x{widths.hidden}", batch, "pivoted", RATIO, ranks),
        {"ranks": ranks},
        tokens,
        0,
        2.0 * (tokens * numbers + batch * head) + attention,
        int(numbers + head + cached),
        build,
    )


def model_cases(model: str, *, quick: bool = False) -> Iterator[Case]:
    """The calls of a model that there is whole; `quick`: of a tiny one."""
    most = 16 if quick else 1 << 30
    widths = TINY if quick else WIDTHS
    calls = [(what, *(min(size, most) for size in sizes)) for what, *sizes in CALLS.get(model, ())]
    for call in dict.fromkeys(calls):
        yield model_case(model, widths[model], call)
