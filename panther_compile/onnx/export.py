"""Export a model to ONNX, and hold what ONNX Runtime computes from the file against the model."""

import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.onnx import OnnxExporterError
from torch.utils._pytree import keystr, tree_flatten_with_path

from panther_compile.config import check_is_module, check_type, read_integer
from panther_compile.errors import (
    ConfigError,
    ConfigTypeError,
    DataError,
    OnnxExportError,
    PantherError,
    check_choice,
    first_line,
)
from panther_compile.factorization.values import check_loaded
from panther_compile.int8_factors import pair_kernels, prepare_int8, rounded_layers, without_bases
from panther_compile.layers.base import outermost
from panther_compile.models.batches import Call, Data, described, record_calls, spread_out
from panther_compile.models.outputs import tensors_in
from panther_compile.models.surroundings import eval_mode
from panther_compile.models.wrapped import unwrapped
from panther_compile.onnx.data import Feed
from panther_compile.onnx.files import check_target, saved_copy, write_model
from panther_compile.onnx.forms import fuse_gelu
from panther_compile.onnx.free_sizes import asked_free, check_free, declared_bounds
from panther_compile.onnx.int8 import (
    ROUNDINGS,
    check_can_round,
    int8_model,
    warn_if_destroyed_by_int8,
)
from panther_compile.onnx.pivots import read_whole
from panther_compile.onnx.sites import unique_name
from panther_compile.onnx.verify import compare_files, has_sizes, verify_export
from panther_compile.records import Closeness
from panther_compile.storage import checked_path

OLDEST_EXPORT_OPSET = 18
# How an operator that ONNX does not have is put together from ONNX's own, for `torch.onnx.export`:
# torch.ops.panther_compile.some_op.default -> a function of onnxscript. On a CPU sketched layers need none.
TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {}


def export_onnx(
    model: nn.Module,
    args: tuple[Any, ...] | Tensor,
    path: str | os.PathLike[str],
    *,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Mapping[str, Any] | Sequence[Any] | None = None,
    opset: int = OLDEST_EXPORT_OPSET,
    then: str = "none",
    data: Data | None = None,
    verify: bool = True,
) -> Closeness | None:
    """Write a model, sketched or not, to an ONNX file, in eval mode.

    The file is written whole or not at all: it is checked, and run, before it is put in its place. Weights of
    more than 2 GB go into a file beside it. Hugging Face models are exported without their cache, and with
    attention and experts as plain operators. The model itself is left as it was.

    Args:
        model: any module that `torch.export` can read; of what torch.compile or DDP wraps, what is inside.
        args: example inputs by position, or the only one.
        path: the file to write.
        kwargs: example inputs by name.
        dynamic_shapes: sizes that may vary, as `torch.export.export` takes them: for each input
            {axis: torch.export.Dim("batch")}, or {axis: torch.export.Dim.AUTO} where torch may fix it. None
            fixes every size.
        opset: 18 or newer.
        then: "int8" writes the products in int8, those of dense layers too: sketched layers as
            `prepare_int8` gives them, weights with a scale for each output, tables with one for each row,
            ranges of activations measured at each call; with data so are convolutions, where that is faster,
            with ranges that the data show.
            What is compared with the model is then the file before it was rounded.
        data: batches as for `sketchify`, for which then="int8" prepares the factors (`prepare_int8`) and the
            ranges. They have to fit the file's inputs; larger batches than a fixed size are divided.
        verify: compare with ONNX Runtime, on the example and on random inputs of several dynamic sizes.

    Returns:
        How close the outputs of the int8 file are to those of the file before it was rounded: on the data, or
        on the example where no batch fits the file's inputs by name and size. None without then="int8", or
        with verify=False.

    Warns:
        SketchQualityWarning: int8 destroys the outputs on the data.

    Raises:
        DataError: a batch of the data holds NaN.
        NoTargetError: nothing of the model can be in int8.
        ConfigError, ConfigTypeError: an argument is not what is wanted.
        WeightError: a parameter or buffer is on the meta device.
        OnnxExportError: torch cannot export the model, or not with a size free as `dynamic_shapes` wants it.
        OnnxMismatchError: ONNX Runtime computes something else, or nothing; names the output and the error.
        OnnxFileError: the file cannot be written.
        OnnxInvalidError: what torch made is not sound.
    """
    positional = (args,) if isinstance(args, Tensor) else args
    path = checked_path(path, "path")
    check_target(path)
    check_type("verify", verify, bool)
    opset = read_integer("opset", opset)
    _check_arguments(model, positional, opset)
    model = unwrapped(model)
    example = _told_apart(_with_last_named(model, Call(positional, dict(kwargs or {}))))
    check_choice("then", then, ROUNDINGS)
    if data is not None and then == "none":
        raise ConfigError("data= is for then='int8', which prepares the factors for it")
    calls = [] if data is None else spread_out(record_calls(model, data))
    is_sketched = next(outermost(model), None) is not None
    if then == "int8" and rounded_layers(model):
        model = prepare_int8(model, calls or None)
    if then == "int8":
        model = without_bases(model if data is None else pair_kernels(model))
    with _exportable(model), torch.no_grad():
        program = _export(model, example, dynamic_shapes, opset)

        def check(draft: Path) -> None:
            assert program.exported_program is not None
            verify_export(model, example, program.exported_program, draft, declared_bounds(dynamic_shapes))

        for node in program.model.graph.all_nodes():
            node.metadata_props.pop("pkg.torch.onnx.stack_trace", None)  # paths of the machine it was made on
        if then == "none":
            read_whole(program.model)
            write_model(program.model, path, check=check if verify else None)
            return None
        check_can_round(program.model)
        with saved_copy(program.model, path.parent) as plain:
            if verify:
                check(plain)
            plain_file = plain if verify else None
            inputs = program.model.graph.inputs
            feeds = [feed for call in calls for feed in _feeds(model, call, example, inputs)]
            return _write_int8(program.model, path, plain_file, example, feeds, sketched=is_sketched)


