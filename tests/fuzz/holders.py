"""Parts of a random model that hold other parts."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from fuzz.parts import Spec
from torch import nn


class Chain(nn.Module):
    def __init__(self, parts, container):
        super().__init__()
        if container == "dict":
            self.body: nn.Module = nn.ModuleDict({f"part {place}": one for place, one in enumerate(parts)})
        elif container == "list":
            self.body = nn.ModuleList(parts)
        else:
            self.body = nn.Sequential(*parts)

    def forward(self, x, extra):
        body = self.body.values() if isinstance(self.body, nn.ModuleDict) else self.body
        for part in body:
            x = part(x, extra)
        return x


def chain(specs, width, given, container="sequential"):
    parts = []
    for spec in specs:
        part, width = spec.make(width, given)
        parts.append(part)
    return Chain(parts, container), width


@dataclasses.dataclass(frozen=True)
class Nest(Spec):
    body: tuple[Spec, ...] = ()
    container: str = "sequential"

    def make(self, width, given):
        return chain(self.body, width, given, self.container)


class Added(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x, extra):
        y = self.body(x, extra)
        narrow = min(x.shape[-1], y.shape[-1])
        return x[..., :narrow] + y[..., :narrow]


@dataclasses.dataclass(frozen=True)
class Residual(Spec):
    body: tuple[Spec, ...] = ()

    def make(self, width, given):
        body, out = chain(self.body, width, given)
        return Added(body), min(width, out)


class Repeated(nn.Module):
    """One module under two names, called twice where its widths allow."""

    def __init__(self, body, twice):
        super().__init__()
        self.first = body
        self.second = body
        self.twice = twice

    def forward(self, x, extra):
        x = self.first(x, extra)
        return self.second(x, extra) if self.twice else x


@dataclasses.dataclass(frozen=True)
class Twice(Spec):
    body: tuple[Spec, ...] = ()

    def make(self, width, given):
        body, out = chain(self.body, width, given)
        return Repeated(body, out == width), out


class Tie(nn.Module):
    """Two layers of one weight, or a weight and its transpose."""

    def __init__(self, width, kind):
        super().__init__()
        self.kind = kind
        self.one = nn.Linear(width, width)
        if kind != "transposed":
            self.other = nn.Linear(width, width, bias=kind == "weight")
            self.other.weight = self.one.weight

    def forward(self, x, extra):
        x = torch.tanh(self.one(x))
        if self.kind == "transposed":
            return F.linear(x, self.one.weight.T)
        return self.other(x)


@dataclasses.dataclass(frozen=True)
class Tied(Spec):
    kind: str = "weight"

    def make(self, width, given):
        return Tie(width, self.kind), width


class Choice(nn.Module):
    """Which part runs depends on the values."""

    def __init__(self, left, right, test, width):
        super().__init__()
        self.left, self.right, self.test, self.width = left, right, test, width

    def forward(self, x, extra):
        if self.test == "sum":
            first = bool(x.sum() > 0)
        elif self.test == "rows":
            first = x.shape[0] > 2
        else:
            first = self.training
        return (self.left if first else self.right)(x, extra)[..., : self.width]


@dataclasses.dataclass(frozen=True)
class Branch(Spec):
    left: tuple[Spec, ...] = ()
    right: tuple[Spec, ...] = ()
    test: str = "sum"

    def make(self, width, given):
        (left, one), (right, other) = chain(self.left, width, given), chain(self.right, width, given)
        return Choice(left, right, self.test, min(one, other)), min(one, other)


class Option(nn.Module):
    """Takes the optional argument in place of what a layer before it gives, where there is one."""

    def __init__(self, width, given, out):
        super().__init__()
        self.before = nn.Linear(width, given)
        self.after = nn.Linear(given, out)

    def forward(self, x, extra):
        hidden = torch.relu(self.before(x)) if extra is None else extra
        return self.after(hidden)


@dataclasses.dataclass(frozen=True)
class Optional(Spec):
    out: int = 8

    def make(self, width, given):
        return Option(width, given, self.out), self.out


class Gates(nn.Module):
    """A gated feed-forward part, or layers that read one tensor."""

    def __init__(self, width, hidden, kind):
        super().__init__()
        self.kind = kind
        self.gate, self.up = nn.Linear(width, hidden), nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        if kind == "gate_only_sometimes":
            self.left = nn.Linear(width, hidden)
        if kind == "down_only_sometimes":
            self.away = nn.Linear(hidden, width)

    def forward(self, x, extra):
        if self.kind == "gate_only_sometimes":
            return self.down(torch.relu(self.gate(x) if x.sum() > 0 else self.left(x)))
        if self.kind == "down_only_sometimes":
            hidden = torch.relu(self.gate(x))
            return self.down(hidden) if x.sum() > 0 else self.away(hidden)
        if self.kind == "gated":
            return self.down(F.silu(self.gate(x)) * self.up(x))
        return self.down(torch.tanh(self.gate(x)) + torch.sin(self.up(x)))


@dataclasses.dataclass(frozen=True)
class Gated(Spec):
    hidden: int = 16
    kind: str = "gated"

    def make(self, width, given):
        return Gates(width, self.hidden, self.kind), width


class Unused(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.never = nn.Linear(width, width)

    def forward(self, x, extra):
        return x


@dataclasses.dataclass(frozen=True)
class Idle(Spec):
    def make(self, width, given):
        return Unused(width), width
