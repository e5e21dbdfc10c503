"""Weights that a module's own forward multiplies by, through every route."""

import copy
import pickle
from functools import wraps
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from kinds import routes
from kinds.routes import relative
from torch import nn

import panther_compile as pc
from panther_compile.config import SketchConfig
from panther_compile.kinds.stack_uses import why_no_stacks
from panther_compile.layers import SketchedConv1d, SketchedConv2d, SketchedConv3d, SketchedLinear
from panther_compile.layers.lazy_weight import LazyWeight
from panther_compile.layers.own_weights import Kernel, Matrices, Matrix, OwnWeight
from panther_compile.layers.stack_product import read_matrix_product, read_product
from panther_compile.layers.weight_products import MatrixFactor
from panther_compile.planning.own_weights import lifted, lower_own_weights
from panther_compile.planning.sites import find_sites
from panther_compile.planning.timing import by_turns, time_sites
from panther_compile.planning.trace import read_graph

N, D, H = 3, 24, 40  # matrices, features, hidden features


def drawn(*shape):
    return nn.Parameter(torch.randn(shape) * shape[-1] ** -0.5)


class Ensemble(nn.Module):
    """Every member on every row, as of reinforcement learning."""

    def __init__(self):
        super().__init__()
        self.w1, self.w2 = drawn(N, D, H), drawn(N, H, D)
        self.b1, self.b2 = drawn(N, H), drawn(N, 1, D)
        self.register_buffer("scale", torch.ones((), dtype=torch.int64))

    def forward(self, x):
        h = torch.baddbmm(self.b1.unsqueeze(1), x.expand(self.w1.shape[0], -1, -1), self.w1)
        return (torch.bmm(h.relu(), self.w2) + self.b2).mean(0)


