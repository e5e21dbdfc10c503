"""New modules in the place of old ones, wherever they are referred to."""

import warnings
from collections import OrderedDict

import pytest
import torch
from torch import nn

import panther_compile as pc
from panther_compile.models.substitute import copy_with, replace_inside
from panther_compile.models.watched import copy_sharing


class Holder(nn.Module):
    """One linear layer, referred to in every way a module can be."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.alias = self.fc
        self.listed = nn.ModuleList([self.fc, nn.ReLU()])
        self.named = nn.ModuleDict({"a": self.fc})
        self.plain_list = [self.fc, [self.fc, 1], "x"]
        self.plain_tuple = (self.fc, (2, self.fc))
        self.plain_dict = {"k": self.fc, "deep": {"l": [self.fc]}, "n": 3}
        self.plain_ordered = OrderedDict(k=self.fc)
        self.untouched = (1, 2)
        self.__dict__["unregistered"] = self.fc
        self.keep = nn.Linear(4, 4)


def references(model):
    return [
        model.fc,
        model.alias,
        model.listed[0],
        model.named["a"],
        model.plain_list[0],
        model.plain_list[1][0],
        model.plain_tuple[0],
        model.plain_tuple[1][1],
        model.plain_dict["k"],
        model.plain_dict["deep"]["l"][0],
        model.plain_ordered["k"],
        model.unregistered,
    ]


@pytest.mark.parametrize("put", [copy_with, replace_inside])
def test_every_reference_follows(put):
    model, new = Holder(), nn.Linear(4, 4)
    result = put(model, {model.fc: new})
    assert all(reference is new for reference in references(result))
    assert type(result.plain_tuple) is tuple
    assert type(result.plain_ordered) is OrderedDict
    assert result.plain_list[2] == "x"
    assert result.plain_dict["n"] == 3
    assert result.untouched == (1, 2)


class Cached(Holder):
    """Keeps what it computed of a parameter, as LeViT does in eval mode: `deepcopy` refuses such tensors."""

    def __init__(self):
        super().__init__()
        self.scale, self.by_device, self.listed_too = nn.Parameter(torch.ones(4)), {}, []

    def forward(self, x):
        self.by_device[x.device] = 2 * self.scale
        self.listed_too.append(3 * self.scale)
        return self.fc(x) * self.by_device[x.device]


@pytest.mark.parametrize("put", [copy_with, copy_sharing])
def test_what_a_model_has_computed_and_keeps_is_copied(put):
    model, new = Cached(), nn.Linear(4, 4)
    model(torch.ones(4))
    result = put(model, {model.fc: new})
    (kept,), (listed,) = result.by_device.values(), result.listed_too
    assert torch.equal(kept, torch.full((4,), 2.0))
    assert torch.equal(listed, torch.full((4,), 3.0))
    assert not kept.requires_grad
    assert kept is not model.by_device[kept.device]


@pytest.mark.parametrize("put", [copy_with, replace_inside])
def test_a_tuple_held_twice_is_replaced_twice(put):
    model, new = nn.Module(), nn.Linear(4, 4)
    model.fc = nn.Linear(4, 4)
    held = (model.fc,)
    model.pair = [held, held]
    result = put(model, {model.fc: new})
    assert result.pair[0][0] is result.pair[1][0] is new


@pytest.mark.parametrize("put", [copy_with, replace_inside])
def test_containers_that_hold_themselves(put):
    model, new = nn.Module(), nn.Linear(4, 4)
    model.fc = nn.Linear(4, 4)
    model.ring = [model.fc]
    model.ring.append(model.ring)
    model.book = {"fc": model.fc}
    model.book["self"] = model.book
    result = put(model, {model.fc: new})
    assert result.ring[0] is result.book["self"]["fc"] is new


def test_copy_leaves_the_original_alone():
    model = Holder()
    fc, before = model.fc, {name: p.clone() for name, p in model.named_parameters()}
    result = copy_with(model, {model.fc: nn.Linear(4, 4)})
    assert all(reference is fc for reference in references(model))
    assert result.keep is not model.keep
    with torch.no_grad():
        for parameter in result.parameters():
            parameter.zero_()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_copy_does_not_copy_what_is_replaced():
    class Precious(nn.Linear):
        def __deepcopy__(self, memo):
            raise AssertionError("the dense layer was copied")

    model = nn.Sequential(Precious(4, 4), nn.ReLU())
    new = nn.Linear(4, 4)
    assert copy_with(model, {model[0]: new})[0] is new


def test_in_place_keeps_the_model_and_what_is_not_replaced():
    model = Holder()
    keep = model.keep
    assert replace_inside(model, {model.fc: nn.Linear(4, 4)}) is model
    assert model.keep is keep


@pytest.mark.parametrize("put", [copy_with, replace_inside])
def test_the_root_itself(put):
    model, new = nn.Linear(4, 4), nn.Linear(4, 4)
    assert put(model, {model: new}) is new


@pytest.mark.parametrize("put", [copy_with, replace_inside])
def test_nothing_to_replace(put):
    model = Holder()
    result = put(model, {})
    assert type(result) is Holder
    assert (result is model) is (put is replace_inside)


class Deep(nn.Module):
    """A replacement that keeps its bias in a part, as sketched layers do."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(2, 4)

    @property
    def bias(self):
        return self.up.bias


