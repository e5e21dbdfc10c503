"""LatentCache: the keys and values of sketched projections, kept as the few numbers that they are made of.

A projection of rank r writes A z + b, A (O, r): whatever it writes lies in r dimensions that are known before
anything is computed. With the orthonormal basis Q of the columns of A,

    kept       Qᵀ (v - b)                  r numbers a token in place of O
    read       Q (kept) + b                exact but for rounding, as Q is orthonormal
    keys       turned back by the angles that the model itself turned them by, and kept likewise;
               turned again when they are read. The angles are kept once for all layers.
    k and v    from one input factor, or from one layer as in GPT-2, are 2 O numbers of rank r together

Nothing is assumed about the code of the model: which layer wrote the keys and the values of a cache layer,
and whether they were turned, is found by trying on the first tokens what reads back exactly. What does not,
as keys that are normalised after their projection, is left whole, with a reason.
"""

# B batch, H heads of keys and values, S tokens, D head dimension, O = H D, R rank
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
)
from transformers.modeling_utils import PreTrainedModel

from panther_compile.errors import ConfigTypeError, NoTargetError
from panther_compile.integrations.latent_layer import Angles, LatentLayer
from panther_compile.integrations.latent_spans import Span, cache_layer, find_sources
from panther_compile.reporting.tables import render_table


