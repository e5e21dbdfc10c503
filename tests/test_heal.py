"""Healing: closer to the teacher on batches it never saw, never worse, and nothing else is touched."""

import copy
import math
import random
import warnings
from dataclasses import replace

import pytest
import torch
from torch import fx, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import panther_compile as pc
from panther_compile import sketching
from panther_compile.errors import (
    ConfigError,
    ConfigTypeError,
    DataError,
    HealingError,
    NoTargetError,
    SketchQualityWarning,
    TeacherMismatchError,
    WeightError,
    WrappedModelError,
)
from panther_compile.healing import healer
from panther_compile.healing.descent import Descent, Factor
from panther_compile.healing.landmarks import MOST, find_landmarks, watched
from panther_compile.healing.rates import FIRST, TOP, USUAL, Rates
from panther_compile.healing.report import HEALED_SINCE
from panther_compile.layers.base import SketchedLayer
from panther_compile.models.batches import Call
from panther_compile.records import RECORD_ATTRIBUTE, Closeness, keep_record

SKETCH = dict(min_params=0, allow_slower=True)


class Encoder(nn.Module):
    """Inputs on a line in a space; padded positions hold a huge value that a loss must not see."""

    def __init__(self, depth=2, width=32, classes=10):
        super().__init__()
        self.embed = nn.Linear(16, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.5, batch_first=True)
            for _ in range(depth)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, x, attention_mask=None):
        x = self.embed(x)
        hidden = None if attention_mask is None else ~attention_mask.bool()
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=hidden)
        return {"logits": self.head(x)}


def encoder(seed=0, **options):
    torch.manual_seed(seed)
    return Encoder(**options).eval()


def batches(count=8, masked=True, seed=1):
    generator = torch.Generator().manual_seed(seed)
    subspace = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    found = []
    for _ in range(count):
        batch = {"x": torch.randn(4, 10, 4, generator=generator) @ subspace}
        if masked:
            batch["attention_mask"] = torch.ones(4, 10, dtype=torch.long)
            batch["attention_mask"][:2, 6:] = 0
        found.append(batch)
    return found


def sketched_encoder(teacher, ratio=0.4):
    return pc.sketchify(teacher, ratio, include="layers.*", **SKETCH)


def conv_net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 24, 3, padding=1),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.Conv2d(24, 24, 3, stride=2, padding=1),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(24 * 16, 5),
    ).eval()


def images(count=8):
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(8, 3, 8, 8, generator=generator) for _ in range(count)]


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(before, model):
    return all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in before.items())


@pytest.mark.parametrize("method", ["kl", "block"])
def test_transformer_gets_closer_on_batches_it_never_saw(method):
    teacher = encoder()
    small = sketched_encoder(teacher)
    healed = pc.heal(small, teacher=teacher, data=batches(), steps=60, method=method, lr=3e-3)

    report = pc.heal_report(healed)
    assert not report.reverted
    assert list(report.before) == ["layers.0", "layers.1", "output"]
    assert all(report.after[name] < 0.8 * report.before[name] for name in report.before)
    assert report.batches == (7, 1)

    unseen = batches(2, seed=9)

    def error(model):
        kept = [b["attention_mask"].bool() for b in unseen]
        return sum(
            float((model(**b)["logits"] - teacher(**b)["logits"])[k].square().sum())
            for b, k in zip(unseen, kept, strict=True)
        )

    with torch.no_grad():
        assert error(healed) < 0.5 * error(small)


def test_of_many_batches_few_are_held_out():
    """Each is run some 20 times; on a GPU 80 of them took ten times as long as the steps."""
    teacher = encoder()
    small = sketched_encoder(teacher)
    for steps, held_out, wanted in ((2, 0.5, 8), (2, 0.1, 3), (360, 0.5, 9)):
        assert healer._judges(held_out, 30, steps) == wanted
    healed = pc.heal(small, teacher=teacher, data=batches(30), steps=2, held_out=0.5)
    assert pc.heal_report(healed).batches == (22, 8)


def test_convolutions_get_closer():
    teacher = conv_net()
    small = pc.sketchify(teacher, 0.4, exclude="7", **SKETCH)
    healed = pc.heal(small, teacher=teacher, data=images(), steps=40, lr=1e-2)

    report = pc.heal_report(healed)
    assert report.after["output"] < 0.7 * report.before["output"]
    batch = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        wanted = teacher(batch)
        assert (healed(batch) - wanted).norm() < 0.9 * (small(batch) - wanted).norm()


@pytest.fixture
def whole_steps(monkeypatch):
    """Steps as long as the rate says."""
    monkeypatch.setattr("panther_compile.healing.descent.MOST_GAIN", math.inf)


