"""The search measures little, and what it gives was measured and passes."""

import copy
import math
import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

import panther_compile as pc
from panther_compile.calibration import calibrate, few_data
from panther_compile.errors import (
    ConfigError,
    ConfigTypeError,
    EvaluateError,
    NoTargetError,
    RatioSearchError,
)
from panther_compile.planning.ratio_search import MOST, RATIOS, search_ratio
from panther_compile.reporting.ratio_curve import RatioCurve

OPTIONS = {"min_params": 0, "allow_slower": True, "progress": False, "include": "*", "narrow": False}


class Asked:
    """A score by ratio that remembers what was asked."""

    def __init__(self, score):
        self.score, self.ratios = score, []

    def __call__(self, ratio):
        self.ratios.append(ratio)
        return self.score(ratio)


def smallest_passing(score, dense, drop):
    return min(ratio for ratio in RATIOS if score(ratio) >= dense - drop)


CURVES = {
    "exponential": lambda r: 0.9 - math.exp(-9 * r),
    "steep": lambda r: 0.9 - math.exp(-40 * (r - 0.1)),
    "linear": lambda r: 0.9 * r + 0.05,
    "step low": lambda r: 0.9 if r > 0.2 else 0.1,
    "step high": lambda r: 0.9 if r > 0.94 else 0.1,
    "flat": lambda r: 0.9,
    "better when small": lambda r: 1.0 - r / 10,
    "power": lambda r: 0.9 - 0.01 / r**2,
    "minus infinity": lambda r: 0.9 - 0.02 / r if r > 0.3 else -math.inf,
}


@pytest.mark.parametrize("drop", [0.0, 0.001, 0.01, 0.1, 0.5])
@pytest.mark.parametrize("name", CURVES)
def test_monotone_curves_give_the_smallest_ratio_that_passes(name, drop):
    score = Asked(CURVES[name])
    dense = max(score.score(RATIOS[-1]), 0.9) if name != "linear" else 0.95
    if all(score.score(ratio) < dense - drop - 1e-12 for ratio in RATIOS):
        with pytest.raises(RatioSearchError, match="no ratio keeps the score"):
            search_ratio(score, dense, drop)
        return
    curve = search_ratio(score, dense, drop)
    assert curve.ratio == smallest_passing(score.score, dense - 1e-12, drop)
    assert len(score.ratios) == len(set(score.ratios)) <= MOST


@pytest.mark.parametrize("name", ["exponential", "power"])
def test_smooth_curves_take_fewer_evaluations_than_halving(name):
    counts = []
    for drop in (0.03, 0.05, 0.1, 0.2):
        score = Asked(CURVES[name])
        search_ratio(score, 0.9, drop)
        counts.append(len(score.ratios))
    assert sum(counts) / len(counts) < math.log2(len(RATIOS)) - 0.5


def test_noise_never_makes_it_give_what_does_not_pass():
    for seed in range(200):
        noise = random.Random(seed)
        score = Asked(lambda r, noise=noise: 0.9 - 0.3 * (1 - r) ** 2 + noise.gauss(0, 0.03))
        try:
            curve = search_ratio(score, 0.9, 0.02)
        except RatioSearchError:
            continue
        passing = [ratio for ratio, found in curve.points if found >= 0.88 - 1e-12]
        assert curve.ratio == min(passing)
        assert [ratio for ratio, _ in curve.points] == score.ratios
        assert len(score.ratios) <= MOST


def test_range_and_resolution():
    assert RATIOS[0] == 0.05
    assert RATIOS[-1] == 0.98
    assert max(b - a for a, b in pairwise(RATIOS)) <= 0.02 + 1e-12
    assert len(RATIOS) + 1 < 2**MOST


def test_ratios_that_sketch_nothing_bound_the_range_from_either_side():
    def score(ratio):
        if not 0.2 <= ratio <= 0.4:
            raise NoTargetError("nothing")
        return 0.9 - (0.4 - ratio)

    curve = search_ratio(score, 0.9, 0.1)
    assert curve.ratio == 0.3

    def above(ratio):
        if ratio < 0.7:
            raise NoTargetError("too little")
        return 0.9 - (1 - ratio)

    asked = Asked(above)
    assert search_ratio(asked, 0.9, 0.2).ratio == 0.8
    assert asked.ratios[:2] == [0.5, 0.74]

    def never(ratio):
        raise NoTargetError(f"nothing at {ratio}")

    with pytest.raises(NoTargetError, match=r"nothing at 0\.\d+"):
        search_ratio(never, 0.9, 0.1)


def test_nothing_passes_prints_the_curve():
    with pytest.raises(RatioSearchError) as raised:
        search_ratio(lambda r: 0.5, 0.9, 0.01)
    assert "max_drop=0.01" in str(raised.value)
    assert "0.98" in str(raised.value)
    assert "dense score 0.9" in str(raised.value)


