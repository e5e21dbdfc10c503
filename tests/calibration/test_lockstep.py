"""Layers are fitted in the order in which the model calls them, on what the fitted ones before give."""

import random
import threading

import pytest
import torch
from torch import nn

from panther_compile.calibration import lockstep
from panther_compile.calibration.lockstep import fit_in_lockstep
from panther_compile.errors import DataError
from panther_compile.models.batches import Call
from panther_compile.models.watched import Side, Watched, copy_sharing


class Branches(nn.Module):
    """The third layer is reached by batches of positive mean alone."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 4)
        self.first = nn.Linear(4, 4)
        self.sometimes = nn.Linear(4, 4)

    def forward(self, x):
        y = self.first(x)
        if x.mean() > 0:
            y = y + self.sometimes(y)
        return self.last(y)


def sides(model):
    made = []
    for _ in range(2):
        watched = {
            name: Watched(name, copy_sharing(layer, {}))
            for name, layer in model.named_modules()
            if isinstance(layer, nn.Linear)
        }
        new = {model.get_submodule(name): one for name, one in watched.items()}
        made.append(Side(copy_sharing(model, new), watched))
    return made


def doubled(layer):
    new = nn.Linear(4, 4)
    with torch.no_grad():
        new.weight.copy_(2 * layer.weight)
        new.bias.copy_(2 * layer.bias)
    return new


def test_order_inputs_and_result():
    torch.manual_seed(0)
    model = Branches()
    dense, sketched = sides(model)
    batches = [torch.randn(3, 4) + 1, torch.randn(3, 4) - 1, torch.randn(3, 4) + 1]
    came = {}

    def fit(name, arrivals):
        came[name] = arrivals
        return doubled(model.get_submodule(name))

    order = fit_in_lockstep(
        dense, sketched, [Call((x,), {}) for x in batches], fit, residuals={}, progress=False
    )
    assert order == ["first", "sometimes", "last"] or order == ["first", "last", "sometimes"]
    assert [arrival.batch for arrival in came["first"]] == [0, 1, 2]
    assert [arrival.batch for arrival in came["sometimes"]] == [0, 2]
    for arrival, x in zip(came["first"], batches, strict=True):
        assert torch.equal(arrival.x, x)
    for arrival in came["sometimes"]:  # the sketched model has the doubled first layer
        torch.testing.assert_close(arrival.z, 2 * arrival.x)
    with torch.no_grad():
        wanted = model(batches[1])
        hidden = 2 * model.first(batches[1])
        torch.testing.assert_close(sketched.model(batches[1]), 2 * model.last(hidden))
        torch.testing.assert_close(dense.model(batches[1]), wanted)


def test_layer_that_is_called_twice_is_fitted_once():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return self.fc(self.fc(x))

    model = Twice()
    dense, sketched = sides(model)
    calls = []
    fit_in_lockstep(
        dense,
        sketched,
        [Call((torch.randn(2, 4),), {})],
        lambda name, arrivals: calls.append(name) or doubled(model.fc),
        residuals={},
        progress=False,
    )
    assert calls == ["fc"]


def test_what_the_model_raises_is_raised_and_no_thread_stays():
    class Raises(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            y = self.fc(x)
            if x.sum() > 100:
                raise RuntimeError("too large")
            return self.out(y)

    model = Raises()
    dense, sketched = sides(model)
    before = threading.active_count()
    calls = [Call((torch.ones(2, 4),), {}), Call((100 * torch.ones(2, 4),), {})]
    with pytest.raises(DataError, match=r"fitted up to fc while it runs.*raised RuntimeError: too large"):
        fit_in_lockstep(
            dense, sketched, calls, lambda name, arrivals: doubled(model.fc), residuals={}, progress=False
        )
    assert threading.active_count() == before


def test_nothing_runs_behind_the_last_layer():
    behind = []

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            y = self.fc(x)
            behind.append(y)
            return y

    model = Model()
    dense, sketched = sides(model)
    before = threading.active_count()
    calls = [Call((torch.ones(2, 4),), {})] * 3
    order = fit_in_lockstep(
        dense, sketched, calls, lambda *_: doubled(model.fc), residuals={}, progress=False
    )
    assert order == ["fc"]
    assert not behind
    assert threading.active_count() == before


def test_fit_that_raises_leaves_no_thread():
    model = Branches()
    dense, sketched = sides(model)
    before = threading.active_count()

    def fit(name, arrivals):
        raise KeyError(name)

    with pytest.raises(KeyError):
        fit_in_lockstep(dense, sketched, [Call((torch.ones(2, 4),), {})], fit, residuals={}, progress=False)
    assert threading.active_count() == before


def test_an_interrupt_while_threads_are_ended_leaves_none(monkeypatch):
    model = Branches()
    dense, sketched = sides(model)
    before, stop, stopped = threading.active_count(), lockstep._Runner.stop, []

    def interrupted(runner):
        stopped.append(runner)
        if len(stopped) == 2:
            raise KeyboardInterrupt
        stop(runner)

    def fit(name, arrivals):
        raise ValueError("no layer")

    monkeypatch.setattr(lockstep._Runner, "stop", interrupted)
    calls = [Call((torch.randn(3, 4),), {}) for _ in range(4)]
    with pytest.raises(KeyboardInterrupt):
        fit_in_lockstep(dense, sketched, calls, fit, residuals={}, progress=False)
    assert threading.active_count() == before


class Noisy(nn.Module):
    """Draws numbers before each layer, as the loss of a diffusion model, a policy or an autoencoder does."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x + torch.randn_like(x))
        return self.last(x + torch.randn_like(x) * random.random())


def test_both_models_draw_the_same_numbers():
    torch.manual_seed(0)
    model = Noisy()
    before = torch.get_rng_state(), random.getstate()
    batches = [torch.randn(3, 4, generator=torch.Generator().manual_seed(place)) for place in range(3)]
    dense, sketched = sides(model)
    came = []

    def fit(name, arrivals):
        came.extend(arrivals)
        return sketched.watched[name].layer

    calls = [Call((batch,), {}, place) for place, batch in enumerate(batches)]
    fit_in_lockstep(dense, sketched, calls, fit, residuals={}, progress=False)
    assert len(came) == 6
    assert all(torch.equal(one.x, one.z) for one in came)
    noises = [one.x - batch for one, batch in zip(came[:3], batches, strict=True)]
    assert not any(torch.allclose(one, noises[0]) for one in noises[1:])
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert torch.equal(calls[0].run(model), calls[0].run(model))
    assert not torch.equal(calls[0].run(model), model(batches[0]))
