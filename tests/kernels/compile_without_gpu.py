"""Compile every kernel, in every configuration, to machine code for a GPU that is not there.

    python tests/kernels/compile_without_gpu.py [--arch 80 90] [--first-config] [--dtypes fp16 ...]

The launchers run on CPU tensors; Triton is given a driver that compiles with the real compiler and ptxas
and launches nothing. Prints one JSON line a kernel and configuration: shared memory, registers, spills,
or the error. The interpreter checks what the kernels compute; this checks that they compile and fit.
"""

import argparse
import contextlib
import importlib
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton
from triton.backends.compiler import GPUTarget

MODULES = (
    "sketched_linear",
    "sketched_linear_backward",
    "decode_linear",
    "sketched_conv2d",
    "random_feature_attention",
    "random_feature_attention_backward",
)
# Bytes of shared memory a block may have: CUDA C programming guide, technical specifications.
SHARED = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class Driver:
    """A CUDA driver as far as Triton asks before a launch."""

    def __init__(self, arch):
        self.arch = arch
        self.utils = self
        self.loaded = []

    def get_current_target(self):
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_device_properties(self, device):
        return {"max_shared_mem": SHARED[self.arch]}

    def load_binary(self, name, binary, shared, device):
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(binary)
            file.flush()
            done = subprocess.run(
                [CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
            )
        registers, local = (int(re.search(rf"\b{word}:(\d+)", done.stdout)[1]) for word in ("REG", "STACK"))
        self.loaded.append({"kernel": name, "shared": shared, "registers": registers, "stack": local})
        return None, None, registers, local, 1024

    def launcher_cls(self, source, metadata):
        return lambda *args, **kwargs: None


def launches(module, dtype):
    """Call every launcher of a module once, at sizes like those of a model."""
    from panther_compile.kernels.factor_set import Factors, Needs

    def draw(*shape):
        return torch.empty(*shape, dtype=dtype)

    def layer(rank, start=None):
        width = 768 if start is None else 768 - rank
        return Factors(draw(rank, width), draw(768, rank), draw(768), start)

    layers = [layer(256), layer(200, 0), layer(128, 640)]
    if module.__name__.endswith("sketched_linear"):
        module.sketched_linear_forward(draw(512, 768), layers, keep=True)
        module.sketched_linear_forward(draw(512, 768), layers[:1], activation="gelu")
        given = {"multiplier": draw(512, 768), "residual": draw(512, 768)}
        module.sketched_linear_forward(draw(512, 768), layers[1:2], activation="silu", **given)
    elif module.__name__.endswith("decode_linear"):
        for rows in (1, 8):
            module.decode_linear_forward(draw(rows, 768), layers, keep=True)
            given = {"multiplier": draw(rows, 768), "residual": draw(rows, 768)}
            module.decode_linear_forward(draw(rows, 768), layers[1:2], activation="silu", **given)
    elif module.__name__.endswith("sketched_linear_backward"):
        cases = (
            (layers, "none", None),
            (layers[:1], "gelu", None),
            (layers[1:2], "gelu_tanh", None),
            (layers[:1], "silu", draw(512, 768)),
        )
        for sets, activation, multiplier in cases:
            options = {"activation": activation, "multiplier": multiplier, "needs": Needs()}
            grads = [draw(512, 768) for _ in sets]
            kept = [draw(512, one.down.shape[0]) for one in sets]
            module.sketched_linear_backward(grads, draw(512, 768), sets, kept, **options)
    elif module.__name__.endswith("sketched_conv2d"):
        geometry = {"stride": (2, 1), "padding": (1, 1), "dilation": (1, 1)}
        module.sketched_conv2d_forward(
            draw(8, 256, 28, 28), draw(128, 256, 3, 3), draw(256, 128, 1, 1), draw(256), **geometry
        )
    else:
        q, k, v = draw(2, 8, 500, 64), draw(2, 8, 500, 64), draw(2, 8, 500, 64)
        for causal, mask in ((False, None), (True, torch.empty(2, 8, 500))):
            inputs = (q, k, v, draw(256, 64), mask)
            if module.__name__.endswith("backward"):
                module.favor_attention_backward(draw(2, 8, 500, 64), *inputs, causal=causal)
            else:
                module.favor_attention_forward(*inputs, causal=causal)


def tuned_kernels():
    """Every kernel that is tuned; a launcher may use those of another module."""
    modules = (importlib.import_module(f"panther_compile.kernels.{name}") for name in MODULES)
    found = {id(one): one for module in modules for one in vars(module).values() if hasattr(one, "configs")}
    return list(found.values())


def compile_module(module, dtype, driver, first_config):
    """Yield a record for each kernel and configuration."""
    tuned = tuned_kernels()
    every = [list(kernel.configs) for kernel in tuned]
    own = [len(one.configs) for one in vars(module).values() if hasattr(one, "configs")]
    for index in range(1 if first_config else max(own)):
        for kernel, configs in zip(tuned, every, strict=True):
            kernel.configs = [configs[min(index, len(configs) - 1)]]
        driver.loaded.clear()
        error = None
        # Triton's own errors, and the compiler's, which have no common root.
        try:
            launches(module, dtype)
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
        for record in driver.loaded:
            yield {"config": index, **record}
        if error:
            yield {"config": index, "error": error[-2000:]}
    for kernel, configs in zip(tuned, every, strict=True):
        kernel.configs = configs


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90])
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES))
    parser.add_argument("--modules", nargs="+", default=list(MODULES))
    parser.add_argument("--first-config", action="store_true")
    options = parser.parse_args()
    for arch in options.arch:
        driver = Driver(arch)
        triton.runtime.driver.set_active(driver)
        for name in options.modules:
            # A kernel compiled for one target is cached by it, so the modules can stay.
            module = importlib.import_module(f"panther_compile.kernels.{name}")
            for dtype in options.dtypes:
                with contextlib.redirect_stderr(None):
                    records = list(compile_module(module, DTYPES[dtype], driver, options.first_config))
                for record in records:
                    print(json.dumps({"arch": arch, "module": name, "dtype": dtype, **record}), flush=True)


if __name__ == "__main__":
    main()
