"""Units of fully_shard and of activation checkpointing: even, exact, and as little in memory as promised."""

import copy

import pytest
import torch
import torch.nn.functional as F
import zoo
from parallel import sharding_jobs
from torch import nn

from panther_compile import partition_model
from panther_compile.errors import CaptureError, ParallelError
from panther_compile.parallel.activation_checkpointing import checkpoint_unit
from panther_compile.parallel.graph_units import divide_graph, graphs_within, unit_names
from panther_compile.parallel.units import find_module_units

DDP, FSDP = {"data_parallel": "ddp"}, {"data_parallel": "fsdp"}
SLOW = pytest.mark.slow


def test_units_are_blocks_of_the_module_tree():
    model, inputs = zoo.ZOO["llama"].build(), zoo.ZOO["llama"].inputs()
    part = partition_model(model, inputs, mesh={"dp": 2}, hardware="cpu")
    found = find_module_units(model, part.captured.graph_module)
    names = ["model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head"]
    assert [unit.name for unit in found] == names
    assert all(unit.is_whole and unit.is_repeatable for unit in found)


def test_shared_parameters_are_in_no_unit():
    """GPT-2's embedding is its head too: it stays with the model."""
    model, inputs = zoo.ZOO["gpt2"].build(), zoo.ZOO["gpt2"].inputs()
    part = partition_model(model, inputs, mesh={"dp": 2}, hardware="cpu")
    names = [unit.name for unit in find_module_units(model, part.captured.graph_module)]
    assert names == ["transformer.wpe", "transformer.h.0", "transformer.h.1"]


class Twice(nn.Module):
    """A module that runs twice, and one that writes what it is given."""

    def __init__(self):
        super().__init__()
        self.twice, self.writing, self.last = (
            nn.Linear(8, 8),
            nn.Sequential(nn.ReLU(True), nn.Linear(8, 8)),
            nn.Linear(8, 8),
        )

    def forward(self, x):
        return self.last(self.writing(self.twice(self.twice(x))))


def test_what_runs_twice_is_no_unit_and_what_writes_its_input_is_not_repeated():
    model = Twice()
    part = partition_model(model, torch.randn(2, 8), mesh={"dp": 2}, hardware="cpu")
    found = {
        unit.name: unit for unit in find_module_units(model, part.captured.graph_module, ["writing", "last"])
    }
    assert not found["writing"].is_repeatable
    assert found["last"].is_repeatable
    assert "twice" not in {unit.name for unit in find_module_units(model, part.captured.graph_module)}


class Halved(nn.Module):
    def forward(self, x):
        return x * 0.5


class Narrowed(nn.Module):
    """A narrow result, which selective checkpointing keeps, and something of it."""

    def __init__(self):
        super().__init__()
        self.down = nn.Linear(8, 4)

    def forward(self, x):
        z = self.down(x)
        return z, torch.tanh(z * 2.0)


