"""Reports and plans as data frames."""

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


def test_plans_and_onnx_reports(tmp_path):
    pandas = pytest.importorskip("pandas")
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval()
    plan = pc.plan_sketch(model, 0.5, progress=False, min_params=0, allow_slower=True)
    frame = plan.to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.index) == [line.name for line in plan.layers]
    assert frame.loc["0", "rank"] == plan.layers[0].choice.rank
    assert frame.loc["2", "scheme"] == "dense"
    pc.export_onnx(model, (torch.randn(2, 64),), tmp_path / "dense.onnx")
    report = pc.sketch_onnx(tmp_path / "dense.onnx", tmp_path / "small.onnx", 0.5, min_params=0)
    frame = report.to_pandas()
    assert list(frame.index) == [line.name for line in report.plan.layers]
    for name, fitted in report.fitted.items():
        assert frame.loc[name, "method"] == fitted.method
        assert frame.loc[name, "weight_error"] == fitted.error
