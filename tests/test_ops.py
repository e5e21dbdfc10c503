"""The operators on a CPU: the reference's arithmetic, one node, gradients, autocast, errors."""

import pytest
import torch
import torch.nn.functional as F
from thinned import thinned

from panther_compile.errors import OpError, PantherError
from panther_compile.kernels import reference
from panther_compile.ops import (
    Factors,
    favor_attention,
    sketched_conv2d,
    sketched_linear,
    sketched_multi_linear,
)

OPS = torch.ops.panther_compile
ACTIVATIONS = {
    "none": lambda s: s,
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda s: F.gelu(s, approximate="tanh"),
}


def draw(*shape, dtype=torch.float64, grad=True):
    return torch.randn(*shape, dtype=dtype).requires_grad_(grad)


def linear_inputs(start=None, bias=True, leading=(2, 3), dtype=torch.float64):
    inputs, outputs, rank = 7, 5, 3
    width = inputs if start is None else inputs - rank
    return (
        draw(*leading, inputs, dtype=dtype),
        draw(rank, width, dtype=dtype),
        draw(outputs, rank, dtype=dtype),
        draw(outputs, dtype=dtype) if bias else None,
    )


def linear_reference(x, down, up, bias, start, activation="none"):
    if start is None:
        s = reference.pair_linear(x, down, up, bias)
    else:
        s = reference.pivoted_linear(x, down, up, bias, start=start)
    return ACTIVATIONS[activation](s)


def three_layers(dtype=torch.float64):
    return [
        Factors(draw(3, 7, dtype=dtype), draw(5, 3, dtype=dtype), draw(5, dtype=dtype), None),
        Factors(draw(2, 5, dtype=dtype), draw(6, 2, dtype=dtype), None, 5),
        Factors(draw(4, 3, dtype=dtype), draw(5, 4, dtype=dtype), draw(5, dtype=dtype), 0),
    ]


def attention_inputs(dtype=torch.float64, queries=6, keys=6):
    q, k, v = (
        draw(2, 1, queries, 4, dtype=dtype),
        draw(2, 1, keys, 4, dtype=dtype),
        draw(2, 1, keys, 3, dtype=dtype),
    )
    w = draw(9, 4, dtype=dtype, grad=False)
    mask = draw(2, 1, keys, dtype=dtype, grad=False)
    mask[1, :, -2:] = -torch.inf
    return q, k, v, w, mask


CONVOLUTION = {"stride": (2, 1), "padding": (1, 0), "dilation": (1, 2)}


def convolution_inputs(dtype=torch.float64):
    return (
        draw(2, 3, 6, 7, dtype=dtype),
        draw(4, 3, 3, 2, dtype=dtype),
        draw(5, 4, 1, 1, dtype=dtype),
        draw(5, dtype=dtype),
    )


# Values and gradients


