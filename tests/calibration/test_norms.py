"""Batch norms behind fitted layers take the statistics of what reaches them in the sketch."""

import copy

import pytest
import torch
from torch import nn

import panther_compile as pc
from panther_compile.calibration import calibrate
from panther_compile.calibration.norms import find_norms, fit_norm
from panther_compile.factorization.gain import LARGEST
from panther_compile.models.batches import record_calls
from panther_compile.models.watched import Arrival

OPTIONS = {"allow_slower": True, "min_params": 256, "progress": False, "include": "*"}


def trained(norm):
    """A norm as training leaves it."""
    with torch.no_grad():
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2.0)
        norm.weight.uniform_(0.5, 1.5)
        norm.bias.normal_()
    return norm.eval()


class Net(nn.Module):
    """Two convolutions with norms, one in front of them, and one that is called twice."""

    def __init__(self):
        super().__init__()
        self.first = nn.BatchNorm2d(8)
        self.one = nn.Conv2d(8, 24, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(24)
        self.two = nn.Conv2d(24, 24, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(24)
        self.twice = nn.BatchNorm2d(24)
        self.head = nn.Linear(24, 5)

    def forward(self, x):
        x = self.norm1(self.one(self.first(x))).relu()
        x = self.twice(self.twice(self.norm2(self.two(x)).relu()))
        return self.head(x.mean((2, 3)))


@pytest.fixture
def model():
    """Its norms know what reaches them."""
    torch.manual_seed(0)
    net = Net().train()
    for batch in data() * 20:
        net(batch)
    return net.eval()


def data():
    torch.manual_seed(1)
    scale = torch.linspace(0.2, 2.0, 8)[:, None, None]
    return [torch.randn(16, 8, 6, 6) * scale + scale for _ in range(8)]


def statistics(model, names):
    """Mean and deviation of what norms give, by name."""
    found = {name: [] for name in names}
    handles = [
        model.get_submodule(name).register_forward_hook(
            lambda _, args, out, name=name: found[name].append(out)
        )
        for name in names
    ]
    with torch.no_grad():
        for batch in data():
            model(batch)
    for handle in handles:
        handle.remove()
    outs = {name: torch.cat(one).movedim(1, -1).flatten(0, -2) for name, one in found.items()}
    return {name: (one.mean(0), one.std(0)) for name, one in outs.items()}


@pytest.mark.parametrize("shape", [(64, 12), (16, 12, 9), (8, 12, 5, 4), (4, 12, 3, 4, 2)])
def test_output_has_the_statistics_of_the_dense_one(shape):
    torch.manual_seed(0)
    build = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[len(shape)]
    norm = trained(build(12))
    per_channel = (1, 12) + (1,) * (len(shape) - 2)
    xs = [torch.randn(shape) for _ in range(2)]
    zs = [x * torch.linspace(0.6, 1.1, 12).view(per_channel) + torch.randn(per_channel) for x in xs]
    made = fit_norm(norm, [Arrival(place, x, z) for place, (x, z) in enumerate(zip(xs, zs, strict=True))])
    wanted, got = norm(torch.cat(xs)), made(torch.cat(zs))
    rows = [one.movedim(1, -1).reshape(-1, 12) for one in (wanted, got)]
    torch.testing.assert_close(rows[1].mean(0), rows[0].mean(0), rtol=0, atol=1e-4)
    torch.testing.assert_close(rows[1].std(0), rows[0].std(0), rtol=1e-3, atol=0)


def test_what_is_nearly_lost_is_not_blown_up():
    torch.manual_seed(0)
    norm = trained(nn.BatchNorm1d(3))
    x = torch.randn(256, 3)
    z = x * torch.tensor([1e-4, 0.0, 1.0])
    made = fit_norm(norm, [Arrival(0, x, z)])
    gain = made(z).std(0) / norm(z).std(0)
    assert gain[0].item() == pytest.approx(LARGEST, rel=1e-3)
    assert bool(made(z).isfinite().all())
    assert gain[2].item() == pytest.approx(1.0, rel=1e-3)


def test_a_norm_that_nothing_has_changed_for_is_left_as_it_is():
    norm, x = trained(nn.BatchNorm1d(3)), torch.randn(8, 3)
    assert fit_norm(norm, [Arrival(0, x, x.clone())]) is None


def test_a_norm_that_is_given_infinities_is_left_as_it_is():
    norm, x = trained(nn.BatchNorm1d(3)), torch.randn(8, 3)
    assert fit_norm(norm, [Arrival(0, x, x + 0.1), Arrival(1, x, x / 0)]) is None


def test_norms_that_each_run_calls_once_are_found(model):
    assert list(find_norms(model, record_calls(model, data()[:2]))) == ["first", "norm1", "norm2"]


def test_norms_without_statistics_are_none(model):
    model.norm1 = nn.BatchNorm2d(24, track_running_stats=False)
    assert list(find_norms(model, record_calls(model, data()[:1]))) == ["first", "norm2"]


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_norms_of_a_sketch_give_what_those_of_the_dense_model_give(model, training, inplace):
    names = ["norm1", "norm2"]
    wanted = statistics(model, names)
    before = copy.deepcopy(model.state_dict())
    norm, weight = model.norm2, model.norm2.weight
    small = pc.sketchify(model.train(training), 0.6, data=data(), inplace=inplace, **OPTIONS)
    assert {module.training for module in small.modules()} == {training}
    small.eval()
    for name, (mean, deviation) in statistics(small, names).items():
        torch.testing.assert_close(mean, wanted[name][0], rtol=0, atol=1e-3)
        torch.testing.assert_close(deviation, wanted[name][1], rtol=1e-3, atol=0)
    assert not torch.equal(small.norm2.running_var, before["norm2.running_var"])
    assert torch.equal(small.first.running_var, before["first.running_var"])  # no layer is in front of it
    assert torch.equal(small.twice.running_var, before["twice.running_var"])
    if inplace:
        assert small.norm2 is norm
        assert small.norm2.weight is weight  # an optimizer has it
    else:
        assert all(torch.equal(model.state_dict()[name], one) for name, one in before.items())
        assert small.norm2.weight is not weight
        assert torch.equal(small.norm2.weight, weight)


def test_a_sketch_is_closer_with_them(model, monkeypatch):
    x = torch.cat(data())

    def lost():
        small = pc.sketchify(model, 0.3, data=data(), **OPTIONS)
        with torch.no_grad():
            return float((small(x) - model(x)).norm())

    with_norms = lost()
    monkeypatch.setattr(calibrate, "find_norms", lambda *_: {})
    assert with_norms < 0.98 * lost()


def test_statistics_are_kept_on_disk(model, tmp_path):
    small = pc.sketchify(model, 0.3, data=data(), **OPTIONS)
    pc.save_sketched(small, tmp_path / "small")
    loaded = pc.load_sketched(model, tmp_path / "small").eval()
    x = data()[0]
    torch.testing.assert_close(loaded(x), small(x), rtol=0, atol=0)


def test_hooks_of_norms_stay(model):
    seen = []
    model.norm2.register_forward_hook(lambda module, args, out: seen.append(module))
    small = pc.sketchify(model, 0.3, data=data(), **OPTIONS)
    seen.clear()
    small(data()[0])
    assert seen == [small.norm2]


def test_work_that_is_taken_up_comes_to_the_same(model, tmp_path):
    first, again = (
        pc.sketchify(model, 0.3, data=data(), resume=tmp_path / "work", **OPTIONS) for _ in range(2)
    )
    for one, other in zip(first.state_dict().values(), again.state_dict().values(), strict=True):
        assert torch.equal(one, other)
