"""What activation checkpointing keeps of a unit, and that gradients are those without it."""

import copy

import pytest
import torch
import torch.nn.functional as F
import zoo
from parallel.kept import kept_bytes
from torch import nn

from panther_compile.parallel.activation_checkpointing import checkpoint_unit, selective_contexts
from panther_compile.partition.graph.capture import capture, example_arguments
from panther_compile.partition.graph.narrowing import is_narrowing
from panther_compile.partition.graph.observe import observe

aten = torch.ops.aten


def gradients(model, x, mode):
    """The gradients of a copy under one seed, the input's first."""
    made, x = copy.deepcopy(model), x.clone().requires_grad_()
    if mode != "none":
        checkpoint_unit(made, mode)
    torch.manual_seed(1)
    made(x).square().sum().backward()
    return [x.grad, *(one.grad for one in made.parameters())]


def compare(model, x, modes=("full", "selective")):
    """Gradients are those of keeping all, in float64."""
    wanted = gradients(model, x, "none")
    for mode in modes:
        torch.testing.assert_close(gradients(model, x, mode), wanted, rtol=1e-10, atol=1e-10)


def test_what_narrows():
    wide, narrow = torch.empty(8, 64), torch.empty(64, 16)
    assert is_narrowing(aten.mm.default, (wide, narrow))
    assert not is_narrowing(aten.mm.default, (torch.empty(8, 16), torch.empty(16, 64)))
    assert not is_narrowing(aten.mm.default, (wide, torch.empty(64, 64)))
    assert is_narrowing(aten.addmm.default, (torch.empty(16), wide, narrow))
    assert not is_narrowing(aten.relu.default, (wide,))


@pytest.mark.parametrize(
    ("name", "before"),
    [
        ("_scaled_dot_product_flash_attention", 0),
        ("_scaled_dot_product_flash_attention_for_cpu", 0),
        ("_scaled_dot_product_efficient_attention", 2),
        ("_scaled_dot_product_cudnn_attention", 2),
        ("_scaled_dot_product_fused_attention_overrideable", 1),
    ],
)
def test_attention_is_kept_where_it_drops_nothing_out(name, before):
    op, given = getattr(aten, name).default, (torch.empty(1, 1, 2, 4),) * 3 + (None,) * before
    assert is_narrowing(op, given)
    assert is_narrowing(op, (*given, 0.0))
    assert is_narrowing(op, given, {"dropout_p": 0.0})
    assert not is_narrowing(op, (*given, 0.1))
    assert not is_narrowing(op, given, {"dropout_p": 0.1})


@pytest.fixture
def fused():
    """Fused attention with dropout on a CPU, where torch has none: as an accelerator would register it."""

    def spread(query, key, seed, share):
        probabilities = torch.softmax(query @ key.mT / query.shape[-1] ** 0.5, -1)
        draws = torch.rand(probabilities.shape, generator=torch.Generator().manual_seed(int(seed)))
        return probabilities, (draws >= share) / (1 - share)

    def forward(query, key, value, bias=None, dropout_p=0.0, *rest):
        seed = torch.randint(2**31, ())
        probabilities, weights = spread(query, key, seed, dropout_p)
        result, nothing, length = probabilities * weights @ value, query.new_empty(0), query.shape[2]
        return result, result[..., 0], nothing, nothing, length, length, seed, seed, nothing

    def backward(
        gradient, query, key, value, bias, asked, out, sums, cum_q, cum_k, max_q, max_k, share, *rest
    ):
        probabilities, weights = spread(query, key, rest[1], share)
        into = gradient @ value.mT * weights * probabilities
        into = (into - probabilities * into.sum(-1, keepdim=True)) / query.shape[-1] ** 0.5
        return into @ key, into.mT @ query, (probabilities * weights).mT @ gradient, None

    name = "_scaled_dot_product_fused_attention_overrideable"
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl(name, forward, "CPU")
        library.impl(f"{name}_backward", backward, "CPU")
        yield getattr(aten, name).default


class Attention(nn.Module):
    """Attention with dropout, a dropout behind it, and a product that narrows between them."""

    def __init__(self, attention):
        super().__init__()
        self.project, self.narrow, self.last = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(4, 8)
        self.attention = attention

    def forward(self, x):
        y = self.project(x).unflatten(-1, (2, 4)).transpose(1, 2)
        y = self.attention(y, y, y).transpose(1, 2).flatten(2)
        return self.last(F.dropout(self.narrow(F.dropout(y, 0.3)), 0.2))


