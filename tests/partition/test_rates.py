"""Rates of kinds of operations: what a backward consists of, the fit, and predictions by hand."""

import dataclasses
import json
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn

from panther_compile import partition_model
from panther_compile.errors import ConfigError, ConfigTypeError
from panther_compile.partition import Hardware, Link, measure_hardware
from panther_compile.partition.graph import rates
from panther_compile.partition.graph.capture import capture
from panther_compile.partition.graph.hardware import Rate
from panther_compile.partition.graph.observe import KINDS, Operation, observe, observe_backward

LINK = Link(1e12, 0.0)


def hardware(**launch):
    made = tuple(
        Rate(kind, phase, launch.get(f"{kind}_{phase}", 0.0), 1e-9, 1e-12)
        for kind in KINDS
        for phase in ("forward", "backward")
    )
    return Hardware("by rates", 1.0, 1.0, 10**12, LINK, LINK, launch_seconds=1.0, rates=made)


def observed(model, *inputs):
    read = capture(model, inputs, {})
    notes = observe(read)
    before = {node: list(note.products) for node, note in notes.items()}
    observe_backward(read, notes)
    assert before == {node: note.products for node, note in notes.items()}
    return {node.name: note for node, note in notes.items()}


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Linear(16, 32), nn.LayerNorm(32)
        self.conv = nn.Conv1d(4, 4, 3, padding=1, groups=4)

    def forward(self, x):
        y = self.norm(self.up(x).relu())
        return nn.functional.dropout(self.conv(y), 0.5, True).transpose(1, 2) + 1


def test_a_backward_consists_of_what_torch_dispatches():
    notes = observed(Small(), torch.randn(2, 4, 16))
    linear = Counter(one.kind for one in notes["linear"].backward)
    assert linear["product"] == 1  # the input needs no gradient
    assert sum(one.macs for one in notes["linear"].backward) == 8 * 16 * 32
    assert [one.kind for one in notes["relu"].backward if one.kind != "view"] == ["pointwise"]
    assert "other" in Counter(one.kind for one in notes["layer_norm"].backward)
    assert "grouped convolution" in Counter(one.kind for one in notes["conv1d"].backward)
    assert "random" in Counter(one.kind for one in notes["dropout"].operations)
    assert {one.kind for one in notes["transpose"].operations} == {"view"}
    assert notes["add"].backward == []
    both = observed(Small(), torch.randn(2, 4, 16, requires_grad=True))
    assert Counter(one.kind for one in both["linear"].backward)["product"] == 2


def test_attention_is_one_operation():
    class Attention(nn.Module):
        def forward(self, x):
            return nn.functional.scaled_dot_product_attention(x, x, x)

    note = observed(Attention(), torch.randn(1, 2, 8, 4, requires_grad=True))["scaled_dot_product_attention"]
    assert [one.kind for one in (*note.operations, *note.backward)] == ["attention"] * 2
    assert note.backward[0].bytes == 2 * note.operations[0].bytes > 0


def test_predictions_by_hand():
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    x = torch.randn(4, 8)
    cluster = hardware(product_forward=1.0, product_backward=2.0)
    part = partition_model(model, x, mesh={"pp": 2}, hardware=cluster)
    for index, stage in enumerate(part.stages):
        assert stage.forward_seconds == pytest.approx(2 * (1.0 + 256e-9), rel=1e-6)
        products = 3 if index == 0 else 4  # the model's input needs no gradient
        assert stage.backward_seconds == pytest.approx(products * (2.0 + 256e-9), rel=1e-6)
    inference = partition_model(model, x, mesh={"pp": 2}, hardware=cluster, training=False)
    assert all(stage.backward_seconds == 0 for stage in inference.stages)
    record = json.loads(part.to_json())["hardware"]["rates"]
    assert record[0] == dataclasses.asdict(cluster.rates[0])


