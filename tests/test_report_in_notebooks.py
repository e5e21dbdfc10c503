"""What a notebook shows of a report: the table that is printed, as HTML."""

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
