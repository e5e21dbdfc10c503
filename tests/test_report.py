"""What the report counts, against counting by hand on the model as it is."""

import copy
import json
import pickle

import pytest
import torch
from torch import nn

import panther_compile as pc
from panther_compile.errors import NoTargetError
from panther_compile.layers.linear import SketchedLinear
from panther_compile.records import RECORD_ATTRIBUTE, Fitted, LayerPlan, SketchPlan, SketchRecord
from panther_compile.report import sketch_report, tensors_of
from panther_compile.tables import render_table, share

OPTIONS = {"min_params": 0, "progress": False, "allow_slower": True}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 32)
        self.block = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 32))
        self.small = nn.Linear(32, 2)
        self.head = nn.Linear(32, 30)

    def forward(self, ids):
        x = self.block(self.embed(ids))
        return self.small(x), self.head(x)


def count(model):
    return sum(t.numel() for t in {id(t): t for t in (*model.parameters(), *model.buffers())}.values())


@pytest.fixture
def pair():
    dense = Model()
    return dense, pc.sketchify(dense, 0.5, **(OPTIONS | {"min_params": 100}))


def test_totals_are_those_of_the_models(pair):
    dense, small = pair
    report = sketch_report(small)
    assert report.dense_numbers == count(dense)
    assert report.stored_numbers == count(small)
    assert report.replaced_dense_numbers == count(dense.block[0]) + count(dense.block[2])
    assert report.replaced_stored_numbers == count(small.block[0]) + count(small.block[2])
    assert report.achieved_ratio == report.replaced_stored_numbers / report.replaced_dense_numbers
    assert report.achieved_ratio <= 0.5
    assert (report.ratio_asked, report.route) == ("0.5", "module tree, read through its fx graph")


def test_rows_are_in_the_order_of_the_model_with_reasons(pair):
    report = sketch_report(pair[1])
    assert [row.name for row in report.rows] == ["embed", "block.0", "block.2", "small", "head"]
    assert [row.name for row in report.sketched] == ["block.0", "block.2"]
    reasons = {row.name: row.reason for row in report.skipped}
    assert reasons == {
        "embed": "embedding: left alone unless included",
        "small": "small: 64 numbers, min_params is 100",
        "head": "output head: left alone unless included",
    }


def test_row_of_a_sketched_layer(pair):
    dense, small = pair
    row = sketch_report(small).sketched[0]
    layer = small.block[0]
    assert (row.kind, row.scheme, row.ranks) == ("SketchedLinear", layer.form, (layer.rank,))
    assert (row.dense_numbers, row.stored_numbers) == (count(dense.block[0]), count(layer))
    assert row.dense_macs == 32 * 64
    assert row.macs == layer.down.weight.numel() + layer.up.weight.numel()
    weight = dense.block[0].weight.detach().double()
    left, right = (factor.detach().double() for factor in layer.factors())
    error = float((weight - left @ right).norm() / weight.norm())
    assert row.error == pytest.approx(error, rel=0.25)
    assert (row.method, row.reason) == ("svd", "")


def test_row_of_a_layer_left_alone(pair):
    row = sketch_report(pair[1]).skipped[1]
    assert (row.kind, row.scheme, row.ranks, row.method, row.error) == ("Linear", "dense", (), "", None)
    assert row.dense_numbers == row.stored_numbers == 66
    assert row.dense_macs == row.macs == 64


def test_counts_follow_the_model_as_it_is_now(pair):
    _, small = pair
    small.block[0].up.bias = None
    small.small = nn.Identity()
    report = sketch_report(small)
    assert report.stored_numbers == count(small)
    assert report.sketched[0].stored_numbers == count(small.block[0])


def test_a_layer_densified_by_hand_is_no_longer_counted_as_replaced(pair):
    _, small = pair
    small.block[0] = small.block[0].to_dense()
    report = sketch_report(small)
    assert [row.name for row in report.sketched] == ["block.2"]
    assert report.replaced_stored_numbers == count(small.block[2])


def test_a_layer_put_in_by_hand_is_reported_without_an_error(pair):
    _, small = pair
    small.head = SketchedLinear.from_dense(small.head, rank=3)
    row = next(row for row in sketch_report(small).rows if row.name == "head" and row.scheme != "dense")
    assert (row.error, row.method, row.ranks) == (None, "", (3,))


def test_without_a_record_the_counts_remain(pair):
    _, small = pair
    with_record = sketch_report(small)
    bare = copy.deepcopy(small)
    del bare.__dict__[RECORD_ATTRIBUTE]
    report = sketch_report(bare)
    assert [row.name for row in report.rows] == ["block.0", "block.2"]
    assert report.dense_numbers == with_record.dense_numbers
    assert report.achieved_ratio == with_record.achieved_ratio
    assert (report.ratio_asked, report.route) == ("-", "-")
    assert all(row.error is None for row in report.rows)


