"""Read and write ONNX files: what is read is sound, what is written is whole or not there at all.

Weights of more than 2 GB do not fit into an ONNX file. They stand beside it in `<file>-<checksum>.data`; as
the checksum names them, a file and its weights always belong together, also while one pair replaces another.
"""

import errno
import math
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from glob import escape
from pathlib import Path

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError, EncodeError
from onnx.external_data_helper import (
    load_external_data_for_tensor,
    uses_external_data,
)
from onnx_ir.passes.common import LiftConstantsToInitializersPass

from panther_compile.errors import (
    ConfigError,
    OnnxExternalDataError,
    OnnxFileError,
    OnnxInvalidError,
    first_line,
)
from panther_compile.onnx.patterns import RUNTIME
from panther_compile.storage import check_folder, checked_path, file_sha256, flush, locked, scratch_folder

OLDEST_OPSET = 11
# From this IR version on an initializer need not be an input of the graph, where a caller may override it.
WEIGHTS_APART = 4
# Bytes of weights that still go into the ONNX file itself; protobuf ends at 2^31.
LARGEST_INLINE = 2_000_000_000
_LONGEST_NAME, _LONGEST_NUMBER = 4096, 20  # of bytes, and of digits
_NORMALIZES = 17  # the opset from which on LayerNormalization is of ONNX
_DATA_SUFFIX = "-" + "[0-9a-f]" * 16 + ".data"


def read_model(path: str | os.PathLike[str]) -> ir.Model:
    """Read an ONNX file and check it; weights beside it stay there until they are used.

    Weights that stand in Constant nodes, as Paddle writes them, become initializers. Nodes are put in order,
    where one stands ahead of what it reads, as tools leave those that they add; ONNX Runtime does as much.

    Raises:
        ConfigError, ConfigTypeError: the path is none.
        OnnxFileError: there is no such file, or it cannot be read.
        OnnxInvalidError: it is truncated, no sound graph, holds maps, or is of an opset older than 11 or
            unknown here.
        OnnxExternalDataError: a weight's file is missing, cut short, or outside the model's folder.
    """
    path = checked_path(path, "source")
    try:
        proto = onnx.load_model(path, format="protobuf", load_external_data=False)
    except OSError as error:
        raise OnnxFileError(f"cannot read {path}: {error}") from error
    except DecodeError as error:
        raise OnnxInvalidError(f"{path} is truncated, or no ONNX file: {error}") from error
    _check_supported(proto, path)
    for tensor in _tensors(proto):
        if uses_external_data(tensor):
            _check_external(tensor, path)
    in_order = _is_in_order(proto.graph)
    if in_order:
        _check(path)
    _load_inner(proto, path.parent)
    try:
        model = ir.from_proto(proto)
    except ir.serde.SerdeError as error:
        raise OnnxInvalidError(
            f"{path} is no sound ONNX model: {first_line(error.__cause__ or error)}"
        ) from error
    if not in_order:
        _put_in_order(model, path)
    ir.external_data.set_base_dir(model.graph, str(path.parent.absolute()))
    if model.ir_version >= WEIGHTS_APART:
        LiftConstantsToInitializersPass()(model)
    return model


def write_model(
    model: ir.Model, path: str | os.PathLike[str], *, check: Callable[[Path], None] | None = None
) -> int:
    """Write a model, whole or not at all; returns the bytes of the file and of the weights beside it.

    Weights that the model keeps in another file, and weights of more than 2 GB, go into a file beside it.

    Args:
        model: what to write.
        path: a file there is replaced, at the last moment.
        check: called on the finished file, before it is put in its place; what it raises stops the writing.

    Raises:
        OnnxFileError: the file cannot be written.
        OnnxInvalidError: the model is not sound.
    """
    path = checked_path(path, "path")
    try:
        with scratch_folder(path.parent) as scratch:
            draft = scratch / path.name
            data = _save_with_data(model, draft) if is_large(model) else _save(model, draft)
            _check(draft)
            if check is not None:
                check(draft)
            size = sum(file.stat().st_size for file in (draft, *data))
            flush(*data, draft)
            with locked(path.parent):
                for file in (*data, draft):  # the model last: from then on the new one is in place
                    os.replace(file, path.parent / file.name)
                flush(path.parent)
                _remove_others(path, data)
    except OSError as error:
        raise OnnxFileError(f"cannot write {path}: {error}") from error
    except EncodeError as error:
        raise OnnxInvalidError(f"cannot write {path}: {error}") from error
    return size


