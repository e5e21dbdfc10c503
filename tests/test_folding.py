"""Layers that repeat share a row, which stands for all of them."""

import sys

import pytest
import torch
from torch import nn

import panther_compile as pc
from panther_compile.reporting.folding import fold


def rows(*names, rank=(), why="svd"):
    return [
        (name, "Linear", str(rank[place] if rank else 8), f"{1000 * (place + 1):,}", why)
        for place, name in enumerate(names)
    ]


def test_names_and_ranges():
    given = rows("embed", *(f"layers.{i}.mlp.up" for i in range(4)), "head", rank=(1, 20, 9, 100, 30, 2))
    found = fold(given, same=(1,))
    assert [row[0] for row, _ in found] == ["embed", "layers.[0-3].mlp.up", "head"]
    assert [places for _, places in found] == [(0,), (1, 2, 3, 4), (5,)]
    assert found[1][0] == ("layers.[0-3].mlp.up", "Linear", "9 - 100", "2,000 - 5,000", "svd")


def test_interleaved_layers_stand_where_the_first_stood():
    names = [f"layers.{i}.{part}" for i in range(3) for part in ("q", "k")]
    assert [row[0] for row, _ in fold(rows(*names), same=(1,))] == ["layers.[0-2].q", "layers.[0-2].k"]


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (("a.0.x", "a.2.x", "a.5.x"), "a.[0,2,5].x"),
        (("a.0.1.c", "a.1.1.c", "a.2.1.c"), "a.[0-2].1.c"),
        (("0", "2", "4"), "[0,2,4]"),
    ],
)
def test_which_numbers_differ(names, wanted):
    assert [row[0] for row, _ in fold(rows(*names), same=(1,))] == [wanted]


def test_places_in_a_layer_stay_apart():
    names = [f"layers.{i}.{part}" for i in range(4) for part in (0, 2)]
    assert [row[0] for row, _ in fold(rows(*names), same=(1,))] == ["layers.[0-3].0", "layers.[0-3].2"]


def test_two_are_shown_as_they_are():
    given = rows("a.0", "a.1")
    assert [row for row, _ in fold(given, same=(1,))] == given


def test_numbers_in_words_are_no_places():
    given = rows("conv1", "conv2", "conv3")
    assert [row for row, _ in fold(given, same=(1,))] == given


def test_other_kinds_and_reasons_stay_apart():
    given = rows("a.0", "a.1", "a.2")
    given[1] = (*given[1][:-1], "its sketch would run slower")
    assert [row for row, _ in fold(given, same=(1,))] == given
    given = rows("a.0", "a.1", "a.2")
    given[1] = (given[1][0], "Conv1D", *given[1][2:])
    assert [row for row, _ in fold(given, same=(1,))] == given


def test_unknown_numbers():
    given = [("a.0", "3", ""), ("a.1", "-", ""), ("a.2", "1x4", "")]
    assert fold(given, same=())[0][0] == ("a.[0-2]", "1x4 - 3", "")


def test_nothing():
    assert fold([], same=(1,)) == []


@pytest.fixture(scope="module")
def report():
    """Of six blocks and a head, fitted to data."""
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(6))
    model = nn.Sequential(nn.Sequential(*blocks), nn.Linear(32, 8))
    with torch.no_grad():  # so that none is best left whole
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                layer.weight.mul_(0.9 ** torch.arange(layer.in_features))
    data = [torch.randn(64, 32) for _ in range(4)]
    return pc.sketch_report(
        pc.sketchify(model, 0.5, data=data, narrow=False, min_params=0, progress=False, allow_slower=True)
    )


@pytest.mark.parametrize("width", [80, 120, 200])
def test_the_table_fits_the_terminal(monkeypatch, width, report):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(width))
    lines = str(report).splitlines()
    table = lines[1 : next(place for place, line in enumerate(lines) if line.startswith("predicted, output"))]
    assert max(map(len, table)) <= width
    assert sum("0.[0-5].0" in line for line in table) == 1
    assert sum("0.[0-5].2" in line for line in table) == 1
    for heading in ("layer", "rank", "ratio", "output"):
        assert heading in " ".join(table)
    assert ("sensitivity" in " ".join(table)) == (width == 200)
    assert len(report.rows) == 13
