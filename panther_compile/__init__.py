"""Make an existing PyTorch model smaller and faster in one line.

    >>> smaller = panther_compile.sketchify(model, ratio=0.5)

This file is the index: each public name and the module it lives in. A module is imported
when a name of it is first used, so ``import panther_compile`` alone does not even load torch.
"""

import importlib
import importlib.abc
import importlib.util
import sys
from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = [
    "Hardware",
    "HealReport",
    "LatentCache",
    "NarrowLinear",
    "OnnxReport",
    "PantherError",
    "ParallelEngine",
    "Partition",
    "RatioCurve",
    "ResidualLinear",
    "ResidualReport",
    "Resumed",
    "SketchConfig",
    "SketchPlan",
    "SketchQualityWarning",
    "SketchReport",
    "SketchedConv1d",
    "SketchedConv2d",
    "SketchedConv3d",
    "SketchedConvTranspose1d",
    "SketchedConvTranspose2d",
    "SketchedConvTranspose3d",
    "SketchedEmbedding",
    "SketchedExperts",
    "SketchedGRU",
    "SketchedGRUCell",
    "SketchedLSTM",
    "SketchedLSTMCell",
    "SketchedLinear",
    "SketchedMultiheadAttention",
    "TrainingCheckpoints",
    "TrainingMetrics",
    "add_residual",
    "add_residual_onnx",
    "check_layout",
    "densify",
    "export_onnx",
    "find_batch_size",
    "heal",
    "heal_report",
    "import_panther",
    "load_residual",
    "load_sketched",
    "measure_hardware",
    "parallelize_model",
    "partition_model",
    "plan_sketch",
    "prepare_int8",
    "project_state_dict",
    "read_state_dict",
    "residual_report",
    "save_sketched",
    "sketch_onnx",
    "sketch_report",
    "sketch_skeleton",
    "sketchify",
    "sketchify_checkpoint",
]

_HOME_OF = {
    "Hardware": "panther_compile.partition",
    "HealReport": "panther_compile.healing.report",
    "LatentCache": "panther_compile.integrations.latent_cache",
    "NarrowLinear": "panther_compile.layers",
    "OnnxReport": "panther_compile.onnx.sketch",
    "PantherError": "panther_compile.errors",
    "ParallelEngine": "panther_compile.parallel",
    "Partition": "panther_compile.partition",
    "RatioCurve": "panther_compile.reporting.ratio_curve",
    "ResidualLinear": "panther_compile.layers",
    "ResidualReport": "panther_compile.residual",
    "Resumed": "panther_compile.parallel",
    "SketchConfig": "panther_compile.config",
    "SketchPlan": "panther_compile.records",
    "SketchQualityWarning": "panther_compile.errors",
    "SketchReport": "panther_compile.report",
    "SketchedConv1d": "panther_compile.layers",
    "SketchedConv2d": "panther_compile.layers",
    "SketchedConv3d": "panther_compile.layers",
    "SketchedConvTranspose1d": "panther_compile.layers",
    "SketchedConvTranspose2d": "panther_compile.layers",
    "SketchedConvTranspose3d": "panther_compile.layers",
    "SketchedEmbedding": "panther_compile.layers",
    "SketchedExperts": "panther_compile.layers",
    "SketchedGRU": "panther_compile.layers",
    "SketchedGRUCell": "panther_compile.layers",
    "SketchedLSTM": "panther_compile.layers",
    "SketchedLSTMCell": "panther_compile.layers",
    "SketchedLinear": "panther_compile.layers",
    "SketchedMultiheadAttention": "panther_compile.layers",
    "TrainingCheckpoints": "panther_compile.parallel",
    "TrainingMetrics": "panther_compile.parallel",
    "add_residual": "panther_compile.residual",
    "add_residual_onnx": "panther_compile.onnx.residual",
    "check_layout": "panther_compile.parallel",
    "densify": "panther_compile.api",
    "export_onnx": "panther_compile.onnx.export",
    "find_batch_size": "panther_compile.parallel",
    "heal": "panther_compile.healing.healer",
    "heal_report": "panther_compile.healing.report",
    "import_panther": "panther_compile.integrations.panther",
    "load_residual": "panther_compile.residual",
    "load_sketched": "panther_compile.checkpoint",
    "measure_hardware": "panther_compile.partition",
    "parallelize_model": "panther_compile.parallel",
    "partition_model": "panther_compile.partition",
    "plan_sketch": "panther_compile.api",
    "prepare_int8": "panther_compile.int8_factors",
    "project_state_dict": "panther_compile.integrations.dense_state",
    "read_state_dict": "panther_compile.parallel",
    "residual_report": "panther_compile.residual",
    "save_sketched": "panther_compile.checkpoint",
    "sketch_onnx": "panther_compile.onnx.sketch",
    "sketch_report": "panther_compile.report",
    "sketch_skeleton": "panther_compile.skeleton",
    "sketchify": "panther_compile.api",
    "sketchify_checkpoint": "panther_compile.integrations.folder_by_weights",
}

