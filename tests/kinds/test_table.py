"""Tables fitted to the tokens of data."""

import pytest
import torch
from torch import nn

import panther_compile as pc
from panther_compile.factorization.whiten import root_of
from panther_compile.kinds.embedding import EmbeddingKind
from panther_compile.kinds.table import TableSums, best_table, fit_table
from panther_compile.layers.embedding import SketchedEmbedding

V, D = 60, 16
OPTIONS = {"min_params": 0, "include": "*embed*", "progress": False, "allow_slower": True}


def table(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(V, D, generator=generator)


def metric():
    root = torch.randn(D, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return root @ root.T / D + 0.1 * torch.eye(D, dtype=torch.float64)


def tokens():
    return torch.tensor([3] * 50 + [7] * 30 + [11] * 10 + [12, 13, 14])


def test_shares_leave_tokens_that_were_not_seen_what_good_and_turing_say():
    sums = TableSums(table())
    sums.add(tokens()[:40])
    sums.add(tokens()[40:, None].int())
    shares = sums.shares()
    assert float(shares.sum()) == pytest.approx(1.0)
    assert float(shares[3]) == pytest.approx(50 / 93 * (1 - 3 / 93))
    assert float(shares[0]) == pytest.approx(3 / 93 / (V - 6))


def test_shares_where_all_were_seen_or_none():
    sums = TableSums(table())
    assert float(sums.shares().sum()) == 0.0
    sums.add(torch.arange(V))
    assert torch.allclose(sums.shares(), torch.full((V,), 1 / V).double())


@pytest.mark.parametrize("gradient", [None, metric()])
@pytest.mark.parametrize("rank", [1, 5, D])
def test_no_table_of_the_rank_is_closer_in_the_metric(gradient, rank):
    sums = TableSums(table())
    sums.add(tokens())
    weights = sums.shares().sqrt()[:, None]
    root = torch.eye(D, dtype=torch.float64) if gradient is None else root_of(gradient).factor
    whitened = weights * (table().double() @ root)
    values = torch.linalg.svdvals(whitened)
    left, right, error = fit_table(table(), sums.shares(), gradient, rank)
    off = weights * ((table() - left @ right.float()).double() @ root)
    assert float(off.norm()) == pytest.approx(float(values[rank:].norm()), rel=1e-4, abs=1e-5)
    assert error == pytest.approx(float(off.norm() / whitened.norm()), rel=1e-3, abs=1e-5)
    assert torch.allclose(best_table(table(), sums.shares(), gradient)[2], values, rtol=1e-6)


def test_tables_of_fewer_rows_than_features():
    view = EmbeddingKind().view(nn.Embedding(3, D))
    sums = view.input_sums()
    sums.add(torch.tensor([0, 0, 2]))
    left, right, values = best_table(view.layer.weight, sums.shares(), None)
    assert (left.shape, right.shape, values.shape) == ((3, 3), (3, D), (3,))
    torch.testing.assert_close(left @ right.float(), view.layer.weight.detach())


def test_tokens_that_a_mask_hides_do_not_count():
    view = EmbeddingKind().view(nn.Embedding(V, D))
    ids = torch.tensor([[1, 2, 0], [3, 0, 0]])
    assert view.rows(ids, ids != 0).flatten().tolist() == [1, 2, 3]
    assert view.rows(torch.arange(3)[None], ids != 0).flatten().tolist() == [0, 1, 2]


class Reads(nn.Module):
    def __init__(self, tie=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.positions_embed = nn.Embedding(400, 32), nn.Embedding(8, 32)
        self.body, self.head = nn.Linear(32, 32), nn.Linear(32, 400 if tie else 5)
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        h = self.embed(ids) + self.positions_embed(torch.arange(ids.shape[1]))
        return self.head(torch.tanh(self.body(h)))


def texts(count=8):
    generator = torch.Generator().manual_seed(2)
    chances = 1.0 / torch.arange(1, 401).float()
    return [torch.multinomial(chances, 64, True, generator=generator).view(8, 8) for _ in range(count)]


def off(small, model, data):
    with torch.no_grad():
        wanted, found = (torch.cat([one(ids) for ids in data]) for one in (model, small))
    return float((found - wanted).norm() / (wanted - wanted.mean((0, 1))).norm())


def test_data_says_which_rows_count():
    model, data, others = Reads().eval(), texts()[:12], texts(24)[12:]
    fitted = pc.sketchify(model, 0.4, data=data, **OPTIONS)
    plain = pc.sketchify(model, 0.4, **OPTIONS)
    assert isinstance(fitted.embed, SketchedEmbedding)
    assert off(fitted, model, others) < 0.7 * off(plain, model, others)
    rows = {row.name: row for row in pc.sketch_report(fitted).sketched}
    assert (rows["embed"].method, rows["embed"].note) == ("calibrated", "")
    assert 0 < rows["embed"].output_error < rows["embed"].error


def test_one_budget_for_a_table_and_what_reads_it():
    model, data = Reads().eval(), texts(16)
    small = pc.sketchify(model, 0.4, data=data, **OPTIONS | {"include": ["*embed", "body"]})
    report = pc.sketch_report(small)
    assert [row.name for row in report.sketched] == ["embed"]  # the rest is whole within the budget
    assert report.achieved_ratio <= 0.4
    assert off(small, model, texts(24)[16:]) < 0.2


def test_tables_that_a_head_shares_are_fitted_to_what_both_do():
    model, data, others = Reads(tie=True).eval(), texts(16), texts(24)[16:]
    options = OPTIONS | {"include": ["embed", "head"]}
    small = pc.sketchify(model, 0.4, data=data, **options)
    row = pc.sketch_report(small).sketched[0]
    assert (row.name, row.method, row.note) == ("embed", "calibrated", "")
    assert small.head.up.weight is small.embed.codes.weight
    plain = pc.sketchify(model, 0.4, synthetic=False, **options)
    assert off(small, model, others) < 0.7 * off(plain, model, others)
