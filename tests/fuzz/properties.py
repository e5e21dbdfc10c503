"""What holds for every model: each property is a sentence that is printed where it does not."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import tempfile
import warnings
from typing import Any

import torch
from fuzz.cases import LENGTH, Case, batch, build, data_of, extra
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_flatten

import panther_compile as pc
from panther_compile.errors import PantherError

# Relative to the largest number: the same factors summed in another order, and a sketch that loses nothing.
CLOSE = 1e-8
EXACT = {torch.float32: 2e-3, torch.float64: 1e-5, torch.bfloat16: 0.3}


@dataclasses.dataclass
class Outcome:
    """What a model gave: the tensors of its result and how they were held, or the error."""

    tensors: list[Any]
    shape: Any
    error: Exception | None = None


def run(model: nn.Module, inputs: dict[str, Tensor]) -> Outcome:
    """Call a model in eval mode; an error of its own is an outcome too."""
    mode = model.training
    try:
        with torch.no_grad():
            tensors, shape = tree_flatten(model.eval()(**inputs))
        return Outcome(tensors, shape)
    except Exception as error:
        return Outcome([], None, error)
    finally:
        model.train(mode)


def probes(case: Case) -> dict[str, dict[str, Tensor]]:
    """Inputs like those of the data, and others."""
    found = {
        "like the data": {"x": batch(case, 1)},
        "negative": {"x": batch(case, 2, sign=-1)},
        "positive": {"x": batch(case, 2, sign=1)},
        "one row": {"x": batch(case, 3, rows=1)},
        "longer": {"x": batch(case, 4, length=LENGTH + 2)},
        "with the optional argument": {"x": batch(case, 5), "extra": extra(case)},
        "no rows": {"x": batch(case, 6, rows=0)},
    }
    return found


def snapshot(model: nn.Module) -> dict[str, Any]:
    """All that a caller could see of a model."""
    seen: dict[str, Any] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        hooks = [len(getattr(module, kind)) for kind in ("_forward_hooks", "_forward_pre_hooks")]
        seen[f"module {name}"] = (id(module), type(module), module.training, hooks, sorted(vars(module)))
    for name, tensor in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        seen[f"tensor {name}"] = (id(tensor), tensor.requires_grad, tensor.dtype, tensor.detach().clone())
        seen[f"gradient {name}"] = tensor.grad is None
    return seen


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    found = sorted(before.keys() ^ after.keys())
    for key in before.keys() & after.keys():
        one, other = before[key], after[key]
        if isinstance(one, tuple) and isinstance(one[-1], Tensor):
            same = one[:-1] == other[:-1] and torch.equal(one[-1], other[-1])
        else:
            same = one == other
        if not same:
            found.append(key)
    return found


def distance(found: Tensor, wanted: Tensor) -> float:
    if not wanted.numel():
        return 0.0
    scale = float(wanted.abs().max()) + 1e-3
    return float((found.double() - wanted.double()).abs().max()) / scale


def assert_alike(what: str, found: Outcome, wanted: Outcome, within: float | None) -> None:
    """Same structure, shapes and dtypes, and numbers within a relative distance, 0 for bitwise, if given."""
    assert found.error is None, f"{what}: raises {type(found.error).__name__}: {found.error}"
    assert found.shape == wanted.shape, f"{what}: another structure"
    for one, other in zip(found.tensors, wanted.tensors, strict=True):
        assert one.shape == other.shape, f"{what}: shape {tuple(one.shape)} for {tuple(other.shape)}"
        assert one.dtype == other.dtype, f"{what}: {one.dtype} for {other.dtype}"
        assert bool(one.isfinite().all()) or not bool(other.isfinite().all()), f"{what}: not finite"
        if within == 0:
            assert torch.equal(one, other), f"{what}: not the same to the bit"
        elif within is not None:
            off = distance(one, other)
            assert off <= within, f"{what}: off by {off:.1e} of the largest number"


def tolerance(model: nn.Module, table: dict[torch.dtype, float]) -> float:
    """The one of the coarsest type in a model."""
    return max(table[one.dtype] for one in model.parameters())


def stored_numbers(model: nn.Module) -> int:
    tensors = {id(one): one for one in (*model.parameters(), *model.buffers())}
    return sum(one.numel() for one in tensors.values())


def with_weights_made(model: nn.Module, small: nn.Module) -> nn.Module:
    """A copy in which layers that were sketched hold the weight that they make of others in each call."""
    model, kept = copy.deepcopy(model), dict(small.named_modules())
    for name, module in list(model.named_modules()):
        if parametrize.is_parametrized(module, "weight") and not parametrize.is_parametrized(kept[name]):
            parametrize.remove_parametrizations(module, "weight")
    return model


def check(case: Case) -> str:
    """Raise AssertionError with the promise that is broken, or say how it ended: "sketched", or an error."""
    model = build(case)
    wanted = {name: run(model, inputs) for name, inputs in probes(case).items()}
    given = copy.deepcopy(model) if case.options.get("inplace") else model
    before, random = snapshot(model), torch.random.get_rng_state()
    data = data_of(case)
    small = sketch(given, data, case)
    if isinstance(small, PantherError):
        assert not differences(before, snapshot(model)), f"after {type(small).__name__} the model is changed"
        assert str(small), f"{type(small).__name__} says nothing"
        return type(small).__name__
    assert torch.equal(random, torch.random.get_rng_state()), "the global generator was drawn from"
    changed = differences(before, snapshot(model))
    assert not changed, f"the user's model is changed: {changed[:5]}"
    assert type(small) is type(model), f"{type(small).__name__} for {type(model).__name__}"
    assert small.training == model.training, "another mode"
    assert {n: m.training for n, m in model.named_modules()}.items() <= {
        n: m.training for n, m in [*small.named_modules(), *model.named_modules()]
    }.items(), "a module's mode"
    check_outputs(case, small, wanted)
    check_report(case, model, small)
    if not pc.sketch_report(small).sketched:
        return "left dense"
    check_copies(case, model, small)
    if (
        case.low_rank
        and case.data == "none"
        and case.options.get("attention") != "favor"
        and not branches(case)
    ):
        check_exact(case, model, small, wanted)
    check_gradients(model, small, case)
    return "sketched"


def sketch(model: nn.Module, data: Any, case: Case) -> nn.Module | PantherError:
    options: dict[str, Any] = {"progress": False, "min_params": 0, "allow_slower": True, **case.options}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(data|made-up inputs) never reached")
        try:
            return pc.sketchify(model, data=data, **options)
        except PantherError as error:
            return error


def check_outputs(case: Case, small: nn.Module, wanted: dict[str, Outcome]) -> None:
    """Runs wherever the dense model ran, with results of the same shapes and dtypes."""
    for name, inputs in probes(case).items():
        if wanted[name].error is None:
            assert_alike(f"input {name}", run(small, inputs), wanted[name], None)


def check_report(case: Case, model: nn.Module, small: nn.Module) -> None:
    """The budget is kept, and what the report counts is what there is."""
    report = pc.sketch_report(small)
    ratio = case.options["ratio"]
    assert report.replaced_stored_numbers <= ratio * report.replaced_dense_numbers, (
        f"budget: {report.replaced_stored_numbers} of {report.replaced_dense_numbers}, asked {ratio}"
    )
    dense = stored_numbers(with_weights_made(model, small))
    assert report.dense_numbers == dense, f"report: {report.dense_numbers} dense numbers, there are {dense}"
    assert report.stored_numbers == stored_numbers(small), (
        f"report: {report.stored_numbers} stored numbers, there are {stored_numbers(small)}"
    )
    rows = sum(row.stored_numbers for row in report.sketched)
    rows += 0 if report.plan is None else sum(line.dense_numbers for line in report.plan.whole)
    assert rows == report.replaced_stored_numbers, (
        f"report: rows store {rows}, replaced are {report.replaced_stored_numbers}"
    )
    assert str(report), "an empty report"


def can_be_pickled(model: nn.Module) -> bool:
    try:
        pickle.dumps(model)
    except Exception:
        return False
    return True


def check_copies(case: Case, model: nn.Module, small: nn.Module) -> None:
    """Copied, pickled, saved and loaded it gives the same to the bit; multiplied out, nearly."""
    inputs = probes(case)["like the data"]
    wanted = run(small, inputs)
    if wanted.error is not None:
        return
    copied = copy.deepcopy(small)
    assert_alike("copied", run(copied, inputs), wanted, 0)
    if can_be_pickled(model):
        assert_alike("pickled", run(pickle.loads(pickle.dumps(small)), inputs), wanted, 0)
    with tempfile.TemporaryDirectory() as folder:
        pc.save_sketched(small, folder)
        loaded = pc.load_sketched(build(case, seed=case.seed + 1), folder)
    assert_alike("saved and loaded", run(loaded, inputs), wanted, 0)
    assert {name: p.requires_grad for name, p in loaded.named_parameters()} == {
        name: p.requires_grad for name, p in small.named_parameters()
    }, "loaded: other parameters, or others are frozen"
    if case.options.get("attention") != "favor":
        assert_alike("multiplied out", run(pc.densify(small), inputs), wanted, None)
        # In double precision, which models of bfloat16 and norms of small numbers do not round away.
        precise = copy.deepcopy(small).double()
        inputs = {key: one.double() if one.is_floating_point() else one for key, one in inputs.items()}
        dense, wanted = pc.densify(precise), run(precise, inputs)
        within = None if branches(case) else CLOSE
        if wanted.error is None:
            assert_alike("multiplied out", run(dense, inputs), wanted, within)
        assert not any(type(module).__name__.startswith("Sketched") for module in dense.modules())


def branches(case: Case) -> bool:
    """Whether rounding may lead another way through the model."""
    return "test='sum'" in repr(case.parts) or "only_sometimes" in repr(case.parts)


def check_exact(case: Case, model: nn.Module, small: nn.Module, wanted: dict[str, Outcome]) -> None:
    """A sketch that loses nothing gives the dense model's results."""
    for name, inputs in probes(case).items():
        if wanted[name].error is None:
            within = tolerance(model, EXACT)
            assert_alike(f"exact, input {name}", run(small, inputs), wanted[name], within)


def check_gradients(model: nn.Module, small: nn.Module, case: Case) -> None:
    """Trains wherever the dense model does."""
    if case.tokens != "no":
        return

    def gradient(module: nn.Module) -> Tensor:
        x = batch(case, 9).requires_grad_()
        result = module(x)
        tensors, _ = tree_flatten(result)
        return torch.autograd.grad(sum(one.float().square().mean() for one in tensors), x)[0]

    dense = copy.deepcopy(model)
    try:
        wanted = gradient(dense)
    except Exception:
        return
    found = gradient(copy.deepcopy(small))
    assert found.shape == wanted.shape
    assert bool(found.isfinite().all()) or not bool(wanted.isfinite().all()), "gradient: not finite"
