"""NarrowLinear stands for a dense layer with zeros for what it leaves out."""

import copy

import pytest
import torch
from torch import nn

from panther_compile.errors import ConfigError, FactoredWeightError, RankError
from panther_compile.layers.linear import SketchedLinear
from panther_compile.layers.narrow import NarrowLinear

torch.manual_seed(0)


def narrow(side="out", *, heads=1, padded=False, rank=None, bias=True) -> NarrowLinear:
    inputs, outputs, kept = 12, 20, 3 if heads > 1 else 7
    shape = (inputs, heads * kept) if side == "out" else (heads * kept, outputs)
    factors = SketchedLinear(*shape, rank, bias=bias).sketch_spec() if rank else None
    return NarrowLinear(
        inputs, outputs, kept, side=side, heads=heads, padded=padded, bias=bias, factors=factors
    )


KINDS = [
    {},
    {"rank": 4},
    {"bias": False},
    {"heads": 4, "padded": True},
    {"heads": 2, "padded": True, "rank": 3},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("side", ["out", "in"])
def test_forward_is_that_of_the_dense_layer_at_what_is_kept(side, kind):
    layer = narrow(side, **kind)
    dense = layer.to_dense()
    assert type(dense) is nn.Linear
    assert dense.weight.shape == layer.weight.shape == (20, 12)
    torch.testing.assert_close(dense.weight, layer.weight + 0)
    width = (20 if side == "out" else 12) // layer.heads
    keep = torch.arange(layer.heads)[:, None] * width + torch.arange(layer.kept)
    x = torch.randn(2, 5, 12)
    if side == "out":
        wanted = dense(x)
        torch.testing.assert_close(layer(x), wanted if layer.padded else wanted[..., keep.flatten()])
        lost = torch.ones(20, dtype=torch.bool)
        lost[keep.flatten()] = False
        assert wanted[..., lost].count_nonzero() == 0
    else:
        given = x if layer.padded else x[..., keep.flatten()]
        torch.testing.assert_close(layer(given), dense(x))
        torch.testing.assert_close(layer(given), dense(x + torch.eye(12)[_lost(keep)].sum(0)))


def _lost(keep):
    lost = torch.ones(12, dtype=torch.bool)
    lost[keep.flatten()] = False
    return lost


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("side", ["out", "in"])
def test_spec_makes_the_same_layer(side, kind):
    layer = narrow(side, **kind)
    twin = NarrowLinear(**layer.sketch_spec())
    twin.load_state_dict(layer.state_dict())
    x = torch.randn(3, layer.narrow.in_features if side == "in" and not layer.padded else 12)
    assert torch.equal(twin(x), layer(x))
    assert twin.ranks == layer.ranks
    held = [*layer.parameters(), *layer.buffers()]
    assert layer.stored_numbers == sum(tensor.numel() for tensor in held)
    assert layer.dense_numbers == 20 * (12 + (layer.bias is not None))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("rank", [None, 3])
@pytest.mark.parametrize("wide", [False, True])
def test_traces_of_two_layers_of_which_the_second_may_be_given_all_features(wide, rank):
    """What is traced reads the places of the features, as the layers do."""
    first, second = narrow("out", rank=rank), NarrowLinear(20, 6, 7, side="in")
    first = NarrowLinear(**first.sketch_spec() | {"wide": wide})
    model = nn.Sequential(first, nn.ReLU(), second)
    x = torch.randn(5, 12)
    traced = torch.jit.trace(model, x[:2])
    torch.testing.assert_close(traced(x), model(x))
    graph = torch.fx.symbolic_trace(model)
    assert torch.equal(graph(x), model(x))
    assert [node.target for node in graph.graph.nodes if node.op == "call_module"] == ["0", "1", "2"]


@pytest.mark.parametrize("kind", [{}, {"heads": 4, "padded": True}], ids=str)
def test_writes_to_the_bias_are_kept_or_refused(kind):
    """Zeros stand for what is not written: the dense layer's bias is made when it is read."""
    reader, writer = narrow("in", **kind), narrow("out", **kind)
    torch.nn.init.ones_(reader.bias)
    assert (reader.narrow.bias == 1).all()
    assert torch.equal(writer.bias + 0, writer.to_dense().bias)
    assert torch.equal(
        torch.autograd.grad(writer.bias.sum(), writer.narrow.bias)[0], torch.ones(3 * 4 if kind else 7)
    )
    for write in (torch.nn.init.ones_, lambda bias: bias.data.fill_(1.0)):
        with pytest.raises(FactoredWeightError, match="would be lost"):
            write(writer.bias)


def test_averages_over_state_dicts_leave_places_alone():
    """As timm's ModelEmaV2 makes them, of whole numbers too."""
    decay = 0.9999
    layer = NarrowLinear(80, 20, 40, side="in")
    layer.places = torch.arange(1, 80, 2, dtype=torch.int32)
    average = copy.deepcopy(layer)
    for _ in range(3):
        pairs = zip(average.state_dict().values(), layer.state_dict().values(), strict=True)
        for mean, now in pairs:
            mean.copy_(decay * mean + (1.0 - decay) * now)
    assert torch.equal(average.places, layer.places)
    with torch.no_grad():
        layer.narrow.weight.zero_()
    for mean, now in zip(average.state_dict().values(), layer.state_dict().values(), strict=True):
        mean.copy_(now)
    assert average.narrow.weight.count_nonzero() == 0
    layer.places = layer.places.flip(0)
    average.load_state_dict(layer.state_dict())
    assert torch.equal(average.places, layer.places)


@pytest.mark.parametrize("side", ["out", "in"])
def test_gradients_reach_every_parameter(side):
    layer = narrow(side, heads=4, padded=True, rank=2)
    layer(torch.randn(3, 12)).square().sum().backward()
    assert all(bool(p.grad.abs().sum() > 0) for p in layer.parameters())


def test_bad_arguments():
    with pytest.raises(ConfigError, match="side='up', wanted one of"):
        NarrowLinear(12, 20, 3, side="up")
    with pytest.raises(ConfigError, match="heads=3, wanted a divisor of 20"):
        NarrowLinear(12, 20, 3, side="out", heads=3)
    with pytest.raises(RankError, match=r"1\.\.5"):
        NarrowLinear(12, 20, 6, side="out", heads=4)
    with pytest.raises(ConfigError, match="wanted those of a layer"):
        NarrowLinear(12, 20, 7, side="out", factors=SketchedLinear(12, 8, 2).sketch_spec())
