"""Label-free healing: train the factors of a sketched model until it answers like the dense one."""

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from panther_compile.config import logits_of
from panther_compile.errors import (
    DataError,
    HealingError,
    first_line,
)
from panther_compile.healing.best_state import BestState, numbers
from panther_compile.healing.descent import Descent, Factor, factors_of
from panther_compile.healing.landmarks import find_landmarks
from panther_compile.healing.match import OUTPUT, Match
from panther_compile.healing.options import HealOptions
from panther_compile.healing.pair import check_pair
from panther_compile.healing.rates import Rates
from panther_compile.healing.report import HEALING_ATTRIBUTE, HealReport, noted_as_healed
from panther_compile.layers.base import SketchedLayer, outermost
from panther_compile.layers.own_weights import own_biases
from panther_compile.models.batches import Call, Data, record_calls
from panther_compile.models.derivatives import NO_GRADIENT, differentiates
from panther_compile.models.output_kind import check_output, recognize_output
from panther_compile.models.substitute import copy_with
from panther_compile.models.surroundings import eval_mode, undisturbed, without_fast_attention
from panther_compile.records import RECORD_ATTRIBUTE, SketchRecord, keep_attribute, keep_record
from panther_compile.reporting.progress import ProgressBar

Model = TypeVar("Model", bound=nn.Module)

# Weight of the hidden states, where the result is judged by its divergence, and where by its distance.
_BESIDE_LOGITS, _BESIDE_FEATURES = 0.1, 10.0
_FEWEST_JUDGES = 8  # batches held out, where there are so many
_SUSPECT = 3.0  # times the loss before the first step, on the batch of one: the rate may be too high
_OF_BEFORE = "; before it was healed"
_PATIENCE = 4  # evaluations in a row that are worse than the one before, after which it ends


def heal(
    small: Model,
    *,
    teacher: nn.Module,
    data: Data,
    steps: int = 200,
    method: str = "kl",
    lr: float | None = None,
    output: str | frozenset[str] = "auto",
    held_out: float = 0.125,
    inplace: bool = False,
    seed: int = 0,
    progress: bool | None = None,
    cache_bytes: int = 2 << 30,
) -> Model:
    """Train the factors and biases of the sketched layers so that the model answers like the dense one.

    Those that are frozen (`requires_grad=False`) learn too, and are frozen afterwards; nothing else changes.
    No labels are used. Both models run in eval mode, so without dropout; on a GPU float32 models run under
    bfloat16 autocast. A part of the batches is never trained on: the state that does best on it is the one
    that is kept, the one given if no other does better, and a block of it that does better as it was before
    is put back. Where steps lead astray, the best state is gone back to, and the rate is quartered.
    `heal_report(model)` tells what came of it. Where it is broken off, as by an interrupt, a model that is
    healed in place keeps the best state so far, and its reports tell of it.

    Args:
        small: a model with sketched layers.
        teacher: the dense model it was made of, on the same device.
        data: batches, as for `sketchify(data=...)`; two at least, all of them held in memory.
        steps: to take, each on one batch.
        method: "kl" matches the results of the models (logits by their Kullback-Leibler divergence, others by
            their squared distance) and the hidden states after each block; "block" the hidden states alone.
        lr: change of a factor in one step, relative to its size (`healing.descent`), to begin with; None
            looks for one in the first steps (`healing.rates`).
        output: what the results are, see `SketchConfig`.
        held_out: share of the batches to judge by; at most a fortieth as many as there are steps, or
            eight, so that most of the time goes into training.
        inplace: change the model given, in place of a copy.
        seed: of the order of the batches.
        progress: show a progress bar; None shows one on a terminal.
        cache_bytes: what the teacher's answers may take up; those beyond are computed again each time.

    Returns:
        The healed model.

    Raises:
        ConfigError, ConfigTypeError: an option is not what is wanted.
        DataError: the data holds fewer than two batches, or a model cannot run one.
        HealingError: the teacher or the model gives NaN before the first step, or there is nothing to match,
            or no gradient.
        NoTargetError: the model holds no sketched layer.
        TeacherMismatchError: the teacher is not the dense model that this one was made of.
        WeightError: a factor was quantized or sharded.
        WrappedModelError: a model is wrapped in DDP, FSDP or torch.compile.
    """
    options = HealOptions(
        steps=steps,
        method=method,
        lr=lr,
        output=output,
        held_out=held_out,
        inplace=inplace,
        seed=seed,
        progress=progress,
        cache_bytes=cache_bytes,
    )
    check_pair(small, teacher)
    calls = record_calls(teacher, data)
    check_output(teacher, calls, output)
    with torch.inference_mode(False):
        result: nn.Module = small if inplace else copy_with(small, {})
    heal_layers(result, tuple(outermost(result)), teacher, calls, options)
    return result  # type: ignore[return-value]


