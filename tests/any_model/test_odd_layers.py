"""`sketchify` on layers that are not quite `nn.Linear`: replaced, or left alone with a reason."""

import warnings

import pytest
import torch
from any_model.sketching import assert_close, low_rank_, mlp, reasons, sketch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import panther_compile as pc
from panther_compile.errors import ConfigTypeError


class PlainSubclass(nn.Linear):
    """Nothing new."""


class Overriding(nn.Linear):
    def forward(self, x):
        return torch.cdist(x, self.weight) + self.bias


class LoraLinear(nn.Linear):
    """As loralib has it: a Linear with more parameters."""

    def __init__(self, width, rank=4):
        super().__init__(width, width)
        self.lora_A = nn.Parameter(torch.randn(rank, width))
        self.lora_B = nn.Parameter(torch.randn(width, rank))

    def forward(self, x):
        return super().forward(x) + x @ self.lora_A.T @ self.lora_B.T


class LoraWrapper(nn.Module):
    """As peft has it: a module around the Linear, which others take for one."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.lora_A, self.lora_B = nn.Linear(48, 4, bias=False), nn.Linear(4, 48, bias=False)

    @property
    def weight(self):
        return self.base_layer.weight

    @property
    def in_features(self):
        return self.base_layer.in_features

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def old_weight_norm(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(module)


def replaced_forward(module):
    module.forward = lambda x: x
    return module


class Symmetric(nn.Module):
    """As in the tutorial of torch's parametrizations."""

    def forward(self, weight):
        return weight.triu() + weight.triu(1).mT


def symmetric(module):
    parametrize.register_parametrization(module, "weight", Symmetric())
    return module


ODD_LAYERS = {
    "overriding": (lambda: Overriding(48, 48), "Overriding overrides Linear.forward"),
    "lora": (lambda: LoraLinear(48), "LoraLinear overrides Linear.forward"),
    "instance": (lambda: replaced_forward(nn.Linear(48, 48)), "its forward was replaced on the instance"),
    "parametrized": (lambda: symmetric(nn.Linear(48, 48)), "parametrized"),
    "pruned": (lambda: prune.l1_unstructured(nn.Linear(48, 48), "weight", 0.5), "has hooks"),
    "complex": (lambda: nn.Linear(48, 48, dtype=torch.complex64), "its weight is torch.complex64, wanted"),
    "qat": (
        lambda: torch.ao.nn.qat.Linear(48, 48, qconfig=torch.ao.quantization.get_default_qat_qconfig()),
        "overrides Linear.forward",
    ),
    "hook": (lambda: hooked(nn.Linear(48, 48)), "has hooks"),
    "lazy": (lambda: nn.LazyLinear(48), "lazy: run one batch"),
    "empty in": (lambda: nn.Linear(0, 48), "empty: its weight holds no numbers"),
    "empty out": (lambda: nn.Linear(48, 0), "empty: its weight holds no numbers"),
    "one in": (lambda: nn.Linear(1, 48), "its weight has a single row or column"),
    "one out": (lambda: nn.Linear(48, 1), "its weight has a single row or column"),
    "one": (lambda: nn.Linear(1, 1), "its weight has a single row or column"),
    "two in": (lambda: nn.Linear(2, 48), "rank 1 would store"),
}


def hooked(module):
    module.register_full_backward_hook(lambda *_: None)
    return module


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ODD_LAYERS)
def test_odd_layer_is_left_alone_with_a_reason(kind):
    build, reason = ODD_LAYERS[kind]
    model = nn.ModuleDict({"odd": build(), "plain": nn.Linear(48, 48), "last": nn.Linear(48, 48)})
    assert reason in reasons(model)["odd"]
    small = sketch(model)
    assert type(small["odd"]) is type(model["odd"])
    assert isinstance(small["plain"], pc.SketchedLinear)
    with pytest.raises(pc.PantherError, match=r"nothing to sketch"):
        sketch(build())


def test_layer_after_pruning_or_weight_norm_is_made_permanent_is_sketched():
    pruned = prune.remove(prune.l1_unstructured(nn.Linear(48, 48), "weight", 0.5), "weight")
    normed = parametrizations.weight_norm(nn.Linear(48, 48))
    parametrize.remove_parametrizations(normed, "weight")
    small = sketch(nn.ModuleList([pruned, normed]))
    assert all(isinstance(layer, pc.SketchedLinear) for layer in small)


COMPUTED_WEIGHTS = {
    "old weight_norm": lambda: old_weight_norm(nn.Linear(48, 48)),
    "pruned": lambda: prune.l1_unstructured(nn.Linear(48, 48), "weight", 0.5),
    "cached activation": lambda: nn.Sequential(),
}


def with_computed_weight(kind):
    model = nn.ModuleList([COMPUTED_WEIGHTS[kind](), nn.Linear(48, 48)])
    model[0].last = model[1](torch.randn(2, 48))
    return model


