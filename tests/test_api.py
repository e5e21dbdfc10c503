"""The contract of `sketchify`: what it leaves alone, what it keeps to, what comes of each option."""

import copy
import itertools
import pickle
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import panther_compile as pc

OPTIONS = {"progress": False, "min_params": 0, "allow_slower": True}


def mlp(*widths, bias=True):
    return nn.Sequential(*(nn.Linear(i, o, bias=bias) for i, o in itertools.pairwise(widths)))


def snapshot(model):
    """Everything of a model that a user could miss: objects, bits, flags, hooks, attributes."""
    state = {}
    for name, module in model.named_modules():
        attributes = {
            key: (id(value), repr(value))
            for key, value in vars(module).items()
            if not key.startswith("_") or key.endswith("_hooks")
        }
        state[name] = (id(module), type(module), module.training, attributes, list(vars(module)))
    tensors = {
        name: (id(t), t.detach().clone(), t.requires_grad, t._version, t.data_ptr())
        for name, t in (*model.named_parameters(), *model.named_buffers())
    }
    return state, tensors, list(model.state_dict())


def assert_untouched(model, before):
    after = snapshot(model)
    assert after[0] == before[0]
    assert after[2] == before[2]
    assert list(after[1]) == list(before[1])
    for name, (identity, values, *rest) in before[1].items():
        assert after[1][name][0] == identity
        assert torch.equal(after[1][name][1].nan_to_num(), values.nan_to_num())
        assert list(after[1][name][2:]) == rest


class Rich(nn.Module):
    """One of everything: buffers, frozen parts, hooks, lists, attributes."""

    def __init__(self):
        super().__init__()
        self.body = mlp(32, 48, 32)
        self.norm = nn.BatchNorm1d(32)
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.hooked = nn.Linear(32, 32)
        self.hooked.register_forward_hook(_double)
        self.body.register_forward_pre_hook(_add_one)
        self.register_buffer("offset", torch.randn(32))
        self.register_buffer("scratch", torch.randn(3), persistent=False)
        self.scales = nn.ParameterList([nn.Parameter(torch.randn(32))])
        self.layers = [self.body[0], {"second": self.body[1]}, (self.frozen, 1)]
        self.config = {"width": 32, "names": ["a", "b"]}
        self.calls = 0
        self.norm.eval()
        self.head = nn.Linear(32, 5)

    def forward(self, x):
        self.calls += 1
        x = self.layers[1]["second"](self.layers[0](x)) + self.body(x)
        x = self.hooked(self.layers[2][0](self.norm(x))) * self.scales[0] + self.offset
        return self.head(x)


def _double(module, args, output):
    return 2 * output


def _add_one(module, args):
    return (args[0] + 1,)


FAILURES = {
    "selector": {"include": "nothing"},
    "ratio": {"ratio": 7.0},
    "target": {"include": lambda module, name: False},
    "no rank fits": {"ratio": 1e-4},
    "conflict": {"sketch": "srht", "method": "svd"},
    "meta device": {"device": "meta"},
}


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("failure", FAILURES)
def test_failure_leaves_the_model_as_it_was(failure, inplace):
    model = Rich()
    before = snapshot(model)
    with pytest.raises(pc.PantherError):
        pc.sketchify(model, **{"ratio": 0.5, **OPTIONS, **FAILURES[failure], "inplace": inplace})
    assert_untouched(model, before)


@pytest.mark.parametrize("inplace", [False, True])
def test_bad_weight_leaves_the_model_as_it_was(inplace):
    model = Rich()
    model.head.weight.data[0, 0] = torch.nan
    before = snapshot(model)
    with pytest.raises(pc.PantherError, match=r"head\.weight"):
        pc.sketchify(model, 0.5, include="*", inplace=inplace, **OPTIONS)
    assert_untouched(model, before)


@pytest.mark.parametrize("inplace", [False, True])
def test_failure_in_the_middle_of_the_work_leaves_the_model_as_it_was(monkeypatch, inplace):
    made = []

    def fail(*args, **kwargs):
        made.append(pc.SketchedLinear)
        if len(made) == 3:
            raise MemoryError
        return original(*args, **kwargs)

    original = pc.SketchedLinear.from_factors
    monkeypatch.setattr(pc.SketchedLinear, "from_factors", fail)
    model = Rich()
    before = snapshot(model)
    with pytest.raises(MemoryError):
        pc.sketchify(model, 0.5, inplace=inplace, **OPTIONS)
    assert_untouched(model, before)


