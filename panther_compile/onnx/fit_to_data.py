"""Plan by what data show of an ONNX model, and fit the weights that they reach.

Where torch can run the graph, as in `sketchify` (`fit_in_torch.py`); else by ONNX Runtime alone, which shows
what reaches each weight, and knows no gradients (`fit.py`, `damage.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean

import onnx_ir as ir

from panther_compile.calibration.trials import pick
from panther_compile.config import SketchConfig
from panther_compile.errors import ConfigError
from panther_compile.healing.report import HealReport, noted_as_healed
from panther_compile.onnx.damage import Damages
from panther_compile.onnx.data import Feed, ObservedModel, OnnxData
from panther_compile.onnx.fit import Runs, WeightFit, find_ends, missing_means
from panther_compile.onnx.fit_in_torch import fit_in_torch, module_of, that_count
from panther_compile.onnx.lowering import GraphWriter, shift_bias
from panther_compile.onnx.rewrite import rewrite
from panther_compile.onnx.sites import OnnxFound
from panther_compile.planning.plan import make_plan
from panther_compile.planning.ways import Allocation
from panther_compile.records import Fitted, SketchPlan

GRAPH = "ONNX graph"
"""How sites are found, for the report."""


@dataclass(frozen=True, slots=True)
class FittedToData:
    """What came of it.

    Attributes:
        plan: that was carried out.
        fitted: what came of weights, by name; some that the data do not reach may be left to be sketched.
        feeds: the batches.
        healed: what healing did, if it was asked for.
    """

    plan: SketchPlan
    fitted: dict[str, Fitted]
    feeds: Sequence[Feed]
    healed: HealReport | None = None


@dataclass(frozen=True, slots=True)
class DataFit:
    """What is to be fitted.

    Attributes:
        model: is changed.
        sites: of the model.
        config: the options.
        folder: where copies of the model are written for a moment.
        form: of a plan, the one that is carried out.
    """

    model: ir.Model
    sites: OnnxFound
    config: SketchConfig
    folder: Path
    form: Callable[[SketchPlan], SketchPlan]

    def fit(self, data: OnnxData, *, sequential: bool = False, made_up: bool = False) -> FittedToData:
        """Plan, and replace the weights that the data reach.

        Args:
            data: see `sketch_onnx`.
            sequential: likewise.
            made_up: whether the data were made up: nothing is tried on them, nor made up beside.

        Raises:
            ConfigError, ConfigTypeError, DataError, HealingError, OnnxMismatchError: see `sketch_onnx`.
        """
        ends = find_ends(self.model, self.sites)
        outputs = [end.output for end in ends]
        whole = self._observed()
        feeds = whole.feeds(data)
        counting = that_count(feeds)
        module = module_of(self.model, self.sites, whole, counting)
        healed = None
        if isinstance(module, str):
            if self.config.refine != "none":
                raise ConfigError(
                    f"refine={self.config.refine!r} trains the weights in torch, which cannot run this file: "
                    f"{module}; wanted refine='none'"
                )
            weights = WeightFit(self.model, self.sites, self.config)
            dense = self._observed(*weights.values(weights.names), *outputs)
            plan = self._planned(weights, Runs(feeds, dense), why=module, measured=not made_up)
            fitted = self._fitted(plan, weights, Runs(feeds, dense), sequential=sequential)
        else:
            dense = self._observed(*outputs)
            route = f"{GRAPH}, run by torch"
            found = fit_in_torch(
                module, self.sites, self.config, counting, self.form, route, beside=not made_up
            )
            plan, healed = found.plan, found.healed
            choices = {name: plan.choices[name] for name in found.weights.ready}
            fitted = rewrite(self.model, self.sites, choices, self.config, found.weights)
            if healed is not None and not healed.reverted:
                fitted = noted_as_healed(fitted)
        if fitted and ends:
            runs, writer = Runs(feeds, dense, self._observed(*outputs)), GraphWriter(self.model)
            for end, missing in missing_means(ends, runs):
                shift_bias(end.use, missing, writer)
        return FittedToData(plan, fitted, feeds, healed)

    def _observed(self, *values: ir.Value) -> ObservedModel:
        """The model as it is now, showing some values; its outputs if there are none."""
        return ObservedModel(self.model, values, self.folder)

    def _planned(self, weights: WeightFit, runs: Runs, *, why: str, measured: bool) -> SketchPlan:
        """The plan by ONNX Runtime alone."""
        values, energies = weights.spectra(runs), weights.energies(runs)
        reached = {*values, *energies}
        plan_by = partial(
            make_plan,
            self.sites.found,
            route=f"{GRAPH}, run by ONNX Runtime alone: {why}",
            values=values,
            energies=energies,
            reached=reached,
        )
        plan = plan_by(self.config, allocation=Allocation("energy"), whole=False)
        if measured:
            damages = Damages(self.model, self.config, weights, runs, self.folder)
            plan = _closest(plan, plan_by, damages, self.config, reached)
        return self.form(plan)

    def _fitted(
        self, plan: SketchPlan, weights: WeightFit, runs: Runs, *, sequential: bool
    ) -> dict[str, Fitted]:
        """What the plan sketches, fitted by ONNX Runtime alone."""
        choices, fitted = plan.choices, dict[str, Fitted]()
        names = [name for name in weights.names if name in choices]
        for step in weights.steps(names) if sequential else [names]:
            if fitted:
                runs = replace(runs, sketched=self._observed(*weights.values(step)))
            found = weights.fit({name: choices[name] for name in step}, runs)
            ready = {name: choices[name] for name in found.ready}
            fitted |= rewrite(self.model, self.sites, ready, self.config, found)
        return fitted


def _closest(
    plain: SketchPlan,
    plan_by: Callable[..., SketchPlan],
    damages: Damages,
    config: SketchConfig,
    reached: set[str],
) -> SketchPlan:
    """The plain plan, by energies, unless equal shares or what cutting each weight does bring outputs closer.

    Where that is not known all is as planned; see `pick`.
    """
    if config.keeps_all or not plain.sketched:
        return plain
    uniform = partial(plan_by, allocation=Allocation("uniform"), whole=False)
    found = damages.by_weight(uniform(replace(config, ratio=0.5, allow_slower=True)))
    if not found:
        return plain
    plans = {"energy": plain, "uniform": uniform(config)}
    by_damage = plan_by(config, allocation=Allocation("sensitivity", found))
    if reached.intersection(line.name for line in (*by_damage.sketched, *by_damage.whole)) <= set(found):
        plans["sensitivity"] = by_damage
    distances = {name: damages.of_plan(plan) for name, plan in plans.items()}
    best, undecided = pick(distances, "energy")
    tried = {name: mean(found) for name, found in distances.items()}
    return replace(plans[best], allocation=best, tried=tried, undecided=undecided)
