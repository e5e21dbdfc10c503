"""objective="latency" on the whole model: a result is faster as measured, or dense. No test reads a clock."""

import itertools
from functools import partial

import pytest
import torch
from torch import nn
from zoo import ZOO

import panther_compile as pc
from panther_compile.errors import NoTargetError
from panther_compile.healing.healer import heal_layers
from panther_compile.layers.base import SketchedLayer
from panther_compile.models import stopwatch
from panther_compile.models.batches import Call
from panther_compile.planning import timing
from panther_compile.planning.plan import PAYS, TimedSites
from panther_compile.planning.timing import by_turns, time_sites, without_least
from panther_compile.records import RECORD_ATTRIBUTE, Choice, LayerPlan, SketchPlan, Timed, WholeTimes

LATENCY = {"objective": "latency", "min_params": 512, "progress": False}
SECONDS = {"0": 4.0, "2": 1.0, "4": 3.0, "6": 2.0}  # that the sketch of a layer saves, alone


def mlp():
    torch.manual_seed(0)
    widths = (96, 96, 112, 128, 144)
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Dropout(0.5))), nn.Linear(144, 9))


def example():
    return torch.randn(8, 96, generator=torch.Generator().manual_seed(1))


def sketched_names(model):
    return {name for name, module in model.named_children() if isinstance(module, SketchedLayer)}


class FakeTimers:
    """Every layer gains alone, as `SECONDS` says; the model, as a function of what is sketched in it says."""

    def __init__(self, speedup):
        self.speedup = speedup
        self.asked = []

    def layer(self, dense, _, x):
        return 1.0 + SECONDS[{96: "0", 112: "2", 128: "4", 144: "6"}[dense.out_features]], 1.0

    def model(self, dense, sketched, call):
        assert sketched_names(dense) == set()
        assert not any(module.training for one in (dense, sketched) for module in one.modules())
        with torch.no_grad():
            assert call.run(dense).shape == call.run(sketched).shape
        self.asked.append(sketched_names(sketched))
        return WholeTimes((self.speedup(self.asked[-1]),), (1.0,))


@pytest.fixture
def timers(monkeypatch):
    """Has whole models be so fast as a function of the names of the sketched layers says."""

    def install(speedup):
        both = FakeTimers(speedup)
        fake = partial(time_sites, timer=both.layer, model_timer=both.model)
        monkeypatch.setattr("panther_compile.sketching.time_sites", fake)
        return both

    return install


def lines(model):
    return {line.name: line for line in vars(model)[RECORD_ATTRIBUTE].plan.layers}


# --------------------------------------------------------------------------------------- the decisions


def test_a_model_that_is_faster_is_kept_and_says_so(timers):
    asked = timers(lambda names: 1.5).asked
    small = pc.sketchify(mlp(), example_inputs=example(), **LATENCY)
    assert asked == [{"0", "2", "4", "6"}]
    report = pc.sketch_report(small)
    assert report.seconds == {"dense": 1.5, "sketched": 1.0}
    assert "whole model, timed here: 1e+03 ms, dense 1.5e+03 ms, 1.50x" in str(report)
    assert sketched_names(small) == {"0", "2", "4", "6"}


def test_the_half_that_saves_least_is_returned_until_the_model_is_faster(timers):
    asked = timers(lambda names: {4: 0.9, 2: 1.01, 1: 1.2}[len(names)]).asked
    small = pc.sketchify(mlp(), example_inputs=example(), **LATENCY)
    assert asked == [{"0", "2", "4", "6"}, {"0", "4"}, {"0"}]
    assert sketched_names(small) == {"0"}
    found, rows = lines(small), {row.name: row for row in pc.sketch_report(small).rows}
    for name, speed in (("2", "0.90"), ("6", "0.90"), ("4", "1.01")):
        why = f"measured here: with its sketch the whole model ran at {speed} of the dense speed"
        assert (found[name].choice, found[name].reason) == (None, why)
        assert (rows[name].scheme, rows[name].reason) == ("dense", why)
    assert found["0"].reason == "measured 5.00x"


def test_what_is_returned_leaves_the_budget(timers):
    timers(lambda names: 0.9 if len(names) == 4 else 1.2)
    plan = pc.plan_sketch(mlp(), example_inputs=example(), **LATENCY)
    without = pc.plan_sketch(mlp(), min_params=512, exclude=["2", "6"], progress=False)
    chosen = {line.name: line.choice for line in plan.layers}
    assert chosen == {line.name: line.choice for line in without.layers}
    assert 0.49 < plan.achieved_ratio <= 0.5


