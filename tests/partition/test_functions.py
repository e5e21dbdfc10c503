"""What a model's own code does in its backward: functions of autograd are kept, hooks are named."""

import copy
import warnings

import pytest
import torch
from torch import nn

from panther_compile import partition_model
from panther_compile.partition.graph.capture import capture


class Rounded(torch.autograd.Function):
    """Gradients pass, and are scaled."""

    @staticmethod
    def forward(ctx, x, steps, scale=0.5):
        ctx.scale = scale
        return torch.round(x * steps) / steps

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.scale, None, None


class Gated(torch.autograd.Function):
    """Two outputs, one of them a view, a parameter, and a backward that is not that of the forward."""

    @staticmethod
    def forward(x, weight):
        return x * torch.sigmoid(weight), x.view_as(x), None

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gradient, passed, _):
        x, _weight = ctx.saved_tensors
        return 2 * gradient + passed, 3 * (gradient * x).sum(0)


class Called(torch.autograd.Function):
    """Given a module, whose parameters it uses."""

    @staticmethod
    def forward(ctx, x, module):
        return module(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


round_through = Rounded.apply  # as it was before a model is read


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.gate = nn.Parameter(torch.randn(16))

    def forward(self, x):
        for layer in self.layers:
            x = round_through(torch.tanh(layer(x)), 4)
            y, x, _ = Gated.apply(x, self.gate)
            x = x + y
        return x


@pytest.mark.parametrize("boundaries", [(), ("layers.0",)])
def test_functions_are_called_by_stages(boundaries):
    model, x = Model(), torch.randn(4, 16)
    reference = copy.deepcopy(model)
    part = partition_model(model, x, mesh={"pp": 2}, boundaries=boundaries, hardware="cpu")
    assert all(stage.parameters for stage in part.stages)
    found, wanted = part.split()(x), reference(x)
    assert torch.equal(found, wanted)
    for output in (found, wanted):
        output.square().sum().backward()
    for parameter, own in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, own.grad)
    assert "apply" not in vars(torch.autograd.function._SingleLevelFunction)


class Hooked(Model):
    def forward(self, x):
        x = self.layers[0](x)
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient / 2)
        return self.layers[2](Called.apply(x, self.layers[1]))


@pytest.mark.parametrize("mesh", [{"pp": 2}, {"tp": 2}])
def test_what_is_lost_is_warned_of(mesh):
    model, x = Hooked(), torch.randn(4, 16)
    model.layers[2].register_full_backward_hook(lambda *_: None)
    with pytest.warns(
        UserWarning, match=r"leave out, in their backward: the backward hooks of layers\.2; the"
    ) as seen:
        partition_model(model, x, mesh=mesh, hardware="cpu")
    assert "the backward of Called, which is given more than tensors" in str(seen[0].message)
    assert "the hook Hooked.forward.<locals>.<lambda> of a tensor" in str(seen[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        partition_model(model, x, mesh={"dp": 2}, hardware="cpu")  # where the model itself runs
    assert capture(Model(), (x,), {}).lost == ()