def test_a_model_that_was_never_sketched():
    with pytest.raises(NoTargetError, match="Model holds no sketched layer"):
        sketch_report(Model())


def test_ratio_one_is_reported_as_nothing_replaced():
    report = sketch_report(pc.sketchify(Model(), 1.0, **OPTIONS))
    assert report.sketched == ()
    assert report.achieved_ratio == 1.0
    assert report.stored_numbers == report.dense_numbers


def test_a_sketched_root():
    dense = nn.Linear(40, 40)
    small = pc.sketchify(dense, 0.5, **OPTIONS)
    report = sketch_report(small)
    assert report.rows[0].name == ""
    assert (report.dense_numbers, report.stored_numbers) == (count(dense), count(small))
    assert "(model)" in str(report)


def test_shared_biases_are_counted_once():
    model = nn.Sequential(nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 40))
    model[2].bias = model[0].bias
    small = pc.sketchify(model, 0.5, include="*", **OPTIONS)
    report = sketch_report(small)
    assert small[0].bias is small[2].bias
    assert report.dense_numbers == count(model)
    assert report.stored_numbers == count(small)
    assert report.replaced_dense_numbers == count(model)


def test_a_layer_used_twice_is_one_row():
    fc = nn.Linear(40, 40)
    model = nn.Sequential(fc, nn.ReLU(), fc)
    report = sketch_report(pc.sketchify(model, 0.5, include="*", **OPTIONS))
    assert [row.name for row in report.rows] == ["0"]
    assert report.dense_numbers == count(model)


def test_to_dict_is_json(pair):
    report = sketch_report(pair[1])
    found = json.loads(json.dumps(report.to_dict()))
    assert found["achieved_ratio"] == report.achieved_ratio
    assert [row["name"] for row in found["rows"]] == [row.name for row in report.rows]
    assert found["stored_numbers"] == report.stored_numbers


def test_text_has_every_layer_and_the_totals(pair):
    report = sketch_report(pair[1])
    text = str(report)
    assert all(row.name in text for row in report.rows)
    assert f"ratio {report.achieved_ratio:.4f} (asked 0.5)" in text
    assert f"whole model: {report.stored_numbers:,} of {report.dense_numbers:,} numbers" in text


def test_tensors_are_counted_once():
    a, b = nn.Linear(3, 3), nn.Linear(3, 3)
    b.weight = a.weight
    assert len(tensors_of([a, b, a])) == 3


# ------------------------------------------------------------------------------------------- tables


def table(*rows):
    columns = (("layer", "left"), ("numbers", "right"))
    return render_table("A title", columns, rows, ("the footer",))


@pytest.mark.parametrize("variable", ["FORCE_COLOR", "TTY_COMPATIBLE", "COLORTERM"])
def test_tables_are_plain_text_on_any_terminal(monkeypatch, variable):
    plain = table(("fc", "1"))
    monkeypatch.setenv(variable, "1")
    assert table(("fc", "1")) == plain
    assert "\x1b" not in plain


def test_names_are_shown_as_they_are():
    text = table(("[bold]fc[/]", "1"), ("a:smile:", "22"))
    assert "[bold]fc[/]" in text
    assert "a:smile:" in text


def test_table_has_title_rows_and_footer():
    lines = table(("fc", "1"), ("head", "22")).splitlines()
    assert lines[0] == "A title"
    assert lines[-1] == "the footer"
    assert any(line.split() == ["head", "22"] for line in lines)
    assert all(line == line.rstrip() for line in lines)


def test_long_cells_are_folded_not_cut():
    name = ".".join(["a_rather_long_name"] * 20)
    assert "".join(table((name, "")).split()).count("a_rather_long_name") == 20


def test_share():
    assert share(1, 3) == "0.333"
    assert share(0, 3) == "0.000"
    assert share(0, 0) == "-"


def test_records_count():
    line = LayerPlan("fc", "Linear", (2, 2), 6, None, "excluded")
    empty = SketchPlan((line,), "0.5", "module tree")
    assert (line.stored_numbers, empty.achieved_ratio, empty.sketched) == (6, 1.0, ())
    record = SketchRecord(empty, {"fc": Fitted("pair", (1,), "svd", 0.5)})
    assert copy.deepcopy(record) == record


@pytest.mark.parametrize("inplace", [False, True])
def test_copies_of_a_graph_keep_the_record(inplace):
    graph = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 48)))
    small = pc.sketchify(graph, 0.5, inplace=inplace, **OPTIONS)
    wanted = str(pc.sketch_report(small))
    for twin in (
        copy.deepcopy(small),
        pickle.loads(pickle.dumps(small)),
        copy.deepcopy(copy.deepcopy(small)),
    ):
        assert str(pc.sketch_report(twin)) == wanted
    dense = pc.densify(small, inplace=inplace)
    for twin in (dense, copy.deepcopy(dense)):
        assert RECORD_ATTRIBUTE not in vars(twin)
