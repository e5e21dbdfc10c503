"""The zoo itself, before anything is sketched: a failure here is the zoo's, not the library's."""

from __future__ import annotations

import copy
import functools
import warnings

import pytest
import torch
from torch import Tensor, nn
from zoo import NEW_TOKENS, ZOO, call, generate, generating, names, scalar, tensors

pytestmark = pytest.mark.slow

EXPECTED = 27


@functools.cache
def pristine(name: str) -> nn.Module:
    """One model for the tests that only read it."""
    return ZOO[name].build()


@torch.no_grad()
def outputs(model: nn.Module, name: str) -> list[Tensor]:
    return tensors(call(model, ZOO[name].inputs()))


def assert_same(left: list[Tensor], right: list[Tensor]) -> None:
    assert len(left) == len(right) > 0
    for one, other in zip(left, right, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def every_model(function):
    return pytest.mark.parametrize("name", names(), ids=names())(function)


def test_the_zoo_is_complete():
    assert len(names()) == EXPECTED
    assert generating() == ["gpt2", "llama", "mistral", "mixtral", "t5", "bart", "whisper"]
    assert all(name == entry.name for name, entry in ZOO.items())


@every_model
def test_builds_the_same_model_every_time_and_leaves_the_random_state_alone(name):
    state = torch.get_rng_state()
    again = ZOO[name].build()
    assert torch.equal(torch.get_rng_state(), state)
    assert not again.training
    first, second = pristine(name).state_dict(), again.state_dict()
    assert list(first) == list(second)
    for key, value in first.items():
        torch.testing.assert_close(value, second[key], rtol=0, atol=0, equal_nan=True, msg=key)


@every_model
def test_has_a_layer_worth_compressing(name):
    model = pristine(name)
    assert sum(p.numel() for p in model.parameters()) < 1_500_000
    assert any(p.ndim >= 2 and p.numel() >= 32 * 32 and min(p.shape[:2]) >= 16 for p in model.parameters())


@every_model
def test_forward_is_deterministic_finite_and_quiet(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for pattern in ZOO[name].warns:
            warnings.filterwarnings("ignore", message=pattern)
        first = outputs(pristine(name), name)
    assert_same(first, outputs(pristine(name), name))
    assert all(torch.isfinite(tensor).all() for tensor in first)
    assert any(tensor.std() > 1e-3 for tensor in first if tensor.numel() > 1)


def distance(left: list[Tensor], right: list[Tensor]) -> float:
    """The largest relative distance of two outputs, over their tensors."""
    return max(
        ((one - other).norm() / other.norm()).item()
        for one, other in zip(left, right, strict=True)
        if one.numel() > 1
    )


@every_model
def test_the_rows_of_the_output_differ(name):
    """An output that ignores its input must not pass for right."""
    batched = [tensor for tensor in outputs(pristine(name), name) if tensor.ndim > 1]
    assert distance([tensor[:1] for tensor in batched], [tensor[1:2] for tensor in batched]) > 0.1


@every_model
def test_every_parameter_has_a_gradient_that_matters(name):
    """A wrong layer cannot hide: to first order, each matrix moves the loss."""
    entry = ZOO[name]
    model = entry.build()
    loss = entry.loss(call(model, entry.inputs()))
    assert loss.ndim == 0
    loss.backward()
    without, silent = [], {}
    for key, parameter in model.named_parameters():
        if key.startswith(entry.no_grad or ("(none)",)):
            assert parameter.grad is None, key
        elif parameter.grad is None or not parameter.grad.any():
            without.append(key)
        else:
            assert torch.isfinite(parameter.grad).all(), key
            effect = (parameter.grad.norm() * parameter.detach().norm() / loss.detach()).item()
            if parameter.ndim >= 2 and effect < 1e-3:
                silent[key] = effect
    assert without == []
    assert silent == {}


@every_model
def test_train_mode_is_deterministic(name):
    """No dropout, layer drop, stochastic depth or masking: two training forwards agree."""
    model = ZOO[name].build().train()
    assert_same(outputs(model, name), outputs(model, name))


@pytest.mark.slow
@every_model
def test_a_step_of_training_lowers_the_loss(name):
    entry = ZOO[name]
    model = entry.build().train()
    inputs = entry.inputs()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = entry.loss(call(model, inputs))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@every_model
def test_a_deep_copy_is_equal_and_independent(name):
    model = ZOO[name].build()
    twin = copy.deepcopy(model)
    assert type(twin) is type(model)
    before = outputs(model, name)
    assert_same(before, outputs(twin, name))
    assert {p.data_ptr() for p in model.parameters()}.isdisjoint(p.data_ptr() for p in twin.parameters())
    assert len(list(twin.parameters())) == len(list(model.parameters()))  # ties are kept
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert_same(before, outputs(model, name))


@pytest.mark.parametrize("name", generating(), ids=generating())
def test_generates_greedily_and_deterministically(name):
    entry, model = ZOO[name], pristine(name)
    first = generate(model, entry)
    assert torch.equal(first, generate(model, entry))
    inputs = entry.inputs()
    encodes = any(key.startswith("decoder_") for key in inputs)
    prompt = 0 if encodes else inputs["input_ids"].shape[1]
    assert first.shape[0] == 2
    assert NEW_TOKENS <= first.shape[1] - prompt <= NEW_TOKENS + 1
    assert not torch.equal(first[0], first[1])


def test_inputs_are_deterministic():
    for name, entry in ZOO.items():
        one, other = entry.inputs(), entry.inputs()
        one = list(one.values()) if isinstance(one, dict) else list(one)
        other = list(other.values()) if isinstance(other, dict) else list(other)
        for left, right in zip(one, other, strict=True):
            assert torch.equal(left, right), name


@torch.no_grad()
def test_early_exit_takes_both_ways():
    model = pristine("early_exit")
    (x,) = ZOO["early_exit"].inputs()
    assert model(x)[1] == len(model.blocks)
    assert model(100 * x)[1] == 1


def test_tied_autoencoder_shares_what_it_says():
    for model in (pristine("tied_autoencoder"), copy.deepcopy(pristine("tied_autoencoder"))):
        assert model.mix is model.unmix
        assert model.gate_in is not model.gate_out
        assert model.gate_in.weight is model.gate_out.weight


def test_scalar_and_tensors_read_nested_outputs():
    x, y = torch.ones(2), torch.zeros(3)
    nested = {"a": x, "b": (torch.tensor(1), [y, None]), "c": "text"}
    assert [id(tensor) for tensor in tensors(nested)] == [id(x), id(y)]
    assert scalar(nested) == scalar(x) + scalar(y)
    with pytest.raises(ValueError, match="no floating tensor"):
        scalar({"a": torch.tensor(1)})
