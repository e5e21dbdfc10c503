"""What a notebook shows of a report, a plan, an ONNX report: the table that is printed, as HTML."""

import dataclasses
import html
import json
from html.parser import HTMLParser

import torch
from torch import nn

import panther_compile as pc

OPTIONS = {"progress": False, "min_params": 0, "allow_slower": True}


class Reader(HTMLParser):
    """The cells of a table, by row, and whether each tag is closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.rows, self.bars = [], [], 0
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        if tag == "br":
            return
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        self.bars += "gradient" in dict(attrs).get("style", "")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def test_the_html_is_the_table():
    model = nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 48), nn.Linear(48, 5))
    for options in ({}, {"data": [torch.randn(32, 48) for _ in range(4)]}):
        report = pc.sketch_report(pc.sketchify(model, 0.5, **options, **OPTIONS))
        found = Reader(report._repr_html_())
        head, *rows = found.rows
        assert head[:3] == ["layer", "kind", "scheme"]
        assert [row[0] for row in rows] == [row.name for row in report.rows]
        assert {len(row) for row in rows} == {len(head)}
        assert found.bars == sum(row.dense_numbers > 0 for row in report.rows)
        assert all(cell in str(report) for row in rows for cell in row[:9])


def test_names_are_escaped():
    model = nn.Sequential()
    model.add_module("<b>&", nn.Linear(48, 48))
    model.add_module("head", nn.Linear(48, 5))
    text = pc.sketch_report(pc.sketchify(model, 0.5, **OPTIONS))._repr_html_()
    assert Reader(text).rows[1][0] == "<b>&"


def test_a_plan_is_its_table_with_bars():
    model = nn.Sequential(*(nn.Linear(48, 48) for _ in range(5)), nn.Linear(48, 5))
    plan = pc.plan_sketch(model, 0.5, **OPTIONS)
    found = Reader(plan._repr_html_())
    head, *rows = found.rows
    assert rows[0][0] == "[0-4]"  # layers that repeat are one row
    assert [row[0] for row in rows] == ["[0-4]", "5"]
    assert found.bars == len(rows)
    assert all(cell in str(plan) for row in rows for cell in row)
    assert f"{plan.stored_numbers:,} of {plan.dense_numbers:,}" in plan._repr_html_()
    assert {len(row) for row in rows} == {len(head)}


def test_an_onnx_report_is_its_plan_and_its_sizes(tmp_path):
    model = nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 48)).eval()
    pc.export_onnx(model, (torch.randn(2, 48),), tmp_path / "dense.onnx")
    report = pc.sketch_onnx(tmp_path / "dense.onnx", tmp_path / "small.onnx", 0.5, **OPTIONS)
    text = report._repr_html_()
    assert Reader(text).rows == Reader(report.plan._repr_html_()).rows
    for line in (str(report.closeness), f"{report.dense_bytes:,} to {report.sketched_bytes:,} bytes"):
        assert line in html.unescape(text)
        assert line in str(report)
    document = json.loads(json.dumps(report.to_dict()))
    assert document["output_errors"] == report.output_errors
    assert document["fitted"].keys() == {line.name for line in report.plan.sketched}
    assert pc.SketchPlan.from_json(json.dumps({key: document[key] for key in vars_of(report.plan)}))


def vars_of(record):
    return [field.name for field in dataclasses.fields(record)]
