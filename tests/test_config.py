"""Every option is checked where it enters, and the selectors pick what they say."""

import dataclasses
import functools
import re
from decimal import Decimal

import numpy as np
import pytest
import torch
from torch import nn

import panther_compile as pc
from panther_compile.config import SketchConfig, selectors, selects
from panther_compile.errors import ConfigError, ConfigTypeError, PantherError
from panther_compile.factorization.factorize import METHODS
from panther_compile.factorization.sketches import SKETCH_KINDS
from panther_compile.healing.options import HealOptions

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("ratio", [1, 1.0, 0.5, 1e-9, np.float64(0.5)])
def test_ratios_that_are_fine(ratio):
    assert SketchConfig(ratio=ratio).ratios() == (("*", float(ratio)),)


@pytest.mark.parametrize("ratio", [0, 0.0, -0.5, 1.0001, 2, NAN, INF, -INF])
def test_ratios_out_of_range(ratio):
    with pytest.raises(ConfigError, match=re.escape(f"ratio={ratio!r}, wanted a number in (0, 1]")):
        SketchConfig(ratio=ratio)
    with pytest.raises(ConfigError, match=re.escape(f"ratio['fc']={ratio!r}, wanted")):
        SketchConfig(ratio={"fc": ratio})


@pytest.mark.parametrize(
    "ratio", ["0.5", None, True, False, [0.5], (0.5,), 0.5j, torch.tensor(0.5), Decimal("0.5")]
)
def test_ratios_of_the_wrong_type(ratio):
    with pytest.raises(ConfigTypeError, match="wanted a number"):
        SketchConfig(ratio=ratio)
    with pytest.raises(ConfigTypeError, match="wanted a number"):
        SketchConfig(ratio={"fc": ratio})


def test_ratio_mapping():
    with pytest.raises(ConfigError, match="at least one selector"):
        SketchConfig(ratio={})
    given = {"a.*": 0.5, nn.Linear: 0.25, re.compile("b"): 1}
    assert SketchConfig(ratio=given).ratios() == tuple(given.items())


@pytest.mark.parametrize("option", ["include", "exclude"])
@pytest.mark.parametrize("given", [3, 0.5, [3], ["fc", 3], [None], {"fc": 1}, True, b"fc", torch.zeros(1)])
def test_selectors_of_the_wrong_type(option, given):
    with pytest.raises(ConfigTypeError, match=f"{option}: .* wanted a glob string"):
        SketchConfig(**{option: given})


@pytest.mark.parametrize("option", ["include", "exclude"])
def test_a_type_that_is_no_module(option):
    with pytest.raises(ConfigTypeError, match=f"{option}: int is not a module type"):
        SketchConfig(**{option: int})


def test_functions_that_can_be_given_a_module_and_a_name():
    for function in (lambda *given: True, lambda m, n, more=1: True, functools.partial(max, 1), max):
        assert SketchConfig(include=function).include is function


def test_ratio_selectors_are_checked_too():
    with pytest.raises(ConfigTypeError, match=r"ratio: .* takes \(name\), wanted a function"):
        SketchConfig(ratio={lambda name: True: 0.5})
    with pytest.raises(ConfigTypeError, match="ratio: 3 is a int"):
        SketchConfig(ratio={3: 0.5})
    with pytest.raises(ConfigTypeError, match="ratio: str is not a module type"):
        SketchConfig(ratio={str: 0.5})


@pytest.mark.parametrize("option", ["method", "sketch", "attention"])
@pytest.mark.parametrize("given", ["magic", "", "SVD", None, 3, True, ["svd"]])
def test_unknown_choices(option, given):
    with pytest.raises(ConfigError, match=f"{option}=.*, wanted one of '"):
        SketchConfig(**{option: given})


def test_known_choices():
    for method in METHODS:
        assert SketchConfig(method=method).method == method
    for sketch in SKETCH_KINDS:
        assert SketchConfig(sketch=sketch, method="randomized").sketch == sketch
    for attention in ("exact", "favor"):
        assert SketchConfig(attention=attention).attention == attention


@pytest.mark.parametrize("method", ["svd"])
@pytest.mark.parametrize("sketch", [kind for kind in SKETCH_KINDS if kind != "gaussian"])
def test_a_sketch_conflicts_with_a_method_that_draws_none(method, sketch):
    with pytest.raises(ConfigError, match="conflicts with method"):
        SketchConfig(method=method, sketch=sketch)


INTEGERS = {"features": 1, "min_params": 0, "round_rank_to": 1, "seed": 0}


@pytest.mark.parametrize(("option", "least"), list(INTEGERS.items()))
def test_integers(option, least):
    assert getattr(SketchConfig(**{option: least}), option) == least
    with pytest.raises(ConfigError, match=f"{option}={least - 1}, wanted at least {least}"):
        SketchConfig(**{option: least - 1})
    for given in (1.0, "8", NAN, True, False, [8], 8j, torch.tensor(8)):
        with pytest.raises(ConfigTypeError, match=f"{option}=.*wanted an integer"):
            SketchConfig(**{option: given})


