"""The experts of Hugging Face mixtures, in 3-D parameters, through every route."""

import copy

import pytest
import torch
from kinds import routes
from kinds.routes import relative
from torch import nn
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral.modeling_mixtral import MixtralExperts, MixtralSparseMoeBlock
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHConfig, NemotronHExperts

import panther_compile as pc
from panther_compile.config import SketchConfig
from panther_compile.kinds.experts import ExpertsKind
from panther_compile.layers import SketchedExperts, SketchedLinear
from panther_compile.models.substitute import copy_with

KIND = ExpertsKind()
OPTIONS = routes.OPTIONS | {"synthetic": False}
SIZES = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
LATENT = dict(kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16)
ROUTED = dict(moe_intermediate_size=24, num_experts_per_tok=2, first_k_dense_replace=0, n_routed_experts=4)
MODELS = {
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4)),
    "qwen2": lambda: Qwen2MoeForCausalLM(
        Qwen2MoeConfig(**SIZES, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2)
    ),
    "qwen3": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZES, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2, head_dim=16)
    ),
    "gpt_oss": lambda: GptOssForCausalLM(
        GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, head_dim=16)
    ),
    "deepseek_v2": lambda: DeepseekV2ForCausalLM(
        DeepseekV2Config(**SIZES, **LATENT, **ROUTED, topk_method="greedy")
    ),
    "deepseek_v3": lambda: DeepseekV3ForCausalLM(
        DeepseekV3Config(**SIZES, **LATENT, **ROUTED, n_group=2, topk_group=1)
    ),
    "olmoe": lambda: OlmoeForCausalLM(OlmoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2)),
}
IDS = torch.arange(3, 51).reshape(4, 12)


def build(name):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    draw(model)
    return model


