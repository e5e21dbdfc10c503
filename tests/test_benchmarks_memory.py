"""The predicted memory of a step beside what torch's allocator gives out."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def memory():
    spec = importlib.util.spec_from_file_location("benchmark_of_memory", ROOT / "benchmarks" / "memory.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", [pytest.param("gpt2", marks=pytest.mark.slow), "resnet"])
def test_prediction_is_within_a_twentieth(memory, name):
    found = memory.compare(name)
    assert found["predicted"] == pytest.approx(found["allocator"], rel=0.05)
    assert found["predicted"] == pytest.approx(found["tracker"], rel=0.05)
    assert found["states"] < found["predicted"]