class Broadcast(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = drawn(N, D, H), drawn(N, H, D)

    def forward(self, x):
        h = (x @ self.first.to(x.dtype)).tanh()
        return torch.matmul(h[None], self.last).squeeze(0).sum(-3)


class Turned(nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj, self.down_proj = drawn(N, H, D), drawn(N, D, H)

    def forward(self, x):
        rows = x.expand(len(self.up_proj), -1, -1)
        hidden = torch.bmm(rows, self.up_proj.transpose(1, 2)).relu()
        return hidden.bmm(self.down_proj.mT).sum(0)


class Loop(nn.Module):
    """Rows go to the matrix that a router chooses; with a shared linear layer beside."""

    def __init__(self):
        super().__init__()
        self.router, self.shared = nn.Linear(D, N), nn.Linear(D, D)
        self.w_in, self.w_out, self.bias = drawn(N, H, D), drawn(N, H, D), drawn(N, H)
        self.norm, self.act = nn.LayerNorm(D), nn.SiLU()

    def forward(self, x):
        x = self.norm(x)
        chosen = self.router(x).argmax(-1)
        out = self.shared(x)
        for expert in range(N):
            rows = (chosen == expert).nonzero().squeeze(-1)
            out = out.index_add(0, rows, self.expert(x[rows], expert))
        return out

    def expert(self, rows, number):
        up, down = self.w_in[number], self.w_out[number].t()
        hidden = self.act(F.linear(rows, up, self.bias[number]))
        return F.linear(hidden, weight=down)


class Einsum(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = drawn(N, D, H), drawn(N, D, H)

    def forward(s, x):  # noqa: N805
        hidden = torch.einsum("td,edf->tef", x, s.first).relu()
        return torch.einsum("tef,edf->td", hidden, s.last)


class Mixture(nn.Module):
    """Experts in 3-D parameters beside layers of their own, in one module."""

    def __init__(self):
        super().__init__()
        self.gate, self.shared = nn.Linear(D, N), nn.Sequential(nn.Linear(D, H), nn.ReLU(), nn.Linear(H, D))
        self.first, self.last = drawn(N, D, H), drawn(N, H, D)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)

    @property
    def count(self):
        return self.first.shape[0]

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        hidden = torch.einsum("td,edf->etf", x, self.first).relu()
        outs = torch.bmm(hidden, self.last)
        assert len(outs) == self.count
        return torch.einsum("te,etd->td", weights, outs) + self.shared(x)


class Causal(nn.Conv1d):
    """Sees nothing of what comes later."""

    def __init__(self):
        super().__init__(D, D, 5, dilation=2)
        self.left = 8

    def forward(self, x, cache=None):
        x = x.T[None]
        before = F.pad(x, (self.left, 0)) if cache is None else torch.cat([cache, x], -1)
        return super().forward(before)[0].T


class Same(nn.Conv2d):
    def __init__(self):
        super().__init__(2, 2 * D, (4, 3), stride=2, bias=False)

    def forward(self, x):
        x = F.pad(x.view(-1, 2, 4, D // 8), (1, 0, 1, 2)).to(self.weight.dtype)
        out = F.conv2d(x, self.weight, self.bias, self.stride, padding=(1, 0))
        return F.adaptive_avg_pool2d(out, 1).view(len(out), 2, -1)[:, 0].repeat(1, 1)[:, :D]


class Frames(nn.Conv3d):
    def __init__(self):
        super().__init__(3, D, (3, 2, 2), padding=(1, 0, 0), padding_mode="replicate", groups=1)
        self.before = None

    def forward(self, input):
        x = input.view(len(input), 3, 2, 2, 2)
        self.before = x
        return self._conv_forward(x, self.weight, self.bias).mean((2, 3, 4))


class Casting(nn.Linear):
    """As of OpenAI's Whisper: weights stay in float32 where the rest is in half types."""

    def __init__(self):
        super().__init__(D, D)

    def forward(self, x):
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class Plain(nn.Module):
    """A parameter each way round, as before there was nn.Linear; and one that stays."""

    def __init__(self):
        super().__init__()
        self.w_in, self.w_out, self.bias = drawn(D, H), drawn(D, H), drawn(H)
        self.bias_out, self.table = drawn(D), drawn(7, D)

    def forward(self, x):
        h = torch.addmm(self.bias, x, self.w_in).relu()
        return F.linear(h, self.w_out.to(h.dtype), self.bias_out) + self.table.mean(0)


class Spelled(nn.Module):
    """With an equation in its text, and one that it keeps, as einops' EinMix."""

    def __init__(self):
        super().__init__()
        self.w_in, self.w_out, self.equation = drawn(D, H), drawn(D, H), "td,ed->et"

    def forward(self, x):
        h = torch.einsum("...i, io -> ...o", x, self.w_in)
        h += 1
        return torch.einsum(self.equation, h.relu(), self.w_out).T


class Equalized(nn.Module):
    """A number times the matrix, as linear layers of StyleGAN and of e3nn."""

    def __init__(self):
        super().__init__()
        self.weight, self.w_out, self.bias = drawn(H, D), drawn(H, D), drawn(H)
        self.gain, self.halved = 0.5, False

    def forward(self, x):
        h = F.linear(x, self.weight.to(x.dtype) * self.gain, self.bias)
        if self.halved:
            w = self.w_out / (self.gain * 2) ** 0.5
            h = h.relu()
        else:
            w = 3 * self.w_out / self.gain
        return h @ w


class Biased(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = drawn(D, D), drawn(D)

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class SaysWhatIsSaved(Biased):
    """As PyTorch Geometric's Linear."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[f"{prefix}weight"] = self.weight if keep_vars else self.weight.detach()
        destination[f"{prefix}bias"] = self.bias if keep_vars else self.bias.detach()

    def _load_from_state_dict(self, state_dict, prefix, *others):
        weight = state_dict.get(f"{prefix}weight")
        if weight is not None and weight.shape != self.weight.shape:
            self.weight = nn.Parameter(torch.empty_like(weight))
        super()._load_from_state_dict(state_dict, prefix, *others)


STACKS = {
    Ensemble: {"w1": True, "w2": True},
    Broadcast: {"first": True, "last": True},
    Turned: {"up_proj": False, "down_proj": False},
    Loop: {"w_in": False, "w_out": True},
    Einsum: {"first": True, "last": False},
    Mixture: {"first": True, "last": True},
}
KERNELS = {Causal: SketchedConv1d, Same: SketchedConv2d, Frames: SketchedConv3d}
MATRICES = {
    Casting: {"weight": Matrix},
    Plain: {"w_in": Matrix, "w_out": Matrix},
    Spelled: {"w_in": Matrix, "w_out": Matrix},
    Equalized: {"weight": Matrix, "w_out": Matrix},
    Biased: {"weight": Matrix},
    SaysWhatIsSaved: {"weight": Matrix},
}
CLASSES = [*STACKS, *KERNELS, *MATRICES]


def build(cls):
    torch.manual_seed(0)
    return cls().eval()


# One of each way to multiply; the others, which differ in how the text is read, with the slow tests.
_TELLING = {Ensemble, Loop, Equalized, Casting, Mixture, Biased, Causal}


def each(classes):
    """Parameters of a test that takes seconds for each."""
    return [one if one in _TELLING else pytest.param(one, marks=pytest.mark.slow) for one in classes]


def layers_of(model):
    return {name: one for name, one in model.named_modules() if isinstance(one, OwnWeight)}


@pytest.fixture(params=CLASSES, ids=lambda cls: cls.__name__)
def module(request):
    return build(request.param)


def test_what_the_forward_does_is_read(module):
    found = layers_of(lifted(module))
    if type(module) not in STACKS:
        wanted = MATRICES.get(type(module), {"weight": Kernel})
        assert {name: type(one) for name, one in found.items()} == wanted
        return
    assert {name: one.transposed for name, one in found.items()} == STACKS[type(module)]
    for name, one in found.items():
        count, inputs, outputs = one.sizes
        shape = (count, inputs, outputs) if one.transposed else (count, outputs, inputs)
        assert module.get_parameter(name).shape == shape


def test_lifted_computes_the_same_and_is_lowered_again(module):
    before = copy.deepcopy(module.state_dict())
    clone, x = lifted(module), torch.randn(14, D)
    assert type(clone) is type(module)
    torch.testing.assert_close(clone(x), module(x))
    torch.testing.assert_close(copy.deepcopy(clone)(x), module(x))
    torch.testing.assert_close(pickle.loads(pickle.dumps(clone))(x), module(x))
    module(x).square().mean().backward()
    clone(x).square().mean().backward()
    for name, one in layers_of(clone).items():
        if isinstance(one, Matrices):
            learnt = [layer.weight for layer in one.layers]
            grads = [torch.zeros_like(w) if w.grad is None else w.grad for w in learnt]
            grads = torch.stack(grads).mT if one.transposed else torch.stack(grads)
            torch.testing.assert_close(grads, module.get_parameter(name).grad, rtol=1e-4, atol=1e-6)
    lower_own_weights(clone)
    assert list(clone.state_dict()) == list(before)
    assert all(torch.equal(tensor, before[name]) for name, tensor in clone.state_dict().items())
    assert [name for name, _ in clone.named_parameters()] == [name for name, _ in module.named_parameters()]
    assert set(vars(clone)) == set(vars(module))


def test_factors_compute_what_they_stand_for(module):
    before = copy.deepcopy(module.state_dict())
    small = pc.sketchify(nn.Sequential(module), 0.5, **routes.OPTIONS)
    assert type(small[0]) is type(module)
    assert layers_of(small)
    x = torch.randn(14, D)
    dense = pc.densify(small)
    assert type(dense[0]) is type(module)
    assert list(dense[0].state_dict()) == list(module.state_dict())
    torch.testing.assert_close(small(x), dense(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(copy.deepcopy(small)(x), small(x))
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    report = pc.sketch_report(small)
    numbers = lambda one: sum(t.numel() for t in (*one.parameters(), *one.buffers()))  # noqa: E731
    assert (report.stored_numbers, report.dense_numbers) == (numbers(small), numbers(module))


class Block(nn.Module):
    """A residual block, so that there is something before and behind."""

    def __init__(self, cls):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(D, D), build(cls), nn.Linear(D, D)

    def forward(self, x):
        x = self.first(x)
        return self.last(x + self.inner(x))


LAYERS = (SketchedLinear, SketchedConv1d, SketchedConv2d, SketchedConv3d)
torch.manual_seed(1)
MIXING = torch.randn(4, D)
BATCHES = [torch.randn(32, 4) @ MIXING + 0.05 * torch.randn(32, D) for _ in range(4)]


@pytest.fixture
def block(module):
    return Block(type(module))


@pytest.fixture(params=each(CLASSES), ids=lambda cls: cls.__name__)
def telling_block(request):
    build(request.param)
    return Block(request.param)


def test_weights_alone_saved_and_skeleton(block, tmp_path):
    small = pc.sketchify(block, 0.6, **routes.OPTIONS)
    assert layers_of(small.inner)
    routes.saved_and_loaded(small, Block(type(block.inner)), BATCHES[0], tmp_path / "saved")
    routes.as_skeleton(lambda: Block(type(block.inner)), small)


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_traced_by_torch_jit(block):
    small, x = pc.sketchify(block.eval(), 0.6, **routes.OPTIONS), BATCHES[0]
    assert relative(torch.jit.trace(small, x)(x), small(x)) < 1e-6


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
@pytest.mark.parametrize("cls", [Biased, SaysWhatIsSaved, Ensemble])
def test_quantized_by_torch(cls):
    small, x = pc.sketchify(Block(cls).eval(), 0.6, **routes.OPTIONS), BATCHES[0]
    rounded = torch.ao.quantization.quantize_dynamic(small, {nn.Linear})
    assert relative(rounded(x), small(x)) < 0.2  # of so few features


def test_inplace(block):
    wanted = pc.sketchify(block, 0.6, **routes.OPTIONS)(BATCHES[0])
    inner = block.inner
    small = pc.sketchify(block, 0.6, inplace=True, **routes.OPTIONS)
    assert (small is block, small.inner is inner) == (True, True)
    torch.testing.assert_close(small(BATCHES[0]), wanted)
    pc.densify(small, inplace=True)
    assert (small.inner is inner, layers_of(small)) == (True, {})
    torch.testing.assert_close(small(BATCHES[0]), wanted, rtol=1e-4, atol=1e-5)


def test_data_and_healing(telling_block):
    block = telling_block
    routes.by_data(block, BATCHES, BATCHES[0], LAYERS)
    fitted = vars(pc.sketchify(block, 0.4, data=BATCHES, **routes.OPTIONS))["_panther_sketch"].fitted
    parts = [one for name, one in fitted.items() if name.startswith("inner.")]
    assert parts
    routed = isinstance(block.inner, Loop)  # some experts may be given no row
    assert routed or all(one.method == "calibrated" for one in parts)
    routes.healed(block, BATCHES, BATCHES[0])


def test_a_matrix_is_multiplied_beside_a_bias_that_is_made_when_it_is_read():
    """As where data narrows the layer, whose bias is then the narrow one's."""
    dense = Block(Plain).eval()
    inner, x = lifted(dense).inner, torch.randn(3, D)
    bias = LazyWeight((H,), dense.inner.bias, lambda: dense.inner.bias + 1)
    wanted = torch.addmm(dense.inner.bias + 1, x, dense.inner.w_in)
    torch.testing.assert_close(torch.addmm(bias, x, inner.w_in), wanted)


def test_latency(telling_block):
    routes.by_latency(telling_block, BATCHES[0])


def test_the_dense_model_is_timed_as_it_was_given():
    timed = []

    def timer(dense, sketched, call):
        timed.append((list(layers_of(dense)), list(layers_of(sketched))))
        return by_turns(dense, sketched, call)

    model = lifted(Block(Turned).eval())
    found = find_sites(model, SketchConfig(min_params=0), read_graph(model))
    sites = time_sites(model, found, BATCHES[0], model_timer=timer)
    sites.whole({model.inner.up_proj.layers[0]: SketchedLinear(D, H, 4, bias=False)})
    assert timed == [([], ["inner.up_proj"])]


def test_backend(telling_block):
    routes.compiled(telling_block, BATCHES[0], LAYERS)


@pytest.mark.parametrize("cls", each(one for one in CLASSES if one is not Loop))
def test_graphs_and_onnx(cls, tmp_path):
    block = Block(cls)
    small = pc.sketchify(block, 0.6, **routes.OPTIONS)
    program = torch.export.export(small.eval(), (BATCHES[0],))
    torch.testing.assert_close(program.module()(BATCHES[0]), small(BATCHES[0]), rtol=1e-4, atol=1e-5)
    routes.exported(small, BATCHES[0], tmp_path / "small.onnx")
    routes.partitioned(small, BATCHES[0])


def test_layers_beside_are_layers_of_their_own():
    small = pc.sketchify(Block(Mixture), 0.5, exclude=["*.gate", "*.last.1"], **routes.OPTIONS)
    assert type(small.inner.gate) is nn.Linear
    assert isinstance(small.inner.shared[0], SketchedLinear)
    kinds = {place: type(one) for place, one in small.inner.last.named_children()}
    assert kinds == {"0": SketchedLinear, "1": nn.Linear, "2": SketchedLinear}
    torch.testing.assert_close(pc.densify(small)(BATCHES[0]), small(BATCHES[0]), rtol=1e-4, atol=1e-5)


def test_what_is_not_sketched_is_a_parameter_again():
    small = pc.sketchify(Block(Mixture), 0.5, exclude=["inner.first.*"], **routes.OPTIONS)
    assert type(small.inner.first) is nn.Parameter
    assert list(layers_of(small)) == ["inner.last"]
    pc.heal(small, teacher=Block(Mixture), data=BATCHES, steps=2, progress=False)


def test_anything_else_is_asked_of_the_values():
    module = build(Turned)
    stack, dense = lifted(module).up_proj, module.up_proj
    asked = (stack.shape, stack.dtype, stack.device, stack.dim(), stack.ndim, stack.size(1), len(stack))
    assert asked == (dense.shape, dense.dtype, dense.device, 3, 3, H, N)
    assert (stack[1].size(), stack[-1].T.shape) == ((H, D), (D, H))
    places = torch.tensor([2, 0])
    for ask in (
        lambda one: one[places],
        lambda one: one[:, 1:],
        lambda one: one.sum(),
        lambda one: one * 2 - 1,
        lambda one: one.double(),
        lambda one: one.to(torch.float64) + 0,
        torch.linalg.vector_norm,
        lambda one: one.transpose(0, 1),
        lambda one: torch.bmm(torch.ones(N, 2, H), one),
        lambda one: torch.einsum("ti,eji->tej", torch.ones(2, D), one),
        lambda one: F.linear(input=torch.ones(2, D), weight=one[1]),
        lambda one: torch.baddbmm(torch.ones(N, 1, 1), torch.ones(N, 2, D), one.mT),
    ):
        torch.testing.assert_close(ask(stack), ask(dense))
    with pytest.raises(IndexError):
        stack[N]
    with pytest.raises(pc.PantherError, match="would write to the weight"):
        stack.data.clamp_(0)


class Gathered(nn.Module):
    """A matrix for each row, chosen by its type, as in layers of graphs with several kinds of edges."""

    def __init__(self):
        super().__init__()
        self.w, self.out = nn.Parameter(torch.randn(3, 24, 24)), nn.Linear(24, 24)

    def forward(self, x, kind):
        return self.out(torch.bmm(x[:, None], self.w[kind])[:, 0])


def test_rows_that_gather_their_matrices_train_the_factors():
    torch.manual_seed(0)
    model, given = Gathered(), (torch.randn(32, 24), torch.randint(3, (32,)))
    small = pc.sketchify(model, 0.5, synthetic=False, min_params=0, allow_slower=True, progress=False)
    factors = [one for layer in small.w.layers for one in layer.parameters()]
    assert len(factors) > 3  # of three matrices some are sketched
    small(*given).square().sum().backward()
    found = [one.grad for one in factors]
    assert all(one is not None for one in found)
    small.zero_grad()
    x, kind = given
    rows = torch.cat([row[None] @ small.w[int(one)] for row, one in zip(x, kind, strict=True)])
    small.out(rows).square().sum().backward()
    for one, wanted in zip(found, factors, strict=True):
        torch.testing.assert_close(one, wanted.grad, rtol=1e-3, atol=1e-5)


def test_autocast_and_half_precision():
    for cls in CLASSES:
        block, x = Block(cls), BATCHES[0]
        small = pc.sketchify(block, 0.6, **routes.OPTIONS)
        with torch.autocast("cpu", torch.bfloat16):
            assert small(x).dtype == block(x).dtype
        assert small.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


class CastingConv(nn.Conv1d):
    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


class Speech(nn.Module):
    """As OpenAI's Whisper starts."""

    def __init__(self):
        super().__init__()
        self.conv, self.up = CastingConv(D, H, 3, padding=1), Casting()
        self.last = nn.Linear(H, D, bias=False)

    def forward(self, x):
        x = self.conv(self.up(x).mT[None])[0].mT
        return F.linear(x, self.last.weight.to(x.dtype))


@pytest.mark.parametrize("data", [None, BATCHES])
def test_weights_that_are_cast_to_the_input(data, monkeypatch):
    torch.manual_seed(0)
    model, x = Speech().eval(), BATCHES[0]
    small = pc.sketchify(model, 0.5, data=data, include=["conv*", "up*"], **routes.OPTIONS)
    assert isinstance(small.conv.weight.layer, SketchedConv1d)
    assert isinstance(small.up.weight.layer, SketchedLinear)
    wanted = small(x)
    assert relative(wanted, model(x)) < (1.0 if data is None else 0.1)
    with monkeypatch.context() as patch:
        for cls, method in ((SketchedLinear, "_dense_weight"), (SketchedConv1d, "_product")):
            patch.setattr(cls, method, lambda _: pytest.fail("the factors were multiplied out"))
        for dtype in (torch.bfloat16, torch.float16, torch.float64):
            found = small(x.to(dtype))
            assert found.dtype == dtype
            assert relative(found.to(wanted.dtype), wanted) < (1e-6 if dtype == torch.float64 else 0.02)
    assert {one.dtype for one in small.parameters()} == {torch.float32}
    small(x.bfloat16()).float().square().mean().backward()
    assert all(one.grad is not None for one in small.parameters())
    dense = pc.densify(small)
    assert type(dense.conv) is CastingConv
    assert relative(dense(x), small(x)) < 1e-5
    assert dense(x.bfloat16()).dtype == torch.bfloat16


class Routes(Plain):
    def forward(self, x):
        return super().forward(x) * (x @ self.w_in).topk(1).values


class MultipliesColumns(Biased):
    def forward(self, x):
        return (self.weight @ x.mT).mT + self.bias


class SavesItTurned(Biased):
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[f"{prefix}weight"] = self.weight.detach().t()
        destination[f"{prefix}bias"] = self.bias.detach()


class SavesMore(Biased):
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}norm"] = self.weight.detach().norm()


class LoadsItTurned(Biased):
    def _load_from_state_dict(self, state_dict, prefix, *others):
        state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"].t()
        super()._load_from_state_dict(state_dict, prefix, *others)


class SavesItself(Biased):
    def state_dict(self, *args, **kwargs):
        return super().state_dict(*args, **kwargs)


class UsesItTwice(Biased):
    def forward(self, x):
        return F.linear(x, self.weight, self.bias) @ self.weight


class Masks(Biased):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.eye(D))

    def forward(self, x):
        return F.linear(x, self.weight * self.mask, self.bias)


class Normalizes(Biased):
    def forward(self, x):
        return F.linear(x, self.weight / self.weight.norm(), self.bias)


class StandsForTwo(Biased):
    def forward(self, x):
        w = self.weight * 2
        if x.sum() > 0:
            w = x
        return F.linear(x, w)


OTHERS = [
    *(Routes, MultipliesColumns, UsesItTwice, Masks, Normalizes, StandsForTwo),
    *(SavesItTurned, SavesMore, LoadsItTurned, SavesItself),
]


@pytest.mark.parametrize("cls", OTHERS)
def test_other_matrices_stay_parameters(cls):
    assert not layers_of(lifted(nn.Sequential(cls())))


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2, self.bias = drawn(D, H), drawn(H, 30), drawn(30)

    def forward(self, x):
        return torch.relu(x @ self.w1) @ self.w2 + self.bias


def test_a_scaled_matrix_is_asked_what_a_tensor_is():
    module = build(Equalized)
    twice = lifted(module).weight * 2
    torch.testing.assert_close(twice.abs(), 2 * module.weight.abs())
    torch.testing.assert_close(F.linear(torch.eye(D), twice / 4), module.weight.T / 2)
    assert torch.equal(lifted(module).weight * 0, module.weight * 0)


def test_a_matrix_that_makes_the_output_is_a_head():
    report = pc.sketch_report(pc.sketchify(Head().eval(), 0.5, **routes.OPTIONS))
    reasons = {line.name: line.reason for line in report.plan.layers}
    assert report.plan.sketched
    assert "output head" in reasons["w2.layer"]


class CastsToHalf(Casting):
    def forward(self, x):
        return F.linear(x, self.weight.to(torch.float64).to(x.dtype), self.bias.to(x.dtype))


class CastsAndBends(Casting):
    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype)).relu()


class CastsTheInput(Casting):
    def forward(self, x):
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)