@pytest.mark.parametrize("lr", [100.0, 1e30])
def test_an_absurd_rate_is_cut_to_what_there_is_to_gain(lr):
    teacher = encoder()
    healed = pc.heal(sketched_encoder(teacher), teacher=teacher, data=batches(), steps=20, lr=lr)
    report = pc.heal_report(healed)
    assert report.after["output"] < 0.5 * report.before["output"]
    assert report.lr == lr


def test_absurd_rate_changes_nothing(whole_steps):
    teacher = encoder()
    small = sketched_encoder(teacher)
    healed = pc.heal(small, teacher=teacher, data=batches(), steps=20, lr=1e6)

    report = pc.heal_report(healed)
    assert report.reverted
    assert report.before == report.after
    assert same(state(small), healed)
    assert "nothing was changed" in str(report)


@pytest.mark.slow
def test_a_rate_that_leads_astray_is_lowered(whole_steps):
    teacher = encoder()
    small = sketched_encoder(teacher)
    reports = [
        pc.heal_report(pc.heal(small, teacher=teacher, data=batches(), steps=60, lr=lr)) for lr in (0.05, 1.0)
    ]
    assert reports[0].lr == 0.05
    assert reports[1].lr < 1.0
    assert "at last at a rate of" in str(reports[1])
    for report in reports:
        assert report.after["output"] < 0.3 * report.before["output"]


def test_loss_that_overflows_while_healing_is_reported_and_reverted(whole_steps):
    teacher = encoder()
    small = sketched_encoder(teacher)
    healed = pc.heal(small, teacher=teacher, data=batches(), steps=20, lr=1e30)
    assert "is not finite after step" in pc.heal_report(healed).stopped
    assert same(state(small), healed)


def test_same_seed_same_model_whatever_the_surroundings():
    teacher = encoder()
    small = sketched_encoder(teacher)
    options = dict(teacher=teacher, data=batches(), steps=10, seed=3)
    first = pc.heal(small, **options)
    torch.manual_seed(99)
    random.seed(99)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        second = pc.heal(small, **options)
    assert same(state(first), second)
    other = pc.heal(small, **options | {"seed": 4})
    assert not same(state(first), other)


def test_nothing_else_is_touched():
    teacher = encoder()
    small = sketched_encoder(teacher)
    teacher.train()
    teacher.layers[0].eval()
    small.layers[1].train()
    small.layers[0].linear1.up.bias.requires_grad_(False)
    before = state(teacher), state(small)
    modes = [module.training for model in (teacher, small) for module in model.modules()]
    flags = [p.requires_grad for model in (teacher, small) for p in model.parameters()]
    torch.manual_seed(5)
    random.seed(5)
    drawn = torch.random.get_rng_state(), random.getstate()

    healed = pc.heal(small, teacher=teacher, data=batches(), steps=4)

    assert same(before[0], teacher)
    assert same(before[1], small)
    assert modes == [module.training for model in (teacher, small) for module in model.modules()]
    assert modes[-len(list(small.modules())) :] == [module.training for module in healed.modules()]
    assert flags == [p.requires_grad for model in (teacher, small) for p in model.parameters()]
    frozen = healed.layers[0].linear1.up.bias
    assert not frozen.requires_grad
    assert not torch.equal(frozen, small.layers[0].linear1.up.bias)
    assert all(p.grad is None for model in (teacher, small, healed) for p in model.parameters())
    assert torch.equal(drawn[0], torch.random.get_rng_state())
    assert drawn[1] == random.getstate()
    assert not any(m._forward_hooks for model in (teacher, healed) for m in model.modules())
    assert torch.backends.mha.get_fastpath_enabled()


def test_only_the_sketched_layers_learn():
    teacher = encoder()
    small = sketched_encoder(teacher)
    healed = pc.heal(small, teacher=teacher, data=batches(), steps=10)
    inside = [name for name, module in small.named_modules() if isinstance(module, SketchedLayer)]
    before = state(small)
    for name, tensor in healed.state_dict().items():
        learns = tensor.numel() > 0 and name.startswith(tuple(f"{layer}." for layer in inside))
        assert torch.equal(tensor, before[name]) is not learns, name


def test_in_place_and_copy():
    teacher = encoder()
    small = sketched_encoder(teacher)
    before = state(small)
    healed = pc.heal(small, teacher=teacher, data=batches(), steps=10)
    assert healed is not small
    assert same(before, small)
    with pytest.raises(NoTargetError, match="call heal first"):
        pc.heal_report(small)
    assert pc.heal(small, teacher=teacher, data=batches(), steps=10, inplace=True) is small
    assert same(state(healed), small)
    assert pc.heal_report(copy.deepcopy(small)).kept_step == pc.heal_report(healed).kept_step


