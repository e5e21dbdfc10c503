"""Which layers hand their features to one other alone: found by looking."""

import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import nn

from panther_compile.calibration.couplings import find_couplings
from panther_compile.config import SketchConfig
from panther_compile.kinds.targets import find_targets, watch
from panther_compile.models.batches import record_calls
from panther_compile.planning.sites import find_sites
from panther_compile.planning.trace import read_graph

WIDTH, HIDDEN = 8, 24


def couplings_of(model, data):
    model.eval()
    config = SketchConfig(min_params=1, include="*")
    targets, _ = find_targets([site for site, _ in find_sites(model, config, read_graph(model)).sites])
    return find_couplings(watch(model, targets), targets, record_calls(model, data))


class Part(nn.Module):
    """up, something, down; `between` is what."""

    def __init__(self, between, inputs=WIDTH):
        super().__init__()
        self.up, self.gate = nn.Linear(inputs, HIDDEN), nn.Linear(inputs, HIDDEN)
        self.down = nn.Linear(HIDDEN, inputs)
        self.norm, self.slopes = nn.LayerNorm(HIDDEN), nn.PReLU(HIDDEN)
        self.between = between

    def forward(self, x):
        return self.between(self, x)


def plain(self, x):
    return x + self.down(F.gelu(self.up(x)))


def gated(self, x):
    return self.down(F.silu(self.gate(x)) * self.up(x))


def normed(self, x):
    return self.down(self.norm(F.gelu(self.up(x))))


def bare_norm(self, x):
    return self.down(F.layer_norm(self.up(x), (HIDDEN,)))


def sloped(self, x):
    return self.down(self.slopes(self.up(x).movedim(-1, 1)).movedim(1, -1))


def shown(self, x):
    hidden = F.relu(self.up(x))
    return self.down(hidden), hidden


def fixed(self, x):
    return self.down(F.relu(self.up(x)).reshape(-1, HIDDEN)).reshape(x.shape)


def twice(self, x):
    return self.down(F.relu(self.up(self.down(F.relu(self.up(x))))))


def crossed(self, x):
    return self.down(F.relu(self.up(x)).flip(-1))


@pytest.mark.parametrize(
    ("between", "writers"),
    [
        (plain, ("up",)),
        (gated, ("gate", "up")),
        (normed, None),
        (bare_norm, None),
        (sloped, None),
        (shown, None),
        (fixed, None),
        (twice, None),
        (crossed, None),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_feed_forward_parts(between, writers):
    torch.manual_seed(0)
    found = couplings_of(Part(between), [torch.randn(4, 6, WIDTH)])
    assert [(coupling.writers, coupling.reader) for coupling in found] == (
        [(writers, "down")] if writers else []
    )
    for coupling in found:
        assert (coupling.heads, coupling.width, coupling.padded) == (1, HIDDEN, False)


def test_memory_that_runs_out_is_no_answer():
    def short(self, x):
        hidden = F.relu(self.up(x))
        if hidden.shape[-1] < HIDDEN:
            raise torch.OutOfMemoryError("out of memory")
        return self.down(hidden)

    with pytest.raises(torch.OutOfMemoryError):
        couplings_of(Part(short), [torch.randn(4, 6, WIDTH)])


def test_no_layer_is_in_two_links():
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16) for _ in range(4)]
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2], nn.ReLU(), layers[3])
    found = couplings_of(model, [torch.randn(8, 16)])
    assert [coupling.names for coupling in found] == [("0", "2"), ("4", "6")]


def test_features_that_two_layers_read_are_no_link():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.gate, self.up, self.down = (nn.Linear(16, 16) for _ in range(4))

        def forward(self, x):
            x = torch.tanh(self.first(x))
            return self.down(F.silu(self.gate(x)) * self.up(x))

    torch.manual_seed(0)
    found = couplings_of(Model(), [torch.randn(8, 16)])
    assert [coupling.names for coupling in found] == [("gate", "up", "down")]


