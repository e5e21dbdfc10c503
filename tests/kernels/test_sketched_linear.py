"""Linear kernels, through their launchers, against float64: see tests/oracle.py for the rule."""

import itertools

import oracle
import pytest
import torch
import torch.nn.functional as F

from panther_compile.kernels import (
    decode_linear,
    dispatch,
    reference,
    sketched_linear,
    sketched_linear_backward,
)
from panther_compile.kernels.factor_set import Factors, Needs
from panther_compile.kernels.plain import ACTIVATIONS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FORWARDS = {
    "fused": sketched_linear.sketched_linear_forward,
    "decode": decode_linear.decode_linear_forward,
}
# rows, in, out, rank: tails singly and together, and one power of two
SHAPES = {
    "fused": [
        (37, 70, 29, 13),
        (1, 2, 1, 1),
        (32, 64, 32, 16),
        (16, 33, 16, 16),
        (33, 32, 32, 17),
        (17, 210, 40, 130),
    ],
    "decode": [(1, 250, 29, 13), (5, 70, 17, 40), (16, 64, 32, 16), (1, 2, 1, 1)],
}
FORMS = {"pair": lambda i, r: None, "first": lambda i, r: 0, "last": lambda i, r: i - r}
POINTS = [(kind, shape) for kind, shapes in SHAPES.items() for shape in shapes]


def name_of(value):
    if isinstance(value, tuple) and isinstance(value[0], str):
        return value[0] + "-" + "-".join(f"{n}{x}" for n, x in zip("BIOR", value[1], strict=True))
    return str(value)


def embedded(*shape, dtype):
    """A tensor with every other column of a larger one, whose rest is NaN."""
    around = torch.full((*shape[:-1], 2 * shape[-1] + 1), torch.nan, dtype=dtype, device=DEVICE)
    around = torch.cat([around, around[:1]]) if len(shape) > 1 else around
    inside = around[: shape[0], 1::2] if len(shape) > 1 else around[1::2]
    return inside.copy_(torch.randn(shape))


def draw(*shape, dtype, strided=False):
    if strided:
        return embedded(*shape, dtype=dtype)
    return torch.randn(shape).to(dtype=dtype, device=DEVICE)


def make_layer(inputs, outputs, rank, form, dtype, bias=True, strided=False):
    start = FORMS[form](inputs, rank)
    width = inputs if start is None else inputs - rank
    return Factors(
        draw(rank, width, dtype=dtype, strided=strided),
        draw(outputs, rank, dtype=dtype, strided=strided) / rank**0.5,
        draw(outputs, dtype=dtype) if bias else None,
        start,
    )


def run_reference(layers, activation="none"):
    """The layers as a function of named tensors: x, multiplier, residual, down0, up0, bias0, down1 ..."""

    def run(x, multiplier=None, residual=None, **factors):
        outputs = []
        for index, layer in enumerate(layers):
            down, up, bias = (factors.get(f"{name}{index}") for name in ("down", "up", "bias"))
            if layer.start is None:
                s = reference.pair_linear(x, down, up, bias)
            else:
                s = reference.pivoted_linear(x, down, up, bias, start=layer.start)
            outputs.append(reference.gate_and_add(ACTIVATIONS[activation](s), multiplier, residual))
        return tuple(outputs)

    return run


def reference_latent(start, given, index):
    """The latent is what a layer gives whose second factor is the identity."""
    x, down = given["x"], given[f"down{index}"]
    identity = torch.eye(down.shape[0], dtype=x.dtype, device=x.device)
    if start is None:
        return reference.pair_linear(x, down, identity, None)
    return reference.pivoted_linear(x, down, identity, None, start=start)


def named(x, layers):
    factors = {
        f"{name}{index}": tensor
        for index, layer in enumerate(layers)
        for name, tensor in zip(("down", "up", "bias"), layer[:3], strict=True)
        if tensor is not None
    }
    return {"x": x, **factors}


def reference_of(layers, activation, given):
    """Outputs y0, y1 ... and latents z0, z1 ... of the reference."""
    outputs = run_reference(layers, activation)(**given)
    latents = (reference_latent(layer.start, given, index) for index, layer in enumerate(layers))
    return {f"y{i}": y for i, y in enumerate(outputs)} | {f"z{i}": z for i, z in enumerate(latents)}