def test_failure_half_way_leaves_the_best_state():
    teacher = encoder()
    small = sketched_encoder(teacher)
    before = state(small)
    calls = 0

    def interrupt(*_):
        nonlocal calls
        calls += 1
        if calls == 6:
            raise KeyboardInterrupt

    small.layers[0].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        pc.heal(small, teacher=teacher, data=batches(), steps=100, lr=1.0, inplace=True)
    assert same(before, small)


def test_a_model_that_was_healed_until_an_interrupt_tells_of_it():
    teacher = encoder()
    small = sketched_encoder(teacher)
    before, calls = state(small), 0

    def interrupt(*_):
        nonlocal calls
        calls += 1
        if calls == 20:
            raise KeyboardInterrupt

    hook = small.layers[0].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        pc.heal(small, teacher=teacher, data=batches(), steps=100, lr=1e-3, inplace=True)
    hook.remove()
    assert not same(before, small)
    report = pc.heal_report(small)
    assert (report.stopped, report.lr) == ("broken off", 1e-3)
    assert 0 < report.kept_step <= report.steps < 20
    assert report.after["output"] < report.before["output"]
    assert {row.note for row in pc.sketch_report(small).sketched} == {HEALED_SINCE}


def test_sketch_report_says_that_its_errors_are_of_before(tmp_path):
    teacher = encoder()
    small = sketched_encoder(teacher)
    healed = pc.heal(small, teacher=teacher, data=batches(), steps=5)
    pc.save_sketched(healed, tmp_path / "small")
    for model in (healed, pc.load_sketched(encoder(1), tmp_path / "small")):
        assert {row.note for row in pc.sketch_report(model).sketched} == {HEALED_SINCE}
    assert {row.note for row in pc.sketch_report(small).sketched} == {""}
    again = pc.heal(healed, teacher=teacher, data=batches(), steps=5)
    assert {row.note for row in pc.sketch_report(again).sketched} == {HEALED_SINCE}


def test_closeness_is_said_once_to_be_of_before():
    teacher = encoder()
    small = sketched_encoder(teacher)
    close = Closeness("good", "relative error", 0.1, 0.1, None, "3 batches")
    keep_record(small, replace(vars(small)[RECORD_ATTRIBUTE], closeness=close))
    for _ in range(2):
        small = pc.heal(small, teacher=teacher, data=batches(), steps=5)
        assert pc.sketch_report(small).closeness.inputs == "3 batches; before it was healed"


@pytest.mark.parametrize("inplace", [False, True])
def test_what_was_sketched_before_is_not_refined(inplace, monkeypatch):
    healed, refine = [], sketching.refine
    monkeypatch.setattr(
        sketching, "refine", lambda small, *rest: healed.append(small) or refine(small, *rest)
    )
    teacher = encoder()
    first = pc.sketchify(teacher, 0.5, include="layers.*.linear1", **SKETCH)
    before = {name: one.clone() for name, one in first.state_dict().items() if "linear1" in name}
    options = {"refine": "kl", "refine_steps": 5, "inplace": inplace, "narrow": False, **SKETCH}
    second = pc.sketchify(first, 0.5, data=batches(), include="layers.*.linear2", **options)
    assert not pc.heal_report(second).reverted
    assert same(before, second)
    assert same(state(healed[0]), second)
    noted = [row.name for row in pc.sketch_report(second).sketched if HEALED_SINCE in row.note]
    assert noted
    assert all("linear2" in name for name in noted)


def test_nothing_new_is_nothing_to_refine():
    model = encoder()
    whole = pc.sketchify(model, 1.0, data=batches(2), refine="kl", refine_steps=1, **SKETCH)
    assert same(state(model), whole)
    with pytest.raises(NoTargetError, match="call heal first"):
        pc.heal_report(whole)


@pytest.mark.slow
@pytest.mark.parametrize("inplace", [False, True])
def test_a_model_that_was_refined_tells_of_it(inplace):
    options = {"refine": "kl", "refine_steps": 10, "inplace": inplace, **SKETCH}
    small = pc.sketchify(conv_net(), 0.2, data=images(4), **options)
    report = pc.heal_report(small)
    # What is descended is the result with its hidden states, which weigh ten times beside features.
    before, after = (one["output"] + 10.0 * one["3"] for one in (report.before, report.after))
    assert report.kept_step
    assert after < before
    assert {row.note for row in pc.sketch_report(small).sketched} == {HEALED_SINCE}


