"""Data, however it is given, becomes a list of calls of the model."""

import copy
import inspect
import math
import zlib
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from panther_compile.errors import ConfigTypeError, DataError, PantherError, first_line
from panther_compile.models.derivatives import gradients_for
from panther_compile.models.half_products import half_products
from panther_compile.models.reentrant import without_reentrant
from panther_compile.models.surroundings import eval_mode, same_draws
from panther_compile.reporting.tables import counted

Data: TypeAlias = Iterable[Any] | Callable[[nn.Module], Any]
"""A loader, a list of batches, or a function that calls the model it is given.

A batch is a tensor, a packed sequence, a mapping of keyword arguments, or a tuple or list of positional
arguments, whose last ones (labels) are left out where `forward` has no place for them. A mapping of other
names is the one argument that `forward` cannot do without, as sentence-transformers'. A tensor, a packed
sequence, or a mapping of tensors as tokenizers give them, is one batch."""

Item = TypeVar("Item")

LARGEST = 1e15  # of what reaches a layer
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0
_HELD_OUT = 0.2  # of the batches, to judge by
_KEEPS = ("attention_mask",)
_CACHES = ("cache", "past_key_values", "cache_params")
_HIDES = ("src_key_padding_mask", "key_padding_mask", "padding_mask")
_DECODED = ("decoder_input_ids", "decoder_inputs_embeds", "tgt")
_DECODED_MASKS = {"decoder_attention_mask": False, "tgt_key_padding_mask": True}  # whether they hide
_NO_LABEL = -100


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a model: `model(*args, **kwargs)`.

    Attributes:
        args: of the call.
        kwargs: likewise.
        place: of the batch in the data, which errors name, in whatever order batches are run; None if it was
            made up.
        source: what the batch is of, in words.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    place: int | None = field(default=None, compare=False)
    source: str = field(default="the data", compare=False)

    @property
    def what(self) -> str:
        """The batch, in words."""
        return "a made-up batch" if self.place is None else f"batch {self.place} of {self.source}"

    @property
    def leaves(self) -> list[Any]:
        """All that the arguments hold, in order."""
        return tree_leaves((self.args, self.kwargs))

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among it."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    @property
    def form(self) -> TreeSpec:
        """How the arguments hold it."""
        return tree_flatten((self.args, self.kwargs))[1]

    @property
    def _seed(self) -> int:
        return zlib.crc32(repr((self.place, *map(_sum, self.tensors))).encode())

    def with_leaves(self, leaves: Iterable[Any]) -> Self:
        """The same call with other leaves, as many."""
        args, kwargs = tree_unflatten(leaves, self.form)
        return replace(self, args=args, kwargs=kwargs)

    def run(self, model: nn.Module) -> Any:
        """Call the model, on copies: some write into what they are given, as `x.sub_(mean)`.

        Some draw numbers, as policies that sample an action, autoencoders and the losses of diffusion models:
        a call draws the same in each run, so that two models can be compared, and no two calls alike.
        """
        args, kwargs = _duplicated(self.args, self.kwargs)
        quick, draws, checkpoints = half_products(model), same_draws(self._seed), without_reentrant()
        with quick, draws, checkpoints, gradients_for(model) as handed_on:
            return handed_on(model(*args, **kwargs))


def _duplicated(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with tensors and objects of their own; a tensor that is given twice is one there too."""
    made: dict[int, Tensor] = {}

    def duplicate(tensor: Tensor) -> Tensor:
        return made.setdefault(id(tensor), tensor.clone())

    return with_tensors((args, kwargs), duplicate, copy_object)  # type: ignore[no-any-return]


def _sum(tensor: Tensor) -> float:
    """The sum of the numbers in a tensor; 0 where it holds none, or its layout has no sum."""
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_nested or tensor.is_quantized:
        return 0.0
    real = tensor.detach().real if tensor.is_complex() else tensor.detach()
    return float(real.float().sum())


def copy_object(value: Any) -> Any:
    """A copy of what may hold tensors in its own way, as the graphs of PyTorch Geometric do.

    A module is given as it is, and so is what cannot be copied, as a stream.
    """
    if isinstance(value, nn.Module):
        return value
    try:
        return copy.deepcopy(value)
    except (TypeError, RuntimeError):
        return value


def hides_tensors(value: Any) -> bool:
    """Whether a value of a class of its own holds tensors, where no structure of arguments shows them."""
    if value is None or isinstance(value, Tensor | nn.Module):
        return False
    copies: dict[int, Any] = {}
    with suppress(TypeError, RuntimeError):  # of what cannot be copied; what was copied before is there
        copy.deepcopy(value, copies)
    return any(isinstance(one, Tensor) for one in copies.values())


def with_tensors(
    value: Any, change: Callable[[Tensor], Tensor], other: Callable[[Any], Any] = lambda value: value
) -> Any:
    """A value whose tensors are changed, in new dictionaries, as tokenizers give them, lists and tuples.

    Args:
        value: of any structure.
        change: of a tensor.
        other: of what is neither a tensor nor one of these.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict | UserDict):
        made = copy.copy(value)
        for key, item in value.items():
            made[key] = with_tensors(item, change, other)
        return made
    if type(value) in (list, tuple):
        return type(value)(with_tensors(item, change, other) for item in value)
    return other(value)