class WrittenAfter(nn.Module):
    """What one module was given, and what another made, is written after it; no backward needs either."""

    def __init__(self):
        super().__init__()
        self.first, self.read = nn.Linear(8, 8), nn.Sequential(Halved(), nn.Linear(8, 8))
        self.made, self.last = Narrowed(), nn.Linear(4, 3)

    def forward(self, x):
        x = self.first(x)
        x += self.read(x)
        z, gate = self.made(x)
        z.view(-1).add_(1.0)
        return self.last(z * gate)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_what_others_write_after_a_module_is_not_repeated(mode):
    """Computed again, one ended in an error, and the other, selectively, in other gradients, unsaid."""
    torch.manual_seed(0)
    model, x = WrittenAfter().double(), torch.randn(5, 8, dtype=torch.float64)
    part = partition_model(model, x, mesh={"dp": 2}, hardware="cpu")
    names = ["first", "read", "made", "last"]
    found = find_module_units(model, part.captured.graph_module, names)
    assert [unit.is_repeatable for unit in found] == [False, False, False, True]
    again = copy.deepcopy(model)
    for unit in found:
        if unit.is_repeatable:
            checkpoint_unit(again.get_submodule(unit.name), mode)
    for one in (model, again):
        one(x).square().sum().backward()
    for wanted, one in zip(model.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(one.grad, wanted.grad)


class Follows(nn.Module):
    """Units, whose narrow result the parent writes: it is kept by selective checkpointing."""

    def __init__(self, write):
        super().__init__()
        self.units, self.last = nn.ModuleList([Narrowed(), Narrowed()]), nn.Linear(4, 3)
        self.write = write

    def forward(self, x):
        for unit in self.units:
            z, gate = unit(x)
            self.write(z)
            x = torch.cat([z, gate], -1)
        return self.last(z * gate)


def without_gradients(z):
    with torch.no_grad():
        z.add_(1.0)


@pytest.mark.parametrize(
    ("write", "is_seen"),
    [
        (lambda z: F.dropout(z, 0.0).add_(1.0), True),
        (lambda z: z.type_as(z).add_(1.0), True),
        (lambda z: torch._foreach_add_([z], 1.0), True),
        (lambda z: torch.add(z.detach(), 1.0, out=z.detach()), True),
        (without_gradients, False),  # a graph within the graph
    ],
)
def test_a_parent_that_writes_what_a_unit_gave(write, is_seen):
    """Such a unit is not repeated, and refused where the graph does not tell of it: gradients were others."""
    torch.manual_seed(0)
    model, x = Follows(write).double(), torch.randn(5, 8, dtype=torch.float64)
    part = partition_model(model, x, mesh={"dp": 2}, hardware="cpu")
    found = find_module_units(model, part.captured.graph_module, ["units.0", "units.1"])
    assert [unit.is_repeatable for unit in found] == [not is_seen] * 2
    for unit in found:
        checkpoint_unit(model.get_submodule(unit.name), "selective")
    with pytest.raises(ParallelError, match="a result that it keeps was written in place after its forward"):
        model(x).square().sum().backward()


def test_a_parent_that_writes_what_a_unit_was_given():
    torch.manual_seed(0)
    first, unit = nn.Linear(8, 8), nn.Sequential(Halved(), nn.Linear(8, 8))
    checkpoint_unit(unit, "full")
    x = first(torch.randn(5, 8))
    loss = unit(x).square().sum()
    without_gradients(x)
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    "name", ["gpt2", "unet", *(pytest.param(name, marks=SLOW) for name in ("resnet", "bert", "t5"))]
)
def test_a_divided_graph_is_exact_and_even(name):
    model, inputs = zoo.ZOO[name].build().train(), zoo.ZOO[name].inputs()
    part = partition_model(model, inputs, mesh={"dp": 2}, hardware="cpu")
    stage = part.split().stages[0]
    divided, own = divide_graph(stage, divide=True)
    assert not own
    assert len(unit_names(divided)) >= 6
    args, kwargs = (inputs, {}) if isinstance(inputs, tuple) else ((), inputs)
    flat = part.captured.form.flatten(args, kwargs)
    for found, wanted in zip(divided(*flat), stage(*flat), strict=True):
        assert torch.equal(found, wanted)
    held = [parameter for graph in graphs_within(divided) for parameter in graph.parameters()]
    assert {id(one) for one in held} == {id(one) for one in stage.parameters()}
    total = sum(map(_bytes, stage.parameters()))
    sizes = [sum(map(_bytes, divided.get_submodule(unit).parameters())) for unit in unit_names(divided)]
    largest = max(map(_bytes, stage.parameters()))
    assert max(sizes) <= max(total / 4, 1.1 * largest)
    seen = [id(one) for unit in unit_names(divided) for one in divided.get_submodule(unit).parameters()]
    assert len(seen) == len(set(seen))  # tied ones are outside


class Again(nn.Module):
    """Modules that torch.fx keeps whole, one called twice, and one whose weight is read as well."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))

    def forward(self, x):
        for place in (0, 1, 2, 1, 3, 4, 5, 6, 7):
            x = torch.tanh(self.layers[place](x))
        return x @ self.layers[6].weight


def test_a_module_that_is_called_twice_is_of_one_unit():
    x = torch.randn(2, 16)
    plan = partition_model(Again(), x, mesh={"pp": 1}, boundaries=["layers.0"], hardware="cpu")
    (stage,) = plan.split().stages
    divided, _ = divide_graph(stage, divide=True)
    assert torch.equal(divided(x)[0], stage(x)[0])
    assert len(unit_names(divided)) >= 3
    names = [name for name, _ in divided.named_parameters(remove_duplicate=False)]
    assert len(names) == len({id(one) for one in divided.parameters()}) == 16


def _bytes(tensor):
    return tensor.numel() * tensor.element_size()


class Fickle(nn.Module):
    """torch.export cannot read it, torch.fx can."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        y = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)
        return y + len(str(type(x)))


def test_what_a_route_cannot_keep_is_refused_by_name(monkeypatch):
    def fails(*args, **kwargs):
        raise ValueError("no")

    monkeypatch.setattr(torch.export, "export", fails)
    with pytest.raises(CaptureError, match=r"checkpoint of .*Linear.*, which torch.fx cannot keep"):
        partition_model(Fickle(), torch.randn(2, 4), mesh={"pp": 2}, hardware="cpu")


