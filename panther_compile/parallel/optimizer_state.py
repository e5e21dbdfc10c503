"""The state of an optimizer under the user's parameter names, so that it can be given to other ranks.

Options (learning rates, betas) are kept for each parameter, because ranks of other stages have groups of
other parameters.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from panther_compile.errors import CheckpointError, ParallelError
from panther_compile.parallel.checkpoint_folder import KeptOptimizer
from panther_compile.parallel.engine import ParallelEngine

_NO_OPTIONS = ("params", "param_names")
_PLAIN = (bool, int, float, str, type(None))


def own_part(optimizer: Optimizer) -> Optimizer:
    """Take what steps this rank's share of the parameters, where states are divided over replicas."""
    return optimizer.optim if _divides_states(optimizer) else optimizer  # type: ignore[attr-defined]


def take_options(optimizer: Optimizer) -> None:
    """Give `ZeroRedundancyOptimizer` the options of its own part, which each step would take from it."""
    if _divides_states(optimizer):
        for group, part in zip(optimizer.param_groups, own_part(optimizer).param_groups, strict=True):
            group.update({key: value for key, value in part.items() if key != "params"})


def _divides_states(optimizer: Optimizer) -> bool:
    # By its name: to import the class warns of TorchScript.
    return any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__)


def name_parameters(engine: ParallelEngine, optimizer: Optimizer) -> dict[Tensor, str]:
    """The parameters of an optimizer and their names.

    Raises:
        ParallelError: one of them is not the engine's.
    """
    names: dict[Tensor, str] = {parameter: name for name, parameter in engine.named_parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in held:
        if parameter not in names:
            raise ParallelError(
                f"the optimizer holds a parameter {tuple(parameter.shape)} that is not the engine's: make it "
                "of engine.parameters(), after parallelize_model"
            )
    return {parameter: names[parameter] for parameter in held}


def describe(optimizer: Optimizer, names: Mapping[Tensor, str]) -> dict[str, Any]:
    """All that is no tensor: options and numbers, as JSON takes them.

    Args:
        optimizer: of a rank.
        names: of its parameters.
    """
    options = {
        names[parameter]: {
            key: _plain(value, f"option {key}") for key, value in group.items() if key not in _NO_OPTIONS
        }
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    numbers = {
        names[parameter]: {
            key: _plain(value, f"state {key} of {names[parameter]}")
            for key, value in state.items()
            if not isinstance(value, Tensor)
        }
        for parameter, state in optimizer.state.items()
    }
    return {"type": type(optimizer).__name__, "options": options, "numbers": numbers}


def merge(described: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What the ranks have described, as the fields of one `KeptOptimizer`; equal options are kept once."""
    parts = list(described)
    groups: list[Any] = []
    group_of = {}
    for part in parts:
        for name, options in part["options"].items():
            if options not in groups:
                groups.append(options)
            group_of[name] = groups.index(options)
    numbers = {name: held for part in parts for name, held in part["numbers"].items() if held}
    return {"type": parts[0]["type"], "groups": groups, "group_of": group_of, "numbers": numbers}


def find_tensors(optimizer: Optimizer, names: Mapping[Tensor, str]) -> dict[str, dict[str, Tensor]]:
    """Tensors of the state: name of the parameter -> key -> tensor."""
    return {
        names[parameter]: {key: value for key, value in state.items() if isinstance(value, Tensor)}
        for parameter, state in optimizer.state.items()
    }


def follows(value: Tensor, parameter: Tensor, *, is_divided: bool) -> bool:
    """Whether a tensor of the state has the parameter's shape, and is divided over ranks as it is.

    Args:
        value: of the state.
        parameter: that it belongs to.
        is_divided: whether ranks hold parts of the parameter.

    Raises:
        CheckpointError: it is the state of a part, in a form that only the optimizer knows.
    """
    if value.shape == parameter.shape:
        return True
    if is_divided and value.numel() != 1:
        raise CheckpointError(
            f"the optimizer keeps {tuple(value.shape)} for a parameter {tuple(parameter.shape)} that is "
            "divided over ranks; only state of the parameter's shape, or single numbers, can be saved then"
        )
    return False


def find_differences(
    optimizer: Optimizer, names: Mapping[Tensor, str], described: KeptOptimizer, unread: Collection[str]
) -> Iterator[str]:
    """Why a saved state is not that of an optimizer, one line each.

    Args:
        optimizer: of a rank.
        names: of its parameters.
        described: what `merge` gave.
        unread: parameters that the model's graph does not read: some meshes leave them to no rank.
    """
    if described.type != type(optimizer).__name__:
        yield f"the optimizer was {described.type}, and is {type(optimizer).__name__}"
    for group in optimizer.param_groups:
        held = [names[parameter] for parameter in group["params"] if names[parameter] not in unread]
        unknown = [name for name in held if name not in described.group_of]
        yield from (f"its optimizer did not train {name}" for name in unknown)
        numbers = {described.group_of.get(name) for name in held}
        if len(numbers - {None}) > 1:
            yield (
                f"a group of the optimizer, with {held[0]}, holds parameters that had {len(numbers)} "
                "different sets of options when they were saved"
            )


def restore(
    optimizer: Optimizer,
    names: Mapping[Tensor, str],
    tensors: Mapping[Tensor, Mapping[str, Tensor]],
    described: KeptOptimizer,
) -> None:
    """Give an optimizer its state back.

    Args:
        optimizer: of a rank.
        names: of its parameters.
        tensors: of the state, for each parameter.
        described: what `merge` gave, without differences.
    """
    packed = optimizer.state_dict()
    state = {}
    for group, saved in zip(optimizer.param_groups, packed["param_groups"], strict=True):
        known = [one for one in group["params"] if names[one] in described.group_of]
        for parameter in known[:1]:  # the others have the same options
            for key, value in described.groups[described.group_of[names[parameter]]].items():
                saved[key] = _like(value, group.get(key))
        for index, parameter in zip(saved["params"], group["params"], strict=True):
            held = {**tensors.get(parameter, {}), **described.numbers.get(names[parameter], {})}
            if held:
                state[index] = held
    optimizer.load_state_dict({**packed, "state": state})


def _plain(value: Any, where: str) -> Any:
    """A number, a text, or a list of them."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (tuple, list)):
        return [_plain(one, where) for one in value]
    if isinstance(value, _PLAIN):
        return value
    raise CheckpointError(f"{where} of the optimizer is a {type(value).__name__}, which cannot be saved")


def _like(value: Any, current: Any) -> Any:
    """An option in the type that the optimizer has it in."""
    if isinstance(current, Tensor):
        return torch.full_like(current, value)
    return tuple(value) if isinstance(current, tuple) else value
