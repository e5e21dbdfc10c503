"""Graphs of models that are hard to read, and what the notes and the flow graph say of easy ones."""

import copy

import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import nn

from panther_compile import partition_model
from panther_compile.errors import CaptureError
from panther_compile.partition.graph.capture import capture, example_arguments
from panther_compile.partition.graph.flow import SINK, SOURCE
from panther_compile.partition.graph.flow_graph import Costs, build_flow_graph, find_constants
from panther_compile.partition.graph.hardware import CPU
from panther_compile.partition.graph.measure import Measured, measure_nodes
from panther_compile.partition.graph.observe import fold_shapes, observe


def read(model, *args, boundaries=(), training=True, together=(), **kwargs):
    captured = capture(model, args, kwargs, boundaries)
    notes = observe(captured)
    fold_shapes(captured, notes)
    flow = build_flow_graph(captured, notes, Costs(CPU, training=training), together=together)
    return captured, notes, flow


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x, *, add=None):
        left, right = self.first(x).chunk(2, dim=-1)
        positions = torch.arange(8, dtype=x.dtype, device=x.device) / 8
        h = torch.cat([left * positions, right], dim=-1)
        y = self.second(F.relu(h)) * self.scale + x
        return {"y": y, "kept": left, "constant": 3, "added": y if add is None else y + add}


def test_flow_graph_of_branches():
    captured, notes, flow = read(Branches(), torch.randn(4, 8), add=torch.randn(8))
    assert captured.route == "torch.export"
    assert set(flow.work) == {name for name in flow.graph if name not in (SOURCE, SINK)}
    # The tuple of chunk stays with its parts; positions are computed by every stage.
    (chunked,) = (nodes for nodes in flow.members.values() if len(nodes) > 1)
    assert len(chunked) == 3
    assert [node.name for node in find_constants(captured, notes)] == ["arange", "div"]
    sizes = {value.name: value.bytes for value in flow.values}
    assert sizes["x"] == 4 * 8 * 4
    skip = next(value for value in flow.values if value.name == "x")
    assert len(skip.consumers) == 2
    assert skip.gradient_bytes == 0
    held = {holding.name: holding for holding in flow.holdings}
    assert held["first.weight"].bytes == 8 * 16 * 4
    assert held["first.weight"].trained_bytes == 8 * 16 * (4 + 8)
    assert held["scale"].trained_bytes == 0
    first = flow.work[held["first.weight"].vertices[0]]
    assert first.backward_seconds > 0
    assert first.saved_bytes == 4 * 8 * 4


def test_inference_has_no_backward():
    _, _, flow = read(Branches(), torch.randn(4, 8), training=False)
    assert all(work.backward_seconds == 0 and work.saved_bytes == 0 for work in flow.work.values())
    assert all(value.gradient_bytes == 0 for value in flow.values)
    assert all(holding.trained_bytes == 0 for holding in flow.holdings)


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        h = self.layers[0](x)
        view = h.view(-1)
        other = self.layers[1](h)
        view.mul_(2.0)
        return self.layers[2](h) + other


def test_what_is_written_in_place_stays_together():
    _, notes, flow = read(InPlace().requires_grad_(False), torch.randn(2, 8))
    written = next(node for node, note in notes.items() if note.writes)
    group = next(nodes for nodes in flow.members.values() if written.name in nodes)
    assert {"linear", "linear_1", "linear_2", written.name} <= set(group)


class Returning(nn.Module):
    """Gives back a weight of its first layer, and a buffer that it writes there."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x):
        self.seen.add_(x.mean(0))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x, self.layers[0].weight, self.seen


def test_tensors_of_the_model_that_it_returns_are_of_a_stage():
    model, x = Returning(), torch.randn(2, 8)
    part = partition_model(model, x, mesh={"pp": 2}, hardware="cpu", tied="shared")
    staged = part.split()
    held = [dict(stage.named_parameters()) for stage in staged.stages]
    assert [set(one) for one in held] == [set(stage.parameters) for stage in part.stages]
    assert all("layers.0.weight" in held[stage] for one in part.shared for stage in one.stages)
    _, weight, seen = staged(x)
    assert torch.equal(weight, model.layers[0].weight)
    assert torch.equal(seen, x.mean(0))
    staged(x)  # as a pipeline does while the result is still to be sent
    assert torch.equal(seen, x.mean(0))
    assert sum("seen" in stage.state_dict() for stage in staged.stages) == 1


class Pooling(nn.Module):
    """What nobody reads: a pooler, and what draws random numbers or writes statistics before it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.pooler, self.norm, self.dropout = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
            torch.tanh(self.pooler(x))
            self.norm(x), self.dropout(x)
        return self.dropout(x)


def test_what_nobody_reads_is_left_out():
    """No stage holds it; random numbers and statistics of batches stay those of the model."""
    model, x = Pooling(), torch.randn(16, 8)
    part = partition_model(model, x, mesh={"pp": 2}, hardware="cpu")
    assert {"pooler.weight", "pooler.bias"} <= set(part.unused)
    assert not {one.name for one in part.shared} & {"pooler.weight", "pooler.bias"}
    staged, reference = part.split(), copy.deepcopy(model)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        wanted = reference(x)
        torch.manual_seed(0)
        assert torch.equal(staged(x), wanted)
    assert torch.equal(model.norm.running_mean, reference.norm.running_mean)
    assert model.norm.running_mean.any()


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.graph = nn.Linear(8, 8)

    def forward(self, x):
        return self.graph(x)


