"""`sketchify` on models that share weights or read them: they stay shared, or dense with a reason."""

import copy

import pytest
import torch
import torch.nn.functional as F
from any_model.sketching import assert_close, low_rank_, mlp, reasons, sketch
from torch import fx, nn

import panther_compile as pc


def test_shared_module_stays_shared():
    model = nn.Module()
    model.a = nn.Linear(48, 48)
    model.b = model.a
    model.list = nn.ModuleList([model.a, nn.Linear(48, 48)])
    small = sketch(model)
    assert isinstance(small.a, pc.SketchedLinear)
    assert small.a is small.b is small.list[0]
    assert len(list(small.parameters())) == 6


def tied_linears():
    model = nn.ModuleDict(
        {"a": nn.Linear(48, 48), "b": nn.Linear(48, 48), "c": nn.Linear(48, 48, bias=False)}
    )
    model["b"].weight = model["c"].weight = model["a"].weight
    return model


def assert_tied_linears(model):
    assert model["a"].up.weight is model["b"].up.weight
    assert model["a"].up.weight is model["c"].up.weight
    assert model["a"].down.weight is model["b"].down.weight
    assert model["a"].bias is not model["b"].bias
    assert model["c"].bias is None
    assert not torch.equal(model["a"].bias, model["b"].bias)


def test_tied_linears_share_factors_and_keep_their_biases(tmp_path):
    model = tied_linears()
    x = torch.randn(2, 48)
    small = sketch(model)
    assert_tied_linears(small)
    assert_close(small["b"](x) - small["a"](x), (model["b"].bias - model["a"].bias).expand(2, -1))
    assert_tied_linears(copy.deepcopy(small))
    pc.save_sketched(small, tmp_path)
    assert_tied_linears(pc.load_sketched(tied_linears(), tmp_path))
    plain = pc.densify(small)
    assert plain["a"].weight is plain["b"].weight is plain["c"].weight
    assert_close(plain["b"](x), small["b"](x))


def test_tie_with_a_layer_that_stays_dense_keeps_both_dense():
    model = tied_linears()
    model["c"].register_forward_hook(lambda *_: None)
    model["d"] = nn.Linear(48, 48)
    found = reasons(model)
    assert found["a"].startswith("its weight is tied to c, which stays dense (has hooks")
    assert set(found) == {"a", "b", "c"}
    small = sketch(model)
    assert small["a"].weight is small["c"].weight


class LanguageModel(nn.Module):
    def __init__(self, head_first=False, bias=True):
        super().__init__()
        if head_first:
            self.head = nn.Linear(48, 96, bias=bias)
        self.embed = nn.Embedding(96, 48)
        self.body = nn.Linear(48, 48)
        if not head_first:
            self.head = nn.Linear(48, 96, bias=bias)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.body(self.embed(ids)))


def test_convolutions_that_share_a_kernel_stay_dense():
    model = nn.ModuleDict({"a": nn.Conv2d(16, 16, 3), "b": nn.Conv2d(16, 16, 3), "c": nn.Conv2d(16, 16, 3)})
    model["b"].weight = model["a"].weight
    found = reasons(model)
    assert found["a"] == "its weight is shared with b; convolutions that share a kernel stay dense"
    assert found["b"] == "its weight is shared with a; convolutions that share a kernel stay dense"
    assert isinstance(sketch(model)["c"], pc.SketchedConv2d)


@pytest.mark.parametrize("head_first", [False, True])
def test_head_tied_to_the_embedding_is_left_alone(head_first):
    model = LanguageModel(head_first)
    found = reasons(model)
    assert found["embed"] == "embedding: left alone unless included"
    assert "head" in found
    small = sketch(model)
    assert small.head.weight is small.embed.weight
    assert torch.equal(small.head.weight, model.head.weight)
    for one in ("head", "embed"):
        assert one in reasons(model, include=[one, "body"])


def assert_tied_language_model(model):
    assert isinstance(model.embed, pc.SketchedEmbedding)
    assert isinstance(model.head, pc.SketchedLinear)
    assert model.embed.codes.weight is model.head.up.weight
    assert model.embed.basis.weight is model.head.down.weight


@pytest.mark.parametrize("head_first", [False, True])
def test_head_and_embedding_included_share_factors(head_first, tmp_path):
    model = low_rank_(LanguageModel(head_first))
    ids = torch.arange(12).view(3, 4)
    small = sketch(model, include="*")
    assert_tied_language_model(small)
    assert_close(small(ids), model(ids))
    report = pc.sketch_report(small)
    assert report.stored_numbers == sum(t.numel() for t in (*small.parameters(), *small.buffers()))
    assert report.dense_numbers == sum(t.numel() for t in model.parameters())
    assert report.achieved_ratio <= 0.5
    assert report.skipped == ()
    assert_tied_language_model(copy.deepcopy(small))
    pc.save_sketched(small, tmp_path)
    loaded = pc.load_sketched(LanguageModel(head_first), tmp_path)
    assert_tied_language_model(loaded)
    assert torch.equal(loaded(ids), small(ids))
    plain = pc.densify(small)
    assert plain.head.weight is plain.embed.weight
    assert_close(plain(ids), small(ids))


