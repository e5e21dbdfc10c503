"""Files run and quantized by ONNX Runtime alone, as the benchmarks of quality against time do."""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import onnxruntime as ort
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_dynamic, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

Key = TypeVar("Key", bound=Hashable)


def processor_seconds(calls: Mapping[Key, Callable[[], object]], turns: int) -> dict[Key, float]:
    """Processor seconds of each call, which take turns: the least of each."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(turns):
        for key, call in calls.items():
            begin = time.process_time()
            call()
            best[key] = min(best[key], time.process_time() - begin)
    return best


def session(path: Path, threads: int) -> ort.InferenceSession:
    """A session on the CPU."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def write_int8(source: Path, path: Path, operators: list[str] | None = None) -> None:
    """Write a file in int8 by `quantize_dynamic`, ranges of activations measured at each call.

    Args:
        source: in float32.
        path: of the new file.
        operators: their types; None for all that can be.
    """
    quant_pre_process(source, path, skip_symbolic_shape=True)
    quantize_dynamic(path, path, operators, per_channel=True, weight_type=QuantType.QInt8)


def write_static(source: Path, path: Path, batches: Sequence[np.ndarray]) -> None:
    """Write a file in int8 by `quantize_static`, ranges of activations those that the batches have, unsigned.

    Args:
        source: in float32, of one input.
        path: of the new file.
        batches: of that input.
    """
    quant_pre_process(source, path, skip_symbolic_shape=True)
    reader = _Batches(session(path, 1).get_inputs()[0].name, batches)
    quantize_static(path, path, reader, per_channel=True, activation_type=QuantType.QUInt8)


class _Batches(CalibrationDataReader):
    def __init__(self, name: str, batches: Sequence[np.ndarray]) -> None:
        self._left = iter([{name: batch} for batch in batches])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._left, None)
