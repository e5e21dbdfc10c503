"""Layers that write the keys and values that a decoder keeps of each token.

Found by looking, whatever the model's code is: one batch runs with its cache on, and what the cache then
holds is compared with what the layers gave.

    values  what a layer gave, as it is
    keys    likewise, or turned by rotary embeddings: the norm of each head stays, but for one common factor
"""

# B batch, H heads of keys and values, S tokens, D head dimension, O outputs of a layer
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from panther_compile.models.batches import Call, run_dense
from panther_compile.models.watched import Side
from panther_compile.records import Cached

_TOKENS = 16  # the last ones of the first sample are compared
_NEAR = 2e-2  # how far norms of turned keys may be apart, rounded to bfloat16

_Match = Callable[[Tensor, Tensor], bool]


def find_cached(side: Side, call: Call) -> tuple[Cached, ...]:
    """What the cache of a decoder holds, by the layers that write it; nothing if the model returns none.

    Args:
        side: the model, watched.
        call: a batch; the model is asked for its cache where `forward` takes `use_cache`.
    """
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}

    def see_output(name: str, out: Tensor) -> Tensor:
        if out.dim() == 3:
            outputs[name] = out[:1, -_TOKENS:]
        return out

    takes = "use_cache" in inspect.signature(side.model.forward).parameters
    asked = {"use_cache": True} if takes else {}
    with side.seen_by(inputs.__setitem__, see_output), torch.no_grad():
        result = run_dense(side.model, replace(call, kwargs=_decoding(side.model, call.kwargs) | asked))
    found: list[Cached] = []
    free = dict(outputs)
    name = "cache" if hasattr(result, "cache") else "past_key_values"  # before transformers 5.24
    for keys, values in _layers_of(getattr(result, name, None)):
        for cached in _writers(free, inputs, keys, values):
            found.append(cached)
            free = {name: out for name, out in free.items() if name not in cached.names}
    return tuple(found) if any(one.names for one in found) else ()


def _decoding(model: nn.Module, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call with labels as what the decoder reads: given labels, BART returns no cache."""
    labels, shift = kwargs.get("labels"), getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if labels is None or shift is None:
        return dict(kwargs)
    others = {name: one for name, one in kwargs.items() if name != "labels"}
    given = any(others.get(name) is not None for name in ("decoder_input_ids", "decoder_inputs_embeds"))
    return others if given else others | {"decoder_input_ids": shift(labels=labels)}


def head_outputs(outputs: int, heads: int, width: int) -> Iterator[Tensor]:
    """The outputs of a layer that may be the keys, or the values, of all heads.

    Args:
        outputs: O.
        heads: H.
        width: D.
    """
    kept, every = heads * width, torch.arange(outputs)
    if outputs == kept:
        yield every
    elif outputs >= 2 * kept:
        yield every[outputs - 2 * kept : outputs - kept]  # [.., k, v]
        yield every[outputs - kept :]
        if outputs == 3 * kept:
            by_head = every.view(heads, 3, width)  # (q, k, v)
            yield from by_head[:, 1:].permute(1, 0, 2).flatten(1)


def _layers_of(cache: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and values (1, H, S, D) of each layer of a cache; of an encoder-decoder's, of both its parts."""
    parts = [getattr(cache, name, None) for name in ("self_attention_cache", "cross_attention_cache")]
    for part in parts if any(one is not None for one in parts) else [cache]:
        for layer in getattr(part, "layers", ()):
            keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
            if isinstance(keys, Tensor) and isinstance(values, Tensor) and keys.dim() == values.dim() == 4:
                yield keys[:1, :, -_TOKENS:], values[:1, :, -_TOKENS:]


def _writers(
    outputs: Mapping[str, Tensor], inputs: Mapping[str, Tensor], keys: Tensor, values: Tensor
) -> Sequence[Cached]:
    """Who writes the keys and values of one layer of the cache: together, each apart, or nobody."""
    of_keys, of_values = _find(outputs, keys, _turned), _find(outputs, values, torch.equal)
    widths = [one.shape[1] * one.shape[3] for one in (keys, values)]
    together = of_keys and of_values and inputs[of_keys] is inputs[of_values]
    if together and widths[0] == widths[1]:
        return [Cached(tuple(dict.fromkeys((of_keys, of_values))), sum(widths))]
    named = zip((of_keys, of_values), widths, strict=True)
    return [Cached((name,) if name else (), width) for name, width in named]


def _find(outputs: Mapping[str, Tensor], kept: Tensor, match: _Match) -> str:
    """The layer whose outputs match what is kept (1, H, S, D); empty if none does."""
    _, heads, tokens, width = kept.shape
    wanted = kept.transpose(1, 2)
    for name, out in outputs.items():
        if out.shape[1] < tokens:
            continue
        for places in head_outputs(out.shape[-1], heads, width):
            given = out[:, -tokens:, places.to(out.device)].unflatten(-1, (heads, width))
            if match(given, wanted):
                return name
    return ""


def _turned(given: Tensor, wanted: Tensor) -> bool:
    """Whether the heads (1, S, H, D) have the same norms, but for one factor."""
    before, after = given.float().norm(dim=-1), wanted.float().norm(dim=-1)
    if not bool((before > 0).all()):
        return False
    factors = after / before
    return bool((factors - factors.mean()).abs().max() <= _NEAR * factors.mean())
