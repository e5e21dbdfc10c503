"""A quantized model with a low-rank branch beside each layer, for what it lacks of the dense one."""

# O out_features, I in_features
import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from panther_compile.calibration.branch_fit import (
    RANK_STEP,
    fit_branches,
    losses_by_rank,
    spread_ranks,
)
from panther_compile.calibration.branch_sums import Branch, best_of_matrix
from panther_compile.calibration.closeness import compare_models
from panther_compile.config import Logits, Selector, check_type, read_number, selectors, selects
from panther_compile.errors import (
    CheckpointMismatchError,
    ConfigError,
    ConfigTypeError,
    NoTargetError,
    SelectorError,
    SketchQualityWarning,
    TeacherMismatchError,
)
from panther_compile.factorization.values import check_loaded, check_values
from panther_compile.layers.base import SketchedLayer, check_rank, copy_into
from panther_compile.layers.residual import MADE_FOR, MADE_FOR_BYTES, ResidualLinear, matrix_of
from panther_compile.models.batches import Call, Data, judged_of, learnt_of, record_calls, spread_out
from panther_compile.models.divided import divided
from panther_compile.models.output_kind import recognize_output
from panther_compile.models.substitute import copied, replace_inside
from panther_compile.models.surroundings import undisturbed, without_fast_attention
from panther_compile.models.watched import copy_sharing
from panther_compile.names import dotted
from panther_compile.planning.sites import check_module
from panther_compile.records import Closeness, keep_attribute, kept_attribute
from panther_compile.report import bytes_of, tensors_of
from panther_compile.reporting.tables import counted, render_table, share

Model = TypeVar("Model", bound=nn.Module)

RESIDUAL_ATTRIBUTE = "_panther_residual"
_BATCHES = 5  # at least, if samples of fewer can be divided, so that some can be held out


@dataclass(frozen=True, slots=True)
class ResidualRow:
    """One quantized layer.

    Attributes:
        name: fully qualified.
        rank: rank of its branch; 0 if it has none.
        branch_bytes: bytes of the branch.
        quantized_bytes: bytes of the layer that it stands beside.
    """

    name: str
    rank: int
    branch_bytes: int
    quantized_bytes: int


@dataclass(frozen=True, slots=True)
class ResidualReport:
    """What `add_residual` added to a quantized model, and what it is worth.

    Attributes:
        rows: one for each quantized layer.
        before: how close the outputs of the quantized model are to the dense model's, on held-out batches.
        after: the same with the branches; if that was no closer, they were left out.
        kept: whether branches were added.
        dense_bytes: bytes of the whole dense model.
        quantized_bytes: bytes of the whole quantized one.
        stored_bytes: bytes of what came of it.
    """

    rows: tuple[ResidualRow, ...]
    before: Closeness
    after: Closeness
    kept: bool
    dense_bytes: int
    quantized_bytes: int
    stored_bytes: int

    @property
    def branch_bytes(self) -> int:
        """Bytes of all branches."""
        return sum(row.branch_bytes for row in self.rows)

    def __str__(self) -> str:
        """How close the outputs are, with the branches and without; a table of the layers; the totals."""
        cells = [
            (
                row.name or "(model)",
                str(row.rank or "-"),
                f"{row.branch_bytes:,}",
                f"{row.quantized_bytes:,}",
                share(row.branch_bytes, row.quantized_bytes),
            )
            for row in self.rows
        ]
        columns = (
            ("layer", "left"),
            *((name, "right") for name in ("rank", "branch bytes", "quantized bytes", "ratio")),
        )
        footer = (
            f"in bytes: {self.stored_bytes:,}, quantized {self.quantized_bytes:,}, "
            f"dense {self.dense_bytes:,}",
        )
        table = render_table("Low-rank branches", columns, cells, footer)
        without = "without the branches, " if self.kept else "left out, as they bring nothing; without them, "
        return f"{self.after}\n{without}{self.before}\n{table}"


