"""An ONNX file with a low-rank branch beside each product by a quantized weight.

    x ─┬─► quantized product ─► Add ─► y          V (I, r), U (r, O): plain MatMuls
       └─► MatMul V ─► MatMul U ─┘

A branch is fitted to what the product lacks of the dense file's, as in torch (`calibration/branch_fit.py`),
except that ONNX Runtime has no gradients: errors at all outputs count alike.
"""

# I in_features, O out_features
import os
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import onnx_ir as ir
import torch
from torch import Tensor

from panther_compile.calibration.branch_sums import Branch, BranchSums, best_of_matrix
from panther_compile.config import check_type
from panther_compile.errors import DataError, NoTargetError, SketchQualityWarning
from panther_compile.layers.base import check_rank
from panther_compile.models.batches import judged_of, learnt_of
from panther_compile.models.rows import kept_rows
from panther_compile.onnx.data import Feed, ObservedModel, OnnxData
from panther_compile.onnx.files import check_apart, check_target, read_model, stored_bytes, write_model
from panther_compile.onnx.lowering import GraphWriter, added_bias, shift_constant
from panther_compile.onnx.patterns import makers_of
from panther_compile.onnx.quantized import Product, dense_products, quantized_products, twins_of
from panther_compile.onnx.verify import compare_files, kept_in
from panther_compile.records import Closeness
from panther_compile.residual import ResidualReport, ResidualRow
from panther_compile.storage import checked_path

_TOO_FAR = "the weights of no quantized product are like those of a product of the same size in"


def add_residual_onnx(
    quantized: str | os.PathLike[str],
    dense: str | os.PathLike[str],
    target: str | os.PathLike[str],
    rank: int,
    *,
    data: OnnxData | None = None,
    sequential: bool = False,
) -> ResidualReport:
    """Put a low-rank branch beside each quantized product of an ONNX file, for what that lacks of the dense.

    A quantized product is a MatMulNBits, a MatMul or Gemm behind DequantizeLinear, or a MatMulInteger behind
    DynamicQuantizeLinear; the dense one that it stands for is that of the weight most like its own. Beside it
    come two MatMuls and an Add; the bias behind it, if there is one, makes up for the mean.

        >>> MatMulNBitsQuantizer("dense.onnx", bits=4).process() ...           # ONNX Runtime's, or anybody's
        >>> print(pc.add_residual_onnx("int4.onnx", "dense.onnx", "better.onnx", rank=16, data=batches))

    Args:
        quantized: an ONNX file, of opset 11 or newer.
        dense: the file that it was made from.
        target: what to write, whole or not at all; may be `quantized`.
        rank: of each branch.
        data: inputs of both, as for `sketch_onnx`. One batch in five judges: where it comes no closer, the
            quantized file is written as it was, with a warning. Without data each branch is the best for the
            weight's own residual, and nothing judges it.
        sequential: fit each branch behind those before it, so that it makes up for what they leave too; for
            two runs on the data for each step of the graph in place of one of the dense file.

    Returns:
        A report whose bytes are those of files.

    Warns:
        SketchQualityWarning: the branches bring held-out batches no closer, and are left out.

    Raises:
        ConfigError, ConfigTypeError: a path, `sequential`, or the form of the data, is not what is wanted.
        DataError: there is no batch, or one does not fit the inputs of both files.
        NoTargetError: no quantized product has a weight like that of a dense one.
        OnnxFileError: a file cannot be read or written.
        OnnxInvalidError: a file is truncated, no sound graph, or of an opset not known here.
        OnnxMismatchError: ONNX Runtime cannot run one of the files; nothing is written.
        RankError: the rank is larger than a product's smaller side.
    """
    low_path, dense_path, target = (
        checked_path(one, name)
        for one, name in ((quantized, "quantized"), (dense, "dense"), (target, "target"))
    )
    check_target(target)
    check_type("sequential", sequential, bool)
    model, source = read_model(low_path), read_model(dense_path)
    check_apart(target, model, source)
    sizes = stored_bytes(source, dense_path), stored_bytes(model, low_path)
    products = quantized_products(model, target.parent)
    twins = twins_of(products, dense_products(source))
    if not twins:
        raise NoTargetError(
            f"{low_path} holds {len(products)} quantized products (MatMulNBits, MatMul or Gemm behind "
            f"DequantizeLinear, MatMulInteger behind DynamicQuantizeLinear): {_TOO_FAR} {dense_path}"
        )
    pairs = [(products[place], twin) for place, twin in sorted(twins.items())]
    for product, _ in pairs:
        check_rank(rank, min(product.matrix.shape), product.name)
    fit = _Fit(model, source, pairs, rank, target.parent)
    before = after = Closeness.unknown("no data")
    report = partial(_report, pairs, rank, [_weight_bytes(product) for product, _ in pairs], sizes)
    if data is None:
        fit.by_weights()
        return report(write_model(model, target), before, after, kept=True)
    feeds = fit.feeds(data)
    judged = judged_of(feeds)
    fit.by_data(learnt_of(feeds), sequential)
    what = "held-out data" if len(judged) < len(feeds) else "the data fitted to"
    before = compare_files(dense_path, low_path, judged, what).closeness

    def check(draft: Path) -> None:
        nonlocal after
        after = compare_files(dense_path, draft, judged, what).closeness
        if not after.share < before.share:
            raise _NoCloserError

    kept = True
    try:
        stored = write_model(model, target, check=check)
    except _NoCloserError:
        kept = False
        warnings.warn(
            f"low-rank branches fitted to this data bring outputs no closer to the dense file's on others: "
            f"{after}; without them, {before}; they are left out. Give more data, or a smaller rank",
            SketchQualityWarning,
            stacklevel=2,
        )
        stored = write_model(read_model(low_path), target)
    return report(stored, before, after, kept=kept)


