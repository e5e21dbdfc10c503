"""Data for an ONNX model: checked against its inputs, and what its nodes read while it runs on them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from torch import Tensor

from panther_compile.errors import ConfigTypeError, DataError, first_line
from panther_compile.models.batches import spread_out
from panther_compile.models.outputs import check_dense
from panther_compile.onnx.branches import handing_out
from panther_compile.onnx.files import saved_copy
from panther_compile.onnx.verify import RUNTIME_ERRORS, has_sizes, load_session, numpy_dtype
from panther_compile.reporting.tables import counted

OnnxData: TypeAlias = Iterable[Any]
"""Batches: a mapping from input name to array, a tuple or list of arrays in the order of the inputs, or the
array of the only input. Arrays are NumPy's, or tensors of torch."""


_TEXT = "tensor(string)"


class Feed(dict[str, Any]):
    """The arrays of a batch, by the names of the model's inputs.

    Attributes:
        place: of the batch in the data, which errors name, whatever the order in which batches are run.
    """

    def __init__(self, arrays: Mapping[str, Any], place: int = 0) -> None:
        super().__init__(arrays)
        self.place = place


def last_at_the_end(feeds: Sequence[Feed]) -> list[Feed]:
    """Batches that were spread out, the one that came last in the data behind the others."""
    last = max(feeds, key=lambda feed: feed.place)
    return [*(feed for feed in feeds if feed is not last), last]


