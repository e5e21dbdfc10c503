"""Gradients of a backward that is divided into that of the inputs and that of the weights."""

import pytest
import torch
import torch.nn.functional as F
from parallel.ranks import SENDS_ALL
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from panther_compile.parallel.divided_backward import joined

pytestmark = pytest.mark.skipif(not SENDS_ALL, reason="this torch has no zero-bubble schedules for us")


class Twice(nn.Module):
    """One weight that is used several times in a chain, with biases of their own."""

    def __init__(self, count):
        super().__init__()
        self.biases = nn.ParameterList([nn.Parameter(torch.randn(4)) for _ in range(count)])
        self.weight = nn.Parameter(torch.randn(4, 4) / 2)

    def forward(self, x):
        for bias in self.biases:
            x = torch.tanh(F.linear(x, self.weight, bias))
        return x


class Branches(nn.Module):
    """Parts of one weight on the way to queries, keys and values, and a layer of its own behind each."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.hidden = nn.Linear(8, 8)

    def forward(self, x):
        y = self.norm(x)
        # The hidden layer comes before and behind the attention, whose own weights lie between.
        return x + self.hidden(self.attention(y, y.flip(1), self.hidden(y), need_weights=False)[0])


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_a_weight_that_is_used_again(count):
    torch.manual_seed(count)
    compare(Twice(count), torch.randn(3, 4))


def test_branches_of_attention():
    torch.manual_seed(0)
    compare(Branches(), torch.randn(2, 5, 8))


def compare(model, x):
    x.requires_grad_()
    parameters = list(model.parameters())
    wanted = torch.autograd.grad(model(x).square().sum(), [x, *parameters])
    x.grad = None
    (given, *_), groups = stage_backward_input([model(x).square().sum()], None, [x], iter(parameters))
    stage_backward_weight(iter(parameters), joined(groups))
    for found, expected in zip([given, *(one.grad for one in parameters)], wanted, strict=True):
        torch.testing.assert_close(found, expected)


def test_weights_of_their_own_stay_apart():
    model, x = (
        nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)),
        torch.randn(2, 4, requires_grad=True),
    )
    _, groups = stage_backward_input([model(x).sum()], None, [x], model.parameters())
    assert sorted(len(group["params"]) for group in joined(groups)) == [2, 2]


def test_groups_without_gradients_are_left_out():
    assert joined([{"params": {1}, "intermediates": ["a"]}]) == []
