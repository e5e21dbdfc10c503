"""How close a compiled model is, and of how many graphs."""

from torch._dynamo.utils import counters
from zoo import tensors


def close(found, wanted, tolerance=1e-4):
    found, wanted = tensors(found), tensors(wanted)
    assert len(found) == len(wanted) > 0
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape
        assert (a - b).norm() <= tolerance * b.norm() + 1e-6


def graphs():
    return counters["stats"]["unique_graphs"]
