"""What a GPU would stop at is refused before."""

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from panther_compile.models.in_range import InRange

TABLE = torch.arange(12.0).view(4, 3)
BAG = nn.EmbeddingBag(4, 3, mode="sum")
LOOKUPS = {
    "embedding": lambda ids: nn.functional.embedding(ids, TABLE),
    "embedding_bag": lambda ids: BAG(ids[None]),
    "index": lambda ids: TABLE[ids],
    "index of the second dimension": lambda ids: TABLE.T[:, ids],
    "gather": lambda ids: TABLE.gather(0, ids[:, None]),
    "index_select": lambda ids: TABLE.index_select(0, ids),
    "scatter": lambda ids: TABLE.scatter(0, ids[:, None], 1.0),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_lookups(name):
    look, inside = LOOKUPS[name], torch.tensor([0, 3, 1])
    with torch.no_grad(), InRange():
        assert torch.equal(look(inside), look(inside))
        with pytest.raises(IndexError, match=r"looks up 0 to 4 of 4"):
            look(torch.tensor([0, 4, 1]))


def test_what_is_allowed():
    with InRange():
        assert torch.equal(TABLE[torch.tensor([-1])], TABLE[3:])
        assert torch.equal(TABLE[TABLE[:, 0] > 5], TABLE[2:])
        assert torch.equal(TABLE[None, torch.tensor([1])], TABLE[None, 1:2])
        assert TABLE[torch.tensor([], dtype=torch.long)].shape == (0, 3)
        assert torch.tensor(2.0).gather(0, torch.tensor(0)) == 2


def test_operators_of_higher_order_run():
    q = torch.randn(1, 2, 16, 8)
    with torch.no_grad(), InRange():
        found = flex_attention(q, q, q)
    torch.testing.assert_close(found, nn.functional.scaled_dot_product_attention(q, q, q))