@pytest.mark.parametrize("train", [True, False])
def test_success_leaves_the_model_as_it_was(train):
    model = Rich().train(train)
    model.norm.eval()
    before = snapshot(model)
    small = pc.sketchify(model, 0.5, **OPTIONS)
    pc.plan_sketch(model, 0.5, **OPTIONS)
    pc.sketch_report(small)
    pc.densify(small)
    assert_untouched(model, before)
    shared = {t.data_ptr() for t in model.state_dict().values()}
    assert shared.isdisjoint(t.data_ptr() for t in small.state_dict().values())


def test_what_is_not_sketched_is_kept():
    model = Rich().train()
    model.norm.eval()
    small = pc.sketchify(model, 0.5, **OPTIONS)
    assert type(small) is Rich
    assert small.calls == 0
    assert small.config == model.config
    assert small.config is not model.config
    for name in ("offset", "scratch", "scales.0", "norm.weight", "hooked.weight", "head.weight"):
        owner, _, leaf = name.rpartition(".")
        kept, old = getattr(small.get_submodule(owner), leaf), getattr(model.get_submodule(owner), leaf)
        assert torch.equal(kept, old)
        assert kept.requires_grad == old.requires_grad
    assert small.training
    assert small.body[0].training
    assert small.body[0].down.training
    assert not small.norm.training
    assert not any(p.requires_grad for p in small.frozen.parameters())
    assert all(p.requires_grad for p in small.body.parameters())
    assert isinstance(small.frozen, pc.SketchedLinear)
    assert type(small.hooked) is nn.Linear
    assert small.hooked._forward_hooks
    assert small.body._forward_pre_hooks
    assert small.layers[0] is small.body[0]
    assert small.layers[1]["second"] is small.body[1]
    assert small.layers[2] == (small.frozen, 1)


def test_in_place_is_the_same_object_changed_everywhere():
    model = Rich()
    norm, offset, bias = model.norm, model.offset, model.body[0].bias
    small = pc.sketchify(model, 0.5, inplace=True, **OPTIONS)
    assert small is model
    assert isinstance(model.body[0], pc.SketchedLinear)
    assert model.layers[0] is model.body[0]
    assert model.layers[1]["second"] is model.body[1]
    assert model.layers[2] == (model.frozen, 1)
    assert model.norm is norm
    assert model.offset is offset
    assert model.body[0].bias is bias
    model.eval()
    again = pc.sketchify(Rich(), 0.5, **OPTIONS)
    assert [type(m) for m in model.modules()] == [type(m) for m in again.modules()]


def test_in_place_gives_the_bits_of_the_copy():
    model = Rich().eval()
    x = torch.randn(4, 32)
    wanted = pc.sketchify(model, 0.5, **OPTIONS)(x)
    assert torch.equal(pc.sketchify(model, 0.5, inplace=True, **OPTIONS)(x), wanted)


@pytest.mark.parametrize("inplace", [False, True])
def test_bare_layer_comes_back_sketched(inplace):
    layer = nn.Linear(64, 64)
    small = pc.sketchify(layer, 0.5, inplace=inplace, **OPTIONS)
    assert isinstance(small, pc.SketchedLinear)
    assert type(layer) is nn.Linear
    assert pc.sketch_report(small).achieved_ratio <= 0.5
    assert type(pc.densify(small)) is nn.Linear


def test_ratio_one_changes_nothing():
    model = Rich().eval()
    same = pc.sketchify(model, 1.0, include="*", **OPTIONS)
    assert [type(m) for m in same.modules()] == [type(m) for m in model.modules()]
    assert list(same.state_dict()) == list(model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(same.parameters(), model.parameters(), strict=True))
    x = torch.randn(4, 32)
    assert torch.equal(same(x), model(x))
    report = pc.sketch_report(same)
    assert report.achieved_ratio == 1.0
    assert report.stored_numbers == report.dense_numbers


def test_full_rank_reproduces_the_layer():
    layer = nn.Linear(40, 64)
    x = torch.randn(5, 40)
    full = pc.SketchedLinear.from_dense(layer, rank=40)
    torch.testing.assert_close(full(x), layer(x), rtol=1e-4, atol=1e-5)


def test_low_rank_weight_is_reproduced_at_that_rank():
    model = mlp(64, 64, 64)
    with torch.no_grad():
        for layer in model:
            layer.weight.copy_(torch.randn(64, 6) @ torch.randn(6, 64) / 8)
    x = torch.randn(5, 64)
    torch.testing.assert_close(
        pc.sketchify(model, 0.5, include="*", **OPTIONS)(x), model(x), rtol=1e-3, atol=1e-4
    )