def test_the_plan_is_what_is_carried_out(timers):
    timers(lambda names: 0.9 if len(names) == 4 else 1.2)
    plan = pc.plan_sketch(mlp(), example_inputs=example(), **LATENCY)
    small = pc.sketchify(mlp(), example_inputs=example(), **LATENCY)
    assert vars(small)[RECORD_ATTRIBUTE].plan == plan
    assert plan.seconds == {"dense": 1.2, "sketched": 1.0}
    assert "dense 1.2e+03 ms, 1.20x" in str(plan)


@pytest.mark.parametrize(("speedup", "kept"), [(PAYS, True), (PAYS - 1e-6, False)])
def test_the_margin(timers, speedup, kept):
    timers(lambda names: speedup if len(names) == 4 else 3.0)
    small = pc.sketchify(mlp(), example_inputs=example(), **LATENCY)
    assert (len(sketched_names(small)) == 4) is kept


@pytest.mark.parametrize("inplace", [False, True])
def test_a_model_that_is_never_faster_stays_as_it_is(timers, inplace):
    asked = timers(lambda names: 1.0).asked
    model = mlp()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(NoTargetError) as caught:
        pc.sketchify(model, example_inputs=example(), inplace=inplace, **LATENCY)
    assert [len(names) for names in asked] == [4, 2, 1]
    assert str(caught.value).count("the whole model ran at 1.00 of the dense speed") == 4
    assert sketched_names(model) == set()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_mode_and_place(timers, inplace, training):
    """Models are timed in eval mode, and given back in their own; copies that were timed share no module."""
    timers(lambda names: 0.9 if len(names) == 4 else 1.2)
    model = mlp().train(training)
    small = pc.sketchify(model, example_inputs=example(), inplace=inplace, **LATENCY)
    assert (small is model) is inplace
    assert sketched_names(small) == {"0", "4"}
    assert {module.training for module in small.modules()} == {training}
    assert all(parameter.requires_grad for parameter in small.parameters())


