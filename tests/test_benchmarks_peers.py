"""Peers that look at blocks of a transformer, against their own equations."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

from peers import PEERS, aa_svd, basis_sharing, sola
from peers.budget import count_numbers
from peers.calibration import square_root
from peers.job import Job, NotDefinedError

LAYERS = (*(f"self_attn.{part}_proj" for part in ("q", "k", "v", "out")), "linear1", "linear2")
WIDTH, NEURONS = 32, 80


def job_of(blocks=4):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, NEURONS, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    names = tuple(f"layers.{block}.{layer}" for block in range(blocks) for layer in LAYERS)
    batches = list(torch.randn(32, 12, WIDTH).split(8))
    return Job(model, names, batches, tuple(f"layers.{block}" for block in range(blocks)), "values", 0)


def replaced_numbers(job, model):
    return sum(count_numbers(model.get_submodule(name)) for name in job.names)


@pytest.fixture(scope="module")
def job():
    return job_of()


@pytest.mark.parametrize("ratio", [0.9, 0.75, 0.5, 0.35])
@pytest.mark.parametrize("name", ["basis-sharing", "sola"])
def test_stores_what_the_others_do(job, name, ratio):
    small = PEERS[name].compress(job, ratio)
    saved = count_numbers(job.dense) - count_numbers(small)
    stored = replaced_numbers(job, job.dense) - saved
    assert 0.98 * ratio <= stored / replaced_numbers(job, job.dense) <= ratio
    with torch.no_grad():
        assert torch.isfinite(small(job.batches[0])).all()


@pytest.mark.parametrize("blocks", [3, 4])
def test_a_basis_is_that_of_two_blocks_and_of_what_reads_the_stream(blocks):
    job = job_of(blocks)
    small = basis_sharing.compress(job, 0.75)
    for layer in LAYERS:
        first = [small.get_submodule(f"layers.{block}.{layer}")[0] for block in range(blocks)]
        shared = layer not in ("self_attn.out_proj", "linear2")
        assert (first[0] is first[1]) == shared
        assert first[1] is not first[2]
        assert blocks == 3 or (first[2] is first[3]) == shared


def test_a_basis_leaves_out_the_smallest_singular_values_of_both_layers(job):
    group = "layers.0.linear1", "layers.1.linear1"
    left, right = basis_sharing._decompose(job, group)
    stacked = torch.cat([job.weight(name) for name in group])
    gram = sum(job.statistics[name].gram for name in group)
    values = torch.linalg.svdvals(stacked @ square_root(gram)[0])
    for rank in (4, 16):
        gone = stacked - left[:, :rank] @ right[:rank]
        lost = torch.einsum("oi,ij,oj->", gone, gram, gone)
        assert float(lost) == pytest.approx(float(values[rank:].square().sum()), 1e-3)


def test_coefficients_are_fitted_again_to_what_reaches_the_layers(job, monkeypatch):
    refitted = basis_sharing.compress(job, 0.5)
    monkeypatch.setattr(basis_sharing, "REFITTED", 0.0)
    first = basis_sharing.compress(job, 0.5)
    seen = {}
    for name in ("layers.2.linear1", "layers.3.linear1"):
        hook = first.get_submodule(name).register_forward_pre_hook(
            lambda _, given, name=name: seen.setdefault(name, []).append(given[0])
        )
        with torch.no_grad():
            for batch in job.batches:
                first(batch)
        hook.remove()
    inputs = torch.cat([x.flatten(0, -2) for rows in seen.values() for x in rows]).double()
    for name in seen:
        wanted = inputs @ job.weight(name).T
        errors = []
        for model in (first, refitted):
            down, up = model.get_submodule(name)
            errors.append(float((inputs @ (up.weight @ down.weight).double().T - wanted).norm()))
        assert errors[1] < 0.999 * errors[0]


def test_prime_neurons_stay_as_they_are(job):
    small = sola.compress(job, 0.5)
    count = int(sola.PRIME * NEURONS)
    for block in range(4):
        writer, reader = (small.get_submodule(f"layers.{block}.linear{i}") for i in (1, 2))
        power = job.statistics[f"layers.{block}.linear2"].magnitude
        prime = power.argsort(descending=True)[:count]
        dense = job.dense.get_submodule(f"layers.{block}")
        assert torch.equal(writer.prime.weight, dense.linear1.weight[prime])
        assert torch.equal(writer.prime.bias, dense.linear1.bias[prime])
        assert torch.equal(reader.prime.weight, dense.linear2.weight[:, prime])
        assert power[prime].min() >= power.sort().values[-count]


def test_all_is_exact_where_all_is_kept(job):
    small = sola.compress(job, 1.0)
    with torch.no_grad():
        for batch in job.batches:
            assert torch.allclose(small(batch), job.dense(batch), atol=1e-4)


def test_ranks_keep_the_most_energy_for_what_they_store(job):
    parts = sola._parts(job)
    budget = 0.5 * sum(part.matrix.numel() for part in parts.values())
    ranks = sola._ranks(parts, budget)
    kept, next_ones = [], []
    for name, part in parts.items():
        energies = part.factors[0].square().sum(0)
        worth = energies / energies.sum() / sum(part.matrix.shape)
        kept.append(float(worth[ranks[name] - 1]))
        if sum(part.matrix.shape) * (ranks[name] + 1) < part.matrix.numel():
            next_ones.append(float(worth[ranks[name]]))
    assert min(kept) > 0.95 * max(next_ones)


def test_what_they_are_not_defined_for():
    with pytest.raises(NotDefinedError, match="chain of blocks"):
        basis_sharing.compress(replace(job_of(2), blocks=()), 0.5)
    with pytest.raises(NotDefinedError, match="in blocks"):
        sola.compress(replace(job_of(2), blocks=()), 0.5)
    with pytest.raises(NotDefinedError, match="has 2"):
        sola.compress(replace(job_of(2), blocks=("layers",)), 0.5)
    with pytest.raises(NotDefinedError, match="prime neurons alone"):
        sola.compress(job_of(2), 0.05)
    conv = Job(nn.Sequential(nn.Conv2d(8, 8, 3)), ("0",), [torch.randn(2, 8, 6, 6)], (), "values", 0)
    for method in (basis_sharing, sola):
        with pytest.raises(NotDefinedError, match="linear layers"):
            method.compress(conv, 0.5)


class Masked(nn.Module):
    """An encoder that is told of padding by transformers' name."""

    def __init__(self):
        super().__init__()
        self.layers = job_of(2).model.layers

    def forward(self, x, attention_mask):
        hidden = torch.zeros(x.shape[1], x.shape[1]).masked_fill(attention_mask[0] == 0, -torch.inf)
        for layer in self.layers:
            x = layer(x, hidden)
        return x


