"""Tables that other layers have in common with them: what each wants of it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import panther_compile as pc
from panther_compile.calibration.study import study_layers
from panther_compile.config import SketchConfig
from panther_compile.factorization.gram import gram
from panther_compile.kinds.targets import find_targets, watch
from panther_compile.layers.embedding import SketchedEmbedding
from panther_compile.models.batches import Call
from panther_compile.records import Site

V, D = 300, 24
OPTIONS = {"min_params": 0, "include": "*embed*", "progress": False, "allow_slower": True}


class Decodes(nn.Module):
    """Reads a table twice, and scores its rows.

    Args:
        cut: no gradient reaches any layer.
        shared: the first layer of the table is never called, as the one of T5 that its halves share.
    """

    def __init__(self, *, cut: bool = False, shared: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.other_embed = nn.Embedding(V, D), nn.Embedding(V, D)
        self.body, self.embed_head = nn.Linear(D, D), nn.Linear(D, V, bias=False)
        self.other_embed.weight = self.embed_head.weight = self.embed.weight
        self.cut, self.shared = cut, shared

    def inner(self, ids):
        read = self.other_embed if self.shared else self.embed
        h = read(ids) + self.other_embed(ids.flip(1))[:, :4].mean(1, keepdim=True)
        return torch.tanh(self.body(h))

    def forward(self, ids):
        scores = self.embed_head(self.inner(ids))
        return scores.detach() if self.cut else scores


def texts(count: int, seed: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    chances = 1.0 / torch.arange(1, V + 1).float()
    return [torch.multinomial(chances, 64, True, generator=generator).view(8, 8) for _ in range(count)]


def off(small: nn.Module, model: nn.Module, data: list[torch.Tensor]) -> float:
    """Mean divergence of the scores."""
    with torch.no_grad():
        wanted, found = (torch.cat([one(ids) for ids in data]).log_softmax(-1) for one in (model, small))
    return float(F.kl_div(found, wanted, log_target=True, reduction="none").sum(-1).mean())


def tied_sites(model: Decodes) -> list[Site]:
    others = (("other_embed", model.other_embed), ("embed_head", model.embed_head))
    return [Site("embed", model.embed, "Embedding", others)]


def studied(model: nn.Module, data: list[torch.Tensor]):
    sites = tied_sites(model)
    targets, left_alone = find_targets(sites)
    assert not left_alone
    side, calls = watch(model, targets), [Call((ids,), {}) for ids in data]
    return targets, study_layers(side, targets, calls, SketchConfig(output="logits", progress=False))[0]


def test_what_a_head_wants_is_what_its_scores_and_inputs_say():
    model, data = Decodes().eval(), texts(30)
    targets, study = studied(model, data)
    assert set(targets["embed"].ties) == {"other_embed", "embed_head"}
    shares, metric = study.shares["embed"], study.costs["embed"] * study.weights["embed"].double()
    assert float(shares.sum()) == pytest.approx(1.0)
    with torch.no_grad():
        h = torch.cat([model.inner(ids) for ids in data])
        chances = model.embed_head(h).softmax(-1).reshape(-1, V).double()
    head = (
        gram(h.reshape(-1, D)).double() / chances.shape[0] * float((chances * (1 - chances)).sum(-1).mean())
    )
    assert float(metric.trace()) > float(head.trace())  # the layers that read want something too
    # What is known of the head alone is within the metric, but for what is mixed in of the identity.
    lowest = torch.linalg.eigvalsh(metric - 0.8 * head)[0]
    assert float(lowest) > -0.05 * float(head.trace()) / D


@pytest.mark.filterwarnings("ignore::panther_compile.SketchQualityWarning")
@pytest.mark.parametrize("options", [{}, {"cut": True}, {"shared": True}])
def test_tied_tables_are_fitted_to_all_their_uses(options):
    model, data, others = Decodes(**options).eval(), texts(16), texts(24)[16:]
    small = pc.sketchify(model, 0.5, data=data, **OPTIONS)
    plain = pc.sketchify(model, 0.5, synthetic=False, **OPTIONS)
    row = pc.sketch_report(small).sketched[0]
    assert (row.name, row.method, row.note) == ("embed", "calibrated", "")
    assert isinstance(small.embed, SketchedEmbedding)
    assert small.embed_head.up.weight is small.embed.codes.weight is small.other_embed.codes.weight
    assert off(small, model, others) < 0.7 * off(plain, model, others)


@pytest.mark.filterwarnings("ignore::panther_compile.SketchQualityWarning")
@pytest.mark.parametrize("shared", [False, True])
def test_few_data_try_several_studies_of_the_same_uses(shared):
    model, data = Decodes(shared=shared).eval(), [ids[:2, :4] for ids in texts(6)]
    small = pc.sketchify(model, 0.5, data=data, **OPTIONS | {"include": ["*embed*", "body"]})
    names = {row.name for row in pc.sketch_report(small).sketched}
    assert {"embed", "other_embed", "embed_head"} <= names


@pytest.mark.filterwarnings("ignore::panther_compile.SketchQualityWarning")
def test_work_on_tied_tables_is_taken_up_again(tmp_path):
    model, data = Decodes().eval(), texts(6)
    first = pc.sketchify(model, 0.5, data=data, resume=tmp_path, **OPTIONS)
    other = pc.sketchify(model, 0.4, data=data, resume=tmp_path, **OPTIONS)
    anew = pc.sketchify(model, 0.4, data=data, **OPTIONS)
    assert first.embed.rank > other.embed.rank
    assert torch.equal(other.embed.codes.weight, anew.embed.codes.weight)


def test_a_head_that_is_given_zeros_leaves_the_table_to_its_reads():
    model, data = Decodes().eval(), texts(4)
    nn.init.zeros_(model.body.weight)
    nn.init.zeros_(model.body.bias)
    small = pc.sketchify(model, 0.5, data=data, **OPTIONS)
    assert bool(small.embed.codes.weight.isfinite().all())


def test_a_layer_follows_what_has_its_weight():
    model, data = Decodes().eval(), texts(1)[0]
    sites = tied_sites(model)
    side = watch(model, find_targets(sites)[0])
    small = pc.sketchify(model, 0.5, synthetic=False, **OPTIONS)
    dense = side.watched["embed"].layer
    with torch.no_grad():
        for layer, like in ((dense, model), (small.embed, small), (dense, model)):
            side.watched["embed"].layer = layer
            torch.testing.assert_close(side.model(data), like(data))
