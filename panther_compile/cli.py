"""The command line: panther-compile plan | sketch | report | sketch-onnx.

A model is named as `module:function`, where calling the function gives an `nn.Module`, or as the directory
of a Hugging Face model (`config.json`, and weights for all but `report`). `sketch --stream` goes from such a
directory to another, with few layers in memory at a time. `sketch-onnx` reads and writes ONNX files, and
needs the extra `onnx`. Options are those of `SketchConfig` (`arguments.py`).
"""

import argparse
import importlib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from panther_compile.api import plan_sketch, sketchify
from panther_compile.arguments import add_options, given_options
from panther_compile.checkpoint import PLAN_FILE, load_sketched, save_sketched
from panther_compile.config import Selector
from panther_compile.data_files import read_batches, read_tensors, read_text
from panther_compile.errors import (
    CheckpointError,
    CheckpointMismatchError,
    ConfigError,
    ModelSourceError,
    PantherError,
    first_line,
)
from panther_compile.records import SketchPlan
from panther_compile.report import sketch_report
from panther_compile.storage import check_folder, checked_path

# What `plan` heeds, which is given no data, of the fields of SketchConfig, and of its objectives.
PLAN_OPTIONS = (
    *("include", "exclude", "method", "sketch", "attention", "features", "min_params", "round_rank_to"),
    *("allow_slower", "objective", "seed", "progress", "device"),
)
PLAN_OBJECTIVES = ("size", "int8")
# What applies to an ONNX file, of the fields of SketchConfig.
ONNX_OPTIONS = (
    *("include", "exclude", "method", "sketch", "min_params", "round_rank_to", "allow_slower", "seed"),
    *("progress", "device", "refine", "refine_steps", "synthetic"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status.

    0, also where whoever reads the result stops early; 2 for a user's mistake, or a result that cannot be
    printed, with a message on stderr; 130 for an interrupt.
    """
    options = _parser().parse_args(arguments)
    try:
        result: dict[str, Any] = options.run(options)
    except PantherError as error:
        return _fail(f"{type(error).__name__}: {error}", 2)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    try:
        _print(json.dumps(result["json"], indent=1) if options.json else result["text"])
    except BrokenPipeError:
        return 0
    except OSError as error:
        return _fail(f"the result cannot be printed: {error}", 2)
    return 0


def _fail(message: str, status: int) -> int:
    print(f"panther-compile: {message}", file=sys.stderr)
    return status


def _print(text: str) -> None:
    """Print a text; letters that the encoding of stdout lacks become question marks."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "replace").decode(encoding), flush=True)
    except OSError:
        # Python would write what is left in the buffer once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="panther-compile", description="Make an existing PyTorch model smaller and faster."
    )
    version = f"panther-compile {metadata.version('panther-compile')}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(required=True, metavar="plan | sketch | report | sketch-onnx")
    plan = commands.add_parser("plan", help="say what would be done to each layer and why")
    sketch = commands.add_parser("sketch", help="sketch a model and save it")
    report = commands.add_parser("report", help="report on a saved sketch")
    onnx = commands.add_parser("sketch-onnx", help="sketch the weights of an ONNX file")
    for command, run in ((plan, _plan), (sketch, _sketch), (report, _report), (onnx, _sketch_onnx)):
        command.set_defaults(run=run)
        if command is not onnx:
            command.add_argument("model", help="module:function, or a Hugging Face model's directory")
        command.add_argument("--json", action="store_true", help="print JSON in place of a table")
    sketch.add_argument("directory", help="directory to save to")
    sketch.add_argument(
        "--plan", metavar="FILE.json", help="a plan in place of --ratio: `plan --json`, or edited"
    )
    sketch.add_argument(
        "--data",
        metavar="FILE",
        help="inputs to fit the layers to: .npz of arrays by argument, or in their order, text for a Hugging "
        "Face model's tokenizer, module:function that calls the model it is given, or `model`, made up",
    )
    sketch.add_argument("--length", type=int, metavar="N", help="tokens of a piece of text (default 128)")
    sketch.add_argument(
        "--max-drop", type=float, metavar="SCORE", help="in place of --ratio, with --evaluate"
    )
    sketch.add_argument(
        "--evaluate", metavar="MODULE:FUNCTION", help="the score of a model, higher is better"
    )
    sketch.add_argument("--resume", metavar="DIR", help="keep what is learnt here, and go on from there")
    sketch.add_argument(
        "--stream",
        action="store_true",
        help="a Hugging Face directory larger than memory, to a directory of that kind",
    )
    report.add_argument("checkpoint", help="directory written by `panther-compile sketch`, --stream or not")
    onnx.add_argument("source", help="the ONNX file to read")
    onnx.add_argument("target", help="the ONNX file to write")
    onnx.add_argument(
        "--data",
        metavar="FILE.npz",
        help="inputs to fit the weights to: an array for each input, by its name, samples first",
    )
    for command in (sketch, onnx):
        command.add_argument(
            "--batch-size", type=int, metavar="N", help="samples of a file run at once (default 8)"
        )
    onnx.add_argument(
        "--sequential", action="store_true", help="with --data: fit weights one after the other, for longer"
    )
    onnx.add_argument(
        "--then", choices=("none", "int8"), default="none", help="round the products of what is written"
    )
    onnx.add_argument("--no-verify", action="store_true", help="do not run the result beside the source")
    for command in (plan, sketch, onnx):
        command.add_argument(
            "--ratio",
            action="append",
            metavar="R | GLOB=R",
            help="stored over dense numbers; repeat GLOB=R for budgets by layer name (default 0.5)",
        )
    add_options(plan, PLAN_OPTIONS, {"objective": PLAN_OBJECTIVES})
    add_options(sketch)
    add_options(onnx, ONNX_OPTIONS)
    return parser


def _plan(options: argparse.Namespace) -> dict[str, Any]:
    plan = plan_sketch(build_model(options.model), _ratio(options), **given_options(options))
    return {"text": str(plan), "json": asdict(plan) | {"achieved_ratio": plan.achieved_ratio}}


def _sketch(options: argparse.Namespace) -> dict[str, Any]:
    plan = None if options.plan is None else _read_plan(options.plan)
    ratio = None if options.ratio is None else _ratio(options)
    if options.stream:
        return _stream(options, plan, ratio)
    try:
        check_folder(checked_path(options.directory, "directory"), made=True)
    except OSError as error:
        raise CheckpointError(f"cannot write the checkpoint {options.directory}: {error}") from error
    small = sketchify(
        build_model(options.model),
        ratio,
        plan=plan,
        data=_read_data(options),
        max_drop=options.max_drop,
        evaluate=None if options.evaluate is None else _function(options.evaluate),
        resume=options.resume,
        **given_options(options),
        inplace=options.max_drop is None,
    )
    save_sketched(small, options.directory)
    report = sketch_report(small)
    return {"text": f"{report}\nsaved to {options.directory}", "json": report.to_dict()}


def _stream(
    options: argparse.Namespace, plan: SketchPlan | None, ratio: float | dict[Selector, float] | None
) -> dict[str, Any]:
    for name in ("max_drop", "evaluate"):
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} runs the sketch, which --stream never holds whole")
    try:
        from panther_compile.integrations.folder_by_weights import sketchify_checkpoint
    except ModuleNotFoundError as error:
        raise ConfigError("--stream needs transformers: pip install transformers") from error
    done: SketchPlan = sketchify_checkpoint(
        options.model,
        options.directory,
        ratio,
        plan=plan,
        data=_read_data(options),
        resume=options.resume,
        **given_options(options),
    )
    document = asdict(done) | {"achieved_ratio": done.achieved_ratio}
    return {"text": f"{done}\nsaved to {options.directory}", "json": document}


