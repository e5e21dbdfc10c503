"""What one stage hands the next."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from torch import fx, nn
from torch.fx.graph_module import _USER_PRESERVED_ATTRIBUTES_KEY

from panther_compile.errors import CheckpointError, ConfigError, ConfigTypeError
from panther_compile.factorization.candidates import Candidate
from panther_compile.factorization.cost import Device
from panther_compile.reporting.layer_table import LayerTable
from panther_compile.reporting.plan_text import PLAN_COLUMNS, allocation_text, seconds_text
from panther_compile.reporting.ratio_curve import RatioCurve
from panther_compile.reporting.tables import data_frame
from panther_compile.typed_json import read_record


@dataclass(frozen=True, slots=True)
class Unit:
    """One weight of a site: what it is, and how it may be stored.

    Attributes:
        name: the site's name, and a suffix where a site has several weights ("self_attn.q_proj").
        shape: that of the dense weight.
        dense_numbers: stored numbers when dense, bias included.
        bias_numbers: numbers among them that no scheme touches.
        candidates: schemes to choose from; empty if there is none.
        device: class of device it runs on; None for a look-up, which takes no time to speak of.
        groups: number of a convolution's groups.
        stride: of a convolution.
        tied_numbers: biases of the other layers that use the weight; they stay, and are in no other count.
        cost_shape: of the matrix (O, I) or kernel (O, I / G, kh, kw) that it multiplies as, to predict its
            time; None for `shape`.
        in_data: whether the candidates tell what ranks keep in the metric of data.
        speed: share of the speed that is predicted, which its schemes were measured to reach.
    """

    name: str
    shape: tuple[int, ...]
    dense_numbers: int
    bias_numbers: int
    candidates: tuple[Candidate, ...]
    device: Device | None
    groups: int = 1
    stride: tuple[int, int] = (1, 1)
    tied_numbers: int = 0
    cost_shape: tuple[int, ...] | None = None
    in_data: bool = False
    speed: float = 1.0


Pool = Sequence[tuple[Unit, str]]
"""Weights that share a budget, each with what the report calls its layer."""


@dataclass(frozen=True, slots=True)
class Site:
    """A dense layer that can be sketched.

    Attributes:
        name: fully qualified; the first one if the module is reachable under several.
        module: the layer.
        kind: what it is, as the report shows it ("Linear", "Conv2d", ...).
        tied: other modules that use the same weight, by name; they share the factors.
        aliases: other names of the module.
    """

    name: str
    module: nn.Module
    kind: str
    tied: tuple[tuple[str, nn.Module], ...] = ()
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """How one weight is to be stored: a scheme and its rank, within a number of stored numbers.

    Attributes:
        scheme: name of the scheme.
        rank: in 1..max_rank of its candidate.
        ranks: ranks of its factors.
        stored_numbers: numbers of the weight and its bias; a factor that several share is the first one's.
        error: relative error that is expected, of all that share the factor together; None if unknown.
        sharing: names of all the weights that share a factor, its own among them: the input factor of scheme
            "pivoted", the output factor of "pair"; else empty.
        link: names of the layers that write the features a narrow layer keeps, then of their reader, see
            `coupled.Coupling`; else empty.
    """

    scheme: str
    rank: int
    ranks: tuple[int, ...]
    stored_numbers: int
    error: float | None
    sharing: tuple[str, ...] = ()
    link: tuple[str, ...] = ()


_MOST_NAMED = 6  # weights that share a factor with one; more are counted


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """One line of a plan: what is done to one weight, and why.

    Attributes:
        name: name of the weight: its layer, and a suffix where the layer has several.
        kind: "Linear", "Conv2d", "MultiheadAttention", "Conv1D", "Embedding".
        shape: that of the dense weight.
        dense_numbers: stored numbers of the dense weight.
        choice: how it is sketched; None if it stays dense.
        reason: why it stays dense, or what decided the choice.
        whole: whether it stays dense within the budget, which the others then make up for.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dense_numbers: int
    choice: Choice | None
    reason: str
    whole: bool = False

    @property
    def stored_numbers(self) -> int:
        """Stored numbers after sketching."""
        return self.dense_numbers if self.choice is None else self.choice.stored_numbers

    @property
    def shared_text(self) -> str:
        """The weights with which it shares a factor, or is narrowed, in words; empty if there are none."""
        if self.choice is None:
            return ""
        others = [name for name in self.choice.sharing or self.choice.link if name != self.name]
        side = "output" if self.choice.scheme == "pair" else "input"
        what = f"{side} factor shared with" if self.choice.sharing else "narrowed with"
        named = ", ".join(others) if len(others) <= _MOST_NAMED else f"{len(others)} others"
        return f"{what} {named}" if others else ""


