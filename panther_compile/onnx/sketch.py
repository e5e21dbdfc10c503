"""Sketch the weights of an ONNX model, whoever made it."""

import html
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

import onnx_ir as ir
import torch

from panther_compile.calibration.inputs import is_worth_it
from panther_compile.calibration.verdict import warn_if_destroyed
from panther_compile.config import Selector, SketchConfig, check_has_data, check_type
from panther_compile.errors import (
    ConfigError,
    ConfigTypeError,
    NoTargetError,
    OnnxMismatchError,
    check_choice,
)
from panther_compile.healing.report import HealReport
from panther_compile.models.surroundings import undisturbed
from panther_compile.onnx.data import Feed, ObservedModel, OnnxData, last_at_the_end
from panther_compile.onnx.files import check_apart, check_target, read_model, stored_bytes, write_model
from panther_compile.onnx.fit import FittedWeights
from panther_compile.onnx.fit_to_data import GRAPH, DataFit, FittedToData
from panther_compile.onnx.fold_scales import fold_scales
from panther_compile.onnx.forms import fuse_gelu, fuse_hard_swish
from panther_compile.onnx.halves import narrow_halves, stored_halves, widen_halves
from panther_compile.onnx.int8 import (
    ROUNDINGS,
    as_pairs,
    check_can_round,
    for_int8,
    int8_model,
    warn_if_destroyed_by_int8,
)
from panther_compile.onnx.made_up import JUDGED, MadeUp, made_up_inputs
from panther_compile.onnx.made_weights import fold_made_weights, read_past_identities
from panther_compile.onnx.pivots import read_whole
from panther_compile.onnx.rewrite import rewrite
from panther_compile.onnx.sites import OnnxFound, find_onnx_sites
from panther_compile.onnx.taken_apart import take_apart
from panther_compile.onnx.verify import Compared, compare_files
from panther_compile.planning.plan import budget_of, make_plan, reasons_text
from panther_compile.records import NEVER_REACHED, Closeness, Fitted, LayerPlan, SketchPlan, SketchRecord
from panther_compile.storage import checked_path


class OnnxSketchOptions(TypedDict, total=False):
    """The keyword options of `sketch_onnx`: see `SketchConfig`."""

    include: Selector | Sequence[Selector] | None
    exclude: Selector | Sequence[Selector] | None
    method: str
    sketch: str
    min_params: int
    round_rank_to: int | None
    allow_slower: bool
    seed: int
    progress: bool | None
    synthetic: bool
    refine: str
    refine_steps: int
    device: torch.device | str | None


FITTED_TO = "the data it was fitted to"
NOT_COMPARED = Closeness.unknown("verify=False")


