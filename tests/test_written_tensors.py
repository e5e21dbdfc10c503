"""What a model writes into its own tensors as it runs is written into copies: the model stays as it was."""

import copy
from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn

import panther_compile as pc
from panther_compile.errors import NoTargetError
from panther_compile.models.surroundings import unwritten
from panther_compile.models.watched import copy_sharing

pytestmark = pytest.mark.filterwarnings("ignore::panther_compile.SketchQualityWarning")

BATCHES = [torch.randn(8, 64, generator=torch.Generator().manual_seed(place)) for place in range(6)]


class Remembers(nn.Module):
    """Counts its calls in a buffer, and keeps results in another one, which it reads at the next call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("cache", torch.zeros(8, 64), persistent=False)
        self.register_buffer("newest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """Keep what comes of x."""
        self.calls += 1
        y = self.down(self.up(x).relu())
        before = self.cache[: len(x)].clone()
        self.cache[: len(x)] = y.detach()
        self.newest = y.detach().mean()
        return y + 0.1 * before


class Attribute(Remembers):
    """The same, with tensors that are no buffers, one of them in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.by_size = torch.zeros(3), {64: torch.zeros(3)}

    def forward(self, x: Tensor) -> Tensor:
        """Count in it."""
        for count in (self.seen, self.by_size[64]):
            count.add_(1)
        return super().forward(x)


def written(model: nn.Module) -> list[Tensor]:
    found = [model.calls, model.cache, model.newest, getattr(model, "seen", torch.zeros(3))]
    found += getattr(model, "by_size", {}).values()
    return [tensor.clone() for tensor in found]


def stays(model: nn.Module, before: list[Tensor]) -> None:
    for was, now in zip(before, written(model), strict=True):
        assert torch.equal(was, now)


@pytest.fixture(params=[Remembers, Attribute])
def model(request):
    made = request.param().eval()
    made(BATCHES[0])  # so that there is something to keep
    return made


@pytest.mark.parametrize("data", [BATCHES, None, "model"], ids=["data", "none", "made up"])
def test_sketchify(model, data):
    before = written(model)
    small = pc.sketchify(model, 0.5, data=data, min_params=0)
    stays(model, before)
    stays(small, before)


def test_sketchify_by_the_clock(model):
    before = written(model)
    with suppress(NoTargetError):  # that nothing is faster, which this processor decides
        pc.sketchify(model, 0.5, data=BATCHES, objective="latency", min_params=0)
    stays(model, before)


def test_the_smallest_ratio_within_a_drop(model):
    before = written(model)
    pc.sketchify(
        model, data=BATCHES, min_params=0, max_drop=1e9, evaluate=lambda one: -float(one(BATCHES[0]).norm())
    )
    stays(model, before)


def test_a_function_that_calls_the_model(model):
    before = written(model)

    def calls(given: nn.Module) -> None:
        for batch in BATCHES:
            given(batch)

    pc.sketchify(model, 0.5, data=calls, min_params=0)
    stays(model, before)


def test_heal(model):
    before = written(model)
    small = pc.sketchify(model, 0.5, data=BATCHES, min_params=0)
    healed = pc.heal(small, teacher=model, data=BATCHES, steps=2)
    for one in (model, small, healed):
        stays(one, before)


def test_prepare_int8(model):
    before = written(model)
    small = pc.sketchify(model, 0.5, data=BATCHES, min_params=0)
    stays(pc.prepare_int8(small, BATCHES), before)
    stays(small, before)


def test_export_onnx(tmp_path):
    model = Remembers().eval()
    before = written(model)
    pc.export_onnx(model, (BATCHES[0],), tmp_path / "model.onnx")
    stays(model, before)


def test_partition_model(model):
    before = written(model)
    pc.partition_model(model, (BATCHES[0],), mesh={"tp": 2})
    stays(model, before)


def test_add_residual(model):
    low = copy.deepcopy(model)
    with torch.no_grad():
        for layer in (low.up, low.down):
            layer.weight.copy_((layer.weight * 30).round() / 30)
    before = written(model)
    better = pc.add_residual(low, model, rank=4, data=BATCHES)
    for one in (model, low, better):
        stays(one, before)


def test_dense_and_sketched_keep_apart():
    """One cache for both would hand the results of the one to the other while they run side by side."""
    model = Remembers().eval()
    one, other = copy_sharing(model, {}), copy_sharing(model, {})
    one(BATCHES[0])
    alone = Remembers().eval()(BATCHES[1])
    assert torch.equal(other(BATCHES[1]), alone)