def test_curve_as_text_and_picture(tmp_path):
    curve = RatioCurve(((0.5, 0.8), (0.74, 0.9), (0.6, -math.inf)), 0.905, 0.01, 0.74)
    lines = str(curve).splitlines()
    assert [line.split() for line in lines if "0.74" in line] == [["0.74", "0.9", "0.005", "chosen"]]
    assert "dense score 0.905, max_drop 0.01" in lines[-1]
    curve.plot(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 5000


# ----------------------------------------------------------------------------------- on real models


def mlp():
    return nn.Sequential(
        nn.Linear(48, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 48)
    )


def inputs(batches=6):
    scale = torch.logspace(0, -3, 48)
    return [torch.randn(32, 48) * scale for _ in range(batches)]


class Fidelity:
    """Minus the distance from the dense model's results."""

    def __init__(self, dense, x):
        self.x, self.models = x, []
        self.wanted = copy.deepcopy(dense).eval()(x).detach()

    def __call__(self, model):
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
        self.models.append(model)
        torch.rand(3), random.random()
        return self.of(model)

    def of(self, model):
        with torch.no_grad():
            return -float((model(self.x) - self.wanted).norm() / self.wanted.norm())


@pytest.fixture
def case():
    dense, data = mlp(), inputs()
    return dense, data, Fidelity(dense, torch.cat(data))


@pytest.mark.parametrize("with_data", [True, False])
def test_sketchify_searches(case, with_data):
    dense, data, evaluate = case
    given = {"data": data} if with_data else {}
    small = pc.sketchify(dense, max_drop=0.1, evaluate=evaluate, **given, **OPTIONS)
    curve = pc.sketch_report(small).curve
    assert small in evaluate.models
    assert evaluate.of(small.eval()) >= -0.1
    assert len(curve.points) <= MOST
    assert dict(curve.points)[curve.ratio] == evaluate.of(small)
    report = pc.sketch_report(small)
    assert report.achieved_ratio <= curve.ratio
    assert f"ratio {curve.ratio:g} found with {len(curve.points)} evaluations" in str(report)


def test_the_answer_is_what_the_ratio_alone_gives(case):
    dense, data, evaluate = case
    small = pc.sketchify(dense, data=data, max_drop=0.1, evaluate=evaluate, **OPTIONS)
    again = pc.sketchify(dense, pc.sketch_report(small).curve.ratio, data=data, **OPTIONS)
    for found, wanted in zip(small.state_dict().values(), again.state_dict().values(), strict=True):
        assert torch.equal(found, wanted)


def test_data_is_read_once_and_the_dense_model_studied_once(case, monkeypatch):
    dense, data, evaluate = case
    reads, studies = [], []
    monkeypatch.setattr(few_data, "can_be_judged", lambda studied: False)
    study = calibrate.study_layers
    monkeypatch.setattr(
        calibrate, "study_layers", lambda *args, **kwargs: studies.append(1) or study(*args, **kwargs)
    )

    def once():
        reads.append(1)
        yield from data

    small = pc.sketchify(dense, data=once(), max_drop=0.1, evaluate=evaluate, **OPTIONS)
    assert len(pc.sketch_report(small).curve.points) > 1
    assert (len(reads), len(studies)) == (1, 1)


def test_modes_random_numbers_and_weights_are_left_as_they_were(case):
    dense, data, evaluate = case
    dense.train()
    dense[3].eval()
    modes = [module.training for module in dense.modules()]
    before = copy.deepcopy(dense.state_dict())
    torch.manual_seed(3)
    random.seed(3)
    wanted = torch.rand(2), random.random()
    torch.manual_seed(3)
    random.seed(3)
    small = pc.sketchify(dense, data=data, max_drop=0.1, evaluate=evaluate, **OPTIONS)
    assert torch.equal(torch.rand(2), wanted[0])
    assert random.random() == wanted[1]
    assert [module.training for module in dense.modules()] == modes
    assert small[0].training
    assert not small[3].training
    assert all(torch.equal(value, before[name]) for name, value in dense.state_dict().items())


def test_inplace(case):
    dense, data, evaluate = case
    copied = pc.sketchify(dense, data=data, max_drop=0.1, evaluate=evaluate, **OPTIONS)
    small = pc.sketchify(dense, data=data, max_drop=0.1, evaluate=evaluate, inplace=True, **OPTIONS)
    assert small is dense
    for found, wanted in zip(small.state_dict().values(), copied.state_dict().values(), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.slow
def test_a_smaller_ratio_that_makes_a_larger_model_is_not_chosen():
    model = nn.Sequential(nn.Linear(128, 128, bias=False), nn.Linear(128, 64), nn.Linear(64, 64))
    options = OPTIONS | {"round_rank_to": 8, "exclude": "1"}
    small = pc.sketchify(model, max_drop=0.0, evaluate=lambda one: 1.0, **options)
    sizes = {}
    for ratio in RATIOS:
        try:
            sizes[ratio] = pc.sketch_report(pc.sketchify(model, ratio, **options)).stored_numbers
        except NoTargetError:
            continue
    assert pc.sketch_report(small).stored_numbers == min(sizes.values())
    assert min(sizes) < pc.sketch_report(small).curve.ratio


def test_exported_program():
    model, x = mlp().eval(), inputs(1)[0]
    program = torch.export.export(model, (x,))
    wanted = model(x)

    def evaluate(graph):
        with torch.no_grad():
            return -float((graph(x) - wanted).norm() / wanted.norm())

    small = pc.sketchify(program, max_drop=0.2, evaluate=evaluate, **OPTIONS)
    assert evaluate(small) >= -0.2


def test_curve_is_saved_with_the_model(case, tmp_path):
    dense, data, evaluate = case
    small = pc.sketchify(dense, data=data, max_drop=0.1, evaluate=evaluate, **OPTIONS)
    pc.save_sketched(small, tmp_path)
    loaded = pc.load_sketched(mlp(), tmp_path)
    assert pc.sketch_report(loaded).curve == pc.sketch_report(small).curve is not None
    assert pc.sketch_report(loaded).rows == pc.sketch_report(small).rows


@pytest.mark.parametrize("kind", [np.float32, np.float64, torch.tensor, int])
def test_scores_of_any_number_type(kind):
    small = pc.sketchify(mlp(), max_drop=1.0, evaluate=lambda model: kind(1.0), **OPTIONS)
    assert pc.sketch_report(small).curve.ratio <= 0.1


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (math.nan, "evaluate gave nan for the dense model"),
        (math.inf, "evaluate gave inf for the dense model"),
        (None, "evaluate gave a NoneType for the dense model, wanted a number"),
        ("0.9", "evaluate gave a str for the dense model"),
        (True, "evaluate gave a bool"),
        (1j, "evaluate gave a complex"),
        (torch.zeros(2), "evaluate gave a Tensor"),
    ],
)
def test_scores_that_are_none(score, message):
    with pytest.raises(EvaluateError, match=message):
        pc.sketchify(mlp(), max_drop=0.1, evaluate=lambda model: score, **OPTIONS)


