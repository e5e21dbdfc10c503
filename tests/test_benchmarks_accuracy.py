"""The peers of benchmarks/accuracy.py against their own equations, and how its results are kept."""

import ast
import copy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))  # last: it has an onnx.py
from accuracy_models.e5 import _multiplied_out, _name_here
from accuracy_report import Result, Store, report
from peers import (
    PEERS,
    aa_svd,
    corp,
    kfac_svd,
    mpifa,
    panther_copy,
    rocket,
    svd,
    svd_llm,
    swift_svd,
    two_four,
    zs_svd,
)
from peers.budget import count_numbers, pivoted_numbers, spend
from peers.calibration import collect, fisher, square_root
from peers.job import Job, NotDefinedError
from peers.layers import UnfoldedAttention, factored, input_rows, pivoted, unfold_attention, weight_matrix
from peers.sequential import Drift
from peers.svd_llm_v2 import allocate

OUTPUTS, INPUTS, ROWS = 24, 32, 400
ELSEWHERE = ("aa-svd-refined", "corp", "basis-sharing", "sola")  # slow, or of blocks alone


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def uneven_inputs(seed: int = 1) -> torch.Tensor:
    """(ROWS, INPUTS) with a decaying spectrum in a random basis."""
    scale = torch.arange(1, INPUTS + 1, dtype=torch.float64) ** -1.0
    return draw(ROWS, INPUTS, seed=seed) * scale @ torch.linalg.qr(draw(INPUTS, INPUTS, seed=7)).Q


def linear_job(inputs: torch.Tensor) -> Job:
    layer = nn.Linear(INPUTS, OUTPUTS)
    with torch.no_grad():
        layer.weight.copy_(draw(OUTPUTS, INPUTS))
    return Job(nn.Sequential(layer), ("0",), [inputs.float()], (), "values", 0)


def output_error(
    weight: torch.Tensor, factors: tuple[torch.Tensor, torch.Tensor], rank: int, inputs
) -> float:
    left, right = factors
    return float((inputs @ (weight - left[:, :rank] @ right[:rank]).T).norm())


