"""`sketchify` on models built in every odd way, of any dtypes and flags: the rest stays as it is."""

import copy

import pytest
import torch
import torch.nn.functional as F
from any_model.sketching import assert_close, low_rank_, mlp, sketch
from torch import fx, nn

import panther_compile as pc
from panther_compile.layers.base import SketchedLayer
from panther_compile.models.batch_norms import Misfit, batch_norms
from panther_compile.models.batches import Call


class Slotted(nn.Module):
    __slots__ = ("extra",)

    def __init__(self):
        super().__init__()
        self.body = mlp()
        self.extra = 3

    def forward(self, x):
        return self.body(x) * self.extra


class Closures(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp()
        self.activation = lambda x: x.clamp(min=0)
        self.table = {"relu": F.relu, "body": self.body}
        self.method = self.run

    def run(self, x):
        return self.table["body"](x)

    def forward(self, x):
        return self.activation(self.method(x))


class Delegating(nn.Module):
    """Answers to any name, as wrappers do."""

    def __init__(self):
        super().__init__()
        self.inner = mlp()

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):
                raise
            return getattr(self.inner, name, lambda *args: f"no {name}")

    def forward(self, x):
        return self.inner(x)


class Frozen(nn.Module):
    """Takes no new attributes after construction."""

    def __init__(self):
        super().__init__()
        self.body = mlp()
        object.__setattr__(self, "_sealed", True)

    def __setattr__(self, name, value):
        if self.__dict__.get("_sealed") and name != "training":
            raise AttributeError(f"{name}: sealed")
        super().__setattr__(name, value)

    def forward(self, x):
        return self.body(x)


class Clashing(nn.Module):
    """A property in front of a submodule, and names of the module API for other things."""

    def __init__(self):
        super().__init__()
        self.add_module("blocks", nn.ModuleDict({"first": mlp(), "last": nn.Linear(48, 24)}))
        self.weight = 3.0
        self.bias = None
        self.rank = "corporal"

    def get_output_embeddings(self):
        raise NotImplementedError

    def forward(self, x):
        return self.blocks["last"](self.blocks["first"](x)) * self.weight


Clashing.body = property(lambda self: self.blocks["first"])


class Hidden(nn.Module):
    """The property hides the registered submodule of that name."""

    def __init__(self):
        super().__init__()
        self._modules["block"] = mlp()
        self.tail = nn.Linear(48, 24)

    @property
    def block(self):
        return "hidden"

    def forward(self, x):
        return self.tail(self._modules["block"](x))


class Containers(nn.Module):
    def __init__(self):
        super().__init__()
        self.list = nn.ModuleList([nn.Linear(48, 48), None, nn.ReLU()][::2])
        self.dict = nn.ModuleDict({"a.b".replace(".", "_"): nn.Linear(48, 48)})
        self.scales = nn.ParameterList([torch.ones(48)])
        self.named = nn.ParameterDict({"shift": nn.Parameter(torch.zeros(48))})
        self.nothing = None
        self.register_module("absent", None)
        self.register_parameter("missing", None)
        self.register_buffer("void", None)

    def forward(self, x):
        for layer in self.list:
            x = layer(x)
        return self.dict["a_b"](x) * self.scales[0] + self.named["shift"]


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(48, 48), nn.Linear(48, 48)

    def forward(self, x):
        return self.a(x) if x.sum() > 0 else self.b(x)


