"""What a result is taken for, logits or not, and which layer makes it."""

from collections import namedtuple

import pytest
import torch
from torch import nn
from zoo import ZOO

import panther_compile as pc
from panther_compile.errors import ConfigError
from panther_compile.models.batches import Call, record_calls
from panther_compile.models.output_kind import NAMED, recognize_output
from panther_compile.models.outputs import distance, named_tensors

OPTIONS = {"min_params": 256, "allow_slower": True, "progress": False, "narrow": False}
CLASSES = 8


def calls(*shape, count=4):
    return [Call((torch.randn(64, *shape),), {}) for _ in range(count)]


def classifier(sure):
    """Its rows are sure of one class each, or tell nothing."""
    model = nn.Sequential(nn.Linear(CLASSES, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    with torch.no_grad():
        model[0].weight.copy_(torch.cat([torch.eye(CLASSES), -torch.eye(CLASSES)] * 4)[:64])
        model[0].bias.zero_()
        signs = torch.cat([torch.eye(CLASSES), -torch.eye(CLASSES)] * 4)[:64].T
        model[2].weight.copy_(signs * (3.0 if sure else 0.02))
    return model


class Characters(nn.Module):
    """Integers in, one row of bare outputs for each; the vocabulary is as large as the width."""

    def __init__(self, head=True, width=64):
        super().__init__()
        self.embed = nn.Embedding(width, width)
        self.body = nn.Sequential(nn.Linear(width, 96), nn.GELU(), nn.Linear(96, width))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, width) if head else nn.Identity()

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(self.norm(x + self.body(x)))


def texts(count=4):
    return [torch.randint(0, 64, (8, 12)) for _ in range(count)]


def test_names_are_believed():
    entry = ZOO["llama"]
    model = entry.build()
    kind = recognize_output(model, record_calls(model, [entry.inputs()]))
    assert (kind.why, kind.output, kind.head) == (NAMED, "auto", "lm_head")


class Maps(nn.Module):
    """Logits of pixels, as models of segmentation give, or of masks, or of whole images."""

    def __init__(self, classes, shape):
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, classes, 1)
        self.shape = shape

    def forward(self, x):
        x = self.head(self.body(x))
        if self.shape == "enlarged":
            x = nn.functional.interpolate(x, scale_factor=2)
        elif self.shape == "mask":
            x = x.squeeze(1)
        elif self.shape == "image":
            x = x[:, :, :1, :1].flatten(1)
        elif self.shape == "text":
            x = x.flatten(2).transpose(1, 2)
        return {"logits": x}


@pytest.mark.parametrize(
    ("classes", "shape", "output"),
    [
        (5, "pixels", "features"),
        (5, "enlarged", "features"),
        (1, "mask", "features"),
        (5, "image", "auto"),
        (5, "text", "auto"),
    ],
)
def test_rows_of_maps_are_no_choices(classes, shape, output):
    model, images = Maps(classes, shape), [torch.randn(4, 3, 8, 8) for _ in range(4)]
    kind = recognize_output(model, record_calls(model, images))
    assert (kind.output, kind.has_logits) == (output, output == "auto")
    report = pc.sketch_report(pc.sketchify(model, 0.5, data=images, **{**OPTIONS, "min_params": 64}))
    assert report.closeness.kind == ("KL" if output == "auto" else "relative error")
    assert ("results taken for features: its logits have shape" in str(report)) == (output == "features")


@pytest.mark.parametrize("output", ["logits", frozenset({"logits"})])
def test_maps_that_are_said_to_be_logits_are_refused(output):
    model, images = Maps(5, "pixels"), [torch.randn(4, 3, 8, 8) for _ in range(4)]
    with pytest.raises(ConfigError, match=r"logits of Maps has shape \(4, 5, 8, 8\) and is a map"):
        pc.sketchify(model, 0.5, data=images, output=output, **{**OPTIONS, "min_params": 64})
    small = pc.sketchify(model, 0.5, data=images, **{**OPTIONS, "min_params": 64})
    with pytest.raises(ConfigError, match="is a map"):
        pc.heal(small, teacher=model, data=images, steps=1, output=output, progress=False)