class ObservedModel:
    """A model that can be run on data, and shows values of its graph.

    Args:
        model: is left as it is.
        values: of the graph itself or of branches, see `branches.py`.
        folder: where a copy of the model is written for a moment.

    Raises:
        OnnxMismatchError: ONNX Runtime cannot load the model.
        OnnxFileError: the copy cannot be written.
    """

    def __init__(self, model: ir.Model, values: Sequence[ir.Value], folder: Path) -> None:
        model, found = handing_out(model, list(dict.fromkeys(values)))
        given, outputs = {*model.graph.inputs}, model.graph.outputs
        own = list(outputs)
        shown = [value for value in found if value not in given]
        try:
            if shown:  # what they do not depend on is not run
                outputs.clear()
                outputs.extend(shown)
            with saved_copy(model, folder) as path:
                self._session = load_session(path, "the model")
        finally:
            outputs.clear()
            outputs.extend(own)

    @property
    def inputs(self) -> Sequence[ort.NodeArg]:
        """The inputs of the model."""
        return self._session.get_inputs()

    @property
    def outputs(self) -> list[str]:
        """The names of what is shown."""
        return [one.name for one in self._session.get_outputs()]

    def feeds(self, data: OnnxData) -> list[Feed]:
        """The batches by the names of the inputs, spread out: any stretch of them is from everywhere.

        Those of a list are held as they are, if they can be; those of an iterator, which may write over what
        it gave, are copies.

        Raises:
            ConfigTypeError: data, or a batch, is none of what `OnnxData` says.
            DataError: there is no batch, or one is empty, or has other names, shapes or dtypes than the
                inputs, or NaN; or reading failed half-way, and the error's `calls` hold what was read before,
                which can be given as data.
        """
        if isinstance(data, str | bytes | Mapping | np.ndarray | Tensor) or not isinstance(data, Iterable):
            raise ConfigTypeError(
                f"data is a {type(data).__name__}, wanted a list of batches: mappings from input name to "
                "array, tuples of arrays in the order of the inputs, or arrays for a model of one input"
            )
        feeds: list[Feed] = []
        try:
            for place, batch in enumerate(data):
                feeds.append(self._feed(batch, place, copy=not isinstance(data, list | tuple)))
        except (ConfigTypeError, DataError):
            raise
        # The user's loader runs here; whatever it raises, what was read before is not lost.
        except Exception as error:
            raise DataError(
                f"data failed after {counted(len(feeds), 'batch')} ({type(error).__name__}: {error}); "
                "the batches read until then are in this error's `calls`, which can be given as data",
                calls=feeds,
            ) from error
        if not feeds:
            raise DataError(
                "data holds no batch: wanted at least one (an iterator is empty once it was read)"
            )
        return spread_out(feeds)

    def check(self, feeds: Sequence[Feed]) -> None:
        """Check that the model takes batches that were read for another.

        Raises:
            DataError: one has other names, shapes or dtypes than the inputs.
        """
        for feed in feeds:
            self._feed(feed, feed.place, copy=False)

    def run(self, feeds: Sequence[Feed], names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Arrays of some values, for each batch, inputs of the model among them or not.

        Of values in a branch that is not taken they have no entries.

        Raises:
            DataError: ONNX Runtime cannot run the batch.
        """
        given = {one.name for one in self.inputs}
        wanted = [name for name in names if name not in given]
        for feed in feeds:
            try:
                found = self._session.run(wanted, feed) if wanted else []
            except RUNTIME_ERRORS as error:
                raise DataError(
                    f"batch {feed.place} of data: ONNX Runtime cannot run it: {first_line(error)}"
                ) from error
            yield dict(zip(wanted, found, strict=True)) | {name: feed[name] for name in names if name in feed}

    def _feed(self, batch: object, place: int, *, copy: bool) -> Feed:
        inputs, where = self.inputs, f"batch {place} of data"
        names = [one.name for one in inputs]
        if isinstance(batch, np.ndarray | Tensor):
            batch = (batch,)
        if isinstance(batch, tuple | list):
            if len(batch) != len(names):
                raise DataError(f"{where} has {len(batch)} arrays, the model {len(names)} inputs: {names}")
            batch = dict(zip(names, batch, strict=True))
        if not isinstance(batch, Mapping):
            raise ConfigTypeError(
                f"{where} is a {type(batch).__name__}, wanted a mapping from input name to array, a tuple or "
                "list of arrays, or an array"
            )
        if set(batch) != set(names):
            raise DataError(
                f"{where} has arrays for {sorted(map(str, batch))}, the model's inputs are {names}"
            )
        arrays = {one.name: _checked(batch[one.name], one, where, copy=copy) for one in inputs}
        if arrays and not any(array.size for array in arrays.values()):
            shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
            raise DataError(f"{where} is empty, {shapes}: wanted at least one sample")
        return Feed(arrays, place)


def _checked(given: object, wanted: ort.NodeArg, where: str, *, copy: bool) -> np.ndarray:
    """The array of one input, as torch takes it too: in one stretch of memory that may be written to."""
    where = f"{where}: input {wanted.name!r}"
    if not isinstance(given, np.ndarray | Tensor):
        raise ConfigTypeError(f"{where} is a {type(given).__name__}, wanted an array")
    dtype, found = numpy_dtype(wanted), str(given.dtype).removeprefix("torch.")
    if wanted.type == _TEXT and _is_text(given):
        dtype, found = given.dtype, str(given.dtype)
    if dtype is None or found != str(np.dtype(dtype)):
        plain = "strings" if wanted.type == _TEXT else wanted.type
        raise DataError(f"{where} is {found}, wanted {plain if dtype is None else np.dtype(dtype)}")
    array = _array(given, where)
    if not has_sizes(array, wanted.shape):
        raise DataError(f"{where} has shape {array.shape}, wanted {tuple(wanted.shape)}")
    if np.issubdtype(array.dtype, np.floating) and bool(np.isnan(array).any()):
        raise DataError(f"{where} holds NaN")
    return np.array(array, order="C", copy=True if copy or not array.flags.writeable else None)


def _is_text(given: np.ndarray | Tensor) -> bool:
    """Whether an array holds strings, as columns of tables do."""
    if not isinstance(given, np.ndarray) or given.dtype.kind not in "OU":
        return False
    return all(isinstance(one, str) for one in given.flat)


def _array(given: np.ndarray | Tensor, where: str) -> np.ndarray:
    """An array whose numbers are all that it holds."""
    if isinstance(given, np.ma.MaskedArray):
        raise DataError(f"{where} is a masked array, wanted one whose numbers all count")
    if not isinstance(given, Tensor):
        return np.asarray(given)
    if given.is_meta:
        raise DataError(f"{where} is a tensor on the meta device, wanted numbers")
    check_dense(given, where)
    return given.numpy(force=True)
