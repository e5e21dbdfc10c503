"""Tensor-parallel stages on real processes: exact, and with the collectives that were planned."""

from itertools import product
from math import prod

import pytest
import torch
import torch.nn.functional as F
from parallel import tensor_jobs
from parallel.prepared import prepares

from panther_compile import partition_model
from panther_compile.parallel.agreement import digest
from panther_compile.parallel.shard_functions import embed_vocabulary, pivoted_columns, pivoted_rows
from panther_compile.partition.shards.layers import local_pivots

SLOW = pytest.mark.slow
# Of each form one; the others run on shards of the sequence, in stages or on four ranks.
MODELS = [
    *(("mlp", False), ("mlp", True)),
    *(pytest.param(*one, marks=SLOW) for one in product(("encoder", "bert", "gpt2", "vit"), (False, True))),
]


def checked(tp=2, **fixed):
    """The plan that `tensor_jobs.check` asks for in each case of a test."""
    usual = {"tp": tp, **tensor_jobs.USUAL, **fixed}
    return prepares(tensor_jobs.plan_shards, lambda **given: {**usual, **given})


@pytest.fixture
def two(ranks):
    return ranks(2)


@pytest.fixture
def four(ranks):
    return ranks(4)


@checked(sequence=False)
@pytest.mark.parametrize(("name", "sketched"), MODELS)
def test_shards_are_the_model(two, name, sketched):
    seen, _ = two.run(tensor_jobs.check, name=name, sketched=sketched, sequence=False)
    assert seen.shards > 0
    assert {"column", "row"} <= seen.kinds
    assert "sequence" not in seen.kinds
    assert all(whole == here for whole, here in seen.norms)


@checked(name="namesakes")
@pytest.mark.parametrize("pp", [1, 2])
def test_a_parameter_may_have_the_name_of_a_result(two, pp):
    seen, _ = two.run(tensor_jobs.check, name="namesakes", pp=pp)
    assert {"column", "row"} <= seen.kinds


@checked(name="halves", pp=2)
def test_what_a_stage_is_given_may_have_the_name_of_what_it_makes(two):
    seen, _ = two.run(tensor_jobs.check, name="halves", pp=2)
    assert {"column", "row", "sequence"} <= seen.kinds


@checked(name="bert", sketched="narrow")
@pytest.mark.parametrize("sequence", [pytest.param(False, marks=SLOW), True])
def test_narrow_layers_are_sharded(two, sequence):
    seen, _ = two.run(tensor_jobs.check, name="bert", sketched="narrow", sequence=sequence)
    assert {"column", "row"} <= seen.kinds


@checked(sequence=True)
@pytest.mark.parametrize(
    "name", ["encoder", *(pytest.param(name, marks=SLOW) for name in ("bert", "gpt2", "vit"))]
)
def test_sequence_parallelism_is_the_model(two, name):
    """Norms see their rows of the sequence; sums are scattered and gathered where they were all-reduced."""
    seen, _ = two.run(tensor_jobs.check, name=name, sequence=True)
    assert {"column", "row", "sequence"} <= seen.kinds
    assert len(seen.norms) >= 4
    assert all(prod(here) * 2 == prod(whole) and here[-1] == whole[-1] for whole, here in seen.norms)
    assert seen.planned["forward", "reduce_scatter"] >= 4
    assert seen.planned["forward", "all_gather"] >= 4
    assert seen.planned["backward", "reduce_scatter"] >= 3
    assert seen.planned["backward", "all_gather"] >= 4
    assert seen.planned["forward", "all_reduce"] <= 1  # of BERT's pooled row, which is of no sequence


@checked(sketched=True)
@pytest.mark.parametrize(("name", "sequence"), [pytest.param("bert", True, marks=SLOW), ("gpt2", "auto")])
def test_sequence_parallelism_of_sketched_layers(two, name, sequence):
    seen, _ = two.run(tensor_jobs.check, name=name, sketched=True, sequence=sequence)
    assert {"column", "row"} <= seen.kinds
    assert seen.planned["forward", "reduce_scatter"] > 0