@pytest.mark.parametrize(("count", "mesh"), [(2, {"dp": 2}), pytest.param(4, {"dp": 2, "pp": 2}, marks=SLOW)])
def test_units_are_sharded_one_by_one(ranks, count, mesh):
    ranks(count).run(sharding_jobs.units_of, mesh=mesh)


@SLOW
def test_parameters_that_a_model_returns(ranks):
    """torch frees them behind the forward, and their gradient ended in a segmentation fault."""
    ranks(2).run(sharding_jobs.own_results)


def test_two_units_are_whole_at_once(ranks):
    """The peak of ZeRO-3 by blocks: two units, gradients of two, and not the whole model as with one unit."""
    by_blocks = ranks(2).run(sharding_jobs.peak, units=None)[0]
    at_once = ranks(2).run(sharding_jobs.peak, units=[])[0]
    assert at_once["peak"] > at_once["whole"]
    # Shards of parameters and gradients are there before and after; parts in flight are copied once each way.
    states = by_blocks["whole"] // 2 * 2
    assert by_blocks["peak"] <= states + 6 * by_blocks["block"], by_blocks
    assert by_blocks["peak"] < 0.6 * at_once["peak"], (by_blocks, at_once)


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (2, {"mesh": {"dp": 2}, **FSDP, "mode": "selective"}),
        pytest.param(2, {"mesh": {"pp": 2}, "mode": 0.4}, marks=SLOW),
        pytest.param(2, {"mesh": {"dp": 2}, **DDP, "mode": "full"}, marks=SLOW),
        pytest.param(2, {"mesh": {"pp": 2}, "mode": "full"}, marks=SLOW),
        pytest.param(2, {"mesh": {"pp": 2}, "mode": "selective"}, marks=SLOW),
        pytest.param(2, {"mesh": {"dp": 2}, **FSDP, "mode": 0.4}, marks=SLOW),
        pytest.param(2, {"mesh": {"tp": 2}, "mode": 0.4, "name": "gpt2"}, marks=SLOW),
        pytest.param(2, {"mesh": {"tp": 2}, "mode": "full"}, marks=SLOW),
        pytest.param(2, {"mesh": {"pp": 2}, "mode": "full", "name": "gpt2", "sketched": True}, marks=SLOW),
        pytest.param(4, {"mesh": {"dp": 2, "pp": 2}, **FSDP, "mode": "full", "name": "bert"}, marks=SLOW),
        pytest.param(4, {"mesh": {"dp": 2, "tp": 2}, **FSDP, "mode": "full", "name": "gpt2"}, marks=SLOW),
        pytest.param(4, {"mesh": {"pp": 2, "tp": 2}, "mode": "full", "name": "gpt2"}, marks=SLOW),
    ],
)
def test_activations_are_computed_again(ranks, count, options):
    ranks(count).run(sharding_jobs.recomputed, **options)


def test_the_plan_is_executed(ranks):
    ranks(2).run(sharding_jobs.recompute_of_the_plan)


@SLOW
def test_selective_checkpointing_keeps_the_bottleneck(ranks):
    ranks(2).run(sharding_jobs.sketches)


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (2, {"mesh": {"pp": 2}}),
        (2, {"mesh": {"tp": 2}}),
        (2, {"mesh": {"dp": 2}, **FSDP}),
        (4, {"mesh": {"dp": 2, "pp": 2}, **FSDP}),
    ],
)
@SLOW
def test_the_users_own_checkpoints_are_respected(ranks, count, options):
    ranks(count).run(sharding_jobs.users_own, **options)


@pytest.mark.slow
def test_hugging_face_checkpoints_are_respected(ranks):
    ranks(2).run(sharding_jobs.hugging_face)


@SLOW
@pytest.mark.parametrize(("count", "mesh"), [(2, {"dp": 2}), (4, {"dp": 2, "pp": 2})])
def test_policies_of_torch(ranks, count, mesh):
    ranks(count).run(sharding_jobs.policies, mesh=mesh)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "zero1", "zero2", "zero3"])
def test_replicas_share_what_the_plan_has_chosen(ranks, kind):
    ranks(2).run(sharding_jobs.plans_choice, kind=kind)


def test_optimizer_states_alone_are_divided(ranks, tmp_path):
    ranks(2).run(sharding_jobs.divided_states, folder=str(tmp_path))
