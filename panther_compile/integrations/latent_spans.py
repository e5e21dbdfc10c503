"""Places of keys and values: the spans of the sketched layers that may write them."""

# B batch, H heads of keys and values, S tokens, D head dimension, O = H D, R rank
import importlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from panther_compile.layers.base import keeps_numbers_elsewhere
from panther_compile.layers.linear import SketchedLinear
from panther_compile.layers.linear_replacement import LinearReplacement
from panther_compile.layers.narrow import NarrowLinear, inner_layer
from panther_compile.layers.residual import matrix_of
from panther_compile.models.cached import head_outputs


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """The dimensions that keys or values lie in.

    Attributes:
        basis: `(O, r)`, orthonormal columns; `(2 O, r)` of keys and values together.
        offset: `(O,)`, or `(2 O,)`; None where it is zero.
        name: of the layers that write it.
    """

    basis: Tensor
    offset: Tensor | None
    name: str

    def encode(self, x: Tensor) -> Tensor:
        """(B, S, O) to (B, 1, S, r)."""
        return ((x if self.offset is None else x - self.offset) @ self.basis)[:, None]

    def decode(self, kept: Tensor) -> Tensor:
        """(B, 1, S, r) to (B, S, O)."""
        found = kept[:, 0] @ self.basis.t()
        return found if self.offset is None else found + self.offset

    def part(self, rows: slice) -> "Span":
        """Places of some of the features."""
        return Span(self.basis[rows], None if self.offset is None else self.offset[rows], self.name)

    def loss(self, x: Tensor) -> float:
        """How much of x (B, S, O) does not read back, relative."""
        return float((self.decode(self.encode(x)) - x).norm() / x.norm().clamp_min(1e-30))

    def __deepcopy__(self, memo: Any) -> "Span":
        return self  # a copy of a cache reads the same layers


@dataclass(frozen=True, slots=True)
class Source:
    """A sketched layer within an attention module.

    Attributes:
        name: of the layer.
        layer: the layer.
        normalises: whether the module has a norm of its own.
        rotate: the function that the module's code turns queries and keys by, if it has one.
    """

    name: str
    layer: LinearReplacement
    normalises: bool
    rotate: Callable[..., tuple[Tensor, Tensor]] | None

    def rows(self, heads: int, width: int) -> Iterator[Tensor]:
        """The outputs that may be the keys, or the values, of all heads."""
        return head_outputs(self.layer.out_features, heads, width)

    def span(self, rows: Tensor, like: Tensor) -> Span:
        """Places of some of the layer's outputs, as tensors like another."""
        left, bias = output_factor(self.layer).detach().double(), self.layer.bias
        rows = rows.to(left.device)
        basis = torch.linalg.qr(left[rows])[0]
        return Span(basis.to(like), None if bias is None else bias.detach()[rows].to(like), self.name)

    def __deepcopy__(self, memo: Any) -> "Source":
        return self


def output_factor(layer: LinearReplacement) -> Tensor:
    """A matrix (O, r) whose columns span what the layer writes, its bias aside."""
    if isinstance(layer, SketchedLinear):
        return _numbers(layer.up)
    assert isinstance(layer, NarrowLinear)
    inner = layer.narrow
    like = next(inner.parameters())
    left = _numbers(inner.up) if isinstance(inner, SketchedLinear) else torch.eye(inner.out_features).to(like)
    if layer.side == "in" or not layer.padded:
        return left
    width = layer.out_features // layer.heads
    written = torch.arange(layer.out_features, device=like.device).view(layer.heads, width)[:, : layer.kept]
    return left.new_zeros(layer.out_features, left.shape[1]).index_copy(0, written.flatten(), left)


def _numbers(factor: nn.Linear) -> Tensor:
    """The weight of a factor, dequantized where it is quantized."""
    weight = factor.weight
    if not keeps_numbers_elsewhere(weight):
        return weight
    return matrix_of(factor, torch.empty(0, factor.in_features, device=weight.device))


def input_factor(layer: LinearReplacement) -> tuple[object, ...]:
    """What is equal of layers that compute the same z."""
    inner = inner_layer(layer)
    if not isinstance(inner, SketchedLinear):
        return (id(layer),)
    return (id(inner.down.weight), inner.form, inner.start)


def is_thin(span: Span) -> bool:
    """Whether it has fewer dimensions than what lies in it."""
    return span.basis.shape[1] < span.basis.shape[0]


def joint_span(one: Source, mine: Tensor, other: Source, others: Tensor, like: Tensor) -> Span:
    """The span where the outputs of two layers with the same z lie together."""
    left = torch.cat(
        [output_factor(s.layer).detach().double().cpu()[rows] for s, rows in ((one, mine), (other, others))]
    )
    biases = [s.span(rows, like).offset for s, rows in ((one, mine), (other, others))]
    offset = None
    if any(bias is not None for bias in biases):
        zeros = torch.zeros(len(mine)).to(like)
        offset = torch.cat([zeros if bias is None else bias for bias in biases])
    name = one.name if one is other else f"{one.name} and {other.name.rpartition('.')[2]}"
    return Span(torch.linalg.qr(left)[0].to(like), offset, name)


def cache_layer(module: nn.Module) -> int | None:
    """The number of the cache layer that a module writes into, as it knows it; None if it does not."""
    numbers = (getattr(module, name, None) for name in ("layer_idx", "layer_id"))  # GPT-Neo has the latter
    return next((number for number in numbers if isinstance(number, int)), None)


def find_sources(model: nn.Module) -> tuple[list[nn.Module], dict[int, list[Source]]]:
    """The modules that write into a cache; the sketched layers within, by the number of the cache layer."""
    modules: list[nn.Module] = []
    sources: dict[int, list[Source]] = defaultdict(list)
    for name, module in model.named_modules():
        number = cache_layer(module)
        if number is None:
            continue
        adapted = {id(m.base_layer) for m in module.modules() if _adds_to_its_layer(m)}
        layers = {
            n: m
            for n, m in module.named_modules()
            if isinstance(m, LinearReplacement) and id(m) not in adapted and not _is_elsewhere(m)
        }
        inside = [n for n, m in module.named_modules() if m is not module and cache_layer(m) is not None]
        if not layers or inside:
            continue
        modules.append(module)
        normalises = any("norm" in type(part).__name__.lower() for part in module.children())
        rotate = _rotation_of(module)
        for path, layer in layers.items():
            if isinstance(layer, NarrowLinear) and layer.side == "out" and not layer.padded:
                continue  # it writes for the layer that follows, and for no cache
            sources[number].append(Source(f"{name}.{path}", layer, normalises, rotate))
    return modules, sources


def _adds_to_its_layer(module: Any) -> bool:
    """Whether it is an adapter of PEFT around a layer, not merged into it; a small one hides in rounding."""
    return hasattr(module, "base_layer") and not getattr(module, "merged", False)


def _is_elsewhere(layer: nn.Module) -> bool:
    """Whether its numbers are on disk, until it is called, or packed, as by `torch.ao`."""
    packed = any(inspect.ismethod(getattr(part, "weight", None)) for part in layer.modules())
    return packed or any(parameter.is_meta for parameter in layer.parameters())


def _rotation_of(module: nn.Module) -> Callable[..., Any] | None:
    """The function that the code of the module turns queries and keys by, if it has one."""
    code = importlib.import_module(type(module).__module__)
    rotate: Callable[..., Any] | None = getattr(code, "apply_rotary_pos_emb", None)
    if rotate is None or list(inspect.signature(rotate).parameters)[:4] != ["q", "k", "cos", "sin"]:
        return None
    return rotate
