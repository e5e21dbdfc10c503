"""Where data tells less than the weights alone, the weights alone are sketched, and the report says so."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import panther_compile as pc
from panther_compile.calibration import calibrate, few_data, held_out, study
from panther_compile.calibration.unlike import off_batch_norms
from panther_compile.errors import SketchQualityWarning
from panther_compile.factorization.moments import RIDGE
from panther_compile.models.batches import Call
from panther_compile.models.divided import divided, divided_by_results, first_samples

OPTIONS = {"min_params": 1, "allow_slower": True, "include": "*"}


def steep(layer):
    """Its weight with singular values that fall off, so that the weights alone tell which ranks to keep."""
    with torch.no_grad():
        left, values, right = torch.linalg.svd(layer.weight.flatten(1), full_matrices=False)
        falling = values[0] * 0.85 ** torch.arange(len(values))
        layer.weight.copy_((left @ torch.diag(falling) @ right).view_as(layer.weight))
    return layer


def made(kind):
    torch.manual_seed(0)
    if kind == "mlp":
        layers = [steep(nn.Linear(64, 64)), nn.ReLU(), steep(nn.Linear(64, 64))]
        return nn.Sequential(*layers).eval(), (64,)
    layers = [steep(nn.Conv2d(16, 32, 3, padding=1)), nn.ReLU(), steep(nn.Conv2d(32, 16, 1))]
    return nn.Sequential(*layers).eval(), (16, 4, 4)


def error(small, model, shape):
    x = torch.randn(256, *shape, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        wanted = model(x)
        return float((small(x) - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("kind", ["mlp", pytest.param("cnn", marks=pytest.mark.slow)])
def test_few_data_are_never_worse_than_none(kind):
    model, shape = made(kind)
    none = pc.sketchify(model, 0.4, **OPTIONS)
    few = pc.sketchify(model, 0.4, data=[torch.randn(1, *shape) for _ in range(6)], **OPTIONS)
    many = pc.sketchify(model, 0.4, data=[torch.randn(64, *shape) for _ in range(12)], **OPTIONS)
    alone = error(none, model, shape)
    assert error(few, model, shape) <= 1.05 * alone  # a held-out batch is one sample here
    assert error(many, model, shape) < alone
    report = str(pc.sketch_report(few))
    if "weights alone" in pc.sketch_report(few).allocation:
        assert "data too few" in report
    assert "data too few" not in str(pc.sketch_report(many))


def test_the_report_says_that_data_were_too_few():
    model, shape = made("mlp")
    few = pc.sketchify(model, 0.4, data=[torch.randn(1, *shape) for _ in range(6)], **OPTIONS)
    report = pc.sketch_report(few)
    assert report.allocation == "weights alone"
    assert report.tried["weights alone"] < min(v for name, v in report.tried.items() if "alone" not in name)
    assert all("data too few" in row.note for row in report.sketched)


def test_what_is_fitted_to_made_up_inputs_for_want_of_data_is_judged_on_the_data(monkeypatch):
    def made_up_is_closer(studied, plan, config, trials, made_up):
        if made_up is None:  # as it is fitted itself
            return None
        plan = replace(made_up.plan, allocation=few_data.MADE_UP, tried=plan.tried)
        return replace(made_up, plan=plan, note=few_data.TOO_FEW.format(few_data.MADE_UP), trials=None)

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 64, 4, stride=4), nn.ReLU(), nn.Conv2d(64, 512, 3), nn.Flatten(2)
    ).eval()
    data = [torch.randn(1, 3, 32, 32) for _ in range(3)]
    monkeypatch.setattr(calibrate, "without_data", made_up_is_closer)
    with pytest.warns(
        SketchQualityWarning, match="on the data given.*fitted to inputs that were made up. Try"
    ):
        small = pc.sketchify(model, 0.05, data=data, progress=False, **OPTIONS)
    report = pc.sketch_report(small)
    assert "on the data given, too few to fit to, 3 batches" in str(report).splitlines()[0]
    assert all("data too few" in row.note for row in report.sketched)
    same = pc.sketchify(model, 0.05, progress=False, **OPTIONS)
    assert all(
        torch.equal(one, other) for one, other in zip(small.parameters(), same.parameters(), strict=True)
    )


def test_who_gave_few_data_is_not_told_that_none_was_given(recwarn):
    torch.manual_seed(0)
    model = nn.Sequential(nn.ConvTranspose1d(24, 24, 4, stride=2), nn.Tanh()).eval()  # inputs not made up
    pc.sketchify(model, 0.9, data=[torch.randn(40, 24, 9)], progress=False, **OPTIONS)
    assert not [one for one in recwarn if "no data was given" in str(one.message)]
    pc.sketchify(model, 0.9, progress=False, **OPTIONS)
    assert [one for one in recwarn if "no data was given" in str(one.message)]


def test_weights_alone_are_compared_with_a_fit_to_all_that_is_learnt_from():
    """Few batches try the plans, and fewer rows would make data look worse than it is."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 8)).eval()
    data = [torch.randn(60, 48) for _ in range(10)]
    tried, usual = [], held_out.fit_plan

    def fit(studied, config, plan, calls, folder, **options):
        tried.append((plan.allocation, len(calls)))
        return usual(studied, config, plan, calls, folder, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(held_out, "fit_plan", fit)
        report = pc.sketch_report(pc.sketchify(model, 0.4, data=data, **OPTIONS))
    *few, last = tried
    assert {count for _, count in few} == {2}
    assert last == (report.allocation, 8)  # which all of the data speaks for


def test_gradients_are_taken_once_whatever_ridges_are_tried(monkeypatch):
    model, shape = made("mlp")
    taken, studies = [], []

    def gradients(*args, **kwargs):
        taken.append(0)
        return output_gradients(*args, **kwargs)

    def best(studied, config, study_with):
        studies.extend((studied.study, *study_with([0.5, 0.7]), *study_with([0.7])))
        return best_study(studied, config, study_with)

    output_gradients, best_study = study.output_gradients, calibrate.best_study
    monkeypatch.setattr(study, "output_gradients", gradients)
    monkeypatch.setattr(calibrate, "best_study", best)
    pc.sketchify(model, 0.4, data=[torch.randn(1, *shape) for _ in range(6)], **OPTIONS)
    first, other, last, alone = studies
    assert len(taken) == 1
    assert other.ridge == 0.5
    assert first.weights.keys() == other.weights.keys() != set()
    assert not torch.equal(first.values["0"], other.values["0"])
    assert last.ridge == alone.ridge == 0.7
    assert last.reached == alone.reached
    assert all(torch.equal(last.values[name], alone.values[name]) for name in first.values)


class Normed(nn.Module):
    """Batch norms that know what the model was trained on: blurred images, of a mean of their own."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(4, 24, 3, padding=1), nn.Conv2d(24, 24, 3, padding=1)
        self.first, self.second = nn.BatchNorm2d(24), nn.BatchNorm2d(24)
        self.head = nn.Linear(24, 6)

    def forward(self, x):
        x = torch.relu(self.first(self.one(x)))
        return self.head(torch.relu(self.second(self.two(x))).mean((2, 3)))


def blurred(count, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, 10, 10, generator=generator)
    return nn.functional.avg_pool2d(x, 3, 1) * 3 + 1.5


@pytest.fixture
def normed():
    torch.manual_seed(0)
    model = Normed()
    for norm in (model.first, model.second):
        norm.momentum = None
    with torch.no_grad():
        model(blurred(256, 1))
    return model.eval()


@pytest.mark.parametrize(
    "data",
    [torch.randn(64, 4, 8, 8), 255 * blurred(64, 2), blurred(64, 2) - 2],
    ids=["noise", "not normalised", "shifted"],
)
def test_data_unlike_the_model_is_not_used(normed, data):
    none = pc.sketchify(normed, 0.5, **OPTIONS)
    with pytest.warns(SketchQualityWarning, match="unlike what the model was trained on: it is off .* by"):
        small = pc.sketchify(normed, 0.5, data=list(data.split(16)), **OPTIONS)
    assert all(torch.equal(a, b) for a, b in zip(small.parameters(), none.parameters(), strict=True))
    assert all("is not used" in row.note for row in pc.sketch_report(small).sketched)


@pytest.mark.filterwarnings("error::panther_compile.errors.SketchQualityWarning")
def test_data_like_the_model_is_used(normed):
    small = pc.sketchify(normed, 0.5, data=list(blurred(128, 3).split(16)), **OPTIONS)
    assert not any("not used" in row.note for row in pc.sketch_report(small).sketched)
    assert off_batch_norms(normed, [Call((blurred(64, 4),), {})]) < 0.03
    untrained = Normed().eval()
    assert off_batch_norms(untrained, [Call((torch.randn(8, 4, 8, 8) + 9,), {})]) == 0.0


def test_few_data_are_believed_less():
    """The ridge that held-out samples speak for."""
    model, shape = made("mlp")
    torch.manual_seed(3)
    basis = torch.randn(4, *shape)

    def batches(count, rows):  # four directions, and little of all others
        return [torch.randn(rows, 4) @ basis + 0.05 * torch.randn(rows, *shape) for _ in range(count)]

    def ridge_of(data):
        folder = {}
        study_model = few_data.best_study

        def keep(studied, config, study):
            folder["study"] = study_model(studied, config, study)
            return folder["study"]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(calibrate, "best_study", keep)
            pc.sketchify(model, 0.4, data=data, **OPTIONS)
        return folder["study"].ridge

    assert ridge_of(batches(50, 32)) == RIDGE
    assert ridge_of([torch.randn(2, *shape) for _ in range(12)]) > RIDGE


def test_batches_are_divided_where_samples_are_independent():
    torch.manual_seed(0)
    linear, norm = nn.Linear(8, 3), nn.BatchNorm1d(8)
    x = torch.randn(10, 8)
    calls = divided(linear.eval(), [Call((x,), {})], 5)
    assert [tuple(call.args[0].shape) for call in calls] == [(2, 8)] * 5
    assert torch.equal(torch.cat([call.args[0] for call in calls]), x)
    assert len(divided(norm.train(), [Call((x,), {})], 5)) == 1  # samples see one another
    assert len(divided(linear, [Call((x[:1],), {})], 5)) == 1
    assert len(divided(linear, [Call((x,), {})] * 5, 5)) == 5
    rows = []
    linear.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    parts = divided(linear, [Call((x,), {}), Call((x + 1,), {}), Call((x[:3],), {})], 6)
    assert rows == [10, 5, 5, 3, 2, 1]  # each form once
    assert [len(part.args[0]) for part in parts] == [5, 5, 5, 5, 2, 1]
    assert torch.equal(torch.cat([part.args[0] for part in parts]), torch.cat([x, x + 1, x[:3]]))
    attention = nn.MultiheadAttention(8, 2).eval()  # the length comes first
    sequence = torch.randn(6, 2, 8)
    assert len(divided(attention, [Call((sequence,) * 3, {})], 5)) == 1


def test_batches_of_large_results_are_divided():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50)).eval()
    texts = [Call((torch.randint(50, shape),), {}) for shape in ((8, 6), (8, 3), (1, 90), (5, 6))]
    parts = divided_by_results(model, texts, 700)  # numbers, of 300 a token for each of the longest texts
    assert [tuple(one.args[0].shape) for one in parts] == [(2, 6)] * 4 + [(4, 3)] * 2 + [(1, 90)] + [
        (2, 6),
        (2, 6),
        (1, 6),
    ]
    assert divided_by_results(model, texts, 5000) == texts
    assert divided_by_results(model, texts[2:], 10) == texts[2:]  # of one text
    norm, x = nn.BatchNorm1d(8).train(), torch.randn(10, 8)
    assert [_rows(call) for call in divided_by_results(norm, [Call((x,), {})], 16)] == [10]


def test_the_first_samples_stand_for_batches_of_the_same_form():
    torch.manual_seed(0)
    linear, norm = nn.Linear(8, 3).eval(), nn.BatchNorm1d(8).train()
    x = torch.randn(10, 8)
    calls = [Call((x,), {}), Call((x + 1,), {}), Call((), {"input": x + 2}), Call((x[:1] + 3,), {})]
    assert [_rows(call) for call in first_samples(linear, calls)] == [10, 1, 10, 1]
    assert torch.equal(first_samples(linear, calls)[1].args[0], x[:1] + 1)
    assert [_rows(call) for call in first_samples(norm, calls[:2])] == [10, 10]  # samples see one another
    assert first_samples(linear, calls[:1]) == calls[:1]
    flags = [Call((x,), {"flag": flag}) for flag in (False, False, True)]

    class Flagged(nn.Linear):
        def forward(self, x, flag):
            return super().forward(x).relu() if flag else super().forward(x)

    found = first_samples(Flagged(8, 3).eval(), flags)  # another flag may lead another way
    assert [_rows(call) for call in found] == [10, 1, 10]


def _rows(call):
    return len((call.args or tuple(call.kwargs.values()))[0])


def test_a_sketched_model_that_runs_out_of_its_dtype_is_fitted_to_the_dense_one():
    """Layers before a layer may give it Inf; its moments, and their eigenvalues, would be NaN."""

    class Blows(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.third = nn.Linear(32, 32), nn.Conv2d(8, 8, 3), nn.Linear(16, 8)

        def forward(self, x):
            hidden = self.first(x)
            # Exact to the bit in the dense model alone.
            hidden = hidden + torch.where(
                hidden == nn.functional.linear(x, self.kept, self.bias), 0.0, torch.inf
            )
            return self.third(self.second(hidden.view(-1, 8, 6, 6)[..., :6, :6]).flatten(-2))

    torch.manual_seed(0)
    model = Blows()
    model.first = nn.Linear(32, 288)
    model.register_buffer("kept", model.first.weight.detach().clone())
    model.register_buffer("bias", model.first.bias.detach().clone())
    data = [torch.randn(64, 32) for _ in range(6)]
    with pytest.warns(SketchQualityWarning, match="does not answer"):
        small = pc.sketchify(model.eval(), 0.5, data=data, **OPTIONS)
    assert all(bool(one.isfinite().all()) for one in small.parameters())