class CastsInTraining(Casting):
    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype), None if self.training else self.bias.to(x.dtype))


class Activated(nn.Linear):
    """As SchNetPack's Dense: more than a linear layer, and its matrix one all the same."""

    def __init__(self):
        super().__init__(D, D)

    def forward(self, x):
        return torch.sigmoid(super().forward(x)) * x


class AddsItTwice(Activated):
    def forward(self, x):
        return F.linear(x, self.weight, self.bias) + self.bias


OWN_FORWARDS = {
    CastsToHalf: None,
    CastsAndBends: None,
    CastsTheInput: None,  # the class above adds another
    CastsInTraining: None,
    Activated: "bias",
    AddsItTwice: None,
}


@pytest.mark.parametrize("cls", OWN_FORWARDS)
def test_subclasses_of_linear_layers_with_more_in_their_forward(cls):
    module, x = build(cls), torch.randn(14, D)
    clone = lifted(module)
    assert layers_of(clone)["weight"].bias_name == OWN_FORWARDS[cls]
    for training in (True, False):
        torch.testing.assert_close(clone.train(training)(x), module.train(training)(x))
    small = pc.sketchify(Block(cls), 0.6, data=BATCHES, **routes.OPTIONS)
    (layer,) = layers_of(small.inner).values()
    assert (type(small.inner), layer.layer.bias) == (cls, None)
    assert isinstance(layer.layer, SketchedLinear)
    dense = pc.densify(small)
    assert dense.state_dict().keys() == Block(cls).state_dict().keys()
    assert relative(dense(BATCHES[0]), small(BATCHES[0])) < 1e-5


