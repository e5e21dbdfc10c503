"""A state dict goes into layers of the same spec: pivots at another place would pass by their shapes."""

import io

import pytest
import torch
from torch import nn

import panther_compile as pc
from panther_compile.errors import CheckpointMismatchError


def sketch_of(seed: int) -> nn.Module:
    """A sketch of random weights: whether its pivots come first or last depends on them."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, 12), nn.ReLU())
    return pc.sketchify(model, 0.6, synthetic=False, min_params=1, allow_slower=True)


def starts(model: nn.Module) -> list[int]:
    return [layer.start for layer in model.modules() if isinstance(layer, pc.SketchedLinear)]


@pytest.fixture(scope="module")
def unlike() -> tuple[nn.Module, nn.Module]:
    """Two sketches with tensors of the same shapes and pivots at other places."""
    one = sketch_of(0)
    others = (sketch_of(seed) for seed in range(1, 50))
    other = next(model for model in others if starts(model) != starts(one))
    assert [p.shape for p in one.parameters()] == [p.shape for p in other.parameters()]
    return one, other


def test_factors_with_other_pivots_are_refused(unlike: tuple[nn.Module, nn.Module]) -> None:
    one, other = unlike
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(CheckpointMismatchError, match=r"another sketch .start [0-9]+, here"):
        other.load_state_dict(one.state_dict())
    assert all(torch.equal(before[name], tensor) for name, tensor in other.state_dict().items())


def test_a_state_dict_that_went_through_a_file_is_known_too(unlike: tuple[nn.Module, nn.Module]) -> None:
    one, other = unlike
    file = io.BytesIO()
    torch.save(one.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    with pytest.raises(CheckpointMismatchError):
        other.load_state_dict(state)
    twin = sketch_of(0)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    twin.load_state_dict(state)
    x = torch.randn(3, 12)
    assert torch.equal(twin(x), one(x))


def test_a_layer_alone_is_named_by_its_class(unlike: tuple[nn.Module, nn.Module]) -> None:
    one, other = unlike
    with pytest.raises(CheckpointMismatchError, match="SketchedLinear: these factors"):
        other[0].load_state_dict(one[0].state_dict())  # type: ignore[index]


def test_tensors_without_notes_load_as_ever() -> None:
    """As safetensors and distributed checkpoints give them."""
    model = sketch_of(0)
    plain = dict(model.state_dict())
    sketch_of(0).load_state_dict(plain)


def test_tensors_alone_tell_of_other_pivots(unlike: tuple[nn.Module, nn.Module]) -> None:
    """As safetensors and `{name: tensor}` of a state dict give them."""
    leading, trailing = sorted(unlike, key=lambda model: starts(model)[0])
    for strict in (True, False):
        with pytest.raises(CheckpointMismatchError, match=r"0: .*the trailing inputs, here the leading"):
            leading.load_state_dict(dict(trailing.state_dict()), strict=strict)
    trailing.load_state_dict(dict(trailing.named_parameters()))  # parameters alone say nothing


def test_notes_without_that_tensor_load(unlike: tuple[nn.Module, nn.Module]) -> None:
    """As they were saved when only the notes told of the pivots."""
    trailing = next(model for model in unlike if starts(model)[0] > 0)
    state = trailing.state_dict()
    del state["0.trailing"]
    trailing.load_state_dict(state)
    other = next(model for model in unlike if starts(model)[0] == 0)
    with pytest.raises(CheckpointMismatchError, match=r"another sketch .start"):
        other.load_state_dict(state)
