"""nn.LSTMCell and nn.GRUCell: the same as torch's at full rank; their routes are in `test_recurrent.py`."""

import pytest
import torch
from kinds import routes
from torch import nn

import panther_compile as pc
from panther_compile.layers import SketchedGRUCell


def states(found):
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("make", [nn.LSTMCell, nn.GRUCell])
def test_parts_compute_what_torch_computes(make, bias):
    dense = make(7, 9, bias=bias)
    cell = routes.opened(dense)
    for x in (torch.randn(3, 7), torch.randn(7)):
        state = None
        for _ in range(3):
            wanted, found = dense(x, state), cell(x, state)
            torch.testing.assert_close(states(found), states(wanted), rtol=1e-5, atol=1e-6)
            state = wanted
    assert cell.dense_numbers == sum(p.numel() for p in dense.parameters())
    again = cell.to_dense()
    assert all(torch.equal(p, again.get_parameter(n)) for n, p in dense.named_parameters())


class Loop(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(24, 16)

    def forward(self, x):
        state = self.cell.weight_hh.new_zeros(x.shape[1], 16) + self.cell.bias_hh[:16].to(x.dtype)
        for step in x:
            state = self.cell(step.to(self.cell.weight_ih.dtype), state)
        return state


def test_a_forward_may_read_the_weights_by_the_names_of_torch():
    model, batches = Loop(), [torch.randn(3, 4, 24) for _ in range(4)]
    small = pc.sketchify(model, 0.5, data=batches, **routes.OPTIONS)
    assert isinstance(small.cell, SketchedGRUCell)
    wanted = small(batches[0])
    torch.testing.assert_close(pc.densify(small)(batches[0]), wanted)
    compiled = torch.compile(small, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(batches[0]), wanted)
    torch.testing.assert_close(torch.export.export(small, (batches[0],)).module()(batches[0]), wanted)


@pytest.mark.parametrize("make", [nn.LSTMCell, nn.GRUCell])
def test_other_shapes_are_refused_as_torch_refuses_them(make):
    dense = make(7, 9)
    for x, error in ((torch.randn(3, 8), RuntimeError), (torch.randn(2, 3, 7), ValueError)):
        for cell in (dense, routes.opened(dense)):
            with pytest.raises(error):
                cell(x)


@pytest.mark.parametrize("state", [(1, 9), (9,)])
def test_states_are_not_spread_over_a_batch(state):
    for dense in (nn.LSTMCell(7, 9), nn.GRUCell(7, 9)):
        given = torch.randn(state)
        for cell in (dense, routes.opened(dense)):
            with pytest.raises((RuntimeError, ValueError)):
                cell(torch.randn(3, 7), (given, given) if isinstance(dense, nn.LSTMCell) else given)


@pytest.mark.parametrize("make", [nn.LSTMCell, nn.GRUCell])
def test_under_autocast(make):
    dense, x = make(7, 9), torch.randn(3, 7)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        first = routes.opened(dense)(x)
        again = routes.opened(dense)(x, first)
    wanted = dense(x, dense(x))
    for found, one in zip(states(again), states(wanted), strict=True):
        torch.testing.assert_close(found.float(), one, rtol=0.05, atol=0.05)