@contextmanager
def saved_copy(model: ir.Model, folder: Path) -> Iterator[Path]:
    """A file of the model for a while, its weights with it; it need be no sound one.

    Args:
        model: its weights may stand in another file.
        folder: in which it is written.

    Raises:
        OnnxFileError: the file cannot be written.
    """
    with ExitStack() as stack:
        try:
            path = stack.enter_context(scratch_folder(folder)) / "model.onnx"
            ir.save(model, path, format="protobuf", external_data="weights" if is_large(model) else None)
        except OSError as error:
            raise OnnxFileError(f"cannot write to {folder}: {error}") from error
        yield path


def stored_bytes(model: ir.Model, path: Path) -> int:
    """The size of a file that was read, and of the weights beside it."""
    beside = sum(tensor.nbytes for tensor in _stored(model) if isinstance(tensor, ir.ExternalTensor))
    return path.stat().st_size + beside


def check_target(target: Path) -> None:
    """Check, before any work is done, that a file can be written.

    Raises:
        OnnxFileError: it is a folder, or its own is missing or cannot be written into.
    """
    try:
        check_folder(target.parent, made=False)
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    except OSError as error:
        raise OnnxFileError(f"cannot write {target}: {error}") from error


def check_apart(target: Path, *sources: ir.Model) -> None:
    """Raise ConfigError if a model that was read has its weights in the file that is to be written."""
    for tensor in (one for model in sources for one in _stored(model)):
        if isinstance(tensor, ir.ExternalTensor) and Path(tensor.path).resolve() == target.resolve():
            raise ConfigError(f"target={str(target)!r} holds weights of the source, wanted another file")


def is_large(model: ir.Model) -> bool:
    """Whether weights go into a file of their own: too large for one, or they came from another one."""
    tensors = list(_stored(model))
    if any(isinstance(tensor, ir.ExternalTensor) for tensor in tensors):
        return True
    return sum(tensor.nbytes for tensor in tensors) > LARGEST_INLINE


def _stored(model: ir.Model) -> Iterator[ir.TensorProtocol]:
    """The initializers of a model, in subgraphs too."""
    for graph in model.graphs():
        for value in graph.initializers.values():
            if value.const_value is not None:
                yield value.const_value


def _save(model: ir.Model, draft: Path) -> tuple[Path, ...]:
    ir.save(model, draft, format="protobuf")
    return ()


def _save_with_data(model: ir.Model, draft: Path) -> tuple[Path, ...]:
    """Write the weights to a file of their own, then name it by its checksum."""
    unnamed = draft.with_name("weights")
    ir.save(model, draft, format="protobuf", external_data=unnamed.name)
    if not unnamed.exists():  # none is large enough to be worth it
        return ()
    data = unnamed.rename(draft.with_name(f"{draft.name}-{file_sha256(unnamed)[:16]}.data"))
    proto = onnx.load_model(draft, format="protobuf", load_external_data=False)
    for tensor in _tensors(proto):
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = data.name
    onnx.save_model(proto, draft, format="protobuf")
    return (data,)


def _remove_others(path: Path, data: tuple[Path, ...]) -> None:
    """Remove the weights of the model that was replaced, unless a copy of it beside it still reads them."""
    for old in path.parent.glob(escape(path.name) + _DATA_SUFFIX):
        others = (file for file in path.parent.glob("*.onnx") if file.name != path.name)
        if old.name not in {file.name for file in data} and not any(_names(file, old) for file in others):
            old.unlink()


