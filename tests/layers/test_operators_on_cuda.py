"""In eager mode on CUDA the layers call the operators where a kernel serves them.

Without a GPU the input is a CPU tensor that says it is on CUDA. All else is real: the layers decide by it,
the operators choose a kernel by it, and Triton's interpreter runs that kernel, forward and backward.
"""

import contextlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from panther_compile.kernels import dispatch
from panther_compile.kernels.factor_set import Factors
from panther_compile.layers import SketchedConv2d, SketchedLinear, SketchedMultiheadAttention
from panther_compile.ops import has_kernel, linear_dispatch
from panther_compile.ops.attention import has_attention_kernel
from panther_compile.ops.linear_dispatch import fuses

OURS = "panther_compile::"
HOPPER = dispatch.DeviceClass(linear=True, attention=True)
HALF = {"dtype": torch.bfloat16}


class OnCuda(torch.Tensor):
    """A CPU tensor that says it is on CUDA."""

    is_cuda = True


class Recorder(TorchDispatchMode):
    """The names of the operators that are called."""

    def __init__(self):
        super().__init__()
        self.called = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.called.add(func._schema.name)
        return func(*args, **kwargs or {})


@pytest.fixture(autouse=True)
def _device(monkeypatch):
    monkeypatch.setattr(dispatch, "device_class", lambda device: HOPPER)
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())


@pytest.fixture
def mode(monkeypatch):
    return lambda name: monkeypatch.setenv("PANTHER_COMPILE_KERNEL", name)


def called(layer, x, run=None):
    """The operators of this library that a layer calls for an input."""
    with Recorder() as recorder, torch.no_grad():
        (run or layer)(x)
    return {name.removeprefix(OURS) for name in recorder.called if name.startswith(OURS)}


def on_cuda(*shape, **options):
    return torch.randn(*shape, **options).as_subclass(OnCuda)


def linear(form="pivoted", rank=16, **options):
    return SketchedLinear(64, 48, rank, form=form, **options)


@pytest.fixture
def captured(monkeypatch):
    monkeypatch.setattr(dispatch, "is_capturing", lambda: True)


@pytest.mark.parametrize("form", ["pair", "pivoted"])
def test_linear(form, captured):
    layer = linear(form, **HALF)
    assert called(layer, on_cuda(4, 64, **HALF)) == {"sketched_linear"}
    assert called(layer, on_cuda(2, 3, 64, **HALF)) == {"sketched_linear"}
    assert called(layer, torch.randn(4, 64, **HALF)) == set()
    assert called(layer, on_cuda(32, 64, **HALF)) == set()  # two products are the faster ones
    assert called(linear(form, rank=20, **HALF), on_cuda(4, 64, **HALF)) == set()


@pytest.mark.parametrize("rows", [4, 32])
def test_the_environment_decides(rows, mode):
    assert called(linear(), on_cuda(rows, 64)) == set()
    mode("torch")
    assert called(linear(), on_cuda(rows, 64)) == set()
    mode("triton")
    assert called(linear(rank=48), on_cuda(rows, 64)) == {"sketched_linear"}
    assert called(linear(), torch.randn(rows, 64)) == set()
    assert called(linear(dtype=torch.float64), on_cuda(rows, 64, dtype=torch.float64)) == set()


def test_autocast_decides_the_type(captured):
    layer = linear()
    assert called(layer, on_cuda(4, 64)) == set()
    with torch.autocast("cpu", torch.bfloat16):
        assert called(layer, on_cuda(4, 64)) == {"sketched_linear"}
        with torch.enable_grad():
            assert not has_kernel(on_cuda(4, 64), [Factors(layer.down.weight, layer.up.weight, None, 0)])


def test_a_factor_that_is_not_plain_is_called(mode):
    mode("triton")
    layer = linear()
    layer.down.register_forward_hook(lambda module, args, out: 2 * out)
    assert called(layer, on_cuda(32, 64)) == set()