def test_block_that_got_worse_is_put_back(monkeypatch):
    teacher = encoder()
    small = sketched_encoder(teacher)
    with torch.no_grad():
        small.layers[1].linear2.up.weight.mul_(16)
    before = state(small)

    class Mixed(healer.Descent):
        """Mends the second block and spoils the first."""

        @torch.no_grad()
        def step(self, gradients, loss, rate):
            small.layers[1].linear2.up.weight.div_(16)
            small.layers[0].linear2.up.weight.neg_()

    monkeypatch.setattr(healer, "Descent", Mixed)
    pc.heal(small, teacher=teacher, data=batches(), steps=1, inplace=True)
    report = pc.heal_report(small)
    assert report.blocks_reverted == ("layers.0",)
    assert "layers.0: got worse, as it was before" in str(report)
    after = small.state_dict()
    changed = [name for name, tensor in before.items() if not torch.equal(tensor, after[name])]
    assert changed == ["layers.1.linear2.up.weight"]
    healed = {row.name for row in pc.sketch_report(small).sketched if row.note == HEALED_SINCE}
    assert healed
    assert all(name.startswith("layers.1.") for name in healed)


def test_graph_module():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 24), nn.ReLU(), nn.Linear(24, 3))
    teacher = fx.symbolic_trace(net)
    small = pc.sketchify(teacher, 0.4, include=["0", "2"], **SKETCH)
    data = [torch.randn(16, 24, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    healed = pc.heal(small, teacher=teacher, data=data, steps=60, lr=1e-2)
    assert isinstance(healed, fx.GraphModule)
    report = pc.heal_report(copy.deepcopy(healed))
    assert report.after["output"] < report.before["output"]
    assert list(report.before) == ["0", "2", "output"]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(24, 24), nn.Linear(24, 24)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def test_ties_are_kept():
    torch.manual_seed(0)
    teacher = Tied()
    small = pc.sketchify(teacher, 0.4, **SKETCH)
    data = [torch.randn(16, 24, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    healed = pc.heal(small, teacher=teacher, data=data, steps=40, lr=1e-2)
    assert not pc.heal_report(healed).reverted
    assert healed.first.down.weight is healed.second.down.weight
    assert healed.first.up.weight is healed.second.up.weight
    assert healed.first.down.weight is not small.first.down.weight


def test_half_types_learn():
    teacher = encoder().bfloat16()
    small = sketched_encoder(teacher)
    data = [{"x": batch["x"].bfloat16()} for batch in batches(masked=False)]
    healed = pc.heal(small, teacher=teacher, data=data, steps=60, lr=3e-3)
    report = pc.heal_report(healed)
    assert report.after["output"] < 0.8 * report.before["output"]
    assert healed.layers[0].linear1.up.weight.dtype == torch.bfloat16


def test_padding_counts_for_nothing():
    teacher = encoder()
    small = sketched_encoder(teacher)
    data = batches()
    noisy = [dict(batch) for batch in data]
    for batch in noisy:
        batch["x"] = torch.where(batch["attention_mask"][..., None].bool(), batch["x"], 50.0)
    reports = [
        pc.heal_report(pc.heal(small, teacher=teacher, data=given, steps=1)) for given in (data, noisy)
    ]
    for name, loss in reports[0].before.items():
        assert reports[1].before[name] == pytest.approx(loss, rel=1e-4)


def test_answers_that_do_not_fit_are_computed_again():
    teacher = encoder()
    small = sketched_encoder(teacher)
    runs = 0

    def count(*_):
        nonlocal runs
        runs += 1

    teacher.register_forward_hook(count)
    kept = pc.heal(small, teacher=teacher, data=batches(), steps=16)
    few, runs = runs, 0
    again = pc.heal(small, teacher=teacher, data=batches(), steps=16, cache_bytes=0)
    assert few == 1 + 1 + 8
    assert runs > 16
    assert same(state(kept), again)


def test_landmarks_are_blocks_thinned_out():
    teacher = encoder(depth=20, width=16)
    small = pc.sketchify(teacher, 0.5, include="layers.*", **SKETCH)
    call = Call((), batches(1)[0])
    names = find_landmarks(small, teacher, [call])
    assert len(names) == MOST
    assert names[-1] == "layers.19"
    with watched(small, names) as hidden:
        call.run(small)
    assert all(visits[0].shape == (4, 10, 16) for visits in hidden.values())


def test_logits_are_matched_by_divergence():
    teacher = conv_net()
    small = pc.sketchify(teacher, 0.4, exclude="7", **SKETCH)
    options = dict(teacher=teacher, data=images(2), steps=1)
    found = {
        output: pc.heal_report(pc.heal(small, output=output, **options)).before["output"]
        for output in ("logits", "features", "auto")
    }
    with torch.no_grad():
        held = images(2)[random.Random(0).sample(range(2), 2)[0]]
        wanted, given = (model(held).log_softmax(-1) for model in (teacher, small))
    divergence = float((wanted.exp() * (wanted - given)).sum(-1).mean())
    assert found["logits"] == pytest.approx(divergence, rel=1e-3)
    assert found["auto"] == found["features"] != found["logits"]


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"steps": 0}, ConfigError, "steps=0, wanted 1 or more"),
        ({"steps": 1.5}, ConfigTypeError, "steps=1.5 is a float"),
        ({"lr": 0.0}, ConfigError, "lr=0.0"),
        ({"lr": "high"}, ConfigTypeError, "lr='high' is a str"),
        ({"inplace": "no"}, ConfigTypeError, "inplace='no' is a str, wanted bool"),
        ({"seed": "a"}, ConfigTypeError, "seed='a' is a str, wanted an integer"),
        ({"progress": 1}, ConfigTypeError, "progress=1 is a int, wanted bool"),
        ({"method": "magic"}, ConfigError, "'kl', 'block'"),
        ({"output": "words"}, ConfigError, "'logits', 'features'"),
        ({"held_out": 1.0}, ConfigError, "between 0 and 1"),
        ({"cache_bytes": -1}, ConfigError, "cache_bytes=-1"),
        ({"data": []}, DataError, "no batch"),
        ({"data": batches(1)}, DataError, "1 batch, wanted at least 2"),
        ({"data": 3}, ConfigTypeError, "data is a int"),
        ({"teacher": None}, ConfigTypeError, "teacher is a NoneType"),
        (
            {"teacher": encoder(width=16)},
            TeacherMismatchError,
            r"embed.weight \(32, 16\).*of shape \(16, 16\)",
        ),
        ({"teacher": conv_net()}, TeacherMismatchError, "missing in the teacher, Sequential"),
    ],
)
def test_bad_input(options, error, says):
    teacher = encoder()
    small = sketched_encoder(teacher)
    given = dict(teacher=teacher, data=batches(2), steps=1) | options
    with pytest.raises(error, match=says):
        pc.heal(small, **given)


