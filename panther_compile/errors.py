"""Every error a user can cause, in one tree.

PantherError
├── ConfigError (ValueError)          an option is out of range, or two options conflict
│   └── SelectorError                 an include / exclude / ratio pattern matches nothing
├── ConfigTypeError (TypeError)       an option has the wrong type
├── MissingExtraError (ImportError)   a package of an extra is not installed
├── ModelSourceError (ValueError)     the command line's model cannot be found or built
├── NoTargetError (ValueError)        the model holds nothing that could be sketched
├── WeightError (ValueError)          a weight holds NaN or Inf, or is still on the meta device
├── WrappedModelError (TypeError)     the model is wrapped in DDP, FSDP or torch.compile
├── DataError (ValueError)            calibration data is empty, broken, or holds NaN
├── RatioSearchError (ValueError)     no ratio keeps the score within max_drop
│   └── EvaluateError                 evaluate= raised, or gave no number
├── HealingError (RuntimeError)       healing cannot start: there is nothing to match, or it is not finite
├── TeacherMismatchError (ValueError) the teacher is not the model that was sketched
├── BackendError (RuntimeError)       torch.compile(backend="panther") cannot compile the model as asked
├── FactoredWeightError (RuntimeError) a weight that is a product of factors is written to
├── LayerError (ValueError)           a layer cannot be sketched as asked
│   └── RankError                     a rank is outside what the layer allows
├── OpError (ValueError)              an operator's arguments do not fit one another
├── PartitionError (ValueError)       a model cannot be cut into stages as asked
│   ├── CaptureError                  no graph of the model can be read
│   ├── MeshError                     a mesh or a schedule does not fit the devices
│   ├── StageCountError               more stages than places to cut
│   └── StageMemoryError              a stage cannot fit into the memory of its devices
├── ParallelError (RuntimeError)      a partition cannot be run on the ranks as asked
│   ├── ProcessGroupError             no process group, or not of the mesh's size or the model's device
│   ├── RankMismatchError             the ranks were given different plans, models or options
│   ├── ScheduleError                 a schedule cannot run these stages or microbatches
│   ├── BatchError (ValueError)       a batch cannot be divided into the microbatches
│   └── CommunicationError            a rank did not answer in time
├── OnnxError (ValueError)            an ONNX model cannot be read, written or exported
│   ├── OnnxFileError (OSError)       a file is missing, or cannot be read or written
│   ├── OnnxInvalidError              truncated, not a sound graph, or of an opset or types not known here
│   ├── OnnxExternalDataError         the weights beside a model are missing, cut short or outside its folder
│   ├── OnnxExportError               torch cannot export the model
│   └── OnnxMismatchError             ONNX Runtime computes something else than the model
└── CheckpointError (OSError)         a checkpoint cannot be written or read
    ├── CheckpointCorruptError        truncated, or its checksum does not match
    ├── CheckpointVersionError        written by a newer format
    ├── CheckpointMismatchError       of another model than the one given
    └── ResumeError                   a folder to resume from is of another run, or cannot be used

Each message says what was given, what was wanted, and where. Leaves also inherit the built-in
error that fits, so ordinary handlers work. What does not stop a run is a warning:

SketchQualityWarning (UserWarning)    a sketched model answers little of what the dense one does
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from types import NoneType

_SHOWN = 5  # names that an error lists


class PantherError(Exception):
    """Root of every error that panther_compile raises for a user's mistake."""


class SketchQualityWarning(UserWarning):
    """A sketched model's outputs are far from the dense model's: ratio, cause and remedy are named."""


class ConfigError(PantherError, ValueError):
    """An option is out of range, or two options conflict."""


class SelectorError(ConfigError):
    """An include, exclude or ratio pattern matches no layer of the model."""


class ConfigTypeError(PantherError, TypeError):
    """An option, or the model itself, has the wrong type."""


class MissingExtraError(PantherError, ModuleNotFoundError):
    """A package that an extra of panther_compile brings is not installed; the extra is named."""


class ModelSourceError(PantherError, ValueError):
    """The model of a folder, or named on the command line, cannot be found or built, or is not whole."""


class NoTargetError(PantherError, ValueError):
    """The model holds no layer that could be sketched; the message lists the reasons."""


class WeightError(PantherError, ValueError):
    """A weight holds NaN or Inf, or has no data (meta device); the layer is named."""


class WrappedModelError(PantherError, TypeError):
    """The model is wrapped (DDP, FSDP, torch.compile); the message says what to do instead."""


class DataError(PantherError, ValueError):
    """Data to calibrate or heal on is empty, cannot be read to its end, or leads to NaN.

    Attributes:
        calls: what was read before it failed; it can be given as data in turn.
    """

    def __init__(self, message: str, calls: Sequence[object] = ()) -> None:
        super().__init__(message)
        self.calls = tuple(calls)


class RatioSearchError(PantherError, ValueError):
    """No ratio keeps the score within max_drop; the message prints what was measured."""


