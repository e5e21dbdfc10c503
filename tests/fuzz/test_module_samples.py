"""The samples that torch tests its own layers with: sketched, a layer takes what the dense one takes."""

import copy
import functools
import itertools

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_map

import panther_compile as pc
from panther_compile.errors import NoTargetError

pytest.importorskip("expecttest", reason="torch's samples need expecttest, which `make test` installs")

LAYERS = (
    "Linear",
    "Conv1d",
    "Conv2d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "MultiheadAttention",
    "Embedding",
)
OPTIONS = {"include": "*", "min_params": 0, "allow_slower": True, "progress": False, "synthetic": False}


@functools.cache
def infos():
    """What torch knows of each layer; its import takes ten seconds."""
    with pytest.MonkeyPatch.context() as patch:
        # It freezes the flags of torch.backends, for every test of this process.
        patch.setattr(torch.backends, "disable_global_flags", lambda: None)
        from torch.testing._internal.common_modules import module_db

    return {info.module_cls.__name__: info for info in module_db}


def samples(name, dtype, training):
    """(dense, sketched, positional, keyword arguments) of each sample whose layer is large enough."""
    info = infos()[name]
    torch.manual_seed(0)
    for sample in info.module_inputs_func(
        info, device="cpu", dtype=dtype, requires_grad=False, training=training
    ):
        made, given = sample.constructor_input, sample.forward_input
        dense = info.module_cls(*made.args, **made.kwargs, dtype=dtype).train(training)
        try:
            small = pc.sketchify(dense, 0.9, **OPTIONS)
        except NoTargetError:
            continue
        if small.state_dict().keys() != dense.state_dict().keys():
            yield dense, small, given.args, given.kwargs


def outcome(function, *args, **kwargs):
    try:
        return tree_flatten(function(*args, **kwargs))
    except Exception as error:
        return error


def assert_alike(what, found, wanted):
    """Whatever the dense layer refuses may be refused too."""
    if isinstance(wanted, Exception):
        return False
    assert not isinstance(found, Exception), f"{what}: {type(found).__name__}: {found}"
    assert found[1] == wanted[1], f"{what}: another structure"
    for one, other in zip(found[0], wanted[0], strict=True):
        if isinstance(other, torch.Tensor):
            assert (one.shape, one.dtype) == (other.shape, other.dtype), what
            assert bool(one.isfinite().all()) or not bool(other.isfinite().all()), f"{what}: not finite"
        else:
            assert one is other, what
    return True


# Attention has many samples: one dtype in each mode. No layer does other work in training: two types there.
CALLS = [
    pytest.param(name, dtype, training, marks=pytest.mark.slow if seldom else ())
    for name in LAYERS
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    for training in (False, True)
    for seldom in [
        (dtype in (torch.float64, torch.float16))
        or (name == "MultiheadAttention" and (training or dtype != torch.float32))
    ]
]


@pytest.mark.parametrize(("name", "dtype", "training"), CALLS)
def test_calls(name, dtype, training):
    ran = 0
    for dense, small, args, kwargs in samples(name, dtype, training):
        wanted = outcome(dense, *args, **kwargs)
        ran += assert_alike("called", outcome(small, *args, **kwargs), wanted)
        with torch.no_grad():
            found = outcome(small, *args, **kwargs)
            assert_alike("without gradients", found, outcome(dense, *args, **kwargs))
    assert ran, f"no sample of {name} was sketched"


# All samples of attention take as long as those of all other layers.
MOST_LAYERS = [
    pytest.param(name, marks=pytest.mark.slow if name == "MultiheadAttention" else ()) for name in LAYERS
]


@pytest.mark.parametrize("name", MOST_LAYERS)
def test_under_autocast(name):
    ran = 0
    for dense, small, args, kwargs in samples(name, torch.float32, False):
        with torch.autocast("cpu", torch.bfloat16):
            found, wanted = outcome(small, *args, **kwargs), outcome(dense, *args, **kwargs)
        ran += assert_alike("under autocast", found, wanted)
    assert ran, f"no sample of {name} was sketched"