@dataclass(frozen=True, slots=True)
class Cached:
    """Keys, values, or both, that a decoder keeps of each token.

    Attributes:
        names: weights that write them, several of one input; empty where none writes what is kept.
        width: numbers of a token, of all heads.
    """

    names: tuple[str, ...]
    width: int


@dataclass(frozen=True, slots=True)
class SketchPlan:
    """What `sketchify` would do: one line for each weight, whether it is sketched or left alone.

    Attributes:
        layers: one line for each weight, in the order of the model.
        ratio: the ratio asked for, as text.
        route: how the layers were found: "module tree", "fx graph", ...
        allocation: how data had the budget divided, see `plan.Allocation`; empty without data.
        tried: distances of results on held-out data from the dense model's, by allocation; may be empty.
        seconds: time of a call of the whole model, "dense" and "sketched", where that was timed; else empty.
        undecided: the trials whose difference was noise, and what was taken or kept instead; else empty.
        cached: what a decoder keeps of a token, where that was the objective; else empty.
    """

    layers: tuple[LayerPlan, ...]
    ratio: str
    route: str
    allocation: str = ""
    tried: Mapping[str, float] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    undecided: str = ""
    cached: tuple[Cached, ...] = ()

    @property
    def cached_numbers(self) -> tuple[int, int]:
        """Numbers of a token, rotary angles aside: that a cache keeps, and that a `LatentCache` keeps."""
        choices, latent = self.choices, 0
        for one in self.cached:
            written = [choices.get(name) for name in one.names] or [None]
            if written[0] is not None and written[0].sharing == one.names:
                written = written[:1]  # r numbers for all
            each = one.width // len(written)
            latent += sum(each if how is None else min(how.rank, each) for how in written)
        return sum(one.width for one in self.cached), latent

    @property
    def sketched(self) -> tuple[LayerPlan, ...]:
        """The lines that are sketched."""
        return tuple(layer for layer in self.layers if layer.choice is not None)

    @property
    def choices(self) -> dict[str, Choice]:
        """What is done to the weights that are sketched, by name."""
        return {layer.name: layer.choice for layer in self.layers if layer.choice is not None}

    @property
    def whole(self) -> tuple[LayerPlan, ...]:
        """The lines that stay dense within the budget."""
        return tuple(layer for layer in self.layers if layer.whole)

    @property
    def dense_numbers(self) -> int:
        """Dense count of the weights that share the budget: those to be replaced, and those kept whole."""
        return sum(layer.dense_numbers for layer in (*self.sketched, *self.whole))

    @property
    def stored_numbers(self) -> int:
        """Stored count of the same weights."""
        return sum(layer.stored_numbers for layer in (*self.sketched, *self.whole))

    @property
    def achieved_ratio(self) -> float:
        """Stored over dense numbers of the weights that share the budget; 1.0 if none is replaced."""
        return self.stored_numbers / self.dense_numbers if self.sketched else 1.0

    def to_json(self) -> str:
        """The plan as JSON, to be edited and given to `sketchify(plan=)`.

        Of a choice its rank counts. That of narrow layers is how many features of each head are kept, the
        same of all that are linked; `ranks` are then those of all heads, and the rank of a factorized one.
        """
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The plan that `to_json` gave, as it was edited.

        Raises:
            ConfigError: it is no plan; the message says where.
            ConfigTypeError: it is no text.
        """
        if not isinstance(text, str | bytes):
            raise ConfigTypeError(f"the plan is a {type(text).__name__}, wanted the text that to_json gave")
        try:
            document = json.loads(text)
            if isinstance(document, dict):
                document.pop("achieved_ratio", None)  # what the command line adds
            return read_record(cls, document, "the plan")
        except (ValueError, RecursionError, CheckpointError) as error:
            raise ConfigError(f"no plan in JSON: {error}") from error

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame` of the lines, by the names of the weights.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        empty: dict[str, Any] = {"scheme": "dense", "rank": None, "ranks": (), "error": None}
        rows = []
        for line in self.layers:
            choice = empty if line.choice is None else {key: getattr(line.choice, key) for key in empty}
            kept = {key: getattr(line, key) for key in ("name", "kind", "shape", "dense_numbers")}
            rows.append(kept | {"stored_numbers": line.stored_numbers} | choice | {"reason": line.reason})
        return data_frame(rows)

    def __str__(self) -> str:
        """A table: one line for each weight, layers that repeat in one, then the totals."""
        return self._table().text(optional=("kind", "shape", "dense", "weight error"))

    def _repr_html_(self) -> str:
        """The same in a notebook, the share that each layer would store drawn as a bar."""
        return self._table().html()

    def _table(self) -> LayerTable:
        footer = (
            f"{len(self.sketched)} of {len(self.layers)} layers to be sketched"
            f"{f', {len(self.whole)} kept whole' * bool(self.whole)}: {self.stored_numbers:,} of "
            f"{self.dense_numbers:,} numbers, ratio {self.achieved_ratio:.4f} (asked {self.ratio})",
            f"found through: {self.route}",
            *filter(None, (allocation_text(self.allocation, self.tried, self.undecided),)),
            *filter(None, (seconds_text(self.seconds),)),
        )
        return LayerTable("Sketch plan", PLAN_COLUMNS, self.layers, footer)


@dataclass(frozen=True, slots=True)
class Fitted:
    """What came of one sketched weight.

    Attributes:
        scheme: the scheme by which it is stored.
        ranks: ranks of the factors.
        method: how they were found: "svd", "randomized", "hooi", "calibrated".
        error: relative Frobenius error of the stored factors, estimated by Gaussian probes; None of a narrow
            layer, whose weights are not those of the dense one.
        output_error: relative error of the layer's output on the calibration data, behind the sketched
            layers before it, after the fit; None without data.
        sensitivity: what the square of a small output_error does to the result: twice the divergence of
            logits, in nats a row, or the squared relative error of other results; likewise.
        predicted_error: of the whitened matrix cut at its rank, on what the dense model computes; likewise,
            of matrices.
        note: what is to be known about the data that it was fitted to; empty if there is nothing.
    """

    scheme: str
    ranks: tuple[int, ...]
    method: str
    error: float | None
    output_error: float | None = None
    sensitivity: float | None = None
    predicted_error: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Timed:
    """How a sketch ran here.

    Attributes:
        speedup: the dense time over its own.
        saved: seconds, in one call of the model.
        inputs: the shapes of the layer's inputs.
    """

    speedup: float
    saved: float
    inputs: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class WholeTimes:
    """Seconds that calls of a whole model take, dense and sketched by turns.

    Attributes:
        dense: seconds of the dense model in each turn, in their order.
        sketched: seconds of the sketched model, likewise.
    """

    dense: tuple[float, ...]
    sketched: tuple[float, ...]

    @property
    def speedup(self) -> float:
        """The speedup by the fastest calls, the smaller of both halves of the turns, as if measured twice."""
        middle = len(self.dense) // 2
        halves = (slice(middle), slice(middle, None)) if middle else (slice(None),)
        return min(min(self.dense[half]) / min(self.sketched[half]) for half in halves)

    @property
    def fastest(self) -> dict[str, float]:
        """See `SketchPlan.seconds`."""
        return {"dense": min(self.dense), "sketched": min(self.sketched)}


@dataclass(frozen=True, slots=True)
class Closeness:
    """How close a sketched model's outputs are to the dense model's.

    Attributes:
        grade: "good", "noticeable" or "destroyed"; empty if the outputs were not compared.
        kind: "KL" for logits, in nats a row, or "relative error", over the deviation of the dense outputs.
        distance: of that kind.
        share: of what an answer that is always the same would lose: 0 is equal, 1 tells nothing.
        agreement: share of the rows with the same largest logit; None of other outputs.
        inputs: that both models were given, in words; or why the outputs were not compared.
    """

    grade: str
    kind: str
    distance: float
    share: float
    agreement: float | None
    inputs: str

    @classmethod
    def unknown(cls, reason: str) -> Self:
        """A closeness of outputs that were not compared."""
        return cls("", "", 0.0, 0.0, None, reason)

    @classmethod
    def of_other_shapes(cls) -> Self:
        """The closeness of outputs of another shape than the dense model's, all of them: as far as can be."""
        return cls("", "", 0.0, 1.0, None, "its results are of another shape, all of them")

    @property
    def is_of_other_shapes(self) -> bool:
        """Whether all outputs are of another shape, so that nothing says how close they are."""
        return not self.grade and self.share == 1.0

    def __str__(self) -> str:
        """One line, the grade first."""
        if not self.grade:
            return f"outputs: not compared with the dense model's: {self.inputs}"
        unit = " nats a row" if self.kind == "KL" else ""
        same = (
            "" if self.agreement is None else f", the same first choice in {self.agreement:.0%} of the rows"
        )
        far = f"{self.kind} {self.distance:.2g}{unit} from the dense model's"
        if self.kind == "KL" and self.grade == "destroyed" and self.distance < self.share:  # little, of less
            far += f", whose answers differ by {self.distance / self.share:.2g} among themselves"
        return f"outputs: {self.grade}: {far}{same}, on {self.inputs}"


