"""Embeddings with a forward of their own, which scales what they read or shifts what is looked up."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import panther_compile as pc
from panther_compile.layers import SketchedEmbedding
from panther_compile.layers.own_weights import Table
from panther_compile.planning.own_weights import lifted

V, D = 200, 16
SCALE = D**0.5
OPTIONS = {"min_params": 0, "progress": False, "allow_slower": True}


class Scaled(nn.Embedding):
    """As BART has it."""

    def __init__(self, *sizes, scale=SCALE, **options):
        super().__init__(*sizes, **options)
        self.embed_scale = scale

    def forward(self, ids):
        return super().forward(ids) * self.embed_scale


class ScaledByBuffer(nn.Embedding):
    """As Gemma has it."""

    def __init__(self, *sizes, **options):
        super().__init__(*sizes, **options)
        self.register_buffer("embed_scale", torch.tensor(SCALE), persistent=False)

    def forward(self, ids):
        return super().forward(ids) * self.embed_scale.to(self.weight.dtype)


class Shifted(nn.Embedding):
    """As positions are looked up behind a place for padding."""

    def forward(self, ids):
        return F.embedding((ids + 1) % V, self.weight, self.padding_idx)


class Sliced(nn.Embedding):
    """No look-up of torch's."""

    def forward(self, ids):
        return self.weight[ids]


class Dropped(nn.Embedding):
    """Other than it is in training."""

    def forward(self, ids):
        return super().forward(ids) * (0.9 if self.training else 1.0)


TABLES = {"scaled": Scaled, "by a buffer": ScaledByBuffer, "shifted": Shifted}


class Speaker(nn.Module):
    def __init__(self, table, tie=True):
        super().__init__()
        self.embed = table(V, D, padding_idx=0)
        self.body = nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D), nn.LayerNorm(D))
        self.head = nn.Linear(D, V, bias=False)
        with torch.no_grad():
            self.embed.weight.div_(SCALE)
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(self.body(x) + x)


def texts(count=8, seed=2):
    generator = torch.Generator().manual_seed(seed)
    chances = 1.0 / torch.arange(1, V).float()
    return [torch.multinomial(chances, 64, True, generator=generator).view(8, 8) for _ in range(count)]


def speaker(table, **options):
    torch.manual_seed(0)
    return Speaker(table, **options).eval()


@torch.no_grad()
def off(small, model, data=None):
    wanted, found = (torch.cat([one(ids) for ids in data or texts(4, 5)]) for one in (model, small))
    return float((found - wanted).norm() / wanted.norm())


@torch.no_grad()
def divergence(small, model):
    """From the words that a model says, as a head is fitted to."""
    wanted, found = (torch.cat([one(ids) for ids in texts(4, 5)]).log_softmax(-1) for one in (model, small))
    return float((wanted.exp() * (wanted - found)).sum(-1).mean())


@pytest.mark.parametrize("name", TABLES)
def test_class_and_forward_stay_and_the_head_shares_the_factors(name, tmp_path):
    model = speaker(TABLES[name])
    keys = list(model.state_dict())
    small = pc.sketchify(model, 0.5, include=["embed", "head"], **OPTIONS)
    assert list(model.state_dict()) == keys
    assert type(small.embed) is TABLES[name]
    layer = small.embed.weight.layer
    assert isinstance(layer, SketchedEmbedding)
    assert small.head.up.weight is layer.codes.weight
    ids, row = torch.tensor([[3, 7]]), torch.tensor([4 if name == "shifted" else 3])
    wanted = (layer.codes.weight @ layer.basis.weight)[row] * (1.0 if name == "shifted" else SCALE)
    torch.testing.assert_close(small.embed(ids)[0, :1], wanted)
    assert tuple(small.embed.weight.shape) == (V, D)

    dense = pc.densify(small)
    assert list(dense.state_dict()) == keys
    assert type(dense.embed) is TABLES[name]
    assert dense.head.weight is dense.embed.weight
    assert off(dense, small) < 1e-5

    pc.save_sketched(small, tmp_path / "small")
    again = pc.load_sketched(speaker(TABLES[name]), tmp_path / "small")
    assert off(again, small) == 0.0
    assert again.head.up.weight is again.embed.weight.layer.codes.weight
    copied = copy.deepcopy(small)
    assert off(copied, small) == 0.0
    copied(texts(1)[0]).square().mean().backward()
    assert copied.head.up.weight.grad is not None
    assert not copied.head.up.weight.grad[0].isnan().any()


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("tie", [True, False])
def test_fitted_to_what_is_looked_up(name, tie):
    model, data = speaker(TABLES[name], tie=tie), texts(16)
    include = ["embed", "head"] if tie else ["embed"]
    fitted = pc.sketchify(model, 0.4, data=data, include=include, **OPTIONS)
    plain = pc.sketchify(model, 0.4, synthetic=False, include=include, **OPTIONS)
    row = pc.sketch_report(fitted).sketched[0]
    assert (row.name, row.method, row.note) == ("embed.weight.layer", "calibrated", "")
    assert divergence(fitted, model) < 0.8 * divergence(plain, model)


@pytest.mark.parametrize("table", [Scaled, ScaledByBuffer])
def test_a_scale_is_what_a_plain_table_of_larger_numbers_would_be_fitted_to(table):
    scaled, plain = speaker(table, tie=False), speaker(nn.Embedding, tie=False)
    with torch.no_grad():
        plain.embed.weight.copy_(scaled.embed.weight * SCALE)
    found = [
        pc.sketchify(model, 0.4, data=texts(16), include=["embed"], **OPTIONS) for model in (scaled, plain)
    ]
    assert off(found[0], found[1]) < 1e-3


@pytest.mark.parametrize(
    ("table", "reason"),
    [(Sliced, "Sliced overrides Embedding.forward"), (Dropped, "Dropped overrides Embedding.forward")],
)
def test_tables_that_are_used_otherwise_stay(table, reason):
    model = speaker(table, tie=False)
    assert lifted(model) is model
    small = pc.sketchify(model, 0.5, include=["embed", "body.*"], **OPTIONS)
    assert type(small.embed) is table
    skipped = {row.name: row.reason for row in pc.sketch_report(small).skipped}
    assert reason in skipped["embed"]


def test_left_alone_unless_included():
    model = speaker(Scaled)
    assert isinstance(lifted(model).embed.weight, Table)
    small = pc.sketchify(model, 0.5, **OPTIONS)
    assert type(small.embed.weight) is nn.Parameter
    assert small.head.weight is small.embed.weight
    skipped = {row.name: row.reason for row in pc.sketch_report(small).skipped}
    assert skipped["embed.weight.layer"] == "embedding: left alone unless included"


def test_in_place():
    model = speaker(ScaledByBuffer)
    wanted = pc.sketchify(model, 0.5, include=["embed", "head"], **OPTIONS)
    small = pc.sketchify(model, 0.5, include=["embed", "head"], inplace=True, **OPTIONS)
    assert small is model
    assert off(small, wanted) == 0.0
