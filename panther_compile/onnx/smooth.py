"""Inputs of products scaled, so that one range fits all their features, and the weights scaled back.

    x W  =  (x / s) (s W),    s = max |x|^0.8 / max |W|^0.2 of each feature

as SmoothQuant (ICML 2023), whose exponent is .5. It is done where it is free or nearly so: 1 / s goes into
the weight and the bias of the norm that makes x; where others read x too, as the residual sum of a BERT does,
into one Mul ahead of all the products that read it.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.passes.common import RemoveUnusedNodesPass
from torch import Tensor

from panther_compile.onnx.data import Feed, ObservedModel
from panther_compile.onnx.lowering import GraphWriter
from panther_compile.onnx.patterns import fixed_tensor, is_onnx
from panther_compile.onnx.sites import matrix_of, multiplies_by_matrix, to_torch

EXPONENT = 0.8
_SMALLEST = 1e-5  # of a feature, relative to the largest
_NORMS = ("LayerNormalization", "RMSNormalization")


def smooth_inputs(model: ir.Model, feeds: Sequence[Feed], folder: Path) -> int:
    """Scale the inputs of products behind norms by what the data show; gives how many inputs that are.

    Args:
        model: is changed; what it computes is not.
        feeds: the data.
        folder: where a copy of the model is written for a moment.

    Raises:
        DataError: ONNX Runtime cannot run a batch.
    """
    readers = _readers(model)
    if not readers:
        return 0
    writer = GraphWriter(model)
    for x, largest in _largest(model, list(readers), feeds, folder).items():
        weights = [matrix_of(node) for node in readers[x]]
        _scale(x, readers[x], weights, _scales(largest, weights), writer)
    RemoveUnusedNodesPass()(model)  # the weights as they were
    return len(readers)


def _readers(model: ir.Model) -> dict[ir.Value, list[ir.Node]]:
    """The products with constant weights that read what a norm makes, by what they read."""
    found: dict[ir.Value, list[ir.Node]] = defaultdict(list)
    for node in model.graph:
        x = node.inputs[0] if is_onnx(node, "MatMul", "Gemm") else None
        norm = None if x is None else x.producer()
        if x is None or norm is None or not is_onnx(norm, *_NORMS):
            continue
        if multiplies_by_matrix(node) and _constants(norm):
            found[x].append(node)
    return dict(found)


def _constants(norm: ir.Node) -> list[int]:
    """Places of the weight and the bias of a norm; none unless both are constant."""
    places = [place for place in range(1, len(norm.inputs)) if norm.inputs[place] is not None]
    known = [fixed_tensor(norm.inputs[place]) for place in places]
    return places if all(one is not None and len(one.shape) == 1 for one in known) else []


def _largest(
    model: ir.Model, values: Sequence[ir.Value], feeds: Sequence[Feed], folder: Path
) -> Mapping[ir.Value, Tensor]:
    """The largest size of each feature (I,) of some values; those without a finite row have no entry."""
    names = [str(value.name) for value in values]
    found: dict[str, np.ndarray] = {}
    for arrays in ObservedModel(model, values, folder).run(feeds, names):
        for name, array in arrays.items():
            rows = np.abs(array).reshape(-1, array.shape[-1])
            rows = rows[np.isfinite(rows).all(1)]  # attention to nothing is NaN
            if len(rows):
                sizes = rows.max(0)
                found[name] = np.maximum(found.get(name, sizes), sizes)
    by_name = dict(zip(names, values, strict=True))
    return {by_name[name]: torch.from_numpy(sizes) for name, sizes in found.items()}


def _scales(largest: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """What each feature is divided by (I,), of geometric mean 1."""
    heaviest = torch.stack([weight.abs().amax(1) for weight in weights]).amax(0)
    sizes, heaviest = (one.double() for one in (largest, heaviest))
    sizes, heaviest = (one.clamp_min(_SMALLEST * float(one.max()) + 1e-30) for one in (sizes, heaviest))
    scales = sizes**EXPONENT / heaviest ** (1 - EXPONENT)
    return scales / scales.log().mean().exp()


def _scale(
    x: ir.Value, readers: Sequence[ir.Node], weights: Sequence[Tensor], scales: Tensor, writer: GraphWriter
) -> None:
    norm = x.producer()
    assert norm is not None
    graph = norm.graph
    assert isinstance(graph, ir.Graph)
    for node, weight in zip(readers, weights, strict=True):
        scaled = (weight * scales[:, None]).to(weight.dtype)
        flipped = scaled.t() if node.attributes.get_int("transB", 0) else scaled
        node.replace_input_with(1, writer.weight(graph, f"{node.inputs[1].name}.scaled", flipped))  # type: ignore[union-attr]
    if not x.is_graph_output() and {use.node for use in x.uses()} == set(readers):
        for place in _constants(norm):
            old = to_torch(ir.convenience.get_const_tensor(norm.inputs[place]))  # type: ignore[arg-type]
            name = f"{norm.inputs[place].name}.scaled"  # type: ignore[union-attr]
            norm.replace_input_with(place, writer.weight(graph, name, (old / scales).to(old.dtype)))
        return
    inverse = writer.weight(graph, f"{x.name}.scales", (1 / scales).to(weights[0].dtype))
    first = min(readers, key=list(graph).index)
    (scaled_x,) = writer.node(first, "Mul", (x, inverse))
    for node in readers:
        node.replace_input_with(0, scaled_x)
