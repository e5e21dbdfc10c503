"""The samples that torch tests its own layers with: sketched, a layer takes what the dense one takes."""

import copy

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_map

import panther_compile as pc
from panther_compile.errors import NoTargetError

pytest.importorskip("expecttest", reason="torch's samples need expecttest, which `make test` installs")

with pytest.MonkeyPatch.context() as _patch:
    # Its import freezes the flags of torch.backends, for every test of this process.
    _patch.setattr(torch.backends, "disable_global_flags", lambda: None)
    from torch.testing._internal.common_modules import module_db

LAYERS = (
    "Linear",
    "Conv1d",
    "Conv2d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "MultiheadAttention",
    "Embedding",
)
INFOS = {info.module_cls.__name__: info for info in module_db if info.module_cls.__name__ in LAYERS}
OPTIONS = {"include": "*", "min_params": 0, "allow_slower": True, "progress": False}


def samples(name, dtype, training):
    """(dense, sketched, positional, keyword arguments) of each sample whose layer is large enough."""
    info = INFOS[name]
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


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LAYERS)
def test_calls(name, dtype, training):
    ran = 0
    for dense, small, args, kwargs in samples(name, dtype, training):
        wanted = outcome(dense, *args, **kwargs)
        ran += assert_alike("called", outcome(small, *args, **kwargs), wanted)
        with torch.no_grad():
            found = outcome(small, *args, **kwargs)
            assert_alike("without gradients", found, outcome(dense, *args, **kwargs))
    assert ran, f"no sample of {name} was sketched"


@pytest.mark.parametrize("name", LAYERS)
def test_under_autocast(name):
    ran = 0
    for dense, small, args, kwargs in samples(name, torch.float32, False):
        with torch.autocast("cpu", torch.bfloat16):
            found, wanted = outcome(small, *args, **kwargs), outcome(dense, *args, **kwargs)
        ran += assert_alike("under autocast", found, wanted)
    assert ran, f"no sample of {name} was sketched"


@pytest.mark.parametrize("name", LAYERS)
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
