"""Which layers `sketchify` takes, and how many numbers it leaves them."""

import itertools
import re

import pytest
import torch
from torch import nn

import panther_compile as pc
from panther_compile.errors import NoTargetError

OPTIONS = {"progress": False, "min_params": 0, "allow_slower": True}


def mlp(*widths, bias=True):
    return nn.Sequential(*(nn.Linear(i, o, bias=bias) for i, o in itertools.pairwise(widths)))


# --------------------------------------------------------------------------------------- selectors


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(96, 48)
        self.encoder = nn.ModuleList(mlp(48, 64, 48) for _ in range(2))
        self.conv = nn.Conv2d(16, 16, 3)
        self.head = nn.Linear(48, 96)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.encoder:
            x = x + block(x)
        return self.head(x)


ENCODER = ["encoder.0.0", "encoder.0.1", "encoder.1.0", "encoder.1.1"]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, [*ENCODER, "conv"]),
        ({"include": "*"}, ["embed", *ENCODER, "conv", "head"]),
        ({"include": ["*", "head"], "exclude": "encoder.*"}, ["embed", "conv", "head"]),
        ({"include": "encoder.?.0"}, [ENCODER[0], ENCODER[2]]),
        ({"include": re.compile(r"encoder\.1\.\d")}, ENCODER[2:]),
        ({"include": nn.Linear}, [*ENCODER, "head"]),
        ({"include": (nn.Embedding, "head")}, ["embed", "head"]),
        ({"exclude": nn.Linear}, ["conv"]),
        ({"exclude": [re.compile("encoder.0.*"), "conv"]}, ENCODER[2:]),
        (
            {"include": lambda module, name: getattr(module, "out_features", 0) == 64},
            [ENCODER[0], ENCODER[2]],
        ),
        ({"ratio": {"encoder.0.*": 0.3, "head": 0.6}}, ENCODER[:2]),
        ({"ratio": {"encoder.0.*": 0.3, "head": 0.6}, "include": "*"}, [*ENCODER[:2], "head"]),
        ({"ratio": {"encoder.0.*": 1.0, "encoder.1.1": 0.6}}, ENCODER[3:]),
    ],
)
def test_selectors(options, wanted):
    model = Blocks()
    small = pc.sketchify(model, **{"ratio": 0.5, **OPTIONS, **options})
    changed = [
        name
        for name, module in model.named_modules()
        if name and not list(module.children()) and type(module) is not type(small.get_submodule(name))
    ]
    assert changed == wanted
    plan = pc.plan_sketch(model, **{"ratio": 0.5, **OPTIONS, **options})
    assert [line.name for line in plan.sketched] == wanted
    assert all(line.reason for line in plan.layers if line.choice is None)
    assert [line.name for line in plan.layers] == ["embed", *ENCODER, "conv", "head"]


def test_each_budget_of_a_mapping_is_kept_and_the_first_match_counts():
    model = Blocks()
    ratio = {re.compile(r"encoder\.0\..*"): 0.3, nn.Linear: 0.7}
    small = pc.sketchify(model, ratio, include=nn.Linear, **OPTIONS)
    for prefix, asked in (("encoder.0.", 0.3), (("encoder.1.", "head"), 0.7)):
        stored = sum(p.numel() for n, p in small.named_parameters() if n.startswith(prefix))
        dense = sum(p.numel() for n, p in model.named_parameters() if n.startswith(prefix))
        assert asked - 0.005 <= stored / dense <= asked


def test_reasons():
    plan = pc.plan_sketch(Blocks(), 0.5, **{**OPTIONS, "min_params": 3000})
    reasons = {line.name: line.reason for line in plan.layers}
    assert reasons["embed"] == "embedding: left alone unless included"
    assert reasons["head"] == "output head: left alone unless included"
    assert reasons["conv"].startswith("small: 2,304 numbers, min_params is 3,000")
    assert reasons["encoder.0.0"] == ""