class Recursive(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp()
        self.me = [self]
        self.body.owner = [self]
        self.loop = []
        self.loop.append(self.loop)

    def forward(self, x):
        return self.me[0].body(x)


ODD_MODELS = [Closures, Delegating, Frozen, Clashing, Hidden, Containers, Branching, Recursive]


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("kind", ODD_MODELS)
def test_odd_model_is_sketched(kind, inplace):
    model = low_rank_(kind())
    x = torch.randn(3, 48)
    wanted = model(x)
    small = sketch(model, inplace=inplace)
    assert type(small) is kind
    assert any(isinstance(module, pc.SketchedLinear) for module in small.modules())
    assert_close(small(x), wanted)
    assert pc.sketch_report(small).achieved_ratio <= 0.5
    if not inplace:
        assert torch.equal(model(x), wanted)
        assert all(type(m) is not pc.SketchedLinear for m in model.modules())
    assert_close(pc.densify(small, inplace=inplace)(x), wanted)


def test_model_with_slots_in_place():
    model = low_rank_(Slotted())  # copy.deepcopy loses what is in slots of an nn.Module
    x = torch.randn(3, 48)
    wanted = model(x)
    assert_close(sketch(model, inplace=True)(x), wanted)


def test_model_whose_copy_is_of_another_class():
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = fx.symbolic_trace(mlp())

        def __getattr__(self, name):
            return super().__getattr__(name) if name == "inner" else getattr(self.inner, name)

    with pytest.raises(pc.PantherError, match="deep copy of Wrapper does not hold"):
        sketch(Wrapper())
    assert isinstance(sketch(Wrapper(), inplace=True), Wrapper)


def test_bound_methods_and_references_lead_into_the_copy():
    small = sketch(Closures())
    assert small.table["body"] is small.body
    assert small.method.__self__ is small


def test_module_registered_inside_itself():
    inner = nn.ModuleDict({"body": mlp()})
    inner["body"].add_module("up", inner)
    assert isinstance(sketch(inner)["body"][0], pc.SketchedLinear)


class Counting(nn.Module):
    """Changes its attributes and buffers in every forward."""

    def __init__(self):
        super().__init__()
        self.body = mlp()
        self.calls, self.seen = 0, []
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("cache", None)

    def forward(self, x):
        self.calls += 1
        self.seen.append(x)
        self.count += 1
        self.cache = x
        self.body[0].last = x
        return self.body(x)


def test_reading_the_model_runs_no_forward_on_it():
    model = Counting()
    for result in (model, sketch(model)):
        assert result.calls == 0
        assert result.seen == []
        assert result.count == 0
        assert result.cache is None
        assert not hasattr(result.body[0], "last")
        assert "last" not in vars(result.body[0])


def test_hooks_of_containers_are_not_run():
    seen = {}
    model = nn.ModuleDict({"body": mlp()})
    model["body"].register_forward_hook(lambda module, args, output: seen.update(output=output))
    net = Runs(model)
    sketch(net, synthetic=False)  # else it is compared with its sketch
    assert seen == {}


class Runs(nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.parts = parts

    def forward(self, x):
        return self.parts["body"](x)


def test_hooks_on_containers_still_run_on_the_sketch():
    seen = []
    model = mlp()
    model.register_forward_hook(lambda module, args, output: seen.append(type(module)))
    small = sketch(model)
    seen.clear()
    small(torch.randn(2, 48))
    assert seen == [nn.Sequential]


def test_attribute_set_on_a_layer_is_kept():
    model = mlp()
    model[0].scale = 3.0
    assert sketch(model)[0].scale == 3.0


def test_layer_of_a_subclass_that_adds_methods_is_left_alone():
    class Extended(nn.Linear):
        def twice(self, x):
            return 2 * self(x)

    model = nn.ModuleList([Extended(48, 48), nn.Linear(48, 48)])
    assert sketch(model)[0].twice(torch.randn(1, 48)).shape == (1, 48)


def test_many_tiny_layers():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(60)))
    small = sketch(model)
    assert sum(isinstance(module, pc.SketchedLinear) for module in small) == 60


# ---------------------------------------------------------------------------- dtypes and flags


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtype_is_kept(dtype):
    model = low_rank_(mlp()).to(dtype)
    small = sketch(model)
    x = torch.randn(3, 48, dtype=dtype)
    assert {p.dtype for p in small.parameters()} == {dtype}
    assert small(x).dtype == dtype
    torch.testing.assert_close(small(x), model(x), rtol=0.05, atol=0.05)


def test_mixed_dtypes_are_kept():
    model = mlp(48, 3)
    model[1].to(torch.bfloat16)
    model[2].double()
    small = sketch(model)
    assert [layer.up.weight.dtype for layer in small] == [torch.float32, torch.bfloat16, torch.float64]


def test_requires_grad_is_kept_for_weight_and_bias_each():
    model = mlp(48, 3)
    model[0].weight.requires_grad_(False)
    model[1].bias.requires_grad_(False)
    small = sketch(model)
    assert [small[0].up.weight.requires_grad, small[0].down.weight.requires_grad] == [False, False]
    assert small[0].bias.requires_grad
    assert small[1].up.weight.requires_grad
    assert not small[1].bias.requires_grad


def test_part_of_the_model_on_the_meta_device():
    model = nn.ModuleDict({"here": mlp(), "away": mlp().to("meta")})
    with pytest.raises(pc.PantherError, match=r"away\.0\.weight is on the meta device"):
        sketch(model)
    small = sketch(model, include="here.*")
    assert small["away"][0].weight.is_meta
    assert isinstance(small["here"][0], pc.SketchedLinear)


class CalledByName(nn.Module):
    """Every layer is given its input by its name."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        x = self.norm(input=self.conv(input=x)).relu().mean((2, 3))
        return self.down(input=self.up(input=x).relu())


def test_layers_that_are_called_with_keywords():
    torch.manual_seed(0)
    model, data = CalledByName(), list(torch.randn(4, 8, 3, 6, 6) + 1)
    for x in data:
        model(x)  # the norm learns statistics
    model.eval()
    assert float(Misfit(model, batch_norms(model))(Call((data[0],), {}))) > 0
    options = {"min_params": 0, "allow_slower": True, "round_rank_to": 1, "narrow": False}
    small = pc.sketchify(model, 0.5, data=data, include=["up", "down"], **options)
    assert isinstance(small.up, SketchedLayer)
    torch.testing.assert_close(pc.prepare_int8(small, data)(data[0]), small(data[0]))
    low = copy.deepcopy(model)
    with torch.no_grad():
        for layer in (low.up, low.down):
            layer.weight.copy_((20 * layer.weight).round() / 20)
    better = pc.add_residual(low, model, rank=8, data=data)
    with torch.no_grad():
        distances = [float((one(data[0]) - model(data[0])).norm()) for one in (better, low)]
    assert distances[0] < 0.9 * distances[1]