class Shares(nn.Module):
    """Holds empty containers, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.cache, self.seen = {}, set()
        self.also = self.cache

    def forward(self, x: Tensor) -> Tensor:
        """Fill them."""
        self.cache["x"] = x
        self.seen.add(len(x))
        return self.layer(x)


def test_empty_containers_are_the_copys_own():
    model = Shares()
    copied = copy_sharing(model, {})
    hook = copied.layer.register_forward_hook(lambda *_: None)
    copied(torch.ones(2, 4))
    assert copied.also is copied.cache
    assert (copied.seen, list(copied.also)) == ({2}, ["x"])
    assert not model.cache
    assert not model.seen
    assert not model.layer._forward_hooks
    hook.remove()


def test_packed_weights_are_shared():
    """Copies of a quantized model would cost its memory once more each."""
    holder = nn.Module()
    holder.register_buffer("packed", torch.zeros(300, 300, dtype=torch.int32))
    holder.register_buffer("cache", torch.zeros(300, 300))
    found = copy_sharing(holder, {})
    assert found.packed is holder.packed
    assert found.cache is not holder.cache


def test_what_is_not_written_is_not_touched():
    """A copy back would break the graph of a loss that the buffer is part of."""
    model = nn.BatchNorm1d(4).eval()
    weight = torch.ones(4, requires_grad=True)
    loss = (weight * model.running_var).sum()
    with unwritten(model):
        model(torch.randn(2, 4))
    loss.backward()


def test_put_back_when_it_raises():
    model = Remembers().eval()
    with suppress(RuntimeError), unwritten(model):
        model(BATCHES[0])
        raise RuntimeError
    assert model.calls == 0
    assert not model.cache.any()


class Hooked(nn.Sequential):
    """Installs a hook in its first run, as transformers does for hidden states, and marks that it has."""

    def forward(self, x):
        self.seen = []
        if not getattr(self, "is_hooked", False):
            self[0].register_forward_hook(lambda module, args, out: self.seen.append(out))
            self.is_hooked = True
        return super().forward(x), len(self.seen)


def test_hooks_that_a_forward_registers_are_put_back_with_its_mark():
    model = Hooked(nn.Linear(4, 4)).eval()
    before = model[0].register_forward_hook(lambda module, args, out: None)
    with unwritten(model):
        model(torch.randn(2, 4))
    assert list(model[0]._forward_hooks) == [before.id]
    assert model(torch.randn(2, 4))[1] == 1


def test_healing_leaves_no_hooks_behind():
    teacher = Hooked(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).eval()
    data = [torch.randn(8, 64) for _ in range(4)]
    small = pc.sketchify(teacher, 0.5, data=data, progress=False)
    healed = pc.heal(small, teacher=teacher, data=data, steps=2, progress=False)
    assert [model(data[0])[1] for model in (teacher, small, healed)] == [1, 1, 1]


class Notes(nn.Module):
    """Keeps what it saw in attributes: a number, a result, a list, and one that is made in the first run."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        self.count, self.state, self.seen = 0, None, ["made"]

    def forward(self, x: Tensor) -> Tensor:
        """Go on from the last result."""
        self.count, self.first = self.count + 1, x
        self.seen.append(len(x))
        self.state = self.up(x).relu() if self.state is None else 0.5 * self.state + self.up(x).relu()
        return self.down(self.state)

    def written(self) -> tuple[object, ...]:
        """What a run changes."""
        return self.count, self.state, list(self.seen), hasattr(self, "first")


def test_healing_leaves_attributes_alone():
    """The dense model went on from states of the calibration, and so did its sketch."""
    model = Notes().eval()
    small = pc.sketchify(model, 0.5, data=BATCHES, refine="kl", refine_steps=2, progress=False)
    assert model.written() == small.written() == (0, None, ["made"], False)
    assert pc.heal_report(small).steps == 2
    healed = pc.heal(small, teacher=model, data=BATCHES, steps=2, progress=False)
    assert model.written() == small.written() == healed.written() == (0, None, ["made"], False)
    assert pc.heal_report(healed).steps == 2


@pytest.mark.filterwarnings("ignore:The tensor attributes")
def test_reading_a_graph_leaves_attributes_alone():
    """Such a state had no numbers, or was the example's."""
    model = Notes().eval()
    pc.partition_model(model, BATCHES[0], mesh={"pp": 2})
    assert model.written() == (0, None, ["made"], False)
