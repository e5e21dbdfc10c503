"""What a call leaves behind in the process and takes from its settings, and extras that are not there."""

import subprocess
import sys
import threading
import warnings

import pytest
import sympy  # noqa: F401  torch imports it, and it sets a filter of its own
import torch
from torch import nn

import panther_compile as pc
from panther_compile.errors import LayerError

OPTIONS = {"min_params": 0, "allow_slower": True}


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 8)).eval()


def data():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(32, 32, generator=generator, dtype=torch.float32) for _ in range(4)]


def test_no_thread_and_no_filter_stay_behind():
    filters, threads = list(warnings.filters), set(threading.enumerate())
    small = pc.sketchify(model(), 0.5, data=data(), progress=True, **OPTIONS)
    pc.heal(small, teacher=model(), data=data(), steps=2)
    assert set(threading.enumerate()) == threads
    assert warnings.filters == filters


def test_the_default_dtype_changes_no_weight():
    wanted = pc.sketchify(model(), 0.5, data=data(), progress=False, **OPTIONS)
    dense = model()
    torch.set_default_dtype(torch.float64)
    try:
        found = pc.sketchify(dense, 0.5, data=data(), progress=False, **OPTIONS)
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(found.parameters(), wanted.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "layer",
    [
        pc.SketchedLinear(16, 16, 3),
        pc.SketchedConv2d(8, 8, 3, 2),
        pc.SketchedEmbedding(10, 8, 2),
        pc.SketchedMultiheadAttention(16, 2),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_jit_script_says_why_not(layer):
    for module in (layer, nn.Sequential(layer)):
        with pytest.raises(LayerError, match=rf"torch\.jit\.script cannot read {type(layer).__name__}: use"):
            torch.jit.script(module)


def test_jit_trace_works():
    small = pc.sketchify(model(), 0.5, progress=False, **OPTIONS)
    x = data()[0]
    torch.testing.assert_close(torch.jit.trace(small, x)(x), small(x))


@pytest.mark.parametrize(
    ("missing", "call", "extra"),
    [
        ("onnxruntime", "pc.sketch_onnx", "onnx"),
        ("onnx_ir", "pc.export_onnx", "onnx"),
        ("matplotlib", "new_figure(1, 1)", "plot"),
    ],
)
def test_an_extra_that_is_not_installed_is_named(missing, call, extra):
    script = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "import panther_compile as pc\n"
        "from panther_compile.reporting.plots import new_figure\n"
        "from panther_compile.errors import MissingExtraError\n"
        f"try: {call}\n"
        "except MissingExtraError as error: assert isinstance(error, ImportError); print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f'pip install "panther-compile[{extra}]"' in done.stdout
