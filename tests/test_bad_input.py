"""What cannot be done is refused at once, with an error that says what was given, what was wanted, where."""

import math
import re
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

import panther_compile as pc
from panther_compile.errors import (
    ConfigError,
    ConfigTypeError,
    NoTargetError,
    SelectorError,
    WeightError,
    WrappedModelError,
)

OPTIONS = {"progress": False, "min_params": 0, "allow_slower": True}


def mlp(width=32, depth=3):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


@pytest.fixture(params=[pc.sketchify, pc.plan_sketch], ids=["sketchify", "plan_sketch"])
def verb(request):
    return request.param


@pytest.fixture
def gloo(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("ratio", [0, 0.0, -0.5, 1.0001, 2, math.nan, math.inf, -math.inf])
def test_ratio_out_of_range(verb, ratio):
    with pytest.raises(ConfigError, match=rf"ratio={re.escape(repr(ratio))}, wanted a number in \(0, 1\]"):
        verb(mlp(), ratio)


@pytest.mark.parametrize("ratio", [True, "0.5", [0.5], torch.tensor(0.5), 0.5j])
def test_ratio_of_a_wrong_type(verb, ratio):
    kind = type(ratio).__name__
    with pytest.raises(ConfigTypeError, match=rf"ratio=.* is a {kind}, wanted a number"):
        verb(mlp(), ratio)


@pytest.mark.parametrize(
    ("ratio", "error", "message"),
    [
        ({}, ConfigError, "at least one selector"),
        ({"0": 1.5}, ConfigError, r"ratio\['0'\]=1.5"),
        ({"0": "half"}, ConfigTypeError, r"ratio\['0'\]='half' is a str"),
        ({3: 0.5}, ConfigTypeError, "ratio: 3 is a int, wanted a glob"),
        ({"nothing": 0.5}, SelectorError, "ratio: 'nothing' matches none of the 3 layers"),
    ],
)
def test_ratio_mapping(verb, ratio, error, message):
    with pytest.raises(error, match=message):
        verb(mlp(), ratio)


@pytest.mark.parametrize(
    ("option", "value", "error", "message"),
    [
        ("method", "qr", ConfigError, "method='qr', wanted one of 'auto', 'svd'"),
        ("method", None, ConfigError, "method=None, wanted one of"),
        ("sketch", "dct", ConfigError, "sketch='dct', wanted one of 'gaussian'"),
        ("attention", "flash", ConfigError, "attention='flash', wanted one of 'exact', 'favor'"),
        ("features", 0, ConfigError, "features=0, wanted at least 1"),
        ("features", 2.5, ConfigTypeError, "features=2.5 is a float, wanted an integer"),
        ("min_params", -1, ConfigError, "min_params=-1, wanted at least 0"),
        ("min_params", None, ConfigTypeError, "min_params=None is a NoneType"),
        ("round_rank_to", 0, ConfigError, "round_rank_to=0, wanted at least 1"),
        ("round_rank_to", True, ConfigTypeError, "round_rank_to=True is a bool"),
        ("seed", -1, ConfigError, "seed=-1, wanted at least 0"),
        ("seed", 2**64, ConfigError, f"seed={2**64}, wanted at most"),
        ("seed", "0", ConfigTypeError, "seed='0' is a str"),
        ("inplace", 1, ConfigTypeError, "inplace=1 is a int, wanted bool"),
        ("allow_slower", "yes", ConfigTypeError, "allow_slower='yes' is a str, wanted bool"),
        ("progress", "no", ConfigTypeError, "progress='no' is a str, wanted bool"),
        ("device", 0, ConfigTypeError, "device=0 is a int, wanted device or str"),
        ("device", "toaster", ConfigError, "device='toaster'"),
        ("device", "meta", ConfigError, "device='meta' holds no numbers"),
        ("include", 3, ConfigTypeError, "include: 3 is a int, wanted a glob string"),
        ("include", ["0", None], ConfigTypeError, "include: None is a NoneType"),
        ("include", int, ConfigTypeError, "include: int is not a module type"),
        ("include", nn.Linear(2, 2), ConfigTypeError, "include: given a Linear itself, wanted its name"),
        (
            "include",
            lambda module: True,
            ConfigTypeError,
            r"takes \(module\), wanted a function f\(module, name\)",
        ),
        ("exclude", [lambda: True], ConfigTypeError, r"exclude: .* takes \(\), wanted a function"),
        ("exclude", re.compile(b"0"), ConfigTypeError, "exclude: .* is of bytes"),
        ("include", "fc*", SelectorError, r"include: 'fc\*' matches none of the 3 layers .*\(0, 1, 2\)"),
        ("exclude", [re.compile("fc")], SelectorError, "exclude: re.compile"),
        ("include", nn.Conv2d, SelectorError, "include: <class .*Conv2d.* matches none"),
        ("exclude", lambda module, name: False, SelectorError, "exclude: <function"),
    ],
)
def test_option(verb, option, value, error, message):
    with pytest.raises(error, match=message):
        verb(mlp(), 0.5, **{option: value})


def test_device_that_this_machine_lacks(verb):
    if torch.cuda.is_available():
        pytest.skip("has CUDA")
    with pytest.raises(ConfigError, match="device='cuda' cannot be used here"):
        verb(mlp(), 0.5, device="cuda")


def test_unknown_option_names_those_there_are(verb):
    with pytest.raises(ConfigTypeError, match=r"unknown option rank, ration; the options are .*seed"):
        verb(mlp(), 0.5, rank=3, ration=2)


@pytest.mark.parametrize("method", ["svd"])
def test_conflicting_options(verb, method):
    with pytest.raises(ConfigError, match=f"sketch='srht' conflicts with method='{method}'"):
        verb(mlp(), 0.5, sketch="srht", method=method)


@pytest.mark.parametrize("model", [None, 3, "bert", nn.Linear, torch.zeros(2, 2), {"fc": nn.Linear(2, 2)}])
def test_not_a_module(verb, model):
    with pytest.raises(ConfigTypeError, match=rf"model is a {type(model).__name__}, wanted an nn.Module"):
        verb(model, 0.5)
    with pytest.raises(ConfigTypeError, match="wanted an nn"):
        pc.densify(model)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("tensor", ["weight", "bias"])
def test_weight_that_is_not_finite_is_named(verb, tensor, bad):
    model = mlp()
    with torch.no_grad():
        getattr(model[1], tensor).view(-1)[:3] = bad
    with pytest.raises(WeightError, match=rf"1\.{tensor} holds 3 NaN or Inf among"):
        verb(model, 0.5, **OPTIONS)


def test_weight_that_is_not_finite_matters_only_where_it_is_sketched():
    model = mlp()
    with torch.no_grad():
        model[1].weight[0, 0] = math.nan
    small = pc.sketchify(model, 0.5, exclude="1", **OPTIONS)
    assert torch.equal(small[1].weight, model[1].weight) is False  # NaN is not equal to itself
    assert isinstance(small[0], pc.SketchedLinear)


def test_bare_layer_with_nan_is_named():
    layer = nn.Linear(32, 32)
    layer.weight.data[0, 0] = math.nan
    with pytest.raises(WeightError, match=r"^weight holds 1 NaN"):
        pc.sketchify(layer, 0.5, **OPTIONS)


def test_bias_of_a_tied_layer_that_is_not_finite_is_named():
    model = mlp()
    model[2].weight = model[0].weight
    model[2].bias.data[:] = math.inf
    with pytest.raises(WeightError, match=r"2\.bias holds 32 NaN or Inf"):
        pc.sketchify(model, 0.5, **OPTIONS)


def test_meta_model_is_planned_but_not_sketched():
    with torch.device("meta"):
        model = mlp(64)
    plan = pc.plan_sketch(model, 0.5, **OPTIONS)
    assert len(plan.sketched) == 3
    assert 0.495 < plan.achieved_ratio <= 0.5
    with pytest.raises(WeightError, match=r"0\.weight is on the meta device: load the weights"):
        pc.sketchify(model, 0.5, **OPTIONS)


def test_meta_model_plan_has_the_ranks_of_the_budget():
    with torch.device("meta"):
        meta = mlp(64, 1)
    assert (
        pc.plan_sketch(meta, 0.5, **OPTIONS).layers[0].choice.rank
        == pc.plan_sketch(mlp(64, 1), 0.5, **OPTIONS).layers[0].choice.rank
    )


def fake_fsdp(model):
    class FullyShardedDataParallel(nn.Module):
        __module__ = "torch.distributed.fsdp.fully_sharded_data_parallel"

        def __init__(self):
            super().__init__()
            self._fsdp_wrapped_module = model

    return FullyShardedDataParallel()


WRAPPERS = {
    "DataParallel": (DataParallel, r"model\.module first"),
    "FullyShardedDataParallel": (fake_fsdp, "plain model first, then wrap"),
    "OptimizedModule": (torch.compile, r"model\._orig_mod"),
    "ScriptModule": (torch.jit.script, "plain model first, then script"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("nested", [False, True])
def test_wrapped_model_is_refused_with_advice(verb, wrapper, nested):
    wrap, advice = WRAPPERS[wrapper]
    model = wrap(mlp())
    model = nn.ModuleDict({"body": model}) if nested else model
    where = "its part body" if nested else "the model"
    with pytest.raises(WrappedModelError, match=rf"{where} is a {wrapper}: .*{advice}"):
        verb(model, 0.5)


def test_ddp_is_refused_with_advice(verb, gloo):
    with pytest.raises(WrappedModelError, match=r"the model is a DistributedDataParallel: .*model\.module"):
        verb(DistributedDataParallel(mlp()), 0.5)


def test_fully_shard_is_refused_with_advice(verb, gloo):
    model = mlp()
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.fsdp.fully_shard(model, mesh=mesh)
    with pytest.raises(WrappedModelError, match=r"the model is a FSDPModule: .*fully_shard on the result"):
        verb(model, 0.5)


def test_wrapped_model_is_not_densified():
    with pytest.raises(WrappedModelError, match=r"give model\.module first"):
        pc.densify(DataParallel(pc.sketchify(mlp(), 0.5, **OPTIONS)))
    with pytest.raises(WrappedModelError, match=r"give the model that was compiled \(model\._orig_mod\)"):
        pc.densify(torch.compile(pc.sketchify(mlp(), 0.5, **OPTIONS), backend="eager"))


def test_plain_attribute_wrapped_in_compile_is_no_wrapper():
    model = mlp()
    model.compile(backend="eager")
    assert isinstance(pc.sketchify(model, 0.5, **OPTIONS)[0], pc.SketchedLinear)


@pytest.mark.parametrize("model", [nn.Module(), nn.Sequential(), nn.LayerNorm(4), nn.Bilinear(8, 8, 64)])
def test_model_without_targets(verb, model):
    with pytest.raises(NoTargetError, match=f"nothing to sketch in {type(model).__name__}: wanted"):
        verb(model, 0.5)


def test_every_layer_left_alone_is_listed_with_its_reason(verb):
    with pytest.raises(NoTargetError) as raised:
        verb(mlp(8, 14), 0.5)
    message = str(raised.value)
    assert "\n  0: small: 64 numbers, min_params is 4,096" in message
    assert "\n  and 4 more" in message


def test_bare_layer_left_alone_has_a_name_in_the_message(verb):
    with pytest.raises(NoTargetError, match=r"\n  \(model\): small"):
        verb(nn.Linear(4, 4), 0.5)


def test_ratio_that_no_rank_fits(verb):
    with pytest.raises(NoTargetError, match="rank 1 would store 63 numbers, more than its share"):
        verb(mlp(32), 0.001, **OPTIONS)


def test_forward_that_uses_its_own_parameters_is_pointed_to_a_trace(verb):
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(32, 32))

        def forward(self, x):
            return nn.functional.linear(x, next(self.parameters()))

    with pytest.raises(NoTargetError, match=r"torch\.fx\.symbolic_trace"):
        verb(Functional(), 0.5, **OPTIONS)


def test_densify_without_sketched_layers():
    with pytest.raises(NoTargetError, match="Sequential holds no sketched layer"):
        pc.densify(mlp())


def test_model_that_cannot_be_copied():
    model = mlp()
    model.lock = threading.Lock()
    with pytest.raises(ConfigTypeError, match=r"Sequential cannot be copied .*lock.*; inplace") as raised:
        pc.sketchify(model, 0.5, **OPTIONS)
    assert isinstance(raised.value.__cause__, TypeError)
    assert [type(layer) for layer in model] == [nn.Linear] * 3
    pc.plan_sketch(model, 0.5, **OPTIONS)
    small = pc.sketchify(model, 0.5, inplace=True, **OPTIONS)
    assert small is model
    assert [type(layer) for layer in model] == [pc.SketchedLinear] * 3
    with pytest.raises(ConfigTypeError, match="inplace=True"):
        pc.densify(model)
    assert type(pc.densify(model, inplace=True)[0]) is nn.Linear


def test_model_whose_own_copy_makes_new_layers():
    class Stubborn(nn.Sequential):
        def __deepcopy__(self, memo):
            fresh = type(self)(nn.Linear(32, 32))
            fresh.load_state_dict(self.state_dict())
            return fresh

    model = Stubborn(nn.Linear(32, 32))
    with pytest.raises(ConfigTypeError, match="deep copy of Stubborn does not hold the new layers"):
        pc.sketchify(model, 0.5, **OPTIONS)
    assert isinstance(pc.sketchify(model, 0.5, inplace=True, **OPTIONS)[0], pc.SketchedLinear)


def test_exported_program_cannot_be_changed_in_place():
    program = torch.export.export(mlp(), (torch.randn(2, 32),))
    with pytest.raises(ConfigError, match="inplace=True conflicts with an ExportedProgram"):
        pc.sketchify(program, 0.5, inplace=True, **OPTIONS)


def test_error_of_a_selector_function_is_the_users_own():
    def broken(module, name):
        raise KeyError(name)

    with pytest.raises(KeyError):
        pc.sketchify(mlp(), 0.5, include=broken)


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (ConfigError, ValueError),
        (SelectorError, ValueError),
        (ConfigTypeError, TypeError),
        (NoTargetError, ValueError),
        (WeightError, ValueError),
        (WrappedModelError, TypeError),
    ],
)
def test_every_error_is_ours_and_a_builtin(error, builtin):
    assert issubclass(error, pc.PantherError)
    assert issubclass(error, builtin)


