"""Under every test: no network, a fixed seed, one thread, Triton interpreted without CUDA."""

import copy
import functools
import gc
import importlib.util
import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
# Of every process that a test starts: threads that wait for each other take the time of the other worker.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    # Read when a kernel is defined; torch itself does not import triton.
    os.environ.setdefault("TRITON_INTERPRET", "1")

torch.set_num_threads(1)
# What is imported and collected stays: a search for garbage among it takes a sixth of that time.
gc.disable()


_RANKS = "tests/parallel/"  # start up to eight processes each
# What takes longest begins first, so that no worker is left with it at the end.
_FIRST = (_RANKS, "tests/test_docs.py", "tests/test_onnx_export.py", "tests/test_benchmarks_protocol.py")


@pytest.fixture
def kernels_everywhere(monkeypatch):
    """Let the graph passes believe that a Triton kernel serves every sketched layer, as on a GPU."""
    monkeypatch.setattr("panther_compile.passes.sketched_calls.fuses", lambda layer, rows, dtype: True)


@pytest.fixture
def runtime_alone(monkeypatch):
    """Let ONNX files be fitted as those are that torch cannot run."""
    monkeypatch.setattr("panther_compile.onnx.fit_to_data.module_of", lambda *_: "not asked")


@pytest.fixture(autouse=True)
def _seed():
    if "onnx_models" in sys.modules:  # else the order of the tests would decide what its models are
        sys.modules["onnx_models"].reseed()
    # Without a GPU torch.manual_seed keeps the whole stack of its caller, for when one may be started.
    (torch.manual_seed if HAS_CUDA else torch.default_generator.manual_seed)(0)


@pytest.fixture(autouse=True, scope="module")
def _nothing_old_is_collected():
    """A collection, and Dynamo asks for many, sees what a file made and not a million imported objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _onnx_functions_are_read_once():
    """Spare each torch.onnx.export a second, in which it reads the functions of all operators again."""
    if importlib.util.find_spec("onnxscript") is None:
        yield
        return
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    read = functools.cache(ONNXRegistry.from_torchlib.__func__)

    def from_torchlib(cls, **options):
        registry = copy.copy(read(cls, **options))
        registry.functions = {target: list(found) for target, found in registry.functions.items()}
        return registry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", classmethod(from_torchlib))
        yield


@pytest.fixture
def fresh_dynamo():
    """Nothing compiled before counts, and nothing compiled here remains."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """One worker runs all of a file, what its tests share being made once; and one all that start ranks.

    On a GPU each test goes to any worker: there the kernels of a file compile for minutes.
    """
    if HAS_CUDA:
        return None
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return _RANKS if nodeid.startswith(_RANKS) else super()._split_scope(nodeid)

    return Files(config, log)


def pytest_collection_finish():
    gc.enable()


def pytest_sessionfinish():
    gc.unfreeze()  # else what is left at exit is reported as a leak


def pytest_collection_modifyitems(config, items):
    if hasattr(config, "workerinput"):  # of xdist
        items.sort(key=lambda item: [not item.nodeid.startswith(place) for place in _FIRST])
    if HAS_CUDA:
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
