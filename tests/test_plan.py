"""The budget is kept, met and well spent; what stays dense says why."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import panther_compile as pc
from panther_compile.factorization import cost
from panther_compile.factorization.candidates import LinearCandidate
from panther_compile.factorization.conv2d import ChannelCandidate
from panther_compile.planning.plan import plan_units
from panther_compile.planning.ways import BY_WEIGHTS, CEILING, FLOOR, Allocation
from panther_compile.records import Unit

OPTIONS = {"min_params": 0, "include": "*", "progress": False, "allow_slower": True}
FORMS = ["pivoted", "pair"]


def unit(name, shape, *, decay=-0.5, bias=True, form="pivoted", known=True):
    """A weight with singular values i^decay; no class of device, so speed does not matter."""
    out_features, in_features = shape
    values = torch.arange(1, min(shape) + 1, dtype=torch.float64).pow(decay) if known else None
    candidate = LinearCandidate(out_features, in_features, form, singular_values=values)
    biases = out_features if bias else 0
    return Unit(name, shape, out_features * in_features + biases, biases, (candidate,), None)


def plan(units, ratio, round_rank_to=None, allocation=BY_WEIGHTS):
    lines = plan_units([(one, "Linear") for one in units], ratio, round_rank_to, True, allocation)
    assert [line.name for line in lines] == [one.name for one in units]
    return lines


def totals(lines):
    sketched = [line for line in lines if line.choice is not None]
    return sum(line.stored_numbers for line in sketched), sum(line.dense_numbers for line in sketched)


SETS = {
    "one square": [(64, 64)],
    "one wide": [(16, 200)],
    "equal": [(96, 96)] * 4,
    "mixed": [(128, 64), (64, 128), (32, 32), (200, 40)],
    "one large among small": [(256, 256), (16, 16), (12, 20), (8, 8)],
    "slivers": [(64, 4), (4, 64), (128, 128)],
    "large": [(512, 512), (512, 1024), (384, 384)],
}


def units_of(name, **options):
    return [unit(f"u{i}", shape, decay=-0.2 - 0.3 * i, **options) for i, shape in enumerate(SETS[name])]


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75])
@pytest.mark.parametrize(
    ("shape", "step"), [((4096, 4096), 16), ((768, 3072), 16), ((256, 256), 16), ((40, 40), 1)]
)
def test_ranks_are_rounded_for_cuda(shape, step, ratio):
    """Rows of factors that are no multiple of 16 bytes long are loaded number by number there."""
    units = [replace(unit(f"u{i}", shape, decay=-0.2 - 0.3 * i), device=cost.CUDA) for i in range(3)]
    lines = plan(units, ratio)
    ranks = [line.choice.rank for line in lines]
    assert all(rank % step == 0 for rank in ranks), ranks
    stored, dense = totals(lines)
    assert 0.8 * ratio * dense <= stored <= ratio * dense
    on_cpu = [replace(one, device=cost.CPU) for one in units]
    named = [(one, "Linear") for one in on_cpu]
    asked = plan_units(named, ratio, None, True, on_cuda=True)  # device="cuda", weights on the CPU
    assert [line.choice.rank for line in asked] == ranks
    if step == 16:
        assert any(line.choice.rank % step for line in plan(on_cpu, ratio))
        assert all(line.choice.rank % 8 == 0 for line in plan(units, ratio, 8))


# ------------------------------------------------------------------------------------------- budget


@pytest.mark.parametrize("name", list(SETS))
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ratio", [0.02, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.94, 0.99, 1.0])
@pytest.mark.parametrize("round_rank_to", [None, 1, 8, 64])
def test_budget_is_never_exceeded(name, form, ratio, round_rank_to):
    lines = plan(units_of(name, form=form), ratio, round_rank_to)
    stored, dense = totals(lines)
    assert stored <= ratio * dense
    assert all(line.reason for line in lines if line.choice is None)
    assert all(line.stored_numbers < line.dense_numbers for line in lines if line.choice is not None)


@pytest.mark.parametrize("name", ["equal", "mixed", "large"])
@pytest.mark.parametrize("ratio", [0.1, 0.25, 0.5, 0.75, 0.9])
@pytest.mark.parametrize("known", [True, False])
def test_budget_is_met_within_half_a_percent(name, ratio, known):
    lines = plan(units_of(name, known=known), ratio)
    stored, dense = totals(lines)
    assert dense == sum(line.dense_numbers for line in lines)
    assert ratio - 0.005 <= stored / dense <= ratio


def test_biases_are_part_of_the_budget():
    (line,) = plan([unit("u", (8, 64))], 0.5, 1)
    (bare,) = plan([unit("u", (8, 64), bias=False)], 0.5, 1)
    assert line.stored_numbers <= 0.5 * (8 * 64 + 8)
    assert line.stored_numbers == line.choice.rank * (72 - line.choice.rank) + 8
    assert bare.stored_numbers == bare.choice.rank * (72 - bare.choice.rank)


def test_ratio_one_leaves_everything_dense():
    lines = plan(units_of("mixed"), 1.0)
    assert [line.choice for line in lines] == [None] * 4
    assert {line.reason for line in lines} == {"ratio is 1"}


def test_no_units():
    assert plan([], 0.5) == ()


# -------------------------------------------------------------------------------------------- ranks


@pytest.mark.parametrize("step", [2, 8, 16])
@pytest.mark.parametrize("name", ["equal", "large", "mixed"])
def test_ranks_are_multiples_of_what_was_asked(step, name):
    lines = plan(units_of(name), 0.6, step)
    ranks = [line.choice.rank for line in lines if line.choice is not None]
    assert ranks
    limits = [min(line.shape) for line in lines if line.choice is not None]
    assert all(r % step == 0 for r, limit in zip(ranks, limits, strict=True) if limit >= step)


def test_large_ranks_are_multiples_of_eight_by_default():
    lines = plan(units_of("large"), 0.5)
    assert sum(line.choice.rank % 8 == 0 for line in lines) >= 2


def kernel(name, channels):
    shape = (channels, channels, 3, 3)
    return Unit(name, shape, channels**2 * 9, 0, (ChannelCandidate(shape, 1),), None)


@pytest.mark.parametrize(
    ("ratio", "shapes"),
    [
        (0.35, [64, (128, 128)]),
        (0.63, [64, (128, 128)]),
        (0.3, [64, 64, (128, 128)]),
        (0.47, [64] + 3 * [(256, 256)]),
    ],
)
def test_what_the_budget_has_left_goes_to_matrices_before_kernels(ratio, shapes):
    units = [
        kernel(f"u{i}", shape) if isinstance(shape, int) else unit(f"u{i}", shape)
        for i, shape in enumerate(shapes)
    ]
    lines = plan(units, ratio)
    stored, dense = totals(lines)
    assert ratio - 0.005 <= stored / dense <= ratio
    assert all(line.choice.rank % 16 == 0 for line in lines if len(line.shape) == 4)
    assert any(line.choice.rank % 8 for line in lines if len(line.shape) == 2)


def test_kernels_alone_meet_the_budget_by_single_ranks():
    lines = plan([kernel("k", 128)], 0.41)
    assert lines[0].choice.rank % 16 != 0
    assert 0.405 <= lines[0].stored_numbers / lines[0].dense_numbers <= 0.41


def test_kernels_take_what_matrices_cannot():
    lines = plan([kernel("k", 128), unit("m", (16, 16))], 0.41)
    stored, dense = totals(lines)
    assert 0.405 <= stored / dense <= 0.41


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9])
def test_no_layer_is_starved_or_hardly_touched(ratio):
    units = [unit(f"u{i}", (96, 96), decay=decay) for i, decay in enumerate((-3.0, -0.5, 0.0))]
    for line in plan(units, ratio, 1):
        assert line.stored_numbers >= FLOOR * ratio * line.dense_numbers - 96 - 96
        assert line.stored_numbers <= CEILING * line.dense_numbers


def test_a_layer_that_decays_fast_gives_to_one_that_does_not():
    fast, slow = plan([unit("fast", (96, 96), decay=-2.0), unit("slow", (96, 96), decay=-0.1)], 0.5)
    assert fast.choice.rank < slow.choice.rank
    assert fast.choice.error < slow.choice.error


def test_small_weights_are_not_paid_for_with_the_large_ones():
    """A share of the energy costs fewer numbers of a small weight: their bare product keeps it whole."""
    units = [unit("small", (128, 128), form="pair"), unit("large", (256, 256), form="pair")]
    kept = {}
    for name in ("energy", "balanced"):
        small, large = plan(units, 0.5, 1, Allocation(name))
        kept[name] = small.stored_numbers / small.dense_numbers, large.stored_numbers / large.dense_numbers
    assert kept["energy"][0] > 0.9
    assert kept["energy"][0] > kept["balanced"][0] > kept["balanced"][1] > kept["energy"][1]
    assert plan(units, 0.5, 1) == plan(units, 0.5, 1, Allocation("balanced"))


def test_scale_does_not_matter():
    small, large = unit("u", (96, 96)), unit("v", (96, 96))
    values = torch.arange(1, 97, dtype=torch.float64).pow(-0.5)
    loud = LinearCandidate(96, 96, "pivoted", singular_values=1e6 * values)
    large = Unit("v", (96, 96), large.dense_numbers, large.bias_numbers, (loud,), None)
    first, second = plan([small, large], 0.5, 1)
    assert abs(first.choice.rank - second.choice.rank) <= 1


def test_the_better_of_two_schemes_is_taken():
    values = torch.arange(1, 65, dtype=torch.float64).pow(-0.5)
    both = tuple(LinearCandidate(64, 64, form, singular_values=values) for form in ("pair", "pivoted"))
    (line,) = plan([Unit("u", (64, 64), 4096, 0, both, None)], 0.5, 1)
    assert line.choice.scheme == "pivoted"


@pytest.mark.parametrize("known", [True, False])
def test_choice_tells_the_candidates_own_counts_and_error(known):
    one = unit("u", (64, 48), known=known)
    (line,) = plan([one], 0.5)
    candidate, choice = one.candidates[0], line.choice
    assert choice.stored_numbers == candidate.numbers(choice.rank) + one.bias_numbers
    assert choice.ranks == (choice.rank,)
    assert choice.error == candidate.error(choice.rank)
    assert (choice.error is None) is not known


def test_equal_units_of_unknown_spectra_share_equally():
    ranks = [line.choice.rank for line in plan(units_of("equal", known=False), 0.5, 1)]
    assert max(ranks) - min(ranks) <= 1


def test_unknown_and_known_spectra_mix():
    lines = plan([unit("a", (96, 96), known=False), unit("b", (96, 96))], 0.5)
    assert all(line.choice is not None for line in lines)


# ------------------------------------------------------------------------------------- staying dense


def test_a_layer_that_cannot_shrink_stays_dense_and_leaves_the_budget():
    sliver, square = unit("sliver", (64, 1), form="pair"), unit("square", (96, 96))
    first, second = plan([sliver, square], 0.5, 1)
    assert first.choice is None
    assert first.reason == "rank 1 would store 65 numbers, the dense weight stores 64"
    (alone,) = plan([square], 0.5, 1)
    assert second == alone


def test_a_layer_whose_share_is_less_than_one_rank_stays_dense():
    thin, square = unit("thin", (4, 64), bias=False), unit("square", (96, 96))
    first, second = plan([thin, square], 0.2, 1)
    assert first.choice is None
    assert "share of the budget" in first.reason
    assert second.choice is not None


def test_a_layer_without_candidates_stays_dense():
    bare = Unit("u", (3, 3), 9, 0, (), None)
    (line,) = plan([bare], 0.5)
    assert (line.choice, line.reason) == (None, "no scheme fits this layer")


def test_leftover_of_a_coarse_layer_goes_to_the_others():
    """One rank of the first is worth a tenth of the budget: what it cannot use, the others do."""
    coarse = unit("coarse", (300, 4), bias=False)
    lines = plan([coarse, *units_of("equal")], 0.5, 1)
    stored, dense = totals(lines)
    assert lines[0].choice is not None
    smallest_step = 96 + 96
    assert ratio_gap(stored, dense) < smallest_step


def ratio_gap(stored, dense, ratio=0.5):
    return math.floor(ratio * dense) - stored


# --------------------------------------------------------------------------------------- optimality


def weight(one, allocation):
    return math.sqrt(one.dense_numbers) if allocation == "balanced" else 1.0


def objective(units, lines, allocation):
    logs = (2 * math.log(math.sqrt(1 - line.choice.error**2)) for line in lines)
    return sum(weight(one, allocation) * log for one, log in zip(units, logs, strict=True))


def best(units, ratio, allocation):
    """The largest objective over all ranks within the budget and the limits of each layer."""
    budget = math.floor(ratio * sum(one.dense_numbers for one in units))
    ways = []
    for one in units:
        candidate, share = one.candidates[0], ratio * one.dense_numbers
        numbers = {r: candidate.numbers(r) + one.bias_numbers for r in range(1, candidate.max_rank + 1)}
        affordable = [n for n in numbers.values() if n <= share]
        floor = min(FLOOR * share, affordable[-1])
        ways.append(
            [
                (n, weight(one, allocation) * float(candidate.energies[r - 1].log()))
                for r, n in numbers.items()
                if floor <= n <= CEILING * one.dense_numbers
            ]
        )
    fitting = (way for way in itertools.product(*ways) if sum(n for n, _ in way) <= budget)
    return max(sum(value for _, value in way) for way in fitting)


def largest_step(units, lines, allocation):
    """What one more rank would gain at most: whole ranks cannot be spent more finely."""
    energies = [
        (weight(one, allocation) * one.candidates[0].energies.log(), line.choice.rank)
        for one, line in zip(units, lines, strict=True)
    ]
    return max(float(values[rank] - values[rank - 1]) for values, rank in energies if rank < len(values))


@pytest.mark.parametrize("ratio", [0.3, 0.5, 0.7])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "shapes",
    [
        [(12, 12), (10, 14), (16, 8)],
        [(9, 9), (9, 9), (9, 9), (9, 9)],
        [(20, 6), (8, 8), (6, 20), (10, 10)],
    ],
    ids=str,
)
@pytest.mark.parametrize("allocation", ["energy", "balanced"])
@pytest.mark.parametrize("seed", range(3))
def test_allocation_is_near_the_best_one(shapes, form, ratio, seed, allocation):
    decays = (0.4 - torch.rand(len(shapes), generator=torch.Generator().manual_seed(seed))).tolist()
    units = [
        unit(f"u{i}", shape, decay=-abs(decay) * 3, form=form, bias=False)
        for i, (shape, decay) in enumerate(zip(shapes, decays, strict=True))
    ]
    lines = plan(units, ratio, 1, Allocation(allocation))
    if any(line.choice is None for line in lines):
        pytest.skip("a layer stays dense: there is less to choose")
    gap = best(units, ratio, allocation) - objective(units, lines, allocation)
    assert gap >= -1e-9  # `best` is no less than what was found
    assert gap <= largest_step(units, lines, allocation)


# ----------------------------------------------------------------------------------- through the API


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(96, 128), nn.ReLU(), nn.Linear(128, 96))
        self.decoder = nn.Sequential(nn.Linear(96, 128), nn.ReLU(), nn.Linear(128, 96))

    def forward(self, x):
        return self.decoder(self.encoder(x))


def test_several_pools_keep_a_budget_each():
    found = pc.plan_sketch(Two(), {"encoder.*": 0.3, "*": 0.7}, **OPTIONS)
    for prefix, ratio in (("encoder", 0.3), ("decoder", 0.7)):
        stored, dense = totals([line for line in found.layers if line.name.startswith(prefix)])
        assert 0 <= ratio * dense - stored < 96 + 128  # less than a rank is left
    assert found.ratio == "encoder.*: 0.3, *: 0.7"


def test_first_matching_selector_counts():
    found = pc.plan_sketch(Two(), {"*": 0.5, "encoder.*": 0.1}, **(OPTIONS | {"exclude": None}))
    stored, dense = totals(found.layers)
    assert stored / dense > 0.49


def test_a_pool_of_ratio_one_stays_dense_and_others_do_not():
    found = pc.plan_sketch(Two(), {"encoder.*": 1.0, nn.Linear: 0.5}, **OPTIONS)
    reasons = {line.name: line.reason for line in found.layers if line.choice is None}
    assert reasons == {"encoder.0": "ratio is 1", "encoder.2": "ratio is 1"}


def test_layers_that_match_no_pool_stay_dense():
    found = pc.plan_sketch(Two(), {"encoder.*": 0.5}, **OPTIONS)
    reasons = {line.name: line.reason for line in found.layers if line.choice is None}
    assert set(reasons) == {"decoder.0", "decoder.2"}
    assert set(reasons.values()) == {"matches no selector of ratio"}


def test_lines_are_in_the_order_of_the_model():
    found = pc.plan_sketch(Two(), {"decoder.*": 0.5, "encoder.0": 0.5}, **OPTIONS)
    assert [line.name for line in found.layers] == ["encoder.0", "encoder.2", "decoder.0", "decoder.2"]


def test_a_meta_model_is_planned_without_errors():
    with torch.device("meta"):
        model = Two()
    found = pc.plan_sketch(model, 0.5, **OPTIONS)
    assert 0.495 <= found.achieved_ratio <= 0.5
    assert all(line.choice.error is None for line in found.sketched)


def test_plan_is_what_sketchify_does():
    model = Two()
    found = pc.plan_sketch(model, 0.4, **OPTIONS)
    report = pc.sketch_report(pc.sketchify(model, 0.4, **OPTIONS))
    assert [(row.name, row.ranks, row.stored_numbers) for row in report.sketched] == [
        (line.name, line.choice.ranks, line.stored_numbers) for line in found.sketched
    ]
    assert report.achieved_ratio == found.achieved_ratio


def test_text_has_a_line_for_each_weight_and_the_totals():
    found = pc.plan_sketch(Two(), {"encoder.*": 0.5}, **OPTIONS)
    text = str(found)
    assert all(line.name in text for line in found.layers)
    assert "matches no selector of ratio" in text
    assert f"2 of 4 layers to be sketched: {found.stored_numbers:,} of {found.dense_numbers:,}" in text


def test_a_stem_stays_dense_unless_slower_is_allowed():
    model = nn.Sequential(nn.Conv2d(3, 64, 7, 2), nn.Conv2d(64, 64, 3), nn.Conv2d(64, 64, 3))
    stem, *others = pc.plan_sketch(model, 0.5, progress=False).layers
    assert stem.reason == "its sketch would run at 0.70 of the dense speed; allow_slower=True sketches it"
    assert all(line.choice is not None for line in others)
    assert pc.plan_sketch(model, 0.5, progress=False, allow_slower=True).layers[0].choice is not None


# A weight that stays whole within the budget


def judged(name, shape, **options):
    return replace(unit(name, shape, **options), in_data=True)


def test_a_flat_spectrum_is_left_whole_and_the_others_make_up_for_it():
    """Ranks beyond .95 of its numbers are a fifth of all that a square matrix has."""
    units = [judged("flat", (64, 64), decay=0.0), judged("steep", (256, 256), decay=-1.5)]
    flat, steep = plan(units, 0.5)
    assert flat.whole
    assert flat.choice is None
    assert flat.stored_numbers == flat.dense_numbers
    assert "whole within the budget" in flat.reason
    budget = 0.5 * (flat.dense_numbers + steep.dense_numbers)
    assert 0.98 * budget < flat.dense_numbers + steep.stored_numbers <= budget
    made = pc.SketchPlan((flat, steep), "0.5", "")
    assert made.achieved_ratio <= 0.5
    assert "1 of 2 layers to be sketched, 1 kept whole" in str(made)
    assert pc.SketchPlan.from_json(made.to_json()) == made


@pytest.mark.parametrize("how", ["not in data", "what is timed", "uniform"])
def test_nothing_is_left_whole(how):
    make = unit if how == "not in data" else judged
    units = [
        (make(name, (64, 64), decay=decay), "Linear") for name, decay in (("flat", 0.0), ("steep", -2.0))
    ]
    allocation = Allocation("uniform" if how == "uniform" else "energy")
    lines = plan_units(units, 0.75, None, True, allocation, whole=how != "what is timed")
    assert not any(line.whole for line in lines)
    assert all(line.choice for line in lines)


def test_what_no_cut_can_use_of_a_budget_keeps_units_whole_without_data():
    """Cuts hold 95 % of their numbers at most, of which there would be no more here."""
    units = [(unit(name, (64, 64)), "Linear") for name in "abcd"]
    lines = plan_units(units, 0.98, None, True)
    assert sum(line.whole for line in lines) == 2
    assert all(line.choice is None and "no cut uses" in line.reason for line in lines if line.whole)
    stored, dense = (sum(getattr(line, f"{what}_numbers") for line in lines) for what in ("stored", "dense"))
    assert 0.97 * dense < stored <= 0.98 * dense
    assert not any(line.whole for line in plan_units(units, 0.98, None, True, Allocation("uniform")))


def test_what_loses_nothing_is_cut_however_much_of_a_budget_is_left():
    values = torch.zeros(64, dtype=torch.float64)
    values[:3] = 1.0
    candidate = LinearCandidate(64, 64, "pivoted", singular_values=values)
    for known in (False, True):
        low = [replace(unit(name, (64, 64)), candidates=(candidate,), in_data=known) for name in "abcd"]
        lines = plan_units([(one, "Linear") for one in low], 0.9, 1, True)
        assert all(3 <= line.choice.rank < 12 for line in lines)


def test_a_high_ratio_without_data_is_used():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
    x = torch.randn(32, 64)
    cut, more = (pc.sketchify(model, ratio, synthetic=False, **OPTIONS) for ratio in (0.95, 0.98))
    assert 0.97 < pc.sketch_report(more).achieved_ratio <= 0.98
    assert (more(x) - model(x)).norm() < 0.9 * (cut(x) - model(x)).norm()


def test_a_model_with_a_layer_left_whole(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 192), nn.Tanh(), nn.Linear(192, 48))
    with torch.no_grad():
        for layer in (model[2], model[4]):
            u, s, v = torch.linalg.svd(layer.weight, full_matrices=False)
            layer.weight.copy_(u * (s * 0.9 ** torch.arange(48.0)) @ v)
    data = [torch.randn(64, 48) for _ in range(4)]
    small = pc.sketchify(model, 0.6, data=data, **OPTIONS)
    report = pc.sketch_report(small)
    assert [line.name for line in report.plan.whole] == ["0"]
    assert torch.equal(small[0].weight, model[0].weight)
    numbers = sum(p.numel() for p in small.parameters())
    assert report.replaced_stored_numbers == numbers
    assert 0.58 < numbers / sum(p.numel() for p in model.parameters()) <= 0.6
    assert f"replaced weights and 1 kept whole: {numbers:,} of" in str(report)
    tried = report.plan.tried
    assert tried["energy, all cut"] > tried["energy"]  # it might have been closer
    again = pc.sketchify(model, plan=report.plan, data=data, progress=False)
    assert pc.sketch_report(again).achieved_ratio == report.achieved_ratio
    assert torch.equal(again[0].weight, model[0].weight)
    pc.save_sketched(small, tmp_path / "small")
    loaded = pc.load_sketched(model, tmp_path / "small")
    assert pc.sketch_report(loaded).achieved_ratio == report.achieved_ratio
