"""What inputs of a model may look like, by what it says: its signature, configuration and first layers."""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn

from panther_compile.models.batches import Call
from panther_compile.models.natural import natural_images
from panther_compile.models.sounds import natural_sounds, pink_noise

BATCH = 8  # inputs of a batch
_LENGTHS = (128, 64, 32, 16, 8, 4)  # of texts
_SIZES = (32, 64, 128, 224, 28, 8, 16, 299, 256, 384, 192, 512, 112, 48, 96, 160, 24)  # of images
# Frames and sizes of videos, then volumes as large on each side.
_CLIPS = (16, 32), (16, 64), (32, 128), (16, 112), (16, 224), (8, 16), (32, 32), (64, 64), (96, 96)
_FEW = 1  # videos of a batch
_FASTEST = 2  # pixels that they move by, a frame
_SAMPLES = 16000, 4000, 1024, 1000, 256
_FRAMES, _MOST_SOUNDS = 32 * 1024, 32  # samples and sounds of a batch
_MOST_CHANNELS = 2  # of a sound; more are features of one
_BINS = "num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim"  # in configurations
_MOST_FRAMES = 256
_STEPS = 16  # of a sequence of vectors
_LAYERS = 3  # the first kinds of layers that are tried
_POSITIONS = 1024  # a longer table is none of positions
_KINDS = nn.Embedding, nn.Conv2d, nn.Conv1d, nn.Conv3d, nn.RNNBase, nn.MultiheadAttention, nn.Linear


@dataclass(frozen=True, slots=True)
class Form:
    """What an input may look like.

    Attributes:
        kind: "tokens", "images", "videos", "sounds" or "vectors".
        make: a number of inputs.
        call: the model's call with them.
        alone: whether the model is given nothing else.
        batch: how many are in a batch.
        natural: whether they are like what a model of such inputs is used for.
    """

    kind: str
    make: Callable[[int, Generator], Tensor]
    call: Callable[[Tensor], Call]
    alone: bool = True
    batch: int = BATCH
    natural: bool = False


def forms_of(model: nn.Module) -> Iterator[Form]:
    """The forms to try, in this order; whether the model takes one shows when it runs on it."""
    parameters = inspect.signature(model.forward).parameters
    main, config = getattr(model, "main_input_name", None), getattr(model, "config", None)
    if isinstance(main, str) and main in parameters and config is not None:
        yield from _forms_by_name(model, main, parameters)
        return
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    wanted = [one for one in parameters.values() if one.default is one.empty and one.kind in places]
    if len(wanted) == 1:
        for kind, layer in _first_layers(model):
            yield from _forms_by_layer(model, kind, layer)


def table_of_tokens(model: nn.Module) -> Any:
    """The embedding of what the model reads as tokens: its own word on it, else its first; None without one.

    The first may be of positions, as of an encoder of images or sounds that is before the language model.
    """
    said = getattr(model, "get_input_embeddings", None)
    with suppress(AttributeError, NotImplementedError):  # models without a table of tokens
        found = said() if callable(said) else None
        if isinstance(found, nn.Module) and issubclass(_dense_type(found) or type(found), nn.Embedding):
            return found
    return next((one for one in model.modules() if isinstance(one, nn.Embedding)), None)


def _forms_by_name(model: nn.Module, main: str, parameters: Mapping[str, Any]) -> Iterator[Form]:
    """Input forms of a Hugging Face model."""
    config: Any = model.config
    embedding = table_of_tokens(model)
    dtype = _dtype_of(model)

    def with_others(value: Tensor, others: Mapping[str, Callable[[int], Tensor]]) -> Call:
        given = {main: value} | {name: make(len(value)).to(value.device) for name, make in others.items()}
        cast = {name: _as_floats(one, dtype) for name, one in given.items()}
        return Call((), cast | _no_cache(parameters))

    others: dict[str, Callable[[int], Tensor]] = {}
    known = _tokens_of_decoder(config) if getattr(config, "is_encoder_decoder", False) else None
    if known is not None and "decoder_input_ids" in parameters:
        first = getattr(config, "decoder_start_token_id", None) or 0

        def decoder(count: int) -> Tensor:
            drawn = torch.randint(0, known, (count, 16), generator=torch.Generator().manual_seed(0))
            drawn[:, 0] = first
            return drawn

        others["decoder_input_ids"] = decoder
    vision = _of_images(config)
    channels = int(getattr(vision, "num_channels", 3) or 3)
    sides = _sides(getattr(vision, "image_size", None) or 224)
    if main == "input_ids" and embedding is not None:
        more = {"pixel_values": lambda n: _images(channels, sides)(n, torch.Generator().manual_seed(0))}
        for length in _lengths(model):
            make = _tokens(embedding.num_embeddings, length)
            yield Form("tokens", make, lambda ids: with_others(ids, others), alone=not others)
            if "pixel_values" in parameters:
                yield Form("tokens", make, lambda ids: with_others(ids, others | more), alone=False)
    elif main in ("pixel_values", "pixel_values_videos"):
        if main == "pixel_values":
            make = _images(channels, sides)
            yield Form("images", make, lambda images: with_others(images, others))
        make = _videos(channels, _frames(vision), sides)
        yield Form("videos", make, lambda many: with_others(many.movedim(1, 2), others), batch=_FEW)
    elif main == "past_values":
        length, count = (
            getattr(config, name, None) or 1 for name in ("context_length", "num_input_channels")
        )
        yield Form("vectors", _vectors(length, count), lambda series: with_others(series, others))
    elif main in ("input_values", "input_features"):
        for channel in ((), (1,)) if main == "input_values" else ():
            for samples in _SAMPLES:
                yield _sounds(lambda sounds: with_others(sounds, others), *channel, samples)
        for shape in _spectrograms(config):
            yield Form("sounds", _features_of_sounds(*shape), lambda sounds: with_others(sounds, others))


