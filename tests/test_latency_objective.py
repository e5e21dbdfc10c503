"""objective="latency": what is timed, and what the times decide. Only one test here reads a real clock."""

from functools import partial
from itertools import chain, repeat

import pytest
import torch
from torch import nn
from zoo import ZOO, call

import panther_compile as pc
from panther_compile.config import SketchConfig
from panther_compile.errors import ConfigError, ConfigTypeError, DataError, NoTargetError, WeightError
from panther_compile.planning import timing
from panther_compile.planning.plan import PAYS
from panther_compile.planning.timing import side_by_side, time_sites
from panther_compile.records import RECORD_ATTRIBUTE, WholeTimes

LATENCY = {"objective": "latency", "min_params": 512, "progress": False}


class FakeTimer:
    """Says how fast sketches are, and keeps what it was asked."""

    def __init__(self, speedup):
        self.speedup = speedup
        self.asked = []

    def __call__(self, dense, sketched, x):
        with torch.inference_mode():
            assert dense(x).shape == sketched(x).shape
        assert not dense.training
        self.asked.append((dense, sketched, x))
        return self.speedup(dense, sketched, x), 1.0

    @property
    def shapes(self):
        return [tuple(x.shape) for _, _, x in self.asked]


@pytest.fixture
def fake(monkeypatch):
    """Has sketches be as fast as a function of (dense, sketched, input) says, and whole models gain."""

    def install(speedup, whole=2.0):
        timer = FakeTimer(speedup)
        both = partial(time_sites, timer=timer, model_timer=lambda *_: WholeTimes((whole,), (1.0,)))
        monkeypatch.setattr("panther_compile.sketching.time_sites", both)
        return timer

    return install


