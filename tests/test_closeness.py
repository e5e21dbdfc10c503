"""How far the outputs of a sketched model are: first line of the report, part of the record, a warning."""

import warnings

import pytest
import torch
from torch import nn

import panther_compile as pc
from panther_compile import sketching
from panther_compile.calibration.closeness import OutputSums, compare_models, compare_outputs, paired
from panther_compile.errors import SketchQualityWarning
from panther_compile.healing.report import HealReport
from panther_compile.models.batches import Call
from panther_compile.models.outputs import distance, is_finite, shown
from panther_compile.records import Closeness


class Counting(nn.Module):
    """Counts its calls in a buffer, in place."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.GELU())
        self.head = nn.Linear(64, 10)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.head(self.body(x))


def mlp(width=64):
    return nn.Sequential(
        nn.Linear(width, 128), nn.GELU(), nn.Linear(128, width), nn.GELU(), nn.Linear(width, 10)
    )


def batches(width=64):
    return [torch.randn(64, width) for _ in range(4)]


def replaced(model, name, change):
    """The model's layer, and a copy of it that `change` was done to."""
    old, new = model.get_submodule(name), nn.Linear(64, 10)
    new.load_state_dict(old.state_dict())
    with torch.no_grad():
        change(new)
    return {old: new}


def first_line(model):
    return str(pc.sketch_report(model)).splitlines()[0]


def test_equal_models_are_good_and_a_constant_answer_is_destroyed():
    model, calls = mlp(), [Call((x,), {}) for x in batches()]
    same = replaced(model, "4", lambda layer: None)
    none = replaced(model, "4", lambda layer: layer.weight.zero_())
    for logits in (True, False):
        equal = compare_outputs(model, same, calls, logits=logits, inputs="noise")
        assert (equal.grade, equal.distance) == ("good", pytest.approx(0.0, abs=1e-6))
        constant = compare_outputs(model, none, calls, logits=logits, inputs="noise")
        assert constant.grade == "destroyed"
        assert constant.share >= 0.9


def test_rows_that_the_dense_model_does_not_tell_apart_destroy_nothing():
    """As random inputs are to an image model: any rounding is more than what it tells of them."""
    calls = [Call((1e-4 * x,), {}) for x in batches()]
    moved = replaced(mlp(), "4", lambda layer: layer.bias.add_(1e-3 * torch.randn(10)))
    (old,) = moved
    found = compare_outputs(nn.Sequential(old), moved, calls, logits=True, inputs="noise")
    assert found.distance < 1e-5
    assert found.grade == "good"


def test_share_is_of_the_deviation_not_of_the_mean():
    model = nn.Sequential(nn.Linear(64, 10))
    calls = [Call((x,), {}) for x in batches()]
    with torch.no_grad():
        model[0].bias.fill_(100.0)
    none = replaced(model, "0", lambda layer: layer.weight.zero_())
    found = compare_outputs(model, none, calls, logits=False, inputs="noise")
    assert found.share == pytest.approx(1.0, abs=0.1)  # of the plain size it is less than a thousandth


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_answers_that_are_the_same_for_all_inputs_are_put_over_their_size(dtype):
    torch.manual_seed(0)
    model = mlp()
    moved = replaced(model, "4", lambda layer: layer.bias.mul_(1 + 2 * torch.finfo(dtype).eps))
    model.to(dtype)
    for layer in moved.values():
        layer.to(dtype)
    calls = [Call((torch.zeros(64, 64, dtype=dtype),), {})] * 4
    found = compare_outputs(model, moved, calls, logits=False, inputs="zeros")
    assert 0 < found.distance < 4 * torch.finfo(dtype).eps
    calls = [Call((one + x.to(dtype),), {}) for (one,) in [call.args for call in calls] for x in batches()]
    varied = compare_outputs(model, moved, calls, logits=False, inputs="noise")
    assert varied.distance > found.distance


@pytest.mark.parametrize("size", [1e-20, 1e-10, 1e10, 1e30])
def test_share_does_not_depend_on_the_size_of_what_is_answered(size):
    torch.manual_seed(0)
    wanted = torch.randn(64, 10)
    found = wanted + 0.1 * torch.randn(64, 10)
    one, other = (compare_pairs(scale * wanted, scale * found) for scale in (1.0, size))
    assert other.share == pytest.approx(one.share, rel=1e-4)
    assert distance(size * wanted, size * found, None) == pytest.approx(distance(wanted, found, None))


