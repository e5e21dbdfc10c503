"""What is loaded is what was saved."""

import copy

import pytest
import torch
from saving.model import IDS, OPTIONS, Model, all_tensors, assert_same, names_in, skeleton, sketched
from torch import nn

import panther_compile as pc
from panther_compile.errors import (
    CheckpointError,
    ConfigError,
    NoTargetError,
    WrappedModelError,
)
from panther_compile.layers.linear import SketchedLinear
from panther_compile.records import RECORD_ATTRIBUTE


def test_round_trip(saved):
    model, path = saved
    loaded = pc.load_sketched(skeleton(), path)
    assert type(loaded) is Model
    assert_same(loaded, model)
    assert torch.equal(loaded(IDS), model(IDS))
    assert loaded.head.up.weight is loaded.embed.codes.weight
    assert loaded.head.down.weight is loaded.embed.basis.weight
    assert getattr(loaded, RECORD_ATTRIBUTE) == getattr(model, RECORD_ATTRIBUTE)
    assert str(pc.sketch_report(loaded)) == str(pc.sketch_report(model))


def test_non_persistent_buffers_stay_non_persistent(saved):
    loaded = pc.load_sketched(skeleton(), saved[1])
    assert torch.equal(loaded.shift, saved[0].shift)
    assert "shift" not in loaded.state_dict()


class WorksOut(nn.Module):
    """Keeps tables of places as long as what it was last given, as timm's ConViT does."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 48))
        self.register_buffer("places", torch.zeros(1), persistent=False)
        self.register_buffer("sizes", None, persistent=False)

    def forward(self, x):
        if len(self.places) != len(x):
            self.places, self.sizes = torch.arange(float(len(x))), torch.ones(len(x))
        return self.layers(x) * self.places[:, None] + self.sizes[:, None]


def test_buffers_that_a_model_works_out_may_be_of_another_size(tmp_path):
    model = WorksOut()
    small = pc.sketchify(
        model, 0.5, data=[torch.randn(16, 64) for _ in range(3)], **OPTIONS | {"include": None}
    )
    x = torch.randn(16, 64)
    wanted = small(x)
    pc.save_sketched(small, tmp_path)
    loaded = pc.load_sketched(WorksOut(), tmp_path)
    assert loaded.places.shape == loaded.sizes.shape == (16,)
    assert not {"places", "sizes"} & set(loaded.state_dict())
    assert torch.equal(loaded(x), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_dtype(tmp_path, dtype):
    model = sketched(dtype)
    pc.save_sketched(model, tmp_path)
    assert_same(pc.load_sketched(skeleton(), tmp_path), model)


def test_meta_skeleton(saved):
    with torch.device("meta"):
        empty = Model().eval()
    loaded = pc.load_sketched(empty, saved[1])
    assert_same(loaded, saved[0])
    assert torch.equal(loaded(IDS), saved[0](IDS))
    assert all(p.is_meta for p in empty.parameters())


class Tables(nn.Module):
    """Keeps tensors that are no buffers, as TabNet does its groups of features."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.LSTM(64, 8)
        self.middle = torch.nn.utils.spectral_norm(nn.Linear(64, 64))
        self.mixing, self.none = [torch.eye(64)], torch.empty(0)

    def forward(self, x):
        return self.last(self.middle(self.first(x) @ self.mixing[0]))[0]


def test_meta_skeleton_of_tensors_that_no_file_has(tmp_path):
    model, x = nn.Sequential(Tables()).eval(), torch.randn(3, 64)
    small = pc.sketchify(model, 0.5, **{**OPTIONS, "include": "0.first"})
    pc.save_sketched(small, tmp_path)
    with torch.device("meta"):
        empty = nn.Sequential(Tables()).eval()
    with pytest.raises(ConfigError, match=r"0\.mixing of the skeleton is on the meta device"):
        pc.load_sketched(empty, tmp_path)
    empty[0].mixing = model[0].mixing
    assert torch.equal(pc.load_sketched(empty, tmp_path)(x), small(x))


