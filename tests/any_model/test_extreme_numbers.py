"""Data and weights that no closed form can take are refused by name; what can be done is."""

import pytest
import torch
from torch import nn

import panther_compile as pc
from panther_compile.errors import ConfigTypeError, DataError, WeightError

OPTIONS = {"min_params": 1, "allow_slower": True, "include": "*"}


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.o = nn.Linear(16, 24), nn.Linear(24, 24), nn.Linear(24, 8)

    def forward(self, x):
        return self.o(torch.relu(self.b(torch.relu(self.a(x)))))


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


MODELS = {"mlp": (Mlp, (12, 16)), "cnn": (Cnn, (3, 3, 6, 6))}


def made(name):
    torch.manual_seed(0)
    model, shape = MODELS[name]
    return model().eval(), [torch.randn(shape) for _ in range(6)]


@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1e20, 1e37])
@pytest.mark.parametrize("place", [0, 5], ids=["learnt from", "held out"])
@pytest.mark.parametrize("name", list(MODELS))
def test_numbers_that_cannot_be_fitted_to(name, place, number, narrow):
    model, data = made(name)
    data[place].view(-1)[3] = number
    with pytest.raises(DataError, match=f"batch {place} of the data: .* reaches a"):
        pc.sketchify(model, 0.5, data=data, narrow=narrow, **OPTIONS)


@pytest.mark.parametrize(
    ("name", "scale"),
    [("mlp", 1e-30), ("mlp", 1e6), ("cnn", 1e-30), pytest.param("cnn", 1e6, marks=pytest.mark.slow)],
)
def test_data_of_any_other_scale_is_fitted_to(name, scale):
    model, data = made(name)
    for layer in model.children():
        nn.init.zeros_(layer.bias)  # so that the model is as large as its input
    data = [scale * x for x in data]
    small = pc.sketchify(model, 0.6, data=data, **OPTIONS)
    found, wanted = small(data[0]).double(), model(data[0]).double()
    assert float((found - wanted).norm() / wanted.norm()) < 0.8


@pytest.mark.parametrize("place", [0, 1, 4, 5])
def test_batches_that_the_model_refuses(place):
    model, data = made("mlp")
    data[place] = data[place][:, 1:]
    with pytest.raises(
        DataError, match=rf"batch {place} of the data.*\(12, 15\) float32.*raised RuntimeError"
    ):
        pc.sketchify(model, 0.5, data=data, **OPTIONS)


@pytest.mark.parametrize("place", [0, 5])
def test_an_empty_batch(place):
    model, data = made("mlp")
    data[place] = data[place][:0]
    with pytest.raises(DataError, match=rf"batch {place} of the data is empty, \(\(0, 16\) float32\)"):
        pc.sketchify(model, 0.5, data=data, **OPTIONS)


class Routed(nn.Module):
    """An expert that no token of the first batch is routed to."""

    def __init__(self):
        super().__init__()
        self.all, self.some = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        chosen = x[:, 0] > 0
        out = self.all(x)
        return out.index_add(0, chosen.nonzero().flatten(), self.some(x[chosen]))


def test_a_layer_that_is_given_no_row_by_a_batch():
    model = Routed().eval()
    data = [torch.randn(64, 16) for _ in range(5)]
    data[0][:, 0] = -1.0
    small = pc.sketchify(model, 0.5, data=data, **OPTIONS)
    assert all(parameter.isfinite().all() for parameter in small.parameters())


@pytest.mark.parametrize("data", [False, True])
def test_weights_of_1e30(data):
    model, batches = made("mlp")
    with torch.no_grad():
        model.a.weight.mul_(1e30)
        model.b.weight.mul_(1e-30)
        model.a.bias.zero_()
    given = [1e-25 * x for x in batches] if data else None
    small = pc.sketchify(model, 0.6, data=given, **OPTIONS)
    weight, dense = small.a.weight.double(), model.a.weight.double()
    assert float((weight - dense).norm() / dense.norm()) < 0.9


def in_two_steps(first, second):
    """A model of two layers whose weights are so large, without biases."""
    torch.manual_seed(0)
    layers = nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False)
    with torch.no_grad():
        layers[0].weight.mul_(first)
        layers[1].weight.mul_(second)
    return nn.Sequential(layers[0], nn.ReLU(), layers[1]), [torch.randn(64, 256) for _ in range(6)]


@pytest.mark.parametrize("objective", ["size", "int8"])
@pytest.mark.parametrize(("first", "second"), [(1e12, 1e12), (1e-15, 1e37), (1e-20, 1e15)])
def test_outputs_and_gradients_whose_squares_overflow(first, second, objective):
    model, data = in_two_steps(first, second)
    small = pc.sketchify(model, 0.75, data=data, objective=objective, **OPTIONS)
    found, wanted = small(data[0]).double(), model(data[0]).double()
    assert float((found - wanted).norm() / wanted.norm()) < 0.7
    share = pc.sketch_report(small).closeness.share
    assert 0.01 < share < 1.0


