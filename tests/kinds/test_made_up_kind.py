"""A kind of layer that the library has never seen, made in this file alone, goes through every route."""

import math

import pytest
import torch
from kinds import routes
from torch import nn

import panther_compile as pc
from panther_compile.factorization.pivot import split_at
from panther_compile.kinds import registry
from panther_compile.kinds.base import Kind
from panther_compile.kinds.match import why_not_plain
from panther_compile.kinds.view import LinearView
from panther_compile.kinds.weights import fit_matrix, generator_for, matrix_unit
from panther_compile.layers.base import SketchedLayer, copy_into, take_over
from panther_compile.layers.linear import SketchedLinear
from panther_compile.records import Fitted


class Wavy(nn.Module):
    """y = sin(W x) + b: linear inside, and no linear layer."""

    def __init__(self, inputs, outputs, device=None):
        super().__init__()
        self.inputs, self.outputs = inputs, outputs
        self.weight = nn.Parameter(torch.randn(outputs, inputs, device=device) / math.sqrt(inputs))
        self.bias = nn.Parameter(torch.zeros(outputs, device=device))

    def forward(self, x):
        return torch.sin(x @ self.weight.T) + self.bias


class SketchedWavy(SketchedLayer):
    # Annotated: what a saved model asks for is checked against it.
    def __init__(self, inputs: int, outputs: int, rank: int, start: int = 0, device=None, dtype=None):
        super().__init__()
        self.inputs, self.outputs, self.rank, self.start = inputs, outputs, rank, start
        self.scheme, self.ranks = "pivoted", (rank,)
        self.down = nn.Linear(inputs - rank, rank, bias=False, device=device, dtype=dtype)
        self.up = nn.Linear(rank, outputs, bias=False, device=device, dtype=dtype)
        self.bias = nn.Parameter(torch.zeros(outputs, device=device, dtype=dtype))

    def forward(self, x):
        pivots, others = split_at(x, self.rank, self.start)
        return torch.sin(self.up(pivots + self.down(others))) + self.bias

    @property
    def weight(self):
        inner = SketchedLinear.from_stored(
            self.up.weight,
            self.down.weight,
            None,
            start=self.start,
            dtype=self.up.weight.dtype,
            device=self.up.weight.device,
        )
        return inner.to_dense().weight

    def sketch_spec(self):
        return {"inputs": self.inputs, "outputs": self.outputs, "rank": self.rank, "start": self.start}

    def to_dense(self):
        dense = Wavy(self.inputs, self.outputs)
        copy_into(dense.weight, self.weight)
        copy_into(dense.bias, self.bias)
        take_over(dense, self, True)
        return dense

    @property
    def dense_numbers(self):
        return self.dense_macs + self.outputs

    @property
    def dense_macs(self):
        return self.inputs * self.outputs


class WavyView(LinearView):
    is_linear = False  # what it is added to passes no sine

    def weight_and_bias(self):
        return self.layer.weight, None

    def build(self, found):
        rank = found.left.shape[1]
        layer = SketchedWavy(self.layer.inputs, self.layer.outputs, rank, found.start or 0)
        if found.start is None:  # a trial's plain pair: pivot it
            left, right = found.left.double(), found.right.double()
            inner = SketchedLinear.from_factors(left, right, None, form="pivoted", dtype=torch.float32)
            layer = SketchedWavy(self.layer.inputs, self.layer.outputs, rank, inner.start)
            copy_into(layer.up.weight, inner.up.weight)
            copy_into(layer.down.weight, inner.down.weight)
        else:
            copy_into(layer.up.weight, found.left)
            copy_into(layer.down.weight, found.right)
        copy_into(layer.bias, self.layer.bias)
        take_over(layer, self.layer, True)
        return layer


class WavyKind(Kind):
    wanted = "Wavy"
    layers = (SketchedWavy,)

    def matches(self, module):
        return "Wavy" if isinstance(module, Wavy) else None

    def why_not(self, module):
        return why_not_plain(module, Wavy, tensors=frozenset({"weight", "bias"}), sizes=(1, 1))

    def view(self, module):
        return WavyView(module)

    def unit(self, name, module, *, energies):
        return matrix_unit(name, module.weight, module.bias, energies=energies)

    def sketch(self, name, module, choice, config):
        low_rank = fit_matrix(module.weight, name, choice.rank, config)
        inner = SketchedLinear.from_factors(
            low_rank.left, low_rank.right, None, form="pivoted", dtype=module.weight.dtype
        )
        layer = SketchedWavy(module.inputs, module.outputs, choice.rank, inner.start)
        copy_into(layer.up.weight, inner.up.weight)
        copy_into(layer.down.weight, inner.down.weight)
        copy_into(layer.bias, module.bias)
        take_over(layer, module, True)
        error = layer.weight_error(module.weight, generator_for(name, config, module.weight.device))
        return layer, Fitted("pivoted", (choice.rank,), low_rank.method, error)

    def empty(self, module, choice, device):
        return SketchedWavy(module.inputs, module.outputs, choice.rank, device=device)


class Waves(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = Wavy(24, 48), Wavy(48, 48), Wavy(48, 32)

    def forward(self, x):
        return self.last(self.second(self.first(x)))


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    monkeypatch.setattr(registry, "KINDS", (*registry.KINDS, WavyKind()))


@pytest.fixture
def batches():
    mixing = torch.randn(4, 24)
    return [torch.randn(64, 4) @ mixing + 0.05 * torch.randn(64, 24) for _ in range(4)]


def test_without_its_kind_it_is_a_module_that_multiplies_by_a_matrix(monkeypatch):
    monkeypatch.setattr(registry, "KINDS", registry.KINDS[:-1])
    small = pc.sketchify(Waves(), 0.5, **routes.OPTIONS)
    assert any(isinstance(one, SketchedLinear) for one in small.modules())
    assert {type(one) for one in small.children()} == {type(one) for one in Waves().children()}
    assert not any(isinstance(one, SketchedWavy) for one in small.modules())


def test_every_route_by_weights(batches, tmp_path):
    x = batches[0]
    small = routes.by_weights(Waves(), x, SketchedWavy)
    routes.saved_and_loaded(small, Waves(), x, tmp_path / "saved")
    routes.as_skeleton(Waves, small)
    routes.exported(small, x, tmp_path / "small.onnx")
    routes.partitioned(small, x)
    routes.traced(Waves(), x, SketchedWavy)


def test_every_route_by_data(batches, tmp_path):
    model, x = Waves(), batches[0]
    routes.by_data(model, batches, x, SketchedWavy)
    routes.healed(model, batches, x)
    routes.by_latency(model, x)
    options = routes.OPTIONS | {"data": batches, "resume": tmp_path}
    first, again = (pc.sketchify(model, 0.4, **options) for _ in range(2))
    assert torch.equal(first(x), again(x))


def test_compiled(batches):
    routes.compiled(Waves(), batches[0], SketchedWavy)


def test_messages_name_it():
    with pytest.raises(pc.PantherError, match="Wavy"):
        pc.sketchify(nn.Sequential(nn.ReLU()), 0.5)
