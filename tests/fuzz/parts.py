"""Parts of random models: each turns (rows, length, width) into (rows, length, another width).

A part is described by a small frozen dataclass, a `Spec`, and made when the width of its input is known, so
that any of them can be left out of a model and the others still fit. Every module is called as
module(x, extra), where `extra` is an optional argument of the whole model: None or (rows, length, width of
the model's input).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU, "tanh": nn.Tanh, "silu": nn.SiLU}
HALF = torch.bfloat16


class Spec:
    """What describes a part; `make` gives the module and the width of its output."""

    def make(self, width: int, given: int) -> tuple[nn.Module, int]:
        """Make the module for inputs of a width; `given` is the width of the model's own input."""
        raise NotImplementedError


# ---------------------------------------------------------------------------------- one layer, called oddly


class Doubled(nn.Module):
    """A parametrization: twice the weight, stored as half of it."""

    def forward(self, x):
        return 2 * x

    def right_inverse(self, x):
        return x / 2


class Scaled(nn.Linear):
    """A subclass with a forward of its own."""

    def forward(self, x):
        return 1.5 * super().forward(x)


class SameForward(nn.Linear):
    """A subclass that changes nothing."""


class Named(nn.Linear):
    """A subclass with an attribute."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.purpose = "any"


LINEAR_TYPES = {"plain": nn.Linear, "scaled": Scaled, "same": SameForward, "named": Named}


def double_output(module, args, output):
    return 2 * output


def shift_input(module, args):
    return (args[0] + 0.5, *args[1:])


class Layer(nn.Module):
    """One linear layer."""

    def __init__(self, spec: Linear, width: int) -> None:
        super().__init__()
        self.call = spec.call
        self.layer = LINEAR_TYPES[spec.kind](width, spec.out, bias=spec.bias)
        if spec.call == "listed":
            self.held = [self.layer]
        if spec.dress == "weight_norm":
            parametrizations.weight_norm(self.layer)
        elif spec.dress == "doubled":
            parametrize.register_parametrization(self.layer, "weight", Doubled())
        elif spec.dress == "output_hook":
            self.layer.register_forward_hook(double_output)
        elif spec.dress == "input_hook":
            self.layer.register_forward_pre_hook(shift_input)
        elif spec.dress == "frozen":
            self.layer.requires_grad_(False)
        elif spec.dress == "frozen_weight":
            self.layer.weight.requires_grad_(False)

    def forward(self, x: Tensor, extra: Tensor | None) -> Tensor:
        layer = self.layer
        if self.call == "keyword":
            return layer(input=x)
        if self.call == "functional":
            return F.linear(x, layer.weight, layer.bias)
        if self.call == "product":
            return x @ layer.weight.T
        if self.call == "listed":
            return self.held[0](x)
        if self.call == "flat":
            return layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        if self.call == "one_row":
            return torch.stack([torch.stack([layer(row) for row in one]) for one in x])
        if self.call == "checkpoint":
            return checkpoint(layer, x, use_reentrant=False)
        return layer(x)


@dataclasses.dataclass(frozen=True)
class Linear(Spec):
    out: int = 8
    bias: bool = True
    call: str = "plain"
    dress: str = "none"
    kind: str = "plain"

    def make(self, width, given):
        return Layer(self, width), self.out


CALLS = ("plain", "keyword", "functional", "product", "listed", "flat", "one_row", "checkpoint")
DRESSES = ("none", "weight_norm", "doubled", "output_hook", "input_hook", "frozen", "frozen_weight")


class HalfLayer(nn.Module):
    def __init__(self, width, out):
        super().__init__()
        self.layer = nn.Linear(width, out, dtype=HALF)

    def forward(self, x, extra):
        return self.layer(x.to(self.layer.weight.dtype)).to(x.dtype)


@dataclasses.dataclass(frozen=True)
class Half(Spec):
    """A layer in bfloat16 within a model of another type."""

    out: int = 8

    def make(self, width, given):
        return HalfLayer(width, self.out), self.out


class Called(nn.Module):
    """A module of torch that takes one tensor and gives one."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x, extra):
        return self.module(x)