def test_models_without_data_and_modules_that_look_at_values():
    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.inner = nn.BatchNorm1d(8), nn.Linear(8, 8)

        def forward(self, x):
            return self.inner(self.norm(x)) if x.sum() < 1e9 else x

    seconds = {"product_forward": 1.0, "product_backward": 2.0}
    with torch.device("meta"):
        big = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        part = partition_model(big, torch.empty(4, 8), mesh={"pp": 1}, hardware=hardware(**seconds))
    assert part.stages[0].backward_seconds == pytest.approx(6.0, rel=1e-3)
    model = nn.Sequential(nn.Linear(8, 8), Looks())
    part = partition_model(
        model, torch.randn(4, 8), mesh={"pp": 1}, boundaries=["1"], hardware=hardware(**seconds)
    )
    assert part.stages[0].backward_seconds == pytest.approx(6.0, rel=1e-3)
    assert int(model[1].norm.num_batches_tracked) == 0


def test_starting_an_operation_is_not_divided_over_tp():
    model, x = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)), torch.randn(512, 64)
    cluster = dataclasses.replace(hardware(pointwise_forward=1.0), intra_node=Link(1e15, 0.0))
    whole, shared = (partition_model(model, x, mesh={"tp": tp}, hardware=cluster).stages[0] for tp in (1, 2))
    assert 1.0 < shared.forward_seconds < whole.forward_seconds
    work = whole.forward_seconds - 1.0
    assert shared.forward_seconds - 1.0 == pytest.approx(work / 2, rel=0.05)


def test_constants_are_found_again():
    rng = np.random.default_rng(0)
    wanted = {kind: tuple(rng.uniform(0.5, 2, 3)) for kind in KINDS}
    counted, taken = [], []
    for number in range(60):
        row = []
        for kind in rng.choice(KINDS, 20):
            macs = float(rng.integers(1, 50)) if number % 2 else 0.0
            row.append(Operation(str(kind), macs, float(rng.integers(1, 50))))
        counted.append(row)
        taken.append(
            sum(
                launch + (one.macs * by_mac if one.macs else one.bytes * by_byte)
                for one in row
                for launch, by_mac, by_byte in [wanted[one.kind]]
            )
        )
    for rate in rates._fit("forward", counted, taken):
        found = rate.launch_seconds, rate.seconds_per_mac, rate.seconds_per_byte
        assert found == pytest.approx(wanted[rate.kind])
    assert rates._not_negative(np.array([[1.0, 1.0], [1.0, 2.0]]), np.array([1.0, 0.0])).min() >= 0


def test_a_device_is_measured(monkeypatch):
    monkeypatch.setattr(rates, "_SHAPES", ((1, 4, 8, 8),))
    monkeypatch.setattr(rates, "_SEQUENCES", 1)
    monkeypatch.setattr(rates, "_ROUNDS", 2)
    before = torch.get_rng_state()
    here = measure_hardware("h100")
    assert torch.equal(before, torch.get_rng_state())
    assert (here.name, here.memory_bytes) == ("h100, measured", 80 * 10**9)
    assert [(rate.kind, rate.phase) for rate in here.rates] == [
        (kind, phase) for phase in ("forward", "backward") for kind in KINDS
    ]
    for rate in here.rates:
        assert min(rate.launch_seconds, rate.seconds_per_mac, rate.seconds_per_byte) >= 0
    assert sum(rate.launch_seconds for rate in here.rates) > 0
    part = partition_model(Small(), torch.randn(2, 4, 16), mesh={"pp": 2}, hardware=here)
    assert part.step_seconds > 0


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"device": "abacus"}, ConfigError, "device='abacus' cannot be used here"),
        ({"device": "meta"}, ConfigError, "device='meta' holds no numbers"),
        ({"dtype": "float32"}, ConfigTypeError, "dtype='float32' is a str, wanted dtype"),
        ({"dtype": torch.int8}, ConfigError, "dtype=torch.int8, wanted a floating one"),
    ],
)
def test_what_nothing_can_be_measured_on_is_refused(options, error, text):
    with pytest.raises(error, match=text):
        measure_hardware(**options)
