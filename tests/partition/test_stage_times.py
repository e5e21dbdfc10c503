"""Profiles: what is measured of each node, and that the model does not notice."""

import pytest
import torch
import zoo

from panther_compile import partition_model
from panther_compile.partition.graph.capture import capture, example_arguments
from panther_compile.partition.graph.measure import _level, measure_nodes


def captured(name):
    entry = zoo.ZOO[name]
    model = entry.build().train()
    return model, capture(model, *example_arguments(entry.inputs()))


@pytest.mark.parametrize("name", [pytest.param("resnet", marks=pytest.mark.slow), "gpt2", "lstm"])
def test_every_call_is_measured_and_the_model_is_left_alone(name):
    model, read = captured(name)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    generator = torch.get_rng_state()
    measured = measure_nodes(read, repeats=2)
    calls = {node.name for node in read.graph_module.graph.nodes if node.op.startswith("call")}
    assert set(measured.forward) == calls
    assert set(measured.backward) <= calls
    assert sum(measured.backward.values()) > 0
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), generator)


def test_without_training_no_backward_is_measured():
    _, read = captured("unet")
    assert measure_nodes(read, repeats=1, training=False).backward is None


def test_the_stopwatch_is_taken_off_each_node_alike():
    assert _level([{"a": 5.0, "b": 3.0}, {"a": 4.0, "b": 4.0}], total=5.0) == {"a": 3.0, "b": 2.0}
    assert _level([{"a": 4.0, "b": 1.0}], total=2.0) == {"a": 2.0, "b": 0.0}
    assert _level([{"a": 1.0, "b": 3.0}], total=8.0) == {"a": 2.0, "b": 6.0}


def test_a_profile_sets_both_passes():
    entry = zoo.ZOO["mixer"]
    model = entry.build().train()
    part = partition_model(model, entry.inputs(), mesh={"pp": 2}, hardware="cpu", profile=True)
    assert all(stage.forward_seconds > 0 and stage.backward_seconds > 0 for stage in part.stages)
    inference = partition_model(
        model, entry.inputs(), mesh={"pp": 2}, hardware="cpu", profile=True, training=False
    )
    assert all(stage.backward_seconds == 0 for stage in inference.stages)
