"""Put sketched layers into an ONNX graph in place of its weights."""

from collections.abc import Mapping

import onnx_ir as ir
import torch

from panther_compile.config import SketchConfig
from panther_compile.kinds.parts import sketch_site
from panther_compile.layers.base import SketchedLayer
from panther_compile.onnx.fit import FittedWeights
from panther_compile.onnx.lowering import GraphWriter, lower, shift_bias
from panther_compile.onnx.sites import OnnxFound
from panther_compile.records import Choice, Fitted
from panther_compile.reporting.progress import ProgressBar


def rewrite(
    model: ir.Model,
    sites: OnnxFound,
    choices: Mapping[str, Choice],
    config: SketchConfig,
    weights: FittedWeights,
) -> dict[str, Fitted]:
    """Replace every weight that is chosen to be sketched; gives the record of each."""
    writer = GraphWriter(model)
    fitted: dict[str, Fitted] = {}
    sketched = [(site, owner) for site, owner in sites.found.sites if site.name in choices]
    with torch.random.fork_rng(devices=()):  # making layers draws from the user's random numbers
        for site, owner in ProgressBar(sketched, desc="sketch", progress=config.progress):
            made = sketch_site(site, owner, choices, config, weights.ready)
            assert made is not None
            layer, record = made
            assert isinstance(layer, SketchedLayer)
            lower(sites.weights[site.name], layer, writer)
            if site.name in weights.shifts:
                for use in sites.weights[site.name].uses:
                    shift_bias(use, weights.shifts[site.name], writer)
            fitted |= record
    return fitted
