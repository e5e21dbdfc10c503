"""benchmarks/kernels.py: what is timed, in which order, what a second command repeats, and the verdicts."""

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._functorch import config as functorch_config
from torch._subclasses.fake_tensor import FakeTensorMode

from panther_compile.kernels import dispatch
from panther_compile.ops import Factors, has_attention_kernel, has_conv2d_kernel, has_kernel

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))  # last: it has an onnx.py
import kernel_cases
import kernel_measure
from kernel_cases import CHEAP, COMPILED, DTYPES, LOW, linear_case
from kernel_models import model_cases
from kernel_order import all_cases, in_order, interleaved
from kernel_report import TARGETS, details, gains, shapes_of, summary

BENCHMARKS = Path(kernel_cases.__file__).parent
# By its file: the folder kernels/ has the same name.
_SPEC = importlib.util.spec_from_file_location("benchmark_kernels", BENCHMARKS / "kernels.py")
kernels = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(kernels)

H100 = dispatch.DeviceClass(linear=True)
CASES = list(all_cases())


# What is timed, and in which order


def test_the_order():
    plan = list(in_order(CASES, compiled=True))
    assert plan == list(in_order(CASES, compiled=True))
    assert len([case for case, stage in plan if stage == CHEAP]) == len(CASES)
    assert [
        case.labels for case, stage in plan if stage == COMPILED and case.labels["form"] == "causal"
    ] == []
    places = [(case.tier, stage == COMPILED) for case, stage in plan if stage != LOW]
    assert places == sorted(places)
    first = [case for case, stage in plan if case.tier == 0 and stage == CHEAP]
    assert {case.labels["ratio"] for case in first} == {0.5, 0.25, None}
    assert {case.labels["model"] for case in first} == set(kernel_cases.FIRST_MODELS)
    assert {case.labels["rows"] for case in first if case.labels["op"] == "linear"} == {1, 16, 512, 4096}


def test_any_beginning_is_a_fair_sample():
    kinds = {tuple(case.labels[name] for name in ("op", "model", "shape", "form")) for case in CASES}
    kinds = {kind for kind in kinds if kind[1] in kernel_cases.FIRST_MODELS}
    beginning = [case.labels for case, _ in itertools.islice(in_order(CASES, compiled=True), len(kinds))]
    assert {tuple(labels[name] for name in ("op", "model", "shape", "form")) for labels in beginning} == kinds
    assert {labels["rows"] for labels in beginning if labels["op"] == "linear"} == {1, 16, 512, 4096}


def test_labels_tell_cases_apart():
    names = [name for name in kernels.KEY if name in kernel_cases.LABELS]
    assert len({tuple(str(case.labels[name]) for name in names) for case in CASES}) == len(CASES)


def test_half_types_come_first(monkeypatch, tmp_path):
    assert list(DTYPES) == ["bf16", "fp16", "tf32", "fp32"]
    assert [dispatch.precision_of(name) for name in DTYPES] == ["ieee", "ieee", "tf32", "ieee"]


def test_a_kernel_is_only_timed_where_there_is_one():
    narrow, wide = (linear_case("m", 4096, 4096, 64, ratio, "pair") for ratio in (0.1, 0.5))
    assert narrow.contenders(CHEAP, "bf16", on_cuda=True) == ["triton", "two products", "dense"]
    assert wide.contenders(CHEAP, "bf16", on_cuda=True) == ["two products", "dense"]
    assert wide.contenders(COMPILED, "bf16", on_cuda=True) == ["compiled"]
    assert narrow.contenders(CHEAP, "fp32", on_cuda=False) == ["operator", "two products", "dense"]


