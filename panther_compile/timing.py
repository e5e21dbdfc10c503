"""Time layers and their sketches side by side, on what reaches each layer in the dense model.

The dense model runs once. What is then timed are single layers, dense and with random factors of the
planned scheme and rank: time does not depend on the numbers. Layers that are alike, on inputs that are alike,
are timed once. What a sketch does to the layers around it is not seen: a fused path of PyTorch that is lost.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from panther_compile.calibration.batches import Call, record_calls
from panther_compile.calibration.targets import Target, find_targets, watch
from panther_compile.errors import ConfigTypeError
from panther_compile.passes.unfitted import unfitted_sketch
from panther_compile.plan import PAYS, Timed, TimedSites
from panther_compile.records import Choice, Site
from panther_compile.sites import Found

_TURN_SECONDS = 2e-3  # of one layer on an accelerator, before the other has its turn; on a CPU one call
# What a sketch costs a model on a CPU beyond its own time, by its further operators: up to 50e-6 were seen.
_STRAY = 30e-6
_BETWEEN = 1 << 19  # numbers that are read and written between two calls on a CPU
_PAIR_SECONDS = 50e-3  # of one dense layer and its sketch
_FEWEST_TURNS = 5
_CLEAR = 1.5  # a speed-up below this, where noise may have made it, is measured a second time

Timer = Callable[[nn.Module, nn.Module, Tensor], tuple[float, float]]
"""From two layers and an input, the seconds that a call of each takes."""


@dataclass(frozen=True, slots=True)
class _Run:
    """A dense layer and an input; those of one key take the same time."""

    layer: nn.Module
    x: Tensor
    key: tuple[object, ...]


def side_by_side(dense: nn.Module, sketched: nn.Module, x: Tensor) -> tuple[float, float]:
    """Seconds of a call of each on x, in inference: of the fastest of several turns, the least disturbed.

    One thread of a CPU is timed by what it works, so that other processes do not count; else it is wall time,
    on an accelerator until its queue is empty. On a CPU the sketch is charged for what it adds around it.
    """
    seconds: tuple[list[float], list[float]] = ([], [])
    on_cpu = x.device.type == "cpu"
    others = torch.zeros(_BETWEEN)
    with torch.inference_mode():
        calls = []
        for layer in (dense, sketched):
            _seconds_of(layer, x, 1)  # allocates, and picks kernels
            once = _seconds_of(layer, x, 1)
            calls.append(1 if on_cpu else math.ceil(_TURN_SECONDS / max(once, _TURN_SECONDS / 1000)))
        deadline = time.perf_counter() + _PAIR_SECONDS
        while len(seconds[0]) < _FEWEST_TURNS or time.perf_counter() < deadline:
            for layer, number, taken in zip((dense, sketched), calls, seconds, strict=True):
                if on_cpu:
                    others.add_(1.0)  # in a model other layers run in between, and take the caches
                taken.append(_seconds_of(layer, x, number) / number)
    return min(seconds[0]), min(seconds[1]) + (_STRAY if on_cpu else 0.0)


def _seconds_of(layer: nn.Module, x: Tensor, calls: int) -> float:
    on_cpu = x.device.type == "cpu"
    clock = time.thread_time if on_cpu and torch.get_num_threads() == 1 else time.perf_counter
    if not on_cpu:
        torch.accelerator.synchronize(x.device)
    begin = clock()
    for _ in range(calls):
        layer(x)
    if not on_cpu:
        torch.accelerator.synchronize(x.device)
    return clock() - begin


def time_sites(model: nn.Module, found: Found, example: Any, timer: Timer = side_by_side) -> TimedSites:
    """The sites, with a clock for their sketches.

    Args:
        model: the dense model; it runs once, in eval mode, and is not changed.
        found: its sites.
        example: a batch: a tensor, a tuple or list of arguments, a mapping of keywords, or a `Call`.
        timer: takes the times.

    Raises:
        ConfigTypeError: the example is none of these, or the model cannot be copied.
    """
    if not isinstance(example, Tensor | tuple | list | Mapping | Call):
        raise ConfigTypeError(
            f"example_inputs is a {type(example).__name__}, wanted a tensor, a tuple or list of arguments, "
            "or a mapping of keywords"
        )
    call = record_calls(model, [example])[0]
    runs = _record(model, [site for site, _ in found.sites], call)
    return TimedSites(found.sites, found.skipped, found.order, _LayerClock(runs, timer))


def _record(model: nn.Module, sites: Sequence[Site], call: Call) -> dict[str, list[_Run]]:
    """Every run of the layers of each unit in one call of the model, by the unit's name."""
    targets: dict[str, Target] = {}
    units: dict[str, str] = {}
    for site in sites:
        if isinstance(site.module, nn.MultiheadAttention):
            projections = find_targets([site])
            targets |= projections
            units |= {name: name for name in projections}
        else:
            for name, module in ((site.name, site.module), *site.tied):
                targets[name] = Target(name, Site(name, module, site.kind), module)
                units[name] = site.name
    side = watch(model, targets)
    runs: dict[str, list[_Run]] = defaultdict(list)
    alike: dict[tuple[object, ...], _Run] = {}  # holds one input for all that are alike

    def see(name: str, x: Tensor) -> None:
        layer = side.watched[name].layer
        weight: Tensor = layer.weight  # type: ignore[assignment]
        key = (repr(layer), *_form(weight), *_form(x))
        runs[units[name]].append(alike.setdefault(key, _Run(layer, x, key)))

    for watched in side.watched.values():
        watched.on_input = see
    with torch.no_grad():
        call.run(side.model)
    return runs


def _form(tensor: Tensor) -> tuple[object, ...]:
    """What time hangs on."""
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


class _LayerClock:
    """See `plan.Clock`: all runs of a unit's layers in one call of the model count."""

    def __init__(self, runs: Mapping[str, Sequence[_Run]], timer: Timer) -> None:
        self._runs, self._timer = runs, timer
        self._known: dict[tuple[object, ...], tuple[float, float]] = {}

    def __call__(self, name: str, choice: Choice) -> Timed | None:
        runs = self._runs.get(name, ())
        if not runs:
            return None
        seconds = [self._seconds(run, choice) for run in runs]
        speedup = sum(dense for dense, _ in seconds) / sum(sketched for _, sketched in seconds)
        return Timed(speedup, tuple(dict.fromkeys(tuple(run.x.shape) for run in runs)))

    def _seconds(self, run: _Run, choice: Choice) -> tuple[float, float]:
        key = (run.key, choice.scheme, choice.ranks)
        if key not in self._known:
            weight: Tensor = run.layer.weight  # type: ignore[assignment]
            sketch = unfitted_sketch(run.layer, choice, weight.device)
            seconds = self._timer(run.layer, sketch, run.x)
            if PAYS <= seconds[0] / seconds[1] < _CLEAR:
                again = self._timer(run.layer, sketch, run.x)
                seconds = min(seconds, again, key=lambda pair: pair[0] / pair[1])
            self._known[key] = seconds
        return self._known[key]