RANDOMIZED = {"method": "randomized", **OPTIONS}


def factors(model):
    return {name: t for name, t in model.state_dict().items() if ".down." in name or ".up." in name}


def same_bits(a, b):
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


def test_same_seed_gives_the_same_bits_and_another_seed_others():
    model = mlp(64, 48, 64, 64)
    first = factors(pc.sketchify(model, 0.4, seed=1, **RANDOMIZED))
    torch.randn(7)
    assert same_bits(first, factors(pc.sketchify(model, 0.4, seed=1, **RANDOMIZED)))
    assert not same_bits(first, factors(pc.sketchify(model, 0.4, seed=2, **RANDOMIZED)))


def test_layer_has_the_same_bits_whatever_else_is_sketched():
    model = nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(48, 48), "c": nn.Linear(64, 64)})
    turned = nn.ModuleDict({name: model[name] for name in ("c", "b", "a")})
    each = {"*": 0.4, "c": 0.4, "a": 0.4}
    ratio = {name: each[name] for name in ("a", "c", "*")}
    one, other = (factors(pc.sketchify(m, ratio, **RANDOMIZED)) for m in (model, turned))
    assert set(one) == set(other)
    assert all(torch.equal(one[name], other[name]) for name in one)
    alone = factors(pc.sketchify(model, 0.4, include="a", **RANDOMIZED))
    assert all(torch.equal(one[name], alone[name]) for name in alone)


def test_exact_method_depends_on_no_name_and_no_seed():
    model = mlp(64, 64, bias=False)
    one = pc.sketchify(model, 0.4, method="svd", seed=1, **OPTIONS)
    other = pc.sketchify(nn.ModuleDict({"x": model[0]}), 0.4, method="svd", seed=2, **OPTIONS)
    assert same_bits(one[0].state_dict(), other["x"].state_dict())


class DrawsInForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp(64, 64, 64)

    def forward(self, x):
        if torch.rand(()) < 0.5 or random.random() < 0.5:
            x = x + torch.randn(64)
        return self.body(x)


@pytest.mark.parametrize("method", ["svd", "randomized"])
def test_global_random_state_is_kept(method):
    model = DrawsInForward()
    state, python_state = torch.get_rng_state(), random.getstate()
    small = pc.sketchify(model, 0.5, method=method, **OPTIONS)
    pc.plan_sketch(model, 0.5, **OPTIONS)
    with pytest.raises(pc.PantherError):
        pc.sketchify(model, 0.5, include="nothing", **OPTIONS)
    assert torch.equal(state, torch.get_rng_state())
    assert random.getstate() == python_state
    pc.densify(small)
    assert torch.equal(state, torch.get_rng_state())


SURROUNDINGS = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("surrounding", SURROUNDINGS)
@pytest.mark.parametrize("method", ["svd", "randomized"])
def test_surroundings_make_no_difference(surrounding, method):
    model = mlp(64, 64, 64, 64)
    wanted = pc.sketchify(model, 0.5, method=method, **OPTIONS)
    with SURROUNDINGS[surrounding]():
        found = pc.sketchify(model, 0.5, method=method, **OPTIONS)
        dense = pc.densify(wanted)
    assert same_bits(found.state_dict(), wanted.state_dict())
    assert same_bits(dense.state_dict(), pc.densify(wanted).state_dict())
    assert all(p.requires_grad and not p.is_inference() for p in found.parameters())


def test_model_made_in_inference_mode():
    with torch.inference_mode():
        model = mlp(64, 64, 64)
    assert isinstance(pc.sketchify(model, 0.5, **OPTIONS)[0], pc.SketchedLinear)


# ------------------------------------------------------------------------------- a second time


def test_sketching_again_leaves_sketched_layers_alone():
    model = pc.sketchify(mlp(64, 64, 64), 0.5, **OPTIONS)
    with pytest.raises(pc.PantherError, match=r"\n  0: already sketched\n  1: already sketched"):
        pc.sketchify(model, 0.25, **OPTIONS)