@pytest.mark.parametrize("name", ["mix", "unmix", "mix*", "*unm*"])
def test_module_under_several_names_is_selected_by_any(name):
    model = nn.Module()
    model.mix, model.other = nn.Linear(48, 48), nn.Linear(48, 48)
    model.unmix = model.mix
    small = pc.sketchify(model, {name: 0.5}, include=name, **OPTIONS)
    assert isinstance(small.mix, pc.SketchedLinear)
    assert small.unmix is small.mix
    assert type(small.other) is nn.Linear


def test_layer_of_a_shared_block_is_selected_by_any_of_its_names():
    model = nn.Module()
    model.first, model.other = nn.Sequential(nn.Linear(48, 48)), nn.Linear(48, 48)
    model.second = nn.Sequential(model.first)
    small = pc.sketchify(model, 0.5, exclude="second.0.*", **OPTIONS)
    assert type(small.first[0]) is nn.Linear
    assert isinstance(small.other, pc.SketchedLinear)


@pytest.mark.parametrize("data", [None, torch.randn(64, 48)])
def test_the_head_of_a_model_that_was_sketched_is_left_alone_as_before(data):
    model = nn.Sequential(nn.Linear(48, 96), nn.ReLU(), nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, 10))
    small = pc.sketchify(model, 0.7, exclude="2", **OPTIONS)
    again = pc.sketchify(small, 0.5, data=data, output="logits", **OPTIONS)
    assert [type(again[i]) for i in (0, 4)] == [pc.SketchedLinear, nn.Linear]
    assert type(again[2]) is not nn.Linear
    with pytest.raises(NoTargetError, match="4: output head: left alone unless included"):
        pc.sketchify(again, 0.5, data=data, **OPTIONS)
    included = pc.sketchify(again, 0.5, include="4", **OPTIONS)
    assert type(included[4]) is pc.SketchedLinear


def test_a_dense_layer_ahead_of_a_sketched_head_is_no_head():
    small = pc.sketchify(mlp(48, 96, 10), 0.5, include="1", **OPTIONS)
    again = pc.sketchify(small, 0.5, **OPTIONS)
    assert [type(layer) for layer in again] == [pc.SketchedLinear] * 2


def test_a_linear_layer_ahead_of_convolutions_is_no_head():
    decoder = [nn.Linear(16, 8 * 64), nn.Unflatten(1, (8, 8, 8)), nn.ConvTranspose2d(8, 3, 2, 2)]
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 16), *decoder)
    lines = {line.name: line for line in pc.plan_sketch(model, 0.5, **OPTIONS).layers}
    assert lines["2"].choice is not None, lines["2"].reason
    small = pc.sketchify(model, {"4": 0.8}, **OPTIONS)
    assert type(small[4]) is pc.SketchedConvTranspose2d
    assert pc.plan_sketch(small, 0.5, **OPTIONS).layers[1].choice is not None


def test_the_last_of_equal_blocks_in_a_sequence_holds_no_head():
    blocks = [mlp(32, 64, 48), mlp(48, 96, 48), mlp(48, 96, 48)]
    for model in (nn.Sequential(*blocks), nn.Sequential(nn.LayerNorm(32), nn.Sequential(*blocks))):
        reasons = [line.reason for line in pc.plan_sketch(model, 0.5, **OPTIONS).layers]
        assert "output head: left alone unless included" not in reasons
    headed = nn.Sequential(*blocks, nn.Sequential(nn.Linear(48, 10)))
    assert pc.plan_sketch(headed, 0.5, **OPTIONS).layers[-1].reason.startswith("output head")


# ------------------------------------------------------------------------------------------ budget


def numbers(modules):
    found = {id(t): t.numel() for m in modules for t in (*m.parameters(), *m.buffers())}
    return sum(found.values())