def _read_data(options: argparse.Namespace) -> Any:
    """What --data names: arrays, text, batches of a function, or "model"."""
    given = options.data
    of_arrays = given is not None and Path(given).suffix == ".npz"
    of_text = given not in (None, "model") and (Path(given).is_file() or ":" not in given) and not of_arrays
    batch_size = _size(options, "batch_size", 8, of_arrays or of_text)
    length = _size(options, "length", 128, of_text)
    if of_arrays:
        return read_tensors(given, batch_size)
    if of_text:
        return read_text(given, options.model, length, batch_size)
    return given if given in (None, "model") else _function(given)


def _size(options: argparse.Namespace, name: str, default: int, applies: bool) -> int:
    """What an option of files says; raises ConfigError if it is given where there is no file of that kind."""
    given: int | None = getattr(options, name)
    if given is not None and not applies:
        what, data = f"--{name.replace('_', '-')} {given}", options.data
        raise ConfigError(
            f"{what} is of a file of --data, and there is none"
            if data is None
            else f"{what} does not apply to --data {data}"
        )
    return default if given is None else given


def _read_plan(file: str) -> SketchPlan:
    try:
        return SketchPlan.from_json(Path(file).read_bytes())
    except (OSError, ConfigError) as error:
        raise ConfigError(f"--plan {file}: {first_line(error)}") from error