@pytest.mark.parametrize("leading", [(), (5,), (2, 3), (0,)])
@pytest.mark.parametrize("start", [None, 0, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_is_the_reference(start, bias, leading):
    inputs = linear_inputs(start, bias, leading)
    found = sketched_linear(*inputs, start=start)
    torch.testing.assert_close(found, linear_reference(*inputs, start))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("start", [None, pytest.param(0, marks=pytest.mark.slow), 4])
def test_linear_gradients(start, activation):
    inputs = linear_inputs(start)
    found = sketched_linear(*inputs, start=start, activation=activation)
    torch.testing.assert_close(found, linear_reference(*inputs, start, activation))
    assert torch.autograd.gradcheck(
        lambda *given: sketched_linear(*given, start=start, activation=activation), inputs
    )


@pytest.mark.parametrize("frozen", range(4))
def test_only_wanted_gradients_are_given(frozen):
    inputs = linear_inputs(start=0)
    inputs[frozen].requires_grad_(False)
    sketched_linear(*inputs, start=0).sum().backward()
    assert [one.grad is None for one in inputs] == [index == frozen for index in range(4)]
    again = [one.detach().requires_grad_(one.requires_grad) for one in inputs]
    linear_reference(*again, 0).sum().backward()
    for one, other in zip(inputs, again, strict=True):
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad)


def test_nothing_is_kept_without_gradients():
    inputs = linear_inputs()
    with torch.no_grad():
        assert sketched_linear(*inputs).grad_fn is None
    _, kept = OPS.sketched_linear(*inputs, None, None, None, "none", True)
    y, dropped = OPS.sketched_linear(*inputs, None, None, None, "none", False)
    assert (kept.shape, dropped.shape) == ((6, 3), (0, 3))
    y.sum().backward()  # what was not kept is computed again
    torch.testing.assert_close(inputs[2].grad, kept.sum(0).expand(5, 3))


GIVEN = {"multiplier": (True, False), "residual": (False, True), "both": (True, True)}


# Every activation with both; with one of them, one activation.
GATES = [
    pytest.param(
        given, activation, marks=pytest.mark.slow if given != "both" and activation != "gelu" else ()
    )
    for given in GIVEN
    for activation in ACTIVATIONS
]


@pytest.mark.parametrize("start", thinned([None, 0], 2))
@pytest.mark.parametrize(("given", "activation"), GATES)
def test_gate_and_residual(given, start, activation):
    tensors = [draw(2, 3, 5) for has in GIVEN[given] if has]

    def run(x, down, up, bias, *others):
        left = iter(others)
        multiplier, residual = (next(left) if has else None for has in GIVEN[given])
        return sketched_linear(
            x, down, up, bias, start=start, activation=activation, multiplier=multiplier, residual=residual
        )

    inputs = (*linear_inputs(start), *tensors)
    left = iter(tensors)
    multiplier, residual = (next(left) if has else None for has in GIVEN[given])
    wanted = linear_reference(*inputs[:4], start, activation)
    torch.testing.assert_close(run(*inputs), reference.gate_and_add(wanted, multiplier, residual))
    assert torch.autograd.gradcheck(run, inputs)


@pytest.mark.parametrize("frozen", range(6))
def test_only_wanted_gradients_of_gate_and_residual(frozen):
    inputs = (*linear_inputs(), draw(2, 3, 5), draw(2, 3, 5))
    inputs[frozen].requires_grad_(False)
    *layer, multiplier, residual = inputs
    sketched_linear(*layer, activation="silu", multiplier=multiplier, residual=residual).sum().backward()
    again = [one.detach().requires_grad_(one.requires_grad) for one in inputs]
    wanted = reference.gate_and_add(linear_reference(*again[:4], None, "silu"), *again[4:])
    wanted.sum().backward()
    assert [one.grad is None for one in inputs] == [index == frozen for index in range(6)]
    for one, other in zip(inputs, again, strict=True):
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad)


def test_a_residual_alone_may_need_a_gradient():
    inputs = [one.detach() for one in linear_inputs()]
    residual = draw(2, 3, 5)
    sketched_linear(*inputs, residual=residual).sum().backward()
    torch.testing.assert_close(residual.grad, torch.ones_like(residual))


def test_several_layers_are_those_one_by_one():
    x, layers = draw(2, 3, 7), three_layers()
    for found, layer in zip(sketched_multi_linear(x, layers), layers, strict=True):
        torch.testing.assert_close(found, linear_reference(x, *layer))


def test_several_layers_gradients():
    layers = three_layers()
    tensors = [one for layer in layers for one in layer[:3] if one is not None]

    def run(x, *tensors):
        given = iter(tensors)
        again = [
            Factors(*(None if one is None else next(given) for one in layer[:3]), layer.start)
            for layer in layers
        ]
        return tuple(sketched_multi_linear(x, again))

    assert torch.autograd.gradcheck(run, (draw(4, 7), *tensors))


def test_one_of_several_outputs_may_be_unused():
    x, layers = draw(4, 7), three_layers()
    sketched_multi_linear(x, layers)[1].sum().backward()
    wanted = x.grad.clone()
    x.grad = None
    linear_reference(x, *layers[1]).sum().backward()
    torch.testing.assert_close(x.grad, wanted)


