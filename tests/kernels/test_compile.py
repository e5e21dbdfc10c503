"""Every kernel compiles to machine code for a GPU and fits it, on a machine that has none."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_without_gpu.py")


@pytest.fixture(scope="module")
def spec():
    if importlib.util.find_spec("triton.backends.nvidia") is None:
        pytest.skip("this Triton has no NVIDIA compiler")


def compile_all(*options):
    # A process of its own: Triton is interpreted in this one.
    done = subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def judge(records):
    errors = [record for record in records if "error" in record]
    # A configuration may be too large for some rank or type, and then the tuner drops it; none may be wrong.
    assert [one for one in errors if "OutOfResources" not in one["error"]] == []
    return {record["kernel"] for record in records if "kernel" in record}


@pytest.mark.slow
def test_first_configuration(spec):
    kernels = judge(compile_all("--arch", "90", "--dtypes", "fp16", "--first-config"))
    assert len(kernels) == 14, kernels


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", ["80", "90"])
def test_every_configuration(spec, arch):
    judge(compile_all("--arch", arch))
