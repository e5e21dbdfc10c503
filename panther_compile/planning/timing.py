"""Time layers and their sketches side by side, on what reaches each layer in the dense model; then the model.

The dense model runs once. What is then timed are single layers, dense and with random factors of the
planned scheme and rank: time does not depend on the numbers. Layers that are alike, on inputs that are alike,
are timed once. What a sketch does to the layers around it is seen in the whole model alone, which is timed
dense and sketched by turns: where that is not faster, layers go back to dense, those that save least first.
"""

import functools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from panther_compile.errors import ConfigTypeError
from panther_compile.kinds.parts import empty_sketch, unit_name
from panther_compile.kinds.registry import kind_of
from panther_compile.kinds.targets import watch_layers
from panther_compile.layers.nested_tensors import turn_off_nested_tensors
from panther_compile.models.batches import Call, device_of, record_calls, run_dense
from panther_compile.models.stopwatch import seconds_of
from panther_compile.models.surroundings import without_fast_attention
from panther_compile.models.watched import copy_sharing
from panther_compile.names import dotted
from panther_compile.planning.coupled import SCHEME
from panther_compile.planning.own_weights import lower_own_weights
from panther_compile.planning.plan import PAYS, TIMED, TimedSites
from panther_compile.planning.sites import Found
from panther_compile.records import Choice, LayerPlan, Site, SketchPlan, Timed, WholeTimes

_TURN_SECONDS = 2e-3  # of one layer on an accelerator, before the other has its turn; on a CPU one call
_BETWEEN = 1 << 19  # numbers that are read and written between two calls on a CPU
_PAIR_SECONDS = 50e-3  # of one dense layer and its sketch
_FEWEST_TURNS = 5
_CLEAR = 1.5  # a speed-up below this, where noise may have made it, is measured a second time
_MODEL_SECONDS = 2.0  # of a whole model and its sketch
_MODEL_TURNS = 4  # at least
_LONG = 0.05  # seconds of a call that finds the caches as others left them only at its beginning

Timer = Callable[[nn.Module, nn.Module, Tensor], tuple[float, float]]
"""From two layers and an input, the seconds that a call of each takes."""

ModelTimer = Callable[[nn.Module, nn.Module, Call], WholeTimes]
"""From the dense and the sketched model and what they are called with, the seconds that calls take."""


@dataclass(frozen=True, slots=True)
class _Run:
    """A dense layer and an input; those of one key take the same time."""

    layer: nn.Module
    x: Tensor
    key: tuple[object, ...]


def side_by_side(dense: nn.Module, sketched: nn.Module, x: Tensor) -> tuple[float, float]:
    """Seconds of a call of each on x, in inference: of the fastest of several turns, the least disturbed.

    The clock is that of `stopwatch.seconds_of`.
    """
    seconds: tuple[list[float], list[float]] = ([], [])
    on_cpu = x.device.type == "cpu"
    others = torch.zeros(_BETWEEN)
    with torch.inference_mode():
        calls = []
        runs = [functools.partial(layer, x) for layer in (dense, sketched)]
        for run in runs:
            run()  # allocates, and picks kernels
            once = seconds_of(run, x.device)
            calls.append(1 if on_cpu else math.ceil(_TURN_SECONDS / max(once, _TURN_SECONDS / 1000)))
        deadline = time.perf_counter() + _PAIR_SECONDS
        while len(seconds[0]) < _FEWEST_TURNS or time.perf_counter() < deadline:
            for run, number, taken in zip(runs, calls, seconds, strict=True):
                if on_cpu:
                    others.add_(1.0)  # in a model other layers run in between, and take the caches
                taken.append(seconds_of(run, x.device, number) / number)
    return min(seconds[0]), min(seconds[1])


def by_turns(dense: nn.Module, sketched: nn.Module, call: Call) -> WholeTimes:
    """Seconds of single calls of each, without gradients, timed as `side_by_side` does it."""
    device = device_of(dense) or torch.device("cpu")
    runs = [functools.partial(call.run, model) for model in (dense, sketched)]
    seconds: tuple[list[float], list[float]] = ([], [])
    with torch.no_grad():
        for run in runs:
            run()
        deadline = time.perf_counter() + _MODEL_SECONDS
        while len(seconds[0]) < _MODEL_TURNS or time.perf_counter() < deadline:
            for run, taken in zip(runs, seconds, strict=True):
                if not taken or taken[-1] < _LONG:
                    run()  # the caches hold this model then, whichever had its turn before
                taken.append(seconds_of(run, device))
    return WholeTimes(tuple(seconds[0]), tuple(seconds[1]))


