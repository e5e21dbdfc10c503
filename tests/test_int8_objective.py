"""objective="int8": budgets of the time of int8 products, for pairs, narrow layers and dense ones."""

import pytest
import torch
from torch import nn

import panther_compile as pc
from panther_compile.errors import NoTargetError
from panther_compile.factorization.balance import int8_time
from panther_compile.layers import SketchedLinear

OPTIONS = {"objective": "int8", "include": "*", "min_params": 0, "synthetic": False}


def seconds(plan):
    """The predicted time of the planned matrices over that of the dense ones."""
    dense = spent = 0
    for line in plan.layers:
        outputs, inputs = line.shape
        whole = int8_time(outputs, inputs)
        dense += whole
        if line.choice is None:
            spent += whole
        elif line.choice.scheme == "pair":
            spent += int8_time(outputs, inputs, line.choice.rank)
        else:
            kept = line.choice.ranks[0]
            writes = line.name == line.choice.link[0]
            spent += int8_time(kept, inputs) if writes else int8_time(outputs, kept)
    return spent / dense


@pytest.fixture
def model():
    """Two layers that hand features on, of which many say little, and two that do not."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(96, 512), nn.ReLU(), nn.Linear(512, 96), nn.LayerNorm(96), nn.Linear(96, 256)
    )
    with torch.no_grad():
        model[0].weight[128:] *= 0.02
        model[0].bias.zero_()
    return model.eval()


@pytest.mark.parametrize("ratio", [0.8, 0.65])
def test_time_is_what_the_budget_is_of(model, ratio):
    plan = pc.plan_sketch(model, ratio, **OPTIONS)
    assert plan.sketched
    assert {line.choice.scheme for line in plan.sketched} == {"pair"}
    assert ratio - 0.1 < seconds(plan) <= ratio
    for line in plan.sketched:
        module = pc.sketchify(model, ratio, **OPTIONS).get_submodule(line.name)
        assert isinstance(module, SketchedLinear)
        assert sum(one.numel() for one in module.parameters()) == line.choice.stored_numbers


def test_features_are_left_out_where_that_is_closer(model):
    x = torch.randn(256, 96)
    small = pc.sketchify(model, 0.6, data=x.split(32), **OPTIONS)
    assert isinstance(small[0], pc.NarrowLinear)
    assert small[0].narrow.out_features == small[2].narrow.in_features < 256
    assert type(small[0].narrow) is nn.Linear
    plan = pc.sketch_report(small).plan
    assert 0.4 < seconds(plan) <= 0.6
    wanted = model(x)
    assert (small(x) - wanted).norm() < 0.2 * wanted.norm()
    even = pc.prepare_int8(small, x.split(32)) if any(isinstance(m, SketchedLinear) for m in small) else small
    assert torch.allclose(even(x), small(x), atol=1e-4)


def test_what_no_pair_makes_faster_stays_dense():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 64), nn.ReLU(), nn.Linear(64, 32))
    lines = {line.name: line for line in pc.plan_sketch(model.eval(), 0.9, **OPTIONS).layers}
    assert lines["4"].choice is None
    assert "int8" in lines["4"].reason


@pytest.mark.parametrize(
    "layer",
    [nn.Conv2d(32, 64, 1), nn.Conv2d(32, 64, 3), nn.Embedding(512, 256), nn.LSTM(96, 512)],
    ids=lambda layer: type(layer).__name__,
)
def test_what_is_not_linear_is_left_alone(layer):
    with pytest.raises(NoTargetError):
        pc.sketchify(nn.Sequential(layer).eval(), 0.7, **OPTIONS)


def test_why_layers_stay_dense(model):
    lines = pc.plan_sketch(model, {"0": 0.4, "4": 0.75, "*": 1.0}, **OPTIONS).layers
    reasons = {line.name: line.reason for line in lines if line.choice is None}
    assert reasons["0"] == (
        "rank 1 would take 61,608 multiply-adds of int8 time, more than its share of the budget"
    )
    assert reasons["2"] == "ratio is 1"
    convolutions = nn.Sequential(nn.Conv2d(64, 64, 3), nn.Conv2d(64, 64, 1))
    with pytest.raises(NoTargetError, match=r"0: objective='int8' sketches linear layers.*no Conv2d"):
        pc.plan_sketch(convolutions, 0.5, **OPTIONS)
