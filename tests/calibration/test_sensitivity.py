"""E[g gᵀ] against gradients taken one by one."""

import gc

import pytest
import torch
from torch import nn

import panther_compile as pc
from panther_compile.calibration import sensitivity
from panther_compile.calibration.sensitivity import output_gradients, weight_of_errors
from panther_compile.kinds.targets import find_targets, watch
from panther_compile.models.batches import Call
from panther_compile.records import Site


def gradients(model, x, **options):
    linear = [(name, one) for name, one in model.named_modules() if isinstance(one, nn.Linear)]
    sites = [Site(name, one, "Linear") for name, one in linear]
    targets, _ = find_targets(sites)
    side = watch(model, targets)
    return output_gradients(
        side.model,
        side.watched,
        {name: target.view.channel_dim for name, target in targets.items()},
        [Call((x,), {})],
        seed=0,
        progress=False,
        **options,
    ).means


def test_last_layer_of_features_is_the_identity():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 5))
    found = gradients(model, torch.randn(5000, 6), logits=False)
    weight, _ = weight_of_errors(found["2"])
    torch.testing.assert_close(weight, torch.eye(5, dtype=torch.float64), rtol=0, atol=0.06)
    assert found["0"].shape == (8, 8)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_few_rows_are_believed_as_far_as_projections_agree():
    """The last layer's is the identity; 16 random rows of 64 outputs would say that most errors are free."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 64)), torch.randn(8, 6)
    plain, shrunk = (gradients(model, x, logits=False, shrunk=one)["2"] for one in (False, True))
    torch.testing.assert_close(shrunk.diagonal().mean(), plain.diagonal().mean())
    values = torch.linalg.eigvalsh(shrunk / shrunk.diagonal().mean())
    assert values[0] > 0.5
    assert values[-1] < 3.0
    assert torch.linalg.eigvalsh(plain)[0] < 1e-6


def test_logits_give_the_fisher_matrix():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 3))
    x = torch.randn(20000, 6)
    found = gradients(model, x, logits=True)["2"]
    with torch.no_grad():
        chances = model(x).softmax(-1).double()
    fisher = torch.diag(chances.mean(0)) - chances.T @ chances / len(x)
    torch.testing.assert_close(found, fisher, rtol=0.05, atol=0.005)


def test_frozen_model():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5)).requires_grad_(False)
    assert set(gradients(model, torch.randn(8, 6), logits=False)) == {"0", "2"}


def test_neither_outputs_nor_gradients_of_other_layers_are_held(monkeypatch):
    model, held = nn.Sequential(*(nn.Linear(8, 8) for _ in range(12))).requires_grad_(False), []

    def counted(rows):
        held.append(sum(type(one) is torch.Tensor and one.shape == rows.shape for one in gc.get_objects()))
        return gram(rows)

    gram = sensitivity.gram
    monkeypatch.setattr(sensitivity, "gram", counted)
    gradients(model, torch.randn(77, 8), logits=False)
    assert len(held) == 24
    assert max(held) < 12


def test_batches_of_large_results_are_run_in_parts(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 5))
    ran = []
    model[0].register_forward_hook(
        lambda _, args, out: ran.append(len(args[0])) if out.requires_grad else None
    )
    monkeypatch.setattr(sensitivity, "_AT_ONCE", 5000)
    found = gradients(model, torch.randn(5000, 6), logits=False)
    assert ran == [1000] * 5
    weight, _ = weight_of_errors(found["2"])
    torch.testing.assert_close(weight, torch.eye(5, dtype=torch.float64), rtol=0, atol=0.06)


class Hides(nn.Sequential):
    """Gives results, some hidden by -inf, and a loss of no label."""

    def forward(self, x):
        out = super().forward(x)
        return {"logits": out.masked_fill(torch.arange(5) == 3, -torch.inf), "loss": out.sum() * torch.nan}


def test_results_that_are_not_finite_do_not_count():
    model = Hides(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))
    found = gradients(model, torch.randn(8, 6), logits=None)
    assert all(bool(one.isfinite().all()) for one in found.values())
    assert found["2"][3].abs().max() == 0
    assert found["2"][2].abs().max() > 0


class ChangesInPlace(nn.Sequential):
    def forward(self, x):
        hidden = self[0](x).sigmoid()
        out = self[2](hidden)
        hidden.add_(1.0)
        return out


def test_a_backward_that_fails_is_told_of():
    model = ChangesInPlace(nn.Linear(6, 8), nn.Identity(), nn.Linear(8, 5))
    with pytest.warns(UserWarning, match="no gradient of the model's result .*inplace.* count alike"):
        assert gradients(model, torch.randn(8, 6), logits=False) == {}


def test_a_backward_that_fails_is_told_of_once():
    """Those of other batches would fail too; each of them was a warning."""
    model = ChangesInPlace(nn.Linear(48, 64), nn.Identity(), nn.Linear(64, 48))
    data = [torch.randn(8, 48) for _ in range(9)]
    with pytest.warns(UserWarning, match="no gradient") as told:
        pc.sketchify(model, 0.5, data=data, min_params=64, allow_slower=True, progress=False)
    assert sum("no gradient of the model's result" in str(one.message) for one in told) == 1


class OfTraining(torch.autograd.Function):
    """Goes backward in training mode alone, as reversible layers of Reformer do."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise AssertionError("make sure to use `model.train()`")


class GoesBackInTraining(nn.Sequential):
    def forward(self, x):
        return OfTraining.apply(super().forward(x))


def test_a_backward_of_training_mode_is_told_of():
    model = GoesBackInTraining(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))
    with pytest.warns(UserWarning, match="no gradient of the model's result .*model.train.* count alike"):
        assert gradients(model, torch.randn(8, 6), logits=False) == {}


@pytest.mark.parametrize("size", [3e-5, 1e2])
def test_gradients_of_small_and_large_results_are_numbers_of_float16(size):
    """A gradient is the larger the smaller the result; float16 ends at 65,504, and below 6e-8."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))
    with torch.no_grad():
        model[2].weight.mul_(size)
        model[2].bias.zero_()
    x = torch.randn(512, 6)
    wanted = gradients(model, x, logits=False)
    found = gradients(model.half(), x.half(), logits=False)
    for name in ("0", "2"):
        one, other = (given[name] / given[name].diagonal().mean() for given in (found, wanted))
        torch.testing.assert_close(one, other, rtol=0, atol=0.1)
