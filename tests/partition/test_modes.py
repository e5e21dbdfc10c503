"""What a model's own code does in one mode alone, and what a graph of it holds."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import panther_compile as pc
from panther_compile.errors import CaptureError
from panther_compile.parallel.stage_module import (
    StageModule,
    _find_mode_arguments,
    find_graph_mode,
    find_row_mixing,
)
from panther_compile.partition.graph.capture import capture
from panther_compile.partition.graph.modes import differs_by_mode


class Noise(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def forward(self, x):
        return x + self.rate * torch.randn_like(x) if self.training and self.rate else x


class Residual(nn.Module):
    def __init__(self, rate=0.0, norm=None):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = norm or nn.BatchNorm1d(8)
        self.drop, self.noise = nn.Dropout(0.1), Noise(rate)

    def forward(self, x, scale=1.0):
        return x + self.last(self.noise(self.drop(self.norm(self.first(x)).relu()))) * scale


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        (Residual(), None),
        (Residual(0.5), "Noise"),
        (spectral_norm(nn.Linear(8, 8)), "_SpectralNorm"),
        (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), None),
    ],
)
def test_modules_that_do_something_else_in_eval_mode(model, wanted):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(2, 3, 8) if isinstance(model, nn.TransformerEncoderLayer) else torch.randn(4, 8)
    assert differs_by_mode(model.train(), (x,), {}) == wanted
    assert model.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("mesh", [{"pp": 2}, {"tp": 2}])
def test_a_graph_that_stays_as_it_was_read_is_warned_of(mesh):
    x = torch.randn(4, 8)
    with pytest.warns(UserWarning, match=r"Noise in Residual does something else in eval mode"):
        pc.partition_model(Residual(0.5).train(), x, mesh=mesh, hardware="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pc.partition_model(Residual(0.5).eval(), x, mesh=mesh, hardware="cpu")
        pc.partition_model(Residual(0.5).train(), x, mesh={"dp": 2}, hardware="cpu")  # the module itself runs


def test_statistics_that_a_graph_cannot_count():
    model = Residual(norm=nn.BatchNorm1d(8, momentum=None))
    with pytest.raises(CaptureError, match=r"norm is a BatchNorm1d with momentum=None"):
        pc.partition_model(model.train(), torch.randn(4, 8), mesh={"pp": 2}, hardware="cpu")
    pc.partition_model(model, torch.randn(4, 8), mesh={"dp": 2}, hardware="cpu")  # the module itself runs
    pc.partition_model(model.eval(), torch.randn(4, 8), mesh={"pp": 2}, hardware="cpu")


def test_batch_norms_without_statistics_are_the_same_in_both_modes():
    model = Residual(norm=nn.BatchNorm1d(8, track_running_stats=False))
    graph = capture(model.train(), (torch.randn(4, 8),), {}).graph_module.graph
    assert not [one for one in _find_mode_arguments(graph) if "batch_norm" in str(one.node.target)]


class Functional(nn.Module):
    """Calls of `torch.nn.functional`, as torch.fx keeps them."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.BatchNorm1d(8)

    def forward(self, x):
        x = F.dropout(F.dropout(self.first(x), 0.5, training=self.training), 0.5, self.training)
        norm = self.norm
        x = F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, self.training)
        x = F.scaled_dot_product_attention(x, x, x, dropout_p=0.3 if self.training else 0.0)
        return self.last(x)


def test_functions_that_torch_fx_keeps_change_their_mode():
    model, x = Functional().train(), torch.randn(1, 4, 8).flatten(0, 1)
    part = pc.partition_model(model, x, mesh={"pp": 1}, boundaries=["first"], hardware="cpu")
    (graph,) = part.split().stages
    assert find_graph_mode([graph]) is True
    assert find_row_mixing([graph]) == "batch_norm"
    stage, before = StageModule(graph, True).eval(), model.norm.running_mean.clone()
    torch.testing.assert_close(stage(x)[0], model.eval()(x))
    assert torch.equal(model.norm.running_mean, before)
    stage.train()
    assert not torch.equal(stage(x)[0], stage(x)[0])


def test_batch_norms_that_torch_fx_keeps_whole_are_seen():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).train()
    part = pc.partition_model(model, torch.randn(4, 8), mesh={"pp": 1}, boundaries=["0"], hardware="cpu")
    assert find_row_mixing(part.split().stages) == "1"


def test_arguments_that_are_no_tensors_are_those_of_the_example():
    model, x = Residual().eval(), torch.randn(4, 8)
    staged = pc.partition_model(model, {"x": x, "scale": 2.0}, mesh={"pp": 2}, hardware="cpu").split()
    torch.testing.assert_close(staged(x=x, scale=2.0), model(x, 2.0))
    torch.testing.assert_close(staged(x, 2), model(x, 2.0))
    for args, kwargs in (((x,), {"scale": 3.0}), ((x, "2"), {}), ((2.0,), {"scale": 2.0})):
        with pytest.raises(CaptureError, match=r"called with .* for the example, Tensor, 2\.0"):
            staged(*args, **kwargs)
    staged = pc.partition_model(model, x, mesh={"pp": 2}, hardware="cpu").split()
    with pytest.raises(CaptureError, match="for the example, Tensor: give partition_model an example"):
        staged(x, scale=torch.tensor(2.0))


class Masked(Residual):
    def forward(self, x, mask=None):
        return super().forward(x if mask is None else x * mask)


def test_a_tensor_in_the_place_of_none_is_refused():
    """It was left out without a word, as a mask that the example had not."""
    model, x = Masked().eval(), torch.randn(4, 8)
    staged = pc.partition_model(model, {"x": x, "mask": None}, mesh={"pp": 2}, hardware="cpu").split()
    torch.testing.assert_close(staged(x, mask=None), model(x))
    with pytest.raises(CaptureError, match=r"with Tensor, Tensor, but .* the example, Tensor, None"):
        staged(x, mask=torch.zeros(8))
