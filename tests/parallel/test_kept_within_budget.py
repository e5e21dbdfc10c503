"""Activation checkpointing within a budget: gradients without it, bytes within it, the seconds worth them."""

import copy
import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from parallel.kept import kept_bytes
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from panther_compile.errors import ConfigError
from panther_compile.factorization import cost
from panther_compile.parallel import kept_within_budget
from panther_compile.parallel.activation_checkpointing import checkpoint_unit
from panther_compile.parallel.kept_within_budget import KeptWithinBudget
from panther_compile.partition.graph.budget import check_mode, choose_kept
from panther_compile.partition.graph.hardware import CPU
from panther_compile.partition.graph.narrowing import storage

BUDGETS = (0.1, 0.3, 0.5, 0.7, 0.9)


class Block(nn.Module):
    """A transformer's block, with dropouts in attention and behind it, sums and an activation in place."""

    def __init__(self, share=0.0, width=32):
        super().__init__()
        self.share = share
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.read, self.write = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        parts = self.read(self.first(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        share = self.share if self.training else 0.0
        mixed = F.scaled_dot_product_attention(*parts, dropout_p=share).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.write(mixed), share)
        hidden = F.silu(self.up(self.second(x)), inplace=True)
        hidden += 1.0
        return x + F.dropout(self.down(hidden), share)


def gradients(model, x, seed=1):
    """The input's first."""
    x = x.clone().requires_grad_()
    torch.manual_seed(seed)
    model.zero_grad()
    model(x).square().sum().backward()
    return [x.grad, *(one.grad.clone() for one in model.parameters())]


def compare(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def saved_bytes(model, x):
    """What the backward needs without checkpointing, parameters and inputs aside."""
    held = {storage(one) for one in (x, *model.parameters())}
    found = {}

    def keep(tensor):
        found.setdefault(storage(tensor), tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        result = model(x)
    sizes = {key: one.untyped_storage().nbytes() for key, one in found.items() if key not in held}
    del result
    return sum(sizes.values())


class Budgeted(nn.Module):
    """A block in `torch.utils.checkpoint` with the contexts of a budget."""

    def __init__(self, block, budget):
        super().__init__()
        self.block = block
        self.budgeted = KeptWithinBudget(self, budget, CPU.device)

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False, context_fn=self.budgeted.contexts)


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_gradients_are_those_without_checkpointing(share):
    torch.manual_seed(0)
    block = Block(share).double()
    first, other = torch.randn(2, 6, 32).double(), torch.randn(3, 4, 32).double()
    wanted = [gradients(block, x) for x in (first, other)]
    for budget in BUDGETS:
        made = copy.deepcopy(block)
        checkpoint_unit(made, budget)
        for _ in range(3):
            for x, one in zip((first, other), wanted, strict=True):
                compare(gradients(made, x), one)


def test_bytes_are_within_the_budget_and_grow_with_it():
    torch.manual_seed(0)
    block, x = Block(), torch.randn(2, 6, 32)
    whole, kept = saved_bytes(block, x), []
    for budget in BUDGETS:
        unit = Budgeted(block, budget)
        unit(x.requires_grad_()).sum().backward()
        kept.append(kept_bytes(unit.budgeted.contexts(), unit.block, x))
        assert 0 < kept[-1] <= budget * whole
    assert kept == sorted(set(kept))
    assert kept[-1] > 0.6 * whole


def test_two_calls_before_their_backwards():
    torch.manual_seed(0)
    block = Block(0.2).double()
    made = copy.deepcopy(block)
    checkpoint_unit(made, 0.5)
    found = []
    for model in (block, made, made):
        torch.manual_seed(1)
        model.zero_grad()
        results = [model(torch.ones(2, 6, 32).double() * scale) for scale in (1.0, 2.0)]
        sum(one.square().sum() for one in results).backward()
        found.append([one.grad.clone() for one in model.parameters()])
    compare(found[1], found[0])
    compare(found[2], found[0])


class Written(nn.Module):
    """What is written in place before and after it is read, and by which operation."""

    def __init__(self, then):
        super().__init__()
        self.then, self.down, self.up, self.last = then, nn.Linear(8, 4), nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.up(self.then(self.down(x)))))


def _added_before(z):
    other = torch.zeros(z.shape, dtype=z.dtype)
    other.add_(z)
    return z.mul_(2.0) * other


def _part(z):
    z[:, :2].mul_(2.0)
    return z


