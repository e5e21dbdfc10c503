"""Images, sounds and texts made up for an ONNX model without data, as for one in torch.

Texts are of words at random (`models/word_texts.py`), of an encoder whose tokenizer lies beside the file, or
a folder above it, as exporters leave it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch
from torch import Generator, Tensor

from panther_compile.errors import DataError
from panther_compile.models.natural import natural_images
from panther_compile.models.sounds import natural_sounds
from panther_compile.models.word_texts import Vocabulary, read_vocabulary, tokenizer_at
from panther_compile.onnx.data import Feed, ObservedModel
from panther_compile.onnx.patterns import is_onnx
from panther_compile.onnx.sites import to_torch
from panther_compile.onnx.verify import MASK, numpy_dtype

JUDGED = 2
"""The last batches, which outputs are compared on and nothing is fitted to."""

_BATCHES, _BATCH = 14, 8
_SIZES = ((224, 224), (48, 320), (32, 320), (64, 64), (32, 32), (8, 8))  # squares, and lines of text
_SAMPLES = (16000, 4000, 1024, 1000, 256)
_FEWEST = 256  # samples of a sound
_IDS, _TYPES, _PLACES = "input_ids", "token_type_ids", "position_ids"
_TEXTS, _LENGTHS = 32, (128, 64, 32, 16)  # of a batch, and tokens of the longest text

_Draw = Callable[[int, Sequence[int], Generator], Tensor]


@dataclass(frozen=True, slots=True)
class MadeUp:
    """Inputs of a model.

    Attributes:
        what: they are, in words.
        feeds: batches; of images and sounds of mean 0 and variance 1.
    """

    what: str
    feeds: list[Feed]


def made_up_inputs(model: ir.Model, dense: ObservedModel, seed: int, folder: Path) -> MadeUp | None:
    """Batches of images, sounds or texts, of the first size that a model runs on.

    Args:
        model: says what its first convolution reads, and which vectors it has for tokens.
        dense: shows its outputs.
        seed: of what is drawn.
        folder: of the file.

    Returns:
        None for a model that takes nothing, by a size of 0, or anything but images alone, (N, 1 or 3, H, W)
        of floats, or (N, H, W, 1 or 3) which it transposes to that, as TensorFlow's are exported, sounds
        alone, (N, T) with ones anywhere, whose first convolution is along time and reads one channel, or
        tokens (N, T) by the names of transformers, with a tokenizer at hand.
    """
    if any(0 in one.shape for one in dense.inputs):
        return None
    if any(one.name == _IDS for one in dense.inputs):
        return _texts(model, dense, seed, folder)
    if len(dense.inputs) != 1:
        return None
    wanted, dtype = dense.inputs[0], numpy_dtype(dense.inputs[0])
    if dtype is None or not np.issubdtype(dtype, np.floating):
        return None
    if len(wanted.shape) == 4 and wanted.shape[1] in (1, 3):
        what, shapes, draw = "made-up images", _image_shapes(wanted), _images
    elif len(wanted.shape) == 4 and wanted.shape[3] in (1, 3) and _has_channels_last(model):
        what, shapes, draw = "made-up images", _image_shapes(wanted, channels=3), _channels_last
    elif _hears(model):
        what, shapes, draw = "made-up sounds", _sound_shapes(wanted), _sounds
    else:
        return None
    for batch, *shape in dict.fromkeys(shapes):
        if _runs(dense, Feed({wanted.name: np.zeros((batch, *shape), dtype)})):
            generator = torch.Generator().manual_seed(seed)
            shown = draw(_BATCHES * batch, shape, generator).numpy().astype(dtype)
            return MadeUp(what, [Feed({wanted.name: one}) for one in np.split(shown, _BATCHES)])
    return None


def _texts(model: ir.Model, dense: ObservedModel, seed: int, folder: Path) -> MadeUp | None:
    """Texts of words at random, if the model reads tokens alone, and its vectors and tokenizer are found."""
    vocabulary = None if _others(dense, 1, 1) is None else _vocabulary(model, folder)
    if vocabulary is None:
        return None
    generator = torch.Generator().manual_seed(seed)
    size, longest = next(one.shape for one in dense.inputs if one.name == _IDS)
    size = size if isinstance(size, int) else _TEXTS
    count = -(-_BATCHES * _TEXTS // size)
    for length in (longest,) if isinstance(longest, int) else _LENGTHS:
        several = () if isinstance(longest, int) else (vocabulary.batches(count, size, length, generator),)
        alike = [vocabulary.texts(size, length, generator) for _ in range(count)]
        for drawn in (*several, alike):  # of many lengths, or where it does not take those, of one
            feeds = [_text_feed(dense, one.numpy()) for one in drawn]
            if all(_runs(dense, feed) for feed in feeds):
                return MadeUp("made-up texts of words", feeds)
    return None


def _text_feed(dense: ObservedModel, ids: Any) -> Feed:
    others = _others(dense, *ids.shape)
    assert others is not None
    given = {_IDS: ids} | others
    return Feed({one.name: given[one.name].astype(numpy_dtype(one)) for one in dense.inputs})


def _others(dense: ObservedModel, count: int, length: int) -> dict[str, Any] | None:
    """What a model takes beside tokens, for texts without padding; None if it takes anything unknown."""
    ones = np.ones((count, length), dtype=np.int64)
    known = {MASK: ones, _TYPES: 0 * ones, _PLACES: ones.cumsum(1) - 1}
    wanted = [one.name for one in dense.inputs if one.name != _IDS]
    whole = all(
        one.type in ("tensor(int64)", "tensor(int32)") and len(one.shape) == 2 for one in dense.inputs
    )
    return {name: known[name] for name in wanted} if whole and set(wanted) <= set(known) else None


def _vocabulary(model: ir.Model, folder: Path) -> Vocabulary | None:
    """What the tokenizer beside a file knows, of the words that the model has vectors for."""
    vectors = next((found for one in model.graph.inputs if one.name == _IDS for found in _vectors(one)), None)
    if vectors is None or find_spec("transformers") is None:
        return None
    tokenizers = (tokenizer_at(place) for place in (folder, folder.parent) if _has_tokenizer(place))
    tokenizer = next((one for one in tokenizers if one is not None), None)
    return None if tokenizer is None else read_vocabulary(tokenizer, vectors)


def _vectors(ids: ir.Value) -> Iterator[Tensor]:
    """Tables (V, d) that tokens are looked up in."""
    for node in ids.consumers():
        if is_onnx(node, "Cast"):
            yield from _vectors(node.outputs[0])
        elif is_onnx(node, "Gather") and node.inputs[0] is not None:
            table = ir.convenience.get_const_tensor(node.inputs[0])
            if table is not None and len(table.shape) == 2:
                yield to_torch(table)


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))


def _hears(model: ir.Model) -> bool:
    """Whether the first convolution is one of sounds: of one channel, along one axis."""
    for node in model.graph:
        if is_onnx(node, "Conv") and node.inputs[1] is not None:
            weight = ir.convenience.get_const_tensor(node.inputs[1])
            shape = [] if weight is None else [int(size) for size in weight.shape]  # type: ignore[arg-type]
            return len(shape) in (3, 4) and shape[1] == 1 and (len(shape) == 3 or min(shape[2:]) == 1)
    return False


def _has_channels_last(model: ir.Model) -> bool:
    """Whether the channels of the only input are put ahead of its heights and widths."""
    (given,) = (one for one in model.graph.inputs if one.name not in model.graph.initializers)
    readers = given.consumers()
    return bool(readers) and all(
        is_onnx(one, "Transpose") and one.attributes.get_ints("perm", ()) == (0, 3, 1, 2) for one in readers
    )


def _image_shapes(wanted: ort.NodeArg, *, channels: int = 1) -> Iterator[tuple[int, ...]]:
    """Shapes of batches whose axis of channels is that one."""
    for size in _SIZES:
        free = [_BATCH, *size]
        free.insert(channels, wanted.shape[channels])
        yield _filled(wanted.shape, free)


def _sound_shapes(wanted: ort.NodeArg) -> Iterator[tuple[int, ...]]:
    """Shapes whose first size is of the batch, and one other of samples."""
    long = [axis for axis, size in enumerate(wanted.shape) if axis and size != 1]
    for samples in _SAMPLES if len(long) == 1 else ():
        free = [_BATCH, *(samples if axis in long else 1 for axis in range(1, len(wanted.shape)))]
        shape = _filled(wanted.shape, free)
        if shape[long[0]] >= _FEWEST:
            yield shape


def _sounds(count: int, shape: Sequence[int], generator: Generator) -> Tensor:
    return natural_sounds((count, max(shape)), generator).reshape(count, *shape)


def _images(count: int, shape: Sequence[int], generator: Generator) -> Tensor:
    """Natural images cut into as many of a size (count, channels, height, width) as they hold."""
    channels, height, width = shape
    side = max(height, width)
    down, across = side // height, side // width
    images = natural_images(-(-count // (down * across)), channels, side, generator)
    cut = images[:, :, : down * height, : across * width].unflatten(3, (across, width))
    cut = cut.unflatten(2, (down, height)).permute(2, 4, 0, 1, 3, 5)
    return cut.flatten(0, 2)[:count]


def _channels_last(count: int, shape: Sequence[int], generator: Generator) -> Tensor:
    height, width, channels = shape
    return _images(count, (channels, height, width), generator).permute(0, 2, 3, 1)


def _filled(given: Iterable[Any], free: Sequence[int]) -> tuple[int, ...]:
    """Sizes that a file fixes, others where it leaves them free."""
    return tuple(one if isinstance(one, int) else size for one, size in zip(given, free, strict=True))


def _runs(dense: ObservedModel, feed: Feed) -> bool:
    try:
        return bool(list(dense.run([feed], dense.outputs)))
    except DataError:
        return False