def test_with_data_the_layers_that_are_left_are_fitted_again(timers):
    asked = timers(lambda names: 0.9 if len(names) == 4 else 1.2).asked
    data = [torch.randn(256, 96, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    small = pc.sketchify(mlp().eval(), data=data, **LATENCY)
    # The plain sketch is the first one again, and is not timed twice.
    assert asked == [{"0", "2", "4", "6"}, {"0", "4"}]
    assert sketched_names(small) == {"0", "4"}
    fitted = {row.name: row.output_error for row in pc.sketch_report(small).sketched}
    assert set(fitted) == {"0", "4"}
    wanted = pc.sketchify(mlp().eval(), data=data, exclude=["2", "6"], min_params=512, progress=False)
    torch.testing.assert_close(small(data[0]), wanted(data[0]))


def test_layers_that_were_not_timed_alone_go_first():
    """Narrow ones, and those that the example never reached; the clock knows no narrow layer."""

    def clock(name, choice):
        assert choice.scheme != "narrow"
        return None if name == "never" else Timed(2.0, 1e-3, ((1, 8),))

    def line(name, scheme):
        return LayerPlan(name, "Linear", (8, 8), 64, Choice(scheme, 2, (2,), 32, None), "")

    names = {"timed": "pair", "never": "pair", "up": "narrow", "also": "pair"}
    plan = SketchPlan(tuple(line(*one) for one in names.items()), "0.5", "module tree")
    found = TimedSites((), (), (), clock, lambda _: WholeTimes((1.0,), (1.0,)))
    assert set(without_least(found, plan, WholeTimes((1.0,), (1.0,))).returned) == {"never", "up"}


def test_healing_waits_for_the_layers_that_stay(timers, monkeypatch):
    healed = []

    def heal(model, *others):
        healed.append(sketched_names(model))
        heal_layers(model, *others)

    monkeypatch.setattr("panther_compile.healing.refine.heal_layers", heal)
    timers(lambda names: 0.9 if len(names) == 4 else 1.2)
    pc.sketchify(mlp(), data=[example()] * 3, refine="block", refine_steps=1, narrow=False, **LATENCY)
    assert healed == [{"0", "4"}]


def test_each_ratio_of_a_search_starts_with_all_layers(timers):
    asked = timers(lambda names: 0.9 if len(names) == 4 else 1.2).asked
    pc.sketchify(mlp(), max_drop=1.0, evaluate=lambda _: 1.0, example_inputs=example(), **LATENCY)
    assert len(asked) > 4
    assert asked == [{"0", "2", "4", "6"}, {"0", "4"}] * (len(asked) // 2)


def test_an_attention_is_timed_with_what_it_loses(monkeypatch):
    """The fused path of nn.TransformerEncoderLayer is in the dense model, and its nested tensors are off."""
    seen = []

    def model(dense, sketched, call):
        seen.append({type(one).__name__ for one in sketched.modules()})
        assert not any(getattr(one, "use_nested_tensor", False) for one in sketched.modules())
        assert any(isinstance(one, nn.MultiheadAttention) for one in dense.modules())
        return WholeTimes((1.0,), (2.0,))

    fake = partial(time_sites, timer=lambda *_: (2.0, 1.0), model_timer=model)
    monkeypatch.setattr("panther_compile.sketching.time_sites", fake)
    entry = ZOO["encoder_classifier"]
    with pytest.raises(
        NoTargetError, match=r"self_attn\.\w+: measured here: with its sketch the whole model"
    ):
        pc.sketchify(entry.build(), example_inputs=entry.inputs(), **LATENCY)
    assert "SketchedMultiheadAttention" in seen[0]


def test_the_times_are_saved_with_the_model(timers, tmp_path):
    timers(lambda names: 1.5)
    small = pc.sketchify(mlp(), example_inputs=example(), **LATENCY)
    pc.save_sketched(small, tmp_path)
    assert pc.sketch_report(pc.load_sketched(mlp(), tmp_path)).seconds == {"dense": 1.5, "sketched": 1.0}


def test_a_later_call_has_its_own_times(timers):
    timers(lambda names: 1.5)
    small = pc.sketchify(mlp(), example_inputs=example(), **LATENCY)
    small[0] = nn.Linear(96, 96)
    again = pc.sketchify(small, 0.3, min_params=512, progress=False)
    assert pc.sketch_report(again).seconds == {}


# ------------------------------------------------------------------------------------------ the times


def test_of_two_halves_the_slower_one_counts():
    steady = WholeTimes((2.0, 2.5, 2.0, 9.0), (1.0, 1.5, 3.0, 1.0))
    assert steady.speedup == 2.0
    assert steady.fastest == {"dense": 2.0, "sketched": 1.0}
    lucky = WholeTimes((2.0, 2.0, 1.8, 1.8), (1.9, 1.0, 1.9, 1.9))  # fast once, for whatever reason
    assert lucky.speedup == pytest.approx(1.8 / 1.9)
    assert WholeTimes((3.0,), (2.0,)).speedup == 1.5


class FakeClock:
    """Time stands still but for what models take."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    thread_time = perf_counter


class Slow(nn.Module):
    def __init__(self, clock, seconds):
        super().__init__()
        self.clock, self.seconds, self.calls = clock, seconds, []

    def forward(self, x):
        assert not torch.is_grad_enabled()
        # After the other model's turn the caches are cold, and a call takes half as long again.
        cold = not self.calls or self.clock.now != self.calls[-1]
        self.clock.now += self.seconds * (1.5 if cold else 1.0)
        self.calls.append(self.clock.now)
        return x


@pytest.mark.parametrize(("seconds", "turns"), [((0.01, 0.005), 54), ((4.0, 1.0), 4)])
def test_models_take_turns_behind_a_call_that_is_not_timed(monkeypatch, seconds, turns):
    clock = FakeClock()
    for module in (timing, stopwatch):
        monkeypatch.setattr(module, "time", clock)
    dense, sketched = (Slow(clock, one) for one in seconds)
    times = by_turns(dense, sketched, Call((torch.ones(1),), {}))
    assert len(times.dense) == len(times.sketched) == turns
    long = seconds[0] > timing._LONG  # warmed up in its first turn alone
    assert times.dense[0] == pytest.approx(seconds[0])
    assert times.dense[1:] == pytest.approx([seconds[0] * (1.5 if long else 1.0)] * (turns - 1))
    assert times.sketched[0] == pytest.approx(seconds[1])
    assert len(dense.calls) == 1 + (turns + 1 if long else 2 * turns)