def draw(model):
    """Weights of size 1, and routers that choose."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)


def with_dense_parts(model):
    """Every mixture as SketchedExperts of which no part is sketched."""
    found = [module for module in model.modules() if KIND.matches(module)]
    assert found
    assert [KIND.why_not(module) for module in found] == [None] * len(found)
    new = {module: KIND.assemble(module, KIND.parts(module), SketchConfig()) for module in found}
    return copy_with(model, new), [layer for layer in new.values() if isinstance(layer, SketchedExperts)]


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", list(MODELS))
def test_dense_experts_compute_what_the_class_does(name, implementation):
    model = build(name)
    model.set_experts_implementation(implementation)
    small, layers = with_dense_parts(model)
    wanted, found = model(IDS).logits, small(IDS).logits
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    wanted.square().mean().backward()
    found.square().mean().backward()
    (dense,) = (module for module in model.modules() if KIND.matches(module))
    for projection in layers[0].sizes:
        for leaf, whole in (("weight", projection), ("bias", f"{projection}_bias")):
            if leaf == "bias" and not layers[0].bias:
                continue
            parts = [getattr(layers[0].part(projection, expert), leaf).grad for expert in range(4)]
            stacked = torch.stack(parts)
            stacked = stacked.mT if leaf == "weight" and layers[0].transposed else stacked
            torch.testing.assert_close(stacked, dense.get_parameter(whole).grad, rtol=1e-4, atol=1e-6)
    assert layers[0].rest.config is small.config  # of the copy: what is set there holds for both
    assert relative(pc.densify(small)(IDS).logits, wanted) < 1e-5


def test_graphs_compute_the_same():
    small = pc.sketchify(build("gpt_oss"), 0.5, **OPTIONS)
    layers = [*with_dense_parts(build("gpt_oss"))[1], small.model.layers[0].mlp.experts]
    x, index, weights = torch.randn(9, 32), torch.randint(0, 4, (9, 2)), torch.rand(9, 2)
    for layer in layers:
        program = torch.export.export(
            layer, (x, index, weights), dynamic_shapes=({0: torch.export.Dim("T")},) * 3
        )
        torch.testing.assert_close(
            program.module()(x[:5], index[:5], weights[:5]), layer(x[:5], index[:5], weights[:5])
        )
        found = layer.to("meta")(*(one.to("meta") for one in (x, index, weights)))
        assert (found.shape, found.is_meta) == ((9, 32), True)


def test_no_expert_of_a_number_too_large():
    small, (layer,) = with_dense_parts(build("mixtral"))
    x, weights = torch.randn(3, 32), torch.rand(3, 2)
    index = torch.tensor([[0, 4], [4, 4], [3, 1]])
    wanted = small.model.layers[0].mlp.experts.to_dense()
    wanted.config._experts_implementation = "eager"
    torch.testing.assert_close(layer(x, index, weights), wanted(x, index, weights))


def test_no_gate():
    config = NemotronHConfig(
        hidden_size=32, moe_intermediate_size=24, n_routed_experts=4, moe_latent_size=None
    )
    config._experts_implementation = "grouped_mm"
    experts = NemotronHExperts(config)
    draw(experts)
    x, index, weights = torch.randn(20, 32), torch.randint(0, 4, (20, 2)), torch.rand(20, 2)
    assert KIND.why_not(experts) is None
    layer = KIND.assemble(experts, KIND.parts(experts), SketchConfig())
    assert "up_3" in dict(layer.named_children())
    torch.testing.assert_close(layer(x, index, weights), experts(x, index, weights), rtol=1e-5, atol=1e-5)


# Others are stored as one of these.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("mixtral", "gpt_oss", "deepseek_v3") else pytest.mark.slow)
        for name in MODELS
    ],
)
def test_saved_by_transformers(name, tmp_path):
    model = build(name)
    small = pc.sketchify(model, 0.5, **OPTIONS)
    small.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    state = again.state_dict()
    assert list(state) == list(small.state_dict())
    assert all(torch.equal(tensor, state[key]) for key, tensor in small.state_dict().items())
    torch.testing.assert_close(again(IDS).logits, small(IDS).logits)
    assert str(pc.sketch_report(again)) == str(pc.sketch_report(small))


def test_counts_half_precision_and_the_model_untouched():
    model = build("qwen3").bfloat16()
    before = copy.deepcopy(model.state_dict())
    small = pc.sketchify(model, 0.5, include="*experts", **OPTIONS)
    report = pc.sketch_report(small)
    assert 0.49 < report.achieved_ratio <= 0.5
    numbers = lambda one: sum(t.numel() for t in (*one.parameters(), *one.buffers()))  # noqa: E731
    assert (report.stored_numbers, report.dense_numbers) == (numbers(small), numbers(model))
    assert {p.dtype for p in small.parameters()} == {torch.bfloat16}
    assert small(IDS).logits.dtype == torch.bfloat16
    small.requires_grad_(False)
    for parameter in small.parameters():
        parameter.zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_one_module_twice_and_one_parameter_twice():
    model = nn.Module()
    model.first = build("mixtral").model.layers[0].mlp.experts
    model.again = model.first
    small = pc.sketchify(model, 0.5, **OPTIONS)
    assert small.first is small.again
    model.again = copy.deepcopy(model.first)
    model.again.down_proj = model.first.down_proj
    with pytest.raises(pc.PantherError, match="its down_proj is shared with again"):
        pc.sketchify(model, 0.5, **OPTIONS)


class Contracted(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Parameter(torch.randn(4, 32, 24)), nn.Parameter(torch.randn(4, 24, 32))

    def forward(self, x):
        return torch.tensordot(torch.tensordot(x, self.first, ([-1], [1])).relu(), self.last, 2)


def test_a_class_of_ones_own_is_left_alone_with_a_reason():
    model = nn.Sequential(nn.Linear(32, 32), Contracted())
    plan = pc.plan_sketch(model, 0.5, include=["0", "1"], **OPTIONS)
    line = next(line for line in plan.layers if line.name == "1")
    assert line.kind == "Experts"
    assert line.dense_numbers == 2 * 4 * 24 * 32
    assert "the forward of Contracted uses its 3-D parameter first itself" in line.reason


def test_a_class_that_changed_is_left_alone():
    model = build("mixtral")
    model.model.layers[0].mlp.experts.register_forward_hook(lambda *_: None)
    assert "hooks" in (KIND.why_not(model.model.layers[0].mlp.experts) or "")


def test_dense_weights_are_refused():
    model = build("mixtral")
    small = pc.sketchify(model, 0.5, include="*experts", **OPTIONS)
    with pytest.raises(pc.PantherError, match="holds the weights of dense experts"):
        small.load_state_dict(model.state_dict())


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_a_dense_state_is_followed(name):
    """By all factors and biases; what a class turns about is turned back."""
    small = pc.sketchify(build(name), 0.5, **OPTIONS)
    again, dense = copy.deepcopy(small), pc.densify(small)
    with torch.no_grad():
        for parameter in dense.parameters():
            parameter *= 1.1
    again.load_state_dict(pc.project_state_dict(small, dense.state_dict()))
    torch.testing.assert_close(again(IDS).logits, dense(IDS).logits, rtol=1e-3, atol=1e-4)


def test_of_another_size(tmp_path):
    pc.save_sketched(pc.sketchify(build("mixtral"), 0.5, **OPTIONS), tmp_path)
    config = MixtralConfig(**SIZES | {"intermediate_size": 24}, num_local_experts=8)
    with pytest.raises(pc.PantherError, match="8 experts of sizes"):
        pc.load_sketched(MixtralForCausalLM(config), tmp_path)


class Mixtures(nn.Module):
    """A residual block of a router and experts."""

    def __init__(self, block):
        super().__init__()
        self.blocks = nn.ModuleList([block()])
        draw(self)

    def forward(self, x):
        for block in self.blocks:
            out = block(x)
            x = x + (out[0] if isinstance(out, tuple) else out)
        return x


BLOCKS = {"mixtral": (MixtralConfig, MixtralSparseMoeBlock), "gpt_oss": (GptOssConfig, GptOssMLP)}


@pytest.fixture(params=["mixtral", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def case(request):
    make_config, block = BLOCKS[request.param]
    config = make_config(hidden_size=24, intermediate_size=40, num_local_experts=4, num_experts_per_tok=2)
    config._experts_implementation = "grouped_mm"

    def make():
        torch.manual_seed(0)
        return Mixtures(lambda: block(config))

    torch.manual_seed(1)
    mixing = torch.randn(4, 24)
    return make, [torch.randn(4, 16, 4) @ mixing + 0.05 * torch.randn(4, 16, 24) for _ in range(4)]


LAYERS = (SketchedExperts,)


def test_weights_alone_saved_skeleton_and_partition(case, tmp_path):
    make, (x, *_) = case
    small = routes.by_weights(make(), x, LAYERS)
    assert isinstance(small.blocks[0].experts.gate_up_2, SketchedLinear)
    routes.saved_and_loaded(small, make(), x, tmp_path / "saved")
    routes.as_skeleton(make, small)
    routes.partitioned(small, x)


def test_data_and_healing(case):
    make, batches = case
    routes.by_data(make(), batches, batches[0], LAYERS)
    routes.healed(make(), batches, batches[0])


def test_latency(case):
    make, batches = case
    routes.by_latency(make(), batches[0])


def test_graphs_and_backend(case):
    make, (x, *_) = case
    routes.traced(make(), x, LAYERS)
    routes.compiled(make(), x, LAYERS)


def test_onnx(case, tmp_path):
    make, (x, *_) = case
    model = make()
    routes.exported(routes.by_weights(model, x, LAYERS), x, tmp_path / "small.onnx")
    pc.export_onnx(model.eval(), (x,), tmp_path / "dense.onnx")
    options = {"min_params": 0, "allow_slower": True, "progress": False}
    report = pc.sketch_onnx(tmp_path / "dense.onnx", tmp_path / "out.onnx", ratio=0.5, **options)
    left = [line for line in report.plan.layers if "gathered" in line.reason]
    assert [(line.dense_numbers, line.choice) for line in left] == [
        (4 * 24 * 80, None),
        (4 * 40 * 24, None),
    ]


@pytest.mark.slow
def test_experts_are_not_narrowed():
    model = build("mixtral")
    data = [torch.randint(3, 96, (4, 12)) for _ in range(4)]
    small = pc.sketchify(model, 0.5, data=data, narrow=True, **OPTIONS)
    found = [module for module in small.modules() if isinstance(module, MixtralExperts | SketchedExperts)]
    assert not any(isinstance(part, pc.NarrowLinear) for module in found for part in module.modules())
