"""What the study says of errors, against what they do."""

import math

import pytest
import torch
from torch import nn

from panther_compile.calibration.study import study_layers
from panther_compile.config import SketchConfig
from panther_compile.kinds.targets import find_targets, watch
from panther_compile.models.batches import Call
from panther_compile.records import Site

NOISE = 1e-3  # of a weight


class Pools(nn.Module):
    """Layers with 256, 64 and one row a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Conv2d(8, 16, 1)
        self.kernel = nn.Conv2d(16, 16, 3, stride=2, padding=1)
        self.pooled = nn.Linear(16, 12)

    def forward(self, x):
        return self.pooled(torch.tanh(self.kernel(torch.tanh(self.large(x)))).mean((2, 3)))


class Routes(nn.Module):
    """Layers of which one is given an eighth of the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.seldom, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 8)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        return self.last(torch.cat([torch.tanh(self.seldom(h[:8])), h[8:]]))


CASES = {
    "maps that grow small": (Pools, lambda: torch.randn(16, 8, 16, 16)),
    "rows that are routed": (Routes, lambda: torch.randn(64, 16)),
}


def studied(model: nn.Module, batches: list[torch.Tensor], output: str):
    sites = [Site(name, one, type(one).__name__) for name, one in model.named_children()]
    targets, _ = find_targets(sites)
    calls, config = [Call((x,), {}) for x in batches], SketchConfig(output=output, progress=False)
    return study_layers(watch(model, targets), targets, calls, config)[0]


@pytest.mark.parametrize("case", CASES)
def test_errors_of_all_layers_cost_what_the_study_says(case):
    """White errors of a layer's outputs: the squared distance of the results over what the study expects."""
    torch.manual_seed(0)
    build, draw = CASES[case]
    model, batches = build().eval(), [draw() for _ in range(24)]
    study = studied(model, batches, "features")
    ratios = {}
    with torch.no_grad():
        for name, layer in model.named_children():
            lost = 0.0
            for x in batches:
                wanted = model(x)
                handle = layer.register_forward_hook(
                    lambda _, given, out: out + NOISE * torch.randn_like(out)
                )
                lost += float((model(x) - wanted).square().sum())
                handle.remove()
            outputs = layer.weight.shape[0]
            ratios[name] = math.log(study.cost(name) * outputs * NOISE**2 / lost)
    assert max(ratios.values()) - min(ratios.values()) < math.log(2.0), ratios


@pytest.mark.parametrize("logits", [True, False])
def test_what_a_small_error_does_is_as_far_as_results_are_off(logits):
    torch.manual_seed(0)
    model, batches = Routes().eval(), [torch.randn(64, 16) for _ in range(24)]
    study = studied(model, batches, "logits" if logits else "features")
    off, squares, rows, power = 0.0, 0.0, 0, 0.0
    with torch.no_grad():
        for x in batches:
            wanted, out = model(x), model.first(x)
            handle = model.first.register_forward_hook(
                lambda _, given, out: out + NOISE * torch.randn_like(out)
            )
            found = model(x)
            handle.remove()
            rows, power = rows + len(x), power + float((out - model.first.bias).square().sum())
            squares += float(wanted.square().sum())
            chances = wanted.softmax(-1)
            divergence = 2 * (chances * (wanted.log_softmax(-1) - found.log_softmax(-1))).sum()
            off += float(divergence if logits else (found - wanted).square().sum())
    relative = NOISE**2 * rows * model.first.out_features / power
    assert off / (rows if logits else squares) == pytest.approx(study.damage("first") * relative, rel=0.3)
