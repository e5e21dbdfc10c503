"""What cutting each weight does to the outputs of a file, measured, as a file has no gradients.

Each weight alone is cut to half its numbers, fitted to a few batches, and the outputs on others are held
against those of the dense file: their divergence where they are chances or logits, else the square of their
relative error. Over the energy that the cut loses this is the damage of losing the weight altogether, by
which a budget is divided (`Allocation`). Errors of several weights add up, nearly.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import onnx_ir as ir

from panther_compile.calibration.closeness import OutputSums
from panther_compile.config import SketchConfig
from panther_compile.models.batches import judged_of, learnt_of
from panther_compile.onnx.data import Feed, ObservedModel
from panther_compile.onnx.fit import FittedWeights, Runs, WeightFit
from panther_compile.onnx.output_parts import in_parts, parts_of
from panther_compile.onnx.rewrite import rewrite
from panther_compile.onnx.sites import find_onnx_sites
from panther_compile.onnx.verify import kept_in, output_pairs
from panther_compile.records import Choice, SketchPlan
from panther_compile.reporting.progress import ProgressBar

MAX_BYTES = 8 << 30  # of files written to measure; larger models go without
TRIAL, JUDGED = 4, 2  # batches that weights are fitted to, and judged by each alone
COMPARED = 8  # batches that plans are judged by
_LEAST_LOST = 1e-9


class Damages:
    """Cuts weights of a model, alone or by a plan, and tells how far the outputs are then.

    Args:
        model: as it was read; is not changed.
        config: the options.
        weights: of the model.
        runs: the data.
        folder: where copies of the model are written for a moment.
    """

    def __init__(
        self, model: ir.Model, config: SketchConfig, weights: WeightFit, runs: Runs, folder: Path
    ) -> None:
        self._model, self._config, self._weights, self._folder = model, config, weights, folder
        self._parts = parts_of(model)
        self._fit = replace(runs, feeds=learnt_of(runs.feeds)[:TRIAL])
        self._judged: Sequence[Feed] = judged_of(runs.feeds)[-COMPARED:]
        self._wanted = self._outputs(model, self._judged)

    def by_weight(self, plan: SketchPlan) -> dict[str, float] | None:
        """The damage of losing each weight of a plan; None where that is not known of one, or takes too long.

        Weights that the data do not reach are left out.

        Args:
            plan: that cuts each weight to half its numbers.
        """
        choices = plan.choices
        if len(choices) * _size(self._model) > MAX_BYTES or not set(choices) <= set(self._weights.names):
            return None
        fitted = self._weights.fit(choices, self._fit)
        choices = {name: choice for name, choice in choices.items() if name in fitted.ready}
        found: dict[str, float] = {}
        for name, choice in ProgressBar(choices.items(), desc="damage", progress=self._config.progress):
            if choice.error is None:
                return None
            lost = max(choice.error**2, _LEAST_LOST)
            found[name] = mean(self._distances({name: choice}, fitted, JUDGED)) / lost
        return found

    def of_plan(self, plan: SketchPlan) -> list[float]:
        """How far the outputs are with the weights of a plan, batch by batch."""
        known = set(self._weights.names)
        choices = {name: choice for name, choice in plan.choices.items() if name in known}
        fitted = self._weights.fit(choices, self._fit)
        return self._distances({name: choices[name] for name in fitted.ready}, fitted, COMPARED)

    def _distances(self, choices: Mapping[str, Choice], fitted: FittedWeights, count: int) -> list[float]:
        """How far the outputs of the last batches are with these weights alone in place."""
        model, quiet = self._model.clone(), replace(self._config, progress=False)
        rewrite(model, find_onnx_sites(model, quiet), choices, quiet, fitted)
        feeds, wanted = self._judged[-count:], self._wanted[-count:]
        batches = zip(feeds, wanted, self._outputs(model, feeds), strict=True)
        return [_distance(feed, dense, found) for feed, dense, found in batches]

    def _outputs(self, model: ir.Model, feeds: Sequence[Feed]) -> list[dict[str, Any]]:
        observed = ObservedModel(model, (), self._folder)
        return [in_parts(one, self._parts) for one in observed.run(feeds, observed.outputs)]


def _distance(feed: Feed, wanted: Mapping[str, Any], found: Mapping[str, Any]) -> float:
    pairs = output_pairs(wanted, found)
    if any(one.wanted.shape != one.found.shape for one in pairs):
        return 1.0  # see `outputs.distance`
    sums = OutputSums()
    sums.see([one for one in pairs if one.is_logits] or pairs, kept_in(feed))
    close = sums.closeness("")
    return close.distance if close.kind == "KL" else close.distance**2


def _size(model: ir.Model) -> int:
    """Bytes of the tensors of a graph, initializers and constants."""
    stored = [value.const_value for value in model.graph.initializers.values()]
    made = [value.const_value for node in model.graph for value in node.outputs]
    return sum(one.nbytes for one in (*stored, *made) if one is not None)
