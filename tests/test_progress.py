"""Bars whose time left goes by work."""

import io

import pytest
from torch import nn

from panther_compile.kinds.parts import work_on
from panther_compile.kinds.registry import kind_of
from panther_compile.records import Site
from panther_compile.reporting import progress
from panther_compile.reporting.progress import ProgressBar, with_progress

WORK = {"small": 1.0, "large": 8.0, "none": 0.0}


@pytest.mark.parametrize("progress", [True, False])
def test_items_come_in_order(progress):
    assert list(with_progress(list(WORK), WORK.__getitem__, desc="work", progress=progress)) == list(WORK)
    assert list(with_progress([], WORK.__getitem__, desc="work", progress=progress)) == []


def test_the_bar_goes_by_work(monkeypatch):
    bars = []

    class Kept(ProgressBar):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            bars.append(self)

    monkeypatch.setattr(progress, "ProgressBar", Kept)
    seen = []
    for _ in with_progress(["small", "large", "none", "small"], WORK.__getitem__, desc="work", progress=True):
        seen.append(bars[0].n / bars[0].total)
    assert seen == [0, 0.1, 0.9, 0.9]
    assert "4/4" in str(bars[0])


class Screen(io.StringIO):
    """A terminal, of which the lines that stay are read."""

    def isatty(self):
        return True

    def left(self):
        return [line for line in self.getvalue().rpartition("\r")[2].splitlines() if line.strip()]


def test_no_bar_stays(monkeypatch):
    screen = Screen()
    monkeypatch.setattr("sys.stderr", screen)
    for _ in ProgressBar(range(3), desc="items"):
        assert "items" in screen.getvalue()
    with ProgressBar(total=3, desc="steps") as bar:
        bar.update(2)
    assert screen.left() == []
    with pytest.raises(KeyError), ProgressBar(total=3, desc="stopped"):
        raise KeyError
    assert screen.left() == []


def test_what_is_asked_goes_before_the_terminal(monkeypatch):
    for stream, hidden in ((Screen(), False), (io.StringIO(), True), (None, True)):
        monkeypatch.setattr("sys.stderr", stream)
        assert ProgressBar(total=1).disable is hidden
        assert ProgressBar(total=1, progress=False).disable
    assert not ProgressBar(total=1, progress=True, file=io.StringIO()).disable


@pytest.mark.parametrize(
    ("layer", "wanted"),
    [
        (nn.Linear(30, 20), 20 * 20 * 50),
        (nn.Linear(20, 30), 20 * 20 * 50),
        (nn.Conv2d(8, 10, 3), 10 * 10 * 82),
        (nn.MultiheadAttention(16, 2), 4 * 16 * 16 * 32),
    ],
)
def test_work_of_a_layer(layer, wanted):
    site = Site("layer", layer, "")
    assert work_on(site, kind_of(layer)) == pytest.approx(wanted, rel=1e-9)