def time_sites(
    model: nn.Module,
    found: Found,
    example: Any,
    *,
    timer: Timer = side_by_side,
    model_timer: ModelTimer = by_turns,
) -> TimedSites:
    """The sites, with clocks for their sketches and for the model.

    Args:
        model: the dense model; it runs in eval mode, and is not changed.
        found: its sites.
        example: a batch: a tensor, a tuple or list of arguments, a mapping of keywords, or a `Call`.
        timer: takes the times of layers.
        model_timer: takes the times of models.

    Raises:
        ConfigTypeError: the example is none of these, or the model cannot be copied.
        DataError: the model cannot run it.
    """
    if not isinstance(example, Tensor | tuple | list | Mapping | Call):
        raise ConfigTypeError(
            f"example_inputs is a {type(example).__name__}, wanted a tensor, a tuple or list of arguments, "
            "or a mapping of keywords"
        )
    call = replace(record_calls(model, [example])[0], source="example_inputs")
    runs = _record(model, [site for site, _ in found.sites], call)

    def whole(new: Mapping[nn.Module, nn.Module]) -> WholeTimes:
        copies = {old: copy_sharing(layer, {}) for old, layer in new.items()}  # they change their mode
        dense, sketched = copy_sharing(model, {}), copy_sharing(model, copies)
        lower_own_weights(dense)  # the model as it was given
        lower_own_weights(sketched)
        turn_off_nested_tensors(sketched)
        return model_timer(dense, sketched, call)

    return TimedSites(found.sites, found.skipped, found.order, _LayerClock(runs, timer), whole)


def without_least(found: TimedSites, plan: SketchPlan, times: WholeTimes) -> TimedSites:
    """The sites; the half of the sketched units that saves least time stays dense.

    Args:
        found: the sites.
        plan: sketches at least one unit.
        times: of the model with all that the plan sketches.
    """

    def saved(line: LayerPlan) -> float:
        if line.choice is None or line.choice.scheme == SCHEME:  # narrow layers are not timed alone
            return 0.0
        timed = found.clock(line.name, line.choice)
        return 0.0 if timed is None else timed.saved

    least = sorted(plan.sketched, key=saved)[: math.ceil(len(plan.sketched) / 2)]
    reason = f"{TIMED}: with its sketch the whole model ran at {times.speedup:.2f} of the dense speed"
    returned = {line.name: replace(line, choice=None, reason=reason) for line in least}
    return replace(found, returned={**found.returned, **returned})


def _record(model: nn.Module, sites: Sequence[Site], call: Call) -> dict[str, list[_Run]]:
    """Every run of the layers of each unit in one call of the model, by the unit's name."""
    layers: dict[str, tuple[nn.Module, str, nn.Module]] = {}
    units: dict[str, str] = {}
    for site in sites:
        for name, module in ((site.name, site.module), *site.tied):
            for suffix, part in kind_of(module).parts(module).items():
                full = dotted(name, suffix)
                layers[full], units[full] = (module, suffix, part), unit_name(site, suffix)
    side = watch_layers(model, layers)
    runs: dict[str, list[_Run]] = defaultdict(list)
    alike: dict[tuple[object, ...], _Run] = {}  # holds one input for all that are alike

    def see(name: str, x: Tensor) -> None:
        layer = side.watched[name].layer
        weight: Tensor = layer.weight  # type: ignore[assignment]
        key = (repr(layer), *_form(weight), *_form(x))
        runs[units[name]].append(alike.setdefault(key, _Run(layer, x, key)))

    with side.seen_by(see), torch.no_grad(), without_fast_attention():
        run_dense(side.model, call)
    return runs


def _form(tensor: Tensor) -> tuple[object, ...]:
    """What time depends on."""
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
        dense, sketched = (sum(taken) for taken in zip(*seconds, strict=True))
        shapes = tuple(dict.fromkeys(tuple(run.x.shape) for run in runs))
        return Timed(dense / sketched, dense - sketched, shapes)

    def _seconds(self, run: _Run, choice: Choice) -> tuple[float, float]:
        key = (run.key, choice.scheme, choice.ranks)
        if key not in self._known:
            weight: Tensor = run.layer.weight  # type: ignore[assignment]
            sketch = empty_sketch(run.layer, choice, weight.device)
            seconds = self._timer(run.layer, sketch, run.x)
            if PAYS <= seconds[0] / seconds[1] < _CLEAR:
                again = self._timer(run.layer, sketch, run.x)
                seconds = min(seconds, again, key=lambda pair: pair[0] / pair[1])
            self._known[key] = seconds
        return self._known[key]