def test_models_that_do_not_go_together():
    teacher = encoder()
    with pytest.raises(NoTargetError, match="Encoder holds no sketched layer"):
        pc.heal(copy.deepcopy(teacher), teacher=teacher, data=batches(2))
    small = sketched_encoder(teacher)
    with pytest.raises(TeacherMismatchError, match="the same model"):
        pc.heal(small, teacher=small, data=batches(2))


def _old_norm(layer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(layer)


MADE = {
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 0.3),
    "weight norm": nn.utils.parametrizations.weight_norm,
    "orthogonal": nn.utils.parametrizations.orthogonal,
    "weight norm of old": _old_norm,
}


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("which", ["small", "teacher"])
def test_a_dense_layer_may_make_its_weight_of_others_in_one_of_the_models(made, which):
    torch.manual_seed(0)
    teacher = nn.Sequential(
        nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 8)
    ).eval()
    data = [torch.randn(32, 32) for _ in range(4)]
    small = pc.sketchify(
        teacher, 0.5, exclude=["2"], min_params=0, progress=False, allow_slower=True, synthetic=False
    )
    MADE[made]({"small": small, "teacher": teacher}[which][2])
    healed = pc.heal(small, teacher=teacher, data=data, steps=40, progress=False)
    found = pc.heal_report(healed)
    assert found.after["output"] < found.before["output"]
    assert list(healed.state_dict()) == list(small.state_dict())
    wider = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), MADE[made](nn.Linear(48, 32)), nn.Tanh(), teacher[4])
    with pytest.raises(TeacherMismatchError, match=r"2\.weight \(32, 64\).*of shape \(32, 48\)"):
        pc.heal(small, teacher=wider, data=data, steps=1)


