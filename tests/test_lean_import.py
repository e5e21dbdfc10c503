"""Importing the library loads nothing at first, and little but torch when a name is used."""

import json
import subprocess
import sys

import pytest

HEAVY = {"triton", "onnx", "onnxruntime", "onnxscript", "networkx", "transformers", "matplotlib"}

PROBE = """
import json, sys, time
import torch
start = time.perf_counter()
{statement}
seconds = time.perf_counter() - start
files = {{
    name: getattr(module, "__file__", None) or ""
    for name, module in list(sys.modules.items()) if "." not in name
}}
third_party = [
    name for name, file in files.items()
    if ("site-packages" in file or "dist-packages" in file)
    and not name.startswith("__editable__")
]
print(json.dumps({{"seconds": seconds, "third_party": sorted(third_party)}}))
"""


def run_python(code, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded_beyond_torch(statement, tmp_path):
    """Third-party packages the statement loads and torch alone does not; and its seconds."""
    bare = json.loads(run_python(PROBE.format(statement="pass"), tmp_path))
    full = json.loads(run_python(PROBE.format(statement=statement), tmp_path))
    added = set(full["third_party"]) - set(bare["third_party"]) - {"panther_compile"}
    return added, full["seconds"]


def test_import_alone_loads_no_torch(tmp_path):
    code = "import sys, panther_compile; print('torch' in sys.modules, 'numpy' in sys.modules)"
    assert run_python(code, tmp_path).split() == ["False", "False"]


def test_sketchify_loads_little(tmp_path, record_property):
    added, seconds = loaded_beyond_torch("import panther_compile; panther_compile.sketchify", tmp_path)
    record_property("seconds_beyond_torch", seconds)
    assert added & HEAVY == set()
    assert len(added) <= 3, added


@pytest.mark.parametrize("heavy", ["networkx", "matplotlib"])
def test_the_check_can_fail(tmp_path, heavy):
    added, _ = loaded_beyond_torch(f"import panther_compile, {heavy}", tmp_path)
    assert heavy in added & HEAVY
