"""Every model of the zoo goes through the whole main job."""

import copy

import pytest
import torch
from torch.nn.utils import parametrize
from zoo import ZOO, call, generate, generating, names, scalar, tensors

import panther_compile as pc

OPTIONS = {"min_params": 256, "allow_slower": True, "progress": False, "synthetic": False}


def stored_numbers(model):
    unique = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(tensor.numel() for tensor in unique.values())


def made_plain(model):
    """The model with the weights that weight norm makes, as the sketch and what comes of it have them."""
    for module in list(model.modules()):
        if parametrize.is_parametrized(module, "weight"):
            parametrize.remove_parametrizations(module, "weight")
    return model


# Each is built like one that stays, and is sketched, saved and loaded in tests/integrations all the same.
SELDOM = ("roberta", "distilbert", "mistral", "bart", "clip", "vit", "mobilenet_v2", "t5")


def often(found):
    return [pytest.param(name, marks=pytest.mark.slow if name in SELDOM else ()) for name in found]


@pytest.fixture(scope="module", params=often(names()))
def case(request):
    """(entry, dense model, sketched model), built once for all the checks of one model."""
    entry = ZOO[request.param]
    dense = entry.build()
    return entry, dense, pc.sketchify(dense, 0.5, **OPTIONS)


def outputs(model, entry):
    with torch.no_grad():
        return tensors(call(model, entry.inputs()))


def assert_same(found, wanted, tolerance):
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape
        assert (a - b).norm() <= tolerance * b.norm() + 1e-7


def test_sketched_model_is_of_the_users_class_and_smaller(case):
    _, dense, small = case
    assert type(small) is type(dense)
    assert stored_numbers(small) < stored_numbers(dense)


def test_forward_has_the_shapes_of_the_dense_model(case):
    entry, dense, small = case
    found, wanted = outputs(small, entry), outputs(dense, entry)
    assert [t.shape for t in found] == [t.shape for t in wanted]
    assert all(bool(torch.isfinite(t).all()) for t in found)


def test_dense_model_is_untouched(case):
    entry, dense, _ = case
    assert_same(outputs(dense, entry), outputs(entry.build(), entry), 0.0)


def test_report_adds_up(case):
    entry, _, small = case
    report = pc.sketch_report(small)
    assert report.stored_numbers == stored_numbers(small)
    assert report.dense_numbers == stored_numbers(made_plain(entry.build()))
    assert report.achieved_ratio <= 0.5
    assert all(row.reason for row in report.skipped)


def test_trains_one_step(case):
    entry, _, small = case
    model = copy.deepcopy(small).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    before = scalar(call(model, entry.inputs()))
    before.backward()
    silent = [
        name
        for name, p in model.named_parameters()
        if p.grad is None and p.requires_grad and not name.startswith(entry.no_grad)
    ]
    assert silent == []
    optimizer.step()
    assert torch.isfinite(scalar(call(model, entry.inputs())))


def test_densified_model_gives_the_same_outputs(case):
    entry, _, small = case
    plain, dense = pc.densify(small), made_plain(entry.build())
    assert [type(m) for m in plain.modules()] == [type(m) for m in dense.modules()]
    assert set(plain.state_dict()) == set(dense.state_dict())
    assert_same(outputs(plain, entry), outputs(small, entry), 2e-4)


def test_saved_model_loads_to_equal_outputs(case, tmp_path):
    entry, _, small = case
    pc.save_sketched(small, tmp_path)
    loaded = pc.load_sketched(entry.build(), tmp_path)
    assert_same(outputs(loaded, entry), outputs(small, entry), 0.0)
    assert pc.sketch_report(loaded) == pc.sketch_report(small)


@pytest.mark.parametrize("name", often(generating()))
def test_generates(name):
    entry = ZOO[name]
    small = pc.sketchify(entry.build(), 0.5, **OPTIONS)
    found = generate(small, entry)
    wanted = generate(pc.densify(small), entry)
    assert torch.equal(found, wanted)
