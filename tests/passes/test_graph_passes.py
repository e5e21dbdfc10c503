"""The runner, and what each graph pass changes and leaves alone."""

import functools
import logging
import operator

import pytest
import torch
import torch.nn.functional as F
from small_graphs import LEADING, PAIR, TRAILING, Model, apply, three, traced
from torch import fx, nn
from torch.fx.passes.shape_prop import ShapeProp

import panther_compile as pc
from panther_compile.errors import ConfigTypeError
from panther_compile.layers import SketchedLinear
from panther_compile.passes.default import CLEAN_UP, NORMALIZE, improve
from panther_compile.passes.drop_dead_code import drop_dead_code
from panther_compile.passes.fold_batchnorm import fold_batchnorm
from panther_compile.passes.lift_functional import lift_functional
from panther_compile.passes.merge_shared_inputs import merge_shared_inputs
from panther_compile.passes.runner import GraphPass, PassResult, run_passes

# -------------------------------------------------------------------------------------------- runner


def test_passes_run_in_order_and_are_logged(caplog):
    order = []

    def note(graph_module, *, word):
        order.append(word)
        return PassResult(graph_module, len(word))

    passes = [GraphPass(functools.partial(note, word=word), exact=word == "a") for word in ("a", "bc")]
    assert [one.name for one in passes] == ["note", "note"]
    with caplog.at_level(logging.DEBUG, "panther_compile.passes"):
        assert run_passes(traced(lambda m, x: x + 1), passes).changed == 3
    assert order == ["a", "bc"]
    assert "pass 1, note (exact): 1 changed in" in caplog.text
    assert "pass 2, note (approximate): 2 changed in" in caplog.text


def test_debug_log_shows_what_became_of_the_operations(caplog):
    graph_module = traced(lambda m, x: m.norm(m.conv(x)), conv=nn.Conv2d(3, 4, 3), norm=nn.BatchNorm2d(4))
    with caplog.at_level(logging.DEBUG, "panther_compile.passes"):
        run_passes(graph_module, [GraphPass(fold_batchnorm, exact=True)])
    assert "BatchNorm2d: 1 -> 0" in caplog.text


@pytest.mark.parametrize("returned", [None, 3, PassResult(None, 1)], ids=str)
def test_a_pass_that_returns_no_graph_is_named(returned):
    def forgetful(graph_module):
        return returned

    with pytest.raises(ConfigTypeError, match=r"pass forgetful returned a .*, wanted a PassResult"):
        run_passes(traced(lambda m, x: x + 1), [GraphPass(forgetful, exact=True)])


def test_a_broken_graph_is_noticed():
    def breaks(graph_module):
        (node,) = (node for node in graph_module.graph.nodes if node.op == "call_function")
        node.op, node.target = "call_module", "nowhere"
        return PassResult(graph_module, 1)

    with pytest.raises(RuntimeError, match="nowhere"):
        run_passes(traced(lambda m, x: operator.add(x, 1)), [GraphPass(breaks, exact=True)])


def test_the_list_sketches_between_folding_and_merging():
    sketch = GraphPass(lambda graph_module: PassResult(graph_module, 0), exact=False)
    own = GraphPass(drop_dead_code, exact=True)
    passes = improve(sketch=sketch, extra=[own])
    assert passes.index(sketch) + 1 == passes.index(own)
    assert passes[0].name == "fold_batchnorm"
    assert passes[-1].name == "merge_shared_inputs"
    assert [one.exact for one in passes].count(False) == 1
    assert all(one.exact for one in (*NORMALIZE, *CLEAN_UP))


# ------------------------------------------------------------------------------------ fold_batchnorm


def norm(channels, **options):
    layer = nn.BatchNorm2d(channels, **options)
    with torch.no_grad():
        layer.running_mean.normal_()
        layer.running_var.uniform_(0.3, 2.0)
        if layer.affine:
            layer.weight.normal_()
            layer.bias.normal_()
    return layer.eval()


