"""Layers whose output is added to what went around them, and fits that make up for errors there."""

import pytest
import torch
from torch import nn

import panther_compile as pc
from panther_compile.calibration import calibrate
from panther_compile.calibration.residuals import Passage, find_residuals, observe
from panther_compile.factorization.fit_matrix import fit_matrix_to
from panther_compile.factorization.moments import MomentSums
from panther_compile.kinds.targets import find_targets, watch
from panther_compile.models.batches import Call
from panther_compile.records import Site


class Block(nn.Module):
    """Normalised first, or last."""

    def __init__(self, width, *, first=True):
        super().__init__()
        self.is_first = first
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        if self.is_first:
            return x + self.drop(self.down(self.up(self.norm(x)).relu()))
        return self.norm(self.drop(self.down(self.up(x).relu())) + x)


def skips_of(model, *inputs):
    sites = [Site(n, m, "Linear") for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    return find_residuals(watch(model.eval(), find_targets(sites)[0]), [Call(inputs, {})])


def test_normalised_first():
    torch.manual_seed(0)
    model = nn.Sequential(Block(8), Block(8), nn.Linear(8, 3))
    found = skips_of(model, torch.randn(5, 8))
    assert found == {"0.down": Passage("0.norm", "in"), "1.down": Passage("1.norm", "in")}


def test_normalised_last():
    torch.manual_seed(0)
    model = nn.Sequential(Block(8, first=False), Block(8, first=False))
    found = skips_of(model, torch.randn(5, 8))
    assert found == {"0.down": Passage("0.up", "in"), "1.down": Passage("1.up", "in")}


def test_nothing_is_found_where_nothing_is_added():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 8))
    assert skips_of(model, torch.randn(5, 8)) == {}


def test_sums_that_are_scaled_or_taken_elsewhere_are_not_skips():
    class Scaled(Block):
        def forward(self, x):
            return x + 0.5 * self.down(self.up(self.norm(x)).relu())

    torch.manual_seed(0)
    assert skips_of(nn.Sequential(Scaled(8), nn.Identity()), torch.randn(5, 8)) == {}


def test_attention_of_torch():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
    model = nn.Sequential(layer, nn.Linear(8, 2)).eval()
    sites = [
        Site("0.self_attn", layer.self_attn, "MultiheadAttention"),
        *(Site(f"0.{name}", layer.get_submodule(name), "Linear") for name in ("linear1", "linear2")),
    ]
    found = find_residuals(watch(model, find_targets(sites)[0]), [Call((torch.randn(3, 5, 8),), {})])
    assert found == {
        "0.self_attn.out_proj": Passage("0.norm1", "in"),
        "0.linear2": Passage("0.norm2", "in"),
    }


def test_another_sum_in_another_batch_is_none():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)

        def forward(self, x):
            normed = self.norm(x)
            x = self.norm(self.one(normed) + (x if x.sum() > 0 else normed))
            return self.norm(x + self.two(torch.relu(x)))

    torch.manual_seed(0)
    model, x = Model().eval(), torch.rand(5, 8)
    sites = [Site(n, m, "Linear") for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    watched = watch(model, find_targets(sites)[0])
    first = find_residuals(watched, [Call((x,), {})])
    assert set(first) == {"one", "two"}
    found = find_residuals(watched, [Call((x,), {}), Call((-x,), {})])
    assert found == {"two": first["two"]}


def test_hooks_are_gone_afterwards():
    model = nn.Sequential(Block(8), nn.Linear(8, 3))
    with observe(model, {Passage("0", "in"), Passage("0", "out")}, lambda *_: None):
        assert model[0]._forward_hooks
        assert model[0]._forward_pre_hooks
    assert not model[0]._forward_hooks
    assert not model[0]._forward_pre_hooks


@pytest.mark.parametrize("bias", [True, False])
def test_full_rank_fit_is_least_squares_to_the_sum(bias):
    generator = torch.Generator().manual_seed(0)
    rows, inputs, outputs = 4000, 7, 5
    x = torch.randn(rows, inputs, generator=generator) + 1
    z = x + 0.3 * torch.randn(rows, inputs, generator=generator)
    s = torch.randn(rows, outputs, generator=generator)
    changed = s + 0.5 * z @ torch.randn(inputs, outputs, generator=generator) - 2
    layer = nn.Linear(inputs, outputs, bias=bias)
    sums = MomentSums(inputs, torch.device("cpu"))
    for part in torch.arange(rows).split(150):
        sums.add(x[part], z[part], (s[part], changed[part]))
    found = fit_matrix_to(
        layer.weight,
        layer.bias,
        sums.moments(centred=bias),
        None,
        outputs,
        pivoted=False,
        dtype=torch.float32,
    )
    wanted = (layer(x) + s - changed).detach().double()
    known = torch.cat((z, torch.ones(rows, 1)), 1).double() if bias else z.double()
    best = torch.linalg.lstsq(known, wanted).solution
    torch.testing.assert_close((found.left @ found.right).T, best[:inputs], rtol=0, atol=5e-3)
    if bias:
        torch.testing.assert_close(found.bias, best[-1], rtol=0, atol=5e-3)
    total = (layer(x) - layer(x).mean(0) * bias + s).detach()
    rest = (wanted - known @ best).norm() / total.norm()
    assert found.output_error == pytest.approx(float(rest), rel=0.05)


def test_what_a_layer_makes_up_for_brings_the_model_closer(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(32) for _ in range(4)), nn.Linear(32, 8)).eval()
    data = [torch.randn(64, 32) @ torch.diag(torch.linspace(0.2, 2, 32)) for _ in range(16)]

    def error():
        small = pc.sketchify(model, 0.4, data=data[:12], progress=False, allow_slower=True, min_params=1)
        with torch.no_grad():
            return sum(float((small(x) - model(x)).norm() / model(x).norm()) for x in data[12:])

    with_skips = error()
    monkeypatch.setattr(calibrate, "find_residuals", lambda *_: {})
    assert with_skips < 0.97 * error()