def compare_pairs(wanted, found):
    sums = OutputSums()
    sums.see([paired("", wanted, found, is_logits=False)])
    return sums.closeness("noise")


@pytest.mark.parametrize(("name", "grade"), [("pred_boxes", "destroyed"), ("last_hidden_state", "good")])
def test_boxes_count_beside_logits(name, grade):
    """A detector whose classes are right and whose boxes are not finds nothing."""

    class Detector(nn.Module):
        def __init__(self):
            super().__init__()
            self.classes, self.other = nn.Linear(64, 10), nn.Linear(64, 10)

        def forward(self, x):
            return {"logits": self.classes(x), name: self.other(x).sigmoid()}

    model = Detector()
    new = replaced(model, "other", lambda layer: layer.weight.zero_())
    calls = [Call((x,), {}) for x in batches()]
    assert compare_outputs(model, new, calls, logits=None, inputs="noise").grade == grade


def test_a_small_divergence_that_destroys_says_of_how_little():
    """As random inputs are to a reader of pictures: it sees nothing in any."""
    calls = [Call((0.03 * x,), {}) for x in batches()]
    none = replaced(mlp(), "4", lambda layer: layer.weight.zero_())
    (old,) = none
    found = compare_outputs(nn.Sequential(old), none, calls, logits=True, inputs="noise")
    assert found.grade == "destroyed"
    assert found.distance < 0.05
    differs = f"{found.distance / found.share:.2g}"
    assert f" from the dense model's, whose answers differ by {differs} among themselves, the" in str(found)
    far = Closeness("destroyed", "KL", 5.0, 2.0, 0.1, "noise")
    assert str(far).startswith("outputs: destroyed: KL 5 nats a row from the dense model's, the same first")


def test_divergence_is_the_one_of_torch():
    model, x = mlp(), torch.randn(32, 64)
    other = replaced(model, "4", lambda layer: layer.weight.mul_(3.0))
    found = compare_outputs(model, other, [Call((x,), {})], logits=True, inputs="noise")
    hidden = model[:4](x)
    p, q = model[4](hidden).log_softmax(-1), other[model[4]](hidden).log_softmax(-1)
    wanted = nn.functional.kl_div(q, p, log_target=True, reduction="batchmean")
    assert found.distance == pytest.approx(wanted.item(), rel=1e-4)
    assert found.agreement == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).float().mean()))


def test_nan_is_destroyed():
    model, calls = mlp(), [Call((x,), {}) for x in batches()]
    broken = replaced(model, "4", lambda layer: layer.weight.fill_(torch.nan))
    for logits in (True, False):
        assert compare_outputs(model, broken, calls, logits=logits, inputs="noise").grade == "destroyed"


class Sampling(nn.Module):
    """Answers a mean and noise of its own, as a policy or an autoencoder does."""

    def __init__(self):
        super().__init__()
        self.body = mlp()

    def forward(self, x):
        mean = self.body(x + torch.randn_like(x))
        return mean + torch.randn_like(mean)


def test_models_that_draw_numbers_are_compared_on_the_same_ones():
    torch.manual_seed(0)
    model, data = Sampling(), batches()
    small = pc.sketchify(model, 0.9, data=data, min_params=0, allow_slower=True, progress=False)
    found = pc.sketch_report(small).closeness
    assert (found.grade, found.share < 0.01) == ("good", True)
    healed = pc.heal(small, teacher=model, data=data, steps=1, progress=False)
    assert dict(pc.heal_report(healed).before)["output"] < 0.05


def test_report_opens_with_the_outputs():
    small = pc.sketchify(mlp(), 0.9, data=batches(), allow_slower=True, narrow=False)
    assert first_line(small).startswith("outputs: good: relative error ")
    assert first_line(small).endswith("on the data it was fitted to, 4 batches")