def reordered(x, layer, activation, others):
    """The reference's y and z with features and ranks in another order, which changes only the rounding."""
    rank, width = layer.down.shape
    ranks, order = torch.randperm(rank, device=DEVICE), torch.randperm(width, device=DEVICE)
    x = x.clone()
    x[:, layer.rest : layer.rest + width] = x[:, layer.rest + order]
    if layer.start is not None:
        x[:, layer.start : layer.start + rank] = x[:, layer.start + ranks]
    layer = layer._replace(down=layer.down[ranks][:, order], up=layer.up[:, ranks])
    found = reference_of([layer], activation, named(x, [layer]) | others)
    return found["y0"], found["z0"][:, ranks.argsort()]


def check_forward(forward, x, layers, activation="none", precision="ieee", **others):
    options = {"activation": activation, "precision": precision}
    outputs, latents = forward(x, layers, keep=True, **options, **others)
    found = {f"y{index}": y for index, y in enumerate(outputs)}
    found |= {f"z{index}": z for index, z in enumerate(latents)}
    inputs = named(x, layers) | others
    plain = reference_of(layers, activation, inputs)
    exact = reference_of(layers, activation, oracle.to_double(inputs))
    plains = [plain]
    for _ in range(4 if x.dtype == torch.float32 else 0):
        others_of = (reordered(x, layer, activation, others) for layer in layers)
        plains.append(
            {f"{name}{i}": y for i, yz in enumerate(others_of) for name, y in zip("yz", yz, strict=True)}
        )
    if DEVICE == "cuda" and x.dtype == torch.float32:
        with oracle.products_of_a_gpu(precision):
            plains.append(reference_of(layers, activation, inputs))
    plain = oracle.worst(plains, exact)
    oracle.check(found, plain, exact)
    again, none = forward(x, layers, **options, **others)
    assert all(torch.equal(one, other) for one, other in zip(outputs, again, strict=True))
    assert [tuple(z.shape) for z in none] == [(0, one.down.shape[0]) for one in layers]


def check_backward(x, layers, activation="none", precision="ieee", **others):
    run, inputs = run_reference(layers, activation), named(x, layers) | others
    grads = tuple(draw(len(x), one.up.shape[0], dtype=x.dtype) for one in layers)
    wanted = tuple(inputs)
    plain = oracle.with_gradients(run, inputs, wanted, grads)
    exact = oracle.with_gradients(run, oracle.to_double(inputs), wanted, grads)
    if DEVICE == "cuda" and x.dtype == torch.float32:
        with oracle.products_of_a_gpu(precision):
            plain = oracle.worst([plain, oracle.with_gradients(run, inputs, wanted, grads)], exact)
    _, latents = sketched_linear.sketched_linear_forward(x, layers, keep=True, precision=precision)
    options = {"activation": activation, "precision": precision}
    gx, of_layers = sketched_linear_backward.sketched_linear_backward(
        grads, x, layers, latents, needs=Needs(), **options, **others
    )
    found = {"grad of x": gx}
    for index, one in enumerate(of_layers):
        for name, grad in one._asdict().items():
            if grad is not None:
                found["grad of multiplier" if name == "multiplier" else f"grad of {name}{index}"] = grad
    for results in (plain, exact):
        for name in [name for name in results if name.startswith("y")]:
            del results[name]
    oracle.check(found, plain, exact)


def test_ranks_as_they_are_computed():
    assert [sketched_linear.padded_rank(rank) for rank in (1, 16, 17, 64, 65, 129, 256)] == [
        *(16, 16, 32, 64, 128, 192, 256)
    ]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("point", POINTS, ids=name_of)
def test_forward(point, form):
    kind, (rows, inputs, outputs, rank) = point
    x = draw(rows, inputs, dtype=torch.float32)
    check_forward(FORWARDS[kind], x, [make_layer(inputs, outputs, rank, form, torch.float32)])


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("point", [POINTS[0], POINTS[5], POINTS[6]], ids=name_of)
def test_forward_in_half_types(point, dtype):
    kind, (rows, inputs, outputs, rank) = point
    x = draw(rows, inputs, dtype=DTYPES[dtype])
    check_forward(FORWARDS[kind], x, [make_layer(inputs, outputs, rank, "last", DTYPES[dtype])])


