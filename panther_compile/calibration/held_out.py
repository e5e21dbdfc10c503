"""Plans compared by the results on batches that nothing was learnt from."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from panther_compile.calibration.layer_fit import LayerFit
from panther_compile.calibration.lockstep import fit_in_lockstep
from panther_compile.calibration.norms import fit_norm
from panther_compile.calibration.repeated import see_repeated
from panther_compile.calibration.residuals import Residuals
from panther_compile.calibration.resume import CalibrationFolder
from panther_compile.calibration.shared_input import own_of_stack
from panther_compile.calibration.study import Study
from panther_compile.config import SketchConfig
from panther_compile.factorization.fit_matrix import FittedPair, shifted_bias
from panther_compile.kinds.targets import Target, most_are, watch
from panther_compile.layers.base import SketchedLayer
from panther_compile.memory import FreedMemory
from panther_compile.models.batch_norms import Norm
from panther_compile.models.batches import Call, judged_of, learnt_of
from panther_compile.models.outputs import distance
from panther_compile.models.surroundings import without_fast_attention
from panther_compile.models.watched import Arrival, Side, put_layers
from panther_compile.names import stack_name
from panther_compile.planning.sites import Found
from panther_compile.records import NEVER_REACHED, Cached, Fitted, SketchPlan

TRIAL = 8  # batches at most on which what the study does not tell is fitted to be tried
FEWEST, ROWS = 2, 1  # batches to which a plan is fitted to be tried; rows for each input of a layer


@dataclass(frozen=True, slots=True)
class Studied:
    """A dense model and what data shows of it, whatever the ratio.

    Attributes:
        model: is not changed, nor is its mode.
        found: its sites.
        route: how the sites were found.
        calls: the data.
        masks: mask of each batch, see `batches.kept_positions`.
        targets: what data can fit.
        left_alone: why data fits no other weight, by the name of its unit.
        residuals: places where outputs of layers are added, see `find_residuals`.
        study: what the batches in `learnt` show.
        folder: where the work is kept as it is done, or None.
        cached: what the model keeps of a token, where that is the objective.
        made_up: the same of inputs that were made up, in whose favour few data may be left out.
        repeated: names of the targets that one forward calls several times.
        norms: see `find_norms`.
    """

    model: nn.Module
    found: Found
    route: str
    calls: Sequence[Call]
    masks: Sequence[Tensor | None]
    targets: Mapping[str, Target]
    left_alone: Mapping[str, str]
    residuals: Residuals
    study: Study
    folder: CalibrationFolder | None
    cached: tuple[Cached, ...] = ()
    made_up: "Studied | None" = None
    repeated: frozenset[str] = frozenset()
    norms: Mapping[str, Norm] = field(default_factory=dict)

    @property
    def held_out(self) -> Sequence[tuple[Call, Tensor | None]]:
        """The batches on which allocations are compared, with their masks."""
        return judged_of(list(zip(self.calls, self.masks, strict=True)))

    @property
    def learnt(self) -> Sequence[Call]:
        """The other batches."""
        return learnt_of(self.calls)

    @property
    def cut_by_study(self) -> bool:
        """Whether the study has factors of the layers of most numbers, which it has not of kernels."""
        return most_are(self.targets.values(), lambda target: target.name in self.study.factors)


@dataclass(frozen=True, slots=True)
class Calibrated:
    """What data made of a model at one ratio.

    Attributes:
        plan: the plan that was chosen.
        ready: fitted layers, by the name of the unit.
        norms: batch norms with the statistics of what reaches them now, by name.
        unreached: units that the plan sketches, and that no batch reached.
        note: why the layers are to be sketched from the weights alone; empty if they are fitted.
        trials: the fit to part of the data by which the plan was judged, if it was; it holds no results.
    """

    plan: SketchPlan
    ready: Mapping[str, tuple[SketchedLayer, Fitted]]
    unreached: tuple[str, ...]
    note: str = ""
    trials: "HeldOut | None" = None
    norms: Mapping[str, Norm] = field(default_factory=dict)

    def notes(self, studied: Studied) -> dict[str, str]:
        """What is to be said of weights that data did not fit, by the name of their units."""
        alone = {name: f"data leaves it alone: {why}" for name, why in studied.left_alone.items()}
        return alone | dict.fromkeys(self.unreached, NEVER_REACHED)


@without_fast_attention()
def fit_plan(
    studied: Studied,
    config: SketchConfig,
    plan: SketchPlan,
    calls: Sequence[Call],
    folder: CalibrationFolder | None,
    *,
    stored: bool = True,
) -> tuple[LayerFit, dict[str, Norm], Side]:
    """Fit the layers of a plan in lockstep, and the batch norms behind them, see `fit_norm`.

    Args:
        studied: the model.
        config: the options.
        plan: to be carried out.
        calls: to fit to, the first ones of the data or all.
        folder: where fitted layers are kept, or None.
        stored: see `LayerFit`.

    Returns:
        What was fitted, layers and norms by name, and the model that they are in.
    """
    chosen = chosen_targets(plan, studied.targets)
    repeated = see_repeated(studied.model, chosen, studied.repeated, calls, studied.masks)
    fit = LayerFit(chosen, plan, studied.study, studied.masks, config, folder, repeated, stored=stored)
    sketched = watch(studied.model, chosen, studied.norms)

    norms: dict[str, Norm] = {}

    def fit_each(name: str, arrivals: Sequence[Arrival]) -> nn.Module:
        if name not in studied.norms:
            return fit(name, arrivals)
        norm = fit_norm(studied.norms[name], arrivals)
        if norm is None:
            return sketched.watched[name].layer
        norms[name] = norm
        return norm

    fit_in_lockstep(
        watch(studied.model, chosen, studied.norms),
        sketched,
        calls,
        fit_each,
        residuals=studied.residuals,
        progress=config.progress,
        ready=fit.from_study(),
    )
    return fit, norms, sketched


class HeldOut:
    """Compares results on held-out batches with those of the dense model, which runs on them once.

    Args:
        studied: the model.
        config: the options.
        batches: with their masks.
    """

    def __init__(
        self, studied: Studied, config: SketchConfig, batches: Sequence[tuple[Call, Tensor | None]]
    ) -> None:
        self._studied, self._config, self._batches = studied, config, batches
        self._last: tuple[SketchPlan, Side] | None = None
        self._freed = FreedMemory()

    def trial(self, plan: SketchPlan) -> "Trial":
        """What makes the layers of a plan."""
        studied, chosen = self._studied, chosen_targets(plan, self._studied.targets)
        fit = LayerFit(chosen, plan, studied.study, studied.masks, self._config, stored=False)
        return Trial(fit, studied.study, self._config)

    def cut(self, plan: SketchPlan) -> Side:
        """The model with the layers of a plan."""
        studied, chosen = self._studied, chosen_targets(plan, self._studied.targets)
        sketched, trial = watch(studied.model, chosen), self.trial(plan)
        apart = {name: choice for name, choice in plan.choices.items() if name in chosen and not choice.link}
        needed = {stack_name(choice.sharing or (name,)) for name, choice in apart.items()}
        if needed <= studied.study.factors.keys() | studied.study.patches.keys():
            put_layers(sketched, {name: trial(name, ()) for name in chosen})
        else:
            dense, calls = watch(studied.model, chosen), studied.learnt[:TRIAL]
            at_once = {name: trial(name, ()) for name in chosen if name in studied.study.shares}
            fit_in_lockstep(dense, sketched, calls, trial, residuals={}, progress=False, ready=at_once)
        return sketched

    def fitted(self, plan: SketchPlan) -> Side:
        """The model with the layers of a plan fitted in lockstep to some of the batches learnt from."""
        return self._fitted_to(plan, self._studied.learnt[: self._enough])

    def fitted_to_all(self, plan: SketchPlan) -> Side:
        """The same, to all of them; kept until that of another plan is asked for."""
        if self._last is None or not self.is_fitted_to_all(plan):
            self._last = plan, self._fitted_to(plan, self._studied.learnt)
        return self._last[1]

    def is_fitted_to_all(self, plan: SketchPlan) -> bool:
        """Whether that is there already."""
        return self._last is not None and self._last[0].choices == plan.choices

    def _fitted_to(self, plan: SketchPlan, calls: Sequence[Call]) -> Side:
        return fit_plan(self._studied, self._config, plan, calls, None, stored=False)[2]

    def tried(self, plan: SketchPlan, how: str, made: Callable[[SketchPlan], Side]) -> list[float]:
        """How far the results of a plan are, batch by batch; kept in the folder, if there is one.

        Args:
            plan: to try.
            how: its model is made, in a word.
            made: makes it.
        """
        folder = self._studied.folder
        kept = None if folder is None else folder.tried(plan, how, len(self._batches))
        if kept is None:
            kept = self.distances(made(plan))
            self._freed.give_back()
            if folder is not None:
                folder.keep_tried(plan, how, kept)
        return kept

    def distance(self, side: Side) -> float:
        """How far the results of a model are from the dense one's."""
        return sum(self.distances(side)) / len(self._batches)

    def distances(self, side: Side) -> list[float]:
        """The same on each batch."""
        with torch.no_grad():
            return [
                distance(wanted, call.run(side.model), kept, logits=self._config.logits)
                for (call, kept), wanted in zip(self._batches, self._wanted, strict=True)
            ]

    @cached_property
    def _enough(self) -> int:
        """How many batches have as many rows as layers have inputs, but not too few.

        Rows of an image are too much alike to count: of images a quarter of the batches.
        """
        studied = self._studied
        if most_are(studied.targets.values(), lambda target: target.view.is_spatial):
            return max(FEWEST, min(TRIAL, math.ceil(len(studied.learnt) / 4)))
        widest = max(target.shape[1] for target in studied.targets.values())
        rows = max(studied.study.reached.values()) / len(studied.learnt)
        return max(FEWEST, math.ceil(ROWS * widest / rows))

    @cached_property
    def _wanted(self) -> Sequence[Any]:
        """The dense model's results."""
        dense = watch(self._studied.model, {})
        with torch.no_grad():
            return [call.run(dense.model) for call, _ in self._batches]