@dataclass(frozen=True, slots=True)
class OnnxReport:
    """What `sketch_onnx` did.

    Attributes:
        plan: one line for each weight, sketched or left alone.
        fitted: what came of each sketched weight, by its name.
        dense_bytes: size of the file read, and of the weights beside it.
        sketched_bytes: size of what was written.
        output_errors: of each output, or part of it, on the last batch of the data, or of made-up inputs,
            relative to the dense model's (`onnx/verify.py` says how); empty if that was not asked for.
        has_data: whether weights were fitted to data.
        made_up: whether they were fitted to images, sounds or texts that were made up.
        closeness: how close the outputs are, on the data, or on inputs that were made up, or random ones.
        healed: what healing did, if it was asked for.
        folded: scales, shifts and activations of several nodes that went into the nodes beside them.
    """

    plan: SketchPlan
    fitted: Mapping[str, Fitted]
    dense_bytes: int
    sketched_bytes: int
    output_errors: Mapping[str, float]
    has_data: bool = False
    made_up: bool = False
    closeness: Closeness = NOT_COMPARED
    healed: HealReport | None = None
    folded: int = 0

    @property
    def achieved_ratio(self) -> float:
        """Stored over dense numbers of the replaced weights."""
        return self.plan.achieved_ratio

    def to_dict(self) -> dict[str, Any]:
        """The report as values for `json.dumps`: the plan's own keys, the sizes, and what came of it."""
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "plan"}
        own |= {
            "fitted": {name: asdict(one) for name, one in self.fitted.items()},
            "closeness": asdict(self.closeness),
            "healed": None if self.healed is None else asdict(self.healed),
        }
        return asdict(self.plan) | {"achieved_ratio": self.achieved_ratio} | own

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame` of the plan's lines, beside them how each weight was found.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        frame = self.plan.to_pandas()
        for key in ("method", "error", "output_error"):
            found = {name: getattr(one, key) for name, one in self.fitted.items()}
            frame["weight_error" if key == "error" else key] = [found.get(name) for name in frame.index]
        return frame.rename(columns={"error": "predicted_error"})

    def __str__(self) -> str:
        """How close the outputs are, the plan's table, the sizes, and the error of each output."""
        return "\n".join((f"{self.closeness}\n\n{self.plan}", *self._lines()))

    def _repr_html_(self) -> str:
        """The same in a notebook."""
        above, *below = (
            f"<div>{'<br>'.join(map(html.escape, lines))}</div>"
            for lines in ((str(self.closeness),), self._lines())
        )
        return "".join(("<div>", above, self.plan._repr_html_(), *below, "</div>"))

    def _lines(self) -> list[str]:
        share = self.sketched_bytes / self.dense_bytes
        inputs = "the last batch of the data" if self.has_data else self.closeness.inputs
        healed = self.healed
        return [
            f"file: {self.dense_bytes:,} to {self.sketched_bytes:,} bytes, {share:.4f}",
            *(
                f"output {name}: relative error {error:.1e} on {inputs}"
                for name, error in self.output_errors.items()
            ),
            *([f"folded: {self.folded} nodes into those beside them"] if self.folded else []),
            *([] if healed is None else [healed.line()]),
        ]


def sketch_onnx(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    ratio: float | Mapping[Selector, float] = 0.5,
    *,
    data: OnnxData | None = None,
    sequential: bool = False,
    then: str = "none",
    verify: bool = True,
    **options: Unpack[OnnxSketchOptions],
) -> OnnxReport:
    """Replace the weights of MatMul, Gemm and Conv nodes by low-rank factors, and write the model anew.

    The budget, the ranks and the factors are found as `sketchify` finds them, with two differences: a name is
    that of an initializer (with or without ".weight") or of a node, and biases are not counted. IR version,
    opset, inputs and outputs stay. Scales and shifts by constants go into the convolutions beside them, and
    hard swishes and GELUs into the nodes that ONNX Runtime knows: the same function in less time; at a ratio
    of 1 nothing but this is done. Quantized weights, already factored ones, and those that something else
    reads too are left alone; the report says why.

    Before the result is put in its place, ONNX Runtime runs it and the source on the same inputs: the last
    batches of the data, else images or sounds that were made up, else random ones. The report opens with how
    close the outputs are, and a `SketchQualityWarning` tells of outputs that are destroyed. Random inputs say
    little about real ones.

    Args:
        source: an ONNX file, of opset 11 or newer.
        target: what to write, whole or not at all; may be the source.
        ratio: stored over dense numbers of the replaced weights, in (0, 1]; or budgets by selector.
        data: inputs of the model, to fit the factors and the biases to: batches, each a mapping from input
            name to array, or a tuple of arrays in the order of the inputs. A few hundred samples of what the
            model will be used for keep it much closer to itself than the weights alone can tell. Torch runs
            the graph on them, and it is fitted as `sketchify` fits a model, if it gives what ONNX Runtime
            does; else ONNX Runtime alone does, and the plan's route says why. Positions where an input called
            "attention_mask" is 0 do not count. Without data a model of images, sounds or texts alone is
            fitted to made-up ones (which models: `docs/onnx.md`), if 0.25 to 500 million numbers are
            to be sketched, unless `synthetic=False`.
        sequential: where ONNX Runtime alone runs it, fit weights one by one, each to what reaches it behind
            those fitted before, as torch does in any case: mostly closer, for two runs on the data for each
            step of the graph in place of three in all, and one more.
        then: "int8" writes the products of the sketched model in int8, those of dense weights too: factors
            are pairs that int8 costs little, of as many numbers, and the outputs compared are those of the
            int8 file. Weights have a scale for each output, tables one for each row, ranges of activations
            are measured at each call.
            With data so are convolutions, where that is faster, with ranges that the data show. The opset
            becomes 13 if it was older. At a ratio of 1 nothing but this is done.
        verify: whether to run both; False also writes what ONNX Runtime cannot run.
        **options: the fields of `SketchConfig` that have a meaning here. `refine="kl"` or "block" trains the
            factors and biases on the data for `refine_steps` steps, as `heal` does, towards the outputs of
            the source and what the nodes of the weights give; it takes a graph that torch runs.

    Warns:
        SketchQualityWarning: the outputs are destroyed; it names the ratio, the cause and what would help.

    Raises:
        ConfigError, ConfigTypeError: a path, an option, or the form of the data, is not what is wanted.
        HealingError: see `heal`.
        DataError: there is no batch, or one does not fit the model's inputs, or NaN or Inf comes of it.
        NoTargetError: nothing in the model can be sketched; the message says why.
        WeightError: a weight holds NaN or Inf.
        OnnxFileError: a file cannot be read or written.
        OnnxInvalidError: the source is truncated, no sound graph, or of an opset not known here.
        OnnxExternalDataError: the source's weights are missing, cut short, or outside its folder.
        OnnxMismatchError: ONNX Runtime cannot run one of the files, or the result's outputs have other shapes
            or types, or are not finite; nothing is written.
    """
    config = _config(ratio, options)
    for option, given in (("sequential", sequential), ("verify", verify)):
        check_type(option, given, bool)
    refines = config.refine != "none"
    check_has_data(data, {"sequential=True": sequential, f"refine={config.refine!r}": refines})
    if refines and config.keeps_all:
        raise ConfigError(f"refine={config.refine!r} trains factors, of which a ratio of 1 makes none")
    check_choice("then", then, ROUNDINGS)
    source, target = checked_path(source, "source"), checked_path(target, "target")
    check_target(target)
    report = _sketched(source, target, config, data, sequential=sequential, then=then, verify=verify)
    if not verify:
        return report
    if report.plan.sketched:
        fitted_to = "data" if report.has_data else "made-up inputs" if report.made_up else "weights"
        warn_if_destroyed(SketchRecord(report.plan, report.fitted), report.closeness, fitted_to=fitted_to)
    else:
        warn_if_destroyed_by_int8(report.closeness, sketched=False, stacklevel=2)
    return report


@undisturbed()
def _sketched(
    source: Path,
    target: Path,
    config: SketchConfig,
    data: OnnxData | None,
    *,
    sequential: bool,
    then: str,
    verify: bool,
) -> OnnxReport:
    """The stages: read, find, plan and fit, sketch what is left, write and compare."""
    model = read_model(source)
    check_apart(target, model)
    before = stored_bytes(model, source)
    folded = _simplified(model)
    widen_halves(model)
    take_apart(model)  # what reads those
    if then == "int8":
        check_can_round(model)
        model = for_int8(model, source.parent)
    sites = find_onnx_sites(model, config)

    def form(plan: SketchPlan) -> SketchPlan:
        return plan if then != "int8" else _in_pairs(plan, sites, config, kernels=data is not None)

    plan = form(make_plan(sites.found, config, GRAPH))
    if not plan.sketched and not (config.keeps_all and (folded or then != "none")):
        wanted = "wanted a MatMul, Gemm or Conv with a constant weight"
        raise NoTargetError(f"nothing to sketch in {source}: {wanted}{reasons_text(plan)}")
    task = DataFit(model, sites, config, target.parent, form)
    if data is None:
        fit = _fit_to_made_up(task, plan, source.parent)
    else:
        fit = _fit_to_data(task, plan, data, sequential=sequential)
    plan, fitted = fit.done.plan, dict(fit.done.fitted)
    rest = {name: choice for name, choice in plan.choices.items() if name not in fitted}
    note = NEVER_REACHED if data is not None or fit.made_up else ""
    others = rewrite(model, sites, rest, config, FittedWeights())
    fitted |= {name: replace(record, note=note) for name, record in others.items()}
    compared: list[Compared] = []

    def check(draft: Path) -> None:
        compared.append(compare_files(source, draft, fit.judged_on, fit.what))

    if then == "none":
        read_whole(model)
    seen, halves = () if data is None else fit.done.feeds, stored_halves(model)
    with int8_model(model, target.parent, seen) if then == "int8" else nullcontext(model) as written:
        narrow_halves(written, halves)
        after = write_model(written, target, check=check if verify else None)
    report = OnnxReport(
        plan,
        fitted,
        before,
        after,
        output_errors={},
        has_data=data is not None,
        made_up=fit.made_up,
        healed=fit.done.healed,
        folded=folded,
    )
    if not compared:
        return report
    (found,) = compared
    return replace(report, output_errors=found.errors, closeness=found.closeness)


def _simplified(model: ir.Model) -> int:
    """Have fewer nodes compute the same, by weights that can be sketched; counts what went into those."""
    take_apart(model)
    read_past_identities(model)
    fold_made_weights(model)
    fuse_gelu(model)
    return fuse_hard_swish(model) + fold_scales(model)


@dataclass(frozen=True, slots=True)
class _Fit:
    """What came of the weights, and what the files are compared on.

    Attributes:
        done: some weights may be left to be sketched.
        judged_on: batches; random ones if there are none.
        what: they are, in words.
        made_up: whether weights were fitted to inputs that were made up.
    """

    done: FittedToData
    judged_on: Sequence[Feed] = ()
    what: str = FITTED_TO
    made_up: bool = False


def _fit_to_data(task: DataFit, plan: SketchPlan, data: OnnxData, *, sequential: bool) -> _Fit:
    if plan.sketched:
        done = task.fit(data, sequential=sequential)
    else:  # int8 alone
        done = FittedToData(plan, {}, ObservedModel(task.model, (), task.folder).feeds(data))
    return _Fit(done, last_at_the_end(done.feeds) if done.feeds else ())


def _fit_to_made_up(task: DataFit, plan: SketchPlan, beside: Path) -> _Fit:
    """See `_made_up`; none, or of few weights, leave all to be sketched."""
    done = FittedToData(plan, {}, ())
    made_up = _made_up(task.model, task.config, beside, task.folder)
    if made_up is None:
        return _Fit(done)
    learnt, judged_on = made_up.feeds[:-JUDGED], made_up.feeds[-JUDGED:]
    is_fitted = bool(plan.sketched) and is_worth_it(task.sites.found)
    if is_fitted:
        done = task.fit(learnt, made_up=True)
    return _Fit(done, judged_on, made_up.what, is_fitted)


def _made_up(model: ir.Model, config: SketchConfig, beside: Path, folder: Path) -> MadeUp | None:
    """Inputs that are made up where there is no data, if the model is one that it can be done for."""
    if not config.synthetic:
        return None
    try:
        return made_up_inputs(model, ObservedModel(model, (), folder), config.seed, beside)
    except OnnxMismatchError:  # ONNX Runtime cannot load it, which `verify` may ask for
        return None


def _in_pairs(plan: SketchPlan, sites: OnnxFound, config: SketchConfig, *, kernels: bool) -> SketchPlan:
    """The plan with what int8 multiplies as pairs, each budget by itself; see `as_pairs`."""
    places = {site.name: budget_of(site, config) for site, _ in sites.found.sites}
    pairs: dict[str, LayerPlan] = {}
    for place, (_, ratio) in enumerate(config.ratios()):
        own = tuple(line for line in plan.layers if places.get(line.name) == place)
        budget = as_pairs(replace(plan, layers=own), config.round_rank_to, kernels=kernels, ratio=ratio)
        pairs |= {line.name: line for line in budget.layers}
    return replace(plan, layers=tuple(pairs.get(line.name, line) for line in plan.layers))


def _config(ratio: float | Mapping[Selector, float], options: Mapping[str, Any]) -> SketchConfig:
    known = OnnxSketchOptions.__optional_keys__
    unknown = sorted(set(options) - known)
    if unknown:
        where = " (of sketchify alone)" if {f.name for f in fields(SketchConfig)}.issuperset(unknown) else ""
        raise ConfigTypeError(
            f"unknown option {', '.join(unknown)}{where}; the options are {', '.join(sorted(known))}"
        )
    return SketchConfig(ratio=ratio, **options)