def test_a_layer_as_wide_as_num_classes_makes_logits():
    model = classifier(sure=False)
    assert recognize_output(model, calls(CLASSES)).output == "auto"
    model.num_classes = CLASSES  # as models of timm say
    kind = recognize_output(model, calls(CLASSES))
    assert (kind.output, kind.head) == ("logits", "2")
    assert "num_classes" in kind.why


def test_a_layer_as_wide_as_the_vocabulary_makes_logits():
    model = Characters()
    kind = recognize_output(model, [Call((ids,), {}) for ids in texts()])
    assert (kind.output, kind.head) == ("logits", "head")
    assert "vocabulary of embed" in kind.why


def test_hidden_states_as_wide_as_the_vocabulary_are_none():
    model = Characters(head=False)
    assert recognize_output(model, [Call((ids,), {}) for ids in texts()]).output == "auto"


def test_rows_that_are_sure_are_logits_and_others_are_not():
    sure = recognize_output(classifier(True), calls(CLASSES))
    assert (sure.output, sure.head) == ("logits", "2")
    assert recognize_output(classifier(False), calls(CLASSES)).output == "auto"
    steep = classifier(True)
    with torch.no_grad():
        steep[2].weight.mul_(50.0)  # hundreds: metres, not logits
    assert recognize_output(steep, calls(CLASSES)).output == "auto"