class Mixed(nn.Module):
    """A convolution, a transformer layer and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 32, 3, stride=2, padding=1)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 48))

    def forward(self, x):
        return self.head(self.encoder(self.conv(x).flatten(2).transpose(1, 2)))


ATTENTION = [f"encoder.layers.0.self_attn.{part}_proj" for part in ("q", "k", "v", "out")]
NAMES = ("conv", *ATTENTION, "encoder.layers.0.linear1", "encoder.layers.0.linear2", "head.0", "head.2")


@pytest.fixture(scope="module")
def mixed_job() -> Job:
    torch.manual_seed(0)
    model = Mixed().eval()
    batches = list(draw(48, 8, 8, 8).float().split(16))
    return Job(model, NAMES, batches, (), "classes", 0)


def test_swift_svd_has_the_error_of_svd_llm():
    inputs = uneven_inputs()
    job = linear_job(inputs)
    weight = job.weight("0")
    for rank in (3, 8, 15):
        whitened = output_error(weight, svd_llm.decompose(job, "0"), rank, inputs)
        assert output_error(weight, swift_svd.decompose(job, "0"), rank, inputs) == pytest.approx(
            whitened, 1e-3
        )
        assert whitened < 0.9 * output_error(weight, plain(weight), rank, inputs)


def plain(weight):
    left, values, right = torch.linalg.svd(weight, full_matrices=False)
    return left * values, right


@pytest.mark.parametrize("shape", [(12, 30), (30, 12), (9, 9)])
def test_svd_is_the_best_of_its_rank(shape):
    matrix = draw(*shape)
    left, right = svd.decompose_matrix(matrix)
    values = torch.linalg.svdvals(matrix)
    torch.testing.assert_close(left.norm(dim=0), values)
    for rank in (1, 4, 9):
        error = (matrix - left[:, :rank] @ right[:rank]).norm()
        torch.testing.assert_close(error, values[rank:].norm(), rtol=1e-6, atol=1e-9)


def test_whitened_error_is_the_tail_of_its_singular_values():
    inputs = uneven_inputs()
    job = linear_job(inputs)
    left, _ = factors = svd_llm.decompose(job, "0")
    found = output_error(job.weight("0"), factors, 5, inputs)
    assert found == pytest.approx(float(left[:, 5:].norm()), 1e-3)


def test_anchored_is_whitened_without_drift():
    inputs = uneven_inputs()
    job = linear_job(inputs)
    gram = job.statistics["0"].gram
    anchored = aa_svd.decompose(job.weight("0"), Drift(gram, gram))
    whitened = svd_llm.decompose(job, "0")
    for rank in (2, 9, OUTPUTS):
        products = [left[:, :rank] @ right[:rank] for left, right in (anchored, whitened)]
        torch.testing.assert_close(*products, rtol=0, atol=1e-8)


def test_anchored_wins_on_drifted_inputs():
    before, after = uneven_inputs(), uneven_inputs() + 0.1 * draw(ROWS, INPUTS, seed=5)
    weight, rank = draw(OUTPUTS, INPUTS), 6

    def error(factors):
        left, right = factors
        return float((before @ weight.T - after @ (left[:, :rank] @ right[:rank]).T).norm())

    drift = Drift(after.T @ after, before.T @ after)
    anchored = error(aa_svd.decompose(weight, drift))
    assert anchored < 0.97 * error(aa_svd.decompose(weight, Drift(drift.now, drift.now)))
    assert anchored < 0.97 * error(plain(weight))
    assert anchored <= error(mpifa.reconstruct(weight, rank, drift))


@pytest.mark.parametrize("convolution", [False, True])
def test_panther_copy_is_worse_than_zeros(convolution):
    weight = draw(96, 96)
    terms = 96 * 96 // 2 // (2 * 192)
    pair = panther_copy.sketch(weight, terms, torch.Generator().manual_seed(0), convolution=convolution)
    error = float((weight - pair[0] @ pair[1]).norm() / weight.norm())
    assert error > 1
    if not convolution:
        expected = ((96 + 96 - 2) / (4 * terms)) ** 0.5
        assert error == pytest.approx(expected, 0.1)


@pytest.mark.parametrize("make", [factored, pivoted])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(12, 20), (5, 7, 12)),
        (nn.Linear(12, 20, bias=False), (5, 12)),
        (nn.Conv2d(2, 32, 3, stride=2, padding=1), (2, 2, 9, 9)),
        (nn.Conv2d(4, 16, (1, 3), padding=(0, 1), bias=False), (2, 4, 5, 5)),
    ],
)
def test_full_rank_gives_the_outputs_of_the_layer(make, layer, shape):
    x = draw(*shape).float()
    new = make(layer, *plain(weight_matrix(layer)))
    torch.testing.assert_close(new(x), layer(x), rtol=1e-4, atol=1e-4)
    rows = input_rows(layer, x)
    bias = 0 if layer.bias is None else layer.bias
    outputs = layer(x) if isinstance(layer, nn.Linear) else layer(x).permute(0, 2, 3, 1)
    torch.testing.assert_close(
        rows @ layer.weight.flatten(1).T + bias, outputs.flatten(0, -2), rtol=1e-4, atol=1e-4
    )


def test_pivoted_stores_what_the_budget_counts():
    layer = nn.Linear(20, 30)
    left, right = plain(weight_matrix(layer))
    new = pivoted(layer, left[:, :7], right[:7])
    assert count_numbers(new) == pivoted_numbers(30, 20, 7) + 30
    torch.testing.assert_close(
        new(torch.eye(20)) - new(torch.zeros(1, 20)),
        (left[:, :7] @ right[:7]).T.float(),
        rtol=1e-3,
        atol=1e-4,
    )


def test_unfolded_attention_gives_the_same_outputs(mixed_job):
    model = mixed_job.model
    small = copy.deepcopy(model)
    unfold_attention(small)
    assert any(isinstance(m, UnfoldedAttention) for m in small.modules())
    with torch.inference_mode():
        torch.testing.assert_close(
            small(mixed_job.batches[0]), model(mixed_job.batches[0]), rtol=1e-4, atol=1e-4
        )
    assert count_numbers(small) == count_numbers(model)


@pytest.mark.parametrize("ratio", [0.5, *(pytest.param(one, marks=pytest.mark.slow) for one in (0.75, 0.25))])
@pytest.mark.parametrize(
    "name", [name for name, peer in PEERS.items() if peer.counted and name not in ELSEWHERE]
)
def test_every_peer_stores_the_same(name, ratio, mixed_job):
    dense = count_numbers(mixed_job.model)
    replaced = sum(count_numbers(mixed_job.dense.get_submodule(layer)) for layer in NAMES)
    small = PEERS[name].compress(mixed_job, ratio)
    stored = (count_numbers(small) - dense + replaced) / replaced
    # The layers are so small that one rank of the largest is 1 % of all numbers.
    assert ratio - 0.02 < stored <= ratio
    with torch.inference_mode():
        assert small(mixed_job.batches[0]).shape == mixed_job.model(mixed_job.batches[0]).shape


def test_budget_is_never_exceeded_and_what_is_left_over_is_spent():
    shapes = {"a": (30, 50), "b": (17, 90), "c": (64, 64)}
    biases = {"a": 30, "b": 0, "c": 64}
    ranks = spend(shapes, biases, 0.4)
    dense = sum(o * i + biases[n] for n, (o, i) in shapes.items())
    stored = sum(r * sum(shapes[n]) + biases[n] for n, r in ranks.items())
    assert 0.4 * dense - min(map(sum, shapes.values())) < stored <= 0.4 * dense


BLOCK_LAYERS = ("0.0", "0.2", "1.0", "1.2")


def two_blocks() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24)) for _ in range(2)))


def test_blocks_change_nothing_but_the_work():
    model = two_blocks()
    batches = list(draw(64, 24).float().split(16))
    for method in ("aa-svd", "mpifa"):
        whole, chained = (
            PEERS[method].compress(Job(model, BLOCK_LAYERS, batches, blocks, "values", 0), 0.5)
            for blocks in ((), ("0", "1"))
        )
        torch.testing.assert_close(whole(batches[0]), chained(batches[0]), rtol=1e-3, atol=1e-3)


def test_refined_blocks_are_closer(mixed_job):
    model = two_blocks()
    job = Job(model, BLOCK_LAYERS, list(draw(1024, 24, seed=3).float().split(256)), ("0", "1"), "values", 0)
    x = draw(512, 24, seed=4).float()
    closed, refined = (PEERS[name].compress(job, 0.3) for name in ("aa-svd", "aa-svd-refined"))
    with torch.inference_mode():
        assert (refined(x) - model(x)).norm() < (closed(x) - model(x)).norm()
    with pytest.raises(NotDefinedError, match="blocks"):
        PEERS["aa-svd-refined"].compress(mixed_job, 0.5)


def test_statistics_are_those_of_the_inputs(mixed_job):
    seen = {}
    dense = mixed_job.dense
    layer = dense.get_submodule("head.2")
    handle = layer.register_forward_pre_hook(lambda _, args: seen.setdefault("x", args[0]))
    with torch.no_grad():
        dense(mixed_job.batches[0])
    handle.remove()
    x = seen["x"].flatten(0, -2).double()
    found = collect(dense, NAMES, mixed_job.batches[:1])["head.2"]
    torch.testing.assert_close(found.gram, x.T @ x, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.magnitude, x.abs().mean(0), rtol=1e-4, atol=1e-6)


def test_fisher_of_a_linear_model_is_the_second_moment_of_its_inputs():
    x = uneven_inputs()
    model = nn.Sequential(nn.Linear(INPUTS, 64, bias=False))
    found = fisher(model, ["0"], [x.float()], "values", ROWS, 0)["0"].mean(0)
    torch.testing.assert_close(found, x.square().mean(0), rtol=0.2, atol=1e-4)


def test_two_four_keeps_the_two_largest_of_four():
    weight = draw(6, 19)
    quads = two_four.prune(weight)[:, :16].unflatten(1, (-1, 4))
    assert bool((quads.count_nonzero(-1) == 2).all())
    dropped = weight[:, :16].unflatten(1, (-1, 4)).abs().where(quads == 0, torch.zeros(()).double())
    assert bool((dropped.amax(-1) <= quads.abs().where(quads != 0, torch.inf).amin(-1)).all())


def test_allocation_removes_less_where_the_loss_is_larger():
    ratios = allocate({"a": 10.0, "b": 100.0, "c": 1000.0}, 0.5)
    assert ratios["a"] < ratios["b"] < ratios["c"]
    assert sum(ratios.values()) == pytest.approx(1.5)
    capped = allocate({"a": 1.0, "b": 1e9, "c": 1e9}, 0.2)
    assert min(capped.values()) >= 0.03 - 1e-9
    assert sum(capped.values()) == pytest.approx(0.6)


def test_kfac_svd_has_the_least_error_in_both_metrics(mixed_job):
    name = NAMES[-1]
    weight, statistics = mixed_job.weight(name), mixed_job.statistics[name].gram
    inputs, _ = square_root(statistics, kfac_svd.INPUT_DAMPING)
    outputs, _ = square_root(kfac_svd._gradients(mixed_job)[name], kfac_svd.IMAGE_DAMPING)
    left, right = kfac_svd.decompose(mixed_job, name)
    tails = torch.linalg.svdvals(outputs.T @ weight @ inputs)
    for rank in (4, 12, 30):
        error = outputs.T @ (weight - left[:, :rank] @ right[:rank]) @ inputs
        assert float(error.norm()) == pytest.approx(float(tails[rank:].norm()), 1e-6)


def test_lems_gives_more_rank_to_what_costs_more(mixed_job):
    flat = torch.linspace(1.0, 0.0, 100)
    even = kfac_svd._choose(mixed_job, 0.5, dict.fromkeys(NAMES, flat))
    dear = kfac_svd._choose(mixed_job, 0.5, dict.fromkeys(NAMES, flat) | {"head.0": 100.0 * flat})
    assert dear["head.0"] is None or (even["head.0"] is not None and dear["head.0"] > even["head.0"])


def test_zero_sum_balances_what_it_leaves_out():
    factors = torch.empty(0), torch.empty(0)
    changes = {"a": [9.0, -2.0, 1.0, -0.5], "b": [9.0, 3.0, -1.5, 0.25]}
    layers = {name: zs_svd._Layer(factors, found, 4, 40, 10) for name, found in changes.items()}
    zs_svd._leave_out(layers, 50)
    # +.25 of b, -.5 of a brings the sum back, +1 of a
    assert (layers["a"].kept, layers["b"].kept) == (2, 3)
    zs_svd._leave_out(layers, 40)
    assert (layers["a"].kept, layers["b"].kept) == (2, 2)


def test_rocket_stores_few_coefficients_and_where_they_are():
    matrix = draw(20, 30) * (draw(20, 30, seed=1) > 1)
    layer = rocket.Sparse(matrix, convolution=False, bias=None)
    torch.testing.assert_close(layer.matrix(), matrix.float(), rtol=0, atol=0)
    assert count_numbers(layer) == int((matrix != 0).sum()) + 19
    whole = rocket.Sparse(torch.ones(4, 16), convolution=True, bias=torch.zeros(4))
    assert count_numbers(whole) == 64 + 2 + 4
    torch.testing.assert_close(whole(torch.ones(1, 16, 2, 3)), torch.full((1, 4, 2, 3), 16.0))


def test_rocket_is_exact_at_full_rank_and_its_dictionary_is_better_than_singular_vectors():
    job = linear_job(uneven_inputs())
    layer = rocket._Layer(job, "0")
    left, right = layer.factors(OUTPUTS, OUTPUTS)
    torch.testing.assert_close(left @ right, job.weight("0"))
    left, right = layer.factors(16, 8)
    assert bool((left.count_nonzero(1) == 8).all())
    directions = layer.directions
    errors = [
        float((layer.target - found).norm())
        for found in (left @ right @ torch.linalg.inv(layer.inverse), left @ directions[:16])
    ]
    assert errors[0] < errors[1]


def encoder_job() -> Job:
    """Two layers of an encoder, in which half and more of each kind of features repeat what others say."""
    torch.manual_seed(2)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True, activation="gelu")
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    with torch.no_grad():
        for one in model.layers:
            for part in (one.linear1.weight, one.linear1.bias):
                part[24:48], part[48:] = part[:24], part[:16]
            one.linear2.weight[:, 24:] *= 0.2
            for part in one.self_attn.in_proj_weight.unflatten(0, (3, 4, 8)).unbind():
                part[:, 4:] = 0.2 * draw(4, 4, seed=3).float() @ part[:, :4]
            one.self_attn.in_proj_bias.copy_(0.1 * draw(96, seed=4))
    names = tuple(f"layers.{place}.{layer}" for place in range(2) for layer in corp.LAYERS)
    return Job(model, names, list(draw(64, 10, 32).float().split(16)), (), "values", 0)


def test_corp_is_exact_where_all_stays_and_where_the_rest_is_told():
    job = encoder_job()
    x = draw(8, 10, 32, seed=9).float()
    with torch.inference_mode():
        dense = job.model(x)
        whole = PEERS["corp"].compress(job, 1.0)
        torch.testing.assert_close(whole(x), dense, rtol=1e-4, atol=1e-4)
        half = PEERS["corp"].compress(job, 0.5)
        attention = half.layers[0].self_attn
        assert attention.q_proj.out_features == attention.v_proj.out_features == 16
        assert float((half(x) - dense).norm() / dense.norm()) < 1e-2
        assert float((PEERS["corp"].compress(job, 0.25)(x) - dense).norm() / dense.norm()) > 5e-2


@pytest.mark.parametrize("ratio", [0.75, 0.5, 0.35, 0.25])
def test_corp_stores_what_the_others_do(ratio):
    job = encoder_job()
    dense = sum(count_numbers(job.dense.get_submodule(name)) for name in job.names)
    small = PEERS["corp"].compress(job, ratio)
    stored = sum(count_numbers(small.get_submodule(name)) for name in job.names)
    assert ratio - 0.01 < stored / dense <= ratio


def test_corp_asks_for_whole_blocks(mixed_job):
    with pytest.raises(NotDefinedError, match="TransformerEncoderLayer"):
        PEERS["corp"].compress(mixed_job, 0.5)


@pytest.mark.parametrize("name", ["2:4", "int8", "int8-weights", "int4-weights"])
def test_fixed_ratios_are_skipped_elsewhere(name, mixed_job):
    with pytest.raises(NotDefinedError, match="no other ratio"):
        PEERS[name].compress(mixed_job, 0.75)


def description() -> dict:
    return {
        "title": "A model",
        "dense": {"score": 1.0},
        "metrics": {"score": True},
        "layers": 2,
        "replaced": 100,
        "numbers": 120,
        "in": "this",
        "off": "that",
        "healing": "200 steps on the same",
    }


def test_four_bits_are_multiplied_out_as_their_file_says():
    pairs = np.arange(16, dtype=np.uint8) + 16 * np.arange(16, dtype=np.uint8)[::-1]
    block = np.float16(0.5).tobytes() + pairs.tobytes()
    found = _multiplied_out(np.frombuffer(block + block, np.uint8), 64)
    low = (torch.arange(16) - 8) * 0.5
    torch.testing.assert_close(found[:32], torch.cat([low, low.flip(0)]))
    torch.testing.assert_close(found[32:], found[:32])
    whole = _multiplied_out(np.arange(5, dtype="<f4").view(np.uint8), 5)
    torch.testing.assert_close(whole, torch.arange(5.0))
    assert _name_here("l3.ao.b") == "encoder.layer.3.attention.output.dense.bias"


def test_results_outlive_the_process_and_not_the_weights(tmp_path):
    path = tmp_path / "results.jsonl"
    store = Store(path)
    store.describe("m", "w1", description(), quick=False)
    key = Result("m", "w1", False, "svd", "none", 0.5, 0)
    store.add(key, {"score": 0.25}, 0.499, 1.0)
    store.add(key, {"score": 0.75}, 0.499, 1.0)

    again = Store(path)
    assert key in again
    text = "\n".join(report(again, ["m"], {"svd": "SVD"}, "here", quick=False))
    assert "| SVD |  | **0.750** |" in text
    assert "0.250" not in text

    again.describe("m", "w2", description(), quick=False)
    assert "SVD |" not in "\n".join(report(Store(path), ["m"], {"svd": "SVD"}, "here", quick=False))
    again.forget(["svd"], ["m"], quick=False)
    assert key not in again


def test_report_gives_the_spread_of_several_seeds(tmp_path):
    store = Store(tmp_path / "results.jsonl")
    store.describe("m", "w", description(), quick=False)
    for seed, score in enumerate((0.2, 0.4)):
        store.add(Result("m", "w", False, "svd", "in", 0.5, seed), {"score": score}, 0.5, 1.0)
    text = "\n".join(report(store, ["m"], {"svd": "SVD"}, "here", quick=False))
    assert "| SVD | in | **0.300 ± 0.141** |" in text
    assert "over draws of calibration data, up to 2" in text


def test_report_tells_where_a_peer_is_ahead(tmp_path):
    store = Store(tmp_path / "results.jsonl")
    store.describe("m", "w", description() | {"remark": "By chance."}, quick=False)
    scores = {("ours", "in"): 0.5, ("ours", "off"): 0.8, ("svd", "in"): 0.7, ("svd", "off"): 0.7}
    scores |= {("ours-int8", "in"): 0.9, ("int8-weights", "in"): 0.9, ("asvd", "in"): 0.5}
    for (method, domain), score in scores.items():
        store.add(Result("m", "w", False, method, domain, 0.5, 0), {"score": score}, 0.5, 1.0)
    text = "\n".join(report(store, ["m"], {name: name for name, _ in scores}, "here", quick=False))
    assert "Where a peer is ahead: score at 0.5 in domain: svd 0.700, ours 0.500. By chance." in text
    assert "| ours | in | 0.500 |" in text
    assert "| ours | off | **0.800** |" in text


def test_only_options_that_the_readme_shows():
    root = Path(__file__).resolve().parents[1]
    readme = (root / "README.md").read_text()
    sources = [ast.parse(path.read_text()) for path in (root / "benchmarks" / "accuracy_models").glob("*.py")]
    given = {
        key.value
        for tree in sources
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        for keyword in call.keywords
        if keyword.arg == "options" and isinstance(keyword.value, ast.Dict)
        for key in keyword.value.keys
    }
    assert given
    assert {option for option in given if f"{option}=" not in readme} == set()
