"""What the report counts, against counting by hand on the model as it is."""

import copy
import hashlib
import json
import pickle
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import panther_compile as pc
from panther_compile.errors import ConfigError, ConfigTypeError, NoTargetError
from panther_compile.layers.linear import SketchedLinear
from panther_compile.records import RECORD_ATTRIBUTE, Fitted, LayerPlan, SketchPlan, SketchRecord
from panther_compile.report import ReportRow, SketchReport, sketch_report, tensors_of
from panther_compile.reporting.tables import render_table, share

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


# ------------------------------------------------------------------------------------ fitted to data


class Gated(nn.Module):
    """One of its layers is only called on request."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(40, 48)
        self.spare = nn.Linear(40, 48)
        self.last = nn.Linear(48, 40)

    def forward(self, x, spare=False):
        return self.last(torch.relu(self.spare(x) if spare else self.first(x)))


def batches(rows=16, features=40, count=6):
    return [torch.randn(rows, features) for _ in range(count)]


def test_rows_of_a_layer_that_was_fitted_to_data():
    small = pc.sketchify(Gated(), 0.5, data=batches(), exclude="spare", include="*", **OPTIONS)
    report = pc.sketch_report(small)
    record = vars(small)[RECORD_ATTRIBUTE]
    planned = {line.name: line.choice for line in record.plan.layers}
    for row in report.sketched:
        assert row.predicted_error == planned[row.name].error
        assert row.output_error == record.fitted[row.name].output_error
        assert row.sensitivity == record.fitted[row.name].sensitivity
        assert 0 < row.predicted_error < 1
        assert 0 < row.output_error < 1
        assert row.sensitivity > 0
        assert row.error is None if row.scheme == "narrow" else row.error > 0
        assert row.note == ""
    assert all(row.output_error is None for row in report.skipped)
    text = str(report)
    assert all(column in text for column in ("predicted", "output", "sensitivity"))
    assert "predicted" not in str(pc.sketch_report(pc.sketchify(Gated(), 0.5, **OPTIONS)))


def test_output_error_is_that_of_the_layer():
    model = nn.Linear(40, 40)
    data = batches(200)
    small = pc.sketchify(model, 0.5, data=data, **OPTIONS)
    model.requires_grad_(False)
    small.requires_grad_(False)
    x = torch.cat(data)
    wanted = nn.functional.linear(x, model.weight) - (x @ model.weight.T).mean(0)
    lost = model(x) - small(x)
    found = float((lost - lost.mean(0)).norm() / wanted.norm())
    assert pc.sketch_report(small).rows[0].output_error == pytest.approx(found, rel=0.1)
    assert pc.sketch_report(small).rows[0].predicted_error == pytest.approx(found, rel=0.3)


def test_kernels_have_no_prediction_on_data():
    model = nn.Sequential(nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 1))
    with torch.no_grad():
        model[2].weight.mul_(0.5 ** torch.arange(16.0).view(16, 1, 1))  # so that it is not left whole
    data = [torch.randn(4, 16, 8, 8) for _ in range(4)]
    rows = pc.sketch_report(pc.sketchify(model, 0.5, data=data, include="*", **OPTIONS)).rows
    assert [row.predicted_error is None for row in rows] == [True, False]
    assert all(row.output_error is not None for row in rows)


def test_layers_that_data_leaves_alone():
    model = nn.Sequential(
        nn.Embedding(40, 16),
        nn.Flatten(),
        nn.Linear(64, 24),
        nn.Unflatten(1, (24, 1)),
        nn.ConvTranspose1d(24, 16, 3, groups=2),
    )
    data = [torch.randint(40, (64, 4)) for _ in range(3)]
    rows = pc.sketch_report(pc.sketchify(model, 0.5, data=data, include="*", **OPTIONS)).rows
    notes = {row.name: row.note for row in rows}
    assert notes["4"] == "data leaves it alone: a grouped kernel"
    assert (notes["0"], notes["2"]) == ("", "")


def test_layers_that_the_data_never_reached():
    with pytest.warns(
        UserWarning, match="data never reached spare: sketched from the weights alone"
    ) as caught:
        small = pc.sketchify(Gated(), 0.5, data=batches(), include="*", **OPTIONS)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    report = pc.sketch_report(small)
    notes = {row.name: row.note for row in report.rows}
    assert notes == {"first": "", "spare": "data never reached it", "last": ""}
    first, spare, last = report.rows
    assert spare.stored_numbers <= 0.5 * spare.dense_numbers  # its own share, whatever the others are worth
    assert first.stored_numbers + last.stored_numbers <= 0.5 * (first.dense_numbers + last.dense_numbers)
    assert (spare.method, spare.output_error, spare.predicted_error) == ("svd", None, None)
    assert "svd; data never reached it" in str(report)


class Multiplies(nn.Module):
    """Multiplies by a weight itself, as Mamba does; torch.fx cannot trace it."""

    def __init__(self):
        super().__init__()
        self.first, self.step = nn.Linear(40, 40), nn.Linear(40, 40)

    def forward(self, x):
        return (self.step.weight @ self.first(x).T).T if x.abs().sum() > 0 else x


class Experts(nn.Module):
    """All of them in one parameter, beside a bilinear layer that is not sketched either and a norm."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 40, 40))
        self.mix = nn.Bilinear(8, 5, 40, bias=False)
        self.norm = nn.LayerNorm(40)
        self.tied = nn.Linear(40, 40)


