"""What the tests of this folder sketch with, and models that lose nothing by it."""

import torch
from torch import nn

import panther_compile as pc

OPTIONS = {"progress": False, "min_params": 0, "allow_slower": True}


def sketch(model, ratio=0.5, **options):
    return pc.sketchify(model, ratio, **OPTIONS, **options)


def reasons(model, **options):
    plan = pc.plan_sketch(model, 0.5, **OPTIONS, **options)
    return {line.name: line.reason for line in plan.layers if line.choice is None}


def mlp(width=48, depth=2):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


def low_rank_(module, rank=3):
    """Make every weight of rank 3, so that a sketch of it is as good as exact."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                flat = parameter.flatten(1)
                left, right = torch.randn(len(flat), rank), torch.randn(rank, flat.shape[1])
                flat.copy_((left @ right) / (rank * flat.shape[1]) ** 0.5)
    return module


def assert_close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-4)
