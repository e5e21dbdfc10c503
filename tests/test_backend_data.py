"""torch.compile(model, backend="panther", options={"data": ...}): what `sketchify` makes of the same data."""

import copy
import gc
import itertools
import weakref
from collections import OrderedDict
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from zoo import ZOO, call, tensors

import panther_compile as pc
from panther_compile import backend_data
from panther_compile.errors import BackendError, ConfigTypeError, DataError
from panther_compile.records import WholeTimes
from panther_compile.timing import time_sites

SKETCH = {"ratio": 0.4, "min_params": 0, "allow_slower": True, "progress": False}


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture
def fits(monkeypatch):
    """The models that were fitted."""
    seen = []

    def sketchify(model, **options):
        seen.append(type(model).__name__)
        return pc.sketchify(model, **options)

    monkeypatch.setattr(backend_data, "sketchify", sketchify)
    return seen


class Net(nn.Module):
    """Reads its second argument first; the third is optional."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(48, 48), nn.Linear(48, 48), nn.Linear(48, 10)

    def forward(self, x, y, scale=None):
        h = self.b(y).relu() + self.a(x)
        return self.c(h if scale is None else h * scale)


class Broken(nn.Module):
    """Nothing is traced before the inner model is called: its graph is the first that a backend sees."""

    def __init__(self):
        super().__init__()
        self.inner, self.last = Net(), nn.Linear(10, 10)

    def forward(self, x, y):
        torch._dynamo.graph_break()
        h = self.inner(2 * x, x + y)
        torch._dynamo.graph_break()
        return self.last(h)


def rows(count, generator=None):
    """Inputs of a low dimension, as data have it and random numbers have not."""
    mix = torch.randn(6, 48, generator=torch.Generator().manual_seed(5))
    return torch.randn(count, 6, generator=generator) @ mix


def two_inputs(batches=5, count=32):
    return [(rows(count), rows(count)) for _ in range(batches)]


def compiled(model, data, **options):
    options = {"inner": "eager", "data": data} | SKETCH | options
    return torch.compile(model, backend="panther", options=options)


def fitted(model, data, **options):
    return pc.sketchify(model, data=data, narrow=False, **(SKETCH | options))


def same(found, wanted):
    for one, other in zip(tensors(found), tensors(wanted), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def distance(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


# --------------------------------------------------------------------------------- what comes of it


def test_the_same_as_sketchify_and_nearer_than_without(fits):
    torch.manual_seed(0)
    model, data = Net().eval(), two_inputs()
    small, fast, plain = fitted(model, data), compiled(model, data), compiled(copy.deepcopy(model), None)
    with torch.no_grad():
        for count in (3, 7, 11):  # not the sizes of the data, and from the second on they vary
            inputs = rows(count), rows(count)
            same(fast(*inputs), small(*inputs))
            assert distance(fast(*inputs), model(*inputs)) < 0.5 * distance(plain(*inputs), model(*inputs))
    assert fits == ["Net"]
    assert type(model.a) is nn.Linear


@pytest.mark.parametrize("form", ["keywords", "labels", "loader"])
def test_batches_in_any_form(form):
    torch.manual_seed(0)
    model, pairs = Net().eval(), two_inputs()
    data = {
        "keywords": [{"y": y, "x": x, "labels": torch.zeros(1)} for x, y in pairs],
        "labels": [[x, y, None, torch.zeros(1)] for x, y in pairs],
        "loader": torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(*map(torch.cat, zip(*pairs, strict=True))), batch_size=32
        ),
    }[form]
    inputs = rows(4), rows(4)
    with torch.no_grad():
        same(compiled(model, data)(*inputs), fitted(model, data)(*inputs))
        same(compiled(model, data)(y=inputs[1], x=inputs[0]), fitted(model, data)(*inputs))


def test_all_graphs_of_a_broken_model_take_part_in_one_fit(fits):
    torch.manual_seed(0)
    model, data = Broken().eval(), two_inputs()
    inputs = rows(4), rows(4)
    with torch.no_grad():
        same(compiled(model, data, include="*")(*inputs), fitted(model, data, include="*")(*inputs))
    assert counters["stats"]["unique_graphs"] > 1
    assert fits == ["Broken"]


def test_a_model_compiled_in_place():
    torch.manual_seed(0)
    model, data = Net().eval(), two_inputs()
    small, inputs = fitted(model, data), (rows(4), rows(4))
    model.compile(backend="panther", options={"inner": "eager", "data": data} | SKETCH)
    with torch.no_grad():
        same(model(*inputs), small(*inputs))


@pytest.mark.parametrize("name", ["bert", "gpt2", "resnet"])
def test_models_of_the_zoo(name):
    """Hugging Face's keywords and masks, its Conv1D, convolutions with norms."""
    entry = ZOO[name]
    model, data = entry.build(), [entry.inputs()] * 3
    options = {"ratio": 0.5, "min_params": 512}
    small = fitted(model, data, **options)
    with torch.no_grad():
        found = call(compiled(model, data, **options), entry.inputs())
        for one, other in zip(tensors(found), tensors(call(small, entry.inputs())), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_attention_stays_dense():
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.fc = nn.MultiheadAttention(48, 4, batch_first=True), nn.Linear(48, 48)

        def forward(self, x):
            return self.fc(self.attention(x, x, x, need_weights=False)[0])

    model, data, x = Reader().eval(), [torch.randn(4, 7, 48) for _ in range(4)], torch.randn(2, 5, 48)
    options = {"include": "*", "exclude": nn.MultiheadAttention}
    with torch.no_grad():
        same(compiled(model, data, include="*")(x), fitted(model, data, **options)(x))


def test_healing_takes_the_same_data():
    torch.manual_seed(0)
    model, data, inputs = Net().eval(), two_inputs(), (rows(4), rows(4))
    refine = {"refine": "block", "refine_steps": 3}
    with torch.no_grad():
        same(compiled(model, data, **refine)(*inputs), fitted(model, data, **refine)(*inputs))


def test_new_weights_are_fitted_anew(fits):
    torch.manual_seed(0)
    model, other, data = Net().eval(), Net().eval(), two_inputs()
    fast, inputs = compiled(model, data), (rows(4), rows(4))
    with torch.no_grad():
        fast(*inputs)
        model.load_state_dict(other.state_dict())
        same(fast(*inputs), fitted(other, data)(*inputs))
        model.b.weight = nn.Parameter(-2.0 * model.b.weight)
        same(fast(*inputs), fitted(model, data)(*inputs))
        fast(*inputs)
    assert len(fits) == 3


def test_other_data_and_other_options_are_other_fits(fits):
    torch.manual_seed(0)
    model, inputs = Net().eval(), (rows(4), rows(4))
    with torch.no_grad():
        for data in (two_inputs(), two_inputs()):
            for ratio in (0.4, 0.6):
                torch._dynamo.reset()
                same(compiled(model, data, ratio=ratio)(*inputs), fitted(model, data, ratio=ratio)(*inputs))
    assert len(fits) == 4


def test_data_are_forgotten_with_the_model():
    model, data = Net().eval(), two_inputs()
    seen = weakref.ref(data[0][0])
    with torch.no_grad():
        compiled(model, data)(rows(4), rows(4))
    del model, data
    torch._dynamo.reset()
    gc.collect()
    assert seen() is None


# -------------------------------------------------------------------------------------------- errors


def error_of(function, *inputs):
    with torch.no_grad(), pytest.raises(BackendCompilerFailed) as caught:
        function(*inputs)
    return caught.value.inner_exception


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resume": "folder"}, r"resume: for sketchify alone.*sketchify\(model, resume=\.\.\.\) first"),
        ({"max_drop": 0.1, "evaluate": len}, "max_drop, evaluate: for sketchify alone"),
        ({"example_inputs": 1}, "example_inputs: for sketchify alone"),
        ({"refine": "kl"}, "refine='kl' needs data="),
        ({"data": iter([torch.ones(2, 48)])}, "data is an iterator, which can be read but once"),
        ({"data": lambda model: model(torch.ones(2, 48))}, "data is a function"),
    ],
)
def test_options_that_are_refused(options, message):
    options = {"inner": "eager"} | options
    error = error_of(torch.compile(Net(), backend="panther", options=options), rows(2), rows(2))
    assert isinstance(error, BackendError)
    with pytest.raises(BackendError, match=message):
        raise error