@pytest.mark.parametrize("put", [copy_with, replace_inside])
def test_a_bias_shared_with_a_layer_that_stays_is_still_shared(put):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].bias = model[0].bias
    result = put(model, {model[0]: Deep()})
    assert result[1].bias is result[0].up.bias


@pytest.mark.parametrize("put", [copy_with, replace_inside])
def test_a_bias_shared_by_two_replaced_layers_is_still_shared(put):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].bias = model[0].bias
    result = put(model, {model[0]: Deep(), model[1]: Deep()})
    assert result[0].up.bias is result[1].up.bias


def test_in_place_keeps_the_very_bias_that_an_optimizer_holds():
    model = nn.Sequential(nn.Linear(4, 4))
    bias = model[0].bias
    assert replace_inside(model, {model[0]: Deep()})[0].up.bias is bias


@pytest.mark.parametrize("put", [copy_with, replace_inside])
def test_a_missing_bias_is_no_bias(put):
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    new = Deep()
    assert put(model, {model[0]: new})[0].bias is new.bias


class Closing(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, scale = nn.Linear(48, 48), nn.Linear(48, 48), 2.0
        self.scaled = lambda x: scale * x
        self.run = lambda x: self.last(x)

    def forward(self, x):
        return self.run(self.scaled(self.first(x)))


def test_functions_that_hold_modules_are_told_of():
    """A copy of them calls the layers of the model that was given."""
    options = {"min_params": 0, "allow_slower": True, "synthetic": False}
    with pytest.warns(UserWarning, match=r"^0\.run of Sequential is a function that holds modules") as seen:
        pc.sketchify(nn.Sequential(Closing()), 0.5, **options)
    assert sum("is a function" in str(one.message) for one in seen) == 1
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*is a function")
        model = Closing().eval()
        small = pc.sketchify(model, 0.5, inplace=True, **options)
        x = torch.randn(2, 48)
        assert torch.equal(small(x), small.last(2 * small.first(x)))


class Compiled(nn.Module):
    """Compiles a method of its own, as many do, and decorates another."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(48, 48), nn.Linear(48, 48)
        self.encode = torch.compile(self.encode, backend="eager")

    def encode(self, x):
        return self.last(self.first(x))

    def forward(self, x):
        return self.encode(x)


def test_compiled_methods_that_hold_modules_are_told_of(tmp_path):
    """A sketch of such a model would compute what the dense one does, whatever its layers are."""
    options = {"min_params": 0, "allow_slower": True, "synthetic": False}
    told = r"^encode of Compiled is a function that holds modules .*: compile it in the copy"
    with pytest.warns(UserWarning, match=told + ", or give inplace=True$"):
        pc.sketchify(Compiled().eval(), 0.5, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*is a function")
        small = pc.sketchify(Compiled().eval(), 0.5, inplace=True, **options)
    x = torch.randn(2, 48)
    assert torch.equal(small(x), small.last(small.first(x)))
    with pytest.warns(UserWarning, match=told + ", or give inplace=True$") as seen:
        pc.densify(small)
    assert seen[0].filename == __file__
    pc.save_sketched(small, tmp_path)
    with pytest.warns(UserWarning, match=told + "$") as seen:
        pc.load_sketched(Compiled(), tmp_path)
    assert seen[0].filename == __file__


def test_functions_in_functions_that_hold_modules_are_told_of():
    model = nn.Sequential(nn.Linear(48, 48), nn.Linear(48, 48)).eval()

    def logged(call):
        return lambda x: call(x)

    model.forward = logged(logged(model.forward))
    with pytest.warns(UserWarning, match="^forward of Sequential is a function that holds modules"):
        pc.sketchify(model, 0.5, min_params=0, allow_slower=True, synthetic=False)
