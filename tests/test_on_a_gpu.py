"""The verbs on a GPU: a model there stays there, and is as close to the dense one as on the CPU."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import panther_compile as pc
from panther_compile.calibration import study
from panther_compile.layers.linear import SketchedLinear

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
SKETCH = {"min_params": 0, "allow_slower": True, "progress": False}


def encoder():
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(block, 2, enable_nested_tensor=False).eval(), (16, 24, 64)


def images():
    torch.manual_seed(0)
    convolutions = (nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, 2), nn.ReLU())
    model = nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)).eval()
    return model, (16, 3, 20, 20)


MODELS = {"encoder": encoder, "images": images}


def batches(shape, count=6):
    generator = torch.Generator().manual_seed(1)
    mix = torch.randn(4, shape[-1], generator=generator)
    return [torch.randn(*shape[:-1], 4, generator=generator) @ mix for _ in range(count)]


@torch.no_grad()
def distance(small, dense, data):
    device = next(dense.parameters()).device
    pairs = [(small(x.to(device)), dense(x.to(device))) for x in data]
    return float(sum((y - t).norm() for y, t in pairs) / sum(t.norm() for _, t in pairs))


@pytest.mark.parametrize("with_data", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_sketched_there_it_is_as_close(name, with_data):
    (dense, shape), found = MODELS[name](), {}
    data = batches(shape)
    for device in ("cpu", DEVICE):
        there = copy.deepcopy(dense).to(device)
        small = pc.sketchify(there, 0.5, data=data[:5] if with_data else None, **SKETCH)  # tensors of the CPU
        assert {one.device.type for one in small.state_dict().values()} == {device}
        found[device] = distance(small, there, data[5:])
    assert 0 < found[DEVICE] < 1.1 * found["cpu"] + 1e-3


class Speaker(nn.Module):
    """A table, layers, and a head whose weight is the table's."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(60, 24)
        self.layers = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24))
        self.norm = nn.LayerNorm(24)
        self.head = nn.Linear(24, 60, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        x = self.table(ids)
        return self.head(self.norm(x + self.layers(x)))


@pytest.mark.parametrize("include", [["table", "head"], ["table", "head", "layers.*"], ["layers.*"]])
@pytest.mark.parametrize("wide", [False, True])
def test_tables_and_wide_layers_there(include, wide, monkeypatch):
    if wide:
        monkeypatch.setattr(study, "LARGEST_GRADIENT", 40)
    torch.manual_seed(0)
    dense, found = Speaker().eval(), {}
    data = [torch.randint(0, 60, (4, 12)).clamp(max=40) for _ in range(10)]
    for device in ("cpu", DEVICE):
        there = copy.deepcopy(dense).to(device)
        small = pc.sketchify(there, 0.5, data=data[:8], include=include, **SKETCH)
        assert {one.device.type for one in small.state_dict().values()} == {device}
        found[device] = distance(small, there, data[8:])
    assert 0 < found[DEVICE] < 1.1 * found["cpu"] + 1e-3


def test_state_dicts_of_trailing_pivots_there():
    layers = [SketchedLinear(32, 16, 6, form="pivoted", start=start).to(DEVICE) for start in (0, 26)]
    leading, trailing = layers
    state = trailing.state_dict()
    assert state["trailing"].device.type == DEVICE
    with pytest.raises(pc.errors.CheckpointMismatchError, match="the trailing inputs"):
        leading.load_state_dict(dict(state))
    trailing.load_state_dict(dict(state))


def test_half_types():
    dense, shape = encoder()
    dense, data = dense.to(DEVICE, torch.bfloat16), [x.bfloat16() for x in batches(shape)]
    small = pc.sketchify(dense, 0.5, data=data[:5], **SKETCH)
    assert {one.dtype for one in small.parameters()} == {torch.bfloat16}
    assert distance(small, dense, data[5:]) < 0.5


@pytest.fixture
def pair():
    """A dense model there, its sketch, and what both take."""
    dense, shape = encoder()
    dense, data = dense.to(DEVICE), batches(shape)
    return dense, pc.sketchify(dense, 0.5, data=data[:5], **SKETCH), data


def test_healed(pair):
    dense, _, data = pair
    small = pc.sketchify(dense, 0.3, **SKETCH)
    healed = pc.heal(small, teacher=dense, data=data, steps=30, progress=False)
    assert distance(healed, dense, data) < distance(small, dense, data)


def test_saved_and_loaded(pair, tmp_path):
    dense, small, data = pair
    pc.save_sketched(small, tmp_path / "small")
    again, x = pc.load_sketched(copy.deepcopy(dense), tmp_path / "small"), data[0].to(DEVICE)
    assert torch.equal(again(x), small(x))
    torch.testing.assert_close(pc.densify(small)(x), small(x), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("sketched", [True, False])
def test_compiled(pair, sketched):
    from panther_compile.backend.panther import panther

    dense, small, data = pair
    x = data[0].to(DEVICE)
    with torch.no_grad():
        fast = torch.compile(small if sketched else dense, backend=panther)
        y = fast(x)
        wanted = small(x) if sketched else dense(x)
    assert float((y - wanted).norm() / wanted.norm()) < (1e-3 if sketched else 0.9)


def test_a_cuda_graph_of_the_model():
    dense, shape = encoder()
    small = pc.sketchify(dense.to(DEVICE, torch.float16), 0.5, round_rank_to=16, **SKETCH)
    x = torch.randn(1, 1, shape[-1], device=DEVICE, dtype=torch.float16)
    with torch.no_grad():
        small(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = small(x)
        graph.replay()
        torch.testing.assert_close(y, small(x), rtol=2e-2, atol=2e-2)


def test_trained_under_autocast_and_ddp(pair, tmp_path):
    _, small, data = pair
    torch.distributed.init_process_group("nccl", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = DistributedDataParallel(small.train())
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        losses = []
        for x in data * 2:
            with torch.autocast(DEVICE, torch.bfloat16):
                loss = model(x.to(DEVICE)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        assert losses[-1] < losses[0]
    finally:
        torch.distributed.destroy_process_group()
