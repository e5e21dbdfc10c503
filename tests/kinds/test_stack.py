"""Modules whose own forward multiplies by matrices of 3-D parameters, through every route."""

import copy

import pytest
import torch
import torch.nn.functional as F
from kinds import routes
from kinds.routes import relative
from torch import nn

import panther_compile as pc
from panther_compile.config import SketchConfig
from panther_compile.kinds.registry import find_kind
from panther_compile.kinds.stack import StackKind
from panther_compile.layers import SketchedLinear, SketchedStack
from panther_compile.layers.stack_product import read_product

KIND = StackKind()
N, D, H = 3, 24, 40  # matrices, features, hidden features


def drawn(*shape):
    return nn.Parameter(torch.randn(shape) * shape[-1] ** -0.5)


class Ensemble(nn.Module):
    """Every member on every row, as of reinforcement learning."""

    def __init__(self):
        super().__init__()
        self.w1, self.w2 = drawn(N, D, H), drawn(N, H, D)
        self.b1, self.b2 = drawn(N, H), drawn(N, 1, D)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

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


CLASSES = [Ensemble, Broadcast, Turned, Loop, Einsum]
ROWS_FIRST = {
    Ensemble: {"w1": True, "w2": True},
    Broadcast: {"first": True, "last": True},
    Turned: {"up_proj": False, "down_proj": False},
    Loop: {"w_in": False, "w_out": True},
    Einsum: {"first": True, "last": False},
}


def build(cls):
    torch.manual_seed(0)
    return cls().eval()


def assembled(module, *, watched=False):
    return KIND.assemble(module, KIND.parts(module), None if watched else SketchConfig())


@pytest.fixture(params=CLASSES, ids=lambda cls: cls.__name__)
def module(request):
    return build(request.param)


def test_what_the_forward_does_is_read(module):
    assert (KIND.matches(module), KIND.why_not(module)) == ("Stack", None)
    layer = assembled(module)
    taken = {name: name in layer._transposed for name in layer._stacks}
    assert taken == ROWS_FIRST[type(module)]
    for name, rows_first in taken.items():
        count, inputs, outputs = layer._stacks[name]
        shape = (count, inputs, outputs) if rows_first else (count, outputs, inputs)
        assert module.get_parameter(name).shape == shape


@pytest.mark.parametrize("watched", [False, True])
def test_dense_parts_compute_what_the_class_does(module, watched):
    layer, x = assembled(module, watched=watched), torch.randn(14, D)
    wanted, found = module(x), layer(x)
    torch.testing.assert_close(found, wanted)
    wanted.square().mean().backward()
    found.square().mean().backward()
    for name in layer._stacks:
        parts = [layer.get_submodule(f"{name.removesuffix('_proj')}_{place}") for place in range(N)]
        stacked = torch.stack([part.weight.grad for part in parts])
        stacked = stacked.mT if name in layer._transposed else stacked
        torch.testing.assert_close(stacked, module.get_parameter(name).grad, rtol=1e-4, atol=1e-6)


def test_factors_compute_what_they_stand_for(module):
    before = copy.deepcopy(module.state_dict())
    small = pc.sketchify(nn.Sequential(module), 0.5, **routes.OPTIONS)
    assert isinstance(small[0], SketchedStack)
    assert any(isinstance(part, SketchedLinear) for part in small[0].children())
    x = torch.randn(14, D)
    dense = pc.densify(small)
    assert type(dense[0]) is type(module)
    assert set(dense[0].state_dict()) == set(module.state_dict())
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


LAYERS = (SketchedStack,)
torch.manual_seed(1)
MIXING = torch.randn(4, D)
BATCHES = [torch.randn(32, 4) @ MIXING + 0.05 * torch.randn(32, D) for _ in range(4)]


@pytest.fixture
def block(module):
    return Block(type(module))


def test_weights_alone_saved_and_skeleton(block, tmp_path):
    small = routes.by_weights(block, BATCHES[0], LAYERS)
    routes.saved_and_loaded(small, Block(type(block.inner)), BATCHES[0], tmp_path / "saved")
    routes.as_skeleton(lambda: Block(type(block.inner)), small)


def test_data_and_healing(block):
    (layer,) = routes.by_data(block, BATCHES, BATCHES[0], LAYERS)
    fitted = vars(pc.sketchify(block, 0.4, data=BATCHES, **routes.OPTIONS))["_panther_sketch"].fitted
    parts = [one for name, one in fitted.items() if name.startswith("inner.")]
    assert parts
    assert all(one.method == "calibrated" for one in parts)
    assert isinstance(layer, SketchedStack)
    routes.healed(block, BATCHES, BATCHES[0])


def test_latency(block):
    routes.by_latency(block, BATCHES[0])


def test_backend(block):
    routes.compiled(block, BATCHES[0], LAYERS)