def interleaved(*kinds: Sequence[Call]) -> tuple[Call, ...]:
    """Calls of several kinds, each in its order, evenly mixed, and turned until each is in what is held out.

    That is `judged_of` them, `spread_out`. Where no turn has all kinds there, they are not turned.
    """
    placed = [
        ((place + 0.5) / len(calls), kind, call)
        for kind, calls in enumerate(kinds)
        for place, call in enumerate(calls)
    ]
    mixed = [(kind, call) for _, kind, call in sorted(placed, key=lambda one: one[0])]

    turns = (mixed[turn:] + mixed[:turn] for turn in range(len(mixed)))
    wanted = {kind for kind, _ in mixed}
    fair = (one for one in turns if {kind for kind, _ in judged_of(spread_out(one))} == wanted)
    return tuple(call for _, call in next(fair, mixed))


def spread_out(items: Sequence[Item]) -> list[Item]:
    """The items mixed, without chance: the first few of them, and the last fifth, come from everywhere.

    Batches are often sorted, by length or class. Places are sorted by their multiples of the golden ratio,
    modulo 1 (three-distance theorem: van Ravenstein 1988).

    Args:
        items: in any order.
    """
    order = sorted(range(len(items)), key=lambda place: place * _GOLDEN % 1.0)
    return [items[place] for place in order]


def learnt_of(items: Sequence[Item]) -> Sequence[Item]:
    """The batches that are learnt from: four in five, and all but one of fewer; a single one too."""
    return items[: len(items) - max(int(_HELD_OUT * len(items)), min(1, len(items) - 1))]


def judged_of(items: Sequence[Item]) -> Sequence[Item]:
    """The batches held out from those to judge by; a single one judges itself."""
    return items[len(learnt_of(items)) :] or items


def run_dense(model: nn.Module, call: Call, who: Callable[[], str] = lambda: "the model") -> Any:
    """What the dense model makes of a batch, for the first time.

    Args:
        model: the dense model, or a copy of it that is watched, or being sketched.
        call: the batch.
        who: says which, in an error.

    Raises:
        DataError: the model raises; the message says what it was given, and what it said.
    """
    try:
        return call.run(model)
    except (PantherError, torch.OutOfMemoryError):
        raise
    # The model's own code runs here, on what the user gave; it may raise anything.
    except Exception as error:
        brief = first_line(error) or "no message"
        raise DataError(
            f"{call.what}: {who()} was given {described(call)} and raised {type(error).__name__}: {brief}"
        ) from error


def check_rows(rows: Tensor, name: str, call: Call) -> None:
    """Check what reaches a layer in the dense model.

    Args:
        rows: of the layer's input, any shape.
        name: of the layer.
        call: the batch that they are of.

    Raises:
        DataError: there is NaN or Inf among them, or a number whose square overflows.
    """
    if not rows.numel():
        return
    largest = float(rows.abs().max())
    if not math.isfinite(largest):
        raise DataError(f"{call.what}: NaN or Inf reaches {name or 'the model'}")
    if largest > LARGEST:
        raise DataError(
            f"{call.what}: a number of size {largest:.3g} reaches {name or 'the model'}, "
            f"wanted at most {LARGEST:.0e}, so that second moments can be computed"
        )


def described(call: Call) -> str:
    """The arguments of a call in words: shapes and dtypes of tensors, types of all else."""
    named = [*map(_in_words, call.args), *(f"{key}={_in_words(one)}" for key, one in call.kwargs.items())]
    return f"({', '.join(named)})"