class _NoCloserError(Exception):
    """Stops the writing of a file."""


Pairs = Sequence[tuple[Product, Product]]


def _report(
    pairs: Pairs,
    rank: int,
    bytes_before: Sequence[int],
    sizes: tuple[int, int],
    stored: int,
    before: Closeness,
    after: Closeness,
    *,
    kept: bool,
) -> ResidualReport:
    rows = [
        ResidualRow(
            product.name,
            rank * kept,
            kept * product.branch_dtype.itemsize * rank * sum(product.matrix.shape),
            own,
        )
        for (product, _), own in zip(pairs, bytes_before, strict=True)
    ]
    return ResidualReport(tuple(rows), before, after, kept, *sizes, stored)


class _Fit:
    """Fits branches beside the quantized products of a model, and puts them there.

    Args:
        model: quantized; is changed.
        dense: the model whose outputs are wanted.
        pairs: quantized products of the one, and those of the other that they stand for.
        rank: of the branches.
        folder: where models are written for a moment.
    """

    def __init__(self, model: ir.Model, dense: ir.Model, pairs: Pairs, rank: int, folder: Path) -> None:
        self._model, self._dense, self._pairs = model, dense, pairs
        self._rank, self._folder = rank, folder
        self._writer = GraphWriter(model)

    def feeds(self, data: OnnxData) -> list[Feed]:
        """The batches, which both models take."""
        feeds = ObservedModel(self._dense, (), self._folder).feeds(data)
        try:
            ObservedModel(self._model, (), self._folder).check(feeds)
        except DataError as error:
            raise DataError(
                f"the dense file takes the data, and the quantized one does not: {error}"
            ) from error
        return feeds

    def by_weights(self) -> None:
        """The best branches for what the weights lack."""
        for product, twin in self._pairs:
            up, down = best_of_matrix(_lacking(product, twin), self._rank)
            self._put(product, Branch(up, down, torch.zeros(len(up), dtype=up.dtype)))

    def by_data(self, feeds: Sequence[Feed], sequential: bool) -> None:
        """The best branches on data: of what each lacks alone, or behind those before it."""
        if not sequential:
            self._fit(self._pairs, feeds, behind=False)
            return
        for step in _steps(self._pairs):
            self._fit(step, feeds, behind=True)

    def _fit(self, pairs: Pairs, feeds: Sequence[Feed], *, behind: bool) -> None:
        biased = {id(product): self._has_bias(product) for product, _ in pairs}
        sums = {id(product): BranchSums(biased[id(product)], halves=behind) for product, _ in pairs}
        xs = _arrays(self._dense, [twin.x for _, twin in pairs], feeds, self._folder)
        zs = _arrays(self._model, [one.x for one, _ in pairs], feeds, self._folder) if behind else None
        for place, (feed, dense) in enumerate(zip(feeds, xs, strict=True)):
            kept, low = kept_in(feed), None if zs is None else zs[place]
            for product, twin in pairs:
                x = kept_rows(dense[str(twin.x.name)], kept).float()
                z = x if low is None else kept_rows(low[str(product.x.name)], kept).float()
                missing = x @ twin.matrix.float() - z @ product.matrix
                sums[id(product)].add(missing, z)
        for product, twin in pairs:
            self._put(product, sums[id(product)].best(None, self._rank, _lacking(product, twin)))

    def _has_bias(self, product: Product) -> bool:
        return added_bias(product.y, product.matrix.shape[1]) is not None

    def _put(self, product: Product, branch: Branch) -> None:
        """Write a branch beside its product, and move the bias behind it."""
        node = product.y.producer()
        assert node is not None
        graph = node.graph
        assert isinstance(graph, ir.Graph)
        bias = added_bias(product.y, product.matrix.shape[1])
        if bias is not None:
            shift_constant(bias, branch.shift, self._writer)
        readers = list(product.y.uses())
        down, up = (
            self._writer.weight(graph, f"{product.name}.{name}", one.T.to(product.branch_dtype))
            for name, one in (("down", branch.down), ("up", branch.up))
        )
        (latent,) = self._writer.node(node, "MatMul", (product.x, down))
        (more,) = self._writer.node(node, "MatMul", (latent, up))
        (total,) = self._writer.node(node, "Add", (product.y, more), after=True)
        total.type, total.shape = product.y.type, product.y.shape
        for reader, index in readers:
            reader.replace_input_with(index, total)
        if product.y.is_graph_output():
            place = list(graph.outputs).index(product.y)
            graph.outputs[place] = total
            total.name, product.y.name = product.y.name, total.name


