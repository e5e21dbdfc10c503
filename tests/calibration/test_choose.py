"""The choice among plans: near ones are fitted, and judged by batches that they were not fitted to."""

import pytest
import torch
from torch import nn

import panther_compile as pc
from panther_compile.calibration import choose, held_out
from panther_compile.calibration.held_out import HeldOut
from panther_compile.models.batches import learnt_of, spread_out
from panther_compile.models.outputs import distance

OPTIONS = {"allow_slower": True, "min_params": 256, "progress": False}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(48, 96),
        nn.GELU(),
        nn.Linear(96, 96),
        nn.GELU(),
        nn.Linear(96, 48),
        nn.Tanh(),
        nn.Linear(48, 8),
    ).eval()


@pytest.fixture(scope="module")
def data():
    torch.manual_seed(1)
    return [torch.randn(64, 48) * torch.linspace(0.1, 3, 48) for _ in range(10)]


def made_by(monkeypatch):
    """The names of the plans that were cut, and of those that were fitted."""
    cut, fitted = [], []
    for name, seen in (("cut", cut), ("fitted", fitted)):
        usual = getattr(HeldOut, name)

        def see(self, plan, usual=usual, seen=seen):
            seen.append(plan.allocation)
            return usual(self, plan)

        monkeypatch.setattr(HeldOut, name, see)
    return cut, fitted


@pytest.fixture
def all_near(monkeypatch):
    """Cuts are all near one another."""
    monkeypatch.setattr(choose, "NEAR", 1e9)


def test_what_was_tried_is_what_the_fit_gives_on_batches_it_has_not_seen(model, data, all_near, monkeypatch):
    _, fitted = made_by(monkeypatch)
    report = pc.sketch_report(pc.sketchify(model, 0.4, data=data, **OPTIONS))
    assert set(report.tried) == set(fitted)
    assert "uniform" in fitted
    spread = spread_out(data)
    learnt = learnt_of(spread)
    enough = learnt[:5]  # 64 rows each, of 96 inputs at most
    alone = pc.sketchify(model, plan=report.plan, data=enough, **OPTIONS)
    with torch.no_grad():
        lost = [distance(model(x), alone(x), None, logits=None) for x in spread[len(learnt) :]]
    # The metric is of four of the eight batches then.
    assert sum(lost) / len(lost) == pytest.approx(report.tried[report.allocation], rel=0.1)


def test_fits_decide_and_not_cuts(model, data, all_near, monkeypatch):
    """A plan whose cut is the closest, but whose fit is far off, is not taken."""
    cuts, usual = {}, HeldOut.tried

    def closest():
        return min(cuts, key=lambda name: sum(cuts[name]))

    def tried(self, plan, how, made):
        found = usual(self, plan, how, made)
        if how == "cut":
            cuts[plan.allocation] = found
        elif plan.allocation == closest():
            return [10.0 * one for one in found]
        return found

    monkeypatch.setattr(HeldOut, "tried", tried)
    report = pc.sketch_report(pc.sketchify(model, 0.4, data=data, **OPTIONS))
    assert report.allocation != closest()
    assert closest() in report.tried


def test_where_cuts_tell_nothing_is_fitted(model, data, monkeypatch):
    monkeypatch.setattr(choose, "NEAR", 1.0)
    cut, fitted = made_by(monkeypatch)
    report = pc.sketch_report(pc.sketchify(model, 0.4, data=data, **OPTIONS))
    assert len(cut) > 2
    assert not fitted
    assert set(report.tried) <= set(cut)


def test_the_closest_few_and_equal_shares_are_fitted(model, data, monkeypatch):
    monkeypatch.setattr(choose, "FINALISTS", 2)
    usual = HeldOut.tried

    def tried(self, plan, how, made):
        found = usual(self, plan, how, made)
        if how == "cut":
            return [{"energy, narrow": 1.0, "energy": 1.01}.get(plan.allocation, 1.1)] * len(found)
        return found

    monkeypatch.setattr(HeldOut, "tried", tried)
    _, fitted = made_by(monkeypatch)
    report = pc.sketch_report(pc.sketchify(model, 0.4, data=data, **OPTIONS))
    assert set(fitted[:3]) == {"energy, narrow", "energy", "uniform"}
    assert set(report.tried) == set(fitted)