def add_residual(
    quantized: Model,
    dense: nn.Module,
    rank: int | None = None,
    *,
    budget: float | None = None,
    data: Data | None = None,
    include: Selector | Sequence[Selector] | None = None,
    exclude: Selector | Sequence[Selector] | None = None,
    inplace: bool = False,
) -> Model:
    """Put a low-rank branch beside each quantized linear layer, for what it lacks of the dense one.

        >>> quantize_(low := copy.deepcopy(model), Int8WeightOnlyConfig())     # torchao's, or anybody's
        >>> better = pc.add_residual(low, model, rank=16, data=batches)
        >>> print(pc.residual_report(better))

    A layer is quantized if its weight is not that of the `nn.Linear` of the same name in the dense model: a
    tensor subclass with `dequantize()`, a linear layer of another class, or plain rounded numbers. It stays
    as it is: y = f(x) + U (V x) + c. With data, both models run side by side, and each branch is fitted to
    what its layer lacks of the dense layer's output, behind the branches before it, weighed by what errors
    there do to the result (`calibration/branch_fit.py`). Of the data a fifth judges: where it comes no
    closer, the branches are left out with a warning.

    The sum is not a quantized weight, so nothing can be merged: `densify` knows no such layer. A branch is
    two `nn.Linear`, which quantizers take too.

    Args:
        quantized: made of `dense` by a quantizer.
        dense: the model as it was; left as it is.
        rank: of each branch, at most as large as the smaller side of each layer.
        budget: in place of a rank: bytes of the branches over those of the quantized layers. They are spread
            over the layers by what each of them loses, in ranks of multiples of 8.
        data: inputs of the model, as for `sketchify`: a few hundred samples of what it will be used for.
            Without, each branch is the best for the weight's own residual, and nothing judges it.
        include: layers that get a branch, by name, pattern, type or function; all if None.
        exclude: layers that get none, likewise. An output head costs most and often gains least.
        inplace: change the model given, in place of a copy.

    Returns:
        A model of the user's own class with `ResidualLinear` layers. Those that no batch reaches stay as
        they are.

    Warns:
        SketchQualityWarning: the branches bring held-out batches no closer, and are left out.

    Raises:
        ConfigError: neither rank nor budget is given, or both; or the budget holds no branch.
        ConfigTypeError: a model is no `nn.Module`, or cannot be copied; or an option is of another type.
        DataError: there is no batch, the model cannot run one, or NaN or Inf comes of it.
        NoTargetError: no linear layer differs from the dense model's.
        RankError: the rank is larger than a layer's smaller side.
        SelectorError: a selector matches no quantized layer.
        TeacherMismatchError: a layer has another size in the dense model.
        WeightError: a weight is on the meta device, or holds NaN or Inf.
        WrappedModelError: a model is wrapped in DDP, FSDP or torch.compile.
    """
    check_module(quantized)
    check_module(dense)
    check_type("inplace", inplace, bool)
    _check_size(rank, budget)
    with undisturbed(), without_fast_attention():
        twins = _selected(quantized, _twins(quantized, dense), include, exclude)
        calls = None if data is None else _calls(quantized, data)
        logits = None
        if calls is not None:
            logits = recognize_output(dense, learnt_of(calls)).logits
        ranks = _ranks(quantized, dense, twins, rank, budget, calls, logits)
        given = copy_sharing(quantized, {})
        result = quantized if inplace else cast(Model, copied(copy.deepcopy, quantized))
        layers = {name: _branched(result, name, twins[name], rank) for name, rank in ranks.items()}
        result = _put(result, layers)
        if calls is None:
            unknown = Closeness.unknown("no data")
            for name, layer in layers.items():
                _fill(layer, _of_weights(layer, twins[name]))
            return _kept(result, _report(layers, twins, dense, given, result, unknown, unknown, True))
        return _fitted(result, given, dense, layers, twins, ranks, calls, logits)