def _write_int8(
    model: ir.Model,
    path: Path,
    plain: Path | None,
    example: Call,
    feeds: Sequence[Feed],
    *,
    sketched: bool,
) -> Closeness | None:
    """Write the products in int8, and run the result beside the file `plain`, if there is one.

    Args:
        model: is left as it is.
        path: to write to.
        plain: holds the model before it is rounded.
        example: the inputs that it was exported with.
        feeds: the data.
        sketched: whether the model is a sketch, so that a larger ratio would help.
    """
    found: list[Closeness] = []

    def check(draft: Path) -> None:
        assert plain is not None
        if feeds:
            found.append(compare_files(plain, draft, feeds).closeness)
        else:
            given = zip(model.graph.inputs, example.tensors, strict=True)
            feed = {str(one.name): x.numpy(force=True) for one, x in given}
            found.append(replace(compare_files(plain, draft, [feed]).closeness, inputs="the example"))
        if feeds:  # an example of a few rows says too little
            warn_if_destroyed_by_int8(found[0], sketched=sketched, stacklevel=5)

    with int8_model(model, path.parent, feeds) as rounded:
        write_model(rounded, path, check=None if plain is None else check)
    return found[0] if found else None


def _feeds(model: nn.Module, call: Call, example: Call, inputs: Sequence[ir.Value]) -> list[Feed]:
    """The arrays of a call by the names of a model's inputs, which are those of the example; none if unfit.

    A batch that is larger than the model's, whose size is fixed, is divided.
    """
    given, place = _by_path(model, call), call.place or 0
    paths = {id(leaf): path for path, leaf in _by_path(model, example).items()}
    tensors = [given.get(paths[id(tensor)]) for tensor in example.tensors]
    names, sizes = [str(one.name) for one in inputs], [list(one.shape or ()) for one in inputs]
    for name, tensor in zip(names, tensors, strict=True):
        if isinstance(tensor, Tensor) and bool(torch.isnan(tensor).any()):
            raise DataError(f"{call.what}: input {name!r} holds NaN")
    arrays = [tensor.numpy(force=True) for tensor in tensors if isinstance(tensor, Tensor)]
    batched = [number for number, array in enumerate(arrays) if array.ndim]
    if not batched or len(arrays) < len(names):
        return []
    samples, first = len(arrays[batched[0]]), sizes[batched[0]]
    size = first[0] if first and isinstance(first[0], int) else samples

    def part(array: Any, start: int) -> Any:
        return array[start : start + size] if array.ndim and len(array) == samples else array

    parts = (
        Feed({name: part(array, start) for name, array in zip(names, arrays, strict=True)}, place)
        for start in range(0, samples, max(1, size))
    )
    return [
        part
        for part in parts
        if all(has_sizes(array, wanted) for array, wanted in zip(part.values(), sizes, strict=True))
    ]


def _by_path(model: nn.Module, call: Call) -> dict[str, Any]:
    """All that the arguments of a call hold by where it is, whether given by position or by name."""
    bound = inspect.signature(model.forward).bind_partial(*call.args, **call.kwargs)
    return {keystr(path): leaf for path, leaf in tree_flatten_with_path(dict(bound.arguments))[0]}


def _with_last_named(model: nn.Module, call: Call) -> Call:
    """The call; a dictionary at the end of it by its name: torch's exporter would take it for keywords."""
    args = call.args
    if call.kwargs or not args or not isinstance(args[-1], dict):
        return call
    parameters = list(inspect.signature(model.forward).parameters.values())[len(args) - 1 :]
    if not parameters or parameters[0].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        return call
    return Call(args[:-1], {parameters[0].name: args[-1]})


def _told_apart(call: Call) -> Call:
    """The call, a tensor that is given several times as copies: torch would take it for one input."""
    leaves = call.leaves
    seen: set[int] = set()
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and id(leaf) in seen:
            leaves[place] = leaf.detach().clone()
        seen.add(id(leaf))
    return call.with_leaves(leaves)