def test_names_that_a_graph_module_has_are_refused():
    with pytest.raises(CaptureError, match=r"(?s)no graph of Named.*as child module 'graph'"):
        capture(Named(), (torch.randn(2, 8),), {})


class Whole(nn.Module):
    """Control flow on values in a part, shapes as numbers around it."""

    def __init__(self):
        super().__init__()
        self.before = nn.Linear(32, 32)
        self.body = zoo.handwritten.EarlyExit()
        self.after = nn.Linear(8, 8)

    def forward(self, x):
        batch, _ = x.shape
        logits, ran = self.body(torch.relu(self.before(x)))
        return self.after(logits.view(batch, 8)).reshape(x.size(0), -1), ran


def test_a_part_without_a_graph_is_kept_whole():
    model, x = Whole().eval(), torch.randn(4, 32)
    with pytest.raises(
        CaptureError, match=r"(?s)no graph of Whole.*if logits\.softmax.*boundaries="
    ) as caught:
        capture(model, (x,), {})
    assert "torch.export: GuardOnDataDependentSymNode" in str(caught.value)
    captured, _, flow = read(model, x, boundaries=["body"])
    assert captured.route == "torch.fx, boundaries kept whole"
    assert all(node.target not in ("size", "shape", getattr) for node in captured.graph_module.graph.nodes)
    assert [len(nodes) for vertex, nodes in flow.members.items() if "body" in nodes] == [3]
    torch.testing.assert_close(captured.graph_module(x)[0], model(x)[0])


class Labelled(nn.Module):
    """Ids and labels, which may be the same tensor in an example."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(8, 8), nn.Linear(8, 8)

    def forward(self, ids, labels=None):
        return F.cross_entropy(self.head(self.table(ids)).flatten(0, 1), labels.flatten())


def test_a_tensor_that_is_given_twice_is_two_inputs():
    model, ids, labels = Labelled(), torch.randint(8, (4, 6)), torch.randint(8, (4, 6))
    part = partition_model(model, {"ids": ids, "labels": ids}, mesh={"pp": 2}, hardware="cpu")
    torch.testing.assert_close(part.split()(ids, labels), model(ids, labels))
    x = torch.randn(2, 8, requires_grad=True)
    example = capture(nn.Bilinear(8, 8, 4), (x, x), {}).example
    assert [one.requires_grad for one in example] == [True, True]


class Mapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return torch.func.vmap(lambda row: self.layer(row) * row.sum())(x)


def test_transforms_of_torch_func_are_kept_whole():
    """A graph that stopped within a vmap left torch there: no random number could be drawn any more."""
    model, x = nn.Sequential(nn.Linear(8, 8), Mapped(), nn.Linear(8, 8)), torch.randn(4, 8)
    with pytest.raises(
        CaptureError, match=r"torch\.export: .* vmap or jvp of torch\.func, the inside of which"
    ):
        partition_model(model, x, mesh={"pp": 2}, hardware="cpu")
    torch.randn(3)
    part = partition_model(model, x, mesh={"pp": 2}, boundaries=["1"], hardware="cpu")
    torch.testing.assert_close(part.split()(x), model(x))


def test_unknown_boundaries_and_wrong_inputs_are_named():
    with pytest.raises(CaptureError, match=r"\['nowhere'\].*before, body"):
        capture(Whole(), (torch.randn(4, 32),), {}, ["nowhere"])
    with pytest.raises(CaptureError, match=r"do not fit Whole\.forward: too many positional"):
        capture(Whole(), (torch.randn(4, 32), 1, 2), {})


def test_caches_are_left_out():
    entry = zoo.ZOO["gpt2"]
    captured = capture(entry.build(), *example_arguments(entry.inputs()))
    assert captured.form.extra == {"use_cache": False}


def test_call_form_takes_positions_and_keywords_alike():
    captured = capture(Branches(), (torch.randn(4, 8),), {"add": torch.randn(8)})
    x, add = torch.randn(4, 8), torch.randn(8)
    by_position = captured.form.flatten((x,), {"add": add})
    by_name = captured.form.flatten((), {"add": add, "x": x})
    assert [id(t) for t in by_position] == [id(t) for t in by_name] == [id(x), id(add)]
    with pytest.raises(CaptureError, match="partitioned for the example"):
        captured.form.flatten((x,), {})
    result = captured.form.unflatten(captured.graph_module(x, add))
    assert result["constant"] == 3
    assert set(result) == {"y", "kept", "constant", "added"}


def test_meta_models_are_read():
    with torch.device("meta"):
        model, x = Branches(), torch.randn(4, 8)
    meta = read(model, x)[2]
    real = read(Branches(), torch.randn(4, 8))[2]
    assert [work.forward_seconds for work in meta.work.values()] == pytest.approx(
        [work.forward_seconds for work in real.work.values()]
    )


def test_measured_seconds_replace_estimates():
    captured = capture(Branches(), (torch.randn(4, 8),), {})
    measured = measure_nodes(captured, repeats=2).forward
    notes = observe(captured)
    flow = build_flow_graph(captured, notes, Costs(CPU, measured=Measured(dict.fromkeys(measured, 0.5))))
    assert min(measured.values()) >= 0
    assert sum(measured.values()) > 0
    assert {work.forward_seconds / len(flow.members[v]) for v, work in flow.work.items()} == {0.5}


def test_the_model_is_left_alone():
    model = Branches().eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    versions = [tensor._version for tensor in model.parameters()]
    captured = capture(model, (torch.randn(4, 8),), {})
    observe(captured)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert versions == [tensor._version for tensor in model.parameters()]
    assert not model.training