def _lacking(product: Product, twin: Product) -> Tensor:
    """What the weight of a quantized product lacks (O, I), float64."""
    return (twin.matrix.double() - product.matrix.double()).T


def _arrays(
    model: ir.Model, values: Sequence[ir.Value], feeds: Sequence[Feed], folder: Path
) -> Sequence[Mapping[str, Tensor]]:
    """Values by name, for each batch."""
    names = list(dict.fromkeys(str(value.name) for value in values))
    runs = ObservedModel(model, values, folder).run(feeds, names)
    return [{name: torch.from_numpy(array) for name, array in found.items()} for found in runs]


def _steps(pairs: Pairs) -> list[list[tuple[Product, Product]]]:
    """The pairs in their order, in groups in which no product reads the result of another."""
    steps: list[list[tuple[Product, Product]]] = []
    made: set[ir.Node | None] = set()
    for pair in pairs:
        if not steps or not made.isdisjoint(makers_of(pair[0].x)):
            steps.append([])
            made = set()
        steps[-1].append(pair)
        made.add(pair[0].y.producer())
    return steps


def _weight_bytes(product: Product) -> int:
    """Bytes of the constants that the nodes of a product read."""
    makers = makers_of(product.y, {product.x})
    read = {value for maker in makers for value in maker.inputs if value is not None}
    tensors = map(ir.convenience.get_const_tensor, read)
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