@pytest.mark.parametrize(("scale", "output"), [(12.0, "logits"), (1.5, "auto")])
def test_few_rows_show_many_classes(scale, output):
    """Of twelve rows that each choose among a thousand no more than log 12 can be told."""
    model = nn.Sequential(nn.Linear(32, 1000, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(nn.functional.normalize(torch.randn(1000, 32), dim=1) * scale)
    rows = nn.functional.normalize(torch.randn(12, 32), dim=1) * 4
    kind = recognize_output(model, [Call((rows,), {})])
    assert (kind.output, kind.head) == (output, "0" if output == "logits" else None)


@pytest.mark.parametrize(("last", "output"), [(nn.LogSoftmax(-1), "logits"), (nn.Softmax(-1), "auto")])
def test_probabilities_and_their_logarithms(last, output):
    assert recognize_output(nn.Sequential(*classifier(False), last), calls(CLASSES)).output == output


def test_one_column_is_no_choice():
    assert recognize_output(nn.Sequential(nn.Linear(8, 1)), calls(8)).output == "auto"


def test_sketchify_finds_what_an_expert_would_say():
    model, data = Characters(), texts()
    found = pc.sketchify(model, 0.5, data=data, **OPTIONS)
    said = pc.sketchify(model, 0.5, data=data, output="logits", **OPTIONS)
    ids = torch.randint(0, 64, (4, 12))
    assert torch.equal(found(ids), said(ids))
    assert pc.sketch_report(found).closeness.kind == "KL"
    assert "results taken for logits: head is as wide as the vocabulary of embed" in str(
        pc.sketch_report(found)
    )
    features = pc.sketchify(model, 0.5, data=texts(), output="features", **OPTIONS)
    assert pc.sketch_report(features).closeness.kind == "relative error"


@pytest.mark.parametrize("data", [None, "texts"])
def test_a_square_head_is_left_alone(data):
    small = pc.sketchify(Characters(), 0.5, data=data and texts(), **OPTIONS)
    assert type(small.head) is nn.Linear
    (row,) = [row for row in pc.sketch_report(small).skipped if row.name == "head"]
    assert row.reason == "output head: left alone unless included"
    included = pc.sketchify(Characters(), 0.5, data=data and texts(), include=["head", "body.*"], **OPTIONS)
    plan = pc.sketch_report(included).plan
    assert "head" in {line.name for line in (*plan.sketched, *plan.whole)}


@pytest.mark.parametrize("data", [False, True])
def test_the_only_linear_layer_behind_convolutions_is_sketched_as_planned(data):
    """Whether its results are seen to be logits or not: a plan, made without inputs, cannot see it."""
    layers = [nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(64, 100))
    model.num_classes = 100
    images = [torch.randn(8, 3, 12, 12) for _ in range(4)]
    assert recognize_output(model, record_calls(model, images)).output == "logits"
    plan = pc.plan_sketch(model, 0.5, progress=False, allow_slower=True)
    small = pc.sketchify(model, 0.5, data=images if data else None, progress=False, allow_slower=True)
    made = pc.sketch_report(small).plan
    assert [line.name for line in plan.sketched] == [line.name for line in made.sketched] == ["2", "5"]


def test_a_head_behind_linear_layers_of_another_kind_is_left_alone():
    from transformers.pytorch_utils import Conv1D

    class Written(Characters):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(Conv1D(96, 64), nn.GELU(), Conv1D(64, 96))

    small = pc.sketchify(Written(), 0.5, data=texts(), **OPTIONS)
    assert type(small.head) is nn.Linear
    assert type(small.body[0]) is not Conv1D


def test_a_head_in_a_list_of_layers_is_known_by_its_place():
    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([*classifier(True)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    data = [torch.randn(64, CLASSES) for _ in range(4)]
    small = pc.sketchify(Listed(), 0.9, data=data, **OPTIONS)
    assert type(small.layers[2]) is nn.Linear


def test_what_was_taken_is_saved(tmp_path):
    small = pc.sketchify(Characters(), 0.5, data=texts(), **OPTIONS)
    pc.save_sketched(small, tmp_path)
    assert pc.sketch_report(pc.load_sketched(Characters(), tmp_path)).output == pc.sketch_report(small).output


def test_healing_by_divergence_works_by_default():
    model, data = Characters(), texts()
    options = {"refine": "kl", "refine_steps": 4, **OPTIONS}
    small = pc.sketchify(model, 0.4, data=data, **options)
    said = pc.sketchify(model, 0.4, data=data, output="logits", **options)
    assert pc.heal_report(small).before == pc.heal_report(said).before
    plain = pc.sketchify(model, 0.4, data=data, **OPTIONS)
    found, wanted = (pc.heal(plain, teacher=model, data=data, steps=4, output=o) for o in ("auto", "logits"))
    assert pc.heal_report(found) == pc.heal_report(wanted)


def test_healing_takes_the_result_for_what_it_was_fitted_as():
    model, data = classifier(True), list(torch.eye(CLASSES).split(1))  # one row tells nothing of a choice
    small = pc.sketchify(model, 0.5, data=data, include=["0"], **OPTIONS)
    assert pc.sketch_report(small).output.startswith("results taken for logits")
    found, wanted = (
        pc.heal(small, teacher=model, data=data, steps=2, held_out=0.5, output=one)
        for one in ("auto", "logits")
    )
    assert pc.heal_report(found) == pc.heal_report(wanted)


def test_the_logits_of_pretraining_are_taken_at_their_word():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.BertForPreTraining(config).eval()
    data = [{"input_ids": torch.randint(0, 64, (4, 12))} for _ in range(4)]
    small = pc.sketchify(model, 0.5, data=data, min_params=64, allow_slower=True, progress=False)
    assert "KL" in str(pc.sketch_report(small)).splitlines()[0]
    with torch.no_grad():
        wanted, found = (one(**data[0]) for one in (model, small))
    apart = distance(wanted, found, None)
    target, guess = (one.prediction_logits.log_softmax(-1) for one in (wanted, found))
    divergence = float((target.exp() * (target - guess)).sum(-1).mean())
    lost = (wanted.seq_relationship_logits - found.seq_relationship_logits).square().sum()
    assert apart == pytest.approx(
        divergence + float(lost / wanted.seq_relationship_logits.square().sum()), rel=1e-3
    )


class Painter(nn.Module):
    """As masked autoencoders do: what it calls logits are pixels, which it takes its loss of."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 48))

    def forward(self, pixel_values, labels=None):
        logits = self.body(pixel_values)
        return {"loss": (logits - pixel_values).square().mean(), "logits": logits}


def test_what_a_loss_of_the_inputs_is_beside_are_no_logits():
    images = [{"pixel_values": torch.randn(8, 6, 48)} for _ in range(4)]
    kind = recognize_output(Painter(), record_calls(Painter(), images))
    assert kind.output == "features"
    assert "stand for the inputs" in kind.why
    for labels in (torch.zeros(8, dtype=torch.long), torch.zeros(8, 48)):
        with_labels = [one | {"labels": labels} for one in images]
        assert recognize_output(Painter(), record_calls(Painter(), with_labels)).why == NAMED


class Beside(Characters):
    """Logits in a tuple, beside the loss of targets or a cache, as nanoGPT and decoders of others give."""

    def forward(self, ids, targets=None):
        x = self.embed(ids)
        logits = self.head(self.norm(x + self.body(x)))
        if targets is None:
            return logits, ((x, 2 * x), (3 * x, 4 * x))
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("targets", [False, True])
def test_logits_beside_something_else_in_a_tuple(targets):
    model = Beside()
    data = [(one, one.roll(-1, 1)) if targets else one for one in texts()]
    kind = recognize_output(model, record_calls(model, data))
    assert (kind.output, kind.head) == (frozenset({"[0]"}), "head")
    small = pc.sketchify(model, 0.5, data=data, **OPTIONS)
    report = pc.sketch_report(small)
    assert report.closeness.kind == "KL"
    assert "results taken for logits: [0], as head is as wide as the vocabulary of embed" in str(report)
    assert isinstance(small.head, nn.Linear)
    with torch.no_grad():
        target, guess = (one(data[0][0] if targets else data[0])[0] for one in (model, small))
        alone = distance(target, guess, None, logits=True)
        beside = distance((target, data), (guess, data), None, logits=kind.logits)
    assert beside == alone
    said = pc.sketchify(model, 0.5, data=data, output=frozenset({"[0]"}), **OPTIONS)
    ids = texts()[0]
    assert torch.equal(small(ids)[0], said(ids)[0])
    assert "[0] of results taken for logits, as asked" in str(pc.sketch_report(said))


def test_chances_beside_hidden_states():
    class WithStates(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.LSTM(8, 16), nn.Linear(16, 24)

        def forward(self, x):
            hidden, states = self.rnn(x)
            return self.head(hidden).log_softmax(-1), states

    kind = recognize_output(WithStates(), [Call((torch.randn(5, 6, 8),), {}) for _ in range(4)])
    assert kind.output == frozenset({"[0]"})
    assert kind.why == "[0], as its rows are log-probabilities"


def test_fields_of_a_named_tuple_are_its_keys():
    named = namedtuple("Scored", "logits aux_logits")
    found = named(torch.randn(4, 8), torch.randn(4, 8))
    assert [name for name, _ in named_tensors((found, found.logits))] == ["logits", "aux_logits", "[1]"]


def test_several_tensors_none_of_them_logits():
    class Moments(nn.Module):
        def __init__(self):
            super().__init__()
            self.mean, self.deviation = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x):
            return {"mean": self.mean(x), "deviation": self.deviation(x).exp()}

    kind = recognize_output(Moments(), calls(8))
    assert (kind.output, kind.has_logits) == ("auto", False)
    assert kind.why == "the result is 2 tensors, none of them seen to be logits"


def test_keys_that_are_none_are_refused():
    with pytest.raises(ConfigError, match="output=frozenset"):
        pc.sketchify(Characters(), 0.5, output=frozenset(), **OPTIONS)
    with pytest.raises(ConfigError, match="output=frozenset"):
        pc.heal(Characters(), teacher=Characters(), data=texts(), output=frozenset({1}))


def test_keys_that_no_result_has_are_refused():
    model, data, none = Characters(), texts(), frozenset({"scores"})
    message = r"nothing is under \['scores'\], the result of Characters has tensors under ''"
    with pytest.raises(ConfigError, match=message):
        pc.sketchify(model, 0.5, data=data, output=none, **OPTIONS)
    small = pc.sketchify(Beside(), 0.5, data=data, **OPTIONS)
    with pytest.raises(ConfigError, match=r"result of Beside has tensors under '\[0\]', '\[1\]'"):
        pc.heal(small, teacher=Beside(), data=data, output=none)