@pytest.mark.parametrize(
    "then",
    [
        lambda z: z.add_(1.0),
        lambda z: (z + 1.0) * z.mul_(2.0),
        lambda z: F.dropout(z, 0.5, inplace=True),
        lambda z: z.t_().mul_(3.0).t_(),
        _added_before,
        _part,
    ],
    ids=["add", "read before", "dropout", "turned", "added before", "part"],
)
def test_results_that_are_written_in_place(then):
    torch.manual_seed(0)
    model, x = Written(then).double(), torch.randn(5, 8).double()
    wanted = gradients(model, x)
    for budget in (0.3, 0.6, 0.99):
        made = copy.deepcopy(model)
        checkpoint_unit(made, budget)
        compare(gradients(made, x), wanted)
        compare(gradients(made, x), wanted)


class Forked(nn.Module):
    """Two ways from its input to its output."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.turned = nn.Linear(8, 16), nn.Linear(16, 8), False

    def forward(self, x):
        y = self.up(x)
        y = torch.tanh(y) if self.turned else torch.relu(y).square()
        return self.down(y).sigmoid()


def test_another_path_is_computed_again_and_told_once():
    torch.manual_seed(0)
    model, x = Forked().double(), torch.randn(5, 8).double()
    made = copy.deepcopy(model)
    checkpoint_unit(made, 0.8)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for turned in (False, True, False, True):
            model.turned = made.turned = turned
            compare(gradients(made, x), gradients(model, x))
    assert len(told) == 1
    assert "Forked is computed again whole where it runs other operations" in str(told[0].message)


def test_many_shapes_are_not_all_watched(monkeypatch):
    monkeypatch.setattr(kept_within_budget, "_MOST_SHAPES", 2)
    model = Budgeted(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), 0.5)
    for rows in (1, 2, 1):
        model(torch.randn(rows, 8)).sum().backward()
    with pytest.warns(UserWarning, match="its inputs have had more than 2 shapes"):
        model(torch.randn(3, 8)).sum().backward()
    assert len(model.budgeted.choices) == 2


def test_what_is_kept_is_the_best_that_fits():
    draw = torch.Generator().manual_seed(0)
    for _ in range(20):
        seconds = torch.rand(8, generator=draw).tolist()
        sizes = torch.randint(1, 30, (8,), generator=draw).tolist()
        limit = sum(sizes) // 2
        subsets = itertools.chain.from_iterable(itertools.combinations(range(8), n) for n in range(9))
        best = max(sum(seconds[n] for n in one) for one in subsets if sum(sizes[n] for n in one) <= limit)
        kept = choose_kept(seconds, sizes, limit)
        assert sum(sizes[n] for n in kept) <= limit
        assert sum(seconds[n] for n in kept) == pytest.approx(best)
    assert (
        choose_kept([], [], 10) == choose_kept([1.0], [11], 10) == choose_kept([1.0], [1], 0) == frozenset()
    )
    assert choose_kept([1.0, 2.0], [10**9 + 7, 10**9], 2 * 10**9) == {1}


class Gated(nn.Module):
    """A product, and what reads three tensors."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        y = self.first(x)
        return self.last(torch.addcmul(y, y.sigmoid(), y))


@pytest.mark.parametrize(
    ("device", "wanted"),
    [
        (cost.Device(1e9, 1e15, 1e15, 0.0, 1), "aten.addmm.default"),
        (cost.Device(1e18, 1e9, 1e18, 0.0, 1), "aten.addcmul.default"),
    ],
    ids=["computes slowly", "moves slowly"],
)
def test_the_device_decides(device, wanted):
    model = Gated()
    made = KeptWithinBudget(model, 0.4, device)
    forward, _ = made.contexts()
    with saved_tensors_hooks(lambda one: one, lambda one: one), forward:
        model(torch.randn(16, 64))
    (choice,) = made.choices.values()
    assert [str(choice.operations[number]) for number in choice.kept] == [wanted]


@pytest.mark.parametrize("given", [0, 1, 0.0, 1.0, 1.5, -0.3, True, float("nan"), "some", "0.5", (0.5,)])
def test_what_is_no_budget_is_refused(given):
    wanted = r"activation_checkpointing=.* is none of 'none', 'full', and no budget: .* between 0 and 1"
    with pytest.raises(ConfigError, match=wanted):
        check_mode("activation_checkpointing", given, ("none", "full"))


def test_budgets_are_taken():
    for given in ("none", "full", 0.01, 0.5, 0.99):
        check_mode("activation_checkpointing", given, ("none", "full"))
