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
from panther_compile.models.natural import natural_images
from panther_compile.models.sounds import natural_sounds

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


class MakesTensors(nn.Module):
    """Its forward makes tensors, which are what the caller's defaults say."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))

    def forward(self, x):
        return self.layers(x + torch.ones(32))


def test_a_model_whose_forward_makes_tensors_of_the_default_dtype():
    torch.set_default_dtype(torch.bfloat16)
    try:
        dense, batches = MakesTensors().eval(), torch.randn(2, 4000, 32).unbind()
        small = pc.sketchify(dense, 0.5, data=batches, **OPTIONS)
        found = pc.sketchify(dense, 0.5, data=lambda given: [given(torch.randn(9, 32))], **OPTIONS)
        healed = pc.heal(small, teacher=dense, data=batches, steps=1)
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    dtypes = {one.dtype for each in (small, found, healed) for one in each.parameters()}
    assert dtypes == {torch.bfloat16}


@pytest.mark.parametrize(
    "make", [lambda drawn: natural_sounds((2, 64), drawn), lambda drawn: natural_images(3, 3, 16, drawn)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_changes_no_made_up_input(make, dtype):
    wanted = make(torch.Generator().manual_seed(0))
    torch.set_default_dtype(dtype)
    try:
        found = make(torch.Generator().manual_seed(0))
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.dtype == torch.float32
    assert torch.equal(found, wanted)


def test_the_default_device_changes_no_weight():
    wanted = pc.sketchify(model(), 0.5, data=data(), progress=False, **OPTIONS)
    dense, batches = model(), data()
    with torch.device("meta"):
        plan = pc.plan_sketch(dense, 0.5, **OPTIONS)
        found = pc.sketchify(dense, 0.5, data=batches, progress=False, **OPTIONS)
    assert plan.layers
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