class Trial:
    """Cuts matrices and kernels at their rank as the study left them, which costs little; fits the rest.

    Args:
        fit: of the plan.
        study: of the model.
        config: the options.
    """

    def __init__(self, fit: LayerFit, study: Study, config: SketchConfig) -> None:
        self._fit, self._study, self._config = fit, study, config

    def __call__(self, name: str, arrivals: Sequence[Arrival]) -> nn.Module:
        """See `lockstep.Fit`."""
        target, choice = self._fit.targets[name], self._fit.choices[name]
        if choice.link:
            return self._fit.cut_coupling(choice)[name]
        if name in self._study.patches:
            moments, gradient = self._study.patches[name], self._study.weights.get(name)
            kernel = target.view.cut(name, choice, self._config, moments, gradient)
            self._study.put_module(kernel)
            return kernel
        together = choice.sharing or (name,)
        if stack_name(together) not in self._study.factors:
            return self._fit(name, arrivals)
        left, right, mean = self._study.factors[stack_name(together)]
        if choice.sharing:
            targets = [self._fit.targets[one] for one in together]
            left, right, mean = own_of_stack(targets, together.index(name), left, right, mean)
        weight, bias = target.weight_and_bias()
        left, right = left[:, : choice.rank], right[: choice.rank]
        bias = shifted_bias(bias, weight.detach().float() @ mean, left @ (right @ mean))
        layer = target.build(FittedPair(left, right, None, bias, 0.0))
        self._study.put_module(layer)
        return layer


def chosen_targets(plan: SketchPlan, targets: Mapping[str, Target]) -> dict[str, Target]:
    """The targets that the plan sketches."""
    names = {line.name for line in plan.sketched}
    return {name: target for name, target in targets.items() if name in names}