def test_of_twins_the_closer_cut_is_fitted(all_near, monkeypatch):
    """Layers of a flat spectrum stay whole; the same plan with all cut differs in little else."""
    torch.manual_seed(0)
    layers = [nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 192), nn.Tanh(), nn.Linear(192, 48)]
    with torch.no_grad():
        for layer in (layers[2], layers[4]):
            left, values, right = torch.linalg.svd(layer.weight, full_matrices=False)
            layer.weight.copy_(left * (values * 0.9 ** torch.arange(48.0)) @ right)
    lost, usual = {}, HeldOut.tried

    def tried(self, plan, how, made):
        found = lost[how, plan.allocation] = usual(self, plan, how, made)
        return found

    monkeypatch.setattr(HeldOut, "tried", tried)
    data = [torch.randn(64, 48) for _ in range(10)]
    pc.sketchify(nn.Sequential(*layers).eval(), 0.6, data=data, include="*", **OPTIONS)
    pairs = [(one.removesuffix(", all cut"), one) for how, one in lost if how == "cut" and "all cut" in one]
    assert pairs
    for pair in pairs:
        closer = min(pair, key=lambda one: sum(lost["cut", one]))
        assert [one for one in pair if ("fitted", one) in lost] == [closer]


def test_batches_that_were_learnt_from_decide_nothing_by_fits(model, data, all_near, monkeypatch):
    """A single sample is both fitted to and judged by."""
    cut, fitted = made_by(monkeypatch)
    pc.sketchify(model, 0.4, data=[data[0][:1]], synthetic=False, **OPTIONS)
    assert cut
    assert not fitted


def test_kernels_are_fitted_and_not_cut_to_be_tried(monkeypatch):
    """Each plan in one run of few batches; ridges are tried by cuts, which need no run."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(8, 24, 3), nn.ReLU(), nn.Conv2d(24, 24, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24 * 4, 24)
    ).eval()
    cut, fitted = made_by(monkeypatch)
    runs, usual = [], held_out.fit_in_lockstep

    def fit_in_lockstep(dense, sketched, calls, *args, **kwargs):
        runs.append(len(calls))
        return usual(dense, sketched, calls, *args, **kwargs)

    monkeypatch.setattr(held_out, "fit_in_lockstep", fit_in_lockstep)
    data = [torch.randn(8, 8, 6, 6) for _ in range(10)]
    report = pc.sketch_report(pc.sketchify(model, 0.4, data=data, include="*", **OPTIONS))
    assert set(cut) == {""}  # by energy, of no name
    assert len(fitted) == len(set(fitted)) > 1
    assert set(report.tried) >= set(fitted)
    assert runs[: len(fitted)] == [2] * len(fitted)


class Patches(nn.Module):
    """A convolution in front of layers that hold most of the numbers."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 48, 3, stride=3)
        self.layers = nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 48))

    def forward(self, x):
        return self.layers(self.patches(x).flatten(2).mT)


@pytest.mark.parametrize(
    ("build", "shape", "batches"),
    [
        (lambda: nn.Sequential(nn.Conv2d(24, 48, 1), nn.ReLU(), nn.Conv2d(48, 24, 1)), (24, 6, 6), 4),
        (Patches, (3, 12, 12), 2),
    ],
    ids=["images", "mostly linear"],
)
def test_images_are_fitted_to_a_quarter_of_the_batches(build, shape, batches, all_near, monkeypatch):
    """Rows of an image are too much alike to count."""
    torch.manual_seed(0)
    tried, usual = [], HeldOut.fitted

    def fitted(self, plan):
        tried.append(self._enough)
        return usual(self, plan)

    monkeypatch.setattr(HeldOut, "fitted", fitted)
    data = [torch.randn(8, *shape) for _ in range(20)]
    pc.sketchify(build().eval(), 0.4, data=data, include="*", **OPTIONS)
    assert tried
    assert set(tried) == {batches}


@pytest.mark.parametrize("options", [{}, {"round_rank_to": 32}])
def test_layers_of_which_no_rank_pays_are_narrowed(options):
    """Factors of such small layers are slower than the layers, or too coarse; fewer features are neither."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    batches = [torch.randn(64, 64) for _ in range(8)]
    small = pc.sketchify(model, 0.75, data=batches, include="*", min_params=0, progress=False, **options)
    kept = [line.choice.ranks for line in pc.sketch_report(small).plan.layers]
    assert [ranks[0] for ranks in kept] == [96, 96]
    with pytest.raises(pc.PantherError, match="nothing to sketch in Sequential"):
        pc.sketchify(model, 0.75, data=batches, include="*", min_params=0, narrow=False, progress=False)
    alone = nn.Sequential(nn.Linear(64, 128))
    with pytest.raises(pc.PantherError, match="of the dense speed; allow_slower=True"):
        pc.sketchify(alone, 0.75, data=batches, include="*", min_params=0, progress=False)