def test_weights_of_other_kinds_of_module_are_told():
    model = nn.Sequential(nn.Linear(40, 40), Experts(), nn.Linear(40, 40))
    model[1].tied.weight = model[0].weight
    report = pc.sketch_report(pc.sketchify(model, 0.5, exclude="2", **OPTIONS))
    assert report.others == {"Experts": 6400, "Bilinear": 1600}
    assert "weights of other kinds of module: 6,400 of Experts, 1,600 of Bilinear" in str(report)
    plain = pc.sketch_report(pc.sketchify(nn.Sequential(nn.Linear(40, 40), nn.LayerNorm(40)), 0.5, **OPTIONS))
    assert (plain.others, "other kinds" in str(plain)) == ({}, False)


def test_classes_of_the_name_of_one_of_torch_are_named_in_full():
    class Linear(nn.Module):
        """As PyTorch Geometric has its own."""

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(40, 40))

        def forward(self, x):
            return nn.functional.linear(x, self.weight)

        def _save_to_state_dict(self, destination, prefix, keep_vars):
            destination[f"{prefix}turned"] = self.weight.t()

    report = pc.sketch_report(pc.sketchify(nn.Sequential(nn.Linear(40, 40), Linear()), 0.5, **OPTIONS))
    assert report.others == {f"{__name__}.Linear": 1600}
    wanted = (
        rf"wanted .*nn\.Linear.*; there are weights of other kinds of module: 1,600 of {__name__}\.Linear"
    )
    with pytest.raises(pc.PantherError, match=wanted):
        pc.sketchify(nn.Sequential(Linear()), 0.5, **OPTIONS)


def test_layers_that_are_read_and_never_called_stay_dense(recwarn):
    small = pc.sketchify(Multiplies(), 0.5, data=batches(), include="*", **OPTIONS)
    assert not recwarn.list
    assert isinstance(small.first, pc.SketchedLinear)
    (row,) = pc.sketch_report(small).skipped
    assert (row.name, type(small.step)) == ("step", nn.Linear)
    assert row.reason == "forward uses its weight directly, and never called the layer on the data"


def test_nothing_is_sketched_where_all_weights_are_read_and_never_called():
    with pytest.raises(NoTargetError, match="step: forward uses its weight directly, and never called"):
        pc.sketchify(Multiplies(), 0.5, data=batches(), include="step", **OPTIONS)


