"""`sketchify` on graphs, and its results handed to tracers, compilers and wrappers."""

import copy
import gc
import threading

import pytest
import torch
import torch.nn.functional as F
from any_model.sketching import OPTIONS, assert_close, low_rank_, mlp, sketch
from torch import fx, nn

import panther_compile as pc


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(48, 48) / 7)
        self.b = nn.Parameter(torch.randn(48))
        self.kernel = nn.Parameter(torch.randn(16, 3, 3, 3) / 5)
        self.fc = nn.Linear(48, 48)
        self.tail = nn.Linear(48, 48)

    def forward(self, x, image):
        x = F.relu(F.linear(x, self.w, self.b))
        image = F.conv2d(image, self.kernel, None, 2, 1)
        return self.tail(self.fc(x)), image


def functional_inputs():
    return torch.randn(2, 48), torch.randn(2, 3, 8, 8)


def graph_state(graph):
    return graph.code, list(graph.state_dict()), [id(p) for p in graph.parameters()]


def test_graph_module_has_its_functional_calls_sketched():
    model = low_rank_(Functional())
    x = functional_inputs()
    graph = fx.symbolic_trace(model)
    before = graph_state(graph)
    small = sketch(graph, 0.9)
    assert graph_state(graph) == before
    assert isinstance(small, fx.GraphModule)
    kinds = {type(m) for m in small.modules()}
    assert {pc.SketchedLinear, pc.SketchedConv2d} <= kinds
    assert not any(isinstance(m, nn.Linear) and m.weight.shape == (48, 48) for m in small.modules())
    for found, wanted in zip(small(*x), model(*x), strict=True):
        assert_close(found, wanted)
    assert pc.sketch_report(small).achieved_ratio <= 0.9
    assert {p.data_ptr() for p in graph.parameters()}.isdisjoint(p.data_ptr() for p in small.parameters())


def test_graph_module_in_place():
    model = low_rank_(Functional())
    x = functional_inputs()
    wanted = model(*x)
    graph = fx.symbolic_trace(model)
    small = sketch(graph, 0.9, inplace=True)
    assert small is graph
    assert any(isinstance(m, pc.SketchedLinear) for m in graph.modules())
    for found, dense in zip(graph(*x), wanted, strict=True):
        assert_close(found, dense)


def test_graph_module_with_immutable_notes_in_place():
    graph = fx.symbolic_trace(Functional())
    graph.meta["notes"] = fx.immutable_collections.immutable_list([1, 2])
    assert sketch(graph, inplace=True) is graph


@pytest.mark.parametrize(
    "options", [{"include": "nothing"}, {"ratio": 1e-5}, {"include": lambda module, name: False}]
)
@pytest.mark.parametrize("inplace", [False, True])
def test_graph_module_is_unchanged_by_a_failure(options, inplace):
    graph = fx.symbolic_trace(Functional())
    before = graph_state(graph)
    with pytest.raises(pc.PantherError):
        pc.sketchify(graph, **{"ratio": 0.5, **OPTIONS, **options}, inplace=inplace)
    assert graph_state(graph) == before


def test_graph_module_with_a_bad_weight_is_unchanged_in_place():
    graph = fx.symbolic_trace(Functional())
    graph.w.data[0, 0] = torch.nan
    before = graph_state(graph)
    with pytest.raises(pc.PantherError, match=r"NaN or Inf"):
        sketch(graph, inplace=True)
    assert graph_state(graph) == before


def test_names_of_layers_are_those_of_the_plain_module():
    model = mlp(48, 3)
    plain, graph = sketch(model), sketch(fx.symbolic_trace(model))
    assert list(plain.state_dict()) == list(graph.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), graph.parameters(), strict=True))


@pytest.mark.parametrize("as_module", [False, True])
def test_exported_program_is_sketched(as_module):
    model = low_rank_(Functional())
    x = functional_inputs()
    program = torch.export.export(model, x)
    before = {name: t.clone() for name, t in program.state_dict.items()}
    small = sketch(program.module() if as_module else program, 0.9)
    assert isinstance(small, fx.GraphModule)
    kinds = {type(m) for m in small.modules()}
    assert {pc.SketchedLinear, pc.SketchedConv2d} <= kinds
    for found, wanted in zip(small(*x), model(*x), strict=True):
        assert_close(found, wanted)
    assert list(program.state_dict) == list(before)
    assert all(torch.equal(program.state_dict[name], t) for name, t in before.items())
    again = torch.export.export(small, x).module()
    assert_close(again(*x)[0], small(*x)[0])


def test_plan_of_an_exported_program():
    plan = pc.plan_sketch(torch.export.export(mlp(), (torch.randn(2, 48),)), 0.5, **OPTIONS)
    assert plan.route == "torch.export graph"


class Pipeline(nn.Module):
    """Linear, convolution and attention, in a forward that can be traced."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 32, 3, padding=1)
        self.norm = nn.LayerNorm(32)
        self.fc = nn.Linear(32, 64)
        self.head = nn.Linear(64, 48)

    def forward(self, image):
        x = self.norm(self.conv(image).flatten(2).transpose(1, 2))
        return self.head(F.gelu(self.fc(x)))


@pytest.fixture(scope="module")
def pipeline():
    torch.manual_seed(0)
    small = pc.sketchify(Pipeline().eval(), 0.6, include="*", **OPTIONS)
    return small, torch.randn(2, 3, 6, 6)


def test_result_is_traced_by_the_default_tracer(pipeline):
    small, x = pipeline
    assert torch.equal(fx.symbolic_trace(small)(x), small(x))


def test_result_is_exported(pipeline):
    small, x = pipeline
    dynamic = ({0: torch.export.Dim("batch")},)
    program = torch.export.export(small, (x,), dynamic_shapes=dynamic)
    assert_close(program.module()(x.repeat(3, 1, 1, 1)), small(x.repeat(3, 1, 1, 1)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_result_is_traced_by_jit(pipeline):
    small, x = pipeline
    assert_close(torch.jit.trace(small, (x,))(x), small(x))


@pytest.mark.slow
def test_result_is_compiled(pipeline):
    small, x = pipeline
    torch._dynamo.reset()
    compiled = torch.compile(small, backend="aot_eager", fullgraph=True)
    assert_close(compiled(x), small(x))
    compiled(x).sum().backward()
    assert all(p.grad is not None for p in small.parameters())
    small.zero_grad()


def test_result_is_wrapped_in_ddp(pipeline, tmp_path):
    small, x = pipeline
    small = copy.deepcopy(small)
    meeting = f"file://{tmp_path / 'meeting'}"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(small)
        wrapped(x).sum().backward()
        assert all(p.grad is not None for p in small.parameters())
        # What is left of it after the group would end the group's thread, which may be waiting for us.
        del wrapped
        gc.collect()
    finally:
        torch.distributed.destroy_process_group()


def test_result_is_sketched_with_locks_in_place():
    model = mlp()
    model.lock = threading.Lock()
    assert sketch(model, inplace=True)(torch.randn(1, 48)).shape == (1, 48)