class LatentCache(DynamicCache):  # type: ignore[misc]
    """A cache for `generate` that keeps r numbers in place of the keys and values of rank r.

        >>> cache = pc.LatentCache(small)
        >>> small.generate(**inputs, past_key_values=cache)
        >>> print(cache.report())

    It is transformers' own `DynamicCache`, full or sliding as the model's layers are: beams, assisted
    generation and cropping work as they do there. What attention reads equals what it would have read but for
    rounding (1e-6 in float32), and costs 2 S O r multiply-adds a layer and step to make from S tokens.

    While the cache lives, the attention modules of the model have a hook that tells it the angles of rotary
    embeddings; it does nothing in calls without such a cache. For an encoder-decoder an `EncoderDecoderCache`
    of two is made, for what the decoder itself and what the encoder wrote.

    Args:
        model: a transformers model whose projections of keys and values are sketched.

    Raises:
        ConfigTypeError: it is no transformers model.
        NoTargetError: no attention of it has a sketched layer, or no layer of its cache holds keys and values
            alone, without states of linear attention.
    """

    layers: list[Any]  # of the DynamicCache

    def __new__(cls, model: Any = None, *args: Any, **options: Any) -> Any:
        """Make a cache; for an encoder-decoder, the pair."""
        config = getattr(model, "config", None)
        if cls is LatentCache and not args and getattr(config, "is_encoder_decoder", False):
            return LatentEncoderDecoderCache(cls._part(model, True), cls._part(model, False))
        return super().__new__(cls)

    @classmethod
    def _part(cls, model: Any, own: bool) -> "LatentCache":
        made: LatentCache = DynamicCache.__new__(cls)
        made.__init__(model, own)  # type: ignore[misc]
        return made

    def __init__(self, model: Any, _own: bool = True) -> None:
        if not isinstance(model, PreTrainedModel):
            raise ConfigTypeError(f"model is a {type(model).__name__}; wanted a model of transformers")
        modules, sources = find_sources(model)
        if not any(sources.values()):
            raise NoTargetError(
                f"no attention of {type(model).__name__} has a sketched layer, those aside that are on disk, "
                "packed by a quantizer, or under an adapter: call sketchify"
            )
        super().__init__(config=model.config)
        self.groups: list[Angles] = []
        self.layers = [
            LatentLayer(layer if _own else DynamicLayer(), sources[number], self.groups)
            if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)
            else layer
            for number, layer in enumerate(self.layers)
        ]
        if not any(isinstance(layer, LatentLayer) for layer in self.layers):
            kinds = ", ".join(sorted({type(layer).__name__ for layer in self.layers})) or "not known yet"
            raise NoTargetError(
                f"the cache of {type(model).__name__} has no layer that holds keys and values alone: {kinds}"
            )
        self._hooks = _Hooks(modules)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        """See transformers: the keys and values that the attention of a layer sees."""
        seen = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx == len(self.layers) - 1:  # angles that no layer turns by are not kept
            used = {id(getattr(layer, "group", None)) for layer in self.layers}
            self.groups[:] = [group for group in self.groups if id(group) in used]
        return seen

    def report(self) -> "LatentCacheReport":
        """What is kept of each layer, once the cache has been used."""
        layers = tuple(_line(f"{n}", x) for n, x in enumerate(self.layers) if isinstance(x, LatentLayer))
        angles = sum(2 * group.kept.keys.nbytes for group in self.groups if group.kept.is_initialized)
        tokens = [x.inner.keys.shape[0] * x.inner.keys.shape[-2] for x in self._used()]
        return LatentCacheReport(layers, angles // max(tokens, default=1))

    def _used(self) -> list[LatentLayer]:
        return [x for x in self.layers if isinstance(x, LatentLayer) and x.form is not None]

    def _all(self, method: str, *arguments: Any) -> None:
        getattr(super(), method)(*arguments)
        for group in self.groups:
            group.rearranged(method, *arguments)

    def reset(self) -> None:
        """Empty the cache; what it found out about the model is found out again."""
        super().reset()
        self.groups.clear()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """See transformers; so for what follows."""
        self._all("reorder_cache", beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """See transformers."""
        self._all("crop", tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """See transformers."""
        self._all("batch_repeat_interleave", repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """See transformers."""
        self._all("batch_select_indices", indices)

    def activate_past_recording(self) -> None:
        """See transformers."""
        super().activate_past_recording()
        for group in self.groups:
            if hasattr(group.kept, "activate_past_recording"):
                group.kept.activate_past_recording()


class LatentEncoderDecoderCache(EncoderDecoderCache):  # type: ignore[misc]
    """The two caches of an encoder-decoder."""

    self_attention_cache: LatentCache
    cross_attention_cache: LatentCache

    def report(self) -> "LatentCacheReport":
        """See `LatentCache.report`; the tokens of the encoder are counted as those of the decoder."""
        reports = {
            "own": self.self_attention_cache.report(),
            "encoder": self.cross_attention_cache.report(),
        }
        layers = [
            replace(line, layer=f"{line.layer}, {name}") for name, r in reports.items() for line in r.layers
        ]
        return LatentCacheReport(tuple(layers), sum(r.angle_bytes for r in reports.values()))


@dataclass(frozen=True, slots=True)
class CachedLayer:
    """One layer of a cache.

    Attributes:
        layer: its number.
        keys: "latent" and the rank, with the layer that writes them; or why they are whole.
        values: likewise.
        kept_bytes: bytes of one token.
        whole_bytes: bytes of one token, were nothing left out.
    """

    layer: str
    keys: str
    values: str
    kept_bytes: int
    whole_bytes: int


@dataclass(frozen=True, slots=True)
class LatentCacheReport:
    """What a cache keeps.

    Attributes:
        layers: layers that have seen a token.
        angle_bytes: bytes of one token for the angles that all layers share.
    """

    layers: tuple[CachedLayer, ...]
    angle_bytes: int

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more token of one sequence takes."""
        return sum(line.kept_bytes for line in self.layers) + self.angle_bytes

    @property
    def whole_bytes_per_token(self) -> int:
        """Bytes per token in a `DynamicCache`."""
        return sum(line.whole_bytes for line in self.layers)

    def __str__(self) -> str:
        """A table: one line for each layer, then the totals."""
        columns = (("layer", "right"), ("keys", "left"), ("values", "left"), ("bytes a token", "right"))
        rows = [
            (line.layer, line.keys, line.values, f"{line.kept_bytes} of {line.whole_bytes}")
            for line in self.layers
        ]
        kept, whole = self.bytes_per_token, self.whole_bytes_per_token
        times = f", {whole / kept:.2f} times less" if kept else ""
        footer = f"{kept:,} of {whole:,} bytes a token{times}; {self.angle_bytes} of them angles"
        return render_table("Latent cache", columns, rows, (footer,))


def _line(number: str, layer: LatentLayer) -> CachedLayer:
    form = layer.form
    if form is None:
        return CachedLayer(number, "no token yet", "no token yet", 0, 0)
    size = layer.inner.keys.element_size()

    def described(span: Span | None, why: str) -> str:
        return f"whole: {why}" if span is None else f"latent {span.basis.shape[1]} of {span.basis.shape[0]}"

    values = "with the keys" if form.joint else described(form.values, form.why_values)
    kept, whole = layer.kept_numbers * size, layer.whole_numbers * size
    return CachedLayer(number, described(form.keys, form.why_keys), values, kept, whole)


def _tell_angles(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hook: give the cache that this call is given the angles that it is given."""
    angles = kwargs.get("position_embeddings")
    if not isinstance(angles, tuple) or len(angles) != 2:  # none, or complex numbers, as of Llama 4
        return
    for value in kwargs.values():
        cache = getattr(value, "self_attention_cache", value)
        if isinstance(cache, LatentCache):
            number = cache_layer(module)
            layer = None if number is None else cache.layers[number]
            if isinstance(layer, LatentLayer):
                layer.rotation = angles


class _Hooks:
    """The hooks of a cache and its copies, taken away with the last of them."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        handles = [one.register_forward_pre_hook(_tell_angles, with_kwargs=True) for one in modules]
        weakref.finalize(self, _remove, handles)

    def __deepcopy__(self, memo: Any) -> "_Hooks":
        return self


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
