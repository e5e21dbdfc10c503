"""One input factor for layers of one input: found on the data, chosen by error, kept by all that follows."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

import panther_compile as pc
from panther_compile.calibration import calibrate
from panther_compile.calibration.shared_input import InputGroups, Stack, cut_shared, fit_shared
from panther_compile.factorization.moments import MomentSums
from panther_compile.kinds.registry import kind_of
from panther_compile.kinds.targets import Target
from panther_compile.passes.merge_shared_inputs import merge_shared_inputs
from panther_compile.planning.timing import time_sites
from panther_compile.planning.trace import SketchTracer
from panther_compile.records import Site, WholeTimes

OPTIONS = {"min_params": 256, "allow_slower": True, "progress": False, "include": "*"}
WIDTH = 48


def target(name, layer):
    return Target(name, "", Site(name, layer, "Linear"), layer, kind_of(layer).view(layer))


class Odd(nn.Module):
    """Three layers of one input, with names that say nothing; `apart` gives each a tensor of its own."""

    def __init__(self, *, apart=False, together=True, noise=0.01):
        super().__init__()
        torch.manual_seed(3)
        self.zebra, self.lamp, self.tuesday = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.end = nn.Linear(WIDTH, 8)
        self.apart = apart
        with torch.no_grad():
            basis = torch.linalg.qr(torch.randn(WIDTH, WIDTH))[0]
            for place, layer in enumerate((self.zebra, self.lamp, self.tuesday)):
                # Rows in one space of 16 dimensions, or in three that are orthogonal.
                rows = basis[:, :16] if together else basis[:, 16 * place : 16 * place + 16]
                layer.weight.copy_(torch.randn(WIDTH, 16) @ rows.T + noise * torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        a, b, c = (x + 0, x + 0, x + 0) if self.apart else (x, x, x)
        return self.end(torch.tanh(self.zebra(a)) + torch.sin(self.lamp(b)) + torch.cos(self.tuesday(c)))


NAMES = ("zebra", "lamp", "tuesday")


def batches(count=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(64, WIDTH, generator=generator) for _ in range(count)]


def shared_of(model):
    """Who shares, as the plan says."""
    return {line.choice.sharing for line in vars(model)["_panther_sketch"].plan.sketched} - {()}


@pytest.fixture(scope="module")
def sketch():
    """The sketch of an Odd, which is not changed."""
    return sketched().eval()


@pytest.fixture
def small(sketch):
    """Another copy for each test."""
    return copy.deepcopy(sketch)


def sketched(model=None, ratio=0.5, **options):
    return pc.sketchify(Odd() if model is None else model, ratio, data=batches(), **OPTIONS | options)


# ----------------------------------------------------------------------------------------- what is found


def test_layers_of_one_tensor_are_found_whatever_their_names(small):
    assert shared_of(small) == {NAMES}
    assert small.zebra.down is small.lamp.down is small.tuesday.down
    assert len({id(layer.up.weight) for layer in (small.zebra, small.lamp, small.tuesday)}) == 3


def test_layers_of_equal_but_different_tensors_are_not():
    assert shared_of(sketched(Odd(apart=True))) == set()


@pytest.mark.parametrize("when", ["in one batch only", "twice"])
def test_one_input_in_every_batch_and_once_in_each(when):
    targets = {name: target(name, layer) for name, layer in (("a", nn.Linear(4, 4)), ("b", nn.Linear(4, 4)))}
    groups = InputGroups()
    x = torch.zeros(2, 4)
    for batch in range(2):
        other = torch.zeros(2, 4) if when == "in one batch only" and batch else x
        groups.see(batch, "a", x)
        groups.see(batch, "b", other)
        if when == "twice":
            groups.see(batch, "b", other)
    assert list(groups.found(targets)) == []


def test_layers_that_differ_in_a_bias_do_not_share():
    model = Odd()
    model.lamp = nn.Linear(WIDTH, WIDTH, bias=False)
    assert all("lamp" not in names for names in shared_of(sketched(model)))


# ------------------------------------------------------------------------------------ what is chosen


def test_apart_where_the_row_spaces_are_orthogonal():
    assert shared_of(sketched(Odd(together=False))) == set()


def test_equal_stored_numbers(small, monkeypatch):
    monkeypatch.setattr(calibrate, "_share", lambda studied, plan, config: plan)
    apart = sketched()
    budgets = [
        sum(line.stored_numbers for line in vars(model)["_panther_sketch"].plan.layers if line.name in NAMES)
        for model in (small, apart)
    ]
    step = 3 * WIDTH + WIDTH  # what one more rank may cost
    assert budgets[1] - step <= budgets[0] <= budgets[1]
    assert small.zebra.rank > max(apart.zebra.rank, apart.lamp.rank, apart.tuesday.rank)
    layers = [small.zebra, small.lamp, small.tuesday]
    real = {id(p): p.numel() for layer in layers for p in layer.parameters()}
    assert sum(real.values()) == budgets[0]
    with torch.no_grad():
        wanted = Odd()(x := batches(1, seed=9)[0])
        assert (small(x) - wanted).norm() < 0.8 * (apart(x) - wanted).norm()


def test_report_counts_the_factor_once_and_says_with_whom_it_is_shared(small):
    report = pc.sketch_report(small)
    rows = {row.name: row for row in report.rows}
    assert rows["zebra"].shared == "input factor shared with lamp, tuesday"
    assert "input factor shared with zebra, lamp" in str(report)
    whole = sum(line.dense_numbers for line in report.plan.whole)
    assert report.replaced_stored_numbers == whole + sum(row.stored_numbers for row in report.sketched)
    assert report.achieved_ratio <= 0.5


def test_latency_keeps_apart_what_would_be_too_slow(monkeypatch):
    asked = []

    def timer(dense, small, x):
        asked.append(small.ranks[0])
        return (2.0 if small.ranks[0] < 18 else 0.5), 1.0

    whole = partial(time_sites, timer=timer, model_timer=lambda *_: WholeTimes((2.0,), (1.0,)))
    monkeypatch.setattr("panther_compile.sketching.time_sites", whole)
    monkeypatch.setattr("panther_compile.factorization.cost.WORTHWHILE", 0.0)
    small = sketched(objective="latency", allow_slower=False)
    assert max(asked) >= 18
    assert shared_of(small) == set()


# ------------------------------------------------------------------------------------------- the fit


@pytest.mark.parametrize("biases", [True, False])
def test_shared_fit_is_the_best_of_the_stack(biases):
    """Against numpy's way: whiten the inputs, stack, cut the SVD, in float64."""
    torch.manual_seed(1)
    layers = [nn.Linear(24, outputs, bias=biases).double() for outputs in (20, 12)]
    targets = [
        Target(str(i), "", Site(str(i), one, "Linear"), one, kind_of(one).view(one))
        for i, one in enumerate(layers)
    ]
    metrics = []
    for outputs in (20, 12):
        g = torch.randn(2 * outputs, outputs, dtype=torch.float64)
        metrics.append(g.T @ g / outputs + torch.eye(outputs))
    x = torch.randn(4000, 24, dtype=torch.float64) @ torch.randn(24, 24, dtype=torch.float64) + 1.0
    z = x + 0.1 * torch.randn_like(x)
    sums = MomentSums(24, x.device)
    sums.add(x, z)
    moments = sums.moments(centred=biases)
    rank = 7
    found = fit_shared(
        targets, Stack.of([one.weight for one in layers], metrics), moments, rank, torch.float64
    )
    assert torch.equal(found[0].right, found[1].right)
    assert found[0].start == found[1].start

    roots = [torch.linalg.cholesky(metric) for metric in metrics]
    mean = (x.mean(0), z.mean(0)) if biases else (torch.zeros(24), torch.zeros(24))
    xc, zc = x - mean[0], z - mean[1]
    wanted = torch.cat(
        [xc @ one.weight.T @ root for one, root in zip(layers, roots, strict=True)], 1
    ).detach()
    fitted = zc @ torch.linalg.lstsq(zc, wanted).solution
    best = torch.linalg.svdvals(fitted)[rank:].square().sum() + (wanted - fitted).square().sum()
    lost = 0.0
    for one, root, part in zip(layers, roots, found, strict=True):
        layer = pc.SketchedLinear(24, one.out_features, rank, form="pivoted", start=part.start).double()
        with torch.no_grad():
            layer.down.weight.copy_(part.right)
            layer.up.weight.copy_(part.left)
            layer.up.bias.copy_(torch.zeros(one.out_features) if part.bias is None else part.bias)
            error = (one(x) - layer(z)) @ root
        lost += float(error.square().sum())
    assert float(best) * 0.999 < lost < 1.02 * float(best)


