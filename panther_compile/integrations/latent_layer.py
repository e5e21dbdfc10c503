"""One layer of a latent cache: what it keeps of its keys and values, and how they are read back."""

# B batch, H heads of keys and values, S tokens, D head dimension, O = H D, R rank
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from panther_compile.integrations.latent_spans import Source, Span, input_factor, is_thin, joint_span

TOKENS_TO_DECIDE = 2  # a first token may be at position 0, where nothing is turned
# What may be lost between a tensor and what reads back, relative; rounding in these types, and some.
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
Rotation = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Turning:
    """How a model turns its keys.

    Attributes:
        function: of the model's own code.
        width: dimensions of a head that it turns, the first ones.
    """

    function: Callable[..., tuple[Tensor, Tensor]]
    width: int

    def turn(self, keys: Tensor, angles: Rotation | None) -> Tensor:
        """Keys (B, H, S, D) as the model turns them."""
        assert angles is not None
        # The function wants queries too: one head of keys stands for them.
        part, rest = keys[..., : self.width], keys[..., self.width :]
        turned: Tensor = self.function(part[:, :1], part, *angles)[1]
        return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned

    def turn_back(self, keys: Tensor, angles: Rotation | None) -> Tensor:
        """What `turn` was given."""
        assert angles is not None
        cos, sin = angles
        length = cos.square() + sin.square()  # not 1 where the model also scales
        return self.turn(keys, (cos / length, -sin / length))


_Way = tuple[Turning | None, Tensor]  # what turned the keys, and the keys as they were before it