def _report(options: argparse.Namespace) -> dict[str, Any]:
    skeleton = build_model(options.model, weights=False)
    folder = Path(options.checkpoint)
    if Path(folder, "config.json").is_file() and not Path(folder, PLAN_FILE).is_file():
        unread = importlib.util.find_spec("accelerate") is not None  # the report needs shapes alone
        small = _folders(folder).stored_model(folder, dense=False, device_map="meta" if unread else None)
        if type(small) is not type(skeleton):
            raise CheckpointMismatchError(
                f"{folder} is of a {type(small).__name__}, {options.model} of a {type(skeleton).__name__}"
            )
    else:
        small = load_sketched(skeleton, options.checkpoint)
    report = sketch_report(small)
    return {"text": str(report), "json": report.to_dict()}


def _sketch_onnx(options: argparse.Namespace) -> dict[str, Any]:
    try:
        from panther_compile.onnx.sketch import sketch_onnx
    except ModuleNotFoundError as error:
        wanted = 'pip install "panther-compile[onnx]"'
        raise ConfigError(f"sketch-onnx needs more packages: {wanted}") from error
    batch_size = _size(options, "batch_size", 8, options.data is not None)
    data = None if options.data is None else read_batches(options.data, batch_size)
    report = sketch_onnx(
        options.source,
        options.target,
        _ratio(options),
        data=data,
        sequential=options.sequential,
        then=options.then,
        verify=not options.no_verify,
        **given_options(options),
    )
    return {"text": f"{report}\nsaved to {options.target}", "json": report.to_dict()}


def _ratio(options: argparse.Namespace) -> float | dict[Selector, float]:
    return parse_ratio(options.ratio or ["0.5"])


def parse_ratio(given: Sequence[str]) -> float | dict[Selector, float]:
    """A number, or {glob: number} from texts like "0.5" and "encoder.*=0.4".

    Raises:
        ConfigError: a text is neither, a plain number stands beside other texts, or a glob twice.
    """
    budgets: dict[Selector, float] = {}
    for text in given:
        glob, sign, number = text.rpartition("=")
        if sign and not glob:
            raise ConfigError(f"--ratio {text}: wanted a number, or GLOB=NUMBER")
        if glob in budgets:
            raise ConfigError(f"--ratio {text}: {glob or 'a number'} has the ratio {budgets[glob]:g} already")
        try:
            budgets[glob] = float(number)
        except ValueError as error:
            raise ConfigError(f"--ratio {text}: wanted a number, or GLOB=NUMBER") from error
    if "" not in budgets:
        return budgets
    if len(given) > 1:
        raise ConfigError(f"--ratio {' '.join(given)}: wanted one number, or GLOB=NUMBER throughout")
    return budgets[""]


def build_model(source: str, *, weights: bool = True) -> nn.Module:
    """Build the model that a command names.

    Args:
        source: "module:function" or a Hugging Face directory.
        weights: False makes a Hugging Face model on the meta device, from its configuration alone.

    Raises:
        ModelSourceError: there is no such module, function or directory, or it does not give an nn.Module; or
            weights are missing in the directory.
    """
    folder = Path(source)
    if (folder / "config.json").is_file():
        folders = _folders(folder)
        make = folders.stored_model if weights else folders.empty_model
        made: nn.Module = make(folder, dense=False)
        return made
    if ":" not in source:
        raise ModelSourceError(f"{source!r} is neither module:function nor a directory with a config.json")
    build = _function(source)
    if not callable(build) or isinstance(build, nn.Module):
        raise ModelSourceError(f"{source} is a {type(build).__name__}, wanted a function that makes a model")
    try:
        inspect.signature(build).bind()
    except TypeError as error:
        raise ModelSourceError(f"{source}: {error}; wanted a function of no arguments") from error
    model = build()
    if not isinstance(model, nn.Module):
        raise ModelSourceError(f"{source} gave a {type(model).__name__}, wanted an nn.Module")
    return model


def _function(source: str) -> Any:
    """What "module:function" names; raises ModelSourceError if there is none."""
    module_name, _, function = source.partition(":")
    if module_name.startswith("."):
        raise ModelSourceError(f"{source}: wanted the whole name of a module")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module_name), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ModelSourceError(f"{source}: {error}") from error


def _folders(folder: Path) -> ModuleType:
    """What makes models of Hugging Face folders; it imports transformers, which takes seconds."""
    try:
        from panther_compile.integrations import folders
    except ModuleNotFoundError as error:
        raise ModelSourceError(f"{folder} is a Hugging Face model: pip install transformers") from error
    return folders
