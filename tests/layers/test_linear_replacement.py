"""The replacements for Hugging Face's Conv1D are its twins in all that models read of them."""

import pickle

import pytest
import torch
from torch import nn

from panther_compile.layers.linear import SketchedConv1D, SketchedLinear
from panther_compile.layers.narrow import NarrowConv1D, NarrowLinear

INPUTS, OUTPUTS = 12, 20


def dense_conv1d():
    return pytest.importorskip("transformers.pytorch_utils").Conv1D(OUTPUTS, INPUTS)


def sketched():
    return SketchedConv1D.from_dense(dense_conv1d(), rank=4)


def narrow():
    inner = SketchedLinear(INPUTS, 7, 3)
    return NarrowLinear.around(inner, dense_conv1d(), side="out", heads=1, padded=False)


class Reader(nn.Module):
    """Reads the layer's weight and sizes, and calls it."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x).to(self.layer.weight.dtype) + self.layer.weight.sum() * self.layer.nf


@pytest.mark.parametrize(("make", "kind"), [(sketched, SketchedConv1D), (narrow, NarrowConv1D)])
def test_twin_of_conv1d(make, kind, fresh_dynamo):
    model = Reader(make())
    layer, x = model.layer, torch.randn(5, INPUTS)
    assert type(layer) is kind
    assert layer.weight.shape == (layer.nx, layer.nf) == (INPUTS, OUTPUTS)
    wanted = model(x)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), wanted)
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="eager")(x), wanted)
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), wanted)
    dense = layer.to_dense()
    assert type(dense) is type(dense_conv1d())
    torch.testing.assert_close(dense(x)[:, : wanted.shape[1]], layer(x))
    torch.testing.assert_close(dense.weight, layer.weight + 0)
    assert layer.dense_numbers == sum(p.numel() for p in dense.parameters())
