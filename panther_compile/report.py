"""What was done to a model, counted on the model as it is now."""

import math
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from os import PathLike
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from panther_compile.config import check_is_module
from panther_compile.errors import NoTargetError
from panther_compile.layers.base import SketchedLayer, check_weights, keeps_numbers_elsewhere, outermost
from panther_compile.layers.narrow import NarrowLinear
from panther_compile.models.wrapped import unwrapped
from panther_compile.names import holder_of
from panther_compile.planning.other_weights import other_weights, others_text
from panther_compile.records import (
    RECORD_ATTRIBUTE,
    Closeness,
    Fitted,
    LayerPlan,
    SketchPlan,
    SketchRecord,
    kept_attribute,
)
from panther_compile.reporting.layer_table import Column, LayerTable
from panther_compile.reporting.plan_text import allocation_text, seconds_text
from panther_compile.reporting.plots import draw_layers
from panther_compile.reporting.ratio_curve import RatioCurve
from panther_compile.reporting.tables import data_frame, number, share, stored_share


@dataclass(frozen=True, slots=True)
class ReportRow:
    """One layer, sketched or left alone.

    Attributes:
        name: fully qualified.
        kind: class of the layer as it is now, or kind of the dense layer that was left alone.
        scheme: how the weight is stored, "dense" where it was left alone.
        ranks: ranks of the factors; empty if dense.
        dense_numbers: stored numbers (parameters and buffers) of the dense layer.
        stored_numbers: stored numbers of the layer as it is now.
        dense_macs: multiply-adds per row (linear, attention) or output position (convolution), dense.
        macs: the same as it is now.
        method: how the factors were found.
        error: relative Frobenius error of the weight, estimated by Gaussian probes; None if dense or unknown.
        reason: why the layer was left alone.
        predicted_error: relative error of the layer's output that the plan expected on data, from what the
            dense model computes; of matrices that were fitted to data, else None.
        output_error: the same after the fit, behind the sketched layers before it; None without data.
        sensitivity: what the square of a small output_error does to the result: twice the divergence of
            logits, in nats a row, or the squared relative error of other results; likewise.
        note: what is to be known about the data that it was fitted to; empty if there is nothing.
        shared: whose weight it has, or with whom it shares an input factor or is narrowed; the first of them
            counts what is shared. Empty if with none.
    """

    name: str
    kind: str
    scheme: str
    ranks: tuple[int, ...]
    dense_numbers: int
    stored_numbers: int
    dense_macs: int
    macs: int
    method: str
    error: float | None
    reason: str
    predicted_error: float | None = None
    output_error: float | None = None
    sensitivity: float | None = None
    note: str = ""
    shared: str = ""