def test_what_no_batch_reaches_is_cut_with_one_factor():
    model = Odd()
    layers = [model.zebra, model.lamp]
    targets = [
        Target(str(i), "", Site(str(i), one, "Linear"), one, kind_of(one).view(one))
        for i, one in enumerate(layers)
    ]
    stack = torch.cat([one.weight.detach() for one in layers])
    u, s, vh = torch.linalg.svd(stack, full_matrices=False)
    found = cut_shared(targets, u * s, vh, torch.ones(WIDTH), 16)
    assert found[0].right is found[1].right
    for one, part in zip(layers, found, strict=True):
        layer = pc.SketchedLinear(WIDTH, WIDTH, 16, form="pivoted", start=part.start)
        with torch.no_grad():
            layer.down.weight.copy_(part.right)
            layer.up.weight.copy_(part.left)
            layer.up.bias.copy_(part.bias)
            x = torch.randn(64, WIDTH) + 1.0
            assert (layer(x) - one(x)).norm() < 0.05 * one(x).norm()


# ------------------------------------------------------------------------------- what keeps the tie


def is_tied(model):
    layers = [model.zebra, model.lamp, model.tuesday]
    return len({id(layer.down.weight) for layer in layers}) == 1


def test_state_dict_checkpoint_and_deepcopy_keep_the_tie(sketch, small, tmp_path):
    x = batches(1)[0]
    pc.save_sketched(small, tmp_path)
    loaded = pc.load_sketched(Odd(), tmp_path)
    copied = copy.deepcopy(small)
    with torch.no_grad():
        for other in (loaded, copied):
            assert is_tied(other)
            assert torch.equal(other(x), small(x))
    assert str(pc.sketch_report(loaded)) == str(pc.sketch_report(small))
    again = copy.deepcopy(sketch)
    again.load_state_dict(small.state_dict())
    assert is_tied(again)
    assert sum(p.numel() for p in small.parameters()) == sum(p.numel() for p in loaded.parameters())
    dense = pc.densify(small)
    with torch.no_grad():
        torch.testing.assert_close(dense(x), small(x), rtol=1e-4, atol=1e-4)


