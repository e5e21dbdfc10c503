"""Importing the library loads nothing at first, and little but torch when a name is used."""

import json
import subprocess
import sys

import pytest

HEAVY = {"triton", "onnx", "onnxruntime", "onnxscript", "networkx", "transformers", "matplotlib"}

# Packages that each statement adds in turn, in one process: torch by itself takes seconds to import.
PROBE = """
import json, sys, time

def third_party():
    files = {name: getattr(module, "__file__", None) or "" for name, module in list(sys.modules.items())}
    return {
        name for name, file in files.items()
        if "." not in name and ("site-packages" in file or "dist-packages" in file)
        and not name.startswith("__editable__")
    }

added = []
for statement in json.loads(sys.argv[1]):
    before, start = third_party(), time.perf_counter()
    exec(statement)
    seconds = time.perf_counter() - start
    added.append((sorted(third_party() - before - {"panther_compile"}), seconds))
print(json.dumps(added))
"""
STATEMENTS = [
    "import torch",
    "import panther_compile; panther_compile.sketchify",
    "import panther_compile, networkx",
    "import panther_compile, matplotlib",
]


def run_python(code, tmp_path, *options):
    done = subprocess.run(
        [sys.executable, "-c", code, *options], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def added(tmp_path_factory):
    """What each statement loads beyond those before it, and its seconds."""
    output = run_python(PROBE, tmp_path_factory.mktemp("elsewhere"), json.dumps(STATEMENTS))
    return [(set(names), seconds) for names, seconds in json.loads(output)]


def test_import_alone_loads_no_torch(tmp_path):
    code = "import sys, panther_compile; print('torch' in sys.modules, 'numpy' in sys.modules)"
    assert run_python(code, tmp_path).split() == ["False", "False"]


def test_sketchify_loads_little(added, record_property):
    names, seconds = added[1]
    record_property("seconds_beyond_torch", seconds)
    assert names & HEAVY == set()
    assert len(names) <= 3, names


def test_the_check_can_fail(added):
    assert "torch" in added[0][0]
    assert added[2][0] & HEAVY == {"networkx"}
    assert "matplotlib" in added[3][0] & HEAVY
