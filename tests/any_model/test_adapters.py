"""Adapters of PEFT are left alone with the layers that they carry, and merging them is right."""

import pytest
import torch
from torch import nn

import panther_compile as pc
from panther_compile.errors import FactoredWeightError, NoTargetError, WrappedModelError
from panther_compile.layers.linear import SketchedLinear

OPTIONS = {"min_params": 1, "allow_slower": True, "include": "*"}


class BaseTunerLayer:
    """Goes by the name of PEFT's own."""


BaseTunerLayer.__module__ = "peft.tuners.tuners_utils"


class Adapted(nn.Module, BaseTunerLayer):
    """A layer with a low-rank adapter beside it, put together as PEFT does."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 4, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(4, base.out_features, bias=False)})

    @property
    def weight(self):
        return self.base_layer.weight

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))

    def merge(self):
        self.base_layer.weight.data += self.lora_B["default"].weight @ self.lora_A["default"].weight
        return self.base_layer


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


@pytest.mark.parametrize("data", [None, [torch.randn(64, 32) for _ in range(3)]], ids=["no data", "data"])
def test_an_adapter_is_left_alone_and_merged_right(data):
    torch.manual_seed(0)
    model = Model().eval()
    model.up = Adapted(model.up)
    small = pc.sketchify(model, 0.5, data=data, **OPTIONS)
    assert isinstance(small.down, SketchedLinear)
    assert type(small.up.base_layer) is nn.Linear
    reasons = {line.name: line.reason for line in pc.plan_sketch(model, 0.5, **OPTIONS).layers}
    assert reasons["up.base_layer"] == "part of the PEFT adapter up: call merge_and_unload() first"
    x = torch.randn(5, 32)
    wanted = small(x)
    with torch.no_grad():
        small.up = small.up.merge()
    torch.testing.assert_close(small(x), wanted)


def test_a_model_of_adapters_alone_says_what_to_do():
    model = Model()
    model.up, model.down = Adapted(model.up), Adapted(model.down)
    with pytest.raises(NoTargetError, match="merge_and_unload"):
        pc.sketchify(model, 0.5, **OPTIONS)


def test_merging_into_a_sketched_layer_raises():
    small = pc.sketchify(Model(), 0.5, **OPTIONS)
    small.up = Adapted(small.up)
    with torch.no_grad(), pytest.raises(FactoredWeightError, match="densify"):
        small.up.merge()


def test_factors_that_carry_an_adapter_are_not_multiplied_out():
    small = pc.sketchify(Model(), 0.5, **OPTIONS)
    small.up.up = Adapted(small.up.up)
    with pytest.raises(WrappedModelError, match="merge_and_unload"):
        pc.densify(small)


@pytest.mark.parametrize("when", ["before", "after"])
def test_lora_of_peft(when):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    targets = "up" if when == "before" else "(up|down)"
    lora = peft.LoraConfig(target_modules=f"(.*[.])?{targets}", init_lora_weights=False)
    x = torch.randn(5, 32)
    if when == "before":
        small = pc.sketchify(peft.get_peft_model(Model().eval(), lora).eval(), 0.5, **OPTIONS)
    else:  # on the sketched layers; their factors are no targets
        small = peft.get_peft_model(pc.sketchify(Model().eval(), 0.5, **OPTIONS), lora).eval()
    wanted = small(x)
    merged = small.merge_and_unload()
    torch.testing.assert_close(merged(x), wanted)
    torch.testing.assert_close(pc.densify(merged)(x), wanted)