def load_residual(quantized: Model, state_dict: Mapping[str, Tensor], *, inplace: bool = False) -> Model:
    """Put branches that were saved beside the layers of a quantized model.

        >>> torch.save(better.state_dict(), path)                             # better: of `add_residual`
        >>> better = pc.load_residual(low, torch.load(path))                  # low: quantized the same way

    Args:
        quantized: the quantized model that the branches were fitted to.
        state_dict: of what `add_residual` made of it; branches alone are read, and all else may be missing.
        inplace: change the model given, in place of a copy.

    Raises:
        CheckpointMismatchError: the state dict holds no branch; or one whose tensors do not fit together, or
            whose layer the model lacks, or has in another size or of other quantized weights.
        ConfigTypeError: the model is no `nn.Module`, or cannot be copied; or the state dict is no mapping.
        WrappedModelError: the model is wrapped in DDP, FSDP or torch.compile.
    """
    check_module(quantized)
    check_type("inplace", inplace, bool)
    if not isinstance(state_dict, Mapping):
        raise ConfigTypeError(f"state_dict is a {type(state_dict).__name__}, wanted what state_dict() gave")
    names = [key.removesuffix(_UP).rstrip(".") for key in state_dict if key.endswith(_UP)]
    names = [name for name in names if dotted(name, "down.weight") in state_dict]
    if not names:
        raise CheckpointMismatchError(
            "the state dict holds no branch: wanted that of a model that add_residual made"
        )
    with undisturbed():
        result = quantized if inplace else cast(Model, copied(copy.deepcopy, quantized))
        layers = {}
        for name in names:
            saved = _branch(state_dict, name)
            like, (rank, inputs), outputs = saved[_UP], saved["down.weight"].shape, len(saved[_UP])
            try:
                layer = result.get_submodule(name)
            except AttributeError as error:
                raise CheckpointMismatchError(f"the model has no layer {name!r} for its branch") from error
            if _size_of(layer) != (outputs, inputs):
                raise CheckpointMismatchError(
                    f"{name} is {layer}: the branch given is of {inputs} inputs and {outputs} outputs"
                )
            layers[name] = ResidualLinear(layer, inputs, outputs, rank, device=like.device, dtype=like.dtype)
            for part, values in saved.items():
                copy_into(layers[name].get_parameter(part), values)
        for name, layer in layers.items():
            known = state_dict.get(dotted(name, MADE_FOR))
            if known is not None and not layer.has_weight_of(known):
                raise CheckpointMismatchError(
                    f"the quantized weight of {name} is another than the one that its branch in the state "
                    "dict was made for: wanted the dense model quantized in the same way"
                )
        return _put(result, layers)


def residual_report(model: nn.Module) -> ResidualReport:
    """What `add_residual` did to a model.

    Raises:
        ConfigTypeError: the model is no `nn.Module`.
        NoTargetError: it did nothing to it, or the model was loaded since.
    """
    report: ResidualReport | None = kept_attribute(model, RESIDUAL_ATTRIBUTE)
    if report is None:
        raise NoTargetError(f"{type(model).__name__} holds no report of branches: call add_residual first")
    return report


_UP, _PARTS = "up.weight", ("up.weight", "up.bias", "down.weight")