def test_numbers_of_numpy_are_read_as_pythons_own():
    """A sweep over `np.linspace` or `np.arange` gives such; files hold none."""
    config = SketchConfig(ratio=np.float32(0.5), seed=np.int64(3), min_params=np.uint8(7))
    assert config == SketchConfig(ratio=0.5, seed=3, min_params=7)
    assert [type(one) for one in (config.ratio, config.seed, config.min_params)] == [float, int, int]
    assert type(SketchConfig(ratio={"fc": np.float16(0.25)}).ratio["fc"]) is float
    options = HealOptions(steps=np.int32(4), lr=np.float32(0.5), held_out=np.float64(0.25))
    assert options == HealOptions(steps=4, lr=0.5, held_out=0.25)
    assert [type(one) for one in (options.steps, options.lr)] == [int, float]
    with pytest.raises(ConfigTypeError, match=r"seed=np.True_ is a bool.*, wanted an integer"):
        SketchConfig(seed=np.True_)


@pytest.mark.parametrize("option", ["features", "min_params", "seed"])
def test_integers_that_must_be_given(option):
    with pytest.raises(ConfigTypeError):
        SketchConfig(**{option: None})


@pytest.mark.parametrize("option", ["inplace", "allow_slower", "progress"])
def test_booleans(option):
    for given in (True, False):
        assert getattr(SketchConfig(**{option: given}), option) is given
    for given in (1, 0, "yes", [], NAN):
        with pytest.raises(ConfigTypeError, match=f"{option}=.*wanted bool"):
            SketchConfig(**{option: given})
    if option != "progress":
        with pytest.raises(ConfigTypeError):
            SketchConfig(**{option: None})


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
def test_devices_that_are_fine(device):
    assert SketchConfig(device=device).device == device


def test_devices_that_are_not():
    for device in ("warp", "cpu:x", ""):
        with pytest.raises(ConfigError, match="device="):
            SketchConfig(device=device)
    for device in (0, True, ["cpu"]):
        with pytest.raises(ConfigTypeError, match="wanted device or str"):
            SketchConfig(device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_device_that_is_not_there():
    with pytest.raises(ConfigError, match="device='cuda'"):
        SketchConfig(device="cuda")


def test_a_seed_that_no_generator_takes():
    with pytest.raises(ConfigError, match="seed="):
        SketchConfig(seed=2**64)


def test_options_are_named_and_frozen():
    with pytest.raises(TypeError):
        SketchConfig(0.5)
    with pytest.raises(TypeError):
        SketchConfig(rank=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        SketchConfig().ratio = 0.25


def test_errors_are_ordinary_ones_too():
    for given, builtin in (({"ratio": 2}, ValueError), ({"ratio": "x"}, TypeError)):
        with pytest.raises(builtin) as caught:
            SketchConfig(**given)
        assert isinstance(caught.value, PantherError)


# ---------------------------------------------------------------------------------------- selectors


def test_one_several_or_none():
    function = str.isidentifier
    assert selectors(None) == ()
    assert selectors("a") == ("a",)
    assert selectors(nn.Linear) == (nn.Linear,)
    assert selectors(function) == (function,)
    assert selectors(["a", nn.Linear]) == selectors(("a", nn.Linear)) == ("a", nn.Linear)
    assert selectors([]) == ()
    assert selectors({"a"}) == selectors(frozenset({"a"})) == ("a",)


@pytest.mark.parametrize(
    ("selector", "name", "picked"),
    [
        ("encoder.*", "encoder.0.fc", True),
        ("encoder.*", "encoder", False),
        ("encoder", "encoder.0", False),
        ("*fc", "encoder.0.fc", True),
        ("*.FC", "encoder.fc", False),
        ("layer.?.fc", "layer.3.fc", True),
        ("layer.[01].fc", "layer.3.fc", False),
        ("*", "", True),
        ("", "", True),
    ],
)
def test_a_glob_is_on_the_whole_name(selector, name, picked):
    assert selects(selector, nn.Linear(2, 2), name) is picked


def test_a_regex_is_on_the_whole_name():
    fc = nn.Linear(2, 2)
    assert selects(re.compile(r"layer\.\d+\.fc"), fc, "layer.12.fc")
    assert not selects(re.compile(r"layer\.\d+"), fc, "layer.12.fc")
    assert not selects(re.compile("fc"), fc, "layer.fc")


def test_a_type_takes_its_subclasses():
    class Own(nn.Linear):
        pass

    assert selects(nn.Linear, Own(2, 2), "fc")
    assert selects(nn.Module, nn.Linear(2, 2), "fc")
    assert not selects(Own, nn.Linear(2, 2), "fc")
    assert not selects(nn.Conv2d, nn.Linear(2, 2), "fc")


def test_a_function_sees_the_module_and_its_name():
    fc, seen = nn.Linear(2, 2), []

    def wide(module, name):
        seen.append((module, name))
        return module.in_features if name == "a" else 0

    assert selects(wide, fc, "a") is True
    assert selects(wide, fc, "b") is False
    assert seen == [(fc, "a"), (fc, "b")]


def test_a_config_stands_in_for_the_defaults():
    model = nn.Sequential(nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 96), nn.Linear(96, 4))
    options = {"min_params": 0, "allow_slower": True, "progress": False}
    config = pc.SketchConfig(ratio=0.4, **options)
    plan = pc.plan_sketch(model, config=config)
    assert plan == pc.plan_sketch(model, 0.4, **options)
    assert pc.plan_sketch(model, 0.7, config=config) == pc.plan_sketch(model, 0.7, **options)
    assert pc.plan_sketch(model, exclude="0", config=config).layers[0].choice is None
    small = pc.sketchify(model, config=config)
    assert pc.sketch_report(small).achieved_ratio == plan.achieved_ratio
    with pytest.raises(ConfigTypeError, match="config is a dict, wanted a SketchConfig"):
        pc.sketchify(model, config=options)
