"""Linear layers that score experts are left alone, as a sketch of one sends tokens elsewhere."""

import pytest
import torch
from torch import nn

import panther_compile as pc

OPTIONS = {"min_params": 64, "allow_slower": True, "progress": False, "synthetic": False}


class Gate(nn.Module):
    def __init__(self, width, experts):
        super().__init__()
        self.wg = nn.Linear(width, experts, bias=False)

    def forward(self, x):
        return self.wg(x)


class Mixture(nn.Module):
    """Tokens go to the best of eight experts; the router is beside them, or in a part there."""

    def __init__(self, gate, experts):
        super().__init__()
        self.gate, self.experts = gate, experts

    def forward(self, x):
        scores, chosen = self.gate(x).softmax(-1).max(-1)
        parts = list(self.experts.values()) if isinstance(self.experts, nn.ModuleDict) else self.experts
        every = torch.stack([one(x) for one in parts], -2)
        return x + scores[..., None] * every.take_along_dim(chosen[..., None, None], -2)[..., 0, :]


def experts():
    return [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(8)]


@pytest.mark.parametrize("place", ["beside", "in a part", "a dictionary"])
def test_a_router_is_left_alone(place):
    torch.manual_seed(0)
    parts = nn.ModuleList(experts())
    if place == "a dictionary":
        parts = nn.ModuleDict({f"expert_{i}": one for i, one in enumerate(experts())})
    gate = Gate(32, 8) if place == "in a part" else nn.Linear(32, 8, bias=False)
    model = nn.Sequential(
        nn.Linear(32, 32), Mixture(gate, parts), Mixture(nn.Linear(32, 8), parts), nn.Linear(32, 10)
    )
    name = "1.gate.wg" if place == "in a part" else "1.gate"
    plan = pc.plan_sketch(model, 0.5, **OPTIONS)
    reasons = {line.name: line.reason for line in plan.layers if line.choice is None}
    assert "router" in reasons[name]
    assert "router" in reasons["2.gate"]
    assert len(plan.sketched) == 17  # all experts, once, and the layer before
    small = pc.sketchify(model, 0.5, **OPTIONS)
    assert torch.equal(small.get_submodule(name).weight, model.get_submodule(name).weight)
    included = pc.plan_sketch(model, 0.5, include=f"{name}", **OPTIONS)
    assert [line.name for line in included.sketched] == [name]


def test_routers_of_transformers_are_left_alone():
    transformers = pytest.importorskip("transformers")
    config = transformers.PhimoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=32,
    )
    plan = pc.plan_sketch(transformers.PhimoeForCausalLM(config).eval(), 0.75, **OPTIONS)
    assert plan.sketched
    assert not any("router" in line.name for line in plan.sketched)


def test_other_layers_of_as_many_outputs_are_sketched():
    """Experts are beside their router; a list of layers elsewhere is none of it."""

    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.stack = nn.ModuleList(nn.Linear(48, 48) for _ in range(12))

        def forward(self, x):
            for layer in self.stack:
                x = layer(x).relu()
            return x

    far = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(48, 12), nn.Linear(12, 48))))
    kernel = nn.Sequential(nn.Conv1d(48, 24, 3), nn.Flatten(), nn.Linear(240, 24), nn.Linear(24, 48))
    model = nn.Sequential(far, Deep(), kernel)
    named = {line.name for line in pc.plan_sketch(model, 0.5, **OPTIONS).sketched}
    assert {"0.0.0.0", "2.2"} <= named


def test_one_output_beside_a_list_of_one_is_no_router():
    """As the durations of FastSpeech 2 are made, beside an encoder of one layer."""

    class Durations(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.linear = nn.ModuleList([nn.Linear(64, 64)]), nn.Linear(64, 1)
            self.last = nn.Linear(64, 64)

        def forward(self, x):
            x = self.layers[0](x).relu()
            return self.last(x * self.linear(x))

    plan = pc.plan_sketch(Durations(), 0.5, **OPTIONS)
    (reason,) = [line.reason for line in plan.layers if line.name == "linear"]
    assert "router" not in reason


class Head(nn.Module):
    """An MLP of three layers, as heads of boxes are; its last layer gives four numbers."""

    def __init__(self, outputs):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, outputs)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x


class Detector(nn.Module):
    """Three classes beside a head of three layers, four numbers of a box beside a decoder of four blocks."""

    def __init__(self):
        super().__init__()
        self.levels = nn.ModuleList(nn.Sequential(nn.Linear(n, 32), nn.ReLU()) for n in (16, 24, 32, 48))
        self.decoder = nn.Sequential(nn.ModuleList(experts()[:4]))
        self.boxes, self.classes = Head(4), nn.Linear(32, 3)
        self.last = nn.Linear(32, 32)

    def forward(self, maps):
        x = sum(level(one) for level, one in zip(self.levels, maps, strict=True))
        for block in self.decoder[0]:
            x = x + block(x)
        return self.boxes(x), self.classes(x), self.last(x)


def test_heads_beside_lists_of_as_many_layers_are_no_routers():
    plan = pc.plan_sketch(Detector(), 0.5, **OPTIONS)
    reasons = {line.name: line.reason for line in plan.layers}
    assert "router" not in reasons["classes"]
    assert "router" not in reasons["boxes.layers.2"]


class HeadsApart(nn.Module):
    """Attention as of XLNet, whose projections are parameters of (features, heads, features of a head)."""

    def __init__(self, width=64, heads=4):
        super().__init__()
        self.q, self.v, self.o = (
            nn.Parameter(torch.randn(width, heads, width // heads) / 8) for _ in range(3)
        )

    def forward(self, x):
        q, v = (torch.einsum("bti,ihd->bhtd", x, weight) for weight in (self.q, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, q, v)
        return torch.einsum("bhtd,ihd->bti", mixed, self.o)


class ApartBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.up, self.down = HeadsApart(), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.down(self.up(x).relu())


def test_layers_beside_projections_of_heads_are_no_routers():
    torch.manual_seed(0)
    plan = pc.plan_sketch(nn.Sequential(ApartBlock(), ApartBlock()), 0.5, **OPTIONS)
    assert {"0.up", "0.down", "1.up", "1.down"} <= {line.name for line in plan.sketched}