def test_captured_graphs_have_no_operator(monkeypatch, mode):
    mode("triton")
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert called(linear(), on_cuda(32, 64)) == set()
    assert called(convolution(), on_cuda(2, 12, 7, 7)) == set()


def convolution(scheme="channel", rank=4, **options):
    return SketchedConv2d(12, 20, 3, rank, scheme=scheme, **{"padding": 1} | options)


@pytest.mark.parametrize("scheme", ["channel", "tucker2"])
def test_convolution_only_if_forced(scheme, mode):
    layer = convolution(scheme, stride=2, dilation=2)
    assert called(layer, on_cuda(2, 12, 9, 9)) == set()
    mode("triton")
    assert called(layer, on_cuda(2, 12, 9, 9)) == {"sketched_conv2d"}
    assert called(layer, torch.randn(2, 12, 9, 9)) == set()


@pytest.mark.parametrize(
    "options",
    [
        {"scheme": "spatial"},
        {"groups": 2},
        {"padding_mode": "reflect"},
        {"padding": "same"},
    ],
    ids=str,
)
def test_convolution_without_a_kernel(options, mode):
    mode("triton")
    assert called(convolution(**options), on_cuda(2, 12, 9, 9)) == set()


def test_a_single_image_has_no_kernel(mode):
    mode("triton")
    assert called(convolution(), on_cuda(12, 9, 9)) == set()


def attention(heads=2):
    return SketchedMultiheadAttention(heads * 8, heads, attention="favor", features=16, batch_first=True)


def attend(layer, **options):
    return lambda x: layer(x, x, x, need_weights=False, **options)[0]


def test_random_feature_attention_only_if_forced(mode):
    layer, x = attention(), on_cuda(2, 20, 16)
    assert called(layer, x, attend(layer)) == set()
    mode("triton")
    assert called(layer, x, attend(layer)) == {"favor_attention"}
    assert called(layer, torch.randn(2, 20, 16), attend(layer)) == set()
    with_weights = lambda x: layer(x, x, x)  # noqa: E731
    assert called(layer, x, with_weights) == set()
    mode("torch")
    assert called(layer, x, attend(layer)) == set()


def test_random_feature_attention_in_half_types():
    layer = SketchedMultiheadAttention(32, 2, attention="favor", features=16, batch_first=True).half()
    x = on_cuda(2, 20, 32, dtype=torch.float16)
    assert called(layer, x, attend(layer)) == {"favor_attention"}
    with torch.autocast("cpu", torch.bfloat16):  # the directions stay float32, and so does the estimate
        assert called(layer.float(), on_cuda(2, 20, 32), attend(layer)) == set()


def test_wide_attention_that_trains_has_no_kernel(mode):
    q = torch.randn(1, 2, 5, 128, dtype=torch.float16).as_subclass(OnCuda)
    trained = torch.randn(1, 2, 5, 128, dtype=torch.float16, requires_grad=True)
    assert has_attention_kernel(q, q, q)
    assert not has_attention_kernel(q, q, trained)
    with torch.no_grad():
        assert has_attention_kernel(q, q, trained)
    mode("triton")
    assert has_attention_kernel(q, q, trained)


def test_a_mask_that_trains_gets_its_gradient(mode):
    mode("triton")
    layer, x = attention(), on_cuda(2, 20, 16)
    mask = torch.zeros(2, 20, requires_grad=True)
    attend(layer, key_padding_mask=mask)(x).square().sum().backward()
    assert mask.grad.norm() > 0


CASES = {
    "pair": lambda: (linear("pair"), (32, 64)),
    "pivoted": lambda: (linear(), (32, 64)),
    "convolution": lambda: (convolution(stride=2), (2, 12, 9, 9)),
    "tucker2": lambda: (convolution("tucker2"), (2, 12, 9, 9)),
    "attention": lambda: (attention(), (2, 20, 16)),
}


