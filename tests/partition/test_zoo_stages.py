"""Every model of the zoo: cut, split, and the stages run as the model does, forward and backward."""

import copy

import pytest
import torch
import zoo
from stage_milp import milp_bound

from panther_compile import sketchify
from panther_compile.partition import partition_model

QUICK = ["gpt2", "unet", "tied_autoencoder"]
CAPTURED = [name for name in zoo.names() if name != "early_exit"]


def check_stages(name, model, *, stages=3, **options):
    entry = zoo.ZOO[name]
    inputs = entry.inputs()
    reference = copy.deepcopy(model)
    part = partition_model(model, inputs, mesh={"pp": stages}, hardware="cpu", **options)
    staged = part.split()

    wanted, found = zoo.call(reference, inputs), zoo.call(staged, inputs)
    assert type(found) is type(wanted)
    for before, after in zip(zoo.tensors(wanted), zoo.tensors(found), strict=True):
        torch.testing.assert_close(after, before, rtol=1e-5, atol=5e-6)
    entry.loss(wanted).backward()
    entry.loss(found).backward()
    own = dict(model.named_parameters())
    largest = max(float(p.grad.abs().max()) for p in reference.parameters() if p.grad is not None)
    for parameter_name, before in reference.named_parameters():
        after = own[parameter_name].grad
        if before.grad is None or after is None:
            assert before.grad is None or not before.grad.any()
            assert after is None or not after.any()
        else:
            torch.testing.assert_close(after, before.grad, rtol=1e-4, atol=1e-6 * max(1.0, largest))
    buffers = dict(model.named_buffers())
    for buffer_name, before in reference.named_buffers():
        torch.testing.assert_close(buffers[buffer_name], before)
    check_ownership(model, part, staged)
    return part


def check_ownership(model, part, staged):
    """Each stage holds what its record says: the model's own tensors under the user's names."""
    own = dict(model.named_parameters())
    persistent = set(model.state_dict())
    for record, module in zip(part.stages, staged.stages, strict=True):
        held = dict(module.named_parameters())
        assert set(held) == set(record.parameters)
        assert all(held[name] is own[name] for name in held)
        assert set(module.state_dict()) <= persistent
    held_somewhere = {name for record in part.stages for name in record.parameters}
    assert held_somewhere | set(part.unused) == set(own)
    holders = {name: [s.index for s in part.stages if name in s.parameters] for name in held_somewhere}
    assert {shared.name: list(shared.stages) for shared in part.shared} == {
        name: stages for name, stages in holders.items() if len(stages) > 1
    }
    for before, after in zip(part.stages, part.stages[1:], strict=False):
        assert before.outputs == after.inputs
    assert part.stages[0].gradient_sent_bytes == 0
    assert part.stages[-1].sent_bytes == 0


@pytest.mark.parametrize("name", QUICK)
def test_stages_are_the_model(name):
    check_stages(name, zoo.ZOO[name].build().eval())


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("name", CAPTURED)
def test_stages_are_the_model_throughout_the_zoo(name, mode):
    check_stages(name, getattr(zoo.ZOO[name].build(), mode)())


@pytest.mark.parametrize("name", ["resnet", pytest.param("mixer", marks=pytest.mark.slow)])
def test_batch_norms_and_norms_in_training(name):
    check_stages(name, zoo.ZOO[name].build().train())


@pytest.mark.parametrize("name", [pytest.param("vit", marks=pytest.mark.slow), "odd_convnet"])
def test_sketched_models(name):
    model = sketchify(zoo.ZOO[name].build(), ratio=0.5, min_params=0, allow_slower=True, progress=False)
    check_stages(name, model)


def test_tied_parameters_kept_together():
    part = check_stages(
        "tied_autoencoder", zoo.ZOO["tied_autoencoder"].build().eval(), stages=2, tied="together"
    )
    assert part.shared == ()


@pytest.mark.slow
@pytest.mark.parametrize("name", CAPTURED)
def test_within_five_percent_of_the_bound(name, record_property):
    entry = zoo.ZOO[name]
    model = entry.build().train()
    for stages in (2, 4):
        part = partition_model(model, entry.inputs(), mesh={"pp": stages}, hardware="cpu", tied="shared")
        bound = part.lower_bound_seconds()
        if not part.exact:
            bound = max(bound, milp_bound(part.flow, part.request, part.bottleneck_seconds))
            record_property(f"gap_{stages}", part.bottleneck_seconds / bound - 1)
            assert part.bottleneck_seconds <= 1.05 * bound


@pytest.mark.parametrize("name", [pytest.param("bert", marks=pytest.mark.slow), "unet"])
def test_optimum_is_that_of_the_mixed_integer_program(name):
    entry = zoo.ZOO[name]
    part = partition_model(entry.build(), entry.inputs(), mesh={"pp": 3}, hardware="cpu", tied="shared")
    assert part.exact
    bound = milp_bound(part.flow, part.request, part.bottleneck_seconds)
    assert part.bottleneck_seconds == pytest.approx(bound, rel=1e-3)
