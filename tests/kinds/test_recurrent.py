"""nn.LSTM and nn.GRU: the same as torch's at full rank; with cells, through every route."""

import pytest
import torch
from kinds import routes
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import panther_compile as pc
from panther_compile.layers.recurrent import SketchedGRU, SketchedLSTM

OPTIONS = {
    "one": {},
    "stack": {"num_layers": 2, "batch_first": True},
    "both ways": {"bidirectional": True, "num_layers": 2},
    "no bias": {"bias": False, "batch_first": True},
    "projected": {"proj_size": 5, "bidirectional": True, "num_layers": 2},
}
CASES = [(make, name) for make in (nn.LSTM, nn.GRU) for name in OPTIONS]
CASES.remove((nn.GRU, "projected"))


def assert_same(found, wanted):
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=1e-6)
    for one, other in zip(*(x if isinstance(x, tuple) else (x,) for x in (found[1], wanted[1])), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("make", "name"), CASES)
def test_parts_compute_what_torch_computes(make, name):
    dense = make(7, 9, **OPTIONS[name])
    layer = routes.opened(dense)
    shape = (3, 6, 7) if dense.batch_first else (6, 3, 7)
    x = torch.randn(shape)
    assert_same(layer(x), dense(x))
    _, state = dense(x)
    assert_same(layer(x, state), dense(x, state))
    assert_same(layer(x[0]), dense(x[0]))
    assert layer.dense_numbers == sum(p.numel() for p in dense.parameters())
    again = layer.to_dense()
    assert all(torch.equal(p, again.get_parameter(n)) for n, p in dense.named_parameters())


def test_weights_are_read_by_the_names_of_torch():
    dense = nn.LSTM(24, 16, num_layers=2, bidirectional=True, proj_size=8)
    layer = pc.sketchify(dense, 0.5, include="*", **routes.OPTIONS)
    again = layer.to_dense()
    for name, parameter in dense.named_parameters():
        found = getattr(layer, name)
        assert (found.shape, found.dtype) == (parameter.shape, parameter.dtype)
        torch.testing.assert_close(found + 0, again.get_parameter(name))
    assert not hasattr(layer, "weight_ih_l2")
    assert not hasattr(layer, "weight")


@pytest.mark.parametrize(("make", "name"), CASES)
@pytest.mark.parametrize("given", [True, False])
def test_packed_sequences(make, name, given):
    dense = make(7, 9, **OPTIONS[name])
    layer = routes.opened(dense)
    x = torch.randn(5, 4, 7)
    packed = pack_padded_sequence(x, torch.tensor([2, 5, 1, 4]), enforce_sorted=False)
    state = dense(x.transpose(0, 1) if dense.batch_first else x)[1] if given else None
    found, wanted = layer(packed, state), dense(packed, state)
    assert_same((pad_packed_sequence(found[0])[0], found[1]), (pad_packed_sequence(wanted[0])[0], wanted[1]))


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU])
def test_states_and_inputs_of_other_shapes_are_refused_as_torch_refuses_them(make):
    """States of one sequence were spread over the batch, those of more layers were cut."""
    dense = make(7, 9)
    x, one = torch.randn(6, 3, 7), torch.randn(6, 7)
    packed = pack_padded_sequence(x, torch.tensor([6, 4, 1]))
    cases = [
        (x, (1, 1, 9)),
        (x, (2, 3, 9)),
        (x, (1, 9)),
        (one, (1, 1, 9)),
        (packed, (1, 1, 9)),
        (packed, (2, 3, 9)),
    ]
    for given, shape in [*cases, (x[None], None), (x[0, 0], None)]:
        state = None if shape is None else torch.randn(shape)
        for layer in (dense, routes.opened(dense)):
            with pytest.raises((RuntimeError, ValueError)):
                layer(given, (state, state) if shape and make is nn.LSTM else state)
    state = torch.randn(1, 3, 9)
    with pytest.raises(ValueError, match="states, wanted"):
        routes.opened(dense)(x, state if make is nn.LSTM else (state, state))


class Tagger(nn.Module):
    def __init__(self, make=nn.LSTM, layers=1):
        super().__init__()
        self.recurrent = make(24, 32, num_layers=layers, bidirectional=True, batch_first=True)
        self.out = nn.Linear(64, 8)

    def forward(self, x):
        return self.out(self.recurrent(x)[0])


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
    params=[  # the model, what it becomes, one of its weights, and steps few enough to be written out
        pytest.param((lambda: Tagger(nn.LSTM, 1), SketchedLSTM, "recurrent.hh_l0_reverse", 2), id="LSTM"),
        pytest.param(
            (lambda: Tagger(nn.GRU, 2), SketchedGRU, "recurrent.hh_l0_reverse", 2),
            id="GRU",
            marks=pytest.mark.slow,
        ),
        pytest.param((lambda: Reader(nn.LSTMCell), pc.SketchedLSTMCell, "cell.hh", 6), id="LSTMCell"),
        pytest.param((lambda: Reader(nn.GRUCell), pc.SketchedGRUCell, "cell.hh", 6), id="GRUCell"),
    ]
)
def case(request, monkeypatch):
    build, layer_type, weight, few = request.param
    if layer_type in (SketchedLSTM, SketchedGRU):
        monkeypatch.setitem(routes.OPTIONS, "include", ["recurrent"])
    torch.manual_seed(0)
    mixing = torch.randn(4, 24)
    return build, [torch.randn(8, 6, 4) @ mixing for _ in range(3)], layer_type, weight, few


def test_left_alone_unless_included():
    reasons = {line.name: line.reason for line in pc.plan_sketch(Tagger(), 0.5, **routes.OPTIONS).layers}
    assert "step by step" in reasons["recurrent"]


def test_weights_alone_saved_skeleton_and_partition(case, tmp_path):
    build, batches, layer_type, weight, _ = case
    small = routes.by_weights(build(), batches[0], layer_type)
    assert isinstance(small.get_submodule(weight), pc.SketchedLinear)
    routes.saved_and_loaded(small, build(), batches[0], tmp_path / "saved")
    routes.as_skeleton(build, small)
    routes.traced(build(), batches[0], layer_type)
    routes.partitioned(small, batches[0])


def test_data_and_healing(case):
    build, batches, layer_type, *_ = case
    model = build()
    routes.by_data(model, batches, batches[0], layer_type)
    routes.healed(model, batches, batches[0])


def test_exported(case, tmp_path):
    build, batches, layer_type, _, few = case
    small = routes.by_weights(build(), batches[0], layer_type)
    routes.exported(small, batches[0][:, :few], tmp_path / "small.onnx")


def test_compiled(case):
    build, batches, *_ = case
    small = pc.sketchify(build(), 0.6, **routes.OPTIONS).eval()
    with torch.no_grad():
        torch._dynamo.reset()
        found = torch.compile(small, backend="panther", options={"inner": "eager"})(batches[0])
        torch.testing.assert_close(found, small(batches[0]), rtol=1e-4, atol=1e-4)
