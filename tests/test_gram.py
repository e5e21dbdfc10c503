"""xᵀ x in blocks: the numbers of the whole product."""

import pytest
import torch

from panther_compile.factorization.gram import gram


@pytest.mark.parametrize("features", [1, 7, 512, 513, 1100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_blocks_are_the_whole_product(features, dtype):
    rows = torch.randn(37, features, dtype=dtype)
    found, wanted = gram(rows), rows.double().T @ rows.double()
    assert found.dtype == dtype
    assert (found - wanted).abs().max() <= 37 * torch.finfo(dtype).eps * wanted.abs().max()


def test_rows_of_no_number():
    assert torch.equal(gram(torch.zeros(0, 600)), torch.zeros(600, 600))
