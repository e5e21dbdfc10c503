"""Run the dense and the sketched model side by side, and fit each layer on what reaches it in both.

Every batch runs twice, in two threads: through the dense model and through the one being sketched. One
thread runs at a time. Each pauses where it reaches a layer that is still to be fitted; when all have paused
or are through, the layer is fitted on all their inputs, takes its place in the sketched model, and they go
on through it:

    batch 0, dense     ──► fc1 ─┐            ┌──► fc2 ─┐
    batch 0, sketched  ──► fc1 ─┤ fit fc1 on ├──► fc2 ─┤ fit fc2 on ...
    batch 1, dense     ──► fc1 ─┤ what came  ├──► fc2 ─┤ what came
    batch 1, sketched  ──► fc1 ─┘            └──► fc2 ─┘

So each layer is fitted to the dense layer's output on the inputs that the sketched layers before it give,
in the order in which the model's own code calls them, whatever that code is, for one run of each model.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeGuard

import torch
from torch import Tensor, nn

from panther_compile.calibration.residuals import Passage, Residuals, observe
from panther_compile.memory import FreedMemory
from panther_compile.models.batches import Call, run_dense
from panther_compile.models.surroundings import generator_states, swap_generators
from panther_compile.models.watched import Arrival, Side, put_layers
from panther_compile.reporting.progress import ProgressBar

Fit = Callable[[str, Sequence[Arrival]], nn.Module]
"""From the name of a layer and what reached it, the layer that takes its place."""


class _Stopped(BaseException):
    """Ends a thread whose model is no longer wanted; not an error that a model's code may catch."""


class _Runner:
    """One batch on its way through one model, in a thread of its own that runs only when asked to.

    Attributes:
        at: name of the layer it has paused at; None while it runs and when it is through.
        value: the input of that layer.
        residual: what its output will be added to, if known.
        passed: what passed where the residuals of layers come from.
        error: the error that ended it.
        last: name of the layer it paused at last.
    """

    def __init__(self, model: nn.Module, call: Call) -> None:
        self.at: str | None = None
        self.value: Tensor | None = None
        self.residual: Tensor | None = None
        self.passed: dict[Passage, Tensor] = {}
        self.error: BaseException | None = None
        self.last: str | None = None
        self.through = False
        self._stop = False
        self._generators = generator_states()
        self._go = threading.Semaphore(0)
        self._came = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(model, call), daemon=True)

    def go_on(self) -> None:
        """Let it run until it pauses or is through.

        Raises:
            DataError: the model raised.
        """
        self.at = self.value = self.residual = None
        others = swap_generators(self._generators)  # a model that draws numbers goes on where it paused
        self._go.release()
        if self._thread.ident is None:
            self._thread.start()
        self._came.acquire()
        self._generators = swap_generators(others)
        if self.error is not None:
            raise self.error

    def pause(self, name: str, value: Tensor, passage: Passage | None) -> None:
        """Wait here, within the thread, for the next `go_on`."""
        self.at = self.last = name
        self.value = value
        self.residual = None if passage is None else self.passed.pop(passage, None)
        self._came.release()
        self._go.acquire()
        if self._stop:
            raise _Stopped

    def stop(self) -> None:
        """End the thread, wherever it is; may be called again."""
        if not self.through and self._thread.ident is not None:
            self._stop = True
            self._go.release()
            self._thread.join()

    def _run(self, model: nn.Module, call: Call) -> None:
        self._go.acquire()
        try:
            if not self._stop:
                _current.runner = self
                with torch.no_grad():  # grad mode is the thread's own
                    # Logits of all batches would be larger than all else.
                    run_dense(model, call, self._who)
        except _Stopped:
            pass
        # Whatever is raised is raised again where the runner is driven.
        except BaseException as error:
            self.error = error
        finally:
            self.through = True
            self._came.release()

    def _who(self) -> str:
        """The model, in words: a forward with its parameters in hand does not expect layers to change."""
        if self.last is None:
            return "the model"
        return f"the model, fitted up to {self.last} while it runs (exclude= leaves layers as they are),"


_current = threading.local()


def fit_in_lockstep(
    dense: Side,
    sketched: Side,
    calls: Sequence[Call],
    fit: Fit,
    *,
    residuals: Residuals,
    progress: bool | None,
    ready: Mapping[str, nn.Module] = MappingProxyType({}),
) -> list[str]:
    """Fit every watched layer that the data reaches; the sketched side then holds what was fitted.

    Args:
        dense: stays as it is.
        sketched: another copy, watched at the same layers.
        calls: the data.
        fit: makes a layer from what reached it. A layer that is called several times in one forward is
            made at the first call, see `repeated`.
        residuals: see `residuals.find_residuals`.
        progress: whether to show a bar; None shows one on a terminal.
        ready: layers, by name, that need nothing of what reaches them; they are put in place first.

    Returns:
        The names of the layers that were fitted, in the order in which they were reached.
    """
    done: dict[str, None] = dict.fromkeys(ready)
    put_layers(sketched, ready)
    freed = FreedMemory()

    def pause(name: str, value: Tensor) -> None:
        if name not in done:
            _current.runner.pause(name, value, residuals.get(name))

    def remember(passage: Passage, tensor: Tensor) -> None:
        _current.runner.passed[passage] = tensor

    def go_on(those: Sequence[_Runner]) -> None:
        for runner in those:
            runner.go_on()
            freed.give_back()

    pairs = [(_Runner(dense.model, call), _Runner(sketched.model, call)) for call in calls]
    runners = [runner for pair in pairs for runner in pair]
    passages = {residuals[name] for name in sketched.watched if name in residuals}
    bar = ProgressBar(total=len(dense.watched) - len(done), desc="fit", progress=progress)
    with (
        observe(dense.model, passages, remember),
        observe(sketched.model, passages, remember),
        dense.seen_by(pause),
        sketched.seen_by(pause),
        bar,
    ):
        try:
            go_on(runners)
            while waiting := [runner for runner in runners if not runner.through]:
                name = _next_layer(waiting)
                came = [
                    Arrival(batch, one.value, other.value, _both(one.residual, other.residual))
                    for batch, (one, other) in enumerate(pairs)
                    if one.at == other.at == name and _has_rows(one.value) and _has_rows(other.value)
                ]
                if came:
                    sketched.watched[name].layer = fit(name, came)
                del came
                done[name] = None
                bar.update()
                if sketched.watched.keys() <= done.keys():  # nothing behind the last layer tells more
                    break
                go_on([runner for runner in waiting if runner.at == name])
        finally:
            _stop(runners)
    return list(done)


def _stop(runners: Sequence[_Runner]) -> None:
    """End all threads, even if an interrupt comes meanwhile."""
    try:
        for runner in runners:
            runner.stop()
    except BaseException:
        for runner in runners:
            runner.stop()
        raise


def _has_rows(value: Tensor | None) -> TypeGuard[Tensor]:
    """Whether anything came: an expert may be called with no token."""
    return value is not None and value.numel() > 0


def _both(one: Tensor | None, other: Tensor | None) -> tuple[Tensor, Tensor] | None:
    return None if one is None or other is None else (one, other)


def _next_layer(waiting: Sequence[_Runner]) -> str:
    """The layer where most of the waiting runners are; the first such if several are alike."""
    counts: dict[str, int] = {}
    for runner in waiting:
        assert runner.at is not None
        counts[runner.at] = counts.get(runner.at, 0) + 1
    return max(counts, key=lambda name: counts[name])
