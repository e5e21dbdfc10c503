"""Data, however it is given, becomes a list of calls of the model."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from panther_compile.errors import ConfigTypeError, DataError

Data: TypeAlias = Iterable[Any] | Callable[[nn.Module], Any]
"""A loader, a list of batches, or a function that calls the model it is given.

A batch is a tensor, a mapping of keyword arguments, or a tuple or list of positional arguments, whose
last ones (labels) are left out where `forward` has no place for them."""

_KEEPS = ("attention_mask",)
_CACHES = ("past_key_values", "cache_params")
_HIDES = ("src_key_padding_mask", "key_padding_mask", "padding_mask")


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a model: `model(*args, **kwargs)`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self, model: nn.Module) -> Any:
        """Call the model."""
        return model(*self.args, **self.kwargs)


def record_calls(model: nn.Module, data: Data) -> list[Call]:
    """The calls that the data makes, with their tensors on the model's device.

    Args:
        model: tells what its `forward` takes, and where its tensors are.
        data: see `Data`; a list of `Call` is taken as it is.

    Raises:
        ConfigTypeError: data is none of these, or a batch is no tensor, mapping, tuple or list.
        DataError: there is no batch; or a call is given a cache; or reading failed half-way, and the error's
            `calls` hold what was read before, which can be given as data in turn.
    """
    device = _device(model)
    calls: list[Call] = []
    try:
        source = _loop_calls(model, data) if _is_loop(data) else _batches(model, data)
        for call in source:
            call = _without_cache(model, call)
            calls.append(Call(_moved(call.args, device), _moved(call.kwargs, device)))
    except (ConfigTypeError, DataError):
        raise
    # The user's loader runs here; whatever it raises, what was read before is not lost.
    except Exception as error:
        raise DataError(
            f"data failed after {len(calls)} batches ({type(error).__name__}: {error}); the batches read "
            "until then are in this error's `calls`, which can be given as data",
            calls=calls,
        ) from error
    if not calls:
        raise DataError("data holds no batch: wanted at least one (an iterator is empty once it was read)")
    return calls


def kept_positions(model: nn.Module, call: Call) -> Tensor | None:
    """Which positions (batch, length) of a call are no padding, as its mask says; None without a mask."""
    given = _bound(model, call)
    for name in (*_KEEPS, *_HIDES):
        mask = given.get(name)
        if isinstance(mask, Tensor) and mask.dim() == 2:
            if mask.is_floating_point():  # added to logits: hidden where it is very negative
                return mask > -1.0 if name in _HIDES or bool((mask < 0).any()) else mask > 0
            return mask.bool() if name in _KEEPS else ~mask.bool()
    return None


def _is_loop(data: object) -> bool:
    return callable(data) and not isinstance(data, Iterable)


def _loop_calls(model: nn.Module, data: Any) -> Iterator[Call]:
    """Let the user's function run the model, and write down how it calls it."""
    calls: list[Call] = []

    def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(Call(args, dict(kwargs)))

    modes = {module: module.training for module in model.modules()}
    handle = model.register_forward_pre_hook(record, with_kwargs=True)
    try:
        model.eval()
        with torch.no_grad():
            data(model)
    finally:
        handle.remove()
        for module, mode in modes.items():
            module.training = mode
    yield from calls


def _batches(model: nn.Module, data: Any) -> Iterator[Call]:
    if isinstance(data, Tensor):
        data = [data]
    if isinstance(data, str | bytes | Mapping) or not isinstance(data, Iterable):
        raise ConfigTypeError(
            f"data is a {type(data).__name__}, wanted a loader, a list of batches (tensors, tuples of "
            "arguments, mappings of keywords), or a function that calls the model"
        )
    for place, batch in enumerate(data):
        yield _call(model, batch, place)


def _call(model: nn.Module, batch: Any, place: int) -> Call:
    if isinstance(batch, Call):
        return batch
    if isinstance(batch, Tensor):
        return Call((batch,), {})
    parameters = inspect.signature(model.forward).parameters.values()
    if isinstance(batch, Mapping):
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        return Call((), {key: value for key, value in batch.items() if takes_any or key in names})
    if isinstance(batch, tuple | list):
        takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        places = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
        return Call(tuple(batch) if takes_any else tuple(batch)[:places], {})
    raise ConfigTypeError(
        f"batch {place} of data is a {type(batch).__name__}, wanted a tensor, a tuple or list of arguments, "
        "or a mapping of keywords"
    )


def _without_cache(model: nn.Module, call: Call) -> Call:
    """The call, told to make no cache where the model has a say in that: nobody reads it.

    Raises:
        DataError: a cache is given, which every call of the model changes: no two calls would be alike.
    """
    given = _bound(model, call)
    for name in _CACHES:
        if not isinstance(given.get(name), Tensor | tuple | list | None):
            raise DataError(
                f"data calls the model with {name}, a {type(given[name]).__name__}, as generate() does: call "
                "it on whole texts in its place"
            )
    takes = "use_cache" in inspect.signature(model.forward).parameters
    if not takes or given.get("use_cache") is not None:
        return call
    return Call(call.args, call.kwargs | {"use_cache": False})


def _bound(model: nn.Module, call: Call) -> dict[str, Any]:
    """The arguments of a call by name."""
    try:
        bound = inspect.signature(model.forward).bind_partial(*call.args, **call.kwargs)
    except TypeError:  # the call itself will say what is wrong with it
        return call.kwargs
    extra = [p.name for p in bound.signature.parameters.values() if p.kind is p.VAR_KEYWORD]
    named = dict(bound.arguments)
    for name in extra:
        named |= named.pop(name, {})
    return named


def _device(model: nn.Module) -> torch.device | None:
    tensor = next((t for t in (*model.parameters(), *model.buffers())), None)
    return None if tensor is None else tensor.device


def _moved(value: Any, device: torch.device | None) -> Any:
    if isinstance(value, Tensor):
        return value.detach() if device is None else value.detach().to(device)
    if isinstance(value, Mapping) and type(value) is dict:
        return {key: _moved(item, device) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_moved(item, device) for item in value)
    return value