def test_two_rounds_sketch_two_parts_and_the_report_knows_both():
    model = nn.ModuleDict({"a": mlp(64, 64, 64), "attn": nn.MultiheadAttention(64, 4), "b": mlp(64, 64, 64)})
    first = pc.sketchify(model, 0.5, exclude="b.*", **OPTIONS)
    kept = first["a"][0].up.weight.clone()
    plan = pc.plan_sketch(first, 0.25, exclude="a.*", **OPTIONS)
    assert {line.name for line in plan.layers if line.reason == "already sketched"} == {"a.0", "a.1", "attn"}
    second = pc.sketchify(first, 0.25, exclude="a.*", **OPTIONS)
    assert torch.equal(second["a"][0].up.weight, kept)
    assert isinstance(second["b"][0], pc.SketchedLinear)
    report = pc.sketch_report(second)
    assert [row.name for row in report.sketched] == [
        *("a.0", "a.1"),
        *(f"attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "out_proj")),
        *("b.0", "b.1"),
    ]
    assert all(row.error is not None for row in report.sketched)
    assert report.ratio_asked == "0.5, then 0.25"
    assert report.stored_numbers == sum(one.numel() for one in second.parameters())
    assert report.dense_numbers == sum(one.numel() for one in model.parameters())


def test_layer_sketched_by_hand_is_left_alone():
    model = nn.Sequential(pc.SketchedLinear.from_dense(nn.Linear(64, 64), ratio=0.5), nn.Linear(64, 64))
    small = pc.sketchify(model, 0.5, **OPTIONS)
    assert isinstance(small[1], pc.SketchedLinear)
    assert len(pc.sketch_report(small).sketched) == 2


# ---------------------------------------------------------------------------------------- copies


@pytest.mark.parametrize(
    "make", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_copy_is_a_model_of_its_own(make):
    small = pc.sketchify(Rich().eval(), 0.5, **OPTIONS)
    twin = make(small)
    x = torch.randn(4, 32)
    wanted = small(x)
    assert torch.equal(twin(x), wanted)
    assert pc.sketch_report(twin) == pc.sketch_report(small)
    with torch.no_grad():
        twin.body[0].up.weight.zero_()
    assert not torch.equal(twin(x), wanted)
    assert torch.equal(small(x), wanted)


def test_densify_in_place_is_the_same_object():
    small = pc.sketchify(Rich().eval(), 0.5, **OPTIONS)
    x = torch.randn(4, 32)
    wanted = small(x)
    plain = pc.densify(small, inplace=True)
    assert plain is small
    assert type(plain.layers[0]) is nn.Linear
    torch.testing.assert_close(plain(x), wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(pc.PantherError, match="holds no sketched"):
        pc.sketch_report(plain)


@pytest.mark.parametrize("inplace", [False, True])
def test_densify_keeps_hooks_of_layers(inplace):
    """They were dropped without a word: one that scales what a layer gives was no longer there."""

    class Watched(nn.Sequential):
        def note(self, module, args, out):
            self.seen = out

    small = pc.sketchify(Watched(nn.Linear(48, 48), nn.Linear(48, 48)), 0.5, include="*", **OPTIONS)
    handle = small[0].register_forward_hook(lambda module, args, out: out * 2)
    small[1].register_forward_pre_hook(
        lambda module, args, kwargs: ((args[0] + 1,), kwargs), with_kwargs=True
    )
    small[1].register_forward_hook(small.note)
    small[1].register_full_backward_hook(lambda module, given, had: (3 * given[0],))
    x = torch.randn(4, 48, requires_grad=True)
    wanted = small(x)
    (gradient,) = torch.autograd.grad(wanted.sum(), x)
    small.seen = None
    plain = pc.densify(small, inplace=inplace)
    found = plain(x)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), x)[0], gradient)
    assert torch.equal(plain.seen, found)
    assert inplace or small.seen is None
    handle.remove()
    assert bool(plain[0]._forward_hooks) is not inplace


def test_densify_keeps_ties_and_flags():
    model = mlp(64, 64, 64, 64)
    model[1].weight, model[2].bias = model[0].weight, model[0].bias
    model[0].weight.requires_grad_(False)
    small = pc.sketchify(model, 0.5, include="*", **OPTIONS)
    assert small[2].bias is small[0].bias
    plain = pc.densify(small)
    assert plain[1].weight is plain[0].weight
    assert plain[2].bias is plain[0].bias
    assert [p.requires_grad for p in plain.parameters()] == [p.requires_grad for p in model.parameters()]


def test_functional_call_and_gradients():
    small = pc.sketchify(mlp(32, 32, 32), 0.5, include="*", **OPTIONS)
    x = torch.randn(3, 32)
    state = {name: torch.zeros_like(t) for name, t in small.state_dict().items()}
    assert not torch.func.functional_call(small, state, (x,)).any()
    F.mse_loss(small(x), x).backward()
    assert all(p.grad is not None for p in small.parameters())