def test_tied_model_trains_on_its_one_pair():
    model = LanguageModel()
    small = sketch(model, include="*")
    small(torch.arange(4)).sum().backward()
    assert small.head.up.weight.grad is small.embed.codes.weight.grad
    assert len(list(small.parameters())) == 2 + 1 + 3


@pytest.mark.parametrize("inplace", [False, True])
def test_tied_biases_stay_tied(inplace):
    model = nn.ModuleDict({name: nn.Linear(48, 48) for name in "abcd"})
    model["norm"] = nn.LayerNorm(48)
    model["b"].bias = model["norm"].bias = model["d"].bias = model["a"].bias
    small = sketch(model, inplace=inplace, exclude="d")
    assert isinstance(small["a"], pc.SketchedLinear)
    assert small["a"].bias is small["b"].bias is small["norm"].bias is small["d"].bias
    assert small["c"].bias is not small["a"].bias
    plain = pc.densify(small)
    assert plain["a"].bias is plain["b"].bias is plain["norm"].bias


class ReadsWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.read, self.other = nn.Linear(48, 48), nn.Linear(48, 48)

    def forward(self, x):
        return F.linear(self.other(self.read(x)), self.read.weight.t())


def test_weight_that_forward_uses_itself_stays_dense():
    found = reasons(ReadsWeight())
    assert found["read"].startswith("forward uses its weight directly; torch.export.export(model, args)")
    small = sketch(ReadsWeight())
    assert type(small.read) is nn.Linear
    assert isinstance(small.other, pc.SketchedLinear)


class ComputedBias(nn.Module):
    """As BEiT: a functional layer with a bias that is put together from two."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(48, 96, bias=False), nn.Linear(96, 96)
        self.first, self.last = nn.Parameter(torch.randn(48)), nn.Parameter(torch.randn(48))

    def forward(self, x):
        return self.proj(F.linear(x, self.qkv.weight, torch.cat((self.first, self.last))))


@pytest.mark.parametrize("exported", [False, True])
def test_the_graph_that_the_reason_names_is_sketched(exported):
    model, x = low_rank_(ComputedBias()), torch.randn(3, 48)
    assert reasons(model)["qkv"] == (
        "forward uses its weight directly: sketch torch.fx.symbolic_trace(model) instead"
    )
    small = sketch(torch.export.export(model, (x,)) if exported else fx.symbolic_trace(model))
    assert isinstance(small.qkv, pc.SketchedLinear)
    assert_close(small(x), model(x))


def test_a_weight_that_a_graph_uses_otherwise_names_no_other_graph():
    """A graph of torch.export was said to show more if torch.export made one of it."""
    model = nn.Sequential(nn.Embedding(96, 48), nn.Linear(48, 48), nn.Linear(48, 96, bias=False))
    model[2].weight = model[0].weight
    exported = torch.export.export(model, (torch.zeros(2, 3, dtype=torch.long),)).module()
    assert reasons(exported, include="*") == {"2": "the graph uses its weight elsewhere too, not as a layer"}


class AsksForDtype(nn.Module):
    """As open_clip: looks at a weight for its type alone."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(48, 96), nn.Linear(96, 96)

    def forward(self, x):
        return self.last(self.first(x.to(self.first.weight.dtype)))


def test_weight_that_is_asked_for_its_dtype_alone_is_sketched():
    model, x = low_rank_(AsksForDtype()), torch.randn(3, 48)
    small = sketch(model)
    assert isinstance(small.first, pc.SketchedLinear)
    assert_close(small(x), model(x))


def test_weight_that_an_untraceable_forward_uses_is_multiplied_out():
    class Untraceable(ReadsWeight):
        def forward(self, x):
            return super().forward(x if x.sum() > 0 else -x)

    model = low_rank_(Untraceable())
    small = sketch(model)
    assert isinstance(small.read, pc.SketchedLinear)
    x = torch.randn(3, 48)
    assert_close(small(x), model(x))


def test_parameter_that_another_module_holds_stays_dense():
    model = mlp(48, 3)
    model.register_module("mirror", nn.ParameterList([model[0].weight]))
    assert reasons(model)["0"] == "its weight is shared with mirror, which stays dense"
    small = sketch(model)
    assert small.mirror[0] is small[0].weight


def test_parameter_that_the_model_holds_too_stays_dense():
    model = mlp(48, 3)
    model.register_parameter("copy", model[1].weight)
    assert "the model itself" in reasons(model)["1"]


def test_attentions_that_share_projections_are_densified():
    dense = nn.ModuleDict({name: nn.MultiheadAttention(32, 4) for name in ("a", "b")}).eval()
    small = pc.sketchify(dense, 0.6, min_params=0, allow_slower=True, include="*", progress=False)
    x = torch.randn(3, 2, 32)
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        setattr(small["b"], name, getattr(small["a"], name))
        again = pc.densify(small)
        for key in ("a", "b"):
            torch.testing.assert_close(again[key](x, x, x)[0], small[key](x, x, x)[0])
    assert again["a"].in_proj_weight is again["b"].in_proj_weight
    assert again["a"].out_proj.weight is again["b"].out_proj.weight
    small["b"].q_proj, small["b"].k_proj = small["a"].k_proj, small["a"].q_proj  # the same factors, crossed
    again = pc.densify(small)
    torch.testing.assert_close(again["b"](x, x, x)[0], small["b"](x, x, x)[0])
    assert again["a"].in_proj_weight is not again["b"].in_proj_weight
