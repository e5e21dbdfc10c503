"""Layers whose type a forward asks for stay what they are: a sketch is of another type."""

import pytest
import torch
from torch import nn

import panther_compile as pc

OPTIONS = {"min_params": 0, "allow_slower": True, "progress": False, "synthetic": False}


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32)])
        self.out = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 32))


class Stack(Layers):
    """Bends what linear layers give, and nothing else."""

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh() if self.bends(layer) else layer(x)
        return self.out(x)

    def bends(self, layer):
        return isinstance(layer, nn.Linear)


class ByType(Stack):
    def bends(self, layer):
        return type(layer) is nn.Linear


class ByClass(Stack):
    def bends(self, layer):
        return layer.__class__ in (nn.Conv2d, nn.Linear)


class KnowsSketches(Stack):
    def bends(self, layer):
        return isinstance(layer, nn.Linear | pc.SketchedLinear)


class ByPlace(Layers):
    def forward(self, x):
        for place, layer in enumerate(self.layers):
            x = layer(x).tanh() if isinstance(self.layers[place], nn.Linear | nn.Conv1d) else layer(x)
        return self.out(x)


class AsksOne(Layers):
    """Does not mind the types of others."""

    def forward(self, x):
        first, norm, second = self.layers
        x = norm(first(x)) if isinstance(x, torch.Tensor) else x[0]
        return self.out(second(x)) if isinstance(self.out[2], nn.Linear) else second(x)


@pytest.mark.parametrize(
    ("cls", "sketched"),
    [
        (Stack, set()),
        (ByType, set()),
        (ByClass, set()),
        (ByPlace, {"out.0", "out.2"}),
        (AsksOne, {"layers.0", "layers.2"}),
    ],
)
def test_their_outputs_are_those_of_the_dense_model(cls, sketched):
    torch.manual_seed(0)
    model, x = nn.Sequential(cls(), nn.Linear(32, 32), nn.Tanh()).eval(), torch.randn(64, 32)
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, nn.Linear):  # of rank 3, so that a sketch is exact
                layer.weight.copy_(torch.randn(layer.out_features, 3) @ torch.randn(3, layer.in_features) / 6)
    for data in (None, [x] * 4):
        small = pc.sketchify(model, 0.6, data=data, include="*", **OPTIONS)
        plan = pc.sketch_report(small).plan
        assert {line.name for line in plan.sketched} == {"1", *(f"0.{name}" for name in sketched)}
        torch.testing.assert_close(small(x), model(x), rtol=1e-3, atol=1e-4)
    reasons = {line.reason for line in plan.layers if line.choice is None}
    assert f"forward of {cls.__name__} asks whether it is of the type Linear" in reasons


def test_a_forward_that_asks_for_sketched_layers_too():
    small = pc.sketchify(KnowsSketches(), 0.6, include="*", **OPTIONS)
    names = {line.name for line in pc.sketch_report(small).plan.sketched}
    assert names == {"layers.0", "layers.2", "out.0", "out.2"}