def test_skeleton_is_untouched(saved):
    empty = skeleton()
    before = {name: t.clone() for name, t in all_tensors(empty).items()}
    kinds = [type(module) for module in empty.modules()]
    pc.load_sketched(empty, saved[1])
    assert [type(module) for module in empty.modules()] == kinds
    assert all(torch.equal(t, before[name]) for name, t in all_tensors(empty).items())


def test_loaded_model_does_not_hang_on_the_file(copied, saved):
    path, plan, weights = copied
    loaded = pc.load_sketched(skeleton(), path)
    weights.write_bytes(b"\0" * weights.stat().st_size)
    plan.unlink()
    assert_same(loaded, saved[0])


@pytest.mark.parametrize("training", [True, False])
def test_mode_is_that_of_the_skeleton(saved, training):
    loaded = pc.load_sketched(skeleton().train(training), saved[1])
    assert all(module.training is training for module in loaded.modules())


def test_loaded_model_trains_saves_and_loads(saved, tmp_path):
    loaded = pc.load_sketched(skeleton().train(), saved[1])
    optimizer = torch.optim.SGD([p for p in loaded.parameters() if p.requires_grad], lr=0.1)
    loaded(IDS).square().mean().backward()
    optimizer.step()
    pc.save_sketched(loaded, tmp_path)
    assert_same(pc.load_sketched(skeleton(), tmp_path), loaded)


@pytest.mark.parametrize("lift", [torch.fx.symbolic_trace, lambda m: torch.export.export(m, (IDS,)).module()])
def test_graph_modules(tmp_path, lift):
    dense = lift(Model().eval())
    model = pc.sketchify(dense, 0.5, **(OPTIONS | {"include": "fc*"}))
    pc.save_sketched(model, tmp_path)
    empty = lift(skeleton())
    text = str(empty.graph)
    loaded = pc.load_sketched(empty, tmp_path)
    assert str(loaded.graph) == str(model.graph)
    assert torch.equal(loaded(IDS), model(IDS))
    assert str(empty.graph) == text


def test_functional_calls_of_a_graph(tmp_path):
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(24, 16))

        def forward(self, x):
            return nn.functional.linear(x, self.w)

    model = pc.sketchify(torch.fx.symbolic_trace(Functional()), 0.5, **(OPTIONS | {"include": "*"}))
    pc.save_sketched(model, tmp_path)
    loaded = pc.load_sketched(torch.fx.symbolic_trace(Functional()), tmp_path)
    x = torch.randn(3, 16)
    assert torch.equal(loaded(x), model(x))


def test_sketched_root(tmp_path):
    model = pc.sketchify(nn.Linear(40, 40), 0.5, min_params=0, progress=False, allow_slower=True)
    pc.save_sketched(model, tmp_path)
    assert_same(pc.load_sketched(nn.Linear(40, 40), tmp_path), model)


@pytest.mark.parametrize("wrap", [lambda part: torch.compile(part, backend="eager"), nn.DataParallel])
def test_wrapped_parts_are_saved_by_their_plain_names(tmp_path, wrap):
    body = nn.Sequential(nn.Linear(40, 48), nn.ReLU(), nn.Sequential(nn.Linear(48, 40), nn.Linear(40, 40)))
    model = pc.sketchify(body, 0.5, min_params=0, progress=False, allow_slower=True)
    wrapped = copy.deepcopy(model)
    wrapped[2][1] = wrap(wrapped[2][1])
    wrapped[0], wrapped[2] = wrap(wrapped[0]), wrap(wrapped[2])
    pc.save_sketched(wrapped, tmp_path)
    assert_same(pc.load_sketched(body, tmp_path), model)
    assert str(pc.sketch_report(wrapped)) == str(pc.sketch_report(model))
    assert type(wrapped[0]) is not type(model[0])  # what was saved is as it was