@dataclasses.dataclass(frozen=True)
class Stack(Spec):
    """nn.Sequential of linear layers with an activation between them."""

    widths: tuple[int, ...] = (16, 8)
    act: str = "relu"
    bias: bool = True
    wrapped: bool = False  # in one more nn.Sequential

    def make(self, width, given):
        modules: list[nn.Module] = []
        for one in self.widths:
            modules += [nn.Linear(width, one, bias=self.bias), ACTIVATIONS[self.act]()]
            width = one
        module = nn.Sequential(*modules[:-1])
        return Called(nn.Sequential(module, nn.Identity()) if self.wrapped else module), width


@dataclasses.dataclass(frozen=True)
class Norm(Spec):
    kind: str = "layer"

    def make(self, width, given):
        if width == 1:  # the sign of a number, which rounding changes
            return Called(nn.Identity()), width
        return Called(nn.LayerNorm(width) if self.kind == "layer" else nn.RMSNorm(width)), width


@dataclasses.dataclass(frozen=True)
class Act(Spec):
    kind: str = "relu"

    def make(self, width, given):
        return Called(ACTIVATIONS[self.kind]()), width


class Buffered(nn.Module):
    """Adds a buffer; another has no value."""

    def __init__(self, width, persistent):
        super().__init__()
        self.register_buffer("shift", torch.randn(width), persistent=persistent)
        self.register_buffer("empty", None)

    def forward(self, x, extra):
        return x + self.shift


@dataclasses.dataclass(frozen=True)
class Buffer(Spec):
    persistent: bool = True

    def make(self, width, given):
        return Buffered(width, self.persistent), width


# ------------------------------------------------------------------------------------- other kinds of layer


class Recurrence(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x, extra):
        return self.module(x)[0]


@dataclasses.dataclass(frozen=True)
class Recurrent(Spec):
    kind: str = "LSTM"
    out: int = 6
    bidirectional: bool = False
    layers: int = 1

    def make(self, width, given):
        module = getattr(nn, self.kind)(
            width, self.out, self.layers, batch_first=True, bidirectional=self.bidirectional
        )
        return Recurrence(module), self.out * (1 + self.bidirectional)


class Image(nn.Module):
    """Rows seen as images: the length becomes height and width 2."""

    def __init__(self, module, norm):
        super().__init__()
        self.module = module
        self.norm = norm

    def forward(self, x, extra):
        image = x.transpose(1, 2).unflatten(2, (-1, 2))
        return self.norm(self.module(image)).flatten(2).transpose(1, 2)


@dataclasses.dataclass(frozen=True)
class Conv(Spec):
    out: int = 8
    kernel: int = 3
    groups: int = 1
    bias: bool = True
    padding_mode: str = "zeros"
    norm: bool = False
    transposed: bool = False

    def make(self, width, given):
        groups = self.groups if width % self.groups == self.out % self.groups == 0 else 1
        options: dict[str, Any] = {"groups": groups, "bias": self.bias, "padding": self.kernel // 2}
        if self.transposed:
            module: nn.Module = nn.ConvTranspose2d(width, self.out, self.kernel, **options)
        else:
            module = nn.Conv2d(width, self.out, self.kernel, padding_mode=self.padding_mode, **options)
        return Image(module, nn.BatchNorm2d(self.out) if self.norm else nn.Identity()), self.out


class Along(nn.Module):
    """A convolution along the length."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x, extra):
        return self.module(x.transpose(1, 2)).transpose(1, 2)


@dataclasses.dataclass(frozen=True)
class Conv1d(Spec):
    out: int = 8
    transposed: bool = False

    def make(self, width, given):
        kind = nn.ConvTranspose1d if self.transposed else nn.Conv1d
        return Along(kind(width, self.out, 3, padding=1)), self.out


class Attends(nn.Module):
    def __init__(self, width, heads, masked, needs_weights):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.masked, self.needs_weights = masked, needs_weights

    def forward(self, x, extra):
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1) if self.masked else None
        return x + self.attention(x, x, x, attn_mask=mask, need_weights=self.needs_weights)[0]


@dataclasses.dataclass(frozen=True)
class Attention(Spec):
    heads: int = 2
    masked: bool = False
    needs_weights: bool = False

    def make(self, width, given):
        heads = self.heads if width % self.heads == 0 else 1
        return Attends(width, heads, self.masked, self.needs_weights), width


@dataclasses.dataclass(frozen=True)
class Encoder(Spec):
    hidden: int = 16
    norm_first: bool = False

    def make(self, width, given):
        layer = nn.TransformerEncoderLayer(
            width, 2 - width % 2, self.hidden, 0.0, batch_first=True, norm_first=self.norm_first
        )
        return Called(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)), width