@pytest.mark.parametrize("given", [None, 3, "model", nn.Linear, {}], ids=repr)
@pytest.mark.parametrize("read", [pc.sketch_report, pc.heal_report, pc.residual_report])
def test_reports_of_what_is_no_model(read, given):
    with pytest.raises(ConfigTypeError, match=f"model is a {type(given).__name__}, wanted an nn.Module"):
        read(given)


@pytest.mark.parametrize("given", [None, 3, "part"])
def test_other_arguments_of_other_types(given):
    with pytest.raises(ConfigTypeError, match=r"state_dict is a .*, wanted what"):
        pc.load_residual(mlp(), given)
    with pytest.raises(ConfigTypeError, match=r"part is a .*, wanted what partition_model gives"):
        pc.check_layout(given)
    with pytest.raises(ConfigTypeError, match=r"model is a .*, wanted an nn.Module"):
        pc.project_state_dict(given, {})


@pytest.mark.parametrize("given", [None, 3, {}, b"run"], ids=repr)
def test_a_folder_of_a_training_is_a_path(given):
    for read in (pc.read_state_dict, pc.TrainingCheckpoints):
        with pytest.raises(ConfigTypeError, match=r"folder=.*, wanted a path"):
            read(given)


@pytest.mark.parametrize("given", [None, 3, {}, lambda rows: None], ids=type)
def test_a_trial_is_a_function_that_another_process_can_import(given):
    with pytest.raises(ConfigTypeError, match=r"trial.* wanted a function of a"):
        pc.find_batch_size(given)