def counted_ratio(model, small):
    """Stored over dense numbers of the replaced layers, counted without the library."""
    others = dict(small.named_modules(remove_duplicate=False))
    replaced = [
        (module, others[name])
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d | nn.Embedding | nn.MultiheadAttention)
        and type(others[name]) is not type(module)
    ]
    return numbers(new for _, new in replaced) / numbers(old for old, _ in replaced)


def random_mlp(generator):
    def draw(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    widths = [draw(100, 400) for _ in range(draw(4, 9))]
    return mlp(*widths, bias=bool(draw(0, 2)))


@pytest.mark.parametrize("case", range(12))
def test_budget_of_random_models(case):
    generator = torch.Generator().manual_seed(case)
    model = random_mlp(generator)
    ratio = 0.08 + 0.82 * float(torch.rand((), generator=generator))
    small = pc.sketchify(model, ratio, **OPTIONS)
    found = counted_ratio(model, small)
    assert ratio - 0.005 <= found <= ratio
    assert pc.sketch_report(small).achieved_ratio == pytest.approx(found, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_budget_of_other_dtypes(dtype):
    model = mlp(300, 200, 300, 200).to(dtype)
    small = pc.sketchify(model, 0.5, **OPTIONS)
    assert {t.dtype for t in small.parameters()} == {dtype}
    assert 0.49 <= counted_ratio(model, small) <= 0.5


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75])
def test_budget_of_transformers(ratio):
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(128, 4, 512, batch_first=True), 2)
    small = pc.sketchify(model, ratio, **OPTIONS)
    assert ratio - 0.005 <= counted_ratio(model, small) <= ratio


@pytest.mark.parametrize("ratio", [0.02, 0.05, 0.1])
def test_small_budgets_are_never_exceeded(ratio):
    model = mlp(128, 128, 256, 64, 128)
    small = pc.sketchify(model, ratio, **OPTIONS)
    assert counted_ratio(model, small) <= ratio


@pytest.mark.parametrize("step", [1, 4, 16, 32])
@pytest.mark.parametrize("ratio", [0.4, 0.5, 0.8])
def test_explicit_rounding_is_kept_within_the_budget(step, ratio):
    model = mlp(192, 192, 384, 192)
    plan = pc.plan_sketch(model, ratio, round_rank_to=step, **OPTIONS)
    assert len(plan.sketched) == 2
    assert all(line.choice.rank % step == 0 for line in plan.sketched)
    small = pc.sketchify(model, ratio, round_rank_to=step, **OPTIONS)
    assert counted_ratio(model, small) <= ratio


def test_rounding_too_coarse_for_the_budget_leaves_the_layer_dense():
    model = mlp(192, 192, 384, 192)
    with pytest.raises(pc.PantherError, match="rank 48 would store 16,128 numbers, more than its share"):
        pc.sketchify(model, 0.2, round_rank_to=48, **OPTIONS)


def test_layers_without_a_rank_of_the_rounding_stay_dense():
    model = mlp(192, 192, 64, 192)
    plan = pc.plan_sketch(model, 0.9, round_rank_to=64, include="*", **OPTIONS)
    ranks = [line.choice and line.choice.rank for line in plan.layers]
    assert ranks[0] % 64 == 0
    assert ranks[1:] == [None, None]
    assert plan.layers[1].reason == "ranks are to be multiples of 64, its largest worthwhile one is 63"
    with pytest.raises(pc.PantherError, match="multiples of 192, its largest worthwhile one is 191"):
        pc.sketchify(model, 0.9, round_rank_to=192, **OPTIONS)


def test_tied_weight_is_counted_once_and_both_biases_are():
    model = mlp(*[96] * 6)
    for layer in model[1:4]:
        layer.weight = model[0].weight
    small = pc.sketchify(model, 0.3, **OPTIONS)
    assert small[1].up.weight is small[0].up.weight
    found = counted_ratio(model, small)
    assert 0.295 <= found <= 0.3
    assert pc.sketch_report(small).achieved_ratio == pytest.approx(found, rel=1e-12)