def heal_layers(
    small: nn.Module,
    layers: Sequence[SketchedLayer],
    teacher: nn.Module,
    calls: Sequence[Call],
    options: HealOptions,
) -> None:
    """Train some of the sketched layers in place, and keep the report on the model.

    Args:
        small: the model.
        layers: of the model; the others stay as they are.
        teacher: see `heal`.
        calls: of both models.
        options: of `heal`.

    Raises:
        DataError, HealingError: see `heal`.
    """
    if len(calls) < 2:
        raise DataError(f"data holds {len(calls)} batch, wanted at least 2: one to train on, one to judge by")
    order = random.Random(options.seed)
    places = order.sample(range(len(calls)), len(calls))
    count = _judges(options.held_out, len(calls), options.steps)
    own = (*nn.ModuleList(layers).parameters(), *own_biases(small, set(layers)))
    learnt = [one for one in own if one.is_floating_point()]
    with ExitStack() as afterwards, _calm((small, teacher), learnt):
        given = options.output
        taken = recognize_output(teacher, calls).output if given == "auto" else given
        landmarks = find_landmarks(small, teacher, [calls[place] for place in places])
        if options.method == "block" and not landmarks:
            raise HealingError(
                f"no module of {type(small).__name__} gives hidden states under the same name as in the "
                "teacher; method='kl' matches the results alone"
            )
        match = Match(
            small,
            teacher,
            calls,
            landmarks,
            logits=logits_of(taken),
            half=_half_pays(small),
            cache_bytes=options.cache_bytes,
            usual=places[:count],
        )
        healer = _Healer(match, layers, learnt, options, order, places[:count], places[count:])
        # What the model holds is put back before.
        healer.run(lambda report: afterwards.callback(_keep_report, small, report))


