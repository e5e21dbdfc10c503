"""What benchmarks/kernels.py times beside single layers: whole models, and factors in int8 and fp8."""

import sys
from pathlib import Path

import pytest
import torch

from panther_compile.kernels import dispatch

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))  # last: it has an onnx.py
import kernel_cases
import kernel_low_precision
import kernel_measure
import kernel_models
from kernel_cases import CHEAP, COMPILED, LOW, linear_case, projections_case
from kernel_models import TINY, model_cases
from kernel_order import in_order

H100 = dispatch.DeviceClass(linear=True)


def fake_compiler(monkeypatch):
    """Let torch.compile trace, and compile nothing; returns the options that it is given."""
    options = []

    def compile_(function, **given):
        options.append(given)
        return real(function, backend="aot_eager", fullgraph=True)

    real = torch.compile
    monkeypatch.setattr(torch, "compile", compile_)
    return options


@pytest.mark.parametrize("rows", [1, 24])
@pytest.mark.parametrize(("kind", "most"), [("int8", 0.02), ("fp8", 0.06)])
def test_factors_in_low_precision(kind, most, rows):
    """Close to plain torch, for few rows and for many, of one layer and of several."""
    if kind == "fp8" and torch.__version__ < (2, 13):
        pytest.skip("torch 2.11 has no products of fp8 with a scale for each row on a CPU")
    draw = kernel_cases.Draw(torch.device("cpu"), torch.bfloat16)
    for case in (
        linear_case("m", 128, 128, rows, 0.5, "pair"),
        linear_case("m", 128, 128, rows, 0.5, "pivoted"),
        projections_case("m", 128, (128, 128), rows, 0.5),
    ):
        plain = case.build(draw).plain
        low = kernel_measure.run_of(kind, case, case.build(draw)._replace(plain=plain))
        with torch.no_grad():
            found = low.function(*low.inputs)
            error = kernel_measure.difference(found, plain.function(*plain.inputs))
        assert 0 < error < most


def test_the_scale_of_a_row_of_zeros():
    numbers, scale = kernel_low_precision.stored("fp8", torch.tensor([[0.0, 0.0], [1.0, -2.0]]))
    assert (numbers.float() * scale[:, None]).tolist() == [[0.0, 0.0], [1.0, -2.0]]


def test_who_is_timed_in_low_precision():
    aligned, ragged = (linear_case("m", size, size, 64, 0.5, "pair") for size in (768, 760))
    assert aligned.contenders(LOW, "bf16", on_cuda=True) == ["int8", "fp8"]
    assert aligned.contenders(LOW, "fp16", on_cuda=True) == []
    assert ragged.quantize is None
    assert aligned.passes("int8") == ("forward",)
    telling = linear_case("BERT-base", 768, 768, 4096, 0.5, "pivoted")
    plan = list(in_order([aligned, ragged, telling], compiled=True))
    assert [case for case, stage in plan if stage == LOW] == [telling, aligned]
    assert plan.index((telling, LOW)) < plan.index((aligned, CHEAP))
    assert LOW not in [stage for _, stage in in_order([aligned], compiled=False)]


TINY_CASES = [one for name in TINY for one in model_cases(name, quick=True)]


PREFILLS = [one for one in TINY_CASES if one.labels["rows"] > 1]


@pytest.mark.slow
@pytest.mark.parametrize("case", PREFILLS)
def test_whole_models(case, monkeypatch):
    """The dry run of every contender, on a tiny model: sketched, dense, compiled, and one token of many."""
    options = fake_compiler(monkeypatch)
    bench = kernel_measure.Bench(torch.device("cpu"), "fp32", True)
    names = ["operator", "two products", "dense", *case.contenders(COMPILED, "fp32", on_cuda=True)]
    found = list(kernel_measure.measure(case, [(name, "forward") for name in names], bench))
    assert [one.get("error") for one in found] == [None] * 5
    assert found[0]["difference"] < 1e-5
    assert len(options) == 2
    assert case.passes("triton") == ("forward",)
    assert case.contenders(CHEAP, "bf16", on_cuda=True) == ["triton", "auto", "two products", "dense"]
    assert case.picks("bf16", H100) == "auto"
    assert case.tier == 0


def test_decoding_goes_on_from_the_prompt():
    """A token after a cache of the others has the logits that it has when all are given at once."""
    widths, draw = TINY["Llama-1B"], kernel_cases.Draw(torch.device("cpu"), torch.float32)
    model = kernel_models.made(widths, True, draw)
    tokens, length = torch.randint(99, (2, 9)), 9
    turns = kernel_models.turns_of(widths, 0, length, draw)
    caches = torch.zeros(widths.layers, 2, 2, widths.shared, length, widths.head_dim)
    with torch.no_grad():
        whole = model(tokens, turns, None)
        for last in range(1, length + 1):
            here = kernel_models.turns_of(widths, last - 1, 1, draw)
            kept = caches[:, :, :, :, :last]
            y = model(tokens[:, last - 1 : last], here, kept)
    torch.testing.assert_close(y, whole, rtol=1e-4, atol=1e-4)
