"""Experts that store one factor in common: where they are alike, by weights alone and by data; all routes."""

import copy

import onnx
import pytest
import torch
from kinds import routes
from kinds.routes import relative
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssMLP
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

import panther_compile as pc
from panther_compile.errors import ConfigError, RankError
from panther_compile.kinds import experts
from panther_compile.layers import SketchedExperts
from panther_compile.planning import shared_factor

OPTIONS = routes.OPTIONS | {"synthetic": False}
BLOCKS = {"mixtral": (MixtralConfig, MixtralSparseMoeBlock), "gpt_oss": (GptOssConfig, GptOssMLP)}
PROJECTIONS = ("gate_up", "down")


def make_alike(model, common):
    """Experts of which so much is that of one dense layer, as if upcycled, and the rest their own."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 3:
                shared, own = torch.randn(parameter.shape[1:]), torch.randn(parameter.shape)
                size = (parameter.shape[1] * parameter.shape[2]) ** -0.25
                parameter.copy_((common**0.5 * shared + (1 - common) ** 0.5 * own) * size)
            elif parameter.dim() == 2:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)


class Mixtures(nn.Module):
    """Residual blocks of a router and experts, wider inside than outside."""

    def __init__(self, name, common, blocks=1):
        super().__init__()
        make_config, block = BLOCKS[name]
        config = make_config(hidden_size=24, intermediate_size=40, num_local_experts=4, num_experts_per_tok=2)
        config._experts_implementation = "grouped_mm"
        self.blocks = nn.ModuleList(block(config) for _ in range(blocks))
        make_alike(self, common)

    def forward(self, x):
        for block in self.blocks:
            out = block(x)
            x = x + (out[0] if isinstance(out, tuple) else out)
        return x


# Of what takes longest one does; the other is in the tests of factors, of saving and of healing.
ONE = pytest.mark.parametrize(
    "alike", ["mixtral", pytest.param("gpt_oss", marks=pytest.mark.slow)], indirect=True
)


@pytest.fixture(params=list(BLOCKS))
def alike(request):
    return lambda blocks=1: Mixtures(request.param, 0.9, blocks).eval()


def batches(count, rows=16):
    torch.manual_seed(1)
    mixing = torch.randn(6, 24)
    return [torch.randn(rows, 16, 6) @ mixing + 0.05 * torch.randn(rows, 16, 24) for _ in range(count)]


X = batches(1, rows=4)[0]


def plan_of(model):
    return vars(model)["_panther_sketch"].plan


def sharing(model):
    return {line.choice.sharing for line in plan_of(model).sketched} - {()}


def is_tied(layer):
    """Whether all experts have one output factor in the first projection, one input factor in the last."""
    up = {id(layer.part("gate_up_proj", one).up.weight) for one in range(4)}
    down = {id(layer.part("down_proj", one).down.weight) for one in range(4)}
    return len(up) == len(down) == 1


def weight_errors(model, small):
    """Of each mixture and projection, over all experts."""
    dense = pc.densify(small)
    for one, other in zip(model.blocks, dense.blocks, strict=True):
        for name in ("gate_up_proj", "down_proj"):
            yield relative(
                other.experts.get_parameter(name).detach(), one.experts.get_parameter(name).detach()
            )


@pytest.mark.parametrize("ratio", [0.25, 0.5])
def test_alike_share_and_lose_less_in_no_more_numbers(alike, ratio, monkeypatch):
    model = alike(blocks=2)
    before = copy.deepcopy(model.state_dict())
    small = pc.sketchify(model, ratio, **OPTIONS)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    names = [tuple(f"blocks.{b}.experts.{p}_{e}" for e in range(4)) for b in range(2) for p in PROJECTIONS]
    assert sharing(small) == set(names)
    assert all(is_tied(block.experts) for block in small.blocks)
    monkeypatch.setattr(shared_factor, "WORTH_SHARING", 0.0)
    apart = pc.sketchify(model, ratio, **OPTIONS)
    assert sharing(apart) == set()
    numbers = [sum(p.numel() for p in one.parameters()) for one in (small, apart)]
    assert 0.9 * numbers[1] < numbers[0] <= numbers[1]
    for found, other in zip(weight_errors(model, small), weight_errors(model, apart), strict=True):
        assert found < 0.9 * other


def test_the_best_factor_of_the_weights(alike):
    """Against the singular values of all the weights in one matrix."""
    model = alike(blocks=2)
    plan = pc.plan_sketch(model, 0.25, **OPTIONS)
    small = pc.sketchify(model, 0.25, **OPTIONS)
    found = iter(weight_errors(model, small))
    for block in range(2):
        for projection, beside in (("gate_up", 1), ("down", 0)):
            line = next(one for one in plan.layers if one.name == f"blocks.{block}.experts.{projection}_0")
            weights = model.blocks[block].experts.get_parameter(f"{projection}_proj").double()
            turned = weights.mT if model.blocks[block].experts.is_transposed else weights
            values = torch.linalg.svdvals(torch.cat(list(turned.detach()), beside))
            best = float((values[line.choice.rank :].square().sum() / values.square().sum()).sqrt())
            assert line.choice.error == pytest.approx(best, rel=1e-6)
            assert best * 0.999 < next(found) < 1.02 * best  # pivoted: a little more


def test_unlike_stay_apart_to_the_bit(monkeypatch):
    model = Mixtures("mixtral", 0.0)
    small = pc.sketchify(model, 0.5, **OPTIONS)
    monkeypatch.setattr(experts, "MOST_SHARING", 1)  # no two may share
    apart = pc.sketchify(model, 0.5, **OPTIONS)
    assert plan_of(small) == plan_of(apart)
    assert sharing(small) == set()
    state = apart.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in small.state_dict().items())


def test_slow_ranks_are_not_shared():
    fast = {key: value for key, value in OPTIONS.items() if key != "allow_slower"}
    plan = pc.plan_sketch(Mixtures("mixtral", 0.9), 0.5, **fast)
    assert not any(line.choice and line.choice.sharing for line in plan.layers)


def test_in_sets(monkeypatch):
    monkeypatch.setattr(experts, "MOST_SHARING", 2)
    small = pc.sketchify(Mixtures("mixtral", 0.9), 0.25, **OPTIONS)
    assert {len(names) for names in sharing(small)} == {2}
    layer = small.blocks[0].experts
    assert layer.gate_up_0.up is layer.gate_up_1.up
    assert layer.gate_up_0.up is not layer.gate_up_2.up
    assert layer.gate_up_2.up is layer.gate_up_3.up


# ------------------------------------------------------------------------------------------------ data


@ONE
def test_data_finds_what_they_share(alike, monkeypatch, tmp_path):
    model, data = alike(), batches(10)
    small = pc.sketchify(model, 0.4, data=data, resume=tmp_path, **OPTIONS)
    assert sharing(small)
    assert {one.method for one in vars(small)["_panther_sketch"].fitted.values()} == {"calibrated"}
    monkeypatch.setattr(experts, "MOST_SHARING", 1)
    apart = pc.sketchify(model, 0.4, data=data, **OPTIONS)
    monkeypatch.undo()
    assert sum(p.numel() for p in small.parameters()) <= sum(p.numel() for p in apart.parameters())
    with torch.no_grad():
        assert relative(small(X), model(X)) < relative(apart(X), model(X))
    for names in sharing(small):
        factor = "up" if "gate_up" in names[0] else "down"
        assert len({id(small.get_submodule(name).get_submodule(factor).weight) for name in names}) == 1
    lost = sorted(tmp_path.rglob("layers-*/*.safetensors"))
    for file in lost[::3]:
        file.unlink()
    again = pc.sketchify(model, 0.4, data=data, resume=tmp_path, **OPTIONS)
    assert sharing(again) == sharing(small)
    for one, other in zip(small.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(one, other)


# ----------------------------------------------------------------------------------------- every route


def test_saved_healed_and_reported(alike, tmp_path):
    small = pc.sketchify(alike(), 0.25, **OPTIONS)
    pc.save_sketched(small, tmp_path)
    with torch.device("meta"):
        skeleton = alike()
    again = pc.load_sketched(skeleton, tmp_path)
    assert torch.equal(again(X), small(X))
    assert all(is_tied(block.experts) for model in (again, copy.deepcopy(small)) for block in model.blocks)
    torch.testing.assert_close(pc.densify(small)(X), small(X), rtol=1e-4, atol=1e-4)
    report = pc.sketch_report(small)
    assert report.replaced_stored_numbers == sum(row.stored_numbers for row in report.sketched)
    layers = [block.experts for block in small.blocks]
    parts = {
        id(p): p.numel()
        for one in layers
        for e in one.children()
        if e is not one.rest
        for p in e.parameters()
    }
    assert report.replaced_stored_numbers == sum(parts.values()) == plan_of(small).stored_numbers
    shared = {row.name: row.shared for row in report.sketched}
    others = ", ".join(f"blocks.0.experts.gate_up_{one}" for one in (0, 1, 3))
    assert shared["blocks.0.experts.gate_up_2"] == f"output factor shared with {others}"
    assert shared["blocks.0.experts.down_1"].startswith("input factor shared with blocks.0.experts.down_0,")
    assert str(pc.sketch_report(again)) == str(report)
    healed = pc.heal(small, teacher=alike(), data=batches(4), steps=3, progress=False)
    assert all(is_tied(block.experts) for block in healed.blocks)
    assert not torch.equal(healed.blocks[0].experts.gate_up_0.up.weight, layers[0].gate_up_0.up.weight)


@ONE
def test_onnx_stores_a_factor_once(alike, tmp_path):
    small = pc.sketchify(alike(), 0.25, **OPTIONS)
    routes.exported(small, X, tmp_path / "small.onnx")
    stored = [list(one.dims) for one in onnx.load(tmp_path / "small.onnx").graph.initializer]
    factors = [list(block.experts.gate_up_0.up.weight.shape) for block in small.blocks]
    assert [one for one in stored if one in factors] == factors  # each once


@pytest.mark.slow
def test_other_routes(alike):
    small = pc.sketchify(alike(), 0.25, **OPTIONS)
    routes.partitioned(small, X)
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(small, backend="panther", options={"inner": "eager"})
        torch.testing.assert_close(compiled(X), small(X), rtol=1e-4, atol=1e-4)
    layer = small.blocks[0].experts
    x, index, weights = torch.randn(9, 24), torch.randint(0, 4, (9, 2)), torch.rand(9, 2)
    shapes = ({0: torch.export.Dim("T")},) * 3
    program = torch.export.export(layer, (x, index, weights), dynamic_shapes=shapes)
    torch.testing.assert_close(program.module()(x, index, weights), layer(x, index, weights))


def test_saved_by_transformers(tmp_path):
    torch.manual_seed(0)
    sizes = dict(hidden_size=24, intermediate_size=40, num_hidden_layers=1, num_attention_heads=2)
    config = MixtralConfig(**sizes, vocab_size=64, num_key_value_heads=2, num_local_experts=4)
    model = MixtralForCausalLM(config).eval()
    make_alike(model, 0.9)
    small = pc.sketchify(model, 0.25, include="*experts", **OPTIONS)
    layer = small.model.layers[0].mlp.experts
    assert isinstance(layer, SketchedExperts)
    assert is_tied(layer)
    small.save_pretrained(tmp_path)
    again = MixtralForCausalLM.from_pretrained(tmp_path)
    ids = torch.arange(12).reshape(2, 6)
    assert torch.equal(again(ids).logits, small(ids).logits)
    assert is_tied(again.model.layers[0].mlp.experts)


# --------------------------------------------------------------------------------------------- recipes


def edited(plan, change):
    text = plan.to_json()
    return pc.SketchPlan.from_json(change(text))


@ONE
def test_a_plan_is_followed(alike):
    model = alike()
    plan = pc.SketchPlan.from_json(pc.plan_sketch(model, 0.25, **OPTIONS).to_json())
    small, wanted = (
        pc.sketchify(model, plan=plan, progress=False, synthetic=False),
        pc.sketchify(model, 0.25, **OPTIONS),
    )
    assert plan_of(small).stored_numbers == plan.stored_numbers
    assert torch.equal(small(X), wanted(X))
    fitted = pc.sketchify(model, plan=plan, data=batches(10), progress=False)
    assert sharing(fitted) == sharing(small)
    assert all(is_tied(block.experts) for block in fitted.blocks)
    rank = next(line.choice.rank for line in plan.sketched)
    less = edited(plan, lambda text: text.replace(f'"rank": {rank}', '"rank": 3'))
    smaller = pc.sketchify(model, plan=less, progress=False, synthetic=False)
    parts = {id(p): p.numel() for one in smaller.blocks for p in one.experts.parameters()}
    assert sum(parts.values()) == plan_of(smaller).stored_numbers < plan.stored_numbers


@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        ('"rank": {rank}', '"rank": 2', ConfigError, "share a factor of rank"),
        ('"rank": {rank}', '"rank": 99', RankError, "wanted 1..24 of a shared factor"),
        ('"scheme": "pair"', '"scheme": "pivoted"', ConfigError, "share a factor as 'pivoted'"),
        (
            '"blocks.0.experts.gate_up_3"\n',
            '"blocks.1.experts.gate_up_3"\n',
            ConfigError,
            "itself with some of",
        ),
    ],
)
def test_a_plan_that_cannot_be(old, new, error, message):
    model = Mixtures("mixtral", 0.9, blocks=2)
    plan = pc.plan_sketch(model, 0.25, **OPTIONS)
    rank = next(line.choice.rank for line in plan.sketched)
    changed = edited(plan, lambda text: text.replace(old.format(rank=rank), new, 1))
    with pytest.raises(error, match=message):
        pc.sketchify(model, plan=changed, progress=False)
