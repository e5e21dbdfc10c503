"""Products of half types in float32: the same numbers to one rounding."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from panther_compile.models import half_products


@pytest.fixture
def without_products(monkeypatch):
    """A processor without products of half types."""
    monkeypatch.setattr(half_products, "_has_products", lambda kind: False)


CASES = {
    "mm": lambda x, w: x @ w,
    "linear": lambda x, w: F.linear(x, w.T, torch.arange(48.0).to(x.dtype)),
    "added": lambda x, w: torch.addmm(torch.ones(7, 1, dtype=x.dtype), x, w, beta=0.5, alpha=2.0),
    "bmm": lambda x, w: torch.bmm(x.expand(3, 7, 32), w.expand(3, 32, 48)),
    "baddbmm": lambda x, w: torch.baddbmm(x.new_ones(48), x.expand(3, 7, 32), w.expand(3, 32, 48)),
    "empty": lambda x, w: x[:0] @ w,
}


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_one_rounding_from_float64(name, kind, without_products, monkeypatch):
    monkeypatch.setattr(half_products, "_BLOCK", 32 * 20)  # blocks of 20 columns, the last one of 8
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(7, 32, generator=draws).to(kind).requires_grad_()
    w = torch.randn(32, 48, generator=draws).to(kind).requires_grad_()
    exact = [one.detach().double().requires_grad_() for one in (x, w)]
    with half_products.half_products(nn.Linear(2, 2).to(kind)):
        out = CASES[name](x, w)
        (out * out.detach()).sum().backward()
    wanted = CASES[name](*exact)
    (wanted * out.detach().double()).sum().backward()
    close = {"rtol": torch.finfo(kind).eps, "atol": 1e-2 * torch.finfo(kind).eps * 32}
    assert out.dtype == kind
    assert_close(out.double(), wanted, **close)
    for found, true in zip((x, w), exact, strict=True):
        if name in ("bmm", "baddbmm"):  # torch adds the three gradients in half types
            close = {"rtol": 4 * torch.finfo(kind).eps, "atol": 1.0}
        assert_close(found.grad.double(), true.grad, **close)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_convolutions_are_one_rounding_from_float64(kind, bias, without_products):
    torch.manual_seed(0)
    half = nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2, bias=bias).to(kind)
    exact = copy.deepcopy(half).double()
    x = torch.randn(2, 4, 9, 9).to(kind)
    with half_products.half_products(half):
        out = half(x)
        out.square().sum().backward()
    wanted = exact(x.double())
    (2 * out.detach().double() * wanted).sum().backward()
    assert out.dtype == kind
    assert_close(out.double(), wanted, rtol=torch.finfo(kind).eps, atol=torch.finfo(kind).eps)
    for found, true in zip(half.parameters(), exact.parameters(), strict=True):
        assert_close(found.grad.double(), true.grad, rtol=4 * torch.finfo(kind).eps, atol=0.05)


def test_no_other_model_is_touched(without_products):
    before = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    for model in (nn.Linear(2, 2), nn.Linear(2, 2, device="meta", dtype=torch.bfloat16), nn.ReLU()):
        with half_products.half_products(model):
            assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == before


def test_factors_of_two_types_are_refused_as_ever(without_products):
    layers = nn.Linear(4, 4).to(torch.bfloat16), nn.Conv1d(4, 4, 1).to(torch.bfloat16)
    for layer in layers:
        with half_products.half_products(layer), pytest.raises(RuntimeError, match="type"):
            layer(torch.randn(4, 4))