@pytest.mark.parametrize("name", MOST_LAYERS)
def test_functional_calls_and_derivatives(name):
    ran = 0
    for dense, small, args, kwargs in samples(name, torch.float64, False):
        results = []
        for model in (dense, small):
            twice = {key: 2 * one.detach() for key, one in model.named_parameters()}
            found = outcome(torch.func.functional_call, model, twice, args, kwargs)
            larger = copy.deepcopy(model)
            larger.load_state_dict(twice, strict=False)
            results.append(found)
            if not isinstance(found, Exception):
                same = outcome(larger, *args, **kwargs)
                assert all(
                    torch.allclose(a, b, equal_nan=True)
                    for a, b in zip(found[0], same[0], strict=True)
                    if isinstance(a, torch.Tensor)
                )
        ran += assert_alike("functional_call", *results[::-1])

        def derivative(model, args=args, kwargs=kwargs):
            floats = [one for one in tree_flatten((args, kwargs))[0] if is_float(one)]
            if not floats:
                raise ValueError("no input has a derivative")

            def call(first):
                mine = tree_map(lambda one: first if one is floats[0] else one, (args, kwargs))
                return tree_flatten(model(*mine[0], **mine[1]))[0][0]

            return torch.func.jvp(call, (floats[0],), (torch.ones_like(floats[0]),))

        assert_alike("jvp", outcome(derivative, small), outcome(derivative, dense))
    assert ran, f"no sample of {name} was sketched"


def is_float(one):
    return isinstance(one, torch.Tensor) and one.is_floating_point()


def first_float(args, kwargs):
    """The first input with a derivative, and what calls a model with another in its place."""
    floats = [one for one in tree_flatten((args, kwargs))[0] if is_float(one)]
    if not floats:
        return None, None

    def call(model, x):
        mine = tree_map(lambda one: x if one is floats[0] else one, (args, kwargs))
        return tree_flatten(model(*mine[0], **mine[1]))[0][0]

    return floats[0], call


def some_samples(name, dtype, most):
    """The first samples of a layer, or all."""
    return itertools.islice(samples(name, dtype, False), most)


FEW = [pytest.param(2, id="few"), pytest.param(None, id="all", marks=pytest.mark.slow)]


@pytest.mark.parametrize("most", FEW)
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_those_of_finite_differences(name, most):
    ran = 0
    for _, small, args, kwargs in some_samples(name, torch.float64, most):
        x, call = first_float(args, kwargs)
        parameters = [one for one in small.parameters() if one.requires_grad][:2]
        if x is not None:
            assert torch.autograd.gradcheck(
                lambda x, small=small, call=call: call(small, x),
                (x.detach().clone().requires_grad_(),),
                fast_mode=True,
            )
        names = [key for key, one in small.named_parameters() if any(one is mine for mine in parameters)]

        def by_weights(*weights, small=small, names=names, args=args, kwargs=kwargs):
            given = dict(zip(names, weights, strict=True))
            return tree_flatten(torch.func.functional_call(small, given, args, kwargs))[0][0]

        assert torch.autograd.gradcheck(
            by_weights, [one.detach().clone().requires_grad_() for one in parameters], fast_mode=True
        )
        ran += 1
    assert ran, f"no sample of {name} was sketched"


@pytest.mark.parametrize("most", FEW)
@pytest.mark.parametrize("name", [name for name in LAYERS if name != "Embedding"])
def test_vmap(name, most):
    """Over an input: as one call after the other."""
    ran = 0
    for dense, small, args, kwargs in some_samples(name, torch.float32, most):
        x, call = first_float(args, kwargs)
        many = torch.stack([x, 2 * x, -x])

        def mapped(model, call=call, many=many):
            return torch.func.vmap(functools.partial(call, model), randomness="same")(many)

        found = outcome(mapped, small)
        if assert_alike("vmap", found, outcome(mapped, dense)):
            one_by_one = torch.stack([call(small, one) for one in many])
            torch.testing.assert_close(found[0][0], one_by_one, rtol=1e-4, atol=1e-4, equal_nan=True)
            ran += 1
    assert ran, f"no sample of {name} was mapped"


def compiled(model, args, kwargs):
    torch._dynamo.reset()
    return torch.compile(model, backend="aot_eager", fullgraph=True)(*args, **kwargs)


def exported(model, args, kwargs):
    return torch.export.export(model, args, kwargs).module()(*args, **kwargs)


GRAPHS = [
    pytest.param(name, way, id=f"{name}-{way.__name__}", marks=pytest.mark.slow if seldom else ())
    for name in LAYERS
    for way in (compiled, exported)
    for seldom in [name == "Conv1d" or (name, way) == ("MultiheadAttention", compiled)]
]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("most", [pytest.param(1, id="one"), FEW[1]])
@pytest.mark.parametrize(("name", "way"), GRAPHS)
def test_graphs(name, way, most):
    ran = 0
    for dense, small, args, kwargs in some_samples(name, torch.float32, most):
        with torch.no_grad():
            found = outcome(way, small, args, kwargs)
            if not assert_alike(way.__name__, found, outcome(way, dense, args, kwargs)):
                continue
            wanted = outcome(small, *args, **kwargs)
        for one, other in zip(found[0], wanted[0], strict=True):
            if isinstance(one, torch.Tensor):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, equal_nan=True)
        ran += 1
    assert ran, f"no sample of {name} was {way.__name__}"