def test_a_sketch_that_fits_few_rows_alone_is_judged_by_rows_held_out():
    torch.manual_seed(0)
    model = mlp(256)
    data = list(torch.randn(60, 256).split(12))  # of 256 inputs each
    others = [Call((torch.randn(512, 256),), {})]
    small = pc.sketchify(model, 0.7, data=data, allow_slower=True, narrow=False)
    found = pc.sketch_report(small).closeness
    assert "1 batch held out from a fit to 4 (" in first_line(small)
    unseen = compare_outputs(model, {model: small}, others, logits=False, inputs="others")
    assert found.distance == pytest.approx(unseen.distance, rel=0.35)
    assert found.grade == unseen.grade != "good"


def test_a_fit_that_few_rows_flatter_is_judged_by_rows_held_out_whatever_the_grade():
    torch.manual_seed(0)
    model, base = mlp(256), torch.randn(8, 256) / 3
    data = [x @ base + 0.05 * torch.randn(12, 256) for x in torch.randn(60, 8).split(12)]
    small = pc.sketchify(model, 0.9, data=data, allow_slower=True, narrow=False)
    others = [Call((torch.randn(256, 8) @ base + 0.05 * torch.randn(256, 256),), {})]
    unseen = compare_outputs(model, {model: small}, others, logits=False, inputs="others")
    found = pc.sketch_report(small).closeness
    assert found.grade == unseen.grade == "good"
    assert found.distance == pytest.approx(unseen.distance, rel=0.5)
    assert "1 batch held out from a fit to 4 (" in first_line(small)


class Chosen(nn.Module):
    """Gives the rows that it chooses, as a matcher or a detector does."""

    def __init__(self):
        super().__init__()
        self.body, self.chance = mlp(256), nn.Linear(10, 1, bias=False)

    def forward(self, x):
        rows = self.body(x)
        return rows[self.chance(rows - rows.mean(0))[:, 0] > 0]


def test_rows_held_out_may_all_be_of_another_shape():
    torch.manual_seed(0)
    model, data = Chosen(), [torch.randn(24, 256) for _ in range(5)]
    small = pc.sketchify(model, 0.3, data=data, min_params=0, allow_slower=True, progress=False)
    found = str(pc.sketch_report(small).closeness)
    assert found.startswith("outputs: destroyed")
    assert found.endswith("but for 3 of 5 results, of another shape")


def test_of_a_healed_sketch_the_fit_that_judges_it_is_said_not_to_be_healed(monkeypatch):
    losses = {"output": 1.0}
    better = HealReport(losses, losses, steps=1, kept_step=1, stopped="", batches=(4, 1), lr=0.1)
    monkeypatch.setattr(sketching, "refine", lambda *_: better)
    torch.manual_seed(0)
    data = list(torch.randn(60, 256).split(12))
    small = pc.sketchify(mlp(256), 0.7, data=data, allow_slower=True, narrow=False, refine="kl")
    assert "1 batch held out from a fit to 4, not healed (" in first_line(small)


def test_many_rows_are_judged_as_they_are():
    small = pc.sketchify(mlp(), 0.3, data=[torch.randn(512, 64) for _ in range(5)], allow_slower=True)
    assert first_line(small).endswith("on the data it was fitted to, 5 batches")


def test_closeness_is_saved_and_loaded(tmp_path):
    small = pc.sketchify(mlp(), 0.5, data=batches(), allow_slower=True, narrow=False)
    pc.save_sketched(small, tmp_path)
    assert pc.sketch_report(pc.load_sketched(mlp(), tmp_path)) == pc.sketch_report(small)
    assert pc.sketch_report(small).closeness.grade


def test_a_wreck_is_warned_of_with_ratio_cause_and_remedy():
    with pytest.warns(
        SketchQualityWarning, match=r"ratio 0\.05 .*destroyed.*Try a larger ratio; or exclude=\["
    ):
        pc.sketchify(mlp(), 0.05, data=batches(), allow_slower=True, narrow=False)


def test_what_is_close_is_not_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error", SketchQualityWarning)
        pc.sketchify(mlp(), 0.9, data=batches(), allow_slower=True, narrow=False)


@pytest.mark.parametrize("inplace", [False, True])
def test_comparison_leaves_the_model_as_it_was(inplace):
    model = Counting().train()
    calls = [Call((x,), {}) for x in batches()]
    compare_outputs(model, {model.head: nn.Linear(64, 10).train()}, calls, logits=None, inputs="noise")
    assert float(model.calls) == 0
    assert model.training
    small = pc.sketchify(model, 0.5, data=batches(), allow_slower=True, narrow=False, inplace=inplace)
    assert pc.sketch_report(small).closeness.grade