class EvaluateError(RatioSearchError):
    """The function given as evaluate= raised, or gave no number; the ratio is named."""


class HealingError(PantherError, RuntimeError):
    """Healing cannot start: there is nothing to match, or what there is is NaN or Inf; it is named."""


class TeacherMismatchError(PantherError, ValueError):
    """The teacher is not the dense model that the small one was made of; the first difference is named."""


class BackendError(PantherError, RuntimeError):
    """`torch.compile(model, backend="panther")` cannot compile the model as asked."""


class FactoredWeightError(PantherError, RuntimeError):
    """The weight of a sketched layer is written to; the layer has no such tensor, only its factors."""


class LayerError(PantherError, ValueError):
    """A layer cannot be sketched as asked."""


class RankError(LayerError):
    """A rank is outside what the layer's shape allows."""


class OpError(PantherError, ValueError):
    """An operator's shapes, dtypes or devices do not fit one another, or its kernel is unknown."""


class PartitionError(PantherError, ValueError):
    """A model cannot be cut into pipeline stages as asked."""


class CaptureError(PartitionError):
    """No graph of the model can be read; the message names the construct that is in the way."""


class MeshError(PartitionError):
    """A mesh does not multiply to the devices, or a schedule cannot run on it."""


class StageCountError(PartitionError):
    """More pipeline stages are asked for than the graph has places to cut."""


class StageMemoryError(PartitionError):
    """A stage cannot fit; the message says which, by how much, and what would help."""


class ParallelError(PantherError, RuntimeError):
    """A partition cannot be run on the ranks as asked."""


class ProcessGroupError(ParallelError):
    """There is no process group, or it does not fit the mesh or the device of the model."""


class RankMismatchError(ParallelError):
    """The ranks were given different plans, models or options; those that differ are named."""


class ScheduleError(ParallelError):
    """A pipeline schedule cannot run these stages or this number of microbatches."""


class BatchError(ParallelError, ValueError):
    """A batch or a target cannot be divided into the microbatches of the partition."""


class CommunicationError(ParallelError):
    """Another rank did not answer in time; the rank, its stage and the step are named."""


class OnnxError(PantherError, ValueError):
    """An ONNX model cannot be read, written, exported or verified."""


class OnnxFileError(OnnxError, OSError):
    """An ONNX file is missing, or cannot be read or written."""


class OnnxInvalidError(OnnxError):
    """An ONNX file is truncated, holds no sound graph, or needs an opset or types not known here."""


class OnnxExternalDataError(OnnxError):
    """The weights that an ONNX model keeps in another file are missing, cut short or outside its folder."""


class OnnxExportError(OnnxError):
    """`torch.onnx.export` cannot export the model; the message says where it gave up."""


class OnnxMismatchError(OnnxError):
    """ONNX Runtime computes something else than the model; the output and the error are named."""


class CheckpointError(PantherError, OSError):
    """A checkpoint, of a sketch or of a training, cannot be written or read."""


class CheckpointCorruptError(CheckpointError):
    """A checkpoint is truncated, incomplete, or was changed after it was written."""


class CheckpointVersionError(CheckpointError):
    """A checkpoint was written by a newer format than this version reads."""


class CheckpointMismatchError(CheckpointError):
    """A checkpoint belongs to another model, or another optimizer, than the one given."""


class ResumeError(CheckpointError):
    """A folder to resume from is of another run, was changed, or cannot be used; what differs is named."""


def first_line(error: BaseException) -> str:
    """The first line of a message, where another library writes pages; empty if there is none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")


def check_choice(option: str, given: object, known: Sequence[object]) -> None:
    """Raise ConfigError unless an option is one of its values: texts, truths or None."""
    if not isinstance(given, str | bool | NoneType) or given not in known:
        raise ConfigError(f"{option}={given!r}, wanted one of {', '.join(map(repr, known))}")


def no_model(folder: Path, error: Exception) -> ModelSourceError:
    """What to raise where transformers cannot make the model of a folder."""
    return ModelSourceError(f"{folder} is no Hugging Face model that can be made: {error}")


def some_names(names: Iterable[str]) -> str:
    """The first names of a set, for errors.

    Args:
        names: of tensors or parameters.
    """
    shown = sorted(names)
    rest = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return ", ".join(shown[:_SHOWN]) + rest


def check_sizes(folder: Path, misfits: Iterable[str]) -> None:
    """Raise ModelSourceError if weights in the files of a folder have other sizes than its config says."""
    if names := list(misfits):
        raise ModelSourceError(
            f"{folder} has weights of other sizes than its config.json: {some_names(names)}"
        )


def check_whole(folder: Path, missing: Iterable[str]) -> None:
    """Raise ModelSourceError if weights are missing in the files of a folder: they would be random."""
    names = list(missing)
    if names:
        raise ModelSourceError(f"{folder} has no {some_names(names)} in its files, which the model needs")
