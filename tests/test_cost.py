import pytest

from panther_compile.factorization.candidates import LinearCandidate
from panther_compile.factorization.conv2d import ChannelCandidate, SpatialCandidate, Tucker2Candidate
from panther_compile.factorization.cost import (
    CPU,
    CUDA,
    STEM_SPEEDUP,
    WORTHWHILE,
    Device,
    dense_products,
    finest_step,
    rank_step,
    seconds,
    sketched_products,
    speedup,
)


def at_ratio(kind, shape, ratio, **options):
    candidate = kind(shape, 1)
    rank = candidate.largest_rank(int(ratio * shape[0] * shape[1] * shape[2] * shape[3]))
    return speedup(candidate, rank, shape, **options)


def linear_at(features, ratio, **options):
    candidate = LinearCandidate(features, features, "pivoted")
    rank = candidate.largest_rank(int(ratio * features**2))
    return speedup(candidate, rank, (features, features), **options)


def test_dense_linear_by_hand():
    (stage,) = dense_products((48, 20), 1, (1, 1), 7)
    assert (stage.macs, stage.activations, stage.weights) == (7 * 48 * 20, 7 * 68, 960)
    device = Device(100.0, 40.0, 80.0, 0.5, 1)
    assert seconds((stage, stage), device) == 2 * (0.5 + 67.2 + 4 * 7 * 68 / 40 + 4 * 960 / 80)


def test_output_channels_are_counted_in_blocks_of_sixteen():
    macs = [dense_products((o, 8, 3, 3), 1, (1, 1), 1)[0].macs for o in (1, 16, 17, 32)]
    assert macs == [1152, 1152, 2304, 2304]
    (grouped,) = dense_products((40, 8, 1, 1), 2, (1, 1), 1)  # 20 a group, 16 inputs in all
    assert (grouped.macs, grouped.activations) == (2 * 8 * 32, 56)


@pytest.mark.parametrize(
    ("scheme", "ranks", "macs"),
    [
        ("channel", (16,), [5 * 16 * 32 * 9, 5 * 16 * 64]),
        ("spatial", (16,), [15 * 16 * 32 * 3, 5 * 16 * 64 * 3]),
        ("tucker2", (16, 32), [30 * 16 * 32, 5 * 16 * 32 * 9, 5 * 32 * 64]),
    ],
)
def test_stages_ahead_of_a_stride_see_more_positions(scheme, ranks, macs):
    stages = sketched_products(scheme, ranks, (64, 32, 3, 3), 1, (2, 3), 5)
    assert [stage.macs for stage in stages] == macs
    assert stages[0].activations > 30 * 32
    assert sum(stage.weights for stage in stages) == sum(
        {"channel": (4608, 1024), "spatial": (1536, 3072), "tucker2": (512, 4608, 2048)}[scheme]
    )


def test_pivoted_multiplies_by_what_it_stores():
    stages = sketched_products("pivoted", (16,), (64, 48), 1, (1, 1), 10)
    assert sum(stage.weights for stage in stages) == LinearCandidate(64, 48, "pivoted").numbers(16)
    assert stages[0].activations == 10 * (48 + 16 + 16)


def test_measured_winners_and_losers():
    # Measured speed-ups on one core at batch 1 and 32: .83 and .85 strided, 1.15 to 1.18 not.
    shape = (128, 128, 3, 3)
    assert at_ratio(SpatialCandidate, shape, 0.75, stride=(2, 2)) < WORTHWHILE
    assert at_ratio(Tucker2Candidate, shape, 0.75, stride=(2, 2)) < WORTHWHILE
    assert at_ratio(ChannelCandidate, shape, 0.75, stride=(2, 2)) > WORTHWHILE
    for kind in (ChannelCandidate, SpatialCandidate, Tucker2Candidate):
        assert at_ratio(kind, shape, 0.75) > WORTHWHILE
        assert at_ratio(kind, shape, 0.5) > 1.4
        assert at_ratio(kind, shape, 0.25) > 2.2


