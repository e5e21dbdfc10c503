"""The command line: panther-compile plan | sketch | report | sketch-onnx.

A model is named as `module:function`, where calling the function gives an `nn.Module`, or as the directory
of a Hugging Face model (`config.json`, and weights for all but `report`). `sketch-onnx` reads and writes ONNX
files, and needs the extra `onnx`.
"""

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from panther_compile.api import plan_sketch, sketchify
from panther_compile.checkpoint import load_sketched, save_sketched
from panther_compile.config import ATTENTIONS
from panther_compile.errors import ConfigError, ModelSourceError, PantherError, first_line
from panther_compile.factorization.factorize import METHODS
from panther_compile.factorization.sketches import SKETCH_KINDS
from panther_compile.records import SketchPlan
from panther_compile.report import sketch_report

try:
    from panther_compile.onnx.data import read_batches
    from panther_compile.onnx.sketch import sketch_onnx
except ModuleNotFoundError:  # the extra is not installed
    sketch_onnx = None  # type: ignore[assignment]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, or 2 for a user's mistake (its message on stderr)."""
    options = _parser().parse_args(arguments)
    try:
        result: dict[str, Any] = options.run(options)
    except PantherError as error:
        print(f"panther-compile: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result["json"], indent=1) if options.json else result["text"])
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="panther-compile", description="Make an existing PyTorch model smaller and faster."
    )
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
    sketch.add_argument("output", help="directory to save to")
    sketch.add_argument(
        "--plan", metavar="FILE.json", help="a plan in place of --ratio: `plan --json`, or edited"
    )
    report.add_argument("checkpoint", help="directory written by `panther-compile sketch`")
    onnx.add_argument("source", help="the ONNX file to read")
    onnx.add_argument("target", help="the ONNX file to write")
    onnx.add_argument(
        "--data",
        metavar="FILE.npz",
        help="inputs to fit the weights to: an array for each input, by its name, samples first",
    )
    onnx.add_argument(
        "--batch-size", type=int, default=8, metavar="N", help="samples of --data run at once (default 8)"
    )
    onnx.add_argument(
        "--sequential", action="store_true", help="with --data: fit weights one after the other, for longer"
    )
    onnx.add_argument("--no-verify", action="store_true", help="do not run the result beside the source")
    for command in (plan, sketch, onnx):
        _add_options(command)
    for command in (plan, sketch):
        command.add_argument("--attention", choices=ATTENTIONS, default="exact")
    return parser


def _add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--ratio",
        action="append",
        metavar="R | GLOB=R",
        help="stored over dense numbers; repeat GLOB=R for budgets by layer name (default 0.5)",
    )
    command.add_argument("--include", action="append", metavar="GLOB", help="sketch these layers only")
    command.add_argument("--exclude", action="append", metavar="GLOB", help="leave these layers alone")
    command.add_argument("--method", choices=METHODS, default="auto")
    command.add_argument("--sketch", choices=SKETCH_KINDS, default="gaussian", dest="test_matrix")
    command.add_argument("--min-params", type=int, default=4096, metavar="N")
    command.add_argument("--round-rank-to", type=int, metavar="N")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--device", help="where to factorize, such as cuda")


def _plan(options: argparse.Namespace) -> dict[str, Any]:
    plan = plan_sketch(build_model(options.model), **_sketch_options(options), attention=options.attention)
    return {"text": str(plan), "json": asdict(plan) | {"achieved_ratio": plan.achieved_ratio}}


def _sketch(options: argparse.Namespace) -> dict[str, Any]:
    given = _sketch_options(options)
    if options.plan is not None:
        given |= {
            "plan": _read_plan(options.plan),
            "ratio": None if options.ratio is None else given["ratio"],
        }
    small = sketchify(build_model(options.model), **given, attention=options.attention, inplace=True)
    save_sketched(small, options.output)
    report = sketch_report(small)
    return {"text": f"{report}\nsaved to {options.output}", "json": report.to_dict()}


def _read_plan(file: str) -> SketchPlan:
    try:
        return SketchPlan.from_json(Path(file).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--plan {file}: {first_line(error)}") from error


def _report(options: argparse.Namespace) -> dict[str, Any]:
    skeleton = build_model(options.model, weights=False)
    report = sketch_report(load_sketched(skeleton, options.checkpoint))
    return {"text": str(report), "json": report.to_dict()}


def _sketch_onnx(options: argparse.Namespace) -> dict[str, Any]:
    if sketch_onnx is None:
        raise ConfigError('sketch-onnx needs more packages: pip install "panther-compile[onnx]"')
    data = None if options.data is None else read_batches(options.data, options.batch_size)
    given = _sketch_options(options)
    report = sketch_onnx(
        options.source,
        options.target,
        data=data,
        sequential=options.sequential,
        verify=not options.no_verify,
        **given,
    )
    sizes = {"dense_bytes": report.dense_bytes, "sketched_bytes": report.sketched_bytes}
    errors = {"output_errors": dict(report.output_errors)}
    closeness = {"closeness": asdict(report.closeness)}
    document = asdict(report.plan) | {"achieved_ratio": report.achieved_ratio} | sizes | errors | closeness
    return {"text": f"{report}\nsaved to {options.target}", "json": document}


def _sketch_options(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "ratio": parse_ratio(options.ratio or ["0.5"]),
        "include": options.include,
        "exclude": options.exclude,
        "method": options.method,
        "sketch": options.test_matrix,
        "min_params": options.min_params,
        "round_rank_to": options.round_rank_to,
        "seed": options.seed,
        "device": options.device,
    }


def parse_ratio(given: Sequence[str]) -> float | dict[str, float]:
    """A number, or {glob: number} from texts like "0.5" and "encoder.*=0.4".

    Raises:
        ConfigError: a text is neither, or a plain number stands beside other texts.
    """
    budgets: dict[str, float] = {}
    for text in given:
        glob, _, number = text.rpartition("=")
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
        ModelSourceError: there is no such module, function or directory, or it does not give an nn.Module.
    """
    if Path(source, "config.json").is_file():
        return _from_hugging_face(Path(source), weights)
    module_name, colon, function = source.partition(":")
    if not colon:
        raise ModelSourceError(f"{source!r} is neither module:function nor a directory with a config.json")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        model = getattr(importlib.import_module(module_name), function)()
    except (ImportError, AttributeError) as error:
        raise ModelSourceError(f"{source}: {error}") from error
    if not isinstance(model, nn.Module):
        raise ModelSourceError(f"{source} gave a {type(model).__name__}, wanted an nn.Module")
    return model


def _from_hugging_face(directory: Path, weights: bool) -> nn.Module:
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise ModelSourceError(f"{directory} is a Hugging Face model: pip install transformers") from error
    config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
    names = config.architectures or ["AutoModel"]
    architecture = getattr(transformers, names[0], transformers.AutoModel)
    if weights:
        model: nn.Module = architecture.from_pretrained(directory, local_files_only=True)
        return model
    with torch.device("meta"):
        skeleton: nn.Module = (
            transformers.AutoModel.from_config(config)
            if architecture is transformers.AutoModel
            else architecture(config)
        )
    return skeleton.eval()
