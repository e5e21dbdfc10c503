"""Where data tells less than the weights alone, the weights alone are sketched, and the report says so."""

import pytest
import torch
from torch import nn

import panther_compile as pc

OPTIONS = {"min_params": 1, "allow_slower": True, "include": "*"}


def steep(layer):
    """Its weight with singular values that fall off, so that the weights alone tell which ranks to keep."""
    with torch.no_grad():
        left, values, right = torch.linalg.svd(layer.weight.flatten(1), full_matrices=False)
        falling = values[0] * 0.85 ** torch.arange(len(values))
        layer.weight.copy_((left @ torch.diag(falling) @ right).view_as(layer.weight))
    return layer


def made(kind):
    torch.manual_seed(0)
    if kind == "mlp":
        layers = [steep(nn.Linear(64, 64)), nn.ReLU(), steep(nn.Linear(64, 64))]
        return nn.Sequential(*layers).eval(), (64,)
    layers = [steep(nn.Conv2d(16, 32, 3, padding=1)), nn.ReLU(), steep(nn.Conv2d(32, 16, 1))]
    return nn.Sequential(*layers).eval(), (16, 4, 4)


def error(small, model, shape):
    x = torch.randn(256, *shape, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        wanted = model(x)
        return float((small(x) - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_few_data_are_never_worse_than_none(kind):
    model, shape = made(kind)
    none = pc.sketchify(model, 0.4, **OPTIONS)
    few = pc.sketchify(model, 0.4, data=[torch.randn(1, *shape) for _ in range(6)], **OPTIONS)
    many = pc.sketchify(model, 0.4, data=[torch.randn(64, *shape) for _ in range(12)], **OPTIONS)
    alone = error(none, model, shape)
    assert error(few, model, shape) <= 1.05 * alone  # a held-out batch is one sample here
    assert error(many, model, shape) < alone
    report = str(pc.sketch_report(few))
    if "weights alone" in pc.sketch_report(few).allocation:
        assert "data too few" in report
    assert "data too few" not in str(pc.sketch_report(many))


def test_the_report_says_that_data_were_too_few():
    model, shape = made("mlp")
    few = pc.sketchify(model, 0.4, data=[torch.randn(1, *shape) for _ in range(6)], **OPTIONS)
    report = pc.sketch_report(few)
    assert report.allocation == "weights alone"
    assert report.tried["weights alone"] < min(v for name, v in report.tried.items() if "alone" not in name)
    assert all("data too few" in row.note for row in report.sketched)