@pytest.mark.parametrize(
    ("data", "kind", "message"),
    [
        ([], DataError, "data holds no batch"),
        ("words", ConfigTypeError, "data is a str"),
        ([3], ConfigTypeError, "batch 0 of data is a int"),
        ([(torch.full((4, 48), torch.nan), torch.ones(4, 48))], DataError, "NaN or Inf reaches"),
    ],
)
def test_bad_data(data, kind, message):
    error = error_of(compiled(Net().eval(), data), rows(2), rows(2))
    assert isinstance(error, kind)
    assert message in str(error)


def test_a_function_has_no_data():
    model = Net().eval()
    fast = compiled(lambda x, y: model(x, y), two_inputs())
    assert "what is compiled here is a function" in str(error_of(fast, rows(2), rows(2)))


def test_a_sketched_model_has_no_use_for_data():
    data = two_inputs()
    fast = compiled(fitted(Net().eval(), data), data)
    assert "the model is sketched already" in str(error_of(fast, rows(2), rows(2)))


# --------------------------------------------------------------------------------------- for latency

LATENCY = {"inner": "eager", "objective": "latency", "min_params": 0, "progress": False}


@pytest.fixture
def timer(monkeypatch):
    """Sketches of square layers pay, others do not; gives the shapes of what they were timed on.

    Whole models pay, but for those with a layer called slow.
    """
    shapes = []

    def seconds(dense, sketched, x):
        assert dense(x).shape == sketched(x).shape
        shapes.append(tuple(x.shape))
        return (2.0 if dense.weight.shape == (96, 96) else 0.5), 1.0

    def whole(dense, sketched, call):
        for model in (dense, sketched):
            call.run(model)
        return WholeTimes((0.9 if any("slow" in name for name, _ in dense.named_modules()) else 2.0,), (1.0,))

    both = partial(time_sites, timer=seconds, model_timer=whole)
    monkeypatch.setattr("panther_compile.api.time_sites", both)
    return shapes


