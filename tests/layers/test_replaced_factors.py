"""Factors that a quantizer replaced by layers of its own, which hold no weight to compute with."""

import pytest
import torch
from torch import nn

import panther_compile as pc
from panther_compile.errors import WeightError

MODELS = {
    "linear": lambda: nn.Linear(32, 32),
    "attention": lambda: nn.MultiheadAttention(32, 4),
    "lstm": lambda: nn.LSTM(32, 32),
}
ACTIONS = {
    "report on the model": lambda small, dense: pc.sketch_report(small),
    "densify the model": lambda small, dense: pc.densify(small),
    "heal the model": lambda small, dense: pc.heal(small, teacher=dense, data=torch.randn(2, 4, 32).unbind()),
    "call prepare_int8": lambda small, dense: pc.prepare_int8(small),
}


class Opaque(nn.Module):
    """Its weight and bias are methods, as those of torch.ao's dynamically quantized layers."""

    def __init__(self, layer):
        super().__init__()
        self.layer = [layer]

    def weight(self):
        return self.layer[0].weight

    def bias(self):
        return self.layer[0].bias

    def forward(self, x):
        return self.layer[0](x)


def replaced(module):
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            setattr(module, name, Opaque(child))
        else:
            replaced(child)
    return module


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("kind", MODELS)
def test_factors_without_a_weight_are_named(kind, action):
    dense = nn.Sequential(MODELS[kind]())
    small = replaced(
        pc.sketchify(dense, 0.5, include=lambda *_: True, min_params=0, allow_slower=True, synthetic=False)
    )
    assert "Opaque" in repr(small)
    with pytest.raises(WeightError, match=f"is a Opaque, whose weight is no tensor: {action} before it is"):
        ACTIONS[action](small, dense)


def test_narrow_layers_without_a_weight_are_shown():
    layer = pc.NarrowLinear(16, 8, 4, side="out")
    assert "bias=True, stored=" in repr(replaced(layer))