@pytest.mark.parametrize("channels_last", [False, True])
def test_convolution_is_two(channels_last):
    x, down, up, bias = convolution_inputs()
    x = x.to(memory_format=torch.channels_last) if channels_last else x
    found = sketched_conv2d(x, down, up, bias, **CONVOLUTION)
    wanted = F.conv2d(F.conv2d(x, down, None, **CONVOLUTION), up, bias)
    torch.testing.assert_close(found, wanted)
    assert found.stride() == wanted.stride()


def test_convolution_gradients():
    assert torch.autograd.gradcheck(
        lambda *given: sketched_conv2d(*given, **CONVOLUTION), convolution_inputs()
    )


@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (3, 6), (6, 3)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_the_reference(causal, masked, queries, keys):
    *inputs, mask = attention_inputs(queries=queries, keys=keys)
    mask = mask if masked else None
    found = favor_attention(*inputs, mask, causal=causal)
    torch.testing.assert_close(found, reference.favor_attention(*inputs, mask, causal=causal))
    grad = torch.randn_like(found)
    wanted = torch.autograd.grad(reference.favor_attention(*inputs, mask, causal=causal), inputs[:3], grad)
    torch.testing.assert_close(torch.autograd.grad(found, inputs[:3], grad), wanted)


@pytest.mark.parametrize(("queries", "keys"), [(3, 0), (0, 6), (0, 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_to_nothing_is_zero(causal, queries, keys):
    """As that to keys which are all hidden."""
    *inputs, mask = attention_inputs(queries=queries, keys=keys)
    found = favor_attention(*inputs, mask, causal=causal)
    assert torch.equal(found, inputs[2].new_zeros(*inputs[0].shape[:3], inputs[2].shape[3]))
    for one, grad in zip(inputs[:3], torch.autograd.grad(found.sum(), inputs[:3]), strict=True):
        assert torch.equal(grad, torch.zeros_like(one))


@pytest.mark.parametrize("chunk", [1, 4, 128])
@pytest.mark.parametrize("hidden", [False, True], ids=["open", "hidden"])
def test_attention_backward_by_chunks(chunk, hidden):
    from panther_compile.kernels.plain_attention import favor_attention_backward

    q, k, v, w, mask = attention_inputs(queries=9, keys=9)
    mask[0] = -torch.inf if hidden else 0
    y = reference.favor_attention(q, k, v, w, mask, causal=True)
    grad = torch.randn_like(y)
    found = favor_attention_backward(
        grad, *(one.detach() for one in (q, k, v, w, mask)), causal=True, chunk=chunk
    )
    torch.testing.assert_close(found, torch.autograd.grad(y, (q, k, v), grad))


# One node

CASES = {
    "linear": lambda dtype: linear_case(dtype, activation="gelu"),
    "pivoted": lambda dtype: linear_case(dtype, start=0),
    "no-bias": lambda dtype: linear_case(dtype, start=4, bias=False, keep=False),
    "gated": lambda dtype: linear_case(dtype, draw(2, 3, 5, dtype=dtype), start=0, activation="silu"),
    "residual": lambda dtype: linear_case(dtype, None, draw(2, 3, 5, dtype=dtype)),
    "both": lambda dtype: linear_case(dtype, draw(2, 3, 5, dtype=dtype), draw(2, 3, 5, dtype=dtype)),
    "several": lambda dtype: (OPS.sketched_multi_linear, several(dtype)),
    "conv2d": lambda dtype: (
        OPS.sketched_conv2d,
        (*convolution_inputs(dtype), *map(list, CONVOLUTION.values()), True),
    ),
    "favor": lambda dtype: (OPS.favor_attention, (*attention_inputs(dtype), False)),
    "favor-causal": lambda dtype: (OPS.favor_attention, (*attention_inputs(dtype)[:4], None, True)),
}


def linear_case(
    dtype, multiplier=None, residual=None, *, start=None, activation="none", bias=True, keep=True
):
    inputs = linear_inputs(start, bias, dtype=dtype)
    return OPS.sketched_linear, (*inputs, multiplier, residual, start, activation, keep)


def several(dtype):
    layers = three_layers(dtype)
    starts = [-1 if layer.start is None else layer.start for layer in layers]
    factors = ([layer[i] for layer in layers if layer[i] is not None] for i in range(3))
    return draw(2, 7, dtype=dtype), *factors, [True, False, True], starts, True


# Forms of the operator that "pivoted" and "both" are of too.
SELDOM = ("linear", "gated", "residual", "no-bias", "both", "favor-causal")


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=pytest.mark.slow if name in SELDOM else ()) for name in CASES]
)
def test_opcheck(case):
    op, arguments = CASES[case](torch.float32)
    torch.library.opcheck(op, arguments)