def chain(*widths):
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths))).eval()


@pytest.mark.parametrize("dynamic", [False, True])
def test_layers_are_timed_on_the_inputs_of_the_call(timer, dynamic):
    seen = []

    def inner(graph_module, inputs):
        seen.extend(type(module).__name__ for module in graph_module.children())
        return graph_module.forward

    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = chain(96, 96, 128, 96)

        def forward(self, x):
            return self.layers(x) * x.shape[0]

    model, x = Reader(), torch.randn(5, 96)
    options = LATENCY | {"inner": inner}
    fast = torch.compile(model, backend="panther", options=options, dynamic=dynamic)
    with torch.no_grad():
        assert not torch.allclose(fast(x), model(x))
        kinds = [
            type(layer).__name__
            for layer in pc.sketchify(
                model, objective="latency", min_params=0, progress=False, example_inputs=x
            ).layers
        ]
        assert kinds == ["SketchedLinear", "Linear", "Linear"]
    assert set(timer) == {(5, 96)}


def test_where_nothing_pays_the_model_stays_dense(timer):
    model, x = chain(96, 128, 96), torch.randn(5, 96)
    with torch.no_grad():
        assert torch.equal(torch.compile(model, backend="panther", options=LATENCY)(x), model(x))
    assert timer


def test_a_graph_that_is_not_faster_as_a_whole_stays_dense(timer):
    model = nn.Sequential(OrderedDict(slow=nn.Linear(96, 96), other=nn.Linear(96, 96))).eval()
    x = torch.randn(5, 96)
    with torch.no_grad():
        fast = torch.compile(model, backend="panther", options=LATENCY | {"include": "*"})
        assert torch.equal(fast(x), model(x))
    assert timer


def test_with_data_the_first_batch_is_timed(timer):
    torch.manual_seed(0)
    model, data, x = chain(96, 96, 128, 96), [torch.randn(n, 96) for n in (9, 3, 3)], torch.randn(4, 96)
    small = pc.sketchify(
        model, 0.4, data=data, objective="latency", narrow=False, min_params=0, progress=False
    )
    fast = torch.compile(model, backend="panther", options=LATENCY | {"data": data, "ratio": 0.4})
    with torch.no_grad():
        same(fast(x), small(x))
    assert {shape[0] for shape in timer} == {9}


def test_training_is_refused_for_latency_too(timer):
    fast = torch.compile(chain(96, 96, 96), backend="panther", options=LATENCY)
    with pytest.raises(BackendCompilerFailed, match=r"the model is dense .*sketchify\(model\)"):
        fast(torch.randn(5, 96))
    assert timer == []
