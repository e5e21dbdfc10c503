"""Files run and quantized by ONNX Runtime alone, as the benchmarks of quality against time do."""

from pathlib import Path

import onnxruntime as ort
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.quantization.shape_inference import quant_pre_process


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