def test_plans_with_and_without_sequences_differ():
    model, inputs = tensor_jobs.Dropping(), torch.randn(4, 8, 16)
    plans = [
        partition_model(
            model, inputs, mesh={"tp": 2}, hardware=tensor_jobs.HARDWARE["eager"], sequence_parallel=sequence
        )
        for sequence in (False, True)
    ]
    assert plans[1].sequence
    assert digest(model, plans[0], {}) != digest(model, plans[1], {})


@pytest.mark.parametrize("sequence", [True, False])
def test_dropout_of_shards_is_that_of_one_process(two, sequence):
    two.run(tensor_jobs.check_dropout, sequence=sequence)


@SLOW
def test_with_fewer_shards(two):
    everything = two.run(tensor_jobs.check, name="encoder")[0]
    some = two.run(tensor_jobs.check, name="encoder", hardware="usual")[0]
    assert some.shards < everything.shards


@checked()
@pytest.mark.parametrize(
    ("name", "pp", "sequence"),
    [*(pytest.param("bert", 2, sequence, marks=SLOW) for sequence in (True, False)), ("gpt2", 3, True)],
)
def test_stages_of_shards(two, name, pp, sequence):
    """Cuts fall behind what lies in shards of features and of the sequence."""
    two.run(tensor_jobs.check, name=name, pp=pp, sequence=sequence)


@SLOW
@pytest.mark.parametrize(("name", "sequence"), [("gpt2", False), ("encoder", True)])
def test_four_ranks(four, name, sequence):
    seen, *_ = four.run(tensor_jobs.check, name=name, sequence=sequence)
    assert {"column", "row"} <= seen.kinds
    assert ("sequence" in seen.kinds) == sequence
    assert not sequence or all(prod(here) * 4 == prod(whole) for whole, here in seen.norms)


@prepares(tensor_jobs.plan_replicas, lambda data_parallel: {})
@pytest.mark.parametrize("data_parallel", [pytest.param("ddp", marks=SLOW), "fsdp"])
def test_replicas_of_shards(four, data_parallel):
    four.run(tensor_jobs.check_replicas, data_parallel=data_parallel)


def test_what_does_not_fit_is_refused(two):
    two.run(tensor_jobs.check_refusals)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(("rank", "at_the_end"), [(4, False), (4, True), (20, False), (20, True), (8, True)])
def test_terms_of_the_pivoted_form(rank, at_the_end, tp):
    """By rows the terms of all ranks add up, by columns their features do; wherever the slices fall."""
    size = 24
    x, weight = torch.randn(3, size).double(), torch.randn(rank, size - rank).double()
    start = size - rank if at_the_end else 0
    pivots, others = (start, start + rank), (0, start) if at_the_end else (rank, size)
    z = x[:, slice(*pivots)] + x[:, slice(*others)] @ weight.t()
    total, features = torch.zeros_like(z), []
    for number, own in enumerate(x.chunk(tp, dim=1)):
        *ranges, offset = local_pivots(pivots, size, tp, number)
        total += pivoted_rows(own, weight, *((one.start, one.stop) for one in ranges), offset)
        rows = weight.chunk(tp)[number]
        features.append(pivoted_columns(x, rows, start + rank // tp * number, others))
    torch.testing.assert_close(total, z)
    torch.testing.assert_close(torch.cat(features, dim=1), z)


@pytest.mark.parametrize("padding", [-1, 0, 5])
def test_terms_of_an_embedding(padding):
    indices, whole = torch.tensor([[0, 5, 3], [5, 2, 7]]), torch.randn(8, 4)
    table, parts = whole.clone().requires_grad_(), [part.clone().requires_grad_() for part in whole.chunk(2)]
    wanted = F.embedding(indices, table, padding if padding >= 0 else None)
    found = sum(embed_vocabulary(indices, part, 4 * rank, padding) for rank, part in enumerate(parts))
    torch.testing.assert_close(found, wanted)
    weights = torch.randn_like(wanted)
    (wanted * weights).sum().backward()
    (found * weights).sum().backward()
    torch.testing.assert_close(torch.cat([part.grad for part in parts]), table.grad)


@pytest.mark.slow
@pytest.mark.parametrize("sketched", [False, True], ids=["dense", "sketched"])
@pytest.mark.parametrize("name", ["llama", "t5", "bart", "mixer", "tied_autoencoder", "clip", "resnet"])
def test_other_models(two, name, sketched):
    two.run(tensor_jobs.check, name=name, sketched=sketched, double=True)
