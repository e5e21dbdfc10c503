"""Embeddings, and heads tied to them, as a kind."""

import pytest
import torch
from torch import nn

import panther_compile as pc
from panther_compile.config import SketchConfig
from panther_compile.kinds.embedding import EmbeddingKind
from panther_compile.layers.embedding import SketchedEmbedding
from panther_compile.layers.linear import SketchedLinear
from panther_compile.records import Choice

KIND, CONFIG = EmbeddingKind(), SketchConfig(progress=False)
OPTIONS = {"min_params": 0, "include": "*", "progress": False, "allow_slower": True}
V, D = 50, 24


class Tied(nn.Module):
    """A table, a layer, and a head that uses the table's weight."""

    def __init__(self, bias=True, tie=True):
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.fc = nn.Linear(D, D)
        self.head = nn.Linear(D, V, bias=bias)
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.fc(self.embed(ids))))


def sketch(module, rank=6):
    choice = Choice("pair", rank, (rank,), rank * (V + D), None)
    return KIND.sketch("embed", module, choice, CONFIG)


def test_kind_and_why_not():
    assert KIND.matches(nn.Embedding(4, 4)) == "Embedding"
    assert KIND.matches(nn.EmbeddingBag(4, 4)) is None
    assert KIND.why_not(nn.Embedding(4, 4, padding_idx=0)) is None
    assert "max_norm" in KIND.why_not(nn.Embedding(4, 4, max_norm=1.0))

    class Scaled(nn.Embedding):
        def forward(self, ids):
            return 8 * super().forward(ids)

    assert KIND.why_not(Scaled(4, 4)) == "Scaled overrides Embedding.forward"


def test_unit_is_a_plain_pair():
    unit = KIND.unit("embed", nn.Embedding(V, D), energies=True)
    assert (unit.name, unit.shape, unit.dense_numbers, unit.bias_numbers) == ("embed", (V, D), V * D, 0)
    assert [candidate.scheme for candidate in unit.candidates] == ["pair"]
    assert unit.candidates[0].numbers(3) == 3 * (V + D)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_error_is_that_of_the_truncated_svd(dtype):
    module = nn.Embedding(V, D, dtype=dtype)
    layer, fitted = sketch(module)
    weight = module.weight.detach().double()
    values = torch.linalg.svdvals(weight)
    left, right = (factor.detach().double() for factor in layer.factors())
    error = float((weight - left @ right).norm() / weight.norm())
    assert error == pytest.approx(float(values[6:].norm() / values.norm()), rel=1e-3)
    assert fitted.error == pytest.approx(error, rel=0.2)
    assert layer.codes.weight.dtype == dtype


def test_options_mode_and_requires_grad_are_carried():
    module = nn.Embedding(V, D, padding_idx=3, sparse=True, scale_grad_by_freq=True).eval()
    module.weight.requires_grad_(False)
    layer, _ = sketch(module)
    assert (layer.padding_idx, layer.codes.sparse, layer.codes.scale_grad_by_freq) == (3, True, True)
    assert not layer.training
    assert not any(p.requires_grad for p in layer.parameters())


def test_zero_padding_row_stays_zero():
    layer, _ = sketch(nn.Embedding(V, D, padding_idx=3))
    assert not layer(torch.tensor([3])).any()


@pytest.mark.parametrize("bias", [True, False])
def test_tied_head_shares_the_factors(bias):
    model = Tied(bias)
    small = pc.sketchify(model, 0.5, **OPTIONS)
    assert type(small.embed) is SketchedEmbedding
    assert type(small.head) is SketchedLinear
    assert small.head.up.weight is small.embed.codes.weight
    assert small.head.down.weight is small.embed.basis.weight
    x = torch.randn(3, D)
    wanted = nn.functional.linear(x, small.embed.weight + 0, model.head.bias)
    torch.testing.assert_close(small.head(x), wanted, rtol=1e-4, atol=1e-5)


def test_tied_weight_is_planned_and_counted_once():
    model = Tied()
    small = pc.sketchify(model, 0.5, **OPTIONS)
    plan, report = pc.plan_sketch(model, 0.5, **OPTIONS), pc.sketch_report(small)
    assert [line.name for line in plan.layers] == ["embed", "fc"]
    unique = {id(t): t.numel() for t in (*model.parameters(), *model.buffers())}
    assert report.dense_numbers == sum(unique.values())
    unique = {id(t): t.numel() for t in (*small.parameters(), *small.buffers())}
    assert report.stored_numbers == sum(unique.values())
    assert report.replaced_dense_numbers == V * D + D * D + D + V
    assert plan.achieved_ratio <= 0.5


def test_gradients_of_both_uses_meet_in_the_factors():
    small = pc.sketchify(Tied(), 0.5, **OPTIONS)
    ids = torch.tensor([1, 2, 3])
    small(ids).square().sum().backward()
    assert small.embed.codes.weight.grad[10].any()  # 10 is not looked up: this is the head's
    assert small.embed.basis.weight.grad.any()


def test_densify_ties_again():
    plain = pc.densify(pc.sketchify(Tied(), 0.5, **OPTIONS))
    assert type(plain.embed) is nn.Embedding
    assert plain.head.weight is plain.embed.weight


def test_two_tables_with_one_weight():
    model = nn.ModuleDict({"a": nn.Embedding(V, D, padding_idx=0), "b": nn.Embedding(V, D)})
    model["b"].weight = model["a"].weight
    small = pc.sketchify(model, 0.5, **OPTIONS)
    assert small["a"].codes.weight is small["b"].codes.weight
    assert small["a"].basis is small["b"].basis
    assert (small["a"].padding_idx, small["b"].padding_idx) == (0, None)


def test_left_alone_unless_included():
    model = Tied(tie=False)
    plan = pc.plan_sketch(model, 0.5, min_params=0, progress=False, allow_slower=True)
    reasons = {line.name: line.reason for line in plan.layers}
    assert reasons["embed"] == "embedding: left alone unless included"
    small = pc.sketchify(model, 0.5, min_params=0, progress=False, allow_slower=True)
    assert type(small.embed) is nn.Embedding


def test_a_tied_head_follows_its_table_into_staying_dense():
    plan = pc.plan_sketch(
        Tied(), 0.5, min_params=0, progress=False, allow_slower=True, include=["fc", "head"]
    )
    reasons = {line.name: line.reason for line in plan.layers}
    assert "tied" in reasons["head"]
    assert reasons["embed"] == "not included"
