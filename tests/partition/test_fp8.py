"""Products in eight bits, and attention: their times alone, and the bytes of what products read."""

import dataclasses

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

import panther_compile as pc
from panther_compile.errors import ConfigError
from panther_compile.partition import Hardware, Link
from panther_compile.partition.graph.hardware import H100, slowest_of

FAST = Link(1e15, 0.0)
TWICE = Hardware("twice", 1e12, 1e18, 10**15, FAST, FAST, launch_seconds=0.0, fp8_flops_per_second=2e12)


class Block(nn.Module):
    """Attention between two products, and a last layer."""

    def __init__(self, width=64):
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x):
        heads = self.first(x).view(2, 32, 4, 16).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(heads, heads, heads)
        return self.last(torch.relu(self.second(mixed.transpose(1, 2).reshape(2, 32, 64))))


def plan(**options):
    options = {"hardware": TWICE, "mesh": {"pp": 1}} | options
    return pc.partition_model(Block(), torch.randn(2, 32, 64), **options)


def test_products_alone_take_half():
    bf16, fp8 = plan(), plan(products="fp8")
    own = 2 * 32 * 64 * 64 * 2 / 1e12  # seconds of one product forward
    saved = 2 * own / 2  # `first` and `second`; not attention, and not `last`
    assert bf16.stages[0].forward_seconds - fp8.stages[0].forward_seconds == pytest.approx(saved, rel=1e-3)
    # Both gradients of `second`; `first` reads the input of the model, which needs none.
    saved = 3 * own / 2
    assert bf16.stages[0].backward_seconds - fp8.stages[0].backward_seconds == pytest.approx(saved, rel=1e-3)
    assert bf16.stages[0].activation_bytes == fp8.stages[0].activation_bytes


def test_attention_has_a_rate_of_its_own():
    half = dataclasses.replace(TWICE, attention_flops_per_second=5e11)
    even, slow = plan(), plan(hardware=half)
    own = 2 * 4 * 2 * 32 * 32 * 16 * 2 / 1e12  # heads of 2 rows, 32 by 32 scores of 16 features, two products
    assert slow.stages[0].forward_seconds - even.stages[0].forward_seconds == pytest.approx(own, rel=1e-3)
    more = slow.stages[0].backward_seconds - even.stages[0].backward_seconds
    assert more == pytest.approx(2.5 * own, rel=1e-3)
    # A cluster of both kinds has the slower one, which is that of products where none is given.
    assert slowest_of([TWICE, half]).attention_flops_per_second == 5e11
    with pytest.raises(ConfigError, match=r"attention_flops_per_second is 0\.0, wanted"):
        dataclasses.replace(TWICE, attention_flops_per_second=0.0)


def test_what_they_read_is_kept_in_one_byte():
    """The input of `first`, (2, 32, 64) in float32; that of `second` attention needs as well."""
    whole, copied = plan(products="fp8"), plan(products="fp8", keeps="fp8")
    assert whole.stages[0].activation_bytes - copied.stages[0].activation_bytes == 2 * 32 * 64 * (4 - 1 - 1)
    assert copied.step_seconds == whole.step_seconds


def test_what_others_need_is_kept_besides():
    """The activation reads what the product reads, and keeps all of it."""

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

        def forward(self, x):
            return self.last(self.first(x) * F.silu(x))

    x = torch.randn(8, 64, requires_grad=True)
    whole, copied = (
        pc.partition_model(Shared(), x, mesh={"pp": 1}, hardware=TWICE, products="fp8", keeps=keeps)
        for keeps in (None, "fp8")
    )
    assert copied.stages[0].activation_bytes - whole.stages[0].activation_bytes == 8 * 64


@pytest.fixture(scope="module")
def llama(models_are_read_once):
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        vocab_size=128,
        use_cache=False,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()
        return model, {"input_ids": torch.zeros(1, 32, dtype=torch.long)}


@pytest.mark.parametrize("compiled", [False, True])
def test_a_llama_keeps_one_byte_of_what_its_layers_read(llama, compiled):
    model, inputs = llama
    options = {"mesh": {"pp": 1}, "hardware": TWICE, "products": "fp8", "compiled": compiled}
    whole, copied = (pc.partition_model(model, inputs, keeps=keeps, **options) for keeps in (None, "fp8"))
    # Of the layer what q, k and v, gate and up, and down read; what o reads attention keeps as well.
    less = 32 * (64 + 64 + 128 - 64)
    assert whole.stages[0].activation_bytes - copied.stages[0].activation_bytes == less
    divided = pc.partition_model(model, inputs, keeps="fp8", **options | {"mesh": {"cp": 2}})
    assert divided.stages[0].activation_bytes == pytest.approx(
        copied.stages[0].activation_bytes / 2, rel=1e-3
    )


def test_what_has_no_rate_is_refused():
    with pytest.raises(ConfigError, match="hardware 'cpu' has no fp8_flops_per_second"):
        plan(products="fp8", hardware="cpu")
    with pytest.raises(ConfigError, match="keeps='fp8' is of products in eight bits"):
        plan(keeps="fp8")
    with pytest.raises(ConfigError, match="products='fp4', wanted one of None, 'fp8'"):
        plan(products="fp4")
    with pytest.raises(ConfigError, match=r"products=.fp8. asks for others: give one"):
        plan(products="fp8", profile=True)
    with pytest.raises(ConfigError, match="wanted a positive number"):
        dataclasses.replace(TWICE, fp8_flops_per_second=0.0)
    assert plan(products="fp8", hardware="h100").step_seconds > 0
    assert (
        slowest_of([H100, dataclasses.replace(H100, fp8_flops_per_second=None)]).fp8_flops_per_second is None
    )