@pytest.mark.parametrize("case", ["linear", "several", "conv2d", "favor"])
def test_compiles_to_one_node(case):
    op, _ = CASES[case](torch.float32)
    x, layers = draw(2, 7, dtype=torch.float32), three_layers(torch.float32)
    conv, attention = convolution_inputs(torch.float32), attention_inputs(torch.float32)
    run, inputs = {
        "linear": (lambda x: sketched_linear(x, *layers[1]), (x,)),
        "several": (lambda x: sum(y.sum() for y in sketched_multi_linear(x, layers)), (x,)),
        "conv2d": (lambda *given: sketched_conv2d(*given, **CONVOLUTION), conv),
        "favor": (lambda *given: favor_attention(*given, causal=True), attention),
    }[case]
    if case == "linear":
        run = lambda x: sketched_linear(x, *layers[1][:3], start=layers[1].start)  # noqa: E731
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    found = torch.compile(run, backend=backend, fullgraph=True)(*inputs)
    torch.testing.assert_close(found, run(*inputs))
    assert sum(node.target in (op, op.default) for node in graphs[0].graph.nodes) == 1
    grad = torch.randn_like(found)
    torch.testing.assert_close(
        torch.autograd.grad(
            torch.compile(run, backend="aot_eager", fullgraph=True)(*inputs), inputs[0], grad
        ),
        torch.autograd.grad(run(*inputs), inputs[0], grad),
    )


def test_exports_as_one_node_with_a_dynamic_batch():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.factors = torch.nn.ParameterList(three_layers(torch.float32)[1][:2])

        def forward(self, x):
            return sketched_linear(x, *self.factors, start=5)

    layer, x = Layer(), draw(4, 7, dtype=torch.float32, grad=False)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    assert sum(node.target == OPS.sketched_linear.default for node in program.graph.nodes) == 1
    more = draw(9, 7, dtype=torch.float32, grad=False)
    torch.testing.assert_close(program.module()(more), layer(more))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    inputs = linear_inputs(start=4)

    def run(*given):
        return sketched_linear(*given, start=4, activation="gelu")

    wanted = torch.autograd.grad(run(*inputs).sum(), inputs)
    y = torch.utils.checkpoint.checkpoint(run, *inputs, use_reentrant=reentrant)
    y.sum().backward()
    for one, grad in zip(inputs, wanted, strict=True):
        torch.testing.assert_close(one.grad, grad)


