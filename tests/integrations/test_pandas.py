"""A report as a data frame."""

import sys

import pytest
import torch
from torch import nn

import panther_compile as pc
from panther_compile.errors import MissingExtraError

pytestmark = pytest.mark.integrations


def test_the_rows_by_name(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    report = pc.sketch_report(pc.sketchify(model, 0.5, progress=False, min_params=0, allow_slower=True))
    pandas = pytest.importorskip("pandas")
    frame = report.to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.index) == [row.name for row in report.rows]
    assert frame.loc[frame.scheme != "dense", "stored_numbers"].sum() == report.replaced_stored_numbers
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtraError, match="pip install pandas"):
        report.to_pandas()