def test_dropout_behind_attention_is_the_same_again(fused):
    """A kept attention would have drawn no mask in the recomputation, and the dropouts behind it others."""
    torch.manual_seed(0)
    model = Attention(lambda q, k, v: fused(q, k, v, None, 0.5)[0]).double()
    compare(model, torch.randn(2, 6, 8, dtype=torch.float64))


def test_dropout_within_attention_that_is_not_fused():
    torch.manual_seed(0)
    model = Attention(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)).double()
    compare(model, torch.randn(2, 6, 8, dtype=torch.float64))


class Written(nn.Module):
    """A product that narrows, and what is done to its result before the next."""

    def __init__(self, then):
        super().__init__()
        self.then, self.down, self.up, self.last = then, nn.Linear(8, 4), nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.up(self.then(self.down(x)))))


def _part(z):
    z[:, :2].mul_(2.0)
    return z


def _read_before(z):
    before = z + 1.0
    return z.mul_(2.0) * before


def _added_before(z):
    other = torch.zeros(5, 4, dtype=torch.float64)
    other.add_(z)
    return z.mul_(2.0) * other


def _beside(z):
    other = torch.ones_like(z)
    other.view(-1).add_(1.0)
    return z + other


@pytest.mark.parametrize(
    "then",
    [
        lambda z: z.add_(1.0),
        lambda z: z.mul_(2.0).sub_(0.5),
        lambda z: z.t_().mul_(3.0).t_(),
        lambda z: F.relu(z, inplace=True),
        lambda z: F.silu(z, inplace=True),
        lambda z: F.dropout(F.dropout(z, 0.5, inplace=True), 0.5),
        _part,
        _read_before,
        _added_before,
        _beside,
    ],
    ids=[
        "add",
        "scale",
        "turned",
        "relu",
        "silu",
        "dropout",
        "part",
        "read before",
        "added before",
        "beside",
    ],
)
def test_what_is_written_in_place_is_written_once(then):
    torch.manual_seed(0)
    compare(Written(then).double(), torch.randn(5, 8, dtype=torch.float64))


def test_sums_in_place_of_a_sketched_layer_are_kept_with_it():
    """z = C x2, z += x1: neither runs again."""
    x1, x2, c = torch.randn(5, 4), torch.randn(5, 8), torch.randn(8, 4)
    forward, again = selective_contexts()
    with forward:
        z = x2 @ c
        z += x1
    others = torch.zeros_like(x2)  # of which nothing is to come
    with again:
        found = others @ c
        found += x1
    assert torch.equal(found, z)


class Lean(nn.Module):
    """A product that narrows, a sum in place, one that widens, and attention without dropout."""

    def __init__(self, share=0.0):
        super().__init__()
        self.down, self.up, self.share = nn.Linear(32, 8, bias=False), nn.Linear(8, 32), share

    def forward(self, x):
        z = self.down(x)
        z += x[..., :8]
        y = self.up(z).unflatten(-1, (2, 16)).transpose(1, 2)
        return F.scaled_dot_product_attention(y, y, y, dropout_p=self.share)


@pytest.mark.parametrize("name", ["lean", pytest.param("gpt2", marks=pytest.mark.slow), "llama"])
def test_the_plan_counts_what_is_kept(name):
    model = Lean() if name == "lean" else zoo.ZOO[name].build().train()
    inputs = (torch.randn(2, 8, 32),) if name == "lean" else zoo.ZOO[name].inputs()
    notes = observe(capture(model, *example_arguments(inputs)))
    planned = sum(one.kept or 0 for note in notes.values() for one in note.operations)
    # The kernel of a CPU also gives the logarithms of sums, one number a query.
    kept = kept_bytes(selective_contexts(), zoo.call, model, inputs)
    assert planned == pytest.approx(kept, rel=0.07)


def test_the_plan_counts_no_product_that_widens_and_no_attention_that_drops_out():
    def kept(share):
        notes = observe(capture(Lean(share), *example_arguments((torch.randn(2, 8, 32),))))
        found = ((one.kind, one.kept) for note in notes.values() for one in note.operations)
        return [one for one in found if one[1] is not None]

    narrow, attention = 2 * 8 * 8 * 4, 2 * 8 * 32 * 4
    assert kept(0.0) == [("product", narrow), ("pointwise", 0), ("attention", attention)]
    assert kept(0.1) == [("product", narrow), ("pointwise", 0)]
