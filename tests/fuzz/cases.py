"""A random case: a model, the options of its sketch and its data, drawn by hypothesis.

What a failure prints is a `Case(...)`, the smallest that fails, to be pasted into `check(...)`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from fuzz.holders import Branch, Gated, Idle, Nest, Optional, Residual, Tied, Twice, chain
from fuzz.parts import (
    ACTIVATIONS,
    CALLS,
    DRESSES,
    LINEAR_TYPES,
    Act,
    Attention,
    Buffer,
    Conv,
    Conv1d,
    Encoder,
    Half,
    Linear,
    Norm,
    Recurrent,
    Spec,
    Stack,
)
from hypothesis import strategies as st
from torch import Tensor, nn

LENGTH, WORDS = 4, 24
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclasses.dataclass(frozen=True)
class Case:
    """One model, how it is sketched, and on what.

    Attributes:
        parts: of the model, in order.
        width: of its input.
        tokens: "no", or "yes" for an embedding in front, or "tied" for a head of its table too.
        result: what the model returns: "tensor", "tuple" or "dict".
        dtype: of the model.
        training: mode of the model as it is given.
        low_rank: all weights are of rank 1, so that any sketch is exact.
        data: "none", or batches as "tensors", "tuples", "dicts", or a "function".
        positive: no number of the data is below 0.
        batches: of data.
        options: of `sketchify`.
        seed: of weights and data.
    """

    parts: tuple[Spec, ...] = ()
    width: int = 8
    tokens: str = "no"
    result: str = "tensor"
    dtype: str = "float32"
    training: bool = False
    low_rank: bool = False
    data: str = "none"
    positive: bool = False
    batches: int = 2
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    seed: int = 0


class Whole(nn.Module):
    """A model of parts; `extra` is an optional argument."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.result = case.result
        self.embed = nn.Embedding(WORDS, case.width) if case.tokens != "no" else None
        self.body, width = chain(case.parts, case.width, case.width)
        self.head = nn.Linear(width, case.width if case.tokens == "tied" else 5)
        self.decode = None
        if case.tokens == "tied":
            self.decode = nn.Linear(case.width, WORDS, bias=False)
            self.decode.weight = self.embed.weight

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Any:
        if self.embed is not None:
            x = self.embed(x)
        hidden = self.body(x, extra)
        y = self.head(hidden)
        if self.decode is not None:
            y = self.decode(torch.tanh(y))
        if self.result == "tensor":
            return y
        return (y, hidden.mean(1)) if self.result == "tuple" else {"logits": y, "pooled": hidden.mean(1)}


def rank_one(shape: torch.Size) -> Tensor:
    """Numbers of rank 1 however they are cut into rows and columns."""
    product = torch.ones(shape, dtype=torch.float64)
    for place, size in enumerate(shape):
        product *= torch.randn(size).view(size, *(1,) * (len(shape) - place - 1))
    return product / 3