@pytest.mark.parametrize("nested", [False, True])
def test_wrapped_skeleton_is_refused(saved, nested):
    wrapped = torch.compile(skeleton())
    wrapped = nn.Sequential(wrapped) if nested else wrapped
    with pytest.raises(WrappedModelError, match=r"is a OptimizedModule: give the model that was compiled"):
        pc.load_sketched(wrapped, saved[1])


def test_trailing_and_pair_forms(tmp_path):
    dense = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
    with torch.no_grad():
        dense[0].weight[:, :9] = dense[0].weight[:, :1].clone()
    model = pc.sketchify(dense, 0.5, min_params=0, include="*", progress=False, allow_slower=True)
    model[1] = SketchedLinear.from_dense(dense[1], rank=7, form="pair")
    assert [layer.form for layer in model] == ["pivoted", "pair"]
    assert model[0].start == 40 - model[0].rank
    pc.save_sketched(model, tmp_path)
    loaded = pc.load_sketched(nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40)), tmp_path)
    assert_same(loaded, model)


def test_two_frozen_names_of_one_parameter(tmp_path):
    model = sketched()
    model.embed.requires_grad_(False)
    pc.save_sketched(model, tmp_path)
    loaded = pc.load_sketched(skeleton(), tmp_path)
    assert_same(loaded, model)
    assert not loaded.head.up.weight.requires_grad


def test_views_of_one_storage_are_saved_apart(tmp_path):
    model = sketched()
    both = torch.rand(2, 16)
    model.scale, model.shift = both[0], both[1]
    pc.save_sketched(model, tmp_path)
    assert_same(pc.load_sketched(skeleton(), tmp_path), model)


def test_tensors_that_are_not_contiguous(tmp_path):
    model = sketched()
    model.fc2.up.weight = nn.Parameter(model.fc2.up.weight.detach().t().contiguous().t())
    assert not model.fc2.up.weight.is_contiguous()
    pc.save_sketched(model, tmp_path)
    assert_same(pc.load_sketched(skeleton(), tmp_path), model)


class Counting(nn.Module):
    """Keeps state as a tensor beside its parameters, as `nn.Module` allows."""

    def __init__(self, state=0):
        super().__init__()
        self.fc = nn.Linear(40, 40)
        self.state = state

    def get_extra_state(self):
        return torch.tensor(self.state) if isinstance(self.state, int) else self.state

    def set_extra_state(self, state):
        self.state = int(state)


def test_extra_state(tmp_path):
    model = pc.sketchify(Counting(7), 0.5, min_params=0, progress=False, allow_slower=True)
    pc.save_sketched(model, tmp_path)
    assert pc.load_sketched(Counting(), tmp_path).state == 7


def test_state_that_is_no_tensor_is_refused(tmp_path):
    model = pc.sketchify(Counting({"a": 1}), 0.5, min_params=0, progress=False, allow_slower=True)
    with pytest.raises(CheckpointError, match="_extra_state is a dict: safetensors holds tensors only"):
        pc.save_sketched(model, tmp_path)
    assert names_in(tmp_path) == []


@pytest.mark.parametrize(
    "tensor",
    [torch.eye(3).to_sparse(), torch.zeros(3, dtype=torch.complex128), torch.empty(3, device="meta")],
)
def test_tensors_that_safetensors_does_not_hold(tmp_path, tensor):
    model = sketched()
    model.register_buffer("odd", tensor)
    with pytest.raises(CheckpointError, match="odd is"):
        pc.save_sketched(model, tmp_path)
    assert names_in(tmp_path) == []


def test_a_sketch_that_left_all_dense(tmp_path):
    small = pc.sketchify(nn.Linear(64, 64), 1.0, min_params=0, progress=False)
    with pytest.raises(NoTargetError, match=r"all its layers are dense, and torch\.save"):
        pc.save_sketched(small, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_was_never_sketched(tmp_path):
    with pytest.raises(NoTargetError):
        pc.save_sketched(Model(), tmp_path / "new")
    assert names_in(tmp_path) == []