def test_no_warning_where_all_layers_are_reached(recwarn):
    pc.sketchify(Gated(), 0.5, data=run, **OPTIONS)
    assert not [one for one in recwarn if issubclass(one.category, UserWarning)]


def run(model):
    for x in batches():
        model(x)
        model(x, spare=True)


def test_layers_that_saw_fewer_rows_than_inputs():
    small = pc.sketchify(Gated(), 0.5, data=batches(4, count=4), exclude="spare", include="*", **OPTIONS)
    notes = [row.note for row in pc.sketch_report(small).sketched]
    assert notes == [
        "fewer samples (16) than inputs (40): regularised",
        "fewer samples (16) than inputs (48): regularised",
    ]


def test_allocation_is_told():
    model = nn.Sequential(nn.Linear(40, 80), nn.ReLU(), nn.Linear(80, 80), nn.ReLU(), nn.Linear(80, 10))
    small = pc.sketchify(model, 0.3, data=batches(64), include="*", **OPTIONS)
    report = pc.sketch_report(small)
    assert {name.partition(",")[0] for name in report.tried} >= {"energy"}
    assert len(report.tried) > 1
    assert report.allocation == min(report.tried, key=report.tried.get)
    last = next(line for line in str(report).splitlines() if line.startswith("ranks divided by"))
    assert all(f"{name} {distance:.3g}" in last for name, distance in report.tried.items())
    json.dumps(report.to_dict())
    bare = pc.sketch_report(pc.sketchify(model, 0.3, include="*", **OPTIONS))
    assert (bare.allocation, bare.tried) == ("", {})
    assert "ranks divided" not in str(bare)


def test_what_data_told_is_saved_and_loaded(tmp_path):
    with pytest.warns(UserWarning, match="never reached"):
        small = pc.sketchify(Gated(), 0.3, data=batches(), include="*", **OPTIONS)
    pc.save_sketched(small, tmp_path)
    assert pc.sketch_report(pc.load_sketched(Gated(), tmp_path)) == pc.sketch_report(small)


