"""Reading a graph tells what it should and leaves the model as it was."""

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from panther_compile.layers.linear import SketchedLinear
from panther_compile.planning.trace import SketchTracer, clone_structure, read_graph, read_run


class Direct(nn.Module):
    """Uses one weight through its module, and another's by itself."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.other = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.fc(x) + F.linear(x, self.other.weight) * self.scale


class Branching(nn.Module):
    """Decides by values, which no trace can follow."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(x) if x.sum() > 0 else x


class Stateful(nn.Module):
    """Changes itself in forward, and draws random numbers."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.calls = 0
        self.seen = []
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.seen.append("call")
        self.count += 1
        return self.fc(x) + torch.randn(4)


def test_route_and_direct_reads_of_a_module():
    reading = read_graph(Direct())
    assert reading.route == "module tree, read through its fx graph"
    assert reading.direct == {"other.weight", "scale"}


class Asking(nn.Module):
    """Asks one weight for its type and shape, and gives another's values to a function."""

    def __init__(self):
        super().__init__()
        self.asked, self.given = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        weight = self.asked.weight
        x = self.asked(x.to(weight.dtype).to(device=weight.device)) * weight.size(0) * weight.shape[1]
        return self.given(x) @ self.given.weight


def test_asking_for_metadata_is_not_reading():
    for model in (Asking(), fx.symbolic_trace(Asking())):
        reading = read_graph(model)
        assert reading.direct == reading.opaque == {"given.weight"}


def test_what_a_functional_layer_reads_is_not_opaque():
    assert read_graph(Direct()).opaque == {"scale"}


def test_route_and_direct_reads_of_a_graph_module():
    reading = read_graph(fx.symbolic_trace(Direct()))
    assert reading.route == "fx graph"
    assert reading.direct == {"other.weight", "scale"}


def test_a_model_that_cannot_be_traced_says_why():
    reading = read_graph(Branching())
    assert reading.route.startswith("module tree (torch.fx cannot trace the model: TraceError:")
    assert len(reading.route) < 200
    assert reading.direct == frozenset()


def test_an_error_without_a_message():
    class Silent(nn.Module):
        def forward(self, x):
            raise ValueError

    assert read_graph(Silent()).route == "module tree (torch.fx cannot trace the model: ValueError: )"


@pytest.mark.parametrize(
    "layer", [nn.Linear(4, 4), nn.Embedding(4, 4), nn.Conv2d(2, 2, 3), SketchedLinear(4, 4, 2)]
)
def test_a_layer_by_itself_reads_nothing_directly(layer):
    assert read_graph(layer).route == "module tree"
    assert read_graph(layer).direct == frozenset()


def test_a_container_of_torch_by_itself_is_read_through():
    assert read_graph(nn.Sequential(nn.Linear(4, 4))).route == "module tree, read through its fx graph"


def test_the_model_is_left_as_it_was():
    model = Stateful()
    before, rng = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    parameters = list(model.parameters())
    read_graph(model)
    assert (model.calls, model.seen) == (0, [])
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert torch.equal(torch.get_rng_state(), rng)


def test_parameters_of_any_kind_are_read():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.codes = nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False)
            self.short = nn.Parameter(torch.zeros(3, dtype=torch.float16))

        def forward(self, x):
            return x + self.codes + self.short

    assert read_graph(Odd()).direct == {"codes", "short"}


def test_tracer_keeps_sketched_layers_whole():
    model = nn.Sequential(SketchedLinear(4, 4, 2), nn.ReLU())
    graph = SketchTracer().trace(model)
    assert [node.target for node in graph.nodes if node.op == "call_module"] == ["0", "1"]


def test_clone_structure_shares_tensors_and_nothing_else():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    clone = clone_structure(model)
    assert clone is not model
    assert clone[0] is not model[0]
    pairs = zip(
        model.state_dict(keep_vars=True).values(), clone.state_dict(keep_vars=True).values(), strict=True
    )
    assert all(a is b for a, b in pairs)
    clone[0] = nn.ReLU()
    assert type(model[0]) is nn.Linear


def test_clone_structure_of_a_graph_runs():
    traced = fx.symbolic_trace(Direct())
    clone, x = clone_structure(traced), torch.randn(2, 4)
    assert clone.graph is not traced.graph
    assert torch.equal(clone(x), traced(x))


class Reads(nn.Module):
    """Reads one weight and never calls its layer, one that it calls too, and of others only what they are."""

    def __init__(self):
        super().__init__()
        self.read, self.both, self.asked, self.unused = (nn.Linear(4, 4) for _ in range(4))
        self.tied = nn.Linear(4, 4)
        self.user = nn.Linear(4, 4)
        self.user.weight = self.tied.weight
        self.attention = nn.MultiheadAttention(4, 2)

    def forward(self, x):
        x = self.both(x.to(self.asked.weight.dtype)) @ self.both.weight
        x = self.user(x @ self.read.weight.T)
        return self.attention(x, x, x)[0]


def test_a_run_tells_which_weights_are_read_of_layers_that_are_not_called():
    model, x = Reads().eval(), torch.randn(2, 4)
    assert read_run(model, lambda given: given(x)) == {"read.weight"}


def test_a_run_of_fast_paths_reads_nothing_itself():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    assert read_run(model, lambda given: given(torch.randn(2, 3, 8))) == frozenset()
