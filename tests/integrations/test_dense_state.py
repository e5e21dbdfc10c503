"""A dense state dict in a sketched model: refused by name, or projected when asked."""

import copy

import pytest
import torch
from torch import nn

import panther_compile as pc
from panther_compile.errors import CheckpointMismatchError, ConfigTypeError

OPTIONS = {"progress": False, "min_params": 0, "allow_slower": True}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 48)
        self.attention = nn.MultiheadAttention(48, 4, batch_first=True, add_bias_kv=True)
        self.up, self.down = nn.Linear(48, 96), nn.Linear(96, 48)
        self.norm, self.head = nn.LayerNorm(48), nn.Linear(48, 7)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.norm(x + self.down(self.up(x).relu())))


IDS = torch.arange(24).reshape(2, 12)


def error(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


def test_a_dense_state_dict_is_refused_by_name():
    model = Model().eval()
    small = pc.sketchify(model, 0.5, **OPTIONS)
    with pytest.raises(pc.PantherError, match=r"attention.in_proj_weight \(144, 48\).*project_state_dict"):
        small.load_state_dict(model.state_dict())
    with pytest.raises(pc.PantherError, match=r"up\.weight \(96, 48\).*a SketchedLinear: load"):
        small.load_state_dict({"up.weight": model.up.weight}, strict=False)


@pytest.mark.parametrize("include", [None, "*"])
def test_what_the_sketch_holds_already_is_projected_onto_itself(include):
    small = pc.sketchify(Model().eval(), 0.5, include=include, **OPTIONS)
    state = pc.project_state_dict(small, pc.densify(small).state_dict())
    again = copy.deepcopy(small)
    again.load_state_dict(state)
    torch.testing.assert_close(again(IDS), small(IDS), rtol=1e-4, atol=1e-5)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(32, 48, 2, bidirectional=True, batch_first=True), nn.Linear(96, 7)

    def forward(self, x):
        return self.head(self.lstm(x)[0])


def test_a_layer_that_is_the_model_is_followed():
    small = pc.sketchify(nn.Linear(64, 48), 0.5, **OPTIONS)
    again = copy.deepcopy(small)
    again.load_state_dict(pc.project_state_dict(small, pc.densify(small).state_dict()))
    torch.testing.assert_close(again.weight, small.weight, rtol=1e-4, atol=1e-5)


def test_each_weight_of_a_recurrent_layer_is_followed():
    small = pc.sketchify(Recurrent().eval(), 0.5, include="*", **OPTIONS)
    again, dense, x = copy.deepcopy(small), pc.densify(small), torch.randn(2, 5, 32)
    with torch.no_grad():
        for parameter in dense.parameters():
            parameter *= 1.5  # which factors of half the rank can do
    again.load_state_dict(pc.project_state_dict(small, dense.state_dict()))
    torch.testing.assert_close(again(x), dense(x), rtol=1e-4, atol=1e-5)


class Counted(Model):
    """A model with a state that is no tensor."""

    def get_extra_state(self):
        return {"seen": 3}

    def set_extra_state(self, state):
        self.seen = state["seen"]


def test_an_extra_state_is_taken_from_the_dense_model():
    model = Counted().eval()
    small = pc.sketchify(model, 0.5, **OPTIONS)
    dense = model.state_dict() | {"_extra_state": {"seen": 4}}
    small.load_state_dict(pc.project_state_dict(small, dense))
    assert small.seen == 4


@pytest.mark.parametrize("given", [None, 3, "state", nn.Linear(2, 2)], ids=type)
def test_what_is_no_state_dict(given):
    model = Model().eval()
    small = pc.sketchify(model, 0.5, **OPTIONS)
    with pytest.raises(ConfigTypeError, match=r"dense is a .*, wanted what"):
        pc.project_state_dict(small, given)
    if given is not None:
        with pytest.raises(ConfigTypeError, match=r"base is a .*, wanted what"):
            pc.project_state_dict(small, model.state_dict(), base=given)
    with pytest.raises(CheckpointMismatchError, match=r"head\.weight is a int in the dense state dict"):
        pc.project_state_dict(small, model.state_dict() | {"head.weight": 3})


def test_a_fine_tuned_sibling_is_followed():
    model = Model().eval()
    sibling = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in sibling.parameters():
            if parameter.dim() == 2:  # as fine-tuning changes weights: at a low rank
                outer = torch.randn(len(parameter), 1) @ torch.randn(1, parameter.shape[1])
                parameter += 0.5 * outer * parameter.norm() / outer.norm()
            else:
                parameter += 0.1 * torch.randn_like(parameter)
    data = [torch.randint(0, 50, (8, 12)) for _ in range(4)]
    small = pc.sketchify(model, 0.7, data=data, narrow=False, **OPTIONS)
    followed = {}
    for name, base in (("alone", None), ("with base", model.state_dict())):
        followed[name] = copy.deepcopy(small)
        followed[name].load_state_dict(pc.project_state_dict(small, sibling.state_dict(), base=base))
    wanted = sibling(IDS)
    assert error(followed["with base"](IDS), wanted) < 0.8 * error(small(IDS), wanted)
    assert torch.equal(followed["alone"].head.weight, sibling.head.weight)
    assert torch.equal(followed["alone"].attention.bias_k, sibling.attention.bias_k)


class Normed(nn.Module):
    """A model whose dense layers change as well: biases are fitted, statistics taken anew, norms healed."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(48, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 48), nn.LayerNorm(48)),
            *(nn.Linear(48, 48), nn.Linear(48, 7)),
        )

    def forward(self, x):
        return self.layers(x)


def test_nothing_changed_with_the_model_that_was_sketched():
    torch.manual_seed(0)
    model = Normed()
    data = [torch.randn(64, 48) + 1 for _ in range(4)]
    for batch in 10 * data:
        model(batch)
    model.eval()
    options = {"narrow": False, "refine": "kl", "refine_steps": 3, **OPTIONS}
    small = pc.sketchify(model, 0.6, data=data, **options)
    base = model.state_dict()
    again = copy.deepcopy(small)
    again.load_state_dict(pc.project_state_dict(small, base, base=base))
    for name, value in small.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    names = [f"layers.{name}" for name in ("1.running_var", "3.bias", "4.weight")]
    changed = base | {name: 2 * base[name] for name in names}
    state = pc.project_state_dict(small, changed, base=base)
    own = small.state_dict()
    torch.testing.assert_close(state[names[0]], 2 * own[names[0]])
    torch.testing.assert_close(state["layers.3.up.bias"], own["layers.3.up.bias"] + base[names[1]])
    torch.testing.assert_close(state[names[2]], own[names[2]] + base[names[2]])


def test_what_cannot_follow_is_named():
    model = Model().eval()
    small = pc.sketchify(model, 0.5, **OPTIONS)
    state = model.state_dict()
    del state["norm.weight"]
    with pytest.raises(pc.PantherError, match=r"has no norm\.weight"):
        pc.project_state_dict(small, state)
    with pytest.raises(pc.PantherError, match="no sketched layer"):
        pc.project_state_dict(model, model.state_dict())
    data = [torch.randint(0, 50, (8, 12)) for _ in range(4)]
    narrow = pc.sketchify(model, 0.5, data=data, **OPTIONS)
    if any(type(m).__name__ == "NarrowLinear" for m in narrow.modules()):
        with pytest.raises(pc.PantherError, match="NarrowLinear, which cannot follow"):
            pc.project_state_dict(narrow, model.state_dict())
