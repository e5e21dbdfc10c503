"""Models that differentiate in their forward, as those of molecules, whose forces are a gradient."""

import pytest
import torch
from torch import nn

import panther_compile as pc
from panther_compile.errors import DataError
from panther_compile.models.batches import Call
from panther_compile.models.derivatives import differentiates

OPTIONS = {"min_params": 0, "include": ["*.0", "*.2"], "progress": False, "allow_slower": True}


class Potential(nn.Module):
    """Needs gradients to run, and gives a result without them where it is not trained."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))

    def forward(self, positions):
        positions.requires_grad_()
        energy = self.net(positions)
        (slope,) = torch.autograd.grad(energy.sum(), positions, create_graph=self.training)
        return {"energy": energy, "forces": -slope}


class InMethods(Potential):
    """As SchNetPack does."""

    def prepare(self, positions):
        positions.requires_grad_(True)

    def forward(self, positions):
        with torch.enable_grad():
            self.prepare(positions)
            return super().forward(positions)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 3).requires_grad_(False)

    def freeze(self):
        self.net.requires_grad_(True)

    def forward(self, x):
        self.net.requires_grad_(False)
        return self.net(x)


def build(cls):
    torch.manual_seed(0)
    return cls().eval()


def batches():
    torch.manual_seed(1)
    return [torch.randn(32, 12) for _ in range(6)]


@pytest.mark.parametrize("cls", [Potential, InMethods])
@pytest.mark.parametrize("fitted", [True, False])
def test_it_is_sketched(cls, fitted):
    model, given = build(cls), batches()
    small = pc.sketchify(model, 0.7, **OPTIONS, **({"data": given} if fitted else {}))
    report = pc.sketch_report(small)
    assert report.closeness is not None
    assert report.closeness.grade
    assert not any(one.requires_grad for one in given)
    wanted, found = model(given[0].clone()), small(given[0].clone())
    for name in ("energy", "forces"):
        assert float((found[name] - wanted[name]).norm() / wanted[name].norm()) < (0.7 if fitted else 1.2)


def test_a_function_may_call_it():
    model, given = build(Potential), batches()
    wanted = pc.sketchify(model, 0.7, data=given, **OPTIONS)
    found = pc.sketchify(model, 0.7, data=lambda watched: [watched(x) for x in given], **OPTIONS)
    torch.testing.assert_close(found.state_dict(), wanted.state_dict())


def test_it_is_judged_by_a_function_too():
    model, x = build(Potential), torch.randn(16, 12)
    wanted = model(x.clone())["forces"]

    def score(small):
        return -float((small(x.clone())["forces"] - wanted).norm() / wanted.norm())

    small = pc.sketchify(model, data=batches(), max_drop=0.5, evaluate=score, **OPTIONS)
    assert pc.sketch_report(small).achieved_ratio < 0.9
    assert score(small) > -0.5


@pytest.mark.parametrize("cls", [Potential, InMethods])
def test_healing_lessens_what_forces_are_off(cls):
    model, given = build(cls), batches()
    small = pc.sketchify(model, 0.5, **OPTIONS)
    healed = pc.heal(small, teacher=model, data=given, steps=200, progress=False)
    off = lambda one: float((one(given[0])["forces"] - model(given[0])["forces"]).norm())  # noqa: E731
    assert off(healed) < 0.75 * off(small)


def test_results_are_handed_on_as_they_are_asked_for():
    model, call = build(Potential), Call((torch.randn(4, 12),), {})
    with torch.no_grad():
        assert not any(one.requires_grad for one in call.run(model).values())
    found = call.run(model)
    found["forces"].square().sum().backward()
    assert model.net[2].weight.grad is not None


def test_others_run_without_gradients():
    assert differentiates(nn.Sequential(Potential()))
    assert not differentiates(Plain())
    assert not differentiates(nn.Sequential(nn.Linear(3, 3), nn.TransformerEncoderLayer(8, 2)))


class Learning(nn.Module):
    """Differentiates by the parameters of a part, which it looks up before it runs it."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(12, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU())
        self.net = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64))

    def forward(self, x):
        with torch.enable_grad():
            fast = dict(self.inner.named_parameters())
            out = torch.func.functional_call(self.inner, fast, (x,))
            slopes = torch.autograd.grad(out.square().mean(), list(fast.values()))
            fast = {name: one - slope for (name, one), slope in zip(fast.items(), slopes, strict=True)}
            return self.net(torch.func.functional_call(self.inner, fast, (x,)))


def test_a_model_that_has_its_parameters_in_hand_says_which_layers_to_exclude():
    model = build(Learning)
    assert pc.sketchify(model, 0.5, **OPTIONS)(batches()[0]).shape == (32, 64)
    with pytest.raises(DataError, match=r"fitted up to inner.\d while it runs \(exclude=.*RuntimeError"):
        pc.sketchify(model, 0.5, data=batches(), **OPTIONS)
    small = pc.sketchify(model, 0.5, data=batches(), exclude=["inner*"], **OPTIONS)
    assert small(batches()[0]).shape == (32, 64)


def test_a_model_that_differentiates_by_parameters_is_healed():
    model = build(Learning)
    flags = [one.requires_grad for one in model.parameters()]
    small = pc.sketchify(
        model, 0.5, data=batches(), exclude=["inner*"], refine="kl", refine_steps=2, **OPTIONS
    )
    assert pc.heal_report(small).steps == 2
    assert [one.requires_grad for one in model.parameters()] == flags
    assert all(one.grad is None for one in (*model.parameters(), *small.parameters()))