def test_a_change_that_leads_another_way_is_no_link():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.middle, self.down = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            x = self.up(x)
            # The order of features decides how often a layer is called, and whether the model raises.
            for _ in range(1 + int(x[0, 0] != self.first)):
                x = torch.relu(self.middle(x))
            if x[0, :4].sum() != self.sum:
                raise ValueError("other features")
            return self.down(x)

    torch.manual_seed(0)
    model, x = Model(), torch.randn(8, 16)
    hidden = model.up(x)
    model.first, model.sum = hidden[0, 0].item(), torch.relu(model.middle(hidden))[0, :4].sum().item()
    assert couplings_of(model, [x]) == []


class Attention(nn.Module):
    """Grouped-query attention, its projections called in a given order."""

    def __init__(self, order="qkv", shared=2, heads=4):
        super().__init__()
        self.order, self.shared, self.heads = order, shared, heads
        self.q, self.out = nn.Linear(16, 16), nn.Linear(16, 16)
        self.k, self.v = nn.Linear(16, 16 // shared), nn.Linear(16, 16 // shared)

    def forward(self, x):
        layers = {"q": self.q, "k": self.k, "v": self.v}
        made = {name: layers[name](x) for name in self.order}
        q, k, v = (made[name].unflatten(-1, (-1, 16 // self.heads)).transpose(1, 2) for name in "qkv")
        k, v = (one.repeat_interleave(self.shared, 1) for one in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("order", ["qkv", "vkq", "qvk"])
@pytest.mark.parametrize("shared", [1, 2])
def test_attention_by_heads(order, shared):
    torch.manual_seed(0)
    (coupling,) = couplings_of(Attention(order, shared), [torch.randn(2, 6, 16)])
    assert coupling.names == ("v", "out")
    assert (coupling.heads, coupling.shared, coupling.width, coupling.padded) == (4, shared, 4, True)
    assert coupling.heads_of("v") == 4 // shared


def test_a_single_position_tells_nothing_of_heads():
    torch.manual_seed(0)
    assert couplings_of(Attention(), [torch.randn(2, 1, 16)]) == []


def test_values_that_are_seen_elsewhere_are_no_link():
    class Shows(Attention):
        def forward(self, x):
            return super().forward(x), self.v(x)

    torch.manual_seed(0)
    assert couplings_of(Shows(), [torch.randn(2, 6, 16)]) == []


# Of the zoo's models: couplings one by one, by heads.
COUNTS = {
    "bert": (2, 2),
    "gpt2": (2, 0),  # query, key and value are one layer
    "llama": (2, 2),
    "mixtral": (0, 2),  # experts keep their weights in one tensor
    "t5": (4, 6),
    "whisper": (4, 6),
    "swin": (4, 4),
    "nn_transformer": (4, 6),
    "lstm": (1, 0),
    "tied_autoencoder": (0, 0),
}
# Each is built like one of the others.
ALIKE = ("bert", "t5", "whisper", "swin", "mixtral")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in ALIKE else name for name in COUNTS]
)
def test_models_of_the_zoo(name):
    entry = zoo.ZOO[name]
    inputs = entry.inputs()
    found = couplings_of(entry.build(), lambda model: zoo.call(model, inputs))
    heads = sum(coupling.padded for coupling in found)
    assert (len(found) - heads, heads) == COUNTS[name]


def test_experts_that_no_token_reaches():
    model = zoo.ZOO["mixtral"].build()
    found = couplings_of(model, [{"input_ids": torch.tensor([[3]])}])
    assert not [coupling for coupling in found if not coupling.padded]


def test_half_types_are_seen_through():
    torch.manual_seed(0)
    model = Part(plain).to(torch.bfloat16)
    assert len(couplings_of(model, [torch.randn(4, 6, WIDTH, dtype=torch.bfloat16)])) == 1