def test_autocast():
    inputs = linear_inputs(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = sketched_linear(*inputs)
        wanted = linear_reference(*inputs, None)
        ys = sketched_multi_linear(inputs[0], three_layers(torch.float32))
        image = sketched_conv2d(*convolution_inputs(torch.float32))
        heads = favor_attention(*attention_inputs(torch.bfloat16))
        assert sketched_linear(*linear_inputs()).dtype == torch.float64
    assert torch.equal(y, wanted)
    assert {one.dtype for one in (y, *ys, image)} == {torch.bfloat16}
    assert heads.dtype == torch.float32
    y.sum().backward()
    assert all(one.grad.dtype == torch.float32 for one in inputs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_attention_is_computed_in_float32(dtype):
    half = attention_inputs(dtype)
    wide = [one.detach().float() for one in half]
    y = favor_attention(*half)
    assert torch.equal(y, reference.favor_attention(*wide).to(dtype))
    y.sum().backward()
    assert half[0].grad.dtype == dtype


# Mistakes


def wrong(case):
    x, down, up, bias = linear_inputs()
    q, k, v, w, mask = attention_inputs()
    image, kernel, point, _ = convolution_inputs()
    return {
        "x too wide": (lambda: sketched_linear(x, down[:, 1:], up), r"\(2, 3, 7\).*\(3, 6\)"),
        "up": (lambda: sketched_linear(x, down, up[:, 1:]), r"\(3, 7\).*\(5, 2\)"),
        "bias": (lambda: sketched_linear(x, down, up, bias[1:]), r"\(4,\).*\(5, 3\)"),
        "start": (lambda: sketched_linear(x, down[:, 3:], up, start=2), "start=2.*wanted start 0, 4 or"),
        "dtype": (lambda: sketched_linear(x, down.float(), up), "x is torch.float64, down torch.float32"),
        "device": (lambda: sketched_linear(x, down.to("meta"), up), "x is on cpu, down on meta"),
        "integer": (lambda: sketched_linear(x.long(), down, up), "torch.int64"),
        "activation": (lambda: sketched_linear(x, down, up, activation="tanh"), "'tanh'.*gelu_tanh"),
        "multiplier": (
            lambda: sketched_linear(x, down, up, multiplier=x),
            r"multiplier .*7\), .*\(2, 3, 5\)",
        ),
        "residual": (
            lambda: sketched_linear(x, down, up, residual=bias),
            r"residual \(5,\), wanted \(2, 3, 5\)",
        ),
        "residual dtype": (
            lambda: sketched_linear(x, down, up, residual=draw(2, 3, 5).float()),
            "x is torch.float64, residual torch.float32",
        ),
        "none": (lambda: sketched_multi_linear(x, []), "no layers"),
        "several": (lambda: sketched_multi_linear(x, [Factors(down, up.T, None, None)]), r"\(3, 5\)"),
        "channels": (lambda: sketched_conv2d(image[:, 1:], kernel, point), r"\(2, 2, 6, 7\).*\(4, 3,"),
        "point": (lambda: sketched_conv2d(image, kernel, point[:, 1:]), r"wanted up \(O, 4, 1, 1\)"),
        "head_dim": (lambda: favor_attention(q, k, v, w[:, 1:]), r"\(9, 3\)"),
        "no directions": (lambda: favor_attention(q, k, v, w[:0]), r"directions \(0, 4\)"),
        "lengths": (lambda: favor_attention(q, k, v[:, :, 1:], w), r"\(2, 1, 6, 4\).*\(2, 1, 5, 3\)"),
        "mask": (lambda: favor_attention(q, k, v, w, mask[..., 1:]), r"\(2, 1, 5\).*\(2, 1, 6\)"),
        "directions": (lambda: favor_attention(q, k, v, w.requires_grad_()), "directions requires a grad"),
    }[case]


@pytest.mark.parametrize(
    "case",
    [
        "x too wide",
        "up",
        "bias",
        "start",
        "dtype",
        "device",
        "integer",
        "activation",
        "multiplier",
        "residual",
        "residual dtype",
        "none",
        "several",
        "channels",
        "point",
        "head_dim",
        "no directions",
        "lengths",
        "mask",
        "directions",
    ],
)
def test_a_mistake_names_what_was_given_and_wanted(case):
    call, message = wrong(case)
    with pytest.raises(OpError, match=message) as caught:
        call()
    assert isinstance(caught.value, PantherError)
    assert isinstance(caught.value, ValueError)


def test_forward_mode_derivatives_are_refused():
    x, down, up, _ = (None if one is None else one.detach() for one in linear_inputs())
    image, kernel, point = (
        draw(1, 3, 5, 5, grad=False),
        draw(2, 3, 3, 3, grad=False),
        draw(4, 2, 1, 1, grad=False),
    )
    q, directions = draw(1, 2, 3, 4, grad=False), draw(6, 4, grad=False)
    for name, given, call in (
        ("x", x, lambda x: sketched_linear(x, down, up)),
        ("up", up, lambda up: sketched_multi_linear(x, [Factors(down, up, None, None)])[0]),
        ("down", kernel, lambda kernel: sketched_conv2d(image, kernel, point)),
        ("q", q, lambda one: favor_attention(one, q, q, directions)),
    ):
        with pytest.raises(OpError, match=f"{name} has a forward-mode derivative"):
            torch.func.jvp(call, (given,), (given,))
    assert torch.func.jvp(lambda t: t * sketched_linear(x, down, up).sum(), (x,), (x,))[1].any()