def _in_words(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return repr(value) if value is None or isinstance(value, bool | int | float) else type(value).__name__


def record_calls(model: nn.Module, data: Data) -> list[Call]:
    """The calls that the data makes, with their tensors on the model's device.

    Args:
        model: tells what its `forward` takes, and where its tensors are.
        data: see `Data`; a list of `Call` is taken as it is, places too.

    Raises:
        ConfigTypeError: data is none of these, or a batch is no tensor, mapping, tuple or list.
        DataError: there is no batch; or one is empty, or hidden by its mask, or is given a cache; or reading
            failed half-way, and the error's `calls` hold what was read before, which can be given as data.
    """
    device = device_of(model)
    calls: list[Call] = []
    try:
        is_loop = _is_loop(data)
        source = _loop_calls(model, data) if is_loop else _batches(model, data)
        is_kept = is_loop or isinstance(data, list | tuple | Tensor | Mapping)
        move = partial(_moved, device=device, copy=not is_kept)
        for call in source:
            call = _without_cache(model, call)
            calls.append(Call(move(call.args), move(call.kwargs), call.place))
            _check_not_empty(model, calls[-1])
    except (ConfigTypeError, DataError):
        raise
    # The user's loader runs here; whatever it raises, what was read before is not lost.
    except Exception as error:
        raise DataError(
            f"data failed after {counted(len(calls), 'batch')} ({type(error).__name__}: {error}); "
            "the batches read until then are in this error's `calls`, which can be given as data",
            calls=calls,
        ) from error
    if not calls and is_loop:
        raise DataError(
            f"{data!r}, given as data, did not call the model that it was given: only model(...) is seen. "
            "A model that is used by other methods, as model.score(...), can be held by a module whose "
            "forward calls them"
        )
    if not calls:
        raise DataError("data holds no batch: wanted at least one (an iterator is empty once it was read)")
    return calls


def kept_positions(model: nn.Module, call: Call) -> Tensor | None:
    """Positions (batch, length) of a call that are no padding, as its mask says; None without a mask.

    Of an encoder and a decoder that is given as many positions, those that either has: rows of the one cannot
    be told from rows of the other.
    """
    given = {name: one for name, one in _bound(model, call).items() if isinstance(one, Tensor)}
    for name in (*_KEEPS, *_HIDES):
        if name in given and given[name].dim() == 2:
            kept = kept_by(given[name], hides=name in _HIDES)
            decodes = "decoder_input_ids" in inspect.signature(model.forward).parameters
            return kept_by_either(kept, given, decodes)
    return None


def kept_by_either(kept: Tensor, given: Mapping[str, Tensor], decodes: bool = False) -> Tensor | None:
    """What an encoder keeps (batch, length), and with it what a decoder of as many positions does.

    Args:
        kept: by the encoder's mask.
        given: the arguments of the model.
        decodes: whether its labels are what a decoder is given, if nothing else is.
    """
    labels = given.get("labels") if decodes else None
    decoded = next((given[name] for name in _DECODED if name in given), labels)
    if decoded is None or decoded.shape[:2] not in (kept.shape, kept.T.shape):
        return kept
    for name, hides in _DECODED_MASKS.items():
        if name in given and given[name].shape == kept.shape:
            return kept | kept_by(given[name], hides=hides)
    return kept | (labels != _NO_LABEL) if labels is not None and labels.shape == kept.shape else None


def kept_by(mask: Tensor, *, hides: bool = False) -> Tensor:
    """Positions that a mask keeps: those where it is positive.

    Args:
        mask: of any shape; floating numbers may be those that are added to logits, very negative at what
            they hide.
        hides: whether it is True, or negative, where a position is hidden.
    """
    if mask.is_floating_point():
        return mask > -1.0 if hides or bool((mask < 0).any()) else mask > 0
    return ~mask.bool() if hides else mask.bool()


def tokens_of(model: nn.Module, call: Call) -> Tensor | None:
    """The tokens (batch, length) of a call: the first such integers in the order of its forward, no masks."""
    for name, one in _bound(model, call).items():
        integers = isinstance(one, Tensor) and one.dtype in (torch.int32, torch.int64)
        if integers and one.dim() == 2 and "mask" not in name:
            return one
    return None


def _is_loop(data: object) -> bool:
    return callable(data) and not isinstance(data, Iterable)


def _loop_calls(model: nn.Module, data: Any) -> Iterator[Call]:
    """Let the user's function run the model, and write down how it calls it."""
    calls: list[Call] = []

    def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(Call(*_duplicated(args, kwargs), len(calls)))  # before anybody writes over them

    handle = model.register_forward_pre_hook(record, with_kwargs=True)
    try:
        with eval_mode(model), torch.no_grad(), gradients_for(model):
            data(model)
    finally:
        handle.remove()
    yield from calls


def _batches(model: nn.Module, data: Any) -> Iterator[Call]:
    if isinstance(data, Tensor | PackedSequence) or (isinstance(data, Mapping) and _holds_tensors(data)):
        data = [data]
    if isinstance(data, str | bytes | Mapping) or not isinstance(data, Iterable):
        raise ConfigTypeError(
            f"data is a {type(data).__name__}, wanted a loader, a list of batches (tensors, tuples of "
            "arguments, mappings of keywords), or a function that calls the model"
        )
    for place, batch in enumerate(data):
        yield _call(model, batch, place)


def _holds_tensors(data: Mapping[str, Any]) -> bool:
    """Whether a mapping is a batch, as tokenizers give them."""
    return any(isinstance(value, Tensor) for value in data.values())


def _call(model: nn.Module, batch: Any, place: int) -> Call:
    if isinstance(batch, Call):
        return batch
    if isinstance(batch, Tensor | PackedSequence):  # that is a tuple, of what is one argument
        return Call((batch,), {}, place)
    parameters = inspect.signature(model.forward).parameters.values()
    if isinstance(batch, Mapping):
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        needed = [
            p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        if len(needed) == 1 and names.isdisjoint(batch):
            return Call((batch,), {}, place)
        return Call((), {key: one for key, one in batch.items() if takes_any or key in names}, place)
    if isinstance(batch, tuple | list):
        takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        places = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
        return Call(tuple(batch) if takes_any else tuple(batch)[:places], {}, place)
    raise ConfigTypeError(
        f"batch {place} of data is a {type(batch).__name__}, wanted a tensor, a tuple or list of arguments, "
        "or a mapping of keywords"
    )


def _without_cache(model: nn.Module, call: Call) -> Call:
    """The call, without a cache where the model has an option for that: nobody reads it.

    Raises:
        DataError: a cache is given, which every call of the model changes: no two calls would be alike.
    """
    given = _bound(model, call)
    for name in _CACHES:
        if _is_cache(name, given.get(name)):
            raise DataError(
                f"data calls the model with {name}, a {type(given[name]).__name__}, as generate() does: call "
                "it on whole texts in its place"
            )
    takes = "use_cache" in inspect.signature(model.forward).parameters
    if not takes or given.get("use_cache") is not None:
        return call
    return replace(call, kwargs=call.kwargs | {"use_cache": False})


def _is_cache(name: str, value: Any) -> bool:
    """Whether an argument is a cache; what models beside transformers' call so may be a flag, or a dict."""
    if name == "cache":
        return hasattr(value, "get_seq_length")
    return not isinstance(value, Tensor | tuple | list | None)


def _bound(model: nn.Module, call: Call) -> dict[str, Any]:
    """The arguments of a call by name, and what a mapping among them holds, as sentence-transformers' do."""
    try:
        bound = inspect.signature(model.forward).bind_partial(*call.args, **call.kwargs)
    except TypeError:  # the call itself will say what is wrong with it
        return call.kwargs
    extra = [p.name for p in bound.signature.parameters.values() if p.kind is p.VAR_KEYWORD]
    named = dict(bound.arguments)
    for name in extra:
        named |= named.pop(name, {})
    held = [value for value in named.values() if isinstance(value, Mapping)]
    return {str(name): value for one in held for name, value in one.items()} | named


def device_of(model: nn.Module) -> torch.device | None:
    """The device of a model's tensors, by the first of them; None if it has none."""
    tensor = next((t for t in (*model.parameters(), *model.buffers())), None)
    return None if tensor is None else tensor.device


def _moved(value: Any, *, device: torch.device | None, copy: bool) -> Any:
    """The tensors of a value on a device, out of inference mode, and copied if they may be written over."""

    def move(tensor: Tensor) -> Tensor:
        there = tensor.device if device is None else device
        # An inference tensor cannot be saved for a backward pass, a copy of it can.
        return tensor.detach().to(there, copy=copy or tensor.is_inference())

    return with_tensors(value, move)


def _check_not_empty(model: nn.Module, call: Call) -> None:
    """Raise DataError if a batch has tensors, and none of them holds a number, or a mask hides all of it."""
    if call.tensors and not any(tensor.numel() for tensor in call.tensors):
        raise DataError(f"{call.what} is empty, {described(call)}: wanted at least one sample")
    kept = kept_positions(model, call)
    if kept is not None and not bool(kept.any()):
        raise DataError(
            f"{call.what}: its mask hides every position, {described(call)}; wanted some that count: "
            "attention_mask is 1 there, a key padding mask False"
        )
