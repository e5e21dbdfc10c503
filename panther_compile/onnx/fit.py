"""Fit the weights of an ONNX model to what reaches them on data: no training, no gradients.

A weight's inputs x have second moments S = E[x xᵀ], about their mean where its nodes have a bias. A matrix is
cut in the metric of S (factorization/whiten.py), a kernel in that of its input channels
(kinds/fit_conv2d.py); the bias makes up for the mean. Errors at the outputs of a node count alike.
Where weights are fitted one by one, the inputs z of the model with what was fitted before stand beside x.
At last the biases at the outputs of the model, of dense weights too, make up for the means there: activations
turn the spread that low ranks lose into a shift of the means, which no layer before can see.
"""

# I in_features or in_channels, O out_features, N rows
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from panther_compile.calibration.layer_fit import fitted_of
from panther_compile.calibration.study import groups_within
from panther_compile.config import SketchConfig
from panther_compile.factorization.fit_matrix import fit_matrix_to
from panther_compile.factorization.moments import RIDGE, Moments, MomentSums
from panther_compile.factorization.whiten import best_low_rank, term_sizes
from panther_compile.kinds.base import Kind, OnnxForm
from panther_compile.kinds.kernel_metric import KernelSums
from panther_compile.kinds.row_space import RowSpaceView, view_within_memory
from panther_compile.kinds.view import LinearView
from panther_compile.layers.base import SketchedLayer
from panther_compile.models.batches import Call, check_rows
from panther_compile.models.rows import kept_rows
from panther_compile.models.watched import Arrival
from panther_compile.onnx.branches import graph_of, seen_graphs
from panther_compile.onnx.data import Feed, ObservedModel
from panther_compile.onnx.lowering import bias_of
from panther_compile.onnx.patterns import holds_graph, makers_of
from panther_compile.onnx.sites import OnnxFound, OnnxWeight, Use
from panther_compile.onnx.torch_windows import window_pads
from panther_compile.onnx.verify import kept_in
from panther_compile.records import Choice, Fitted
from panther_compile.reporting.progress import ProgressBar

# Of moments, or of the inputs of kernels, held at once; more takes more runs of the model.
MAX_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class FittedWeights:
    """What was fitted, by the name of the weight.

    Attributes:
        ready: sketched layers, and what came of each.
        shifts: what is to be added to the bias of a weight's nodes (O,).
    """

    ready: dict[str, tuple[SketchedLayer, Fitted]] = field(default_factory=dict)
    shifts: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Runs:
    """What data are run through.

    Attributes:
        feeds: the data.
        dense: the model.
        sketched: the model with some weights sketched; None for the dense one.
    """

    feeds: Sequence[Feed]
    dense: ObservedModel
    sketched: ObservedModel | None = None

    def __call__(self, values: Sequence[ir.Value]) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
        """Values by name, for each batch, in the dense model and in the sketched one."""
        names = list(dict.fromkeys(str(value.name) for value in values))
        dense = self.dense.run(self.feeds, names)
        if self.sketched is None:
            return ((found, found) for found in dense)
        return zip(dense, self.sketched.run(self.feeds, names), strict=True)


@dataclass(frozen=True, slots=True)
class End:
    """A product with a bias whose result is an output of the model.

    Attributes:
        use: the product.
        output: of the model.
    """

    use: Use
    output: ir.Value

    @property
    def name(self) -> str:
        """The name of the output."""
        return str(self.output.name)

    @property
    def scale(self) -> float:
        """The factor that the node multiplies the product by: alpha of a Gemm, else 1."""
        return self.use.node.attributes.get_float("alpha", 1.0) if self.use.node.op_type == "Gemm" else 1.0


def find_ends(model: ir.Model, sites: OnnxFound) -> list[End]:
    """The ends of a model; a weight that several nodes read makes none."""
    ends = []
    for weight in sites.weights.values():
        use = weight.uses[0]
        sizes = [int(size) for size in weight.tensor.shape]  # type: ignore[arg-type]
        outputs = sizes[0] if use.is_conv or not use.linear_is_transposed else sizes[-1]
        transposed = use.node.op_type == "ConvTranspose"  # its weight is (I, O / G, ...)
        bias = bias_of(use, outputs) if len(weight.uses) == 1 and not transposed else None
        if bias is not None and bias.node.outputs[0] in [*model.graph.outputs] and bias.scale:
            ends.append(End(use, bias.node.outputs[0]))
    return ends