def build(case: Case, seed: int | None = None) -> nn.Module:
    """Make the model, with the weights of the case or of another seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.seed if seed is None else seed)
        model = Whole(case)
        if case.dtype != "float32":
            model = model.to(DTYPES[case.dtype])
        if case.low_rank:
            with torch.no_grad():
                for parameter in dict.fromkeys(model.parameters()):
                    if parameter.dim() > 1:
                        parameter.copy_(rank_one(parameter.shape))
    return model.train(case.training)


def batch(case: Case, seed: int, rows: int = 6, length: int = LENGTH, sign: int = 0) -> Tensor:
    """Inputs of a model: tokens, or numbers of either sign or of one."""
    generator = torch.Generator().manual_seed(1000 + seed)
    if case.tokens != "no":
        return torch.randint(WORDS, (rows, length), generator=generator)
    x = torch.randn(rows, length, case.width, generator=generator)
    return (sign * x.abs() if sign else x).to(DTYPES[case.dtype])


def extra(case: Case, rows: int = 6, length: int = LENGTH) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(rows, length, case.width, generator=generator).to(DTYPES[case.dtype])


def data_of(case: Case) -> Any:
    """What `data=` is given."""
    batches = [
        batch(case, case.seed + 1 + place, sign=1 if case.positive else 0) for place in range(case.batches)
    ]
    if case.data == "tensors":
        return batches
    if case.data == "tuples":
        return [(one, extra(case)) if place % 2 else (one,) for place, one in enumerate(batches)]
    if case.data == "dicts":
        return [{"x": one} for one in batches]
    if case.data == "function":
        return lambda model: [model(one) for one in batches]
    return None


# --------------------------------------------------------------------------------------------- strategies


def of_even_name(module: nn.Module, name: str) -> bool:
    """A selector that is a function."""
    return len(name) % 2 == 0


WIDTHS = st.sampled_from([8, 6, 1, 12, 16])
COMMON = st.one_of(
    st.builds(Linear, out=WIDTHS, bias=st.booleans()),
    st.builds(
        Stack,
        widths=st.lists(WIDTHS, min_size=1, max_size=3).map(tuple),
        act=st.sampled_from(sorted(ACTIVATIONS)),
        bias=st.booleans(),
        wrapped=st.booleans(),
    ),
    st.builds(
        Gated, kind=st.sampled_from(["gated", "one_input", "gate_only_sometimes", "down_only_sometimes"])
    ),
)
ODD = st.one_of(
    st.builds(Linear, out=WIDTHS, bias=st.booleans(), call=st.sampled_from(CALLS)),
    st.builds(Linear, out=WIDTHS, dress=st.sampled_from(DRESSES)),
    st.builds(Linear, out=WIDTHS, kind=st.sampled_from(sorted(LINEAR_TYPES))),
    st.builds(Half),
    st.builds(Norm, kind=st.sampled_from(["layer", "rms"])),
    st.builds(Act, kind=st.sampled_from(sorted(ACTIVATIONS))),
    st.builds(Buffer, persistent=st.booleans()),
    st.builds(Tied, kind=st.sampled_from(["weight", "all", "transposed"])),
    st.builds(Optional, out=WIDTHS),
    st.builds(Idle),
)
OTHER = st.one_of(
    st.builds(
        Recurrent,
        kind=st.sampled_from(["LSTM", "GRU", "RNN"]),
        bidirectional=st.booleans(),
        layers=st.sampled_from([1, 2]),
    ),
    st.builds(
        Conv,
        out=WIDTHS,
        kernel=st.sampled_from([3, 1]),
        groups=st.sampled_from([1, 2]),
        bias=st.booleans(),
        padding_mode=st.sampled_from(["zeros", "circular", "replicate"]),
        norm=st.booleans(),
    ),
    st.builds(Conv, out=WIDTHS, kernel=st.sampled_from([3, 1]), transposed=st.just(True)),
    st.builds(Conv1d, out=WIDTHS, transposed=st.booleans()),
    st.builds(Attention, heads=st.sampled_from([2, 1]), masked=st.booleans(), needs_weights=st.booleans()),
    st.builds(Encoder, norm_first=st.booleans()),
)


def composite(parts: st.SearchStrategy[Spec]) -> st.SearchStrategy[Spec]:
    some = st.lists(parts, min_size=1, max_size=3).map(tuple)
    return st.one_of(
        st.builds(Nest, body=some, container=st.sampled_from(["sequential", "list", "dict"])),
        st.builds(Residual, body=some),
        st.builds(Twice, body=some),
        st.builds(
            Branch,
            left=some,
            right=st.lists(parts, max_size=2).map(tuple),
            test=st.sampled_from(["sum", "rows", "mode"]),
        ),
    )


PARTS = st.recursive(st.one_of(COMMON, ODD, OTHER), composite, max_leaves=5)
OPTIONS = st.fixed_dictionaries(
    {"ratio": st.sampled_from([0.5, 0.3, 0.8, 1.0])},
    optional={
        "include": st.sampled_from(["*", nn.Linear, of_even_name]),
        "exclude": st.just(["head"]),
        "method": st.sampled_from(["svd", "randomized"]),
        "attention": st.just("favor"),
        "round_rank_to": st.sampled_from([2, 3]),
        "min_params": st.sampled_from([0, 60]),
        "inplace": st.just(True),
        "narrow": st.just(False),
    },
)
CASES = st.builds(
    Case,
    parts=st.lists(PARTS, min_size=1, max_size=5).map(tuple),
    width=st.sampled_from([8, 12, 6, 1]),
    tokens=st.sampled_from(["no", "no", "yes", "tied"]),
    result=st.sampled_from(["tensor", "tuple", "dict"]),
    dtype=st.sampled_from(["float32", "float32", "float64", "bfloat16"]),
    training=st.booleans(),
    low_rank=st.booleans(),
    data=st.sampled_from(["none", "none", "tensors", "tuples", "dicts", "function"]),
    positive=st.booleans(),
    batches=st.sampled_from([2, 1, 4]),
    options=OPTIONS,
    seed=st.integers(0, 99),
)
