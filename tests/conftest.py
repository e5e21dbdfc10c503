"""Under every test: no network, a fixed seed, one thread, Triton interpreted without CUDA."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    # Read when a kernel is defined; torch itself does not import triton.
    os.environ.setdefault("TRITON_INTERPRET", "1")

torch.set_num_threads(1)


@pytest.fixture
def kernels_everywhere(monkeypatch):
    """Let the graph passes believe that a Triton kernel serves every sketched layer, as on a GPU."""
    monkeypatch.setattr("panther_compile.passes.sketched_calls.fuses", lambda layer, rows, dtype: True)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def fresh_dynamo():
    """Nothing compiled before counts, and nothing compiled here remains."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def pytest_collection_modifyitems(items):
    if HAS_CUDA:
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