def missing_means(ends: Sequence[End], runs: Runs) -> Iterator[tuple[End, Tensor]]:
    """What the products lack (O,), float64, in the mean over the data, that outputs are made of.

    Numbers that are not finite, as logits that a bias hides, do not count.
    """
    sums: dict[str, Tensor] = {}
    rows: dict[str, Tensor] = {}
    for feed, (dense, sketched) in zip(runs.feeds, runs([end.output for end in ends]), strict=True):
        kept = kept_in(feed)
        for end in ends:
            missing = torch.from_numpy(dense[end.name]).double() - torch.from_numpy(sketched[end.name])
            found = kept_rows(missing.movedim(1, -1), None) if end.use.is_conv else kept_rows(missing, kept)
            finite = found.isfinite()
            sums[end.name] = sums.get(end.name, 0.0) + found.where(finite, 0.0).sum(dim=0)
            rows[end.name] = rows.get(end.name, 0) + finite.sum(dim=0)
    for end in ends:
        if bool(rows[end.name].any()):
            yield end, sums[end.name] / rows[end.name].clamp_min(1) / end.scale


@dataclass(frozen=True, slots=True)
class _Seen:
    """A weight whose inputs data show: those of all its nodes."""

    weight: OnnxWeight
    module: nn.Module
    kind: Kind
    view: LinearView

    @property
    def form(self) -> OnnxForm:
        assert self.kind.onnx is not None
        return self.kind.onnx

    @property
    def is_kernel(self) -> bool:
        return not self.view.is_matrix

    @property
    def matrix(self) -> Tensor:
        """The weight (O, I), as it is seen."""
        return self.view.weight_and_bias()[0].detach()

    @property
    def has_bias(self) -> bool:
        return all(bias_of(use, len(self.matrix)) is not None for use in self.weight.uses)

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for weights that are given the same rows."""
        rows_of: object = None if self.form.flat else (self.kind, str(self.module))
        if isinstance(self.view, RowSpaceView):  # of no other weight
            rows_of = self.weight.name
        return tuple((_data_of(use).name, use.index, _is_flipped(use), rows_of) for use in self.weight.uses)

    def rows(self, use: Use, x: Tensor, kept: Tensor | None) -> Tensor:
        """What one of its nodes reads, as rows (N, I)."""
        if not self.form.flat:
            return self.view.rows(_padded(x, use.node) if self.form.pads_input else x, None)
        if use.index == 0:  # M x: the columns of x
            return self.view.rows(x if _is_flipped(use) else x.transpose(-1, -2), None)
        return self.view.rows(x.t() if _is_flipped(use) else x, kept)


class WeightFit:
    """Fits the weights of a model, but for those that are given what a loop makes: it cannot be seen.

    Args:
        model: as it was read; is not changed.
        sites: of the model.
        config: the options.
    """

    def __init__(self, model: ir.Model, sites: OnnxFound, config: SketchConfig) -> None:
        self._config = config
        self._seen: dict[str, _Seen] = {}
        names = Counter(value.name for node in model.graph.all_nodes() for value in node.outputs)
        graphs = seen_graphs(model)

        def can_be_seen(weight: OnnxWeight, value: ir.Value) -> bool:
            if graph_of(value) is model.graph:
                return True
            is_float = weight.tensor.dtype == ir.DataType.FLOAT
            return is_float and graph_of(value) in graphs and names[value.name] == 1

        for site, kind in sites.found.sites:
            weight = sites.weights[site.name]
            if weight.uses[0].is_table:  # by its weights alone
                continue
            seen = all(can_be_seen(weight, _data_of(use)) for use in weight.uses)
            view = view_within_memory(kind, site.module)
            if seen and not isinstance(view, str):
                self._seen[site.name] = _Seen(weight, site.module, kind, view)

    @property
    def names(self) -> list[str]:
        """Names of the weights that data can fit, in the order of the graph."""
        return list(self._seen)

    def values(self, names: Sequence[str]) -> list[ir.Value]:
        """What the nodes of some weights read."""
        return [_data_of(use) for name in names for use in self._seen[name].weight.uses]

    def spectra(self, runs: Runs) -> dict[str, Tensor]:
        """Singular values of each matrix in the metric of the data, float64, by its name.

        Raises:
            DataError: ONNX Runtime cannot run a batch, or NaN or Inf reaches a weight.
        """
        found = {}
        names = [name for name, seen in self._seen.items() if not seen.is_kernel]
        for name, moments in self._moments(names, runs, "moments"):
            dense = self._seen[name].matrix.double()
            factors = best_low_rank(dense, moments, None, min(dense.shape))
            found[name] = term_sizes(*factors, moments.covariance, None)
        return found

    def energies(self, runs: Runs) -> dict[str, dict[str, Tensor]]:
        """What each rank of the kernels of k x k keeps in the metric of the data, by name and scheme.

        Of those that data reach; of kernels that are too large to sum up for it is not known.

        Raises:
            DataError: see `spectra`.
        """
        found: dict[str, KernelSums | None] = {}
        names = [name for name, seen in self._seen.items() if seen.is_kernel]
        for name, arrival in self._padded_inputs(names, runs) if names else ():
            if name not in found:
                sums = self._seen[name].view.input_sums(centred=self._seen[name].has_bias)
                found[name] = sums if isinstance(sums, KernelSums) else None
            if (sums := found[name]) is not None:
                sums.add(arrival.x.float())
        return {
            name: {} if sums is None else sums.energies(None, sums.moments(RIDGE))
            for name, sums in found.items()
        }

    def steps(self, names: Sequence[str]) -> Iterator[list[str]]:
        """The weights in their order, in groups; none depends on another of its group.

        The graph may be changed in between, where the weights of earlier groups are read.
        """
        step: list[str] = []
        nodes: set[ir.Node] = set()
        for name in names:
            uses = self._seen[name].weight.uses
            if step and any(_hangs_on(_data_of(use), nodes) for use in uses):
                yield step
                step, nodes = [], set()
            step.append(name)
            nodes.update(use.node for use in uses)
        if step:
            yield step

    def fit(self, choices: Mapping[str, Choice], runs: Runs) -> FittedWeights:
        """Fit some weights, as chosen; those that no row of the data reaches are left out.

        Raises:
            DataError: ONNX Runtime cannot run a batch, or NaN or Inf reaches a weight.
        """
        fitted = FittedWeights()
        matrices = [name for name in choices if not self._seen[name].is_kernel]
        for name, moments in self._moments(matrices, runs, "fit"):
            self._fit_matrix(name, choices[name], moments, fitted)
        kernels = [name for name in choices if self._seen[name].is_kernel]
        for name, arrivals in self._arrivals(kernels, runs):
            self._fit_kernel(name, choices[name], arrivals, fitted)
        return fitted

    def _moments(self, names: Sequence[str], runs: Runs, what: str) -> Iterator[tuple[str, Moments]]:
        """Moments for each matrix; those that are given the same rows share the sums."""
        owners = {self._seen[name].key: name for name in reversed(names)}
        sizes = {name: 8 * self._seen[name].matrix.shape[1] ** 2 for name in owners.values()}
        for group in groups_within(MAX_BYTES, {name: sizes[name] for name in names if name in sizes}):
            sums = {
                self._seen[name].key: MomentSums(self._seen[name].matrix.shape[1], torch.device("cpu"))
                for name in group
            }
            for name, x, z in self._rows(group, runs, what):
                if len(x):  # else all of it is padding
                    sums[self._seen[name].key].add(x, z)
            for name in names:
                found = sums.get(self._seen[name].key)
                if found is not None and found.rows:
                    yield name, found.moments(centred=self._seen[name].has_bias)

    def _rows(self, names: Sequence[str], runs: Runs, what: str) -> Iterator[tuple[str, Tensor, Tensor]]:
        uses = [(name, use) for name in names for use in self._seen[name].weight.uses]
        feeds, pairs = runs.feeds, runs(self.values(names))
        bar = ProgressBar(pairs, desc=what, total=len(feeds), progress=self._config.progress)
        for feed, (xs, zs) in zip(feeds, bar, strict=True):
            kept = kept_in(feed)
            for name, use in uses:
                if not _is_reached(use, xs, zs):
                    continue
                x, z = (
                    self._seen[name].rows(use, _finite(found, use, name, feed), kept) for found in (xs, zs)
                )
                yield name, x, x if xs is zs else z

    def _arrivals(self, names: Sequence[str], runs: Runs) -> Iterator[tuple[str, list[Arrival]]]:
        """What reaches each kernel (N, I, H, W), padded; one for each batch and node."""
        if not names:
            return
        first, _ = next(runs(self.values(names)))
        sizes = {
            name: 2 * len(runs.feeds) * sum(first[str(value.name)].nbytes for value in self.values([name]))
            for name in names
        }
        for group in groups_within(MAX_BYTES, sizes):
            arrivals: dict[str, list[Arrival]] = {name: [] for name in group}
            for name, arrival in self._padded_inputs(group, runs):
                arrivals[name].append(arrival)
            for name in group:
                if arrivals[name]:
                    yield name, arrivals.pop(name)

    def _padded_inputs(self, names: Sequence[str], runs: Runs) -> Iterator[tuple[str, Arrival]]:
        """What reaches kernels, batch by batch, and node by node; nothing where that is empty."""
        pairs = zip(runs.feeds, runs(self.values(names)), strict=True)
        for place, (feed, (xs, zs)) in enumerate(pairs):
            for name in names:
                for use in self._seen[name].weight.uses:
                    if _is_reached(use, xs, zs):
                        read = (_finite(found, use, name, feed) for found in (xs, zs))
                        x, z = (_padded(one, use.node) for one in read)
                        yield name, Arrival(place, x, x if xs is zs else z)

    def _fit_matrix(self, name: str, choice: Choice, moments: Moments, fitted: FittedWeights) -> None:
        seen = self._seen[name]
        weight, zeros = seen.matrix, torch.zeros(seen.matrix.shape[0])
        found = fit_matrix_to(
            weight,
            zeros if seen.has_bias else None,
            moments,
            None,
            choice.rank,
            pivoted=choice.scheme == "pivoted",
            dtype=weight.dtype,
        )
        layer = seen.view.build(replace(found, bias=None))
        self._keep(name, layer, found.bias, found.output_error, moments.rows, fitted)

    def _fit_kernel(
        self, name: str, choice: Choice, arrivals: Sequence[Arrival], fitted: FittedWeights
    ) -> None:
        seen = self._seen[name]
        assert seen.form.fit is not None
        layer, shift, error = seen.form.fit(seen.module, seen.has_bias, name, choice, self._config, arrivals)
        pixels = sum(one.x.numel() // one.x.shape[1] for one in arrivals)
        self._keep(name, layer, shift, error, pixels, fitted)

    def _keep(
        self,
        name: str,
        layer: SketchedLayer,
        shift: Tensor | None,
        error: float,
        rows: int,
        fitted: FittedWeights,
    ) -> None:
        weight = self._seen[name].view.whole_weight().detach()
        record = fitted_of(layer, weight, name, rows, error, self._config)
        fitted.ready[name] = layer, record
        if shift is not None:
            fitted.shifts[name] = shift


def _data_of(use: Use) -> ir.Value:
    """The other operand of a product."""
    value = use.node.inputs[1 - use.index]
    assert value is not None
    return value


def _is_reached(use: Use, *runs: Mapping[str, Any]) -> bool:
    """Whether a node read anything: in a branch that is not taken it did not."""
    return all(found[str(_data_of(use).name)].size for found in runs)


def _finite(found: Mapping[str, Any], use: Use, name: str, feed: Feed) -> Tensor:
    """What a node read in one run of a batch."""
    tensor = torch.from_numpy(found[str(_data_of(use).name)])
    check_rows(tensor, name, Call((), {}, feed.place))
    return tensor


def _hangs_on(value: ir.Value, nodes: set[ir.Node]) -> bool:
    """Whether a value is computed from what one of the nodes makes."""
    return any(node in nodes or holds_graph(node) for node in makers_of(value))


def _is_flipped(use: Use) -> bool:
    """Whether a Gemm transposes its data."""
    return use.node.op_type == "Gemm" and bool(
        use.node.attributes.get_int("transA" if use.index else "transB", 0)
    )


def _padded(x: Tensor, node: ir.Node) -> Tensor:
    """The input of a convolution with its padding done."""
    assert node.inputs[1] is not None
    weight = ir.convenience.get_const_tensor(node.inputs[1])  # a Constant node's has no shape of its own
    assert weight is not None
    kernel = [int(size) for size in weight.shape][2:]  # type: ignore[arg-type]
    return F.pad(x, window_pads(x, kernel, {name: one.value for name, one in node.attributes.items()}))
