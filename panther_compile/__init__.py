"""Make an existing PyTorch model smaller and faster in one line.

    >>> smaller = panther_compile.sketchify(model, ratio=0.5)

This file is the index: each public name and the module it lives in. A module is imported
when a name of it is first used, so ``import panther_compile`` alone does not even load torch.
"""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = [
    "Hardware",
    "OnnxReport",
    "PantherError",
    "ParallelEngine",
    "SketchConfig",
    "SketchPlan",
    "SketchReport",
    "SketchedConv2d",
    "SketchedEmbedding",
    "SketchedLinear",
    "SketchedMultiheadAttention",
    "TrainingCheckpoints",
    "densify",
    "export_onnx",
    "heal",
    "heal_report",
    "load_sketched",
    "measure_hardware",
    "parallelize_model",
    "partition_model",
    "plan_sketch",
    "read_state_dict",
    "save_sketched",
    "sketch_onnx",
    "sketch_report",
    "sketch_skeleton",
    "sketchify",
]

_HOME_OF = {
    "Hardware": "panther_compile.partition",
    "OnnxReport": "panther_compile.onnx_sketch",
    "PantherError": "panther_compile.errors",
    "ParallelEngine": "panther_compile.parallel",
    "SketchConfig": "panther_compile.config",
    "SketchPlan": "panther_compile.records",
    "SketchReport": "panther_compile.report",
    "SketchedConv2d": "panther_compile.layers",
    "SketchedEmbedding": "panther_compile.layers",
    "SketchedLinear": "panther_compile.layers",
    "SketchedMultiheadAttention": "panther_compile.layers",
    "TrainingCheckpoints": "panther_compile.parallel",
    "densify": "panther_compile.api",
    "export_onnx": "panther_compile.onnx_export",
    "heal": "panther_compile.healing.healer",
    "heal_report": "panther_compile.healing.report",
    "load_sketched": "panther_compile.checkpoint",
    "measure_hardware": "panther_compile.partition",
    "parallelize_model": "panther_compile.parallel",
    "partition_model": "panther_compile.partition",
    "plan_sketch": "panther_compile.api",
    "read_state_dict": "panther_compile.parallel",
    "save_sketched": "panther_compile.checkpoint",
    "sketch_onnx": "panther_compile.onnx_sketch",
    "sketch_report": "panther_compile.report",
    "sketch_skeleton": "panther_compile.partition",
    "sketchify": "panther_compile.api",
}

if TYPE_CHECKING:
    from panther_compile.api import densify, plan_sketch, sketchify
    from panther_compile.checkpoint import load_sketched, save_sketched
    from panther_compile.config import SketchConfig
    from panther_compile.errors import PantherError
    from panther_compile.healing.healer import heal
    from panther_compile.healing.report import heal_report
    from panther_compile.layers import (
        SketchedConv2d,
        SketchedEmbedding,
        SketchedLinear,
        SketchedMultiheadAttention,
    )
    from panther_compile.onnx_export import export_onnx
    from panther_compile.onnx_sketch import OnnxReport, sketch_onnx
    from panther_compile.parallel import (
        ParallelEngine,
        TrainingCheckpoints,
        parallelize_model,
        read_state_dict,
    )
    from panther_compile.partition import Hardware, measure_hardware, partition_model, sketch_skeleton
    from panther_compile.records import SketchPlan
    from panther_compile.report import SketchReport, sketch_report
else:
    # Hidden from type checkers: with a module __getattr__ in sight they accept any name.
    def __getattr__(name):
        """Import the home of a public name when the name is first used."""
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOME_OF[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