def test_evaluate_that_fails_later_names_the_ratio():
    scores = iter([0.9, 0.8])
    with pytest.raises(EvaluateError, match=r"raised on the model of ratio 0\.\d+ \(StopIteration") as raised:
        pc.sketchify(mlp(), max_drop=0.1, evaluate=lambda model: next(scores), **OPTIONS)
    assert isinstance(raised.value.__cause__, StopIteration)
    scores = iter([0.9, math.nan])
    with pytest.raises(EvaluateError, match=r"evaluate gave nan for the model of ratio 0\.5"):
        pc.sketchify(mlp(), max_drop=0.1, evaluate=lambda model: next(scores), **OPTIONS)


def test_nothing_passes_on_a_model():
    model = mlp()
    with pytest.raises(
        RatioSearchError, match=r"no ratio keeps the score within max_drop=0\.1\nScore by ratio"
    ):
        pc.sketchify(model, max_drop=0.1, evaluate=lambda one: float(one is model), **OPTIONS)


def test_evaluate_keeps_its_surroundings():
    """The default device and autocast of the caller are there while the caller's own function runs."""
    seen = []

    def evaluate(model):
        seen.append(torch.is_autocast_enabled("cpu"))
        return 1.0

    with torch.autocast("cpu"):
        pc.sketchify(mlp(), max_drop=0.1, evaluate=evaluate, **OPTIONS)
    assert all(seen)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"max_drop": 0.1}, ConfigError, "max_drop= without evaluate="),
        ({"evaluate": len}, ConfigError, "evaluate= without max_drop="),
        ({"max_drop": -0.1, "evaluate": len}, ConfigError, r"max_drop=-0\.1, wanted a finite number"),
        ({"max_drop": math.nan, "evaluate": len}, ConfigError, "max_drop=nan"),
        ({"max_drop": math.inf, "evaluate": len}, ConfigError, "max_drop=inf"),
        ({"max_drop": "1%", "evaluate": len}, ConfigTypeError, "max_drop='1%' is a str"),
        ({"max_drop": True, "evaluate": len}, ConfigTypeError, "max_drop=True is a bool"),
        ({"max_drop": 0.1, "evaluate": 3}, ConfigTypeError, "evaluate is a int, wanted a function"),
        ({"max_drop": 0.1, "evaluate": len, "ratio": 0.4}, ConfigError, "ratio= conflicts with max_drop="),
        ({"max_drop": 0.1, "evaluate": len, "ratio": 0.5}, ConfigError, "ratio= conflicts with max_drop="),
        ({"max_drop": 0.1, "evaluate": len, "ratio": {"*": 0.4}}, ConfigError, "ratio= conflicts"),
    ],
)
def test_conflicting_and_bad_options(given, error, message):
    with pytest.raises(error, match=message):
        pc.sketchify(mlp(), **given, **OPTIONS)


@pytest.mark.parametrize("ratio", [0.4, 0.5])
def test_any_ratio_beside_max_drop_is_one_too_many(ratio):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    with pytest.raises(ConfigError, match="ratio"):
        pc.sketchify(model, ratio, max_drop=0.1, evaluate=lambda _: 0.0, min_params=0)
