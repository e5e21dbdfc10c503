"""The plain-PyTorch arithmetic against matrix products written out in float64."""

import ast
import inspect

import pytest
import torch
import torch.nn.functional as F

from panther_compile.kernels import reference

LEADING = [(), (1,), (5,), (2, 3), (2, 1, 3), (0,), (2, 0)]


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("leading", LEADING)
@pytest.mark.parametrize("with_bias", [False, True])
def test_pair_is_the_product(leading, with_bias):
    x, down, up = draw(*leading, 7), draw(3, 7), draw(4, 3)
    bias = draw(4) if with_bias else None
    y = reference.pair_linear(x, down, up, bias)
    wanted = F.linear(x, up @ down, bias)
    assert y.shape == (*leading, 4)
    torch.testing.assert_close(y, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("leading", LEADING)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("start", [0, 4])
def test_pivoted_is_the_product(leading, with_bias, start):
    x, down, up = draw(*leading, 7), draw(3, 4), draw(4, 3)
    bias = draw(4) if with_bias else None
    identity = torch.eye(3, dtype=torch.float64)
    right = torch.cat([identity, down] if start == 0 else [down, identity], dim=1)
    y = reference.pivoted_linear(x, down, up, bias, start=start)
    torch.testing.assert_close(reference.pivoted_linear_by_rows(x, down, up, bias, start=start), y)
    assert y.shape == (*leading, 4)
    torch.testing.assert_close(y, F.linear(x, up @ right, bias), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("start", [0, 4])
def test_pivoted_takes_inputs_that_are_not_contiguous(start):
    x, down, up = draw(7, 5).t(), draw(3, 4), draw(4, 3)
    y = reference.pivoted_linear(x, down, up, None, start=start)
    torch.testing.assert_close(y, reference.pivoted_linear(x.contiguous(), down, up, None, start=start))


@pytest.mark.parametrize("start", [0, 4])
def test_pivoted_changes_nothing_in_place(start):
    given = [draw(5, 7), draw(3, 4), draw(4, 3), draw(4)]
    copies = [t.clone() for t in given]
    reference.pivoted_linear(*given, start=start)
    assert all(torch.equal(a, b) for a, b in zip(given, copies, strict=True))


@pytest.mark.parametrize("start", [0, 4])
def test_pivoted_gradients(start):
    given = [t.requires_grad_() for t in (draw(5, 7), draw(3, 4), draw(4, 3), draw(4))]
    assert torch.autograd.gradcheck(lambda *a: reference.pivoted_linear(*a, start=start), given)
    assert torch.autograd.gradgradcheck(lambda *a: reference.pivoted_linear(*a, start=start), given)


def test_wrong_width_is_an_error():
    with pytest.raises(RuntimeError):
        reference.pivoted_linear(draw(2, 14), draw(3, 4), draw(4, 3), None, start=0)


def test_needs_torch_alone():
    tree = ast.parse(inspect.getsource(reference))
    modules = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    modules |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert all(name.split(".")[0] == "torch" for name in modules)