def asked(case, draw):
    """What the operators answer when they are asked for a kernel for such inputs."""
    if case.labels["op"] == "favor":
        q = draw(1, 2, case.labels["rows"], case.sizes["head_dim"])
        return has_attention_kernel(q, q, q)
    if case.labels["op"] == "conv2d":
        channels, _, taps, _, size = CONVOLUTIONS[case.labels["shape"]]
        x, rank = draw(case.labels["rows"], channels, size, size), case.labels["rank"]
        down = draw(rank, channels, taps, taps)
        return has_conv2d_kernel(x, down)
    x, *rest = case.build(draw).ours.inputs
    if case.labels["op"] == "linear":
        return has_kernel(x, [Factors(*rest, 0 if case.labels["form"] == "pivoted" else None)])
    pairs = zip(rest[::2], rest[1::2], strict=True)
    return has_kernel(x, [Factors(down, up, None, None) for down, up in pairs])


CONVOLUTIONS = {
    f"{one[0]}->{one[1]} {one[2]}x{one[2]}/{one[3]} {one[4]}": one for one in kernel_cases.CONV2D["ResNet-50"]
}


def test_the_pick_is_the_one_of_the_operators(monkeypatch):
    """On tensors that only seem to be on a GPU."""
    monkeypatch.setattr(dispatch, "device_class", lambda _: H100)
    monkeypatch.setattr(dispatch, "is_capturing", lambda: True)  # a few rows are timed in CUDA graphs
    found = set()
    chosen = [case for case in CASES if case.labels["model"] in ("BERT-base", "ResNet-50")]
    chosen = [case for case in chosen if not case.is_model][::4]
    with FakeTensorMode(), torch.no_grad():
        for case in chosen:
            wanted = asked(case, kernel_cases.Draw(torch.device("cuda"), torch.bfloat16))
            assert case.picks("bf16", H100) == ("triton" if wanted else "two products"), case.labels
            found.add((case.labels["op"], wanted))
    expected = set(itertools.product(("linear", "multi_linear"), (False, True)))
    assert found == {*expected, ("conv2d", False), ("favor", False)}
    assert CASES[-1].picks("bf16", None) == "two products"


OPERATIONS = [case for case in interleaved(list(all_cases(quick=True))) if not case.is_model]


@pytest.mark.parametrize("case", OPERATIONS[:9])
def test_numbers_of_a_case(case):
    runs = case.build(kernel_cases.Draw(torch.device("cpu"), torch.float32))
    with torch.no_grad():
        ours, plain, dense = (kernel_measure.as_tuple(run.function(*run.inputs)) for run in runs)
    assert kernel_measure.difference(ours, plain) < 1e-4
    assert sum(one.numel() for one in dense) == sum(one.numel() for one in ours)
    if case.labels["op"] != "favor":
        moved = sum(one.numel() for one in (*runs.ours.inputs, *ours))
        assert case.traffic == moved


# Running


@pytest.fixture
def smoke(monkeypatch, tmp_path, capsys):
    """Runs the smoke run on two small cases; returns the exit code, what was measured, and the report."""
    chosen = [linear_case("BERT-base", 48, 32, rows, 0.5, "pair") for rows in (1, 8)]
    monkeypatch.setattr(kernels, "all_cases", lambda *args, **options: iter(chosen))

    def run(*arguments):
        path = tmp_path / "out" / "kernels.jsonl"
        before = len(kernels.read(path))
        given = ("--device", "cpu", "--quick", "--output", str(path.parent), "--commit", "abc", *arguments)
        code = kernels.main(given)
        return code, kernels.read(path)[before:], (path.parent / "kernels.md").read_text()

    return run


def test_the_smoke_run_and_resume(smoke, tmp_path):
    code, new, text = smoke()
    assert code == 0
    assert len(new) == 2 * 3 * 2  # cases, contenders, passes
    assert {one["contender"] for one in new} == {"operator", "two products", "dense"}
    assert all(one["microseconds"] > 0 and one["commit"] == "abc" and "error" not in one for one in new)
    assert max(one.get("difference", 0.0) for one in new) < 1e-4
    assert "12 times of 2 shapes" in text
    assert "## Times" in text
    assert "PANTHER_COMPILE_KERNEL" not in os.environ

    assert smoke()[1] == []
    path = tmp_path / "out" / "kernels.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-2]) + lines[-2][:20])  # the last is missing, the one before cut short
    again = smoke()[1]
    assert [kernels.key_of(one) for one in again] == [kernels.key_of(json.loads(one)) for one in lines[-2:]]


