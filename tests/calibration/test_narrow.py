"""What coupled layers keep, and the weights that they are given."""

import itertools

import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import nn

import panther_compile as pc
from panther_compile.calibration import calibrate, choose, few_data
from panther_compile.calibration.narrow import choose_features, features_kept, reader_losses, writer_losses
from panther_compile.factorization.moments import MomentSums
from panther_compile.layers.narrow import NarrowLinear
from panther_compile.planning.coupled import Coupling

OPTIONS = {"allow_slower": True, "min_params": 1, "include": "*", "progress": False}
OUTPUTS = 5


def square_of(features, rank, generator):
    rows = torch.randn(features, rank, generator=generator, dtype=torch.float64)
    return rows @ rows.T + 0.05 * torch.eye(features, dtype=torch.float64)


def least_loss(rows, covariance, kept):
    """The loss of the best weights for some features, in the plainest way."""
    best = torch.linalg.solve(covariance[kept][:, kept], covariance[kept])
    residual = covariance - covariance[:, kept] @ best
    return float(torch.trace(rows @ residual @ rows.T))


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3, 4))])
def test_features_that_are_chosen_are_close_to_the_best_ones(seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(OUTPUTS, 10, generator=generator, dtype=torch.float64)
    covariance = square_of(10, 6, generator)
    coupling = Coupling(("up",), "down", 1, 1, 10, padded=False)
    order = choose_features(coupling, rows, covariance)
    assert sorted(order.tolist()) == list(range(10))
    for count in (3, 5, 8):
        best = min(
            least_loss(rows, covariance, list(one)) for one in itertools.combinations(range(10), count)
        )
        usual = [least_loss(rows, covariance, list(one)) for one in itertools.combinations(range(10), count)]
        found = least_loss(rows, covariance, order[:count].tolist())
        assert found <= best + 0.6 * (sorted(usual)[len(usual) // 2] - best)


def test_losses_are_those_of_least_squares():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(OUTPUTS, 24, generator=generator, dtype=torch.float64)
    covariance = square_of(24, 12, generator)
    coupling = Coupling(("up",), "down", 1, 1, 24, padded=False)
    order = choose_features(coupling, rows, covariance)
    narrowed, tails = reader_losses(coupling, rows, covariance, order)
    for place, count in enumerate(features_kept(coupling)):
        kept = order[:count].tolist()
        assert float(narrowed[place]) == pytest.approx(least_loss(rows, covariance, kept), abs=1e-8)
        # All that the narrow reader gives is lost at rank 0.
        given = float(torch.trace(rows @ covariance @ rows.T)) - float(narrowed[place])
        assert float(tails[place, 0]) == pytest.approx(given)
        assert bool(tails[place, min(count, OUTPUTS) :].isinf().all())


def test_heads_keep_the_best_directions_of_each():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(OUTPUTS, 12, generator=generator, dtype=torch.float64)
    # Heads that have nothing to do with each other: each is cut as a matrix of its own.
    blocks = [square_of(4, 4, generator) for _ in range(3)]
    covariance = torch.block_diag(*blocks)
    coupling = Coupling(("v",), "o", 3, 1, 4, padded=True)
    basis = choose_features(coupling, rows, covariance)
    narrowed, _ = reader_losses(coupling, rows, covariance, basis)
    for place, count in enumerate(features_kept(coupling)):
        wanted = 0.0
        for head, block in enumerate(blocks):
            values = torch.linalg.svdvals(rows[:, 4 * head : 4 * head + 4] @ torch.linalg.cholesky(block))
            wanted += float(values[count:].square().sum())
        assert float(narrowed[place]) == pytest.approx(wanted, abs=1e-8)


def test_losses_of_a_writer_are_tails_of_its_spectrum():
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(24, 6, generator=generator, dtype=torch.float64)
    metric = square_of(24, 24, generator)
    coupling = Coupling(("up",), "down", 1, 1, 24, padded=False)
    order = torch.randperm(24, generator=generator)
    tails = writer_losses(coupling, left, metric, order)
    for place, count in enumerate(features_kept(coupling)):
        kept = order[:count]
        root = torch.linalg.cholesky(metric[kept][:, kept])
        values = torch.linalg.svdvals(root.T @ left[kept]).square()
        for rank in range(min(count, 6)):
            assert float(tails[place, rank]) == pytest.approx(float(values[rank:].sum()))


def test_moments_of_fewer_features_than_the_dense_layer_has():
    torch.manual_seed(0)
    x = torch.randn(4000, 6)
    z = x[:, :3] + 0.5
    sums = MomentSums(3, x.device, dense=6)
    sums.add(x[:1000], z[:1000])
    sums.add(x[1000:], z[1000:])
    extended = torch.eye(6, 3, dtype=torch.float64)
    found = sums.moments(centred=True, extended=extended)
    y, v = (x - x.mean(0)).double(), (z - z.mean(0)).double()
    torch.testing.assert_close(found.cross, y.T @ v / 4000, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(found.covariance, v.T @ v / 4000, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(found.mean_z, z.double().mean(0), atol=1e-5, rtol=0)


class Part(nn.Module):
    """Every hidden feature is there twice."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        with torch.no_grad():
            self.up.weight[32:], self.up.bias[32:] = self.up.weight[:32], self.up.bias[:32]

    def forward(self, x):
        return self.down(F.gelu(3 * self.up(x)))


@pytest.fixture
def prefers_links(monkeypatch):
    """Takes narrow plans wherever there are couplings, whatever the results on held-out data."""

    def last(plans, distances):
        narrow = [plan for plan in plans if "narrow" in plan.allocation]
        return (narrow or plans)[-1:]

    monkeypatch.setattr(choose, "_near", last)
    monkeypatch.setattr(few_data, "can_be_judged", lambda studied: False)
    monkeypatch.setattr(calibrate, "divided", lambda model, calls, wanted: calls)


def test_features_that_are_there_twice_are_left_out_for_nothing():
    torch.manual_seed(0)
    model = Part().eval()
    data = [torch.randn(64, 16) for _ in range(8)]
    small = pc.sketchify(model, 0.54, data=data, **OPTIONS)
    apart = pc.sketchify(model, 0.54, data=data, narrow=False, **OPTIONS)
    assert isinstance(small.up, NarrowLinear)
    assert small.up.kept == small.down.kept == 32
    assert not any(isinstance(module, NarrowLinear) for module in apart.modules())
    x = torch.randn(200, 16)
    wanted = model(x)
    error, before = ((one(x) - wanted).norm() / wanted.norm() for one in (small, apart))
    assert float(error) < 1e-3
    assert float(before) > 0.1
    report = pc.sketch_report(small)
    assert report.achieved_ratio <= 0.54
    assert "narrowed with down" in str(report)
    assert [row.error for row in report.sketched] == [None, None]


def test_every_row_of_the_report_adds_up(prefers_links):
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 1).eval()
    small = pc.sketchify(model, 0.5, data=[torch.randn(8, 12, 32) for _ in range(6)], **OPTIONS)
    report = pc.sketch_report(small)
    assert any(isinstance(module, NarrowLinear) for module in small.modules())
    assert report.replaced_dense_numbers == sum(row.dense_numbers for row in report.sketched)
    stored = sum(tensor.numel() for tensor in (*small.parameters(), *small.buffers()))
    rest = sum(p.numel() for p in model.parameters()) - report.replaced_dense_numbers
    assert stored == report.replaced_stored_numbers + rest
    assert report.achieved_ratio <= 0.5


SELDOM = ("bert", "mixer", "t5", "swin", "nn_transformer", "whisper", "gpt2")


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        *(pytest.param(name, marks=pytest.mark.slow) for name in SELDOM),
    ],
)
def test_models_of_the_zoo_narrowed(name, prefers_links, tmp_path):
    entry = zoo.ZOO[name]
    model, inputs = entry.build(), entry.inputs()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    small = pc.sketchify(model, 0.5, data=lambda one: zoo.call(one, inputs), **OPTIONS)
    assert any(isinstance(module, NarrowLinear) for module in small.modules())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    found = zoo.tensors(zoo.call(small, inputs))
    for one, other in zip(found, zoo.tensors(zoo.call(pc.densify(small), inputs)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))
    pc.save_sketched(small, tmp_path)
    loaded = zoo.tensors(zoo.call(pc.load_sketched(model, tmp_path), inputs))
    assert all(torch.equal(one, other) for one, other in zip(found, loaded, strict=True))
    if name in zoo.generating():
        assert zoo.generate(small, entry).shape == zoo.generate(model, entry).shape
    entry.loss(zoo.call(small, inputs)).backward()
    narrow = [module for module in small.modules() if isinstance(module, NarrowLinear)]
    assert all(p.grad is not None for module in narrow for p in module.parameters())


class Paths(nn.Module):
    """Takes one layer or another, as its input is, or none where it is given the features themselves."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(32, 96), nn.Linear(32, 96)
        self.c, self.o = nn.Linear(96, 48), nn.Linear(48, 8)

    def forward(self, x, hidden=None):
        if hidden is None:
            hidden = torch.relu(self.a(x) if x.sum() > 0 else self.b(x))
        return self.o(self.c(hidden))


def test_a_path_that_data_did_not_show_runs(prefers_links, tmp_path):
    torch.manual_seed(0)
    model = Paths().eval()
    data = [torch.randn(64, 32).abs() for _ in range(5)]
    with pytest.warns(UserWarning, match="never reached b"):
        small = pc.sketchify(model, 0.5, data=data, **OPTIONS)
    assert isinstance(small.a, NarrowLinear)
    assert isinstance(small.c, NarrowLinear)
    x, hidden = -data[0], torch.rand(64, 96)
    # The features that are left out are selected from the wide ones, which is what the weights say.
    wanted = nn.functional.linear(hidden, small.c.weight, small.c.bias)
    torch.testing.assert_close(small.c(hidden), wanted)
    pc.save_sketched(small, tmp_path)
    loaded, dense = pc.load_sketched(model, tmp_path), pc.densify(small)
    for given in ((data[0],), (x,), (x, hidden)):
        assert small(*given).shape == model(*given).shape
        torch.testing.assert_close(dense(*given), small(*given), rtol=1e-4, atol=1e-4)
        assert torch.equal(loaded(*given), small(*given))
        torch.testing.assert_close(torch.compile(small, backend="aot_eager")(*given), small(*given))


def test_a_link_is_seen_on_every_batch(prefers_links):
    torch.manual_seed(0)
    model = Paths().eval()
    data = [sign * torch.randn(64, 32).abs() for sign in (1, -1, 1, -1, 1)]
    small = pc.sketchify(model, 0.5, data=data, **OPTIONS)
    assert not any(isinstance(module, NarrowLinear) for module in small.modules())
    calls = [(data[0],), (data[2], torch.rand(64, 96))]
    small = pc.sketchify(model, 0.5, data=calls, **OPTIONS)
    assert not any(isinstance(module, NarrowLinear) for module in small.modules())


def test_narrow_layers_are_healed(prefers_links):
    torch.manual_seed(0)
    model = Part().eval()
    data = [torch.randn(64, 16) for _ in range(8)]
    small = pc.sketchify(model, 0.3, data=data, **OPTIONS)
    assert isinstance(small.up, NarrowLinear)
    healed = pc.heal(small, teacher=model, data=data, steps=60, progress=False)
    x = torch.randn(200, 16)
    wanted = model(x)
    assert float((healed(x) - wanted).norm()) < float((small(x) - wanted).norm())


def test_onnx_of_a_narrowed_model(prefers_links, tmp_path):
    torch.manual_seed(0)
    data = [torch.randn(64, 16) for _ in range(8)]
    small = pc.sketchify(Part().eval(), 0.3, data=data, **OPTIONS)
    assert isinstance(small.up, NarrowLinear)
    pc.export_onnx(small, (data[0],), tmp_path / "m.onnx", verify=True)


@pytest.mark.slow
def test_onnx_of_a_narrowed_model_of_the_zoo(prefers_links, tmp_path):
    entry = zoo.ZOO["bert"]
    inputs = entry.inputs()
    small = pc.sketchify(entry.build(), 0.5, data=lambda one: zoo.call(one, inputs), **OPTIONS)
    pc.export_onnx(small, (), tmp_path / "m.onnx", kwargs=inputs, verify=True)


class BiasOutside(nn.Linear):
    """As of PyTorch Geometric and of OpenAI's Whisper, which call the function themselves."""

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


def outside(bias):
    return nn.Sequential(BiasOutside(64, 96, bias), nn.ReLU(), BiasOutside(96, 64)).eval()


@pytest.mark.parametrize("bias", [True, False])
def test_features_to_which_another_module_adds_a_bias_are_all_kept(bias, tmp_path):
    torch.manual_seed(0)
    model = outside(bias)
    with torch.no_grad():
        for parameter in model[0].parameters():
            parameter.copy_(parameter[:32].repeat(3, *[1] * (parameter.dim() - 1)))
    small = pc.sketchify(model, 0.5, data=list(torch.randn(3, 64, 64)), **OPTIONS)
    narrow = [layer for layer in small.modules() if isinstance(layer, NarrowLinear)]
    assert bool(narrow) is not bias  # without a bias two thirds can go
    assert all(type(one) is nn.Parameter for one in small.parameters())
    pc.save_sketched(small, tmp_path)
    with torch.device("meta"):
        skeleton = outside(bias)
    x = torch.randn(5, 64)
    assert torch.equal(pc.load_sketched(skeleton, tmp_path)(x), small(x))
    torch.testing.assert_close(pc.densify(small)(x), small(x), rtol=1e-4, atol=1e-4)
