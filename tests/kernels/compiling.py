"""Runs compile_without_gpu.py in a process of its own: Triton is interpreted in that of the tests."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_without_gpu.py")


def compile_all(*options, timeout=1500):
    """The records that the script prints; skips where Triton has no compiler for NVIDIA."""
    if importlib.util.find_spec("triton.backends.nvidia") is None:
        pytest.skip("this Triton has no NVIDIA compiler")
    done = subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