class Masked(Activated):
    def forward(self, x):
        return F.linear(x, self.weight * (self.weight.abs() > 0.01), self.bias)


class Rounded(Activated):
    def forward(self, x):
        return F.linear(x, torch.round(self.weight * 8) / 8, self.bias)


class HandsItselfOn(Activated):
    def forward(self, x):
        return hand_on(self, x) + F.linear(x, self.weight)


def hand_on(layer, x):
    return x @ layer.weight.cos()


class CastsConvPadded(CastingConv):
    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(F.pad(x, (1, 0)), weight.to(x.dtype), bias.to(x.dtype))


@pytest.mark.parametrize("cls", [Masked, Rounded, HandsItselfOn])
def test_subclasses_that_change_their_weight_stay(cls):
    assert not layers_of(lifted(nn.Sequential(cls())))
    assert not layers_of(lifted(nn.Sequential(CastsConvPadded(D, D, 3))))


class Scaled(Turned):
    def forward(self, x):
        return torch.bmm(x.expand(N, -1, -1), (self.up_proj * 2).mT).sum(0) @ self.down_proj.sum(0).T


class BothWays(Turned):
    def forward(self, x):
        return F.linear(F.linear(x, self.up_proj[0]) @ self.up_proj[1], self.down_proj[0].T)