def _spectrograms(config: Any) -> Iterator[tuple[int, int]]:
    """Shapes that spectrograms may have: bins of all frames, as whisper's, or frames of all bins."""
    config = getattr(config, "encoder_config", config)
    said = (getattr(config, name, None) for name in _BINS)
    bins = next((one for one in said if isinstance(one, int)), 80)
    yield bins, 2 * int(getattr(config, "max_source_positions", None) or 1500)
    longest = getattr(config, "max_length", None)
    yield longest if isinstance(longest, int) and longest > bins else _MOST_FRAMES, bins


def _tokens_of_decoder(config: Any) -> int | None:
    """How many tokens the decoder of a Hugging Face model knows, if its configuration says so."""
    with suppress(AttributeError, ValueError):  # not of transformers, or of several decoders
        config = config.get_text_config(decoder=True)
    size = getattr(config, "vocab_size", None)
    return size if isinstance(size, int) else None


def _frames(config: Any) -> int:
    """How many frames a video has."""
    said = (getattr(config, name, None) for name in ("num_frames", "frames_per_clip"))
    return next((one for one in said if isinstance(one, int)), _CLIPS[0][0])


def _of_images(config: Any) -> Any:
    """The part of a configuration that says what images are; the whole if none does."""
    vision = getattr(config, "vision_config", None)
    if vision is not None:  # what the whole says may be of texts
        return vision
    parts = (config, *(getattr(config, name, None) for name in ("backbone_config", "encoder")))
    return next((part for part in parts if getattr(part, "image_size", None)), config)


def _sides(size: Any) -> tuple[int, int]:
    """Height and width of images, of a number, a pair, or a mapping; squares of the longer side of others."""
    if isinstance(size, Mapping):
        size = [size.get(name, max(size.values())) for name in ("height", "width")]
    if isinstance(size, list | tuple) and len(size) == 2:
        return int(size[0]), int(size[1])
    longer = int(max(size) if isinstance(size, list | tuple) else size)
    return longer, longer


def _no_cache(parameters: Mapping[str, Any]) -> dict[str, bool]:
    return {"use_cache": False} if "use_cache" in parameters else {}


def _first_layers(model: nn.Module) -> Iterator[tuple[type, Any]]:
    """The first layer of each kind that says what it takes, dense or sketched, in the order of the model."""
    seen: set[type] = set()
    for module in _modules_but_factors(model, set()):
        stands_for = _dense_type(module) or type(module)
        kind = next((kind for kind in _KINDS if issubclass(stands_for, kind)), None)
        if kind is not None and kind not in seen and len(seen) < _LAYERS:
            seen.add(kind)
            yield kind, module


