"""Tensor-parallel stages on real processes: exact, and with the collectives that were planned."""

import pytest
from parallel import tensor_jobs
from parallel.ranks import Ranks

MODELS = ["mlp", "bert", "gpt2", "vit", "encoder"]


@pytest.fixture(scope="module")
def two():
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def four():
    ranks = Ranks(4)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("sketched", [False, True], ids=["dense", "sketched"])
@pytest.mark.parametrize("name", MODELS)
def test_shards_are_the_model(two, name, sketched):
    (count, kinds), _ = two.run(tensor_jobs.check, name=name, sketched=sketched)
    assert count > 0
    assert {"column", "row"} <= kinds


def test_with_fewer_shards(two):
    everything = two.run(tensor_jobs.check, name="gpt2")[0]
    some = two.run(tensor_jobs.check, name="gpt2", hardware="usual")[0]
    assert some[0] < everything[0]


def test_stages_of_shards(two):
    two.run(tensor_jobs.check, name="bert", pp=2)


def test_four_ranks(four):
    (count, kinds), *_ = four.run(tensor_jobs.check, name="bert")
    assert count > 0
    assert {"column", "row"} <= kinds


@pytest.mark.parametrize("data_parallel", ["ddp", "fsdp"])
def test_replicas_of_shards(four, data_parallel):
    four.run(tensor_jobs.check_replicas, data_parallel=data_parallel)


def test_what_does_not_fit_is_refused(two):
    two.run(tensor_jobs.check_refusals)


@pytest.mark.slow
@pytest.mark.parametrize("sketched", [False, True], ids=["dense", "sketched"])
@pytest.mark.parametrize("name", ["llama", "t5", "bart", "mixer", "tied_autoencoder", "clip", "resnet"])
def test_other_models(two, name, sketched):
    two.run(tensor_jobs.check, name=name, sketched=sketched, double=True)
