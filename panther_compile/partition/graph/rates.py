"""Measure what kinds of operations take on a device, once, so that models need no profile of their own.

Sequences of different operations on tensors of several sizes run forward and backward. With n operations of a
kind, of m multiply-adds or, where there are none, of b bytes in all, such a sequence takes

    seconds  =  sum over kinds of   n * launch  +  m * seconds per multiply-add   or   b * seconds per byte

and the constants of each kind and phase are those, none negative, of the least squares of relative errors.
What runs in a sequence, views and backward included, is read off as it is for a model (`observe`). Operations
follow one another at random: one that is repeated finds its code in the caches and starts in half the time.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn

from panther_compile.config import check_device, check_type
from panther_compile.errors import ConfigError
from panther_compile.partition.graph.capture import capture
from panther_compile.partition.graph.hardware import Hardware, Rate, find_hardware
from panther_compile.partition.graph.measure import run_whole
from panther_compile.partition.graph.observe import KINDS, Observed, Operation, observe, observe_backward

_LENGTH, _SEQUENCES, _ROUNDS = 64, 8, 8
# Batch, channels, height and width: from where starting is all to where it is nothing.
_SHAPES = ((1, 4, 8, 8), (2, 8, 16, 16), (2, 8, 16, 64), (2, 16, 32, 32), (1, 8, 32, 256), (4, 32, 32, 32))
_aten = torch.ops.aten


@dataclass(frozen=True)
class _Probe:
    """An operation that gives what has the shape of its operand, (B, C, H, W).

    Attributes:
        call: with the operand and weights.
        weights: their shapes.
    """

    call: Callable[..., Tensor]
    weights: tuple[tuple[int, ...], ...] = ()


def _probes(shape: tuple[int, int, int, int]) -> tuple[_Probe, ...]:
    batch, channels, height, width = shape
    size = batch * channels * height * width
    by_channel, by_width = ((channels,), (channels,)), ((width,), (width,))
    many = batch * channels, height, width
    return (
        _Probe(_aten.linear.default, ((width, width), (width,))),
        _Probe(lambda x, w: (x.view(-1, width) @ w).view(shape), ((width, width),)),
        _Probe(lambda x, w: torch.bmm(x.view(many), w).view(shape), ((many[0], width, width),)),
        _Probe(_convolution(1, 1), ((channels, channels, 1, 1), (channels,))),
        _Probe(_convolution(3, 1), ((channels, channels, 3, 3), (channels,))),
        _Probe(_convolution(3, channels), ((channels, 1, 3, 3), (channels,))),
        _Probe(_convolution(3, 2), ((channels, channels // 2, 3, 3), (channels,))),
        _Probe(lambda x: _aten.scaled_dot_product_attention.default(x, x, x)),
        _Probe(lambda x, w: x + w, (shape,)),
        _Probe(lambda x, w: x * w, ((width,),)),
        _Probe(_aten.gelu.default),
        _Probe(_aten.relu.default),
        _Probe(_aten.silu.default),
        _Probe(lambda x: _aten.dropout.default(x, 0.1, True)),
        _Probe(lambda x, w, b: _aten.layer_norm.default(x, [width], w, b), by_width),
        _Probe(
            lambda x, w, b: _aten.batch_norm.default(x, w, b, None, None, True, 0.1, 1e-5, False), by_channel
        ),
        _Probe(lambda x: _aten.softmax.int(x, -1)),
        _Probe(lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)),
        _Probe(lambda x: torch.cat((x[..., width // 2 :], x[..., : width // 2]), -1)),
        _Probe(lambda x: x.transpose(1, 2).contiguous().view(shape)),
        _Probe(lambda x: x.view(batch, -1, width).transpose(0, 1).transpose(0, 1).view(shape)),
        _Probe(lambda x: x.reshape(size).view(shape)),
    )


def _convolution(taps: int, groups: int) -> Callable[..., Tensor]:
    around = [taps // 2] * 2
    return lambda x, w, b: _aten.conv2d.default(x, w, b, [1, 1], around, [1, 1], groups)


class _Sequence(nn.Module):
    """Probes one after the other."""

    def __init__(self, probes: Sequence[_Probe], device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self._calls = [probe.call for probe in probes]
        self.weights = nn.ModuleList(
            nn.ParameterList(
                nn.Parameter(torch.randn(shape, device=device, dtype=dtype) / max(shape) ** 0.5)
                for shape in probe.weights
            )
            for probe in probes
        )

    def forward(self, x: Tensor) -> Tensor:
        """The result of the last."""
        for call, weights in zip(self._calls, self.weights, strict=True):
            x = call(x, *weights.parameters())
        return x


def _sequences(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[_Sequence, Tensor]]:
    """Sequences of all probes alike, and of a few more than of the others."""
    draw = random.Random(0)
    for shape in _SHAPES:
        probes = _probes(shape)
        for number in range(_SEQUENCES):
            favoured = probes if number % 4 == 0 else draw.sample(probes, 3)
            chosen = [draw.choice(favoured if draw.random() < 0.7 else probes) for _ in range(_LENGTH)]
            x = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
            yield _Sequence(chosen, device, dtype), x


def measure_hardware(
    like: Hardware | str = "cpu",
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Hardware:
    """A hardware whose operations take what they take here; everything else is taken over.

    It takes about a minute, once for a device; predictions then need no profile of each model. The generators
    of torch are left as they are.

        >>> here = pc.measure_hardware("cpu")
        >>> part = pc.partition_model(model, example, mesh={"pp": 2}, hardware=here)

    Args:
        like: a preset or your own: its links, memory and devices in a node.
        device: to measure on; nothing else should run there.
        dtype: that models compute in.

    Raises:
        ConfigError, ConfigTypeError: there is no such preset; or nothing can be computed on the device; or
            the dtype is no floating one.
    """
    check_device(device)
    check_type("dtype", dtype, torch.dtype)
    if not dtype.is_floating_point:
        raise ConfigError(f"dtype={dtype}, wanted a floating one")
    base, device = find_hardware(like), torch.device(device)
    counted: dict[str, list[Sequence[Operation]]] = {"forward": [], "backward": []}
    taken: dict[str, list[float]] = {"forward": [], "backward": []}
    with torch.random.fork_rng():
        for sequence, x in _sequences(device, dtype):
            captured = capture(sequence, (x,), {})
            notes = observe(captured)
            observe_backward(captured, notes)
            rounds = [run_whole(captured.graph_module, [x], device)[:2] for _ in range(_ROUNDS)]
            for phase, seconds in zip(counted, map(min, zip(*rounds, strict=True)), strict=True):
                counted[phase].append(_all_operations(notes, phase))
                taken[phase].append(seconds)
    rates = tuple(rate for phase in counted for rate in _fit(phase, counted[phase], taken[phase]))
    return replace(base, name=f"{base.name}, measured", rates=rates)


def _all_operations(notes: dict[fx.Node, Observed], phase: str) -> list[Operation]:
    lists = (note.operations if phase == "forward" else note.backward for note in notes.values())
    return [one for operations in lists for one in operations]


def _fit(phase: str, counted: Sequence[Sequence[Operation]], taken: Sequence[float]) -> Iterator[Rate]:
    """Constants of each kind."""
    rows = np.zeros((len(counted), len(KINDS), 3))
    for row, operations in zip(rows, counted, strict=True):
        for one in operations:
            row[KINDS.index(one.kind)] += 1, one.macs, 0 if one.macs else one.bytes
    relative = rows.reshape(len(counted), -1) / np.array(taken)[:, None]
    found = _not_negative(relative, np.ones(len(counted)))
    for kind, constants in zip(KINDS, found.reshape(-1, 3).tolist(), strict=True):
        yield Rate(kind, phase, *constants)


def _not_negative(matrix: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares without negative numbers: the most negative are left out, one after the other."""
    scale = np.abs(matrix).max(axis=0)
    kept = scale > 0
    found = np.zeros(len(scale))
    while True:
        found[:] = 0.0
        found[kept] = np.linalg.lstsq(matrix[:, kept] / scale[kept], wanted, rcond=None)[0]
        if found.min() >= 0:
            return np.divide(found, scale, out=np.zeros_like(found), where=scale > 0)
        kept[found.argmin()] = False
