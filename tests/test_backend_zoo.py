"""torch.compile(model, backend="panther") on the zoo."""

import shutil

import pytest
import torch
from compiled import close, graphs
from torch import nn
from torch._dynamo.utils import counters
from zoo import ZOO, call, names

import panther_compile as pc

FAST = ("mixer", "tied_autoencoder", "odd_convnet")
HAS_COMPILER = shutil.which("g++") or shutil.which("clang++")


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def case_of(name, *slow):
    return pytest.param(name, marks=[] if name in FAST and name not in slow else pytest.mark.slow)


@pytest.mark.parametrize("name", [case_of(name, "mixer") for name in names()])
def test_zoo_sketched(name):
    """The same outputs as in eager, in as many graphs as the dense model."""
    entry = ZOO[name]
    model, inputs = entry.build(), entry.inputs()
    small = pc.sketchify(model, 0.5, min_params=256, allow_slower=True, progress=False)
    with torch.no_grad():
        call(torch.compile(model, backend="eager"), inputs)
        dense_graphs, dense_breaks = graphs(), sum(counters["graph_break"].values())
        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(small, backend="panther", options={"inner": "eager"})
        close(call(compiled, inputs), call(small, inputs))
        call(compiled, inputs)
    if dense_graphs:  # else Dynamo gave the model up, and compiles what it can of our layers alone
        assert (graphs(), sum(counters["graph_break"].values())) == (dense_graphs, dense_breaks)


# Its router is a parameter, so no layer to `sketchify`, and full in rank; the graph shows that it is one.
ROUTED = {"mixtral"}


@pytest.mark.parametrize("name", [case_of(name, "odd_convnet") for name in names() if name not in ROUTED])
def test_zoo_dense(name):
    """A model whose weights have low ranks is sketched exactly."""
    entry = ZOO[name]
    options = {"min_params": 256, "allow_slower": True}
    model = entry.build()
    if any(isinstance(module, nn.Conv2d) for module in model.modules()):
        options["exclude"] = nn.Conv2d  # of low rank in another scheme, maybe
    try:
        model = pc.densify(pc.sketchify(model, 0.25, progress=False, **options))
    except pc.PantherError:
        pytest.skip("nothing but convolutions")
    inputs = entry.inputs()
    with torch.no_grad():
        compiled = torch.compile(model, backend="panther", options={"inner": "eager", "ratio": 0.6} | options)
        close(call(compiled, inputs), call(model, inputs))


@pytest.mark.slow
@pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler")
@pytest.mark.parametrize("name", ["mixer", "odd_convnet"])
def test_zoo_with_inductor(name):
    entry = ZOO[name]
    small = pc.sketchify(entry.build(), 0.5, min_params=256, allow_slower=True, progress=False)
    inputs = entry.inputs()
    with torch.no_grad():
        close(call(torch.compile(small, backend="panther"), inputs), call(small, inputs))
