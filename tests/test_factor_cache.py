"""Factors are made anew when a weight or a statistic changes, and are never those of another graph."""

import logging

import pytest
import torch
import torch.nn.functional as F
from compiled import close, graphs
from torch import nn

from panther_compile.backend.factor_cache import Snapshot

OPTIONS = {"inner": "eager", "min_params": 0, "allow_slower": True}

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def compiled(model, **options):
    return torch.compile(model, backend="panther", options=OPTIONS | options)


@torch.no_grad()
def low_rank(model, rank=3):
    """Weights of a rank that sketching keeps."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            weight = module.weight
            columns = weight[0].numel()
            new = torch.randn(len(weight), rank) @ torch.randn(rank, columns) / columns**0.5
            weight.copy_(new.view_as(weight))
    return model


def norm_of(channels):
    norm = nn.BatchNorm2d(channels)
    norm.running_mean.normal_()
    norm.running_var.uniform_(4.0, 9.0)
    return norm


# --------------------------------------------------------------------------------- writes in place


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_step_of_a_fused_optimizer_is_noticed(kind):
    model = low_rank(nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 32)))
    for layer in (model[0], model[2]):
        layer.weight.requires_grad_(False)  # stay of low rank
    model[0].weight.requires_grad_(True)
    model[0].weight.register_hook(lambda gradient: torch.ones_like(gradient))
    optimizer = kind(model.parameters(), lr=0.1, fused=True)
    x = torch.randn(5, 32)
    fast = compiled(model)
    with torch.no_grad():
        before = model(x)
        close(fast(x), before)
    model(x).sum().backward()
    optimizer.step()
    with torch.no_grad():
        assert (model(x) - before).norm() > 0.01 * before.norm()
        close(fast(x), model(x))
    assert graphs() == 1


def test_a_fused_step_leaves_what_has_no_gradient_as_it_is():
    moved, frozen = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3, 3))
    optimizer = torch.optim.SGD([moved, frozen], lr=0.1, fused=True)
    both, one = Snapshot([moved, frozen]), Snapshot([frozen])
    moved.sum().backward()
    version = moved._version
    optimizer.step()
    assert moved._version == version
    assert not both.matches([moved, frozen])
    assert one.matches([frozen])


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_statistics_that_eager_training_moves_are_noticed(inner, caplog):
    """One rank fits: of several that keep all, rounding would choose, and another takes another graph."""
    model = low_rank(nn.Sequential(nn.Conv2d(16, 24, 1), nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 16, 1)))
    x = torch.randn(4, 16, 8, 8) + 2.0
    fast = compiled(model.eval(), inner=inner, ratio=0.8, round_rank_to=8)
    with torch.no_grad(), caplog.at_level(logging.INFO, "panther_compile"):
        close(fast(x), model(x))
        close(fast(x), model(x))
        assert "factorizing again" not in caplog.text
        version = model[1].running_mean._version
        model.train()(x)
        assert model[1].running_mean._version == version
        model.eval()
        close(fast(x), model(x))
    assert caplog.text.count("factorizing again") == 1
    assert graphs() == 1


def test_a_weight_used_as_it_is_and_folded():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(16, 16, 3), nn.Conv2d(16, 16, 3)
            self.second.weight = self.first.weight
            self.norm = norm_of(16)

        def forward(self, x):
            return self.norm(self.second(F.relu(self.first(x))))

    model, x = Tied().eval(), torch.randn(2, 16, 8, 8)
    fast = compiled(model)
    with torch.no_grad():
        close(fast(x), model(x))
        model.first.weight.mul_(2.0)
        close(fast(x), model(x))


# ------------------------------------------------------------------------- graphs of the same weights


class Branching(nn.Module):
    """A norm that is folded only where nothing else reads the convolution."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(24, 24, 3), norm_of(24), nn.Conv2d(24, 24, 3)

    def forward(self, x, features):
        y = self.first(x)
        z = self.second(F.relu(self.norm(y)))
        return (z, y) if features else z


class Padded(nn.Module):
    """A kernel of which one end or the other meets padding alone."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(24, 24, (15, 1)), nn.Conv2d(24, 24, 1)

    def forward(self, x, causal):
        return self.second(F.relu(self.first(F.pad(x, (0, 0, 14, 0) if causal else (0, 0, 0, 14)))))


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("kind", [Branching, Padded])
def test_what_passes_made_of_a_kernel_is_not_mixed_up(kind, first):
    model, x = low_rank(kind()).eval(), torch.randn(2, 24, 8, 8)
    fast = torch.compile(model, backend="panther", options=OPTIONS, dynamic=False)
    with torch.no_grad():
        for flag in (first, not first, first):
            close(fast(x, flag), model(x, flag))
    assert graphs() == 2


def test_a_model_called_in_train_mode_before_eval_mode():
    model = low_rank(nn.Sequential(nn.Conv2d(16, 24, 3), norm_of(24), nn.ReLU(), nn.Conv2d(24, 16, 3)))
    x = torch.randn(4, 16, 8, 8)
    fast = compiled(model)
    with torch.no_grad():
        model.train()
        close(fast(x), model(x))
        model.eval()
        close(fast(x), model(x))
        torch._dynamo.reset()
        close(compiled(model)(x), model(x))


def test_a_head_of_one_graph_alone_stays_dense_there():
    class Headed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.wide, self.out = nn.Linear(48, 48), nn.Linear(48, 96), nn.Linear(96, 96)

        def forward(self, x, features):
            y = self.wide(F.relu(self.body(x)))
            z = self.out(F.relu(y))
            return (z, y) if features else z

    model, found, x = Headed().eval(), [], torch.randn(3, 48)

    def inner(graph_module, inputs):
        found.append(type(graph_module.get_submodule("wide")).__name__)
        return graph_module.forward

    fast = compiled(model, inner=inner, ratio=0.5)
    with torch.no_grad():
        fast(x, False)
        fast(x, True)
    assert found == ["SketchedLinear", "Linear"]
