"""Layers that one forward calls several times are fitted to all their calls, not to the first."""

import copy

import pytest
import torch
from torch import Tensor, nn

import panther_compile as pc

OPTIONS = {"min_params": 0, "allow_slower": True, "progress": False, "synthetic": False, "narrow": False}
LIVE, WIDTH = 12, 48


def states_of_few_units(kind: type[nn.RNNBase]) -> nn.Module:
    """A recurrent layer most of whose units stay zero, so that most columns of W_hh never count."""
    layer = kind(16, WIDTH, batch_first=True)
    with torch.no_grad():
        layer.weight_hh_l0.mul_(4.0)
        for name in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"):
            # Of an LSTM the third gate is what is written, of a GRU the last one.
            layer.get_parameter(name)[2 * WIDTH + LIVE : 3 * WIDTH].zero_()
    return nn.Sequential(layer).eval()


class Twice(nn.Module):
    """Calls a layer with nothing first, and then with its input."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * 0.0) + self.layer(x)


def error(small: nn.Module, dense: nn.Module, x: Tensor) -> float:
    with torch.no_grad():
        found, wanted = small(x), dense(x)
    if isinstance(found, tuple):
        found, wanted = found[0], wanted[0]
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_weights_are_fitted_to_all_steps(kind):
    dense = states_of_few_units(kind)
    mixing = torch.randn(3, 16)
    data = [torch.randn(8, 20, 3) @ mixing for _ in range(10)]
    small, alone = (pc.sketchify(dense, 0.5, data=given, include="0", **OPTIONS) for given in (data, None))
    assert "0.hh_l0" in [line.name for line in pc.sketch_report(small).plan.sketched]
    x = torch.randn(32, 20, 3) @ mixing
    assert error(small, dense, x) < 0.01 < 0.1 < error(alone, dense, x)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(48, 48), (64, 48)),
        (nn.Conv2d(48, 48, 1), (4, 48, 6, 6)),
        (nn.Conv2d(48, 48, 3, padding=1), (4, 48, 6, 6)),
    ],
    ids=["Linear", "1x1", "3x3"],
)
def test_a_shared_layer_is_fitted_to_all_its_calls(layer, shape):
    dense = Twice(layer).eval()
    mixing = torch.linalg.qr(torch.randn(48, 8)).Q  # inputs of eight directions

    def draw() -> Tensor:
        return torch.einsum("ci,ni...->nc...", mixing, torch.randn(shape[0], 8, *shape[2:]))

    small = pc.sketchify(dense, 0.5, data=[draw() for _ in range(12)], **OPTIONS)
    assert pc.sketch_report(small).plan.sketched
    assert error(small, dense, draw()) < 0.02


def test_a_branch_beside_a_shared_layer_is_fitted_to_all_its_calls():
    """What the weight lacks has rank 8, the branch 4: the inputs, of four directions, tell which of it."""
    dense = Twice(nn.Linear(48, 48)).eval()
    low = copy.deepcopy(dense)
    with torch.no_grad():
        low.layer.weight.add_(torch.randn(48, 8) @ torch.randn(8, 48))
    mixing = torch.linalg.qr(torch.randn(48, 4)).Q
    data = [torch.randn(64, 4) @ mixing.T for _ in range(12)]
    better = pc.add_residual(low, dense, rank=4, data=data[:-1])
    alone = pc.add_residual(low, dense, rank=4)
    assert error(better, dense, data[-1]) < 0.01 < 0.1 < error(alone, dense, data[-1])