def _modules_but_factors(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """The modules of a tree, parents first, each once, but what layers are made of that stand for others."""
    if module in seen:
        return
    seen.add(module)
    yield module
    if _dense_type(module) is None:
        for child in module.children():
            yield from _modules_but_factors(child, seen)


def _dense_type(module: nn.Module) -> type | None:
    """The class of torch that a sketched layer stands for; None for other modules."""
    found = getattr(type(module), "dense_type", None)
    return found if isinstance(found, type) else None


def _forms_by_layer(model: nn.Module, kind: type, layer: Any) -> Iterator[Form]:
    """What a model may take whose first layer is this one, which is of this kind or stands for one."""
    dtype = _dtype_of(layer)

    def call(value: Tensor) -> Call:
        return Call((_as_floats(value, dtype),), {})

    if kind is nn.Embedding:
        for length in _lengths(model):
            yield Form("tokens", _tokens(layer.num_embeddings, length), call)
            yield Form("tokens", _tokens(layer.num_embeddings, length), _features)
    elif kind is nn.Conv2d:
        cut = _channels_of_patches(layer.in_channels) if max(layer.kernel_size) == 1 else ()
        for channels in (layer.in_channels, *cut):
            yield from _squares(model, channels, call)
        if layer.in_channels == 1 and min(layer.kernel_size) == 1:  # a convolution of sounds
            for samples in _SAMPLES:
                yield _sounds(call, samples)
    elif kind is nn.Conv1d:
        for samples in _SAMPLES:
            if layer.in_channels <= _MOST_CHANNELS:
                yield _sounds(call, layer.in_channels, samples)
            else:
                yield Form("sounds", _features_of_sounds(layer.in_channels, samples), call)
        if layer.in_channels > _MOST_CHANNELS:  # of models that swap frames and features themselves
            for frames in (_MOST_FRAMES, _STEPS):
                yield Form("sounds", _features_of_sounds(frames, layer.in_channels), call)
    elif kind is nn.Conv3d:
        for frames, size in _CLIPS:
            yield Form("videos", _videos(layer.in_channels, frames, (size, size)), call, batch=_FEW)
    elif kind is nn.Linear:
        yield Form("vectors", _vectors(layer.in_features), call)
        yield Form("vectors", _vectors(_STEPS, layer.in_features), call)
        for channels in _channels_of_patches(layer.in_features):
            yield from _squares(model, channels, call)
    elif kind is nn.RNNBase:
        yield Form("vectors", _vectors(_STEPS, layer.input_size), call)
    elif kind is nn.MultiheadAttention:
        yield Form("vectors", _vectors(_STEPS, layer.embed_dim), call)


def _squares(model: nn.Module, channels: int, call: Callable[[Tensor], Call]) -> Iterator[Form]:
    """Square images of every size that is tried."""
    for size in (*_SIZES, *_size_of_timm(model)):
        yield Form("images", _images(channels, (size, size)), call)


def _channels_of_patches(features: int) -> Iterator[int]:
    """Channels of images of whose square patches these may be the features, as einops or unfold cut them."""
    for channels in (3, 1):
        side = math.isqrt(features // channels)
        if side > 1 and channels * side**2 == features:
            yield channels


def _size_of_timm(model: nn.Module) -> Iterator[int]:
    """The size of images that a model of timm says it was trained on."""
    said = getattr(model, "pretrained_cfg", None)
    if isinstance(said, Mapping) and isinstance(said.get("input_size"), list | tuple):
        yield int(said["input_size"][-1])


def _dtype_of(module: nn.Module) -> torch.dtype:
    return next((one.dtype for one in module.parameters() if one.is_floating_point()), torch.float32)


def _as_floats(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in a type, if it holds no integers."""
    return value.to(dtype) if value.is_floating_point() else value


def _features(ids: Tensor) -> Call:
    """What sentence-transformers calls its models with."""
    return Call(({"input_ids": ids, "attention_mask": torch.ones_like(ids)},), {})


def _lengths(model: nn.Module) -> list[int]:
    """Lengths of texts to try: the most that a table of positions holds, then shorter ones."""
    tables = [one.num_embeddings for one in model.modules() if isinstance(one, nn.Embedding)]
    tables += [one.shape[-2] for one in model.parameters() if one.dim() == 3 and one.shape[0] == 1]
    positions = [one for one in tables if 4 <= one <= min(_POSITIONS, _LENGTHS[0])]
    return list(dict.fromkeys([*sorted(positions, reverse=True), *_LENGTHS]))


def _tokens(vocabulary: int, length: int) -> Callable[[int, Generator], Tensor]:
    return lambda count, drawn: torch.randint(0, vocabulary, (count, length), generator=drawn)


def _images(channels: int, sides: tuple[int, int]) -> Callable[[int, Generator], Tensor]:
    height, width = sides
    return lambda count, drawn: natural_images(count, channels, max(sides), drawn)[..., :height, :width]


def _videos(channels: int, frames: int, sides: tuple[int, int]) -> Callable[[int, Generator], Tensor]:
    """Images that move from frame to frame, each in a direction of its own, by up to two pixels."""

    def made(count: int, drawn: Generator) -> Tensor:
        images = _images(channels, sides)(count, drawn)
        steps = torch.randint(-_FASTEST, _FASTEST + 1, (count, 2), generator=drawn).tolist()
        moved = [
            torch.stack([image.roll((down * at, right * at), (-2, -1)) for at in range(frames)], 1)
            for image, (down, right) in zip(images, steps, strict=True)
        ]
        return torch.stack(moved)

    return made


def _sounds(call: Callable[[Tensor], Call], *shape: int) -> Form:
    batch = max(BATCH, min(_MOST_SOUNDS, _FRAMES // shape[-1]))
    return Form(
        "sounds",
        lambda count, drawn: natural_sounds((count, *shape), drawn),
        call,
        batch=batch,
        natural=True,
    )


def _features_of_sounds(*shape: int) -> Callable[[int, Generator], Tensor]:
    return lambda count, drawn: pink_noise((count, *shape), drawn)


def _vectors(*shape: int) -> Callable[[int, Generator], Tensor]:
    return lambda count, drawn: torch.randn(count, *shape, generator=drawn, dtype=torch.float32)