@dataclass(frozen=True, slots=True)
class SketchRecord:
    """What was done to a model; kept on it, saved with it.

    Attributes:
        plan: the plan that was carried out.
        fitted: what came of each weight that was sketched, by name.
        curve: of the search for the ratio; None if there was none.
        output: what the model's result was taken for, and why; empty without inputs.
        closeness: of the outputs, as the model was when it was made; None in a record of an earlier version.
    """

    plan: SketchPlan
    fitted: Mapping[str, Fitted]
    curve: RatioCurve | None = None
    closeness: Closeness | None = None
    output: str = ""

    @classmethod
    def after(
        cls,
        earlier: "SketchRecord | None",
        plan: SketchPlan,
        fitted: Mapping[str, Fitted],
        curve: RatioCurve | None = None,
    ) -> Self:
        """The record of a plan carried out; layers sketched earlier keep the lines they had."""
        known = () if earlier is None else earlier.plan.sketched
        lines: list[LayerPlan] = []
        for line in plan.layers:
            if line.reason == ALREADY_SKETCHED:
                parts = f"{line.name}."  # an attention has a line for each projection
                lines.extend(old for old in known if old.name == line.name or old.name.startswith(parts))
            else:
                lines.append(line)
        if earlier is None:
            return cls(replace(plan, layers=tuple(lines)), fitted, curve)
        ratio = f"{earlier.plan.ratio}, then {plan.ratio}"
        source = plan if plan.allocation else earlier.plan
        both = replace(source, layers=tuple(lines), ratio=ratio, route=plan.route, seconds=plan.seconds)
        return cls(both, {**earlier.fitted, **fitted}, curve or earlier.curve)


