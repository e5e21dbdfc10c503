"""Work the same wherever the caller stands, and leave everything there as it was."""

import copy
import random
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from panther_compile.models.substitute import written_tensors

_OF_TORCH = frozenset(vars(nn.Module()))  # attributes of every module: its parameters, hooks, mode


@contextmanager
def unwritten(*models: nn.Module) -> Iterator[None]:
    """What the models write into tensors and attributes of theirs, as they run, is put back afterwards.

    Hooks that they register are taken off, as those by which transformers captures hidden states: that they
    are there is marked by an attribute.
    """
    modules = [module for model in models for module in model.modules()]
    hooks = [(table, set(table)) for module in modules for table in _hook_tables(module)]
    attributes = [(vars(module), _own_attributes(vars(module))) for module in modules]
    contents = [
        (value, copy.copy(value))
        for _, were in attributes
        for value in were.values()
        if type(value) in (list, dict, set, deque)
    ]
    buffers = [(module._buffers, dict(module._buffers)) for module in modules]
    before = [
        (tensor, tensor._version, tensor.detach().clone())
        for model in models
        for tensor in written_tensors(model)
        if not tensor.is_inference()  # which nothing writes into here
    ]
    try:
        yield
    finally:
        for table, were_there in hooks:
            for key in table.keys() - were_there:
                del table[key]
        for held, were in attributes:
            for name in _own_attributes(held).keys() - were.keys():
                del held[name]
            held.update(were)
        for value, before_run in contents:
            value.clear()
            (value.update if isinstance(value, dict | set) else value.extend)(before_run)
        for held, were in buffers:
            held.update(were)
        with torch.no_grad():
            for tensor, version, value in before:
                if tensor._version != version:
                    tensor.copy_(value)


def _hook_tables(module: nn.Module) -> list[dict[Any, Any]]:
    """What holds the hooks of a module, and whether they want keywords or are always called."""
    return [
        value
        for name, value in vars(module).items()
        if name in _OF_TORCH and "hook" in name and isinstance(value, dict)
    ]


def _own_attributes(held: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a module but for those that every module has."""
    return {name: value for name, value in held.items() if name not in _OF_TORCH}


@contextmanager
def eval_mode(*models: nn.Module) -> Iterator[None]:
    """All modules in eval mode, and each in its own again afterwards, with what it held, see `unwritten`.

    The flags are set one by one: `model.eval()` is refused by modules of torch.export, and does other things
    in those that override `train`.
    """
    modes = {module: module.training for model in models for module in model.modules()}

    def put_back() -> None:
        for module, mode in modes.items():
            module.training = mode

    with unwritten(*models), ExitStack() as stack:
        stack.callback(put_back)
        stack.callback(put_back)  # an interrupt may come within the first of the two
        for module in modes:
            module.training = False
        yield


@contextmanager
def without_fast_attention() -> Iterator[None]:
    """Attention of torch.nn without its fast path of eval mode, which leaves out modules and packs rows."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def generator_states() -> tuple[Any, ...]:
    """The states of the global generators: Python's, torch's, and those of the GPUs that are in use."""
    return random.getstate(), torch.get_rng_state(), *map(torch.cuda.get_rng_state, _gpus())


def swap_generators(states: tuple[Any, ...]) -> tuple[Any, ...]:
    """Let the global generators go on from other states; gives those that they were in.

    Args:
        states: of `generator_states`.
    """
    before, (python, cpu, *others) = generator_states(), states
    random.setstate(python)
    torch.set_rng_state(cpu)
    for device, state in enumerate(others):
        torch.cuda.set_rng_state(state, device)
    return before


@contextmanager
def same_draws(seed: int) -> Iterator[None]:
    """Whatever is drawn from the global generators is the same for a seed; they are put back afterwards."""
    with ExitStack() as stack:
        stack.callback(swap_generators, generator_states())
        random.seed(seed)
        # Not torch.manual_seed, which leaves a seed behind for GPUs that are not in use yet.
        for generator in (torch.default_generator, *(torch.cuda.default_generators[one] for one in _gpus())):
            generator.manual_seed(seed)
        yield


def _gpus() -> range:
    return range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)


@contextmanager
def undisturbed(*, grad: bool = False) -> Iterator[None]:
    """Put the global generators back afterwards; within, the caller's autograd, autocast and device are off.

    Args:
        grad: whether gradients are recorded within.
    """
    with ExitStack() as stack:
        stack.callback(swap_generators, generator_states())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(grad))
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield
