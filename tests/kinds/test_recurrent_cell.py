"""nn.LSTMCell and nn.GRUCell: the same as torch's at full rank, and through every route."""

import pytest
import torch
from kinds import routes
from torch import nn

import panther_compile as pc
from panther_compile.kinds.registry import kind_of


def opened(cell):
    """The replacement with dense parts: torch's arithmetic, weight by weight."""
    kind = kind_of(cell)
    return kind.assemble(cell, kind.parts(cell))


def states(found):
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("make", [nn.LSTMCell, nn.GRUCell])
def test_parts_compute_what_torch_computes(make, bias):
    dense = make(7, 9, bias=bias)
    cell = opened(dense)
    for x in (torch.randn(3, 7), torch.randn(7)):
        state = None
        for _ in range(3):
            wanted, found = dense(x, state), cell(x, state)
            torch.testing.assert_close(states(found), states(wanted), rtol=1e-5, atol=1e-6)
            state = wanted
    assert cell.dense_numbers == sum(p.numel() for p in dense.parameters())
    again = cell.to_dense()
    assert all(torch.equal(p, again.get_parameter(n)) for n, p in dense.named_parameters())


@pytest.mark.parametrize("make", [nn.LSTMCell, nn.GRUCell])
def test_other_shapes_are_refused_as_torch_refuses_them(make):
    dense = make(7, 9)
    for x, error in ((torch.randn(3, 8), RuntimeError), (torch.randn(2, 3, 7), ValueError)):
        for cell in (dense, opened(dense)):
            with pytest.raises(error):
                cell(x)


@pytest.mark.parametrize("state", [(1, 9), (9,)])
def test_states_are_not_spread_over_a_batch(state):
    for dense in (nn.LSTMCell(7, 9), nn.GRUCell(7, 9)):
        given = torch.randn(state)
        for cell in (dense, opened(dense)):
            with pytest.raises((RuntimeError, ValueError)):
                cell(torch.randn(3, 7), (given, given) if isinstance(dense, nn.LSTMCell) else given)


@pytest.mark.parametrize("make", [nn.LSTMCell, nn.GRUCell])
def test_under_autocast(make):
    dense, x = make(7, 9), torch.randn(3, 7)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        first = opened(dense)(x)
        again = opened(dense)(x, first)
    wanted = dense(x, dense(x))
    for found, one in zip(states(again), states(wanted), strict=True):
        torch.testing.assert_close(found.float(), one, rtol=0.05, atol=0.05)


class Reader(nn.Module):
    """Reads a sequence step by step, with attention to nothing."""

    def __init__(self, make):
        super().__init__()
        self.cell, self.out = make(24, 32), nn.Linear(32, 16)

    def forward(self, x):
        state, outs = None, []
        for step in range(6):
            state = self.cell(x[:, step], state)
            outs.append(state if isinstance(self.cell, nn.GRUCell | pc.SketchedGRUCell) else state[0])
        return self.out(torch.stack(outs, 1))


@pytest.fixture(
    params=[
        pytest.param((nn.LSTMCell, "SketchedLSTMCell"), id="LSTM"),
        pytest.param((nn.GRUCell, "SketchedGRUCell"), id="GRU"),
    ]
)
def case(request):
    make, name = request.param
    torch.manual_seed(0)
    mixing = torch.randn(4, 24)
    return lambda: Reader(make), [torch.randn(8, 6, 4) @ mixing for _ in range(3)], getattr(pc, name)


def test_weights_alone_saved_skeleton_and_partition(case, tmp_path):
    build, batches, layer_type = case
    small = routes.by_weights(build(), batches[0], layer_type)
    assert isinstance(small.cell.hh, pc.SketchedLinear)
    routes.saved_and_loaded(small, build(), batches[0], tmp_path / "saved")
    routes.as_skeleton(build, small)
    routes.traced(build(), batches[0], layer_type)
    routes.partitioned(small, batches[0])


def test_data_and_healing(case):
    build, batches, layer_type = case
    model = build()
    routes.by_data(model, batches, batches[0], layer_type)
    routes.healed(model, batches, batches[0])


def test_exported(case, tmp_path):
    build, batches, layer_type = case
    small = routes.by_weights(build(), batches[0], layer_type)
    routes.exported(small, batches[0], tmp_path / "small.onnx")


def test_compiled(case):
    build, batches, _ = case
    small = pc.sketchify(build(), 0.6, **routes.OPTIONS).eval()
    with torch.no_grad():
        torch._dynamo.reset()
        found = torch.compile(small, backend="panther", options={"inner": "eager"})(batches[0])
        torch.testing.assert_close(found, small(batches[0]), rtol=1e-4, atol=1e-4)