def test_checkpoints_from_before_these_fields_load(tmp_path):
    pc.save_sketched(pc.sketchify(Gated(), 0.3, include="*", **OPTIONS), tmp_path)
    file = tmp_path / "sketch.json"
    document = json.loads(file.read_text())
    for key in ("allocation", "tried"):
        del document["record"]["plan"][key]
    for fitted in document["record"]["fitted"].values():
        for key in ("predicted_error", "note", "output_error", "sensitivity"):
            del fitted[key]
    del document["record"]["curve"], document["sha256"]
    text = json.dumps(document, sort_keys=True)
    document["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    file.write_text(json.dumps(document))
    report = pc.sketch_report(pc.load_sketched(Gated(), tmp_path))
    assert [row.note for row in report.rows] == ["", "", ""]
    assert report.allocation == ""


def test_a_second_call_keeps_what_the_first_one_told():
    model = nn.Sequential(nn.Linear(40, 80), nn.ReLU(), nn.Linear(80, 80))
    first = pc.sketchify(model, 0.3, data=batches(64), include="0", **OPTIONS)
    second = pc.sketchify(first, 0.5, include="2", **OPTIONS)
    assert pc.sketch_report(second).allocation == pc.sketch_report(first).allocation != ""
    assert pc.sketch_report(second).rows[0].output_error == pc.sketch_report(first).rows[0].output_error


@pytest.mark.parametrize(("layers", "with_data"), [(0, False), (3, False), (3, True), (30, True)])
def test_picture(tmp_path, layers, with_data):
    row = ReportRow(
        "a.very.long.name." * 6 + "fc", "SketchedLinear", "pair", (2,), 100, 40, 10, 4, "svd", 1.7, ""
    )
    if with_data:
        row = replace(row, predicted_error=0.2, output_error=0.3, sensitivity=1e-3)
    report = SketchReport((row,) * layers, 100, 40, 100, 40, "0.5", "module tree")
    report.plot(tmp_path / "report.png")
    width, height = struct.unpack(">II", (tmp_path / "report.png").read_bytes()[16:24])
    assert width == 1430
    assert height >= layers * 20  # room for a line of text each


def test_tied_layers_are_counted_once(tmp_path):
    model = nn.ModuleDict({"one": nn.Linear(16, 16), "other": nn.Linear(16, 16), "same": nn.Linear(16, 16)})
    model["other"].weight = model["same"].weight = model["one"].weight
    model["same"].bias = model["one"].bias
    report = pc.sketch_report(
        pc.sketchify(model, 0.5, min_params=0, allow_slower=True, progress=False, include="*")
    )
    rows = {row.name: row for row in report.rows}
    assert [rows[name].dense_numbers for name in model] == [272, 16, 0]
    assert rows["other"].stored_numbers == 16
    assert rows["same"].stored_numbers == 0
    assert rows["other"].shared == rows["same"].shared == "weight of one"
    assert sum(row.stored_numbers for row in report.sketched) == report.replaced_stored_numbers
    assert sum(row.dense_numbers for row in report.sketched) == report.replaced_dense_numbers
    report.plot(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").exists()


def test_a_layer_put_back_to_dense_is_in_the_ratio(pair):
    dense, small = pair
    small.block[0] = copy.deepcopy(dense.block[0])
    report = sketch_report(small)
    row = next(row for row in report.rows if row.name == "block.0")
    assert (row.scheme, row.reason) == ("dense", "put back to dense after the sketch")
    assert row.stored_numbers == row.dense_numbers == count(dense.block[0])
    assert report.replaced_dense_numbers == count(dense.block[0]) + count(dense.block[2])
    assert report.replaced_stored_numbers == count(dense.block[0]) + count(small.block[2])
    assert "replaced weights and 1 put back to dense: " in str(report)
    assert "put back" not in str(sketch_report(pair[1].block[2]))
    del small.block[0]
    report = sketch_report(small)
    assert report.replaced_dense_numbers == sum(row.dense_numbers for row in report.sketched)


def test_an_attention_put_back_to_dense_is_in_the_ratio():
    dense = nn.ModuleDict({"mix": nn.MultiheadAttention(32, 4), "last": nn.Linear(32, 32)})
    small = pc.sketchify(dense, 0.5, include="*", synthetic=False, **OPTIONS)
    small["mix"] = copy.deepcopy(dense["mix"])
    report = sketch_report(small)
    assert report.replaced_dense_numbers == count(dense)
    assert report.replaced_stored_numbers == count(dense["mix"]) + count(small["last"])
    assert report.others == {}


@pytest.mark.parametrize("path", [None, 3, "", "layers.of_no_kind", "none/layers.png", "a\0.png"])
def test_pictures_that_cannot_be_written(pair, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    says = r"path=.*(, wanted|a NUL)|cannot write the picture none/layers\.png"
    with pytest.raises((ConfigError, ConfigTypeError), match=says):
        sketch_report(pair[1]).plot(path)
    assert not list(tmp_path.iterdir())


def test_a_picture_is_written_whole_or_not_at_all(pair, tmp_path, monkeypatch):
    report = sketch_report(pair[1])
    report.plot(tmp_path / "layers")
    before = (tmp_path / "layers.png").read_bytes()

    def cut_short(figure, file, **options):
        Path(file).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", cut_short)
    with pytest.raises(KeyboardInterrupt):
        report.plot(tmp_path / "layers.png")
    assert [file.name for file in tmp_path.iterdir()] == ["layers.png"]
    assert (tmp_path / "layers.png").read_bytes() == before


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel])
def test_what_is_wrapped_is_reported_and_saved_as_it_is(pair, wrap, tmp_path):
    dense, small = pair
    wrapped = wrap(small)
    assert str(sketch_report(wrapped)) == str(sketch_report(small))
    pc.save_sketched(wrapped, tmp_path)
    again = pc.load_sketched(dense, tmp_path)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in small.state_dict().items())