@dataclass
class _Healer:
    """One run: the loss, how to lower it, and which batches are for what.

    Attributes:
        learnt: the parameters and biases of the layers.
        taken: steps, so far.
        stopped: why they ended.
    """

    match: Match
    layers: Sequence[SketchedLayer]
    learnt: Sequence[nn.Parameter]
    options: HealOptions
    order: random.Random
    judged_by: list[int]
    trained_on: list[int]
    taken: int = 0
    stopped: str = "broken off"

    def run(self, keep: Callable[[HealReport], object]) -> None:
        """Heal the model, leave it in the best state seen, and hand a report on, whatever happens."""
        small, options = self.match.small, self.options
        best = BestState(self.learnt, self._judge, self._objective)
        if not math.isfinite(best.first):
            bad = next(name for name, loss in best.before.items() if not math.isfinite(loss))
            raise HealingError(f"the loss at {bad} is {best.before[bad]} before the first step")
        rates = Rates(options.lr, options.steps, best.first)
        reverted: tuple[str, ...] = ()
        try:
            with ProgressBar(total=options.steps, desc="heal", progress=options.progress) as bar:
                self.stopped = self._descend(factors_of(self.layers, self.learnt), best, rates, bar)
            reverted = best.put_back((name, small.get_submodule(name)) for name in self.match.landmarks)
        finally:
            best.restore()
            report = HealReport(
                before=best.before,
                after=best.after,
                steps=self.taken,
                kept_step=best.step,
                stopped=self.stopped,
                batches=(len(self.trained_on), len(self.judged_by)),
                lr=rates.top,
                blocks_reverted=reverted,
            )
            keep(report)

    def _descend(self, factors: Sequence[Factor], best: BestState, rates: Rates, bar: ProgressBar) -> str:
        """Take steps, look every so often how the model does, and say why they ended."""
        parameters = [factor.parameter for factor in factors]
        descent, places = Descent(factors), self._places()
        last, worse, missed = best.first, 0, 0
        for step in range(1, self.options.steps + 1):
            losses = self.match.losses(next(places))
            loss = self._objective(losses)
            size = float(loss.detach())
            if not math.isfinite(size):
                name = next(name for name, one in numbers(losses).items() if not math.isfinite(one))
                return f"stopped: the loss at {name} is not finite after step {step - 1}"
            gradients = self._gradients(loss, parameters)
            missed = 0 if gradients else missed + 1
            if missed == len(self.trained_on):
                raise HealingError(
                    f"the loss reaches none of the sketched layers on {missed} batches: its graph is cut "
                    "somewhere, or goes another way"
                )
            if gradients:
                descent.step(gradients, size, rates.at(step))
            self.taken = step
            bar.update()
            is_due = rates.is_due(step)
            if not is_due and not (rates.can_be_lowered and size > _SUSPECT * best.first):
                continue
            now = best.look(step)
            if not is_due and not rates.is_far_astray(now):
                continue  # the batch is one of those that are hard
            bar.set_postfix(start=f"{best.first:.4f}", now=f"{now:.4f}")
            worse = 0 if now < last else worse + 1
            last = now
            if rates.leads_astray(step, now):
                best.restore()
                descent = Descent(factors)
                last, worse = best.least, 0
            elif worse == _PATIENCE:
                return f"stopped after step {step}: worse at {_PATIENCE} evaluations in a row"
        return f"all {self.options.steps} steps taken"

    def _objective(self, losses: dict[str, Tensor]) -> Tensor:
        """The hidden states beside the result; where there are none, the result alone."""
        hidden = [loss for name, loss in losses.items() if name != OUTPUT]
        result = losses[OUTPUT] if self.options.method == "kl" else losses[OUTPUT].new_zeros(())
        if not hidden:
            return result
        beside = _BESIDE_LOGITS if self.match.has_logits else _BESIDE_FEATURES
        return result + (beside if self.options.method == "kl" else 1.0) * torch.stack(hidden).mean()

    @torch.no_grad()
    def _judge(self) -> dict[str, Tensor]:
        """The mean losses on the batches that are held out, of each landmark on those that reach it."""
        found: dict[str, list[Tensor]] = {}
        for place in self.judged_by:
            for name, loss in self.match.losses(place).items():
                found.setdefault(name, []).append(loss)
        order = (*self.match.landmarks, OUTPUT)
        return {name: torch.stack(found[name]).mean() for name in order if name in found}

    def _gradients(self, loss: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """The gradient of each parameter or None; empty if the loss reaches no sketched layer.

        Raises:
            HealingError: there is none, as where an output is changed in place that its backward reads.
        """
        if not loss.requires_grad:
            return ()
        try:
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        except torch.OutOfMemoryError:
            raise
        except NO_GRADIENT as error:
            raise HealingError(f"the loss has no gradient: {first_line(error)}") from error
        return gradients if any(gradient is not None for gradient in gradients) else ()

    def _places(self) -> Iterator[int]:
        """The batches to train on, all of them in a new order each time round."""
        while True:
            yield from self.order.sample(self.trained_on, len(self.trained_on))


def _keep_report(model: nn.Module, report: HealReport) -> None:
    """Keep it on the model, and say in the record of the sketch that the errors there are those of before."""
    keep_attribute(model, HEALING_ATTRIBUTE, report)
    record: SketchRecord | None = vars(model).get(RECORD_ATTRIBUTE)
    if record is not None and not report.reverted:
        closeness = record.closeness  # of before
        if closeness is not None and closeness.grade:
            inputs = closeness.inputs.removesuffix(_OF_BEFORE) + _OF_BEFORE
            closeness = replace(closeness, inputs=inputs)
        fitted = noted_as_healed(record.fitted, report.blocks_reverted)
        keep_record(model, replace(record, fitted=fitted, closeness=closeness))


def _judges(held_out: float, batches: int, steps: int) -> int:
    """How many batches are held out: all are run some 20 times."""
    wanted = min(round(held_out * batches), max(_FEWEST_JUDGES, steps // 40))
    return min(batches - 1, max(1, wanted))


def _half_pays(model: nn.Module) -> bool:
    """Whether to run under bfloat16 autocast: float32 on a GPU that has it."""
    first = next(model.parameters())
    return first.is_cuda and first.dtype == torch.float32 and torch.cuda.is_bf16_supported()


@contextmanager
def _calm(models: Sequence[nn.Module], learnt: Iterable[nn.Parameter]) -> Iterator[None]:
    """Eval mode, gradients for what is learnt alone; everything is put back afterwards.

    A model that differentiates in its forward may do so by its own parameters: those keep theirs.
    """
    differentiating = any(map(differentiates, models))
    flags = [(p, p.requires_grad) for model in models for p in model.parameters()]
    with undisturbed(grad=True), without_fast_attention(), ExitStack() as stack:
        stack.enter_context(eval_mode(*models))
        for parameter, flag in flags:
            stack.callback(parameter.requires_grad_, flag)
        trained = {id(parameter) for parameter in learnt}
        for parameter, flag in flags:
            if parameter.is_floating_point():
                parameter.requires_grad_(id(parameter) in trained or (differentiating and flag))
        yield