@dataclass(frozen=True, slots=True)
class SketchReport:
    """What a sketched model stores and computes, against the dense one.

    Attributes:
        rows: one for each weight, in the order of the model.
        dense_numbers: parameters and buffers of the whole dense model, shared ones once; of a weight that its
            layer made of others, as weight norm does, those of the weight.
        stored_numbers: parameters and buffers of the whole model as it is now, shared ones once.
        replaced_dense_numbers: dense count of the replaced weights, and of those that the budget keeps whole
            or that were put back to dense since.
        replaced_stored_numbers: stored count of the same now.
        ratio_asked: the ratio in words; "-" where no record of it is left.
        route: how the layers were found.
        allocation: how data had the budget divided; empty without data.
        tried: how far results on held-out data were from the dense model's, by allocation tried.
        undecided: the trials whose difference was noise, and what was taken or kept instead.
        curve: the search for the ratio, if there was one.
        seconds: time of a call of the whole model, "dense" and "sketched", where sketchify timed it.
        others: numbers of matrices and kernels that are in no row, by the class of the module.
        output: what the model's result was taken for, and why; empty without inputs.
        plan: the plan that was carried out, for `sketchify(sibling, plan=plan)`; None if no record is left.
        closeness: how close outputs were to the dense model's at first; None if no record tells.
        dense_bytes: bytes of `dense_numbers`, in the dtypes that the model has now.
        stored_bytes: bytes of `stored_numbers`; of a quantized tensor, all that it is made of.
        dense_cache_bytes: bytes of a token in a decoder's cache; 0 unless that was the objective.
        latent_cache_bytes: bytes of a token in a `LatentCache`; angles of rotary embeddings are not counted.
    """

    rows: tuple[ReportRow, ...]
    dense_numbers: int
    stored_numbers: int
    replaced_dense_numbers: int
    replaced_stored_numbers: int
    ratio_asked: str
    route: str
    allocation: str = ""
    tried: Mapping[str, float] = field(default_factory=dict)
    undecided: str = ""
    curve: RatioCurve | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    others: Mapping[str, int] = field(default_factory=dict)
    closeness: Closeness | None = None
    output: str = ""
    plan: SketchPlan | None = None
    dense_bytes: int = 0
    stored_bytes: int = 0
    dense_cache_bytes: int = 0
    latent_cache_bytes: int = 0

    @property
    def achieved_ratio(self) -> float:
        """Stored over dense numbers of the replaced weights; 1.0 if none was."""
        if not self.replaced_dense_numbers:
            return 1.0
        return self.replaced_stored_numbers / self.replaced_dense_numbers

    @property
    def _curve_text(self) -> str:
        if self.curve is None:
            return ""
        points = len(self.curve.points)
        score = dict(self.curve.points)[self.curve.ratio or 1.0]
        return (
            f"ratio {self.curve.ratio:g} found with {points} evaluations: score {score:.6g}, dense "
            f"{self.curve.dense_score:.6g}, max_drop {self.curve.max_drop:g}"
        )

    @property
    def _others_text(self) -> str:
        counts = others_text(self.others)
        return f"left as they are, {counts}" if counts else ""

    @property
    def _cache_text(self) -> str:
        kept, whole = self.latent_cache_bytes, self.dense_cache_bytes
        times = f"{whole / kept:.2f} times less" if kept else ""
        return f"cache: {kept:,} of {whole:,} bytes a token with LatentCache, {times}" if kept else ""

    @property
    def sketched(self) -> tuple[ReportRow, ...]:
        """The rows that are sketched."""
        return tuple(row for row in self.rows if row.scheme != "dense")

    @property
    def _whole(self) -> tuple[ReportRow, ...]:
        names = set() if self.plan is None else {line.name for line in self.plan.whole}
        return tuple(row for row in self.skipped if row.name in names)

    @property
    def _put_back(self) -> tuple[ReportRow, ...]:
        return tuple(row for row in self.skipped if row.reason == _PUT_BACK)

    @property
    def skipped(self) -> tuple[ReportRow, ...]:
        """The rows that were left alone, each with its reason."""
        return tuple(row for row in self.rows if row.scheme == "dense")

    def to_dict(self) -> dict[str, Any]:
        """The report as values for `json.dumps`; the plan has its own, see `SketchPlan.to_json`."""
        return asdict(replace(self, plan=None)) | {"achieved_ratio": self.achieved_ratio}

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame` of the rows, by the names of the layers.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        return data_frame([asdict(row) for row in self.rows])

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw what each sketched layer stores, its errors and its sensitivity (needs matplotlib).

        Args:
            path: the picture; its kind is that of the file name.
        """
        rows = [row for row in self.sketched if row.dense_numbers]  # not what another row has counted
        stored = 1.0 if (found := stored_share(rows)) is None else found
        draw_layers(
            f"{len(rows)} sketched layers store {stored:.1%} of their dense numbers",
            [row.name or "(model)" for row in rows],
            [row.stored_numbers / row.dense_numbers for row in rows],
            {
                "output, after the fit": [row.output_error for row in rows],
                "output, as predicted": [row.predicted_error for row in rows],
                "weight": [row.error for row in rows],
            },
            [row.sensitivity for row in rows],
            path,
        )

    def __str__(self) -> str:
        """How close the outputs are; a table, layers that repeat in one line; the totals."""
        width = 190 if any(row.output_error is not None for row in self.rows) else 160
        table = self._table().text(width=width, optional=_OPTIONAL)
        return table if self.closeness is None else f"{self.closeness}\n{table}"

    def _repr_html_(self) -> str:
        """The same in a notebook, the share that each layer stores drawn as a bar."""
        return self._table().html(() if self.closeness is None else (str(self.closeness),))

    def _table(self) -> LayerTable:
        fitted = any(row.output_error is not None for row in self.rows)
        columns = [one for one in _COLUMNS if fitted or one[0] not in _OF_DATA]
        whole, put_back = self._whole, self._put_back
        macs = sum(row.macs for row in (*self.sketched, *whole, *put_back))
        dense_macs = sum(row.dense_macs for row in (*self.sketched, *whole, *put_back))
        and_whole = f" and {len(whole)} kept whole" * bool(whole)
        and_whole += f" and {len(put_back)} put back to dense" * bool(put_back)
        footer = (
            *(("predicted, output: relative error of the layer's output on the data",) * fitted),
            f"replaced weights{and_whole}: {self.replaced_stored_numbers:,} of "
            f"{self.replaced_dense_numbers:,} numbers, "
            f"ratio {self.achieved_ratio:.4f} (asked {self.ratio_asked}), FLOPs {share(macs, dense_macs)}",
            f"whole model: {self.stored_numbers:,} of {self.dense_numbers:,} numbers, "
            f"ratio {share(self.stored_numbers, self.dense_numbers)}",
            f"in bytes: {self.stored_bytes:,} of {self.dense_bytes:,}, "
            f"ratio {share(self.stored_bytes, self.dense_bytes)}",
            f"found through: {self.route}",
            *filter(
                None,
                (
                    self._cache_text,
                    self._others_text,
                    allocation_text(self.allocation, self.tried, self.undecided),
                    self.output,
                    self._curve_text,
                    seconds_text(self.seconds),
                ),
            ),
        )
        return LayerTable("Sketch report", columns, self.rows, footer)


_NO_RECORD = SketchRecord(SketchPlan((), "-", "-"), {})  # of a model that was loaded without one
_PUT_BACK = "put back to dense after the sketch"
_COLUMNS: tuple[Column, ...] = (
    ("layer", "left", lambda row: row.name or "(model)"),
    ("kind", "left", lambda row: row.kind),
    ("scheme", "left", lambda row: row.scheme),
    ("rank", "right", lambda row: "x".join(map(str, row.ranks))),
    ("dense", "right", lambda row: f"{row.dense_numbers:,}"),
    ("stored", "right", lambda row: f"{row.stored_numbers:,}"),
    ("ratio", "right", lambda row: share(row.stored_numbers, row.dense_numbers)),
    ("FLOPs", "right", lambda row: share(row.macs, row.dense_macs)),
    ("weight error", "right", lambda row: number(row.error)),
    ("predicted", "right", lambda row: number(row.predicted_error)),
    ("output", "right", lambda row: number(row.output_error)),
    ("sensitivity", "right", lambda row: number(row.sensitivity, ".1e")),
    (
        "method, or why not",
        "left",
        lambda row: "; ".join(filter(None, (row.method or row.reason, row.shared, row.note))),
    ),
)
_OF_DATA = ("predicted", "output", "sensitivity")
# Columns that a narrow terminal does without, the first one first.
_OPTIONAL = ("sensitivity", "predicted", "kind", "FLOPs", "dense", "scheme", "stored", "weight error")


def sketch_report(model: nn.Module) -> SketchReport:
    """Report on a sketched model: numbers, FLOPs, errors, achieved ratio, and what was left alone and why.

    Counts are taken from the model given, so they hold after fine-tuning, pruning or editing too. Errors and
    reasons come from the record that `sketchify` and `load_sketched` leave on the model; without it they are
    missing.

    Raises:
        ConfigTypeError: the model is no `nn.Module`.
        NoTargetError: it was never sketched.
        WeightError: a factor was replaced by a quantized layer that holds no weight to count.
    """
    check_is_module("model", model)
    model = unwrapped(model)
    known: SketchRecord | None = kept_attribute(model, RECORD_ATTRIBUTE)
    check_weights(model, "report on the model")
    layers = dict(_weight_layers(model))
    if known is None and not layers:
        raise NoTargetError(f"{type(model).__name__} holds no sketched layer: call sketchify first")
    record = known or _NO_RECORD
    modules = dict(model.named_modules(remove_duplicate=False))
    there = _there(modules, record.plan, layers)
    rows = list(_recorded_rows(record, layers, there))
    named = {row.name for row in rows} | {holder_of(modules, line.name) for line in there}
    rows.extend(_row(name, layer, None) for name, layer in layers.items() if name not in named)
    stored = _numbers(tensors_of([model]))
    outer = list(outermost(model))
    saved = _dense_numbers(outer) - _numbers(tensors_of(outer))
    kept = sum(line.dense_numbers for line in there if line.whole or line.choice) if layers else 0
    rest = sum(map(bytes_of, tensors_of([model]))) - sum(map(bytes_of, tensors_of(outer)))
    counts = zip(outer, _dense_counts(outer), strict=True)
    dense = sum(count * next(layer.parameters()).element_size() for layer, count in counts)
    cached = record.plan.cached_numbers
    each = next((tensor.element_size() for tensor in tensors_of(layers.values())), 0)
    return SketchReport(
        rows=tuple(_counted_once(rows, layers)),
        dense_numbers=stored + saved,
        stored_numbers=stored,
        replaced_dense_numbers=_dense_numbers(layers.values()) + kept,
        replaced_stored_numbers=_numbers(tensors_of(layers.values())) + kept,
        ratio_asked=record.plan.ratio,
        route=record.plan.route,
        allocation=record.plan.allocation,
        tried=record.plan.tried,
        undecided=record.plan.undecided,
        curve=record.curve,
        seconds=record.plan.seconds,
        others=other_weights(model, named | set(layers)),
        closeness=record.closeness,
        plan=None if known is None else record.plan,
        output=record.output,
        dense_bytes=rest + dense,
        stored_bytes=sum(map(bytes_of, tensors_of([model]))),
        dense_cache_bytes=each * cached[0],
        latent_cache_bytes=each * cached[1],
    )


def tensors_of(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Parameters and buffers of the modules, each tensor once."""
    found = {}
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            found[id(tensor)] = tensor
    return list(found.values())


def bytes_of(tensor: Tensor) -> int:
    """Bytes of a tensor; of a quantized one, of the tensors that it is made of."""
    if keeps_numbers_elsewhere(tensor) and not isinstance(tensor, DTensor):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        return sum(bytes_of(getattr(tensor, name)) for name in names)
    return tensor.numel() * tensor.element_size()


def _numbers(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _weight_layers(model: nn.Module) -> Iterator[tuple[str, SketchedLayer]]:
    """The sketched layers that hold factors themselves: not an attention, but its projections."""
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if isinstance(module, SketchedLayer) and module not in inside:
            inner = list(module.modules())[1:]
            if isinstance(module, NarrowLinear):
                inside.update(inner)
            if isinstance(module, NarrowLinear) or not any(isinstance(part, SketchedLayer) for part in inner):
                yield name, module


def _dense_numbers(layers: Iterable[SketchedLayer]) -> int:
    """Dense count of the layers; weights whose factors are shared, and biases that are, count once."""
    return sum(_dense_counts(layers))


def _dense_counts(layers: Iterable[SketchedLayer]) -> Iterator[int]:
    """What each layer adds to the dense count of those before it."""
    seen: set[tuple[int, ...]] = set()
    biases: set[int] = set()
    for layer in layers:
        named = dict(layer.named_parameters())
        own_biases = {id(p): p for name, p in named.items() if name.endswith("bias")}
        factors = tuple(sorted(id(p) for p in named.values() if id(p) not in own_biases))
        weight = 0 if factors in seen else layer.dense_numbers - _numbers(own_biases.values())
        seen.add(factors)
        yield weight + _numbers(p for key, p in own_biases.items() if key not in biases)
        biases.update(own_biases)


def _counted_once(rows: list[ReportRow], layers: Mapping[str, SketchedLayer]) -> Iterator[ReportRow]:
    """The rows, with each tensor counted in the first that has it; a later row names that one."""
    first: dict[int, str] = {}
    names = [row.name for row in rows if row.name in layers]
    dense = dict(zip(names, _dense_counts(layers[name] for name in names), strict=True))
    for row in rows:
        if row.name not in layers:
            yield row
            continue
        tensors = tensors_of([layers[row.name]])
        new = [one for one in tensors if id(one) not in first]
        owners = [first[id(one)] for one in tensors if one.dim() > 1 and id(one) in first]
        shared = row.shared or (f"weight of {owners[0]}" if owners else "")
        first |= {id(one): row.name for one in new}
        yield replace(row, dense_numbers=dense[row.name], stored_numbers=_numbers(new), shared=shared)


def _recorded_rows(
    record: SketchRecord, layers: Mapping[str, SketchedLayer], there: Container[LayerPlan]
) -> Iterator[ReportRow]:
    for line in record.plan.layers:
        if line.name in layers:
            row = _row(line.name, layers[line.name], record.fitted.get(line.name))
            yield replace(row, shared=line.shared_text)
        elif line.choice is None or line in there:
            numbers, macs = line.dense_numbers, math.prod(line.shape)
            reason = line.reason if line.choice is None else _PUT_BACK
            yield ReportRow(line.name, line.kind, "dense", (), numbers, numbers, macs, macs, "", None, reason)


def _there(modules: Mapping[str, nn.Module], plan: SketchPlan, layers: Container[str]) -> list[LayerPlan]:
    """The lines of a plan whose weights the model holds dense."""

    def is_dense(name: str) -> bool:
        own = modules[holder_of(modules, name)]
        if name in modules:
            sketched = any(isinstance(one, SketchedLayer) for one in own.modules())
            return not sketched and any(one.dim() > 1 for one in own.parameters())
        return any(one is not None and one.dim() > 1 for one in own._parameters.values())

    return [line for line in plan.layers if line.name not in layers and is_dense(line.name)]


def _row(name: str, layer: SketchedLayer, fitted: Fitted | None) -> ReportRow:
    row = ReportRow(
        name=name,
        kind=type(layer).__name__,
        scheme=layer.scheme,
        ranks=layer.ranks,
        dense_numbers=layer.dense_numbers,
        stored_numbers=layer.stored_numbers,
        dense_macs=layer.dense_macs,
        macs=layer.macs,
        method="",
        error=None,
        reason="",
    )
    if fitted is None:
        return row
    return replace(
        row,
        method=fitted.method,
        error=fitted.error,
        predicted_error=fitted.predicted_error,
        output_error=fitted.output_error,
        sensitivity=fitted.sensitivity,
        note=fitted.note,
    )