@pytest.mark.parametrize("kind", COMPUTED_WEIGHTS)
def test_model_that_holds_computed_tensors_in_place(kind):
    model = with_computed_weight(kind)
    x = torch.randn(2, 48)
    wanted = model[0](x)
    small = sketch(model, inplace=True)
    assert isinstance(small[1], pc.SketchedLinear)
    assert torch.equal(small[0](x), wanted)


@pytest.mark.parametrize("kind", COMPUTED_WEIGHTS)
def test_model_that_holds_computed_tensors(kind):
    model = with_computed_weight(kind)
    x = torch.randn(2, 48)
    small = sketch(model)
    assert isinstance(small[1], pc.SketchedLinear)
    assert torch.equal(small[0](x), model[0](x))


def test_layer_with_a_subclass_that_adds_nothing_is_sketched():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = PlainSubclass(48, 48), nn.Linear(48, 48)

        def forward(self, x):
            return self.b(self.a(x))

    small = sketch(Net())
    assert isinstance(small.a, pc.SketchedLinear)


def test_lora_wrapper_keeps_working_around_a_sketched_base():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = LoraWrapper(nn.Linear(48, 48))

        def forward(self, x):
            return self.fc(x)

    model = low_rank_(Net())
    small = sketch(model, include="*.base_layer")
    assert isinstance(small.fc.base_layer, pc.SketchedLinear)
    assert torch.equal(small.fc.lora_A.weight, model.fc.lora_A.weight)
    assert small.fc.in_features == 48
    assert small.fc.weight.shape == (48, 48)
    x = torch.randn(3, 48)
    assert_close(small(x), model(x))


def test_lora_can_be_added_to_the_factors():
    small = sketch(mlp())
    small[0].up = LoraWrapperAny(small[0].up)
    assert small(torch.randn(2, 48)).shape == (2, 48)


class LoraWrapperAny(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.weight, self.bias = base.weight, base.bias

    def forward(self, x):
        return self.base_layer(x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_dynamically_quantized_layers_are_no_targets():
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("no quantized engine")
    model = nn.ModuleDict({"q": mlp(), "plain": mlp()})
    model["q"] = torch.ao.quantization.quantize_dynamic(model["q"], {nn.Linear})
    small = sketch(model)
    assert isinstance(small["plain"][0], pc.SketchedLinear)
    x = torch.randn(2, 48)
    assert torch.equal(small["q"](x), model["q"](x))
    with pytest.raises(pc.PantherError, match="nothing to sketch"):
        sketch(model["q"])


class Int8Weight(torch.Tensor):
    """A weight-only quantized tensor, as torchao has it."""

    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_subclass(cls, data)

    def __deepcopy__(self, memo):
        return type(self)(self.detach().as_subclass(torch.Tensor).clone())


def test_weight_of_a_tensor_subclass_stays_dense():
    model = mlp(48, 3)
    model[0].weight = nn.Parameter(Int8Weight(torch.randn(48, 48)), requires_grad=False)
    model[1].weight = nn.Parameter(torch.ones(48, 48, dtype=torch.int8), requires_grad=False)
    found = reasons(model)
    assert "its weight is a Int8Weight, not a plain tensor" in found["0"]
    assert "its weight is torch.int8" in found["1"]
    assert isinstance(sketch(model)[2], pc.SketchedLinear)


def test_lazy_layer_is_sketched_once_it_has_seen_a_batch():
    model = nn.Sequential(nn.LazyLinear(48), nn.ReLU(), nn.LazyConv2d(4, 3), nn.Linear(48, 48))[:2]
    model(torch.randn(2, 40))
    assert isinstance(sketch(model)[0], pc.SketchedLinear)


def test_a_lazy_layer_at_the_end_is_named():
    model = nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.LazyLinear(48))
    small = sketch(model)
    assert isinstance(small[0], pc.SketchedLinear)
    assert "lazy: run one batch" in reasons(model)["2"]
    with pytest.raises(pc.PantherError, match="0: lazy: run one batch"):
        sketch(nn.Sequential(nn.LazyLinear(64), nn.ReLU(), nn.LazyLinear(48)))


def test_lazy_model_still_materializes_after_sketching():
    model = nn.Sequential(nn.LazyLinear(48), nn.Linear(48, 48), nn.Linear(48, 48))
    small = sketch(model)
    assert small(torch.randn(2, 7)).shape == (2, 48)
    assert small[0].in_features == 7
    assert isinstance(model[0].weight, nn.parameter.UninitializedParameter)
    with pytest.raises(ConfigTypeError, match=r"lazy layers.*run one batch through the model first"):
        sketch(model, data=[torch.randn(2, 7)] * 4)
    assert isinstance(model[0].weight, nn.parameter.UninitializedParameter)