class Above(Turned):
    def forward(self, x):
        return super().forward(x)


class Whole(Turned):
    def forward(self, x):
        return super().forward(x) + sum(one.sum() for one in self.parameters())


class TwoThings(Turned):
    def forward(self, x):
        weight = self.up_proj[0]
        if x.sum() > 0:
            weight = self.down_proj[0].T
        return F.linear(x, weight)


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (Scaled, "uses its 3-D parameter up_proj itself: self.up_proj is in no product that is known"),
        (BothWays, "multiplies by up_proj and by its transpose"),
        (TwoThings, "weight stands for two things"),
        (Whole, "reads all of its parameters"),
    ],
)
def test_what_cannot_be_read_is_left_alone_with_a_reason(cls, reason):
    assert reason in why_no_stacks(build(cls))
    plan = pc.plan_sketch(nn.Sequential(nn.Linear(D, D), build(cls), nn.Linear(D, D)), 0.5, **routes.OPTIONS)
    assert any(reason in line.reason for line in plan.layers) or layers_of(lifted(build(cls)))


def test_a_forward_that_asks_the_class_above_is_read_too():
    assert set(layers_of(lifted(build(Above)))) == {"up_proj", "down_proj"}
    small, x = pc.sketchify(nn.Sequential(build(Above)), 0.5, **routes.OPTIONS), torch.randn(5, D)
    torch.testing.assert_close(small(x), pc.densify(small)(x))