@pytest.mark.parametrize("name", ["svd-llm", "fwsvd", "asvd", "kfac-svd", "zs-svd", "mpifa", "basis-sharing"])
def test_positions_of_padding_do_not_count(name):
    made = []
    model, mask = Masked().eval(), torch.ones(8, 12, dtype=torch.long)
    mask[:, 9:] = 0
    x = torch.randn(8, 12, WIDTH)
    for size in (1.0, 30.0):
        given = x.where(mask.bool()[..., None], size * torch.arange(WIDTH))
        job = replace(job_of(2), model=model, batches=[{"x": given, "attention_mask": mask}] * 2)
        small = PEERS[name].compress(job, 0.5)
        with torch.no_grad():
            made.append(small(x, mask)[mask.bool()])
    assert float((made[0] - made[1]).norm() / made[0].norm()) < 0.005  # of rounding in float32


def test_blocks_are_refined_to_what_is_no_padding():
    mask = torch.tensor([[1, 1, 0]])
    given, wanted = torch.randn(1, 3, 4), torch.randn(1, 3, 4)
    error = aa_svd._error(nn.Identity(), {"attention_mask": mask}, aa_svd.Call((given,), {}), wanted)
    assert float(error) == pytest.approx(float((given - wanted)[:, :2].square().mean()))