@pytest.mark.parametrize("method", ["kl", "block"])
@pytest.mark.parametrize(("first", "second"), [(1e12, 1e12), (1e-15, 1e37)])
def test_healing_to_outputs_whose_squares_overflow(first, second, method):
    model, data = in_two_steps(first, second)
    small = pc.sketchify(model, 0.75, data=data, refine=method, refine_steps=10, **OPTIONS)
    report = pc.heal_report(small)
    assert report.steps == 10
    assert report.after["output"] < report.before["output"] < 0.5


@pytest.mark.parametrize("size", [1e-9, 1e-12])
def test_outputs_whose_squares_are_as_good_as_nothing(size):
    model, data = in_two_steps(size, size)
    small = pc.sketchify(model, 0.5, data=data, **OPTIONS)
    assert pc.sketch_report(small).closeness.share > 0.05


@pytest.mark.parametrize("size", [1e4, 3e4])
def test_weights_of_half_precision(size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with torch.no_grad():
        model[0].weight.mul_(size / model[0].weight.abs().max())
    model.half()
    small = pc.sketchify(model, 0.75, **OPTIONS)
    weight, dense = small[0].weight.double(), model[0].weight.double()
    assert float((weight - dense).norm() / dense.norm()) < 0.5


def test_factors_that_exceed_their_dtype():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).half()
    with torch.no_grad():
        model[1].weight.copy_(65504.0 * torch.randn(64, 64).sign())
    with pytest.raises(WeightError, match=r"1: its weight holds numbers up to 6.55e\+04.*float16"):
        pc.sketchify(model, 0.75, **OPTIONS)


def test_tensors_and_loops_of_inference_mode():
    model, data = made("mlp")

    def loop(one):
        with torch.inference_mode():
            for x in data:
                one(x)

    with torch.inference_mode():
        made_there = [x + 0.0 for x in data]
    for given in (loop, made_there):
        small = pc.sketchify(model, 0.6, data=given, refine="kl", refine_steps=1, **OPTIONS)
        x = torch.randn(64, 16)
        assert float((small(x) - model(x)).norm() / model(x).norm()) < 0.8
        pc.heal(small, teacher=model, data=given, steps=1, progress=False)


def test_a_loader_may_write_its_batches_over():
    model, data = made("mlp")

    def loader():
        buffer = torch.empty(12, 16)
        for x in data:
            yield buffer.copy_(x)

    small, wanted = (pc.sketchify(model, 0.6, data=one, narrow=False, **OPTIONS) for one in (loader(), data))
    for one, other in zip(small.parameters(), wanted.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_model_of_inference_mode():
    with torch.inference_mode():
        model, data = made("mlp")
    with pytest.raises(ConfigTypeError, match="inference_mode"):
        pc.sketchify(model, 0.5, data=data, **OPTIONS)
    assert pc.sketchify(model, 0.5, **OPTIONS)(torch.randn(3, 16)).shape == (3, 8)


class ByKeyword(nn.Module):
    """Calls its layers by the names of their arguments."""

    def __init__(self):
        super().__init__()
        self.table, self.a, self.o = nn.Embedding(50, 16), nn.Linear(16, 32), nn.Linear(32, 8)
        self.c, self.p = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.m = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, ids):
        x = self.a(input=self.table(input=ids))
        x = self.m(query=x, key=x, value=x, need_weights=False)[0]
        return self.o(input=self.p(input=self.c(input=x[:, None])).mean(1))


@pytest.mark.parametrize("data", [False, True])
def test_layers_called_by_keyword(data):
    torch.manual_seed(0)
    model, ids = ByKeyword().eval(), torch.randint(0, 50, (4, 12))
    small = pc.sketchify(model, 0.6, data=[ids] * 3 if data else None, **OPTIONS)
    healed = pc.heal(small, teacher=model, data=[ids] * 2, steps=1, progress=False)
    for one in (small, healed, pc.densify(small)):
        assert one(ids).shape == (4, 12, 8)


def test_conv1d_of_hugging_face_called_by_keyword():
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = conv1d(64, 16), conv1d(16, 64)

        def forward(self, x):
            return self.down(x=torch.relu(self.up(x=x)))

    model, data = Model().eval(), [torch.randn(32, 16) for _ in range(4)]
    for given in (None, data):
        small = pc.sketchify(model, 0.5, data=given, **OPTIONS)
        assert small(data[0]).shape == (32, 16)