def _branch(state_dict: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The tensors (O, r), (O,) and (r, I) of a branch."""
    saved = {dotted(name, part): state_dict.get(dotted(name, part)) for part in _PARTS}
    up, bias, down = shapes = [tuple(v.shape) if isinstance(v, Tensor) else () for v in saved.values()]
    if len(up) != 2 or (bias, down[:-1]) != (up[:1], up[1:]):
        given = f"{', '.join(saved)} of {', '.join(map(str, shapes))}"
        raise CheckpointMismatchError(f"given {given}: wanted tensors of (O, r), (O,) and (r, I)")
    return dict(zip(_PARTS, saved.values(), strict=True))


def _check_size(rank: int | None, budget: float | None) -> None:
    if (rank is None) == (budget is None):
        raise ConfigError(f"give either rank= or budget=, got {rank=} and {budget=}")
    if budget is not None and not read_number("budget", budget, "a number above 0") > 0:
        raise ConfigError(f"{budget=}, wanted a number above 0")


def _size_of(layer: nn.Module) -> tuple[object, object]:
    """(O, I) of what calls itself a linear layer."""
    return getattr(layer, "out_features", None), getattr(layer, "in_features", None)


def _twins(quantized: nn.Module, dense: nn.Module) -> dict[str, nn.Linear]:
    """The dense layers of the quantized ones, by name."""
    theirs = {
        name: layer
        for name, layer in dense.named_modules(remove_duplicate=False)  # a quantizer may have made two of one
        if isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward
    }
    found = {}
    for name, layer in quantized.named_modules():
        twin = theirs.get(name)
        if twin is None or isinstance(layer, SketchedLayer | ResidualLinear) or type(layer) in _NOT_CALLED:
            continue
        if _size_of(layer) == (None, None):
            continue
        if _size_of(layer) != (twin.out_features, twin.in_features):
            raise TeacherMismatchError(f"{name} is {layer}, and {twin} in the dense model")
        for which, one in (("quantized", layer), ("dense", twin)):
            for tensor in (*one.parameters(), *one.buffers()):
                check_loaded(tensor, f"{name} of the {which} model")
        matrix = matrix_of(layer, twin.weight)
        check_values(matrix, f"the weight of {name}, {layer},")
        if not torch.equal(matrix, twin.weight):
            found[name] = twin
    if not found:
        branched = sum(isinstance(layer, ResidualLinear) for layer in quantized.modules())
        raise NoTargetError(
            f"no linear layer of {type(quantized).__name__} differs from that of the same name in the dense "
            f"model, {type(dense).__name__}, which has {len(theirs)}: wanted a quantized copy of it"
            + (f"; {branched} have a branch beside them already" if branched else "")
        )
    return found


# Its owner reads its weight and never calls it.
_NOT_CALLED = (nn.modules.linear.NonDynamicallyQuantizableLinear,)


def _selected(
    model: nn.Module, twins: Mapping[str, nn.Linear], include: object, exclude: object
) -> dict[str, nn.Linear]:
    layers = {name: model.get_submodule(name) for name in twins}

    def picked(option: str, given: Any) -> set[str]:
        names: set[str] = set()
        for one in selectors(given):
            found = {name for name, layer in layers.items() if selects(one, layer, name)}
            if not found:
                raise SelectorError(f"{option}: {one!r} matches none of the {len(layers)} quantized layers")
            names |= found
        return names

    kept = set(layers) if include is None else picked("include", include)
    kept -= picked("exclude", exclude)
    if not kept:
        raise NoTargetError(f"{include=} and {exclude=} leave no quantized layer of {len(layers)}")
    return {name: twin for name, twin in twins.items() if name in kept}


def _calls(model: nn.Module, data: Data) -> list[Call]:
    return spread_out(divided(copy_sharing(model, {}), record_calls(model, data), _BATCHES))


def _ranks(
    quantized: nn.Module,
    dense: nn.Module,
    twins: Mapping[str, nn.Linear],
    rank: int | None,
    budget: float | None,
    calls: Sequence[Call] | None,
    logits: Logits,
) -> dict[str, int]:
    """The rank of each branch, by name."""
    if rank is not None:
        for name, twin in twins.items():
            check_rank(rank, min(twin.weight.shape), name or type(twin).__name__)
        return dict.fromkeys(twins, rank)
    assert budget is not None
    residuals = {name: _lacking(quantized.get_submodule(name), twin) for name, twin in twins.items()}
    learnt = None if calls is None else learnt_of(calls)
    losses = losses_by_rank(dense, twins, residuals, learnt, logits=logits)
    sizes = {name: sum(twin.weight.shape) * twin.weight.element_size() for name, twin in twins.items()}
    besides = {
        name: len(twin.weight) * twin.weight.element_size() + MADE_FOR_BYTES for name, twin in twins.items()
    }
    stored = sum(_bytes(quantized.get_submodule(name)) for name in twins)
    ranks = spread_ranks(losses, sizes, besides, budget * stored)
    if not ranks:
        raise ConfigError(
            f"{budget=} is {budget * stored:,.0f} bytes, which holds no branch of rank {RANK_STEP}"
        )
    return ranks


def _branched(model: nn.Module, name: str, twin: nn.Linear, rank: int) -> ResidualLinear:
    weight = twin.weight
    layer = ResidualLinear(
        model.get_submodule(name),
        twin.in_features,
        twin.out_features,
        rank,
        device=weight.device,
        dtype=weight.dtype,
    )
    for parameter in (*layer.down.parameters(), *layer.up.parameters()):
        parameter.requires_grad_(weight.requires_grad)
    layer.remember_weight()
    return layer


def _put(model: Model, layers: Mapping[str, ResidualLinear]) -> Model:
    """The layers around those that they hold, wherever the model holds them."""
    return cast(Model, replace_inside(model, {layer.quantized: layer for layer in layers.values()}))


def _fill(layer: ResidualLinear, branch: Branch) -> None:
    copy_into(layer.up.weight, branch.up)
    copy_into(layer.up.bias, branch.shift)
    copy_into(layer.down.weight, branch.down)


def _lacking(layer: nn.Module, twin: nn.Linear) -> Tensor:
    """What the weight of a quantized layer lacks (O, I), float64."""
    return twin.weight.detach().double() - matrix_of(layer, twin.weight).double()


def _of_weights(layer: ResidualLinear, twin: nn.Linear) -> Branch:
    up, down = best_of_matrix(_lacking(layer.quantized, twin), layer.rank)
    return Branch(up, down, torch.zeros(len(up), dtype=up.dtype, device=up.device))


def _fitted(
    model: Model,
    quantized: nn.Module,
    dense: nn.Module,
    layers: Mapping[str, ResidualLinear],
    twins: Mapping[str, nn.Linear],
    ranks: Mapping[str, int],
    calls: Sequence[Call],
    logits: Logits,
) -> Model:
    """The model with fitted branches, or as it was where they bring nothing."""
    reached: set[str] = set()

    def put(name: str, branch: Branch) -> None:
        _fill(layers[name], branch)
        reached.add(name)

    def lacking(name: str) -> Tensor:
        return _lacking(layers[name].quantized, twins[name])

    before, after = fit_branches(model, layers, dense, twins, ranks, calls, put, centred=True, start=lacking)
    kept = after < before
    held_out = judged_of(calls)
    inputs = counted(len(held_out), "held-out batch") if len(calls) > len(held_out) else "the data fitted to"
    sides = [copy_sharing(one, {}) for one in (dense, quantized, model)]
    without, with_branches = (
        compare_models(sides[0], one, held_out, logits=logits, inputs=inputs) for one in sides[1:]
    )
    left_out = [layer for name, layer in layers.items() if name not in reached or not kept]
    result = cast(Model, replace_inside(model, {layer: layer.quantized for layer in left_out}))
    there = {name: layer for name, layer in layers.items() if layer not in left_out}
    report = _report(there, twins, dense, quantized, result, without, with_branches, kept)
    if not kept:
        warnings.warn(
            f"low-rank branches fitted to this data bring results no closer to the dense model's on others: "
            f"{after:.3g} off, {before:.3g} without; they are left out. Give more data, or a smaller rank",
            SketchQualityWarning,
            stacklevel=3,
        )
    return _kept(result, report)


def _report(
    layers: Mapping[str, ResidualLinear],
    twins: Mapping[str, nn.Linear],
    dense: nn.Module,
    quantized: nn.Module,
    result: nn.Module,
    before: Closeness,
    after: Closeness,
    kept: bool,
) -> ResidualReport:
    rows = []
    for name in twins:
        layer = layers.get(name)
        rows.append(
            ResidualRow(
                name,
                0 if layer is None else layer.rank,
                0 if layer is None else _bytes(layer.down) + _bytes(layer.up) + bytes_of(layer.made_for),
                _bytes(quantized.get_submodule(name)),
            )
        )
    return ResidualReport(
        tuple(rows), before, after, kept, *(_bytes(one) for one in (dense, quantized, result))
    )


def _kept(model: Model, report: ResidualReport) -> Model:
    keep_attribute(model, RESIDUAL_ATTRIBUTE, report)
    return model


def _bytes(module: nn.Module) -> int:
    return sum(map(bytes_of, tensors_of([module])))