def _check_arguments(model: nn.Module, args: object, opset: int) -> None:
    check_is_module("model", model)
    if not isinstance(args, tuple):
        raise ConfigTypeError(
            f"args is a {type(args).__name__}, wanted a tuple of inputs; named ones go to kwargs"
        )
    newest = onnx.defs.onnx_opset_version()
    if not OLDEST_EXPORT_OPSET <= opset <= newest:
        raise ConfigError(f"opset={opset}, wanted {OLDEST_EXPORT_OPSET} to {newest}")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        check_loaded(tensor, name)
    for name, layer in model.named_modules():
        if isinstance(layer, nn.LSTM) and layer.proj_size:
            raise OnnxExportError(
                f"{name or 'the model'} is an LSTM with proj_size={layer.proj_size}, which ONNX's has not, "
                "and the file that torch writes does not run; sketched it can be exported"
            )


def _export(model: nn.Module, example: Call, dynamic_shapes: Any, opset: int) -> torch.onnx.ONNXProgram:
    result = _result(model, example)
    names = _output_names(result)
    asked = asked_free(model, example, dynamic_shapes)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch's own workings, none that the caller could heed
            program = torch.onnx.export(
                model,
                example.args,
                kwargs=example.kwargs,
                dynamic_shapes=dynamic_shapes,
                output_names=names,
                opset_version=opset,
                dynamo=True,
                verbose=False,
                custom_translation_table=TRANSLATIONS,
            )
    except OnnxExporterError as error:
        others = " and ".join(_no_tensors(result))
        cause = f"{others}; the outputs of a file are tensors" if others else _first_cause(error)
        raise OnnxExportError(f"torch cannot export {type(model).__name__}: {cause}") from error
    assert program is not None
    check_free(asked, example.tensors, program.model.graph.inputs)
    _tell_names_apart(program.model.graph)
    fuse_gelu(program.model)
    return program


def _result(model: nn.Module, call: Call) -> object:
    """What the model makes of the example inputs."""
    try:
        return call.run(model)
    except (PantherError, torch.OutOfMemoryError):
        raise
    # The model's own code runs here, and may raise anything.
    except Exception as error:
        raise OnnxExportError(
            f"{type(model).__name__}, with plain attention and no cache, was given {described(call)} and "
            f"raised {type(error).__name__}: {first_line(error)}"
        ) from error


def _no_tensors(result: object) -> list[str]:
    """What a result holds besides tensors, in words."""
    leaves, _ = tree_flatten_with_path(result)
    return [
        f"result{keystr(path)} is a {type(leaf).__name__}"
        for path, leaf in leaves
        if not isinstance(leaf, Tensor | None)
    ]


def _first_cause(error: BaseException) -> str:
    """What went wrong first, in a line: torch wraps it in pages of advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {first_line(error)}"


def _output_names(output: object) -> list[str] | None:
    """The keys of a dictionary of tensors, all different; None leaves the names to torch."""
    if not isinstance(output, Mapping):
        return None
    names: list[str] = []
    for key, value in output.items():
        count = len(tensors_in(value))
        names.extend([str(key)] if count == 1 else [f"{key}_{i}" for i in range(count)])
    taken: set[str] = set()
    return [unique_name(name or "output", taken) for name in names]


def _tell_names_apart(graph: ir.Graph) -> None:
    """Rename each output that is called as an input is, and what else is called as an output is.

    Diffusers' U-Nets take a sample and give a sample; a model's key may be what torch calls a value inside.
    """
    given, made = list(graph.inputs), list(graph.outputs)
    results = (value for node in graph.all_nodes() for value in node.outputs)
    ends = {*given, *made}
    inner = [one for one in (*results, *graph.initializers.values()) if one not in ends]
    taken = {str(value.name) for value in (*given, *made, *inner)}
    for value in made:
        if value.name in [one.name for one in given] and not value.is_graph_input():
            value.name = unique_name(f"{value.name}_out", taken)
    names = {value.name for value in made}
    for value in inner:
        if value.name in names:
            value.name = unique_name(str(value.name), taken)


# What a Hugging Face configuration is set to while its model is exported.
_PLAIN_SETTINGS = {
    "use_cache": False,
    "_attn_implementation": "eager",
    "_experts_implementation": "batched_mm",
}


@contextmanager
def _exportable(model: nn.Module) -> Iterator[None]:
    """Eval mode, and for Hugging Face's parts no cache and plain operators; all as it was afterwards."""
    configs = {
        id(config): config for m in model.modules() if _is_hugging_face(config := getattr(m, "config", None))
    }
    settings = [
        (config, name, getattr(config, name), plain)
        for config in configs.values()
        for name, plain in _PLAIN_SETTINGS.items()
        if getattr(config, name, None) is not None
    ]
    try:
        for config, name, _, plain in settings:
            setattr(config, name, plain)
        with eval_mode(model):
            yield
    finally:
        for config, name, before, _ in settings:
            setattr(config, name, before)


def _is_hugging_face(config: object) -> bool:
    """Whether a config is one of transformers, which is not imported."""
    return any(base.__name__ in ("PreTrainedConfig", "PretrainedConfig") for base in type(config).__mro__)