@dataclass(frozen=True, slots=True)
class CachedForm:
    """How a cache layer keeps its keys and values.

    Attributes:
        keys: where they lie; None if they are kept whole. Of keys and values together if `joint`.
        values: likewise; None too if `joint`.
        joint: whether `keys` is of both.
        rotate: turns keys, where they are kept as they were before.
        heads: H.
        why_keys: reason for keeping them whole; else empty.
        why_values: likewise.
    """

    keys: Span | None
    values: Span | None
    joint: bool
    rotate: Turning | None
    heads: int
    why_keys: str
    why_values: str

    @property
    def keeps_all(self) -> bool:
        """Whether both are kept whole."""
        return self.keys is None and self.values is None

    def encode(self, keys: Tensor, values: Tensor, angles: Rotation | None) -> tuple[Tensor, Tensor]:
        """(B, H, S, D) each to what is kept."""
        if self.keys is None:
            return keys, values if self.values is None else self.values.encode(flat(values))
        plain = flat(keys if self.rotate is None else self.rotate.turn_back(keys, angles))
        if self.joint:
            kept = self.keys.encode(torch.cat([plain, flat(values)], dim=-1))
            return kept, kept[..., :0]
        return self.keys.encode(plain), values if self.values is None else self.values.encode(flat(values))

    def decode_keys(self, keys: Tensor, angles: Rotation | None) -> Tensor:
        """The keys (B, H, S, D) of what is kept."""
        if self.keys is None:
            return keys
        span = self.keys.part(slice(len(self.keys.basis) // 2)) if self.joint else self.keys
        heads = self._heads(span.decode(keys))
        return heads if self.rotate is None else self.rotate.turn(heads, angles)

    def decode_values(self, keys: Tensor, values: Tensor) -> Tensor:
        """The values (B, H, S, D) of what is kept."""
        if self.joint:
            assert self.keys is not None
            return self._heads(self.keys.part(slice(len(self.keys.basis) // 2, None)).decode(keys))
        return values if self.values is None else self._heads(self.values.decode(values))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


def _lost(every: Tensor, given: Tensor) -> float:
    """How much of the newest tokens (B, H, S, D) is not among all of them, relative."""
    newest = every[..., -given.shape[-2] :, :]
    return float((newest - given).norm() / given.norm().clamp_min(1e-30))


def _put_last(every: Tensor, given: Tensor) -> None:
    """Write the newest tokens over the last ones, as many as there are."""
    count = min(every.shape[-2], given.shape[-2])
    every[..., every.shape[-2] - count :, :] = given[..., given.shape[-2] - count :, :]


def flat(x: Tensor) -> Tensor:
    """Heads side by side: (B, H, S, D) to (B, S, O)."""
    return x.transpose(1, 2).flatten(2)


def _turning(function: Callable[..., Any], angles: Rotation, width: int) -> Turning | None:
    """How a function turns heads of a width: one angle is for one dimension, or, as in GPT-OSS, for two."""
    cos, sin = (part[:1, :1] for part in angles)
    for turned in (cos.shape[-1], 2 * cos.shape[-1]):
        probe = cos.new_zeros(1, 1, 1, turned)
        try:
            function(probe, probe, cos, sin)
        except RuntimeError:  # of another number of dimensions
            continue
        return Turning(function, turned) if turned <= width else None
    return None


class Angles:
    """The cosines and sines that layers turned the keys of the tokens in the cache by, kept once for all."""

    def __init__(self, like: DynamicLayer) -> None:
        window = like.sliding_window if isinstance(like, DynamicSlidingWindowLayer) else None
        kept: Any = DynamicLayer() if window is None else DynamicSlidingWindowLayer(window)
        if getattr(like, "record_past", False):
            kept.activate_past_recording()
        self.kept: Any = kept
        self.newest: Rotation | None = None
        self.all: Rotation | None = None
        self.halved: bool | None = None  # whether the second half repeats the first, which is kept alone then

    def update(self, new: Rotation) -> Rotation:
        """The angles of all tokens that the attention sees; new ones are added once for all layers."""
        if self.newest is None or new[0] is not self.newest[0]:
            self.newest = new
            cos, sin = (part[:, None] for part in new)
            half = cos.shape[-1] // 2
            if self.halved is None:
                self.halved = all(torch.equal(x[..., :half], x[..., half:]) for x in (cos, sin))
            if self.halved:
                cos, sin = cos[..., :half], sin[..., :half]
            if self.kept.is_initialized and len(self.kept.keys) != len(cos):
                rows = max(len(self.kept.keys), len(cos))
                for name in ("keys", "values"):
                    setattr(self.kept, name, getattr(self.kept, name).expand(rows, -1, -1, -1))
                cos, sin = cos.expand(rows, -1, -1, -1), sin.expand(rows, -1, -1, -1)
            self.all = self._whole(*self.kept.update(cos, sin))
        assert self.all is not None
        return self.all

    def stored(self) -> Rotation:
        """The angles of the tokens that stay in the cache."""
        return self._whole(self.kept.keys, self.kept.values)

    def _whole(self, cos: Tensor, sin: Tensor) -> Rotation:
        if not self.halved:
            return cos[:, 0], sin[:, 0]
        return torch.cat([cos[:, 0]] * 2, dim=-1), torch.cat([sin[:, 0]] * 2, dim=-1)

    def rearranged(self, method: str, *arguments: Any) -> None:
        """Do to the angles what is done to the cache."""
        by_rows = method in ("reorder_cache", "batch_repeat_interleave", "batch_select_indices")
        if self.kept.is_initialized and not (by_rows and len(self.kept.keys) == 1):
            getattr(self.kept, method)(*arguments)
        self.newest = self.all = None


class LatentLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a `LatentCache`: a layer of transformers that keeps numbers of its own.

    Args:
        inner: a `DynamicLayer`, which keeps what is kept: grows, slides and crops.
        sources: sketched layers that may write its keys and values.
        groups: angles of all layers of the cache.
    """

    def __init__(self, inner: Any, sources: Sequence[Source], groups: list[Angles]) -> None:
        self.inner, self.sources, self.groups = inner, sources, groups
        self.group: Angles | None = None
        self.rotation: Rotation | None = None  # of the tokens that are about to come
        self.form: CachedForm | None = None
        self.whole_numbers = 0  # a token, if nothing were left out

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Rotation:
        """Keep keys and values (B, H, S, D) of new tokens; those of all tokens that the attention sees."""
        every: Rotation | None = None
        new, self.rotation = self.rotation, None
        if new is not None and (self.form is None or self.form.rotate is not None):
            self.group = self._group(new) if self.group is None else self.group
            every = self.group.update(new)
        if self.form is None:
            keys, values = self.inner.update(key_states, value_states)
            self.whole_numbers = key_states.shape[1] * (key_states.shape[-1] + value_states.shape[-1])
            if self.inner.get_seq_length() >= TOKENS_TO_DECIDE:
                self.form = self._decide(keys, values, every)
                stored = None if self.group is None else self.group.stored()
                self.inner.keys, self.inner.values = self.form.encode(
                    self.inner.keys, self.inner.values, stored
                )
                self.group = self.group if self.form.rotate is not None else None
            return keys, values
        kept = self.inner.update(*self.form.encode(key_states, value_states, new))
        keys, values = self.form.decode_keys(kept[0], every), self.form.decode_values(*kept)
        if self.form.keeps_all or torch.compiler.is_compiling():  # nothing can be asked in a graph
            return keys, values
        pairs = ((keys, key_states), (values, value_states))
        limit = _TOLERANCE.get(keys.dtype, 0.0)
        if any(_lost(every_one, given) > limit for every_one, given in pairs):
            self._keep_whole(key_states, value_states)
            for every_one, given in pairs:
                _put_last(every_one, given)
        return keys, values

    def _keep_whole(self, key_states: Tensor, value_states: Tensor) -> None:
        """Keep keys and values as they are from now on, these newest ones, which do not read back, too."""
        keys, values = self.keys, self.values
        assert self.form is not None
        assert keys is not None
        assert values is not None
        whole = keys.clone(), values.clone()
        for every_one, given in zip(whole, (key_states, value_states), strict=True):
            _put_last(every_one, given)
        self.inner.keys, self.inner.values = whole
        why = "an adapter or a clamp changed later tokens"
        self.form = CachedForm(None, None, False, None, self.form.heads, why, why)
        self.group = None

    def _group(self, new: Rotation) -> Angles:
        window = getattr(self.inner, "sliding_window", None)
        for group in self.groups:
            same = group.newest is not None and group.newest[0] is new[0]
            if same and getattr(group.kept, "sliding_window", None) == window:
                return group
        self.groups.append(Angles(self.inner))
        return self.groups[-1]

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # it asks for numbers, once
    def _decide(self, keys: Tensor, values: Tensor, angles: Rotation | None) -> CachedForm:
        """What reads back exactly on the tokens so far."""
        heads, width = keys.shape[1], keys.shape[-1]
        limit = _TOLERANCE.get(keys.dtype, 0.0)
        rotate = next((source.rotate for source in self.sources if source.rotate is not None), None)
        turning = None if rotate is None or angles is None else _turning(rotate, angles, width)
        ways: list[_Way] = [(None, flat(keys))]
        if turning is not None:
            ways.insert(0, (turning, flat(turning.turn_back(keys, angles))))
        outputs = [(source, rows) for source in self.sources for rows in source.rows(heads, width)]
        spans = [source.span(rows, keys) for source, rows in outputs]
        of_keys, keys_full = _first(spans, ways, limit)
        of_values, values_full = None, False
        if keys.shape == values.shape:
            of_values, values_full = _first(spans, [(None, flat(values))], limit)
            joint = self._joint(outputs, ways, flat(values), limit)
            if joint is not None:
                apart = [heads * width if x is None else x[1].basis.shape[1] for x in (of_keys, of_values)]
                if joint[1].basis.shape[1] < sum(apart):
                    return CachedForm(joint[1], None, True, joint[0], heads, "", "")
        return CachedForm(
            keys=None if of_keys is None else of_keys[1],
            values=None if of_values is None else of_values[1],
            joint=False,
            rotate=None if of_keys is None else of_keys[0],
            heads=heads,
            why_keys="" if of_keys is not None else self._why(keys_full, "keys"),
            why_values="" if of_values is not None else self._why(values_full, "values"),
        )

    def _joint(
        self, outputs: Sequence[tuple[Source, Tensor]], ways: Sequence[_Way], values: Tensor, limit: float
    ) -> tuple[Turning | None, Span] | None:
        """The span where keys and values lie together, if they are made of the same z."""
        for one, mine in outputs:
            for other, others in outputs:
                if mine is others or input_factor(one.layer) != input_factor(other.layer):
                    continue
                span = joint_span(one, mine, other, others, values)
                both = [(how, torch.cat([keys, values], dim=-1)) for how, keys in ways]
                found, _ = _first([span], both, limit)
                if found is not None:
                    return found
        return None

    def _why(self, full_rank: bool, what: str) -> str:
        if not self.sources:
            return "no sketched layer writes them"
        if full_rank:
            return "the rank of the layer that writes them is not below their width"
        if what == "keys" and any(source.normalises for source in self.sources):
            return "normalised after their projection"
        return f"not what {', '.join(source.name.rpartition('.')[2] for source in self.sources)} write"

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """(B, H, S, D), turned as the model turned them."""
        if self.form is None or not self.inner.is_initialized:
            return self.inner.keys
        stored = None if self.group is None else self.group.stored()
        return self.form.decode_keys(self.inner.keys, stored)

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """(B, H, S, D)."""
        if self.form is None or not self.inner.is_initialized:
            return self.inner.values
        return self.form.decode_values(self.inner.keys, self.inner.values)

    @property
    def kept_numbers(self) -> int:
        """Numbers of one token, the angles aside."""
        parts = (self.inner.keys, self.inner.values)
        return sum(part.shape[1] * part.shape[-1] for part in parts if part is not None and part.dim() == 4)

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        """Whether there is a token."""
        return self.inner.is_initialized

    @property
    def is_sliding(self) -> bool:
        """See transformers; so for what follows."""
        return self.inner.is_sliding

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Whether tokens can be removed."""
        return self.inner.is_croppable

    @property
    def record_past(self) -> bool:
        """Whether what has slid out is kept."""
        return getattr(self.inner, "record_past", False)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """See transformers; so for what follows."""
        self.inner.lazy_initialization(key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the mask."""
        return self.inner.get_mask_sizes(query_length)

    def get_seq_length(self) -> int:
        """Tokens seen."""
        return self.inner.get_seq_length()

    def get_max_length(self) -> int:
        """The window; -1 if there is none."""
        return self.inner.get_max_length()

    def activate_past_recording(self) -> None:
        """Keep what has slid out until it is cropped."""
        if hasattr(self.inner, "activate_past_recording"):
            self.inner.activate_past_recording()

    def reset(self) -> None:
        """Empty the layer, and decide again."""
        self.inner.keys = self.inner.values = None  # transformers before 5.20 keeps them, as zeros
        self.inner.is_initialized = False
        self.inner.reset()
        self.form = self.group = self.rotation = None

    def reorder_cache(self, beam_idx: Any) -> None:
        """Take sequences in another order."""
        self.inner.reorder_cache(beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens."""
        self.inner.crop(tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence."""
        self.inner.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some of the sequences."""
        self.inner.batch_select_indices(indices)


def _first(
    spans: Sequence[Span], ways: Sequence[_Way], limit: float
) -> tuple[tuple[Turning | None, Span] | None, bool]:
    """The first span that holds a tensor and saves numbers; and whether one holds it that does not."""
    full = False
    for how, x in ways:
        for span in spans:
            # In all dimensions everything reads back: that tells nothing of who wrote it.
            if span.loss(x) < limit:
                if is_thin(span):
                    return (how, span), full
                full = True
    return None, full