class Scales(nn.Conv1d):
    def forward(self, x):
        return F.conv1d(x, self.weight * 2, self.bias)


class AddsBias(nn.Conv1d):
    def forward(self, x):
        return super().forward(x) + self.bias[:, None]


class NoBias(nn.Conv1d):
    def forward(self, x):
        return F.conv1d(x, self.weight)


def conv_same(x, weight, bias=None, stride=1, /, *, scale=None):
    weight = weight if scale is None else weight * scale
    return F.conv1d(x, weight, bias, stride)


def conv_left(x, weight, bias=None, *, stride=1):
    return F.conv1d(F.pad(x, (weight.shape[-1] - 1, 0)), weight, bias, stride)


class HandsOn(nn.Conv1d):
    """As timm's Conv2dSame does."""

    def forward(self, x):
        return conv_left(x, self.weight, bias=self.bias, stride=self.stride)


class HandsOnToScale(nn.Conv1d):
    def forward(self, x):
        return conv_same(x, self.weight, self.bias)


class HandsOnAlone(nn.Conv1d):
    def forward(self, x):
        return conv_left(x, self.weight)


class HandsOnStarred(nn.Conv1d):
    def forward(self, x):
        return conv_left(*(x,), self.bias, self.weight)


class HandsOnToAnother(nn.Conv1d):
    def forward(self, x, conv_left=lambda x, weight, bias: F.conv1d(x, weight.abs(), bias)):
        return conv_left(x, self.weight, self.bias)