def test_resume_from_elsewhere(smoke, tmp_path):
    _, new, _ = smoke()
    path = tmp_path / "first.jsonl"
    (tmp_path / "out" / "kernels.jsonl").rename(path)
    _, copied, text = smoke("--resume", str(path))
    assert copied == new
    assert "12 times of 2 shapes" in text
    path.write_text("".join(json.dumps(one | {"torch": "0.1"}) + "\n" for one in new))
    (tmp_path / "out" / "kernels.jsonl").unlink()
    _, added, text = smoke("--resume", str(path))
    assert len(added) == 24
    assert "12 times of another device or torch are left out" in text
    _, added, text = smoke("--report-only")
    assert added == []
    assert "12 times of 2 shapes" in text


def test_the_time_limit(smoke):
    _, new, text = smoke("--seconds", "0")
    assert new == []
    assert text.startswith("# Kernels\n\nNothing was measured.")
    assert len(smoke("--seconds", "1000")[1]) == 12


def test_a_case_must_probably_end_in_time(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(kernels.time, "monotonic", lambda: now[0])
    clock = kernels.Clock(100.0, {CHEAP: 20.0, COMPILED: 120.0})
    assert clock.fits(CHEAP)
    assert not clock.fits(COMPILED)
    clock.took(COMPILED, 50.0)
    now[0] = 24.0
    assert clock.fits(COMPILED)
    now[0] = 26.0
    assert not clock.fits(COMPILED)  # 26 + 1.5 x 50 > 100
    assert clock.fits(CHEAP)
    assert kernels.Clock(None, {CHEAP: 1e9}).fits(CHEAP)


def test_what_fails_is_recorded_and_the_rest_goes_on(smoke, monkeypatch):
    def fails(*_):
        raise torch.OutOfMemoryError("no more\nmemory")

    monkeypatch.setattr(kernel_cases, "F", SimpleNamespace(linear=fails))
    code, new, text = smoke()
    failed = [one for one in new if "error" in one]
    assert code == 0
    assert [one["contender"] for one in failed] == ["dense"] * 4
    assert len(new) == 12
    assert failed[0]["error"] == "OutOfMemoryError: no more memory"
    assert "OutOfMemoryError: no more memory" in text.split("## Errors")[1]
    assert smoke()[1] == []


def test_only_what_low_precision_is_shown_on(smoke, monkeypatch):
    wide = [linear_case("BERT-base", 128, 256, rows, 0.5, "pivoted") for rows in (1, 8, 4096)]
    monkeypatch.setattr(kernels, "all_cases", lambda *args, **options: iter(wide))
    _, new, _ = smoke("--low-precision")
    assert {one["rows"] for one in new} == {1, 4096}


def test_other_errors_are_not_hidden(smoke, monkeypatch):
    def fails(*_, **__):
        raise TypeError("a mistake of the benchmark")

    monkeypatch.setattr(kernel_cases, "sketched_linear", fails)
    with pytest.raises(TypeError, match="a mistake"):
        smoke()


def test_a_device_that_stopped_answering_ends_the_run(smoke, monkeypatch):
    monkeypatch.setattr(kernel_cases, "sketched_linear", lambda *_, **__: torch.zeros(2) @ torch.zeros(3))
    monkeypatch.setattr(kernels.Session, "answers", lambda self: False)
    code, new, text = smoke()
    assert code == kernels.BROKEN
    assert len(new) == 1
    assert "There was no time for 1 others" in text


def test_the_compiled_contender(monkeypatch):
    """Its backward is run many times on one forward, and every form can be traced."""
    options = fake_compiler(monkeypatch)
    bench = kernel_measure.Bench(torch.device("cpu"), "fp32", True)
    wanted = [("compiled", "forward"), ("compiled", "backward")]
    with functorch_config.patch(donated_buffer=True):
        for form in ("pair", "pivoted"):
            found = list(kernel_measure.measure(linear_case("m", 32, 24, 4, 0.5, form), wanted, bench))
            assert [one.get("error") for one in found] == [None, None]
        assert not functorch_config.donated_buffer
    assert options[0] == {"mode": "max-autotune-no-cudagraphs", "dynamic": False}


def fake_compiler(monkeypatch):
    """Let torch.compile trace, and compile nothing; returns the options that it is given."""
    options = []

    def compile_(function, **given):
        options.append(given)
        return real(function, backend="aot_eager", fullgraph=True)

    real = torch.compile
    monkeypatch.setattr(torch, "compile", compile_)
    return options


def test_differences():
    a = torch.tensor([3.0, 4.0])
    assert kernel_measure.difference((a, a * 1.5), (a, a)) == pytest.approx(0.5)
    assert kernel_measure.difference((a * torch.nan, a), (a, a)) != 0.0


# The report


def records(case, dtype="bf16", forward=None, backward=None, **more):
    """A record for each time, by contender; the roofline is 1 microsecond unless it is given."""
    about = {
        "device": "H100",
        "torch": "2.13",
        "triton": "3.9",
        "cuda": "13.0",
        "commit": "abc",
        "date": "2026-11-22",
        "dtype": dtype,
        **case.labels,
        "sizes": case.sizes,
        "vectors": case.vectors,
        "width": case.width,
        "picks": case.picks(dtype, H100),
        "roofline": 1.0,
        "host": 5.0,
        **more,
    }
    return [
        {**about, "contender": name, "pass": direction, "microseconds": microseconds}
        for direction, times in (("forward", forward), ("backward", backward))
        for name, microseconds in (times or {}).items()
    ]


def verdicts(target, found):
    """Whether each pass of each shape reaches a target, in the eyes of the one who decides."""
    target = TARGETS[target]
    return [one[0] >= target.wanted for one in gains(target, target.subject, shapes_of(found))]


SMALL = linear_case("m", 768, 768, 65536, 0.17, "pair")  # rank 64: the kernel
WIDE = linear_case("m", 4096, 4096, 512, 0.5, "pair")  # rank 1024: two products
LARGE = linear_case("m", 4096, 2048, 4096, 0.5, "pair")
DECODE = linear_case("Llama-7B", 4096, 4096, 8, 0.5, "pivoted")


@pytest.mark.parametrize(
    ("target", "case", "reaches", "misses"),
    [
        (0, SMALL, {"triton": 100.0, "two products": 97.1}, {"triton": 100.0, "two products": 96.9}),
        (0, WIDE, {"two products": 10.0, "compiled": 9.71}, {"two products": 10.0, "compiled": 9.69}),
        (1, SMALL, {"triton": 10.0, "two products": 11.51}, {"triton": 10.0, "two products": 11.49}),
        (
            1,
            SMALL,
            {"triton": 10.0, "two products": 20.0, "compiled": 11.51},
            {"triton": 10.0, "two products": 20.0, "compiled": 11.49},
        ),
        (2, WIDE, {"two products": 10.0, "dense": 17.01}, {"two products": 10.0, "dense": 16.99}),
        (3, LARGE, {"two products": 1.24}, {"two products": 1.26}),
        (5, DECODE, {"triton": 10.0, "dense": 17.01}, {"triton": 10.0, "dense": 16.99}),
    ],
)
def test_targets(target, case, reaches, misses):
    assert verdicts(target, records(case, forward=reaches)) == [True]
    assert verdicts(target, records(case, forward=misses)) == [False]
    assert verdicts(target, records(case, forward=reaches, backward=reaches)) == [True, True]
    slow = {name: 10 * time for name, time in misses.items()}
    if target != 3:
        assert verdicts(target, records(case, forward=reaches, backward=slow)) == [True, False]


def test_which_shapes_a_target_is_for():
    times = {"triton": 1.0, "two products": 1.0, "dense": 1.0}
    for target, case in (
        (1, linear_case("m", 4096, 4096, 65, 0.25, "pair")),  # rank 512
        (2, linear_case("m", 4096, 4096, 512, 0.25, "pair")),
        (2, linear_case("m", 4096, 2048, 512, 0.5, "pair")),
        (3, linear_case("m", 4096, 2048, 2048, 0.5, "pair")),
        (3, linear_case("m", 4096, 512, 4096, 0.5, "pair")),
    ):
        assert verdicts(target, records(case, forward=times)) == []
    assert verdicts(1, records(linear_case("m", 4096, 4096, 64, 0.25, "pair"), forward=times)) == [False]


def test_the_report_names_what_misses_and_what_fails():
    found = records(SMALL, forward={"triton": 20.0, "two products": 10.0, "dense": 30.0}, difference=0.5)
    found[1].pop("difference")
    found[2]["difference"] = float("nan")
    failed = records(WIDE, forward={"compiled": 1.0})
    failed[0] |= {"error": "InductorError: no choice"}
    failed[0].pop("microseconds")
    text = summary([*found, *failed], left=7)
    more = details([*found, *failed])
    assert "H100, torch 2.13, Triton 3.9, CUDA 13.0, commit abc, 2026-11-22." in text
    assert "There was no time for 7 others" in text
    line = "- 0.50 x two products: bf16 linear m 768->768, rows 65536, pair, ratio 0.17, rank 64, forward"
    assert more.count(f"{line} (picked: triton)") == 2  # of the first two targets
    assert "forward: picked the slower one in 1 of 1, which cost 2.00 x in these, 2.000 x over all" in text
    assert "0 of 2 agree with plain torch" in text
    assert "- nan: bf16 linear" in text
    assert "compiled bf16 linear m 4096->4096 512 pair 0.5 1024 forward: InductorError: no choice" in text
    rows = more.splitlines()
    assert rows[-2].endswith("| forward | triton | 20.0 (5%) | 10.0 (10%) | 30.0 (3%) |  |")
    assert rows[-1].endswith("| error |")


def test_the_verdict_on_decode():
    found = []
    for rows, gain in ((1, 1.5), (16, 1.2)):
        case = linear_case("m", 1024, 1024, rows, 0.5, "pair")
        found += records(case, forward={"triton": 10.0, "two products": 10.0 * gain})
        case = linear_case("m", 1024, 1024, rows, 0.5, "pivoted")
        found += records(case, forward={"triton": 10.0, "two products": 8.0})
    text = summary(found)
    assert (
        "- single layers: 1.34 x two products (geometric mean), faster in 2 of 2, 1.20 to 1.50 x: take"
        in text
    )
    assert "- pivoted: 0.80 x two products (geometric mean), faster in 0 of 2, 0.80 to 0.80 x: leave" in text


def test_the_report_on_whole_models_and_low_precision():
    case = next(model_cases("Llama-1B"))
    times = {"auto": 10.0, "dense": 16.0, "compiled": 6.0, "compiled dense": 9.0, "two products": 10.0}
    found = records(case, forward=times)
    found += records(WIDE, forward={"two products": 10.0, "int8": 8.0, "fp8": 20.0})
    assert [one[0] for one in gains(TARGETS[4], "picked", shapes_of(found))] == [1.6]
    assert verdicts(0, records(case, forward=times)) == []
    text = summary(found)
    assert "batch 1: auto 1.60, two products 1.60, compiled 1.50" in text
    assert "- int8, more rows: 1.25 x, faster in 1 of 1" in text
    assert "- fp8, more rows: 0.50 x, faster in 0 of 1" in text
    assert "## int8 and fp8\n\nNone." in summary(records(SMALL, forward={"two products": 1.0}))


@pytest.mark.slow
def test_as_a_program(capsys):
    with pytest.raises(SystemExit, match="on a CPU there is only the smoke run: add --quick"):
        kernels.main(["--device", "cpu"])
    with pytest.raises(SystemExit):
        kernels.main(["--device", "cpu", "--quick", "--resume", "nowhere.jsonl"])
    assert "no such file: nowhere.jsonl" in capsys.readouterr().err
    command = [sys.executable, str(BENCHMARKS / "kernels.py"), "--device", "cpu", "--quick", "--seconds", "0"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.startswith("# Kernels")