@pytest.mark.parametrize("activation", ["relu", "silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("kind", FORWARDS)
def test_activations(kind, activation):
    layer = make_layer(33, 18, 5, "pair", torch.float32)
    check_forward(FORWARDS[kind], draw(3, 33, dtype=torch.float32), [layer], activation)


GIVEN = {"multiplier": ("multiplier",), "residual": ("residual",), "both": ("multiplier", "residual")}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["none", "silu"])
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("kind", FORWARDS)
def test_gate_and_residual(kind, given, activation, dtype):
    dtype = DTYPES[dtype]
    others = {name: draw(9, 18, dtype=dtype, strided=name == "residual") for name in GIVEN[given]}
    layer = make_layer(33, 18, 5, "last", dtype)
    check_forward(FORWARDS[kind], draw(9, 33, dtype=dtype), [layer], activation, **others)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", FORWARDS)
def test_strided_inputs_and_no_bias(kind, form):
    layer = make_layer(33, 18, 5, form, torch.float32, bias=False, strided=True)
    check_forward(FORWARDS[kind], draw(9, 33, dtype=torch.float32, strided=True), [layer])


@pytest.mark.parametrize("kind", FORWARDS)
def test_one_row_for_all(kind):
    x = draw(1, 33, dtype=torch.float32).expand(5, 33)
    check_forward(FORWARDS[kind], x, [make_layer(33, 18, 5, "first", torch.float32)])


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("kind", FORWARDS)
def test_several_layers_of_one_input(kind, rows):
    layers = three_layers()
    check_forward(FORWARDS[kind], draw(rows, 40, dtype=torch.float32), layers)


def three_layers(dtype=torch.float32):
    """Ranks, outputs and forms that differ; the second has no bias."""
    shapes = ((18, 17, "pair", True), (33, 5, "first", False), (7, 20, "last", True))
    return [make_layer(40, out, rank, form, dtype, bias) for out, rank, form, bias in shapes]


@pytest.mark.parametrize("kind", FORWARDS)
def test_no_rows(kind):
    layers = three_layers()
    outputs, latents = FORWARDS[kind](draw(0, 40, dtype=torch.float32), layers, keep=True)
    assert [tuple(y.shape) for y in outputs] == [(0, 18), (0, 33), (0, 7)]
    assert [tuple(z.shape) for z in latents] == [(0, 17), (0, 5), (0, 20)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "shape",
    [
        (37, 70, 29, 13),
        *(pytest.param(one, marks=pytest.mark.slow) for one in ((33, 34, 32, 17), (65, 64, 32, 16))),
    ],
    ids=str,
)
def test_gradients(shape, form):
    rows, inputs, outputs, rank = shape
    x = draw(rows, inputs, dtype=torch.float32)
    check_backward(x, [make_layer(inputs, outputs, rank, form, torch.float32)])


@pytest.mark.parametrize("dtype", [pytest.param("fp16", marks=pytest.mark.slow), "bf16"])
def test_gradients_in_half_types(dtype):
    x = draw(37, 40, dtype=DTYPES[dtype])
    check_backward(x, [make_layer(40, 18, 7, "last", DTYPES[dtype])])


@pytest.mark.parametrize(
    "activation",
    ["gelu", *(pytest.param(one, marks=pytest.mark.slow) for one in ("relu", "silu", "gelu_tanh"))],
)
def test_gradients_through_activations(activation):
    layer = make_layer(33, 18, 5, "pair", torch.float32)
    check_backward(draw(37, 33, dtype=torch.float32), [layer], activation)


@pytest.mark.parametrize(
    ("strided", "activation"),
    [
        pytest.param(strided, one, marks=pytest.mark.slow if strided and one != "gelu" else ())
        for strided in (False, True)
        for one in ("none", "relu", "silu", "gelu", "gelu_tanh")
    ],
)
def test_gradients_through_a_gate(strided, activation):
    layer = make_layer(33, 18, 5, "first", torch.float32)
    multiplier = draw(37, 18, dtype=torch.float32, strided=strided)
    check_backward(draw(37, 33, dtype=torch.float32), [layer], activation, multiplier=multiplier)


def test_a_gate_whose_gradient_is_not_wanted():
    layer, x = make_layer(33, 18, 5, "pair", torch.float32), draw(7, 33, dtype=torch.float32)
    multiplier, grad = draw(7, 18, dtype=torch.float32), draw(7, 18, dtype=torch.float32)
    _, latents = sketched_linear.sketched_linear_forward(x, [layer], keep=True)
    run = sketched_linear_backward.sketched_linear_backward
    every, one = (
        run([grad], x, [layer], latents, multiplier=multiplier, needs=Needs(multiplier=wanted))
        for wanted in (True, False)
    )
    assert one[1][0].multiplier is None
    assert torch.equal(one[0], every[0])
    assert torch.equal(one[1][0].up, every[1][0].up)


def test_gradients_of_several_layers():
    check_backward(draw(37, 40, dtype=torch.float32), three_layers())


def test_gradients_of_strided_inputs():
    layer = make_layer(33, 18, 5, "first", torch.float32, bias=False, strided=True)
    check_backward(draw(19, 33, dtype=torch.float32, strided=True), [layer])


@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=4))[1:15:3], ids=str)
def test_only_wanted_gradients(needs):
    needs = Needs(*needs)
    layers, x = [make_layer(33, 18, 5, "pair", torch.float32)], draw(7, 33, dtype=torch.float32)
    _, latents = sketched_linear.sketched_linear_forward(x, layers, keep=True)
    gx, (grads,) = sketched_linear_backward.sketched_linear_backward(
        [draw(7, 18, dtype=torch.float32)], x, layers, latents, needs=needs
    )
    assert (gx is not None) == needs.x
    assert (grads.down is not None) == needs.down
    assert (grads.up is not None) == needs.up
    assert (grads.bias is not None) >= needs.bias


