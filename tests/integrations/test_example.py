"""`examples/compress_smollm2.py` with all its steps: adapter, ONNX and int8 as well."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("peft")
pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.integrations
EXAMPLE = Path(__file__).parents[2] / "examples" / "compress_smollm2.py"


def test_a_language_model_takes_every_step(tmp_path):
    done = subprocess.run(
        [sys.executable, EXAMPLE, "--quick", "--output", tmp_path / "out"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    for step in ("dense", "sketch", "adapted and merged", "ONNX, int8", "the same tokens"):
        assert step in done.stdout
    sizes = [(tmp_path / "out" / name).stat().st_size for name in ("merged-int8.onnx", "merged.onnx")]
    assert sizes[0] < 0.7 * sizes[1]
