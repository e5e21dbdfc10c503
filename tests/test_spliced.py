"""Texts of parts of several."""

from itertools import pairwise

import pytest
import torch

from panther_compile.models.batches import Call, interleaved, spread_out
from panther_compile.models.spliced import MOST_TEXTS, PARTS, SHORTEST, STEPS, spliced

MANY = 1_000_000


def numbered(texts, tokens):
    """Each number says of which text and which place it is."""
    return 1000 * torch.arange(texts)[:, None] + torch.arange(tokens)


@pytest.mark.parametrize("tokens", [8, 9])
def test_the_second_half_is_that_of_another_text(tokens):
    ids = numbered(5, tokens)
    mask = (ids % 1000 < tokens - 1).float()
    found = list(spliced([Call((), {"input_ids": ids, "attention_mask": mask, "return_dict": True})], MANY))
    half = tokens // 2
    for call, others in zip(found, ([1, 2, 3, 4, 0], [3, 4, 0, 1, 2]), strict=True):
        given = call.kwargs["input_ids"]
        assert torch.equal(given[:, :half], ids[:, :half])
        assert torch.equal(given[:, half:], ids[others, half:])
        assert torch.equal(call.kwargs["attention_mask"], (given % 1000 < tokens - 1).float())
        assert call.kwargs["return_dict"] is True


def test_each_part_of_a_long_text_is_of_another_one():
    ids = numbered(MOST_TEXTS + 3, 40)
    found = list(spliced([Call((ids,), {})], MANY))
    for step, call in zip(STEPS, found, strict=True):
        assert torch.equal(call.args[0] % 1000, ids % 1000)  # all are where they were
        sources = (call.args[0] // 1000 - torch.arange(len(ids))[:, None]) % len(ids)
        texts = step * torch.arange(PARTS)
        assert torch.equal(sources, texts.repeat_interleave(40 // PARTS).expand(len(ids), -1))


@pytest.mark.parametrize("texts", [2, 3, 4, 5, 6, 32])
def test_no_two_parts_are_beside_one_another_twice(texts):
    ids = numbered(texts, 40)
    found = torch.cat([call.args[0] for call in spliced([Call((ids,), {})], MANY)])
    edges = range(40 // PARTS, 40, 40 // PARTS)
    pairs = [(int(row[edge - 1]), int(row[edge])) for row in found for edge in edges]
    assert len(pairs) == len(set(pairs))


def test_batches_of_one_take_parts_of_the_next_batches():
    one, two = torch.arange(12)[None], 100 + torch.arange(9)[None]
    first, second = spliced([Call((one,), {}), Call((two,), {})], MANY)
    assert torch.equal(first.args[0], torch.cat([one[:, :4], two[:, 3:6], one[:, 8:]], 1))
    assert torch.equal(second.args[0], torch.cat([two[:, :4], one[:, 6:]], 1))


def test_none_is_longer_than_the_longest():
    texts = [torch.full((1, tokens), place) for place, tokens in enumerate((64, 63, 61, 59, 57, 63, 62, 61))]
    found = list(spliced([Call((ids,), {}) for ids in texts], MANY))
    assert len(found) == 2 * len(texts)
    assert max(call.args[0].shape[1] for call in found) <= 64
    assert all(len(call.args[0].unique()) == PARTS for call in found)


@pytest.mark.parametrize(
    "call",
    [
        Call((torch.randn(4, 16),), {}),
        Call((torch.zeros(4, 3, 16, 16, dtype=torch.long),), {}),
        Call((numbered(4, SHORTEST - 1),), {}),
        Call((numbered(4, 16), torch.randn(4, 80, 16)), {}),
        Call((numbered(4, 16),), {"decoder_input_ids": numbered(4, 12)}),
        Call((numbered(1, 16),), {}),
        Call((), {}),
    ],
    ids=["numbers", "pictures", "short", "sounds and texts", "two of texts", "a single text", "nothing"],
)
def test_what_is_no_text_is_left_out(call):
    assert list(spliced([call], MANY)) == []


def test_any_stretch_of_what_is_spread_out_is_from_everywhere():
    assert sorted(spread_out(range(40))) == list(range(40))
    for count in (8, 15, 40, 101):
        order = spread_out(range(count))
        for stretch in (order[: count // 4], order[-(count // 5) :]):
            gaps = [b - a for a, b in pairwise([-1, *sorted(stretch), count])]
            assert max(gaps) <= 3 * count / (len(stretch) + 1)
    assert spread_out([7]) == [7]


def test_of_many_they_are_some_from_everywhere():
    calls = [Call((10_000 * place + numbered(4, 10),), {}) for place in range(12)]
    found = [int(call.args[0][0, 0]) // 10_000 for call in spliced(calls, 12 * 4 * 10 // 3)]
    assert found == [0, 3, 6, 9]
    found = [int(call.args[0][0, 0]) // 10_000 for call in spliced(calls, 15 * 4 * 10)]
    assert found == [*range(12), 0, 4, 8]


def test_kinds_of_calls_are_evenly_mixed():
    kinds = [[Call((name, place), {}) for place in range(count)] for name, count in (("a", 4), ("b", 2))]
    assert "".join(call.args[0] for call in interleaved(*kinds)) == "abaaba"
    assert [call.args[1] for call in interleaved(*kinds) if call.args[0] == "a"] == [0, 1, 2, 3]