def test_a_choice_given_as_an_array(verb):
    with pytest.raises(ConfigError, match=r"method=.*, wanted one of 'auto'"):
        verb(mlp(), method=np.array(["svd", "auto"]))


@pytest.mark.parametrize(
    ("call", "option"),
    [
        (lambda model: pc.densify(model, inplace="no"), "inplace"),
        (lambda model: pc.prepare_int8(model, inplace="no"), "inplace"),
        (lambda model: pc.add_residual(model, model, 4, inplace="no"), "inplace"),
        (lambda model: pc.load_residual(model, {}, inplace="no"), "inplace"),
        (lambda model: pc.export_onnx(model, torch.randn(1, 32), "a.onnx", verify="no"), "verify"),
        (lambda model: pc.sketch_onnx("a.onnx", "b.onnx", data=[], sequential="no"), "sequential"),
        (lambda model: pc.sketch_onnx("a.onnx", "b.onnx", verify="no"), "verify"),
        (lambda model: pc.add_residual_onnx("a.onnx", "b.onnx", "c.onnx", 4, sequential="no"), "sequential"),
    ],
)
def test_no_text_is_taken_for_true(call, option):
    """`inplace="no"` changed the model that was given."""
    with pytest.raises(ConfigTypeError, match=f"{option}='no' is a str, wanted bool"):
        call(mlp())