def test_a_function_that_is_handed_the_kernel_is_read():
    torch.manual_seed(0)
    model, x = nn.Sequential(HandsOn(D, H, 3, stride=2), nn.ReLU(), HandsOn(H, D, 3)), torch.randn(2, D, 20)
    torch.testing.assert_close(lifted(model)(x), model(x))
    small = pc.sketchify(model, 0.9, **routes.OPTIONS)
    assert set(layers_of(small)) == {"0.weight", "2.weight"}
    assert relative(small(x), model(x)) < 0.5
    torch.testing.assert_close(pc.densify(small)(x), small(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "cls",
    [Scales, AddsBias, NoBias, HandsOnToScale, HandsOnAlone, HandsOnStarred, HandsOnToAnother],
)
def test_other_uses_of_a_kernel(cls):
    assert not layers_of(lifted(nn.Sequential(cls(D, D, 3))))
    assert not layers_of(lifted(nn.Sequential(nn.Conv1d(D, D, 3))))


@pytest.mark.parametrize("exclude", ["inner", "inner.weight", "inner.weight.layer", Causal, nn.Conv1d])
def test_selectors_of_a_convolution(exclude):
    small = pc.sketchify(Block(Causal), 0.5, exclude=[exclude], **routes.OPTIONS)
    assert not layers_of(small)
    small = pc.sketchify(Block(Causal), {"inner": 0.4, nn.Linear: 1.0, Causal: 0.4}, **routes.OPTIONS)
    assert list(layers_of(small)) == ["inner.weight"]


@pytest.mark.parametrize("exclude", ["inner.up_proj", "inner.up_proj.*"])
def test_selectors_of_a_stack(exclude):
    small = pc.sketchify(Block(Turned), 0.5, exclude=[exclude], **routes.OPTIONS)
    assert list(layers_of(small)) == ["inner.down_proj"]


def in_another_way(forward):
    @wraps(forward)
    def run(self, x):
        return forward(self, x) if self.training else x @ self.w1.sum(0) @ self.w2.sum(0)

    return run


class Wrapped(Turned):
    forward = in_another_way(Turned.forward)


def test_a_forward_that_is_wrapped_is_not_read():
    assert "cannot be read" in why_no_stacks(build(Wrapped))
    assert not layers_of(lifted(build(Wrapped)))


class OtherStride(nn.Conv2d):
    def forward(self, x):
        return F.conv2d(x, self.weight, self.bias, stride=np.int64(1), padding=[np.int64(1)])


class Replaces(nn.Conv2d):
    def conv2d(self, x, weight, bias):
        return F.conv2d(x, weight - weight.mean(), bias)

    def forward(self, x):
        return self.conv2d(x, self.weight, self.bias)


class Stepped(nn.Conv2d):
    def forward(self, x):
        return super().forward(F.pad(x, (1, 1, 1, 1)))

    def step(self, x):
        return F.linear(x.flatten(1), self.weight.flatten(1), self.bias)


class Steps(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = Stepped(4, 6, 3)

    def forward(self, x):
        bias = self.conv.bias.view(1, -1, 1, 1)
        flipped = F.conv2d(x, self.conv.weight.flip(-1), self.conv.bias) + F.conv2d(x, self.conv.weight)
        return self.conv(x).mean() + self.conv.step(x[..., :3, :3]).mean() + flipped.mean() + bias.mean()


@pytest.mark.parametrize(
    "make",
    [
        lambda: OtherStride(4, 6, 3, stride=2),
        lambda: Replaces(4, 6, 3),
        lambda: Stepped(4, 6, 3, padding=1, padding_mode="circular"),
        Steps,
    ],
)
def test_the_bias_is_the_modules_own(make):
    torch.manual_seed(0)
    model, x = nn.Sequential(make()), torch.randn(2, 4, 7, 8)
    torch.testing.assert_close(lifted(model)(x), model(x))
    dense = pc.densify(pc.sketchify(model, 0.5, **routes.OPTIONS)) if layers_of(lifted(model)) else model
    assert [name for name, _ in dense.named_parameters()] == [name for name, _ in model.named_parameters()]


def test_the_bias_of_a_sketched_convolution_is_one_parameter():
    model = Block(Causal)
    small, other = (pc.sketchify(model, 0.5, **routes.OPTIONS) for _ in range(2))
    names = [name for name, _ in small.named_parameters(remove_duplicate=False) if "bias" in name]
    assert [name for name in names if name.startswith("inner")] == ["inner.bias"]
    x = torch.randn(20, D)
    small.load_state_dict({name: value.clone() for name, value in small.state_dict().items()}, assign=True)
    with torch.no_grad():
        small.inner.bias += 1
    called = []
    small.inner.weight.layer.register_forward_hook(lambda *_: called.append(1))
    wanted = small(x)
    assert called
    other.load_state_dict(small.state_dict())
    torch.testing.assert_close(other(x), wanted)
    torch.testing.assert_close(pc.densify(small)(x), wanted, rtol=1e-4, atol=1e-5)


def test_the_bias_of_a_sketched_convolution_is_healed():
    torch.manual_seed(0)
    model = Block(Causal)
    data = [torch.randn(20, D) for _ in range(10)]
    small = pc.sketchify(model, 0.7, data=data, **routes.OPTIONS)
    fitted = small.inner.bias.detach().clone()
    with torch.no_grad():
        small.inner.bias += 0.3
    healed = pc.heal(small, teacher=model, data=data, steps=100, lr=0.01, progress=False)
    assert float((healed.inner.bias - fitted).norm()) < 0.7 * float((small.inner.bias - fitted).norm())


def test_a_bias_that_is_no_parameter_stays():
    conv = Stepped(4, 6, 3)
    held = conv.bias.detach() + 3
    del conv.bias
    conv.register_buffer("bias", held)
    model, x = nn.Sequential(conv), torch.randn(2, 4, 7, 8)
    small = pc.sketchify(model, 0.5, **routes.OPTIONS)
    assert torch.equal(small[0].bias, held)
    torch.testing.assert_close(pc.densify(small)(x), small(x), rtol=1e-4, atol=1e-5)
    assert float((small(x) - model(x)).mean().abs()) < 0.1


def test_sketched_twice_and_marks():
    model = Block(Ensemble)
    model.inner._is_hf_initialized = True
    once = pc.sketchify(model, 0.5, exclude=["inner.w2"], **routes.OPTIONS)
    twice = pc.sketchify(once, 0.5, **routes.OPTIONS)
    assert list(layers_of(twice)) == ["inner.w1", "inner.w2"]
    dense = pc.densify(twice)
    assert list(dense.state_dict()) == list(model.state_dict())
    assert dense.inner._is_hf_initialized is True
    other = pc.densify(pc.sketchify(Block(Ensemble), 0.5, exclude=["inner.w2"], **routes.OPTIONS))
    assert "_is_hf_initialized" not in vars(other.inner)


def test_modes_writes_and_hooks():
    clone = lifted(Block(Ensemble).eval())
    assert not any(one.training for one in clone.modules())
    stack = clone.inner.w1
    for write in (
        lambda: setattr(stack, "data", torch.zeros(1)),
        lambda: setattr(stack, "requires_grad", False),
        lambda: stack.__setitem__(0, 0.0),
        lambda: stack.__imul__(2),
        lambda: stack.mul_(2),
    ):
        with pytest.raises(pc.PantherError, match="would write to the weight"):
            write()
    stack.requires_grad = True
    hooked = nn.Sequential(build(Causal))
    hooked[0].register_forward_pre_hook(lambda *_: None)
    assert not layers_of(lifted(hooked))


def test_einsum_gives_what_can_be_viewed():
    class Viewed(Einsum):
        def forward(self, x):
            return torch.einsum("bd,edf->bef", x, self.first).view(len(x), -1)

    clone, x = lifted(build(Viewed)), torch.randn(5, D)
    assert "first" in layers_of(clone)
    torch.testing.assert_close(clone(x), build(Viewed)(x))


class Pointwise(nn.Conv1d):
    def forward(self, x):
        return super().forward(x.mT).mT


def test_a_head_stays():
    model = nn.Sequential(Pointwise(D, H, 1), Pointwise(H, 30, 1))
    assert set(layers_of(lifted(model))) == {"0.weight", "1.weight"}
    model.config = SimpleNamespace(vocab_size=30)
    assert set(layers_of(lifted(model))) == {"0.weight"}


def test_the_last_matrix_of_a_stack_is_no_head():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.w1, self.w2 = drawn(N, D, H), drawn(N, H, D + 8)

        def forward(self, x):
            return torch.bmm(torch.bmm(x.expand(N, -1, -1), self.w1).relu(), self.w2).mean(0)

    plan = pc.plan_sketch(nn.Sequential(nn.Linear(D, D), Experts()), 0.5, min_params=0, allow_slower=True)
    assert {line.name for line in plan.sketched} >= {f"1.w2.{place}" for place in range(N)}


def test_shared_parameters_stay():
    model = nn.Sequential(build(Einsum), build(Einsum))
    model[1].first = model[0].first
    assert set(layers_of(lifted(model))) == {"0.last", "1.last"}


def test_of_another_size(tmp_path):
    pc.save_sketched(pc.sketchify(nn.Sequential(build(Einsum)), 0.5, **routes.OPTIONS), tmp_path)
    other = build(Einsum)
    other.first = drawn(N, D, H + 1)
    with pytest.raises(pc.PantherError, match="of another size"):
        pc.load_sketched(nn.Sequential(other), tmp_path)


def test_lazy_modules_beside():
    class Beside(Mixture):
        def __init__(self):
            super().__init__()
            self.more = nn.LazyLinear(D)

        def forward(self, x):
            return self.more(super().forward(x))

    assert set(layers_of(lifted(nn.Sequential(Beside())))) == {"0.first", "0.last"}


@pytest.mark.parametrize(
    ("equation", "letters"),
    [
        ("ebi,eio->ebo", ("ebi", "e", "i", "o", "ebo", True)),
        ("td, edf -> tef", ("td", "e", "d", "f", "tef", True)),
        ("tef,edf->td", ("tef", "e", "f", "d", "td", False)),
        ("e...i,eio->e...o", None),
        ("ei,eio->eio", None),
        ("bi,eii->be", None),
        ("bi,io->bo", None),
        ("bi,eio", None),
    ],
)
def test_equations(equation, letters):
    found = read_product(equation)
    assert (found and (*(getattr(found, name) for name in found.__slots__),)) == letters


@pytest.mark.parametrize(
    ("equation", "letters"),
    [
        ("bi,io->bo", ("bi", "i", "o", "bo", True)),
        ("...i, oi -> ...o", ("...i", "i", "o", "...o", False)),
        ("bi...d,io->b...od", ("bi...d", "i", "o", "b...od", True)),
        ("b...id,io->bo...d", ("b...id", "i", "o", "bo...d", True)),
        ("ti,eio->eto", None),
        ("bi,ii->bi", None),
        ("bi,io->bio", None),
        ("...i,io->o", None),
        ("bi,io", None),
    ],
)
def test_equations_of_one_matrix(equation, letters):
    found = read_matrix_product(equation)
    assert (found and (*(getattr(found, name) for name in found.__slots__),)) == letters
    if found is None:
        return
    x, matrix = torch.randn([4] * len(found.letters.replace("...", "xy"))), torch.randn(4, 4)
    factor = MatrixFactor([nn.Linear(4, 4, bias=False)], (4, 4), found.multiplies_rows, True)
    factor.layers[0].weight.data = matrix.T if found.multiplies_rows else matrix
    torch.testing.assert_close(torch.einsum(equation, x, factor), torch.einsum(equation, x, matrix))


def test_data_comes_close():
    block = Block(Turned)
    small = pc.sketchify(block, 0.75, data=BATCHES, **routes.OPTIONS)
    with torch.no_grad():
        assert relative(small(BATCHES[0]), block(BATCHES[0])) < 0.1