class Matches(nn.Module):
    """Refines what it matches, which may be nothing, as LoFTR does."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
        self.fine = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))

    def forward(self, x):
        coarse = self.body(x)
        return coarse, self.fine(coarse[x[:, 0] > 0]), coarse.new_empty(len(x), 0)


@pytest.mark.parametrize("most", [0.0, 100.0])
def test_what_a_batch_leaves_empty_is_not_compared(most):
    torch.manual_seed(0)
    teacher = Matches().eval()
    data = [torch.randn(64, 16).clamp(max=most) for _ in range(4)]
    small = pc.sketchify(teacher, 0.5, min_params=0, progress=False, allow_slower=True, synthetic=False)
    report = pc.heal_report(pc.heal(small, teacher=teacher, data=data, steps=20, progress=False))
    assert report.after["output"] < report.before["output"]
    assert all(math.isfinite(one) for one in report.after.values())


def test_a_model_of_another_dtype_than_the_data_is_told_of():
    teacher = encoder()
    small = sketched_encoder(teacher).bfloat16()
    with pytest.raises(
        DataError, match=r"batch \d of the data: the model was given .* and raised RuntimeError"
    ):
        pc.heal(small, teacher=teacher, data=batches(2), steps=1)


def test_compiled_models_are_told_of():
    teacher = encoder()
    small = sketched_encoder(teacher)
    for one, other in ((torch.compile(small), teacher), (small, torch.compile(teacher))):
        with pytest.raises(WrappedModelError, match="the model is a OptimizedModule"):
            pc.heal(one, teacher=other, data=batches(2), steps=1)


def test_models_on_two_devices():
    teacher = encoder()
    small = sketched_encoder(teacher)
    with pytest.raises(TeacherMismatchError, match="small is on cpu, the teacher on meta"):
        pc.heal(small, teacher=copy.deepcopy(teacher).to("meta"), data=batches(2))


def test_exported_program():
    teacher = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 4)).eval()
    exported = torch.export.export(teacher, (torch.randn(8, 24),))
    small = pc.sketchify(exported, 0.4, include="0", **SKETCH)
    data = [torch.randn(8, 24, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    healed = pc.heal(small, teacher=teacher, data=data, steps=40, lr=1e-2)
    report = pc.heal_report(healed)
    assert list(report.before) == ["0", "output"]
    assert report.after["output"] < report.before["output"]


def test_values_that_are_not_finite_are_named():
    teacher = encoder()
    small = sketched_encoder(teacher)
    bad = batches(2)
    bad[0]["x"][0, 0, 0] = bad[1]["x"][0, 0, 0] = float("nan")
    with pytest.raises(HealingError, match=r"the teacher's .* holds NaN or Inf on batch"):
        pc.heal(small, teacher=teacher, data=bad, steps=1)
    small.layers[1].linear1.up.weight.data[0, 0] = float("nan")
    with pytest.raises(HealingError, match=r"the loss at layers\.1 is nan before the first step"):
        pc.heal(small, teacher=teacher, data=batches(2), steps=1)


@pytest.mark.parametrize("output", ["logits", "features"])
def test_choices_that_the_teacher_rules_out_are_not_compared(output):
    """Grounding DINO gives -Inf for words that a text has not."""

    class RulesOut(nn.Sequential):
        def forward(self, x):
            return super().forward(x).masked_fill(torch.arange(6) > 3, -torch.inf)

    torch.manual_seed(0)
    teacher = RulesOut(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 6)).eval()
    small = pc.sketchify(teacher, 0.4, include="0", **SKETCH)
    data = [torch.randn(8, 24, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    healed = pc.heal(small, teacher=teacher, data=data, steps=40, lr=1e-2, output=output)
    report = pc.heal_report(healed)
    assert 0.0 < report.after["output"] < report.before["output"]


def test_nothing_to_match():
    teacher = encoder()
    small = sketched_encoder(teacher)
    for model in (teacher, small):
        model.register_forward_hook(lambda *_: "text")
    with pytest.raises(HealingError, match="no floating tensor of equal shape: none and none"):
        pc.heal(small, teacher=teacher, data=batches(2), steps=1)


def test_pruned_factors_are_healed_under_their_mask():
    """Their weights are no parameters, but made of such: torch raised that they need no gradient."""
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(48, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 8))
    small = pc.sketchify(teacher, 0.5, min_params=0, allow_slower=True, progress=False)
    prune.l1_unstructured(small[0].down, "weight", 0.5)
    prune.l1_unstructured(small[2].up, "weight", 0.25)
    data = [torch.randn(32, 48) for _ in range(4)]
    healed = pc.heal(small, teacher=teacher, data=data, steps=8, progress=False)
    for name, share in (("0.down", 0.5), ("2.up", 0.25)):
        before, after = small.get_submodule(name), healed.get_submodule(name)
        assert float((after.weight_mask == 0).float().mean()) == pytest.approx(share, abs=1e-3)
        assert not torch.equal(after.weight_orig, before.weight_orig)
    report = pc.heal_report(healed)
    assert report.after["output"] < report.before["output"]


def test_gradients_next_to_nothing_make_no_long_step():
    """Those of what a dead channel is multiplied by: their squares are 0 in float32."""
    parameter = nn.Parameter(torch.ones(4, 3))
    gradient = torch.full((4, 3), 0.1)
    gradient[0] = 1e-24
    steps = Descent([Factor(parameter, 1.0)])
    for _ in range(3):
        steps.step([gradient], 100.0, 0.01)
    change = (parameter - 1).abs()
    assert float(change[0].max()) < 1e-6
    assert float(change[1:].min()) > 1e-3


@pytest.mark.parametrize("shape", [(12, 30), (30, 12)])
def test_steps_of_a_matrix_are_as_long_in_all_directions(shape):
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(shape, generator=generator) * torch.logspace(0, -2, shape[1])
    parameter = nn.Parameter(torch.zeros(shape))
    Descent([Factor(parameter, 3.0)]).step([gradient], 1e9, 0.01)
    values = torch.linalg.svdvals(parameter.detach()) / (0.01 * 3.0 * 30**0.5)
    assert 0.6 < float(values.min()) <= float(values.max()) < 1.3
    assert float((parameter.detach() * gradient).sum()) < 0
    dead = nn.Parameter(torch.zeros(shape))
    Descent([Factor(dead, 3.0)]).step([torch.full(shape, 1e-27)], 1e9, 0.01)
    assert float(dead.abs().max()) < 1e-4 * float(parameter.abs().max())


def test_a_step_takes_no_more_than_there_is():
    """A rate far above what a loss near 0 allows: the linear gain is 100 times the loss."""
    parameter = nn.Parameter(torch.ones(100))
    gradient = torch.ones(100)
    Descent([Factor(parameter, 1.0)]).step([gradient], 0.1, 0.1)
    assert float((gradient * (1 - parameter)).sum()) == pytest.approx(0.3 * 0.1, rel=1e-3)


def test_a_rate_that_is_far_too_high_is_seen_at_once(whole_steps, monkeypatch):
    teacher = conv_net()
    small = pc.sketchify(teacher, 0.6, data=images(8), **SKETCH)
    lowered = []

    class Watched(Rates):
        def leads_astray(self, step, loss):
            if found := super().leads_astray(step, loss):
                lowered.append((step, self.top))
            return found

    monkeypatch.setattr(healer, "Rates", Watched)
    pc.heal(small, teacher=teacher, data=images(8), steps=100, lr=2.0, progress=False)
    step, rate = lowered[0]
    assert rate == 0.5
    assert step < 5  # not after a tenth of them


def rates_found(losses, steps=400, given=None):
    """The rates of all steps, where looks give such losses, the first one before the first step."""
    first, *looked = losses
    rates, found = Rates(given, steps, first), []
    for step in range(1, steps + 1):
        found.append(rates.at(step))
        if rates.is_due(step):
            rates.leads_astray(step, looked.pop(0) if looked else 0.5 * first)
    return found


def test_a_rate_is_looked_for_as_long_as_the_model_gets_better():
    found = rates_found([1.0, 0.9, 0.8, 0.7, 0.6])
    assert max(found) == pytest.approx(TOP)
    assert found[9] == pytest.approx(2 * FIRST)
    assert found[39] == pytest.approx(TOP)
    assert found[-1] < 1e-3 * TOP
    stopped = rates_found([1.0, 0.9, 1.1])
    assert stopped[19] == pytest.approx(4 * FIRST)
    assert max(stopped[20:]) == pytest.approx(2 * FIRST)  # half of the one that led above the start
    assert max(rates_found([1.0, 1.3])[10:]) == pytest.approx(FIRST)
    assert max(rates_found([0.0, 0.1, 0.0])[10:]) == pytest.approx(FIRST)  # what is exact gets no better


def test_few_steps_look_for_no_rate_and_one_that_is_given_is_taken():
    assert max(rates_found([1.0], steps=20)) == pytest.approx(USUAL)
    assert max(rates_found([1.0], given=0.01)) == pytest.approx(0.01)
    assert max(rates_found([1.0, 0.9, 1.2], given=0.01)[80:]) > 0.009
    assert max(rates_found([1.0, 0.9, 1.3], given=0.01)[80:]) == pytest.approx(0.0025)


def test_batches_of_silence_do_not_rule():
    teacher = conv_net()
    small = pc.sketchify(teacher, 0.2, data=images(8), **SKETCH)
    data = [batch * (place % 4 > 0) for place, batch in enumerate(images(24))]
    report = pc.heal_report(pc.heal(small, teacher=teacher, data=data, steps=40, output="features"))
    assert report.before["output"] < 100
    assert report.after["output"] < report.before["output"]


def test_what_is_exact_is_not_judged_at_each_step(monkeypatch):
    teacher = nn.Sequential(nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False), nn.Linear(32, 8))
    product = nn.Sequential(nn.Linear(32, 32, bias=False), teacher[2])
    with torch.no_grad():
        product[0].weight.copy_(teacher[1].weight @ teacher[0].weight)
    data = [torch.randn(16, 32, generator=torch.Generator().manual_seed(i)) for i in range(16)]
    small = pc.sketchify(product, 0.5, data=data, include="0", exclude="1", **SKETCH)
    judged = []
    old = healer._Healer._judge
    monkeypatch.setattr(healer._Healer, "_judge", lambda self: judged.append(1) or old(self))
    pc.heal(small, teacher=product, data=data, steps=100, output="logits")
    assert len(judged) < 40


class Routed(nn.Module):
    """Rows go to one of two experts, by what a sketched layer gives."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(24, 24), nn.Linear(24, 8)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 24)) for _ in range(2)
        )

    def forward(self, x):
        h = self.first(x)
        out = torch.zeros_like(h)
        for place, expert in enumerate(self.experts):
            rows = (h[:, 0] > 0) == bool(place)
            if bool(rows.any()):
                out[rows] = expert(h[rows])
        return self.last(out + h)


