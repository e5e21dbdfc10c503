"""SketchedLinear layers of each form, and what they should compute."""

import torch
from torch import nn

from panther_compile.layers.linear import SketchedLinear

LEADING = [(), (1,), (5,), (2, 3), (2, 1, 3, 2), (0,), (2, 0)]
FORMS = ["pair", "leading", "trailing"]
# One rounding of the input, one of each factor, sums of 24: a few units of the last place.
EPS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
IN, OUT, RANK = 24, 16, 6


def factors(form, in_features=IN, out_features=OUT, rank=RANK):
    """Well-conditioned float64 factors that `from_factors` stores in the form asked for."""
    left = torch.randn(out_features, rank, dtype=torch.float64)
    right = 0.3 * torch.randn(rank, in_features, dtype=torch.float64)
    start = in_features - rank if form == "trailing" else 0
    right[:, start : start + rank] += torch.eye(rank, dtype=torch.float64)
    if form == "trailing":
        right[:, 1] = right[:, 0] = 0
    return left, right


def build(form="leading", *, bias=True, dtype=torch.float64, **sizes):
    left, right = factors(form, **sizes)
    layer = SketchedLinear.from_factors(
        left,
        right,
        torch.randn(left.shape[0], dtype=torch.float64) if bias else None,
        form="pair" if form == "pair" else "pivoted",
        dtype=dtype,
    )
    spec = layer.sketch_spec()
    kind = "leading" if spec["start"] == 0 else "trailing"
    assert ("pair" if spec["form"] == "pair" else kind) == form
    return layer


def dense_weight(layer):
    left, right = (factor.detach().double() for factor in layer.factors())
    return left @ right


def reference(layer, x):
    bias = None if layer.bias is None else layer.bias.detach().double()
    return nn.functional.linear(x.double(), dense_weight(layer), bias)