@pytest.mark.parametrize(("rank", "rows", "kind", "wanted"), [
    (16, 64, "auto", False),  # its launch takes longer than it saves
    (16, 4, "auto", False),
    (16, 4, "triton", True),
    (80, 64, "triton", True),
    (16, 64, "torch", False),
])  # fmt: skip
def test_passes_fuse_what_the_operator_will_run_as_a_kernel(rank, rows, kind, wanted, mode):
    mode(kind)
    layer = Factors(on_cuda(rank, 64), on_cuda(64, rank), None, None)
    assert fuses(layer, rows, torch.float32) is wanted
    plain = Factors(torch.randn(rank, 64), torch.randn(64, rank), None, None)
    assert not fuses(plain, rows, torch.float32)
    # Whatever the passes expect, the operator decides so for the input that it gets.
    x = on_cuda(rows, 64)
    assert linear_dispatch.has_kernel(x, [layer]) is wanted


@pytest.mark.parametrize("name", CASES)
def test_the_layers_compute_the_same(name, mode):
    layer, shape = CASES[name]()
    run = attend(layer) if name == "attention" else layer
    x = torch.randn(shape)
    found = []
    for kind, given in (("torch", x.clone()), ("triton", x.clone().as_subclass(OnCuda))):
        mode(kind)
        layer.zero_grad()
        given.requires_grad_()
        y = run(given)
        y.square().sum().backward()
        found.append([y, given.grad, *(one.grad for one in layer.parameters())])
    for plain, by_kernel in zip(*found, strict=True):
        torch.testing.assert_close(by_kernel.as_subclass(torch.Tensor), plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("causal", "padded"),
    [
        (True, True),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in ((False, False), (False, True), (True, False))
        ),
    ],
)
def test_attention_in_half_types_computes_the_same(causal, padded, mode):
    layer = SketchedMultiheadAttention(32, 2, attention="favor", features=16, batch_first=True).half()
    x, options = torch.randn(2, 20, 32).half(), {}
    if padded:
        options["key_padding_mask"] = torch.arange(20).expand(2, 20) > torch.tensor([[19], [12]])
    if causal:
        options |= {"is_causal": True, "attn_mask": torch.ones(20, 20).triu(1).bool()}
    found = []
    for kind, given in (("torch", x.clone()), ("auto", x.clone().as_subclass(OnCuda))):
        mode(kind)
        layer.zero_grad()
        given.requires_grad_()
        y = attend(layer, **options)(given)
        y.float().square().sum().backward()
        found.append([y, given.grad, *(one.grad for one in layer.parameters())])
    for plain, by_kernel in zip(*found, strict=True):
        scale = float(plain.detach().abs().max())
        torch.testing.assert_close(by_kernel.as_subclass(torch.Tensor), plain, rtol=0, atol=4e-3 * scale)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_the_layers_compute_the_same_on_a_gpu(name, mode, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # on by default
    layer, shape = CASES[name]()
    layer = layer.to("cuda")
    run = attend(layer) if name == "attention" else layer
    x = torch.randn(*shape, device="cuda")
    mode("torch")
    wanted = run(x)
    mode("triton")
    assert called(layer, x, run)
    torch.testing.assert_close(run(x), wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5])
def test_a_captured_graph_has_the_decode_kernels(rows):
    layers = torch.nn.Sequential(*(linear(form) for form in ("pair", "pivoted")), linear("pair"))
    layers[1] = SketchedLinear(48, 64, 16, form="pivoted")
    layers = layers.to("cuda", torch.bfloat16).requires_grad_(False)
    x = torch.randn(rows, 64, device="cuda", dtype=torch.bfloat16)
    assert called(layers, x) == set()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), Recorder() as recorder:
        y = layers(x)
    assert f"{OURS}sketched_linear" in recorder.called
    for _ in range(2):
        graph.replay()
        wanted = layers(x)  # two products, which round elsewhere
        torch.testing.assert_close(y, wanted, rtol=0, atol=0.02 * float(wanted.abs().max()))
        x.mul_(2)