@pytest.mark.parametrize("method", ["kl", "block"])
def test_rows_that_are_routed_elsewhere(method):
    teacher = Routed().eval()
    generator = torch.Generator().manual_seed(3)
    # Some batches reach one expert alone, and near the border the sketch routes rows to the other.
    x = [torch.randn(16, 24, generator=generator) for _ in range(24)]
    data = [one[teacher.first(one)[:, 0] > 0] if place % 3 else one for place, one in enumerate(x)]
    small = pc.sketchify(teacher, 0.3, data=data, include=["first", "experts.*"], exclude="last", **SKETCH)
    healed = pc.heal(small, teacher=teacher, data=data, steps=40, method=method)
    report = pc.heal_report(healed)
    assert {name.partition(".")[0] for name in report.before} == {"experts", "output"}
    assert not report.reverted


def test_factors_that_were_quantized_are_told_of(monkeypatch):
    teacher = conv_net()
    small = pc.sketchify(teacher, 0.6, data=images(8), **SKETCH)
    monkeypatch.setattr("panther_compile.layers.base.keeps_numbers_elsewhere", lambda _: True)
    with pytest.raises(WeightError, match="heal the model before it is quantized"):
        pc.heal(small, teacher=teacher, data=images(8), steps=1)


class Twice(nn.Module):
    """One layer under two names."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)
        self.again = self.first

    def forward(self, x):
        return self.again(self.second(self.first(x).relu()).relu())


def test_a_layer_under_two_names():
    torch.manual_seed(0)
    model = Twice().eval()
    small = pc.sketchify(model, 0.5, **SKETCH)
    healed = pc.heal(small, teacher=model, data=torch.randn(4, 8, 16).unbind(), steps=4)
    assert healed.again is healed.first
    assert pc.heal_report(healed).steps == 4


@pytest.mark.parametrize("role", ["small", "teacher"])
def test_models_made_in_inference_mode_are_named(role):
    models = {"small": pc.sketchify(encoder(), 0.5, **SKETCH), "teacher": encoder()}
    with torch.inference_mode():
        models[role] = copy.deepcopy(models[role])
        with pytest.raises(ConfigTypeError, match=f"{role}, Encoder, was made under torch.inference_mode"):
            pc.heal(**models, data=batches())


def test_parts_that_are_computed_again_within_a_backward():
    """`use_reentrant=True` of torch's checkpoint, which `torch.autograd.grad` cannot go through."""

    class Again(nn.Module):
        def __init__(self, kind):
            super().__init__()
            self.a = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24))
            self.b = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24))
            self.kind = kind

        def forward(self, x):
            for part in (self.a, self.b):
                x = part(x) if self.kind is None else checkpoint(part, x, use_reentrant=self.kind)
            return x

    data, made = [torch.randn(64, 24) for _ in range(6)], []
    for kind in (None, True, False):
        torch.manual_seed(0)
        model = Again(kind).eval()
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            warnings.simplefilter("ignore", SketchQualityWarning)
            small = pc.sketchify(model, 0.5, data=data, progress=False, **SKETCH)
            healed = pc.heal(small, teacher=model, data=data, steps=40, progress=False)
        made.append((healed.state_dict(), pc.heal_report(healed).reverted))
    assert not made[0][1]
    for other, _ in made[1:]:
        torch.testing.assert_close(other, made[0][0])


class ChangesInPlace(nn.Sequential):
    """Changes what its backward reads."""

    def forward(self, x):
        hidden = self[0](x).sigmoid()
        out = self[1](hidden)
        hidden.add_(1.0)
        return out


def test_a_model_without_a_gradient_is_refused():
    model = ChangesInPlace(nn.Linear(32, 32), nn.Linear(32, 32))
    small = pc.sketchify(model, 0.5, min_params=64, allow_slower=True, synthetic=False)
    data = [torch.randn(4, 32) for _ in range(3)]
    with pytest.raises(HealingError, match=r"the loss has no gradient: .*inplace"):
        pc.heal(small, teacher=model, data=data, steps=2)