@pytest.mark.parametrize("cls", [one for one in CLASSES if one is not Loop])
def test_graphs_and_onnx(cls, tmp_path):
    block = Block(cls)
    routes.traced(block, BATCHES[0], LAYERS)
    small = routes.by_weights(block, BATCHES[0], LAYERS)
    program = torch.export.export(small.eval(), (BATCHES[0],))
    torch.testing.assert_close(program.module()(BATCHES[0]), small(BATCHES[0]), rtol=1e-4, atol=1e-5)
    routes.exported(small, BATCHES[0], tmp_path / "small.onnx")


def test_a_router_stays_and_other_linear_layers_are_parts():
    plan = pc.plan_sketch(Block(Loop), 0.5, **routes.OPTIONS)
    names = {line.name for line in plan.layers}
    assert "inner.shared" in names
    assert not any("router" in name for name in names)
    small = pc.sketchify(Block(Loop), 0.5, **routes.OPTIONS)
    assert type(small.inner.router) is nn.Linear
    assert isinstance(small.inner.shared, SketchedLinear)


def test_anything_else_is_asked_of_the_values():
    layer = assembled(build(Turned))
    stack, dense = layer.up_proj, build(Turned).up_proj
    assert (stack.shape, stack.dtype, stack.device, stack.dim(), stack.ndim) == (
        dense.shape,
        dense.dtype,
        dense.device,
        3,
        3,
    )
    assert (stack.size(1), len(stack), stack[1].size(), stack[-1].T.shape) == (H, N, (H, D), (D, H))
    places = torch.tensor([2, 0])
    for found, wanted in (
        (stack[places], dense[places]),
        (stack[:, 1:], dense[:, 1:]),
        (stack.sum(), dense.sum()),
        (stack * 2, dense * 2),
        (stack.double(), dense.double()),
        (stack.to(torch.float64), dense.to(torch.float64)),
        (torch.linalg.vector_norm(stack), torch.linalg.vector_norm(dense)),
        (stack.transpose(0, 1), dense.transpose(0, 1)),
        (torch.bmm(torch.ones(N, 2, H), stack), torch.bmm(torch.ones(N, 2, H), dense)),
        (torch.einsum("ti,eji->tej", torch.ones(2, D), stack), torch.ones(2, D) @ dense.mT.flatten(0, 0)),
    ):
        wanted = wanted.movedim(0, 1) if wanted.shape != found.shape else wanted
        torch.testing.assert_close(found, wanted)
    with pytest.raises(IndexError):
        stack[N]


class Scaled(Turned):
    def forward(self, x):
        return torch.bmm(x.expand(N, -1, -1), (self.up_proj * 2).mT).sum(0) @ self.down_proj.sum(0).T


class BothWays(Turned):
    def forward(self, x):
        return F.linear(F.linear(x, self.up_proj[0]) @ self.up_proj[1], self.down_proj[0].T)


class Above(Turned):
    def forward(self, x):
        return super().forward(x)


class Rank(Turned):
    def __init__(self):
        super().__init__()
        self.ranks = 2

    def forward(self, x):
        return self.ranks * torch.bmm(x.expand(N, -1, -1), self.up_proj.mT).sum(0)


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
        (Above, "multiplies nothing by its 3-D parameter up_proj"),
        (Rank, "reads ranks, which its sketch has of its own"),
        (TwoThings, "weight stands for two things"),
    ],
)
def test_what_cannot_be_read_is_left_alone_with_a_reason(cls, reason):
    module = build(cls)
    if cls is BothWays:
        del module.down_proj
        module.register_parameter("down_proj", None)
    assert KIND.matches(module) == "Stack"
    assert reason in KIND.why_not(module)


def test_linear_layers_beside_what_is_left_alone_are_layers_of_their_own():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.proj = drawn(N, D, D), nn.Linear(D, D)

        def forward(self, x):
            return self.proj(x) + self.table.mean(0).sum(0)

    model = nn.Sequential(Table())
    assert find_kind(model[0]) is None
    small = pc.sketchify(model, 0.5, **routes.OPTIONS)
    assert isinstance(small[0].proj, SketchedLinear)


def test_hooks_and_dense_weights_are_refused():
    model = nn.Sequential(build(Einsum))
    small = pc.sketchify(model, 0.5, **routes.OPTIONS)
    with pytest.raises(pc.PantherError, match="holds the matrices of a dense module"):
        small.load_state_dict(model.state_dict())
    model[0].register_forward_hook(lambda *_: None)
    assert "hooks" in KIND.why_not(model[0])


def test_of_another_size(tmp_path):
    pc.save_sketched(pc.sketchify(nn.Sequential(build(Einsum)), 0.5, **routes.OPTIONS), tmp_path)
    other = build(Einsum)
    other.first = drawn(N + 1, D, H)
    with pytest.raises(pc.PantherError, match="of matrices"):
        pc.load_sketched(nn.Sequential(other), tmp_path)


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


def test_relative_error_by_data_is_small_at_three_quarters():
    block = Block(Turned)
    small = pc.sketchify(block, 0.75, data=BATCHES, **routes.OPTIONS)
    assert relative(small(BATCHES[0]), block(BATCHES[0])) < 0.1