def test_no_rows_gives_zero_gradients():
    layers, x = three_layers(), draw(0, 40, dtype=torch.float32)
    grads = [draw(0, one.up.shape[0], dtype=torch.float32) for one in layers]
    latents = [draw(0, one.down.shape[0], dtype=torch.float32) for one in layers]
    gx, others = sketched_linear_backward.sketched_linear_backward(grads, x, layers, latents, needs=Needs())
    assert gx.shape == (0, 40)
    assert all(grad.eq(0).all() for one in others for grad in one if grad is not None)


def test_nan_and_infinity_go_through():
    layer = make_layer(33, 18, 5, "pair", torch.float32)
    x = draw(4, 33, dtype=torch.float32)
    x[1, 3], x[2, 4] = torch.nan, torch.inf
    for forward in FORWARDS.values():
        (y,), _ = forward(x, [layer], activation="relu")
        wanted = F.relu(F.linear(F.linear(x, layer.down), layer.up, layer.bias))
        assert torch.equal(y.isnan(), wanted.isnan())
        assert torch.equal(y.isfinite(), wanted.isfinite())


MODULES = (sketched_linear, sketched_linear_backward, decode_linear)
# Not multiples of 16, and those that asynchronous copies and the widest instructions want.
LARGE = {
    "ragged": (520, 200, (130, 37)),
    "narrow": (512, 256, (64, 16)),
    "wide": (1024, 512, (256, 128)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("dtype", [*DTYPES, "tf32"])
def test_every_configuration(dtype, name, form, each_configuration):
    """Tuning must not change results: no configuration may hide behind the first that serves."""
    precision, dtype = ("tf32", torch.float32) if dtype == "tf32" else ("ieee", DTYPES[dtype])
    inputs, outputs, ranks = LARGE[name]
    widest = dispatch.MAX_FUSED_RANK[dtype.itemsize]
    layers = [make_layer(inputs, outputs, min(rank, widest), form, dtype) for rank in ranks]
    x, grown = draw(300, inputs, dtype=dtype), draw(300, outputs, dtype=dtype)
    others = {"multiplier": grown, "residual": 2 * grown}
    torch.backends.cuda.matmul.fp32_precision = precision  # of the plain results
    try:
        for _ in each_configuration(*MODULES):
            for rows, kind in ((300, "fused"), (1, "decode"), (3, "decode")):
                check_forward(FORWARDS[kind], x[:rows], layers, precision=precision)
            check_forward(FORWARDS["fused"], x, layers[1:2], "silu", precision, **others)
            check_backward(x, layers, precision=precision)
            check_backward(x, layers[1:2], "gelu", precision, multiplier=grown)
    finally:
        torch.backends.cuda.matmul.fp32_precision = "ieee"


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [*DTYPES, "tf32"])
def test_every_configuration_of_decoding_at_a_large_rank(dtype, form, each_configuration):
    precision, dtype = ("tf32", torch.float32) if dtype == "tf32" else ("ieee", DTYPES[dtype])
    layers = [make_layer(1024, 512, 512, form, dtype)]
    torch.backends.cuda.matmul.fp32_precision = precision  # of the plain results
    try:
        for _ in each_configuration(decode_linear):
            for rows in (1, 8):
                check_forward(FORWARDS["decode"], draw(rows, 1024, dtype=dtype), layers, precision=precision)
    finally:
        torch.backends.cuda.matmul.fp32_precision = "ieee"