def _names(file: Path, data: Path) -> bool:
    """Whether the name of a file of weights is in a model's file."""
    if not file.is_file() or not file.stat().st_size:
        return False
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(os.fsencode(data.name)) >= 0


def _put_in_order(model: ir.Model, path: Path) -> None:
    """Put nodes behind those that make what they read, and check the model then."""
    try:
        model.graph.sort()
    except ValueError as error:  # nodes that read each other
        raise OnnxInvalidError(f"{path.name} is not a sound ONNX model: {first_line(error)}") from error
    _check(path, _without_data(ir.to_proto(model)))


def _without_data(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model itself, whose weights in another file, which are checked already, stand as inputs."""
    for tensor in [one for one in proto.graph.initializer if uses_external_data(one)]:
        given = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        proto.graph.input.append(given)
        proto.graph.initializer.remove(tensor)
    return proto


def _check(path: Path, read: onnx.ModelProto | None = None) -> None:
    """Check a file, or what was read of it."""
    try:
        try:
            onnx.checker.check_model(str(path) if read is None else read)
        except onnx.checker.ValidationError:
            proto = onnx.load_model(path, load_external_data=False) if read is None else read
            if not _give_back(proto):
                raise
            onnx.checker.check_model(_without_data(proto))
    except (onnx.checker.ValidationError, UnicodeDecodeError) as error:  # the latter of names
        raise OnnxInvalidError(f"{path.name} is not a sound ONNX model: {first_line(error)}") from error


def _give_back(proto: onnx.ModelProto) -> bool:
    """Put operators that ONNX Runtime adds to ONNX's own domain into its own; whether there are any.

    Its optimizer writes LayerNormalization into files of opsets before 17, which ONNX's checker refuses.
    """
    opset = next(one.version for one in proto.opset_import if one.domain in ("", "ai.onnx"))
    added = {"SimplifiedLayerNormalization": True, "LayerNormalization": opset < _NORMALIZES}
    found = [node for node in _nodes(proto) if node.domain in ("", "ai.onnx") and added.get(node.op_type)]
    for node in found:
        node.domain = RUNTIME
    if all(one.domain != RUNTIME for one in proto.opset_import):
        proto.opset_import.append(onnx.helper.make_opsetid(RUNTIME, 1))
    return bool(found)


def _is_in_order(graph: onnx.GraphProto) -> bool:
    """Whether each node stands behind those that make what it reads, within it too."""
    made = {name: place for place, node in enumerate(graph.node) for name in node.output}
    return all(
        made.get(name, -1) < place
        for place, node in enumerate(graph.node)
        for inside in (node, *(one for inner in _inner([node]) for one in inner.node))
        for name in inside.input
    )


def _check_supported(proto: onnx.ModelProto, path: Path) -> None:
    opsets = [entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")]
    newest = onnx.defs.onnx_opset_version()
    if not proto.graph.node or not proto.graph.output:
        raise OnnxInvalidError(f"{path} holds no graph: it is truncated, or no ONNX file")
    if not opsets or not OLDEST_OPSET <= opsets[0] <= newest:
        found = opsets[0] if opsets else "none"
        raise OnnxInvalidError(
            f"{path} has opset {found}, wanted {OLDEST_OPSET} to {newest}; onnx.version_converter converts"
        )
    if proto.training_info or any(graph.sparse_initializer for graph in _graphs(proto.graph)):
        raise OnnxInvalidError(f"{path} holds training_info or sparse initializers, which would be lost")
    for node in _nodes(proto):
        if any(one.HasField("sparse_tensor") or one.sparse_tensors for one in node.attribute):
            what = f"{node.op_type} {node.name or next(iter(node.output), '')!r}"
            raise OnnxInvalidError(f"{path}: {what} holds a sparse tensor, wanted dense ones")
    for value in (*proto.graph.input, *proto.graph.output):
        if value.type.HasField("tensor_type") and not value.type.tensor_type.HasField("shape"):
            raise OnnxInvalidError(
                f"{path}: {value.name!r} has no shape in the file, wanted one, if only of sizes by name; "
                "onnx.shape_inference.infer_shapes gives it one"
            )
    for graph in _graphs(proto.graph):
        for value in (*graph.input, *graph.output, *graph.value_info):
            if _holds_map(value.type):
                raise OnnxInvalidError(
                    f"{path}: {value.name!r} is a map, as ZipMap makes, wanted tensors; converters leave it "
                    "out by zipmap=False"
                )


def _holds_map(kind: onnx.TypeProto) -> bool:
    """Whether a value is a map, or a sequence of maps."""
    name = kind.WhichOneof("value")
    if name in ("sequence_type", "optional_type"):
        return _holds_map(getattr(kind, name).elem_type)
    return name == "map_type"


def _check_external(tensor: onnx.TensorProto, path: Path) -> None:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    where = f"{path}: the data of {tensor.name!r} is in {location!r}"
    if "\0" in location or len(os.fsencode(location)) > _LONGEST_NAME:
        raise OnnxExternalDataError(f"{where[:200]}, which is no name of a file")
    file = path.parent / location
    # Links are followed: one inside the folder must not lead out of it.
    if Path(location).is_absolute() or not file.resolve().is_relative_to(path.parent.resolve()):
        raise OnnxExternalDataError(f"{where}, outside the model's folder")
    if not file.is_file():
        raise OnnxExternalDataError(f"{where}, which is missing")
    size = _bytes_of(tensor, where)
    offset, length = (_whole_number(entries.get(key), key, where) for key in ("offset", "length"))
    if length is not None and length != size:
        raise OnnxExternalDataError(f"{where}, with the length {length:,}, wanted {size:,} bytes")
    end = (offset or 0) + size
    if file.stat().st_size < end:
        raise OnnxExternalDataError(
            f"{where}, which was cut short: {file.stat().st_size:,} bytes, {end:,} wanted"
        )


def _bytes_of(tensor: onnx.TensorProto, where: str) -> int:
    """The bytes that its shape and type ask for."""
    try:
        bits = ir.DataType(tensor.data_type).bitwidth
    except (ValueError, TypeError) as error:
        raise OnnxInvalidError(f"{where}, of data type {tensor.data_type}, which no file holds") from error
    if any(size < 0 for size in tensor.dims):
        raise OnnxInvalidError(f"{where}, of shape {tuple(tensor.dims)}")
    return -(-math.prod(tensor.dims) * bits // 8)


def _whole_number(text: str | None, key: str, where: str) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < _LONGEST_NUMBER):
        raise OnnxExternalDataError(f"{where}, with {key} {text[:40]!r}, wanted a number of bytes")
    return int(text)


def _load_inner(proto: onnx.ModelProto, folder: Path) -> None:
    """Take external tensors of attributes and functions into the model: others are written beside it."""
    for tensor in _inner_tensors(proto):
        if uses_external_data(tensor):
            load_external_data_for_tensor(tensor, str(folder))
            tensor.data_location = onnx.TensorProto.DEFAULT
            del tensor.external_data[:]


def _tensors(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor of a model: initializers and attributes, in subgraphs and functions too."""
    for graph in _graphs(proto.graph):
        yield from graph.initializer
    yield from _inner_tensors(proto)


def _inner_tensors(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    for function in proto.functions:
        for graph in _inner(function.node):
            yield from graph.initializer
    for node in _nodes(proto):
        for attribute in node.attribute:
            yield attribute.t
            yield from attribute.tensors


def _nodes(proto: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    for graph in _graphs(proto.graph):
        yield from graph.node
    for function in proto.functions:
        yield from function.node
        for graph in _inner(function.node):
            yield from graph.node


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    yield from _inner(graph.node)


def _inner(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.GraphProto]:
    for node in nodes:
        for attribute in node.attribute:
            for inside in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from _graphs(inside)