def test_inplace_and_resume_give_the_same(small, tmp_path):
    model = Odd()
    assert sketched(model, inplace=True) is model
    first = pc.sketchify(Odd(), 0.5, data=batches(), resume=tmp_path / "work", **OPTIONS)
    files = sorted((tmp_path / "work").rglob("*.safetensors"))
    lost = next(file for file in files if file.parent.name.startswith("layers-"))
    lost.unlink()  # cut short between the layers of a group, as it may be
    second = pc.sketchify(Odd(), 0.5, data=batches(), resume=tmp_path / "work", **OPTIONS)
    for other in (model, first, second):
        assert is_tied(other)
        for a, b in zip(small.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a, b)


def test_heal_trains_the_factor_once(small):
    dense = Odd()
    with torch.no_grad():
        small.zebra.down.weight.add_(0.3 * torch.randn_like(small.zebra.down.weight))
    before = small.zebra.down.weight.detach().clone()
    healed = pc.heal(small, teacher=dense, data=batches(), steps=40, lr=0.02, progress=False)
    assert is_tied(healed)
    assert not torch.equal(healed.zebra.down.weight, before)
    x = batches(1, seed=9)[0]
    with torch.no_grad():
        assert (healed(x) - dense(x)).norm() < (small(x) - dense(x)).norm()
    small.zero_grad()
    (small.zebra(x).sum() + small.lamp(x).sum()).backward()
    whole = small.zebra.down.weight.grad.clone()
    parts = []
    for layer in (small.zebra, small.lamp):
        small.zero_grad()
        layer(x).sum().backward()
        parts.append(small.zebra.down.weight.grad.clone())
    torch.testing.assert_close(whole, parts[0] + parts[1])


# --------------------------------------------------------------------------------------- execution


def test_merged_graph_computes_the_shared_product_once(small):
    graph = torch.fx.GraphModule(small, SketchTracer().trace(small))
    x = batches(1)[0]
    with torch.no_grad():
        wanted = small(x)
        result = merge_shared_inputs(graph)
        result.graph_module.recompile()
        assert result.changed == 3
        torch.testing.assert_close(result.graph_module(x), wanted)
    called = [str(node.target) for node in graph.graph.nodes if node.op == "call_module"]
    assert sum(name.endswith("down") for name in called) == 1
    assert graph.get_submodule("zebra.down") is small.zebra.down  # no copy of it was made


def test_backend_gives_what_eager_gives(small):
    x = batches(1)[0]
    with torch.no_grad():
        compiled = torch.compile(small, backend="panther", options={"inner": "eager"})
        torch.testing.assert_close(compiled(x), small(x))


def test_onnx_stores_and_computes_the_factor_once(small, tmp_path):
    onnx = pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    x = batches(1)[0]
    pc.export_onnx(small, (x,), tmp_path / "small.onnx")
    graph = onnx.load(tmp_path / "small.onnx").graph
    factor = list(small.zebra.down.weight.shape)
    assert [list(one.dims) for one in graph.initializer].count(factor) == 1
    products = sum(node.op_type in ("Gemm", "MatMul") for node in graph.node)
    last = 2 - len(pc.sketch_report(small).plan.whole)  # a pair, or the layer as it was
    assert products == 1 + 3 + last  # the factor, three `up`
    session = runtime.InferenceSession(tmp_path / "small.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(found), small(x))


def test_attention_shares_among_its_projections(tmp_path):
    torch.manual_seed(0)

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
            with torch.no_grad():
                basis = torch.linalg.qr(torch.randn(WIDTH, WIDTH))[0][:, :14]
                self.mix.in_proj_weight.copy_(torch.randn(3 * WIDTH, 14) @ basis.T / 4)

        def forward(self, x):
            return self.mix(x, x, x, need_weights=False)[0]

    model = Mixed().eval()
    data = [torch.randn(4, 16, WIDTH) for _ in range(5)]
    small = pc.sketchify(model, 0.35, data=data, narrow=False, **OPTIONS)
    assert shared_of(small) == {("mix.q_proj", "mix.k_proj", "mix.v_proj")}
    assert small.mix.q_proj.down.weight is small.mix.v_proj.down.weight
    assert pc.sketch_report(small).achieved_ratio <= 0.35
    pc.save_sketched(small, tmp_path)
    loaded = pc.load_sketched(model, tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded(data[0]), small(data[0]))
    assert loaded.mix.q_proj.down.weight is loaded.mix.v_proj.down.weight
