import pytest
import torch

from panther_compile.errors import ConfigError, RankError, WeightError
from panther_compile.factorization.conv2d import (
    SCHEMES,
    BasisCandidate,
    Tucker2Candidate,
    conv_candidates,
    factorize_conv2d,
    is_multiplied_out,
    multiply_out,
    to_matrices,
)

SHAPE, GROUPS = (12, 4, 3, 2), 2  # O = 12, I = 8: per group 6 outputs, 4 inputs


def random_weight(shape=SHAPE, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def candidate_of(weight, groups, scheme):
    return next(found for found in conv_candidates(weight, groups) if found.scheme == scheme)


def numbers(kernels):
    return sum(kernel.numel() for kernel in kernels)


def test_multiply_out_is_the_sum_of_its_formula():
    u, c, v = torch.randn(12, 2), torch.randn(2, 2, 2, 3, 2), torch.randn(2, 2, 4)
    down, core, up = v.flatten(0, 1)[..., None, None], c.flatten(0, 1), u[..., None, None]
    wanted = torch.zeros(SHAPE)
    for o in range(12):
        for p in range(2):
            for q in range(2):
                wanted[o] += u[o, p] * torch.einsum("ab,i->iab", c[o // 6, p, q], v[o // 6, q])
    torch.testing.assert_close(multiply_out((down, core, up), 2, "tucker2"), wanted)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_full_rank_is_exact_balanced_and_float64(scheme, dtype, groups):
    weight = random_weight(dtype=dtype)
    o, i = 12 // groups, 4
    rank = {"channel": min(o, i * 6), "spatial": min(o * 2, i * 3), "tucker2": (i, o), "basis": 6}[scheme]
    found = factorize_conv2d(weight, groups, scheme, rank, generator=generator())
    assert found.error < 1e-13
    assert all(kernel.dtype == torch.float64 for kernel in found.kernels)
    norms = torch.stack([kernel.norm() for kernel in found.kernels])
    torch.testing.assert_close(norms, norms[:1].expand_as(norms))
    torch.testing.assert_close(multiply_out(found.kernels, groups, scheme), weight.double())


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("groups", [1, 2])
def test_candidates_count_and_predict_every_rank(scheme, groups):
    weight = random_weight()
    candidate = candidate_of(weight, groups, scheme)
    assert candidate.energies.shape == (candidate.max_rank,)
    assert candidate.energies.diff().min() >= 0
    assert float(candidate.energies[-1]) == pytest.approx(1.0)
    for rank in range(1, candidate.max_rank + 1):
        found = factorize_conv2d(weight, groups, scheme, rank, generator=generator())
        assert numbers(found.kernels) == candidate.numbers(rank)
        assert scheme == "basis" or candidate.macs(rank) == candidate.numbers(rank)
        exact = torch.dist(multiply_out(found.kernels, groups, scheme), weight) / weight.norm()
        assert found.error == pytest.approx(float(exact), abs=1e-12)
        if scheme == "tucker2":  # HOOI is no worse than the HOSVD of the prediction
            assert found.error <= candidate.error(rank) + 1e-7
        else:
            assert found.error == pytest.approx(candidate.error(rank), abs=1e-7)


def test_the_best_pair_of_a_rank_is_the_truncated_svd():
    weight = random_weight()
    for scheme in ("channel", "spatial", "basis"):
        sigma = torch.linalg.svdvals(to_matrices(weight, 1, scheme)[0])
        found = factorize_conv2d(weight, 1, scheme, 5, generator=generator())
        assert found.error == pytest.approx(float(sigma[5:].norm() / sigma.norm()))


def test_hooi_improves_on_hosvd():
    weight = random_weight((24, 16, 3, 3))
    candidate = candidate_of(weight, 1, "tucker2")
    found = factorize_conv2d(weight, 1, "tucker2", 8, generator=generator())
    assert found.error < candidate.error(8) - 1e-3


def test_tucker2_ranks_are_proportional():
    candidate = Tucker2Candidate((128, 32, 3, 3), 2)  # 64 outputs, 32 inputs a group
    assert candidate.max_rank == 64
    assert [candidate.ranks(rank) for rank in (1, 16, 17, 64)] == [(1, 1), (8, 16), (9, 17), (32, 64)]
    assert candidate.numbers(16) == 2 * (32 * 8 + 9 * 8 * 16 + 64 * 16)
    found = factorize_conv2d(random_weight((8, 4, 3, 3)), 1, "tucker2", (3, 2), generator=generator())
    assert [tuple(kernel.shape) for kernel in found.kernels] == [(3, 4, 1, 1), (2, 3, 3, 3), (8, 2, 1, 1)]


def test_tucker2_of_more_outputs_than_a_kernel_has_directions(monkeypatch):
    """As of a layer that predicts kernels: 64 inputs, 24,576 outputs; an eigendecomposition took hours."""
    eigh, sizes = torch.linalg.eigh, []
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: sizes.append(len(matrix[0])) or eigh(matrix))
    for shape, wide in (((600, 4, 3, 1), (4, 12)), ((4, 600, 1, 3), (12, 4))):
        weight = random_weight(shape)
        candidate = candidate_of(weight, 1, "tucker2")
        assert candidate.ranks(candidate.max_rank) == wide
        assert candidate.ranks(200) == (2, 6)[:: 1 if shape[0] == 600 else -1]
        assert len(candidate.energies) == 600
        assert candidate.energies[-1] == pytest.approx(1.0)
        for rank in (100, 200, 400):
            found = factorize_conv2d(weight, 1, "tucker2", rank, generator=generator())
            assert found.error <= candidate.error(rank) + 1e-9
        assert factorize_conv2d(weight, 1, "tucker2", 600, generator=generator()).error < 1e-6
    assert max(sizes) <= 36
    found = factorize_conv2d(random_weight((30, 4, 3, 1)), 1, "tucker2", (2, 20), generator=generator())
    assert [tuple(kernel.shape[:2]) for kernel in found.kernels] == [(2, 4), (20, 2), (30, 20)]


def test_a_basis_runs_its_filters_on_every_channel_or_is_multiplied_out():
    candidate = BasisCandidate((64, 32, 3, 3), 1)
    assert [candidate.macs(rank) for rank in (1, 4, 6, 9)] == [32 * 73, 32 * 4 * 73, 64 * 32 * 9, 64 * 32 * 9]
    assert [is_multiplied_out(rank, 9, 64) for rank in (1, 5, 6, 9)] == [False, False, True, True]


def test_groups_share_a_rank_and_add_their_energies():
    weight = torch.cat([10 * random_weight((6, 4, 3, 3)), random_weight((6, 4, 3, 3))])
    candidate = candidate_of(weight, 2, "channel")
    sigma = torch.linalg.svdvals(to_matrices(weight, 2, "channel"))
    wanted = sigma.square().cumsum(1).sum(0) / sigma.square().sum()
    torch.testing.assert_close(candidate.energies, wanted)


@pytest.mark.parametrize(
    ("shape", "groups", "schemes"),
    [
        ((8, 6, 1, 1), 1, ["pivoted"]),
        ((8, 3, 1, 1), 2, ["channel"]),
        ((8, 6, 3, 3), 1, ["channel", "spatial", "tucker2", "basis"]),
        ((8, 6, 1, 3), 1, ["channel", "spatial", "tucker2", "basis"]),
        ((8, 6, 3, 1), 1, ["channel", "tucker2", "basis"]),
        ((8, 1, 3, 3), 8, []),
    ],
)
def test_which_schemes_fit(shape, groups, schemes):
    for weight, energies in ((random_weight(shape), True), (torch.empty(shape, device="meta"), False)):
        found = conv_candidates(weight, groups, compute_energies=energies)
        assert [candidate.scheme for candidate in found] == schemes
        assert all((candidate.energies is None) != energies for candidate in found)


def test_largest_rank_uses_the_budget_and_no_more():
    for candidate in conv_candidates(random_weight((64, 32, 3, 3)), 1):
        for budget in (candidate.numbers(1), 5000, 9216, 18432):
            rank = candidate.largest_rank(budget)
            assert candidate.numbers(rank) <= budget < candidate.numbers(rank + 1)
        assert candidate.largest_rank(candidate.numbers(1) - 1) == 0


@pytest.mark.parametrize("scheme", SCHEMES)
def test_zero_weight(scheme):
    weight = torch.zeros(SHAPE)
    found = factorize_conv2d(weight, GROUPS, scheme, 2, generator=generator())
    assert found.error == 0.0
    assert all(bool(kernel.isfinite().all()) for kernel in found.kernels)
    assert not multiply_out(found.kernels, GROUPS, scheme).any()
    assert candidate_of(weight, GROUPS, scheme).error(1) == 0.0


def test_methods_pass_through():
    weight = random_weight((64, 32, 3, 3))
    best = factorize_conv2d(weight, 1, "channel", 16, method="svd", generator=generator())
    sketched = factorize_conv2d(
        weight, 1, "channel", 16, method="randomized", sketch="countsketch", generator=generator()
    )
    assert best.error < sketched.error < 1.03 * best.error
    norms = [float(kernel.norm()) for kernel in sketched.kernels]
    assert norms[0] == pytest.approx(norms[1])


def test_refusals():
    weight = random_weight()
    with pytest.raises(ConfigError, match="scheme='cp'"):
        factorize_conv2d(weight, 1, "cp", 2, generator=generator())
    with pytest.raises(ConfigError, match="method='magic'"):
        factorize_conv2d(weight, 1, "channel", 2, method="magic", generator=generator())
    with pytest.raises(RankError, match="takes one rank"):
        factorize_conv2d(weight, 1, "channel", (2, 2), generator=generator())
    for rank in (0, 13, (5, 2), (2, 13), (2,)):
        with pytest.raises(RankError, match="tucker2"):
            factorize_conv2d(weight, 1, "tucker2", rank, generator=generator())
    for bad in (torch.full(SHAPE, torch.inf), torch.empty(SHAPE, device="meta")):
        for scheme in SCHEMES:
            with pytest.raises(WeightError):
                factorize_conv2d(bad, 1, scheme, 2, generator=generator())