IMAGE = (2, 4, 9, 8)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fold_batchnorm(bias, affine, groups, dtype):
    conv = nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=groups, bias=bias, padding_mode="reflect")
    graph_module = traced(lambda m, x: m.norm(m.conv(x)), conv=conv, norm=norm(6, affine=affine)).to(dtype)
    folded = apply(fold_batchnorm, graph_module, torch.randn(IMAGE, dtype=dtype), 1)
    assert type(folded.conv) is nn.Conv2d
    assert folded.conv.weight is not conv.weight


def test_fold_batchnorm_of_an_exported_graph():
    model = Model(lambda m, x: m.norm(m.conv(x)), conv=nn.Conv2d(4, 6, 3), norm=norm(6)).eval()
    x = torch.randn(IMAGE)
    module = torch.export.export(model, (x,)).module()
    lift_functional(module)
    folded = apply(fold_batchnorm, module, x, 1)
    assert "batch_norm" not in str(folded.graph)


@pytest.mark.parametrize(
    "case", ["trains", "read twice", "called twice", "hooked", "no statistics", "shared", "weight is read"]
)
def test_fold_batchnorm_leaves_alone(case):
    conv, layer = nn.Conv2d(4, 4, 3, padding=1), norm(4)
    forward = {
        "read twice": lambda m, x: (lambda y: m.norm(y) + y)(m.conv(x)),
        "called twice": lambda m, x: m.conv(m.norm(m.conv(x))),
        "shared": lambda m, x: m.norm(m.conv(x)) + m.other(x),
        "weight is read": lambda m, x: m.norm(m.conv(x)) * m.conv.weight.norm(),
    }.get(case, lambda m, x: m.norm(m.conv(x)))
    if case == "hooked":
        conv.register_forward_hook(lambda module, args, out: 2 * out)
    if case == "no statistics":
        layer = nn.BatchNorm2d(4, track_running_stats=False)
    others = {"other": conv} if case == "shared" else {}
    graph_module = traced(forward, conv=conv, norm=layer, **others)
    if case == "trains":
        graph_module.train()
    apply(fold_batchnorm, graph_module, torch.randn(IMAGE), 0)


def test_fold_batchnorm_keeps_a_norm_that_is_read():
    layers = {"conv": nn.Conv2d(4, 4, 3, padding=1), "norm": norm(4)}
    graph_module = traced(lambda m, x: m.norm(m.conv(x)) * m.norm.weight.norm(), **layers)
    apply(fold_batchnorm, graph_module, torch.randn(IMAGE), 1)


def test_fold_batchnorm_before_sketchify():
    model = nn.Sequential(nn.Conv2d(4, 32, 3, padding=1), norm(32), nn.ReLU(), nn.Conv2d(32, 32, 3), norm(32))
    folded = fold_batchnorm(fx.symbolic_trace(model.eval())).graph_module
    small = pc.sketchify(folded, 0.5, min_params=0, allow_slower=True, progress=False)
    kinds = [type(module).__name__ for module in small.modules()]
    assert kinds.count("SketchedConv2d") == 2
    assert "BatchNorm2d" not in kinds


# ------------------------------------------------------------------------------- merge_shared_inputs


MERGE = functools.partial(merge_shared_inputs, device_type="cpu")


def gated(m, x):
    return m.q(x) * torch.sigmoid(m.k(x)) + m.v(x)


@pytest.mark.parametrize("bias", [False, True])
def test_merge_dense_layers(bias):
    layers = {name: nn.Linear(32, size, bias=bias) for name, size in zip("qkv", (16, 16, 1), strict=True)}
    merged = apply(MERGE, traced(gated, **layers), torch.randn(2, 3, 32), 3)
    assert merged.q_merged.weight.shape == (33, 32)


@pytest.mark.parametrize("form", [LEADING, TRAILING, PAIR])
def test_merge_sketched_layers(form, monkeypatch):
    monkeypatch.setattr("panther_compile.passes.merge_shared_inputs._is_worthwhile", lambda *_: True)
    merged = apply(MERGE, traced(gated, **three([form] * 3)), torch.randn(2, 3, 32), 3)
    assert merged.q_merged.weight.shape == (24, 32 if form == PAIR else 32 - 6)


def test_merge_goes_by_kind(monkeypatch):
    monkeypatch.setattr("panther_compile.passes.merge_shared_inputs._is_worthwhile", lambda *_: True)
    graph_module = traced(gated, **three([PAIR, LEADING, PAIR]))
    merged = apply(MERGE, graph_module, torch.randn(3, 32), 2)
    assert merged.q_merged.weight.shape == (18, 32)


