"""nn.MultiheadAttention as a kind: units, modes, and flags that its parameters keep."""

import itertools

import pytest
import torch
from torch import nn

import panther_compile as pc
from panther_compile.config import SketchConfig
from panther_compile.kinds.attention import AttentionKind
from panther_compile.kinds.parts import parts_of, units_of
from panther_compile.layers.attention import PROJECTIONS, SketchedMultiheadAttention
from panther_compile.records import Site

KIND, CONFIG = AttentionKind(), SketchConfig(progress=False)
OPTIONS = {"min_params": 0, "include": "*", "progress": False, "allow_slower": True}
E, H = 32, 4
PARTS = ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias", "bias_k", "bias_v")


def attention(**options):
    return nn.MultiheadAttention(E, H, batch_first=True, **options)


def test_units_are_the_projections():
    site = Site("block.attn", attention(kdim=20), "MultiheadAttention")
    units = units_of(parts_of(site, KIND), energies=False)
    assert [unit.name for unit in units] == [f"block.attn.{name}" for name in PROJECTIONS]
    assert [unit.shape for unit in units] == [(E, E), (E, 20), (E, E), (E, E)]
    assert [unit.bias_numbers for unit in units] == [E] * 4


@pytest.mark.parametrize("flags", list(itertools.product([True, False], repeat=4)))
@pytest.mark.parametrize("inplace", [False, True])
def test_each_parameter_keeps_its_requires_grad_there_and_back(flags, inplace):
    model = nn.Sequential(attention(add_bias_kv=True))
    wanted = dict(zip(PARTS, (*flags, flags[1], flags[0]), strict=True))
    for name, trainable in wanted.items():
        model.get_parameter(f"0.{name}").requires_grad_(trainable)
    small = pc.sketchify(model, 0.5, inplace=inplace, **OPTIONS)
    layer = small[0]
    assert isinstance(layer, SketchedMultiheadAttention)
    for projection in ("q_proj", "k_proj", "v_proj"):
        factors = getattr(layer, projection)
        assert isinstance(factors, pc.SketchedLinear)
        assert factors.down.weight.requires_grad is factors.up.weight.requires_grad is flags[0]
        assert factors.bias.requires_grad is flags[1]
    assert layer.out_proj.up.weight.requires_grad is flags[2]
    assert layer.out_proj.bias.requires_grad is flags[3]
    dense = pc.densify(small)
    assert {name: dense[0].get_parameter(name).requires_grad for name in PARTS} == wanted


@pytest.mark.parametrize("frozen", ["in_proj_weight", "in_proj_bias"])
def test_from_dense_keeps_the_flags_too(frozen):
    dense = attention()
    dense.get_parameter(frozen).requires_grad_(False)
    layer = SketchedMultiheadAttention.from_dense(dense, ratio=0.5)
    assert layer.q_proj.bias.requires_grad is (frozen != "in_proj_bias")
    assert layer.in_proj_bias.requires_grad is (frozen != "in_proj_bias")
    again = layer.to_dense()
    assert {n: p.requires_grad for n, p in again.named_parameters()} == {
        n: p.requires_grad for n, p in dense.named_parameters()
    }


def test_projections_that_stay_dense_keep_the_flags():
    model = nn.Sequential(attention(kdim=1))
    model[0].k_proj_weight.requires_grad_(False)
    small = pc.sketchify(model, 0.5, **OPTIONS)
    assert type(small[0].k_proj) is nn.Linear
    assert not small[0].k_proj.weight.requires_grad
    assert small[0].k_proj.bias.requires_grad
    assert not pc.densify(small)[0].k_proj_weight.requires_grad


def test_outputs_of_the_densified_model():
    model = nn.TransformerEncoderLayer(E, H, 48, dropout=0.0, batch_first=True)
    small = pc.sketchify(model, 0.5, **OPTIONS)
    x = torch.randn(2, 5, E)
    torch.testing.assert_close(pc.densify(small)(x), small(x), rtol=1e-4, atol=1e-5)