# Classes of another library's kind: not in __all__, since that library need not be installed.
_HOME_OF_TRAINERS = {
    "PantherAccelerator": "panther_compile.integrations.accelerated",
    "PantherStrategy": "panther_compile.integrations.lightning_strategy",
    "PantherTrainer": "panther_compile.integrations.hf_trainer",
}

if TYPE_CHECKING:
    from panther_compile.api import densify, plan_sketch, sketchify
    from panther_compile.checkpoint import load_sketched, save_sketched
    from panther_compile.config import SketchConfig
    from panther_compile.errors import PantherError, SketchQualityWarning
    from panther_compile.healing.healer import heal
    from panther_compile.healing.report import HealReport, heal_report
    from panther_compile.int8_factors import prepare_int8
    from panther_compile.integrations.accelerated import PantherAccelerator as PantherAccelerator
    from panther_compile.integrations.dense_state import project_state_dict
    from panther_compile.integrations.folder_by_weights import sketchify_checkpoint
    from panther_compile.integrations.hf_trainer import PantherTrainer as PantherTrainer
    from panther_compile.integrations.latent_cache import LatentCache
    from panther_compile.integrations.lightning_strategy import PantherStrategy as PantherStrategy
    from panther_compile.integrations.panther import import_panther
    from panther_compile.layers import (
        NarrowLinear,
        ResidualLinear,
        SketchedConv1d,
        SketchedConv2d,
        SketchedConv3d,
        SketchedConvTranspose1d,
        SketchedConvTranspose2d,
        SketchedConvTranspose3d,
        SketchedEmbedding,
        SketchedExperts,
        SketchedGRU,
        SketchedGRUCell,
        SketchedLinear,
        SketchedLSTM,
        SketchedLSTMCell,
        SketchedMultiheadAttention,
    )
    from panther_compile.onnx.export import export_onnx
    from panther_compile.onnx.residual import add_residual_onnx
    from panther_compile.onnx.sketch import OnnxReport, sketch_onnx
    from panther_compile.parallel import (
        ParallelEngine,
        Resumed,
        TrainingCheckpoints,
        TrainingMetrics,
        check_layout,
        find_batch_size,
        parallelize_model,
        read_state_dict,
    )
    from panther_compile.partition import Hardware, Partition, measure_hardware, partition_model
    from panther_compile.records import SketchPlan
    from panther_compile.report import SketchReport, sketch_report
    from panther_compile.reporting.ratio_curve import RatioCurve
    from panther_compile.residual import ResidualReport, add_residual, load_residual, residual_report
    from panther_compile.skeleton import sketch_skeleton
else:
    # The module of another library, and ours that registers with it what reads and writes sketched models.
    _REGISTERED_WITH = {
        "transformers.quantizers.auto": "panther_compile.integrations.pretrained",
        "transformers.modeling_utils": "panther_compile.integrations.save_pretrained",
        "peft.tuners.lora.model": "panther_compile.integrations.adapters",
        "peft.peft_model": "panther_compile.integrations.peft_models",
        "diffusers.quantizers.auto": "panther_compile.integrations.diffusion",
        "diffusers.models.modeling_utils": "panther_compile.integrations.diffusion_mixin",
    }

    class _ImportedLater(importlib.abc.MetaPathFinder):
        """Lets our module be imported right after theirs: neither is, nor torch, before theirs is needed."""

        def find_spec(self, fullname, path, target=None):
            if fullname not in _REGISTERED_WITH:
                return None
            sys.meta_path.remove(self)
            try:
                spec = importlib.util.find_spec(fullname)
            finally:
                sys.meta_path.insert(0, self)
            if spec is None or spec.loader is None:
                return spec
            execute = spec.loader.exec_module

            def execute_and_register(module):
                execute(module)
                importlib.import_module(_REGISTERED_WITH[fullname])

            spec.loader.exec_module = execute_and_register
            return spec

    for theirs, ours in _REGISTERED_WITH.items():
        if theirs in sys.modules:
            importlib.import_module(ours)
    sys.meta_path.insert(0, _ImportedLater())
    del theirs, ours

    # Hidden from type checkers: with a module __getattr__ in sight they accept any name.
    def __getattr__(name):
        """Import the home of a public name when the name is first used."""
        home = _HOME_OF.get(name) or _HOME_OF_TRAINERS.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            module = importlib.import_module(home)
        except ModuleNotFoundError as error:
            if name not in _HOME_OF_TRAINERS:
                raise
            errors = importlib.import_module(_HOME_OF["PantherError"])
            raise errors.MissingExtraError(
                f"{name} needs {error.name}: pip install 'panther-compile[integrations]'", name=error.name
            ) from error
        value = getattr(module, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