def test_merge_only_where_it_is_predicted_to_pay():
    # Equal ranks share all of the product; ranks far apart would fill most of it with zeros.
    for ranks, count in (((32, 32), 2), ((32, 800), 0)):
        a, b = (SketchedLinear(1024, 1024, rank, form="pivoted") for rank in ranks)
        assert MERGE(traced(lambda m, x: m.a(x) + m.b(x), a=a, b=b)).changed == count


def test_merge_counts_the_rows_that_are_known():
    # At few rows the launch that is saved counts for more than the zeros.
    ranks = {"q": 32, "k": 64, "v": 200}
    layers = {name: SketchedLinear(1024, 1024, rank, form="pivoted") for name, rank in ranks.items()}
    for rows, count in ((1, 3), (4096, 0)):
        graph_module = traced(gated, **layers)
        ShapeProp(graph_module).propagate(torch.randn(rows, 1024))
        assert MERGE(graph_module).changed == count


def test_on_other_devices_only_layers_that_share_a_factor_are_merged():
    apply(merge_shared_inputs, traced(gated, **three([PAIR] * 3)), torch.randn(2, 3, 32), 0)
    layers = three([LEADING] * 3, ranks=(8, 8, 8))
    layers["v"].down = layers["k"].down = layers["q"].down
    merged = apply(merge_shared_inputs, traced(gated, **layers), torch.randn(2, 3, 32), 3)
    assert len([node for node in merged.graph.nodes if node.target == "q.down"]) == 1


@pytest.mark.parametrize("form", [LEADING, TRAILING, PAIR])
def test_layers_that_share_a_factor_are_merged_beside_one_that_does_not(form):
    layers = three([form] * 3, ranks=(8, 8, 8))
    layers["v"].down = layers["q"].down
    merged = apply(merge_shared_inputs, traced(gated, **layers), torch.randn(2, 3, 32), 2)
    assert [node.target for node in merged.graph.nodes if node.op == "call_module"].count("q.down") == 1
    assert not hasattr(merged, "q_merged")


@pytest.mark.parametrize("case", ["training", "written between", "other input", "hooked", "called again"])
def test_merge_leaves_alone(case):
    def forward(m, x):
        first = m.q(x)
        if case == "written between":
            x.mul_(2.0)
        if case == "called again":
            first = first + m.k(x + 1)
        return first + m.k(x + 1 if case == "other input" else x)

    q, k = nn.Linear(32, 16), nn.Linear(32, 16)
    if case == "hooked":
        k.register_forward_hook(lambda module, args, out: 2 * out)
    graph_module = traced(forward, q=q, k=k)
    if case == "training":
        graph_module.train()
    apply(MERGE, graph_module, torch.randn(3, 32), 0)


# ------------------------------------------------------------------------------------ drop_dead_code


def test_drop_dead_code_keeps_what_writes():
    def forward(m, x):
        m.spare(x)
        F.relu(x)
        x.add_(1.0)
        F.relu(x, inplace=True)
        torch.sigmoid(x)
        return m.fc(x)

    graph_module = traced(forward, fc=nn.Linear(6, 4), spare=nn.Linear(6, 4))
    clean = apply(drop_dead_code, graph_module, torch.randn(3, 6), 3 + 2)
    assert {str(node.target) for node in clean.graph.nodes} >= {"add_", "fc"}
    assert list(clean.state_dict()) == ["fc.weight", "fc.bias"]


def test_drop_dead_code_keeps_the_users_own_module():
    class Own(nn.Module):
        def forward(self, x):
            return x.add_(1.0)

    class Leafy(fx.Tracer):
        def is_leaf_module(self, m, module_qualified_name):
            return not isinstance(m, Model)

    def forward(m, x):
        m.own(x)
        return m.fc(x)

    model = Model(forward, own=Own(), fc=nn.Linear(6, 4))
    graph_module = fx.GraphModule(model, Leafy().trace(model)).eval()
    apply(drop_dead_code, graph_module, torch.randn(3, 6), 0)