@pytest.mark.parametrize(
    ("features", "rows", "ratio", "measured"),
    [
        (768, 1, 0.75, 0.87),
        (768, 1, 0.5, 1.12),
        (768, 1, 0.25, 1.86),
        (384, 1, 0.75, 0.71),
        (384, 1, 0.5, 0.82),
        (384, 1, 0.25, 0.99),
        (384, 32, 0.5, 1.35),
        (384, 512, 0.25, 3.3),
    ],
)
def test_linear_layers_as_measured(features, rows, ratio, measured):
    assert linear_at(features, ratio, positions=rows) == pytest.approx(measured, rel=0.3)


def test_speedup_grows_as_the_rank_falls():
    candidate = ChannelCandidate((256, 256, 3, 3), 1)
    predicted = [speedup(candidate, rank, (256, 256, 3, 3)) for rank in range(16, 257, 16)]
    assert predicted == sorted(predicted, reverse=True)
    assert predicted[-1] < 1 < predicted[0]


def test_a_launch_dominates_on_a_gpu_with_few_rows():
    assert linear_at(256, 0.25, positions=1, device=CUDA) == pytest.approx(0.5, rel=0.05)
    assert linear_at(4096, 0.25, device=CUDA) > 2
    assert CPU.positions < CUDA.positions


def test_rank_steps():
    assert rank_step(ChannelCandidate((64, 64, 3, 3), 1)) == 16
    assert rank_step(ChannelCandidate((64, 64, 3, 3), 2)) == 1
    assert rank_step(LinearCandidate(768, 768, "pivoted")) == 8
    assert rank_step(LinearCandidate(64, 64, "pivoted")) == 4
    assert rank_step(LinearCandidate(16, 64, "pair")) == 1
    assert rank_step(LinearCandidate(768, 768, "pivoted"), CUDA) == 16
    assert rank_step(LinearCandidate(4096, 4096, "pivoted"), CUDA) == 64
    assert rank_step(LinearCandidate(16, 64, "pair"), CUDA) == 1
    assert [finest_step(LinearCandidate(n, n, "pair"), CUDA) for n in (16, 64, 512)] == [1, 4, 16]
    assert finest_step(LinearCandidate(512, 512, "pair")) == 1


@pytest.mark.parametrize("ratio", [0.75, 0.5, 0.25])
def test_only_channel_is_offered_where_there_is_a_stride(ratio):
    shape = (128, 128, 3, 3)
    for kind in (SpatialCandidate, Tucker2Candidate):
        assert at_ratio(kind, shape, ratio, stride=(2, 2)) < WORTHWHILE < at_ratio(kind, shape, ratio)
    assert at_ratio(ChannelCandidate, shape, ratio, stride=(2, 2)) > WORTHWHILE


@pytest.mark.parametrize("kind", [ChannelCandidate, SpatialCandidate, Tucker2Candidate])
@pytest.mark.parametrize("ratio", [0.25, 0.75])
def test_a_stem_is_slower_sketched_whatever_the_roofline_says(kind, ratio):
    assert at_ratio(kind, (64, 3, 7, 7), ratio, stride=(2, 2)) == STEM_SPEEDUP < WORTHWHILE
    assert at_ratio(kind, (64, 4, 3, 3), ratio) == STEM_SPEEDUP
    assert at_ratio(kind, (64, 5, 3, 3), ratio) != STEM_SPEEDUP


def test_the_rule_counts_the_channels_of_all_groups_and_no_linear_layer():
    candidate = ChannelCandidate((64, 4, 3, 3), 2)
    assert speedup(candidate, 4, (64, 4, 3, 3), groups=2) != STEM_SPEEDUP
    assert speedup(LinearCandidate(512, 4, "pivoted"), 2, (512, 4)) != STEM_SPEEDUP