# Called with a model each time that its record is set or taken away, when its layers have changed.
# Integrations with other libraries add themselves, once the library is imported.
on_record_change: list[Callable[[nn.Module], None]] = []

NEVER_REACHED = "data never reached it"
ALREADY_SKETCHED = "already sketched"
RECORD_ATTRIBUTE = "_panther_sketch"


def keep_record(model: nn.Module, record: SketchRecord | None) -> None:
    """Keep the record on the model, and on copies of it; None takes it away."""
    keep_attribute(model, RECORD_ATTRIBUTE, record)
    for listener in on_record_change:
        listener(model)


def keep_attribute(model: nn.Module, name: str, value: object | None) -> None:
    """Keep a value on the model under a name, and on copies of it; None takes it away."""
    holders = [vars(model)]
    if isinstance(model, fx.GraphModule):  # a copy of a graph has no other attributes than these
        holders.append(model.meta.setdefault(_USER_PRESERVED_ATTRIBUTES_KEY, {}))
    for holder in holders:
        holder.pop(name, None)
        if value is not None:
            holder[name] = value


def kept_attribute(model: nn.Module, name: str) -> Any:
    """What is kept on the model under a name, None if nothing is; raises ConfigTypeError for no module."""
    if not isinstance(model, nn.Module):
        raise ConfigTypeError(f"model is a {type(model).__name__}, wanted an nn.Module")
    return vars(model).get(name)