def test_healed_later_the_first_line_says_so():
    model = mlp()
    small = pc.sketchify(model, 0.3, data=batches(), allow_slower=True, narrow=False)
    healed = pc.heal(small, teacher=model, data=batches(), steps=20)
    assert pc.heal_report(healed).reverted or first_line(healed).endswith("before it was healed")


class Remembering(nn.Module):
    """Changes a tensor that it is given, as a cache is."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.GELU())
        self.head = nn.Linear(64, 10)

    def forward(self, x, calls):
        calls.add_(1)
        return self.head(self.body(x))


@pytest.mark.parametrize("ratio", [0.05, 0.95])
def test_backend_warns_of_a_wreck_and_calls_nothing_twice(ratio, fresh_dynamo):
    model, x, calls = Remembering().eval(), torch.randn(64, 64), torch.zeros(())
    options = {"ratio": ratio, "allow_slower": True, "min_params": 256, "inner": "eager"}
    compiled = torch.compile(model, backend="panther", options=options)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        compiled(x, calls)
    found = [str(one.message) for one in caught if one.category is SketchQualityWarning]
    assert len(found) == (ratio < 0.5)
    assert all("on the call being compiled" in one and "ratio 0.05" in one for one in found)
    assert float(calls) == 1


class Timed(nn.Module):
    """Gives as many frames as it predicts, as text to speech does: more of inputs above a threshold."""

    def __init__(self, least):
        super().__init__()
        self.frames, self.least = nn.Linear(8, 8), least

    def forward(self, x):
        return self.frames(x).expand(6 if float(x.mean()) > self.least else 4, *x.shape)


def test_results_of_another_shape_are_counted():
    calls = [Call((torch.full((2, 8), float(value)),), {}) for value in range(4)]
    dense, some, all_of_them = Timed(1.5), Timed(0.5), Timed(9.0)
    some.frames = all_of_them.frames = dense.frames
    found = compare_models(dense, some, calls, logits=False, inputs="4 batches")
    assert found.grade == "good"
    assert str(found).endswith("on 4 batches, but for 1 of 4 results, of another shape")
    none = compare_models(dense, all_of_them, calls[2:], logits=False, inputs="2 batches")
    said = "outputs: not compared with the dense model's: its results are of another shape, all of them"
    assert str(none) == said
    assert none.is_of_other_shapes
    assert none.share == 1.0  # so that what can be compared is taken before it


def test_a_sketch_whose_results_are_all_of_another_shape_is_warned_of():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.lasts, self.frames = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            return self.frames(x).expand(1 + int(1e5 * self.lasts(x).abs().sum()) % 1009, *x.shape)

    with pytest.warns(SketchQualityWarning, match=r"ratio 0\.5.*results are of another shape.*larger ratio"):
        small = pc.sketchify(Counts(), 0.5, data=batches(), progress=False, allow_slower=True)
    assert pc.sketch_report(small).closeness.is_of_other_shapes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64])
def test_finite_numbers_whatever_their_sum(dtype):
    assert is_finite(torch.ones(0, 3, dtype=dtype))
    largest = torch.full((5,), torch.finfo(dtype).max if dtype.is_floating_point else 2**30)
    assert is_finite(largest.to(dtype))
    if dtype.is_floating_point:
        both = torch.tensor([1.0, torch.inf, -torch.inf, 2.0], dtype=dtype)
        assert not any(map(is_finite, (both, both[:2], both.neg()[1:2], (both - both)[:2])))


def test_numbers_are_shown_where_the_dense_model_has_them():
    wanted, found = torch.tensor([1.0, -torch.inf, 3.0]), torch.tensor([2.0, 5.0, torch.nan])
    filled, beside = shown(wanted, found, -9.0)
    assert filled.tolist() == [1.0, -9.0, 3.0]
    assert beside[:2].tolist() == [2.0, -9.0]
    assert shown(wanted[::2], found[::2], 0.0)[0].tolist() == [1.0, 3.0]