def mlp():
    """Four layers; the third alone has its shape, and a spectrum that leaves more budget to the rest."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 160), nn.Linear(160, 160)
    ).eval()
    with torch.no_grad():
        model[4].weight[:, 8:] *= 0.001
    return model


def lines(plan):
    return {line.name: line for line in plan.layers}


def plan_of(small):
    """The plan that was carried out."""
    return vars(small)[RECORD_ATTRIBUTE].plan


def expands(dense):
    """Whether this is the layer of another shape."""
    return dense.weight.shape == (160, 96)


# --------------------------------------------------------------------------------------- the decisions


def test_a_layer_whose_sketch_does_not_pay_stays_dense_and_says_so(fake):
    fake(lambda dense, _, x: 0.87 if expands(dense) else 1.8)
    model, x = mlp(), torch.randn(8, 5, 96)
    plan = pc.plan_sketch(model, example_inputs=x, **LATENCY)
    found = lines(plan)
    assert found["4"].choice is None
    assert found["4"].reason == "measured here: its sketch ran at 0.87 of the dense speed on (8, 5, 96)"
    assert [found[name].reason for name in ("0", "2", "5")] == ["measured 1.80x"] * 3
    small = pc.sketchify(model, example_inputs=x, **LATENCY)
    assert type(small[4]) is nn.Linear
    assert {type(small[i]) for i in (0, 2, 5)} == {pc.SketchedLinear}
    assert plan_of(small) == plan


def test_what_stays_dense_leaves_the_budget(fake):
    model, x = mlp(), torch.randn(8, 96)
    fake(lambda dense, _, x: 0.5 if expands(dense) else 2.0)
    timed = pc.plan_sketch(model, example_inputs=x, **LATENCY)
    without = pc.plan_sketch(model, min_params=512, exclude="4", progress=False)
    chosen = {line.name: line.choice for line in timed.layers}
    assert chosen == {line.name: line.choice for line in without.layers}
    assert 0.49 < timed.achieved_ratio <= 0.5
    whole = pc.plan_sketch(model, min_params=512, progress=False)
    assert chosen["5"] != lines(whole)["5"].choice  # else leaving the budget would not show


def test_planning_goes_on_until_all_that_is_left_pays(fake):
    """The layers that are left get other ranks, which are timed in turn; here one of them does not pay."""
    model, x = mlp(), torch.randn(8, 96)
    first = lines(pc.plan_sketch(model, min_params=512, progress=False))["5"].choice

    def speedup(dense, sketched, x):
        moved = dense.weight.shape == (160, 160) and sketched.ranks != first.ranks
        return 0.5 if expands(dense) or moved else 2.0

    timer = fake(speedup)
    plan = pc.plan_sketch(model, example_inputs=x, **LATENCY)
    assert [line.name for line in plan.sketched] == ["0", "2"]
    ranks = [sketched.ranks for dense, sketched, _ in timer.asked if dense.weight.shape == (160, 160)]
    assert ranks[0] == first.ranks
    assert len(ranks) == 2
    assert 0.49 < plan.achieved_ratio <= 0.5


@pytest.mark.parametrize(("speedup", "sketched"), [(PAYS, True), (PAYS - 1e-6, False)])
def test_the_margin(fake, speedup, sketched):
    fake(lambda dense, *_: 3.0 if expands(dense) else speedup)
    plan = pc.plan_sketch(mlp(), example_inputs=torch.randn(8, 96), **LATENCY)
    assert lines(plan)["0"].choice is not None if sketched else lines(plan)["0"].choice is None
    assert lines(plan)["4"].choice is not None


def test_a_small_gain_is_measured_twice(fake):
    """The smaller one counts."""
    readings = chain([1.2, 1.01], repeat(3.0))
    timer = fake(lambda *_: next(readings))
    plan = pc.plan_sketch(
        nn.Sequential(nn.Linear(96, 96), nn.Linear(96, 128), nn.Linear(128, 10)),
        example_inputs=torch.randn(8, 96),
        **LATENCY,
    )
    assert "at 1.01 of the dense speed" in lines(plan)["0"].reason
    assert lines(plan)["1"].reason == "measured 3.00x"
    assert timer.asked[0][:2] == timer.asked[1][:2]


def test_nothing_that_pays_lists_what_was_measured(fake):
    fake(lambda *_: 0.7, whole=0.8)
    with pytest.raises(NoTargetError) as caught:
        pc.sketchify(mlp(), example_inputs=torch.randn(8, 96), **LATENCY)
    message = str(caught.value)
    assert "no layer has a sketch of this ratio that is faster here" in message
    assert message.count("measured here: its sketch ran at 0.70 of the dense speed on (8, ") == 4


def test_a_plain_sketch_that_is_faster_as_a_whole_is_taken_whatever_its_layers_are_alone(fake):
    fake(lambda *_: 0.7, whole=1.2)
    model, x = mlp(), torch.randn(8, 96)
    small = pc.sketchify(model, example_inputs=x, **LATENCY)
    plain = pc.sketchify(model, **{**LATENCY, "objective": "size"})
    assert torch.equal(small(x), plain(x))
    assert pc.sketch_report(small).seconds == {"dense": 1.2, "sketched": 1.0}


def test_a_layer_that_the_example_does_not_reach_is_planned_as_usual(fake):
    fake(lambda *_: 2.0)
    model, x = ZOO["early_exit"].build(), ZOO["early_exit"].inputs()
    model.unused = nn.Linear(64, 64)
    found = lines(pc.plan_sketch(model, example_inputs=x, **LATENCY))
    assert found["unused"].choice is not None
    assert found["unused"].reason == "the example never reached it"


def test_each_budget_of_a_mapping_is_planned_by_itself(fake):
    fake(lambda dense, *_: 0.5 if expands(dense) else 2.0)
    plan = pc.plan_sketch(mlp(), {"[04]": 0.5, "*": 0.25}, example_inputs=torch.randn(8, 96), **LATENCY)
    ratios = {line.name: line.stored_numbers / line.dense_numbers for line in plan.layers}
    assert ratios["4"] == 1.0
    assert 0.45 < ratios["0"] <= 0.5
    assert ratios["5"] < 0.3


# --------------------------------------------------------------------------------------- what is timed


def test_layers_that_are_alike_are_timed_once(fake):
    timer = fake(lambda *_: 2.0)
    layers = [nn.Linear(96, 96) for _ in range(5)]
    with torch.no_grad():
        for layer in layers:
            layer.weight.copy_(layers[0].weight)  # one spectrum, so one rank, or the next with what is left
    plan = pc.plan_sketch(nn.Sequential(*layers), example_inputs=torch.randn(8, 96), **LATENCY)
    assert len(plan.sketched) == 5
    asked = [sketched.ranks for _, sketched, _ in timer.asked]
    assert sorted(asked) == sorted({line.choice.ranks for line in plan.sketched})
    assert len(asked) < 5


def test_the_input_is_what_reaches_the_layer(fake):
    """Strides and dtype included: here a transposed view, in half precision."""
    timer = fake(lambda *_: 2.0)

    class Transposing(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(64, 64, dtype=torch.bfloat16)

        def forward(self, x):
            return self.fc(x.bfloat16().transpose(1, 2))

    pc.plan_sketch(Transposing(), example_inputs=torch.randn(3, 64, 7), **LATENCY)
    ((_, sketched, x),) = timer.asked
    assert (x.shape, x.stride(), x.dtype) == ((3, 7, 64), (448, 1, 7), torch.bfloat16)
    assert sketched.up.weight.dtype is torch.bfloat16


def test_all_runs_of_a_layer_count(fake):
    """Layers that share a weight count, and one that is called with several shapes."""
    torch.manual_seed(0)

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.twin = nn.Linear(64, 64), nn.Linear(64, 64)
            self.twin.weight = self.fc.weight

        def forward(self, x):
            return self.twin(self.fc(x)[:1])

    # Two rows gain 1 s out of 3 + 1, one row loses 3 s out of 1 + 3.
    fake(lambda _, sketched, x: {2: 3.0, 1: 0.2}[len(x)])
    (line,) = pc.plan_sketch(Twice(), example_inputs=torch.randn(2, 64), **LATENCY).sketched
    assert line.reason == "measured 1.60x"
    fake(lambda _, sketched, x: {2: 1.5, 1: 0.3}[len(x)], whole=0.9)
    with pytest.raises(NoTargetError, match=r"at 0.90 of the dense speed on \(2, 64\), \(1, 64\)"):
        pc.plan_sketch(Twice(), example_inputs=torch.randn(2, 64), **LATENCY)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("gpt2", {"Conv1D"}),
        ("odd_convnet", {"Conv2d"}),
        pytest.param("nn_transformer", {"Linear", "MultiheadAttention"}, marks=pytest.mark.slow),
        ("tied_autoencoder", {"Linear"}),
    ],
)
def test_every_kind_of_layer(fake, name, kinds):
    """The replacements that are timed are those that the plan names."""
    entry = ZOO[name]
    timer = fake(lambda *_: 2.0)
    model, inputs = entry.build(), entry.inputs()
    plan = pc.plan_sketch(model, example_inputs=inputs, **LATENCY)
    assert kinds <= {line.kind for line in plan.sketched}
    assert {line.reason for line in plan.sketched} == {"measured 2.00x"}
    timed = {(sketched.scheme, sketched.ranks) for _, sketched, _ in timer.asked}
    assert timed == {(line.choice.scheme, line.choice.ranks) for line in plan.sketched}
    before = {key: value.clone() for key, value in model.state_dict().items()}
    small = pc.sketchify(model, example_inputs=inputs, inplace=False, **LATENCY)
    assert plan_of(small) == plan
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    with torch.no_grad():
        call(small, inputs)


def test_an_embedding_that_was_asked_for(fake):
    timer = fake(lambda *_: 2.0)
    model = nn.Sequential(nn.Embedding(200, 64), nn.Linear(64, 64))
    ids = torch.randint(200, (2, 9))
    plan = pc.plan_sketch(model, include="*", example_inputs=ids, **LATENCY)
    assert {line.reason for line in plan.sketched} == {"measured 2.00x"}
    assert (2, 9) in timer.shapes


@pytest.mark.parametrize("form", ["graph", "exported"])
def test_graphs_have_their_functional_calls_timed(fake, form):
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(96, 64))
            self.fc = nn.Linear(96, 64)

        def forward(self, x):
            return self.fc(nn.functional.linear(x, self.weight).relu())

    timer = fake(lambda *_: 2.0)
    model, x = Functional().eval(), torch.randn(8, 64)
    graph = torch.fx.symbolic_trace(model) if form == "graph" else torch.export.export(model, (x,))
    small = pc.sketchify(graph, include="*", example_inputs=x, **LATENCY)
    assert sorted(timer.shapes) == [(8, 64), (8, 96)]
    assert len(plan_of(small).sketched) == 2
    small(x)


# --------------------------------------------------------------------------------------------- examples


@pytest.mark.parametrize("wrap", ["tuple", "list", "mapping", "tensor"])
def test_an_example_is_a_batch_in_any_form(fake, wrap):
    timer = fake(lambda *_: 2.0)
    x = torch.randn(8, 96)
    example = {"tuple": (x, torch.zeros(8)), "list": [x], "mapping": {"input": x}, "tensor": x}[wrap]
    pc.plan_sketch(mlp(), example_inputs=example, **LATENCY)  # labels have no place in forward
    assert (8, 96) in timer.shapes


def test_the_first_batch_of_data_is_the_default_example(fake):
    timer = fake(lambda dense, *_: 0.5 if expands(dense) else 2.0)
    batches = iter([torch.randn(rows, 96) for rows in (6, 32, 32, 32)])  # can be read but once
    small = pc.sketchify(mlp(), data=batches, narrow=False, **LATENCY)
    assert {shape[0] for shape in timer.shapes} == {6}
    found = lines(plan_of(small))
    assert found["4"].choice is None
    assert "on (6, 96)" in found["4"].reason
    assert found["0"].reason == "measured 2.00x"


def test_an_example_goes_before_data(fake):
    timer = fake(lambda *_: 2.0)
    pc.sketchify(
        mlp(), data=[torch.randn(32, 96)] * 3, example_inputs=torch.randn(1, 96), narrow=False, **LATENCY
    )
    assert {shape[0] for shape in timer.shapes} == {1}


def test_a_search_for_the_ratio_takes_what_pays(fake):
    """Sketches of small ranks pay; a larger ratio has nothing to sketch, and is passed over."""
    fake(lambda _, sketched, x: 2.0 if sketched.ranks[0] < 40 else 0.9)
    model, x = mlp(), torch.randn(8, 96)
    small = pc.sketchify(model, max_drop=1.0, evaluate=lambda _: 1.0, example_inputs=x, **LATENCY)
    sketched = plan_of(small).sketched
    assert sketched
    assert all(line.choice.rank < 40 for line in sketched)


# ----------------------------------------------------------------------------------------------- errors


def test_options_that_do_not_go_together():
    model, x = mlp(), torch.randn(8, 96)
    for verb in (pc.sketchify, pc.plan_sketch):
        with pytest.raises(ConfigError, match="objective='latency' needs example_inputs="):
            verb(model, objective="latency")
        with pytest.raises(ConfigError, match="example_inputs= is for objective='latency'"):
            verb(model, example_inputs=x)
        with pytest.raises(ConfigError, match="allow_slower=True conflicts with objective='latency'"):
            verb(model, objective="latency", allow_slower=True, example_inputs=x)
        with pytest.raises(ConfigError, match="objective='speed', wanted one of 'size', 'latency'"):
            verb(model, objective="speed")
        with pytest.raises(ConfigTypeError, match="example_inputs is a int, wanted a tensor"):
            verb(model, example_inputs=3, **LATENCY)
    assert SketchConfig().objective == "size"


def test_a_model_without_data_cannot_be_timed():
    model = nn.Sequential(nn.Linear(96, 96, device="meta"), nn.Linear(96, 96, device="meta"))
    with pytest.raises(WeightError, match="meta device"):
        pc.plan_sketch(model, example_inputs=torch.randn(8, 96), **LATENCY)


# ------------------------------------------------------------------------------------------- the clock


def test_the_clock_takes_turns():
    """Both are called alike often, warmed up first, and without gradients."""
    order = []

    class Layer(nn.Module):
        def __init__(self, name):
            super().__init__()
            self.name = name

        def forward(self, x):
            assert torch.is_inference_mode_enabled()
            order.append(self.name)
            return x

    seconds = side_by_side(Layer("dense"), Layer("sketched"), torch.ones(1))
    assert all(value > 0 for value in seconds)
    turns = [name for name, last in zip(order, ["", *order], strict=False) if name != last]
    assert turns == ["dense", "sketched"] * (len(turns) // 2)
    assert len(turns) >= 2 * 5


def test_with_a_real_clock(monkeypatch):
    """Whatever it measures, the plan is consistent, and is what is carried out."""
    monkeypatch.setattr(timing, "_MODEL_SECONDS", 0.1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.Linear(512, 16)).eval()
    x = torch.randn(256, 512)
    state = torch.random.get_rng_state()
    small = pc.sketchify(model, 0.25, example_inputs=x, **LATENCY)
    assert torch.equal(torch.random.get_rng_state(), state)
    plan = plan_of(small)
    assert plan.sketched
    assert all(line.reason.startswith("measured ") for line in plan.sketched)
    assert all(float(line.reason.split()[1].rstrip("x")) >= 1.05 for line in plan.sketched)
    kinds = {name: type(layer) for name, layer in small.named_children()}
    for line in plan.layers:
        assert kinds[line.name] is (nn.Linear if line.choice is None else pc.SketchedLinear)
    assert small(x).shape == (256, 16)


def test_an_example_that_the_model_cannot_run():
    with pytest.raises(DataError, match=r"batch 0 of example_inputs: .* \(\(3, 5\)"):
        pc.plan_sketch(mlp(), example_inputs=torch.randn(3, 5), **LATENCY)
