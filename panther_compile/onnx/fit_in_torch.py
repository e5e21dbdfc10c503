"""Fit the weights of an ONNX model as those of a model in torch are, where torch can run it.

Gradients tell what its outputs mind, plans are tried on batches that are held out, weights are fitted in
lockstep, and texts are spliced of those of the data. Features are not left out, as shapes in the file know of
them, nor are factors shared.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir
import torch
from torch import Tensor, nn

from panther_compile.calibration.calibrate import fit_model, study_model
from panther_compile.calibration.choose import choose_plan
from panther_compile.calibration.first_look import look_at
from panther_compile.calibration.inputs import is_worth_it
from panther_compile.config import SketchConfig
from panther_compile.healing.refine import refine
from panther_compile.healing.report import HealReport
from panther_compile.kinds.parts import sketch_site
from panther_compile.layers.base import SketchedLayer
from panther_compile.models.batches import Call, interleaved
from panther_compile.models.output_kind import check_output, recognize_output
from panther_compile.models.spliced import spliced
from panther_compile.models.substitute import copy_with
from panther_compile.models.synthetic import MOST_SPLICED
from panther_compile.onnx.as_torch import OnnxModule, as_tensors, layer_of, runs, runs_alike
from panther_compile.onnx.data import Feed, ObservedModel
from panther_compile.onnx.fit import FittedWeights
from panther_compile.onnx.sites import OnnxFound, torch_dtype
from panther_compile.onnx.torch_cells import UnknownOperatorError
from panther_compile.onnx.verify import kept_in
from panther_compile.records import SketchPlan


@dataclass(frozen=True, slots=True)
class TorchFit:
    """What was fitted.

    Attributes:
        plan: that was carried out.
        weights: all that the plan sketches.
        healed: what healing did, if it was asked for.
    """

    plan: SketchPlan
    weights: FittedWeights
    healed: HealReport | None


def that_count(feeds: Sequence[Feed]) -> list[Feed]:
    """The batches whose mask does not hide all of them."""
    masks = ((feed, kept_in(feed)) for feed in feeds)
    return [feed for feed, kept in masks if kept is None or bool(kept.any())]


def module_of(
    model: ir.Model, sites: OnnxFound, dense: ObservedModel, feeds: Sequence[Feed]
) -> OnnxModule | str:
    """The graph in torch, a layer for each site in their order, or why there is none.

    Args:
        model: is left as it is.
        sites: of the model.
        dense: the model.
        feeds: batches that count; both are run on them.

    Raises:
        DataError: ONNX Runtime cannot run a batch.
    """
    if not feeds:
        return "no position of the data counts"
    layers = [(sites.weights[site.name], site.module) for site, _ in sites.found.sites]
    try:
        module = OnnxModule(model, [(weight, layer_of(weight, one)) for weight, one in layers]).eval()
        alike = all(runs_alike(module, model, dense, feed) for feed in feeds)
    except UnknownOperatorError as error:
        return str(error)
    if not alike:
        return "torch does not run its graph as ONNX Runtime does"
    with torch.no_grad():
        results = module(**as_tensors(feeds[0])).values()
    if not any(one.is_floating_point() for one in results):
        return "no output holds floating numbers"
    module.centre(feeds)
    return module


def fit_in_torch(
    module: OnnxModule,
    sites: OnnxFound,
    config: SketchConfig,
    feeds: Sequence[Feed],
    form: Callable[[SketchPlan], SketchPlan],
    route: str,
    *,
    beside: bool,
) -> TorchFit:
    """Plan, fit the weights that data reach, sketch others by themselves, and heal all if the options say so.

    Args:
        module: of `module_of`.
        sites: likewise.
        config: the options.
        feeds: the data, batches that count.
        form: of a plan, the one that is carried out.
        route: how the sites were found.
        beside: whether texts that are spliced of those of the data stand beside them.

    Raises:
        ConfigError: `output` has a key of no tensor of the results.
        DataError: NaN or Inf reaches a weight, or healing needs more batches.
        HealingError: see `heal`.
    """
    found = sites.found
    pairs = zip(found.sites, module.layers, strict=True)
    layers = tuple((replace(site, module=layer), kind) for (site, kind), layer in pairs)
    calls = [Call((), dict(as_tensors(feed)), feed.place) for feed in feeds]
    if beside and config.synthetic and is_worth_it(found):
        texts = [call for call in spliced(calls, MOST_SPLICED) if runs(module, call.kwargs)]
        calls = list(interleaved(calls, texts))
    check_output(module, calls, config.output)
    taken = recognize_output(module, calls).output if config.output == "auto" else config.output
    config = replace(config, narrow=False, output=taken)
    look = look_at(module, layers, calls)
    studied = study_model(module, replace(found, sites=layers), config, route, calls, look)
    studied = replace(studied, found=found)  # biases are not counted
    plan = form(choose_plan(studied, config))
    calibrated = fit_model(studied, config, plan)
    notes = calibrated.notes(studied)
    new: dict[nn.Module, nn.Module] = {}
    fitted = FittedWeights()
    for site, kind in layers:
        made = sketch_site(site, kind, plan.choices, config, calibrated.ready)
        if made is not None:
            layer, records = made
            assert isinstance(layer, SketchedLayer)
            new[site.module] = layer
            record = records[site.name]
            fitted.ready[site.name] = layer, replace(record, note=notes.get(site.name, record.note))
    healed = None
    if config.refine != "none":
        healed = refine(copy_with(module, new), new.values(), module, calls, config)
    for name, (layer, _) in fitted.ready.items():
        layer.to(torch_dtype(sites.weights[name].tensor))
        bias = getattr(layer, "bias", None)
        if isinstance(bias, Tensor):
            if bool(bias.any()):
                fitted.shifts[name] = bias.detach().double()
            layer.up.bias = None  # type: ignore[union-attr] # the graph adds it
    return TorchFit(plan, fitted, healed)
