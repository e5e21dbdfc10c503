"""Compile every kernel, in every configuration, to machine code for a GPU that is not there.

    python tests/kernels/compile_without_gpu.py [--arch 80 90] [--first] [--quick] [--dtypes fp16 ...]

The launchers run on CPU tensors; Triton is given a driver that compiles with the real compiler and ptxas
and launches nothing. Prints one JSON line a kernel and configuration: shared memory, registers, spills,
tensor-core instructions, or the error. The interpreter checks what the kernels compute; this checks that
they compile and fit.
"""

import argparse
import functools
import importlib
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import emitted
import torch
import triton
from triton.backends.compiler import GPUTarget

from panther_compile.kernels import autotune, dispatch
from panther_compile.kernels.factor_set import Factors, Needs

# Bytes of shared memory a block may have: CUDA C programming guide, technical specifications.
SHARED = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024}
DTYPES = {
    "fp32": (torch.float32, "ieee"),
    "tf32": (torch.float32, "tf32"),
    "fp16": (torch.float16, "ieee"),
    "bf16": (torch.bfloat16, "ieee"),
}
UNMEASURED = dispatch.DeviceClass()
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class Driver:
    """A CUDA driver as far as Triton asks before a launch."""

    def __init__(self, arch, ptx=None):
        self.arch = arch
        self.utils = self
        self.loaded = []
        self.ptx = ptx  # a folder for the text, or None
        self.text = ""
        triton.knobs.runtime.kernel_load_start_hook.add(self.starts)

    def starts(self, module, function, name, files, key):
        self.text = next(Path(path).read_text() for file, path in files.items() if file.endswith(".ptx"))

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
        record = {"kernel": name, "shared": shared, "registers": registers, "stack": local}
        record["tensor_core"] = emitted.tensor_core_instructions(self.text)
        record["copies"] = emitted.opcodes(self.text)["cp.async"]
        record["in_place"] = emitted.updated_in_place(self.text)
        if self.ptx is not None:
            path = self.ptx / f"{name}-{len(list(self.ptx.iterdir()))}.ptx"
            path.write_text(self.text)
            record["ptx"] = str(path)
        self.loaded.append(record)
        return self, None, registers, local, 1024  # a module, or it would be loaded at each launch

    def launcher_cls(self, source, metadata):
        return lambda *args, **kwargs: None


def launch_scans():
    """Both scans of the random-feature attention, one wide and one so narrow that warps share numbers."""
    from panther_compile.kernels import random_feature_attention as forward
    from panther_compile.kernels import random_feature_attention_backward as backward

    for columns, causal in ((64, True), (16, True), (64, False)):
        states = forward.States(torch.empty(1, 5, 64), torch.empty(1, 5, 64), torch.empty(1, 5, 64, columns))
        sizes = {"CAUSAL": causal, "BLOCK_V": columns, "BLOCK_M": 16}
        forward._favor_scan_kernel[(1, 4)](states, 5, columns, 64, **sizes)
        backward._favor_reverse_scan_kernel[(1, 4)](states, states.top, 5, columns, 64, **sizes)


def launch_linear(module, draw, dtype, precision, quick):
    """The forms of the fused kernel at the largest rank that dispatch takes, and at one of several pieces."""
    widest = dispatch.MAX_FUSED_RANK[dtype.itemsize]
    layers = [layer(draw, widest), layer(draw, widest - 64, 0), layer(draw, 96, 768 - 96)]
    rows = 132 * 128
    if not quick:
        module.sketched_linear_forward(draw(rows, 768), layers, keep=True, precision=precision)
        module.sketched_linear_forward(draw(512, 768), layers[2:], activation="gelu", precision=precision)
        module.sketched_linear_forward(draw(rows, 768), [layer(draw, 64)], precision=precision)
        ragged = [layer(draw, widest - 27), layer(draw, 37, 0)]
        module.sketched_linear_forward(draw(rows, 768), ragged, keep=True, precision=precision)
    given = {"multiplier": draw(rows, 768), "residual": draw(rows, 768), "activation": "silu"}
    module.sketched_linear_forward(draw(rows, 768), layers[1:2], precision=precision, **given)
    # Another number of rows, odd besides, runs the same code.
    given |= {"multiplier": draw(rows + 105, 768), "residual": draw(rows + 105, 768)}
    module.sketched_linear_forward(draw(rows + 105, 768), layers[1:2], precision=precision, **given)


def launch_decode(module, draw, dtype, precision, quick):
    """Rows 1 and 8; one layer and several."""
    layers = [layer(draw, 200), layer(draw, 192, 0), layer(draw, 128, 640)]
    for rows in (1,) if quick else (1, 8):
        given = {"multiplier": draw(rows, 768), "residual": draw(rows, 768), "activation": "silu"}
        module.decode_linear_forward(draw(rows, 768), layers[1:2], precision=precision, **given)
        if not quick:
            module.decode_linear_forward(draw(rows, 768), layers, keep=True, precision=precision)
            wide = Factors(draw(1024, 4096), draw(1 << 17, 1024), None, None)
            module.decode_linear_forward(draw(rows, 4096), [wide], precision=precision)


def launch_linear_backward(module, draw, dtype, precision, quick):
    """One layer and several, activations and a gate."""
    widest = dispatch.MAX_FUSED_RANK[dtype.itemsize]
    layers = [layer(draw, widest), layer(draw, widest - 64, 0), layer(draw, 96, 768 - 96)]
    cases = (
        (layers, "none", None),
        (layers[:1], "gelu", None),
        (layers[1:2], "gelu_tanh", None),
        (layers[:1], "silu", draw(512, 768)),
    )
    for sets, activation, multiplier in cases[:2] if quick else cases:
        options = {"activation": activation, "multiplier": multiplier, "needs": Needs()}
        grads = [draw(512, 768) for _ in sets]
        kept = [draw(512, one.down.shape[0]) for one in sets]
        module.sketched_linear_backward(grads, draw(512, 768), sets, kept, precision=precision, **options)


def launch_conv2d(module, draw, dtype, precision, quick):
    """The largest rank that dispatch takes, and a small one."""
    geometry = {"stride": (2, 1), "padding": (1, 1), "dilation": (1, 1), "precision": precision}
    for rank in (64,) if quick else (64, dispatch.MAX_CONV2D_RANK):
        factors = draw(rank, 256, 3, 3), draw(256, rank, 1, 1), draw(256)
        module.sketched_conv2d_forward(draw(8, 256, 28, 28), *factors, **geometry)


def launch_attention(module, draw, dtype, precision, quick):
    """Heads of 64 and 128, causal or not, in chunks for many rows and for few."""
    masked = torch.empty(2, 8, 2048)
    cases = (
        (64, 2048, True, masked),
        (64, 500, True, None),
        (64, 2048, False, None),
        (128, 2048, True, None),
    )
    for width, length, causal, mask in cases[: 1 if quick else None]:
        backward = module.__name__.endswith("backward")
        sizes = {"head_dim": width, "columns": width, "forced": "triton", "backward": backward}
        if dispatch.choose_attention(UNMEASURED, dtype, **sizes) == "torch":
            continue
        q, k, v = (draw(2, 8, length, width) for _ in range(3))
        inputs, options = (q, k, v, draw(256, width), mask), {"causal": causal, "precision": precision}
        if backward:
            module.favor_attention_backward(draw(2, 8, length, width), *inputs, **options)
        else:
            module.favor_attention_forward(*inputs, **options)


def layer(draw, rank, start=None):
    return Factors(draw(rank, 768 if start is None else 768 - rank), draw(768, rank), draw(768), start)


LAUNCHES = {
    "sketched_linear": launch_linear,
    "sketched_linear_backward": launch_linear_backward,
    "decode_linear": launch_decode,
    "sketched_conv2d": launch_conv2d,
    "random_feature_attention": launch_attention,
    "random_feature_attention_backward": launch_attention,
}


def compile_module(name, dtype, driver, first, quick=False):
    """Yield a record for each kernel and each configuration that may serve it."""
    kind, precision = DTYPES[dtype]
    serving, served = autotune.Tuned.serving, []

    def one_of_them(kernel, call):
        lines = [line for line in kernel.configs if line.serves(call, SHARED[driver.arch])]
        served.append((kernel.fn.__name__, len(lines)))
        return serving(kernel, call)[: index + 1][-1:]

    autotune.Tuned.serving = one_of_them
    index = 0
    while index == 0 or (not first and index < max((count for _, count in served), default=0)):
        driver.loaded.clear()
        error = None
        # Triton's own errors, and the compiler's, which have no common root.
        try:
            if name == "scans":
                launch_scans()
            else:
                module = importlib.import_module(f"panther_compile.kernels.{name}")
                draw = functools.partial(torch.empty, dtype=kind)
                LAUNCHES[name](module, draw, kind, precision, quick)
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
        for record in driver.loaded:
            yield {"config": index, **record}
        if error:
            yield {"config": index, "error": error[-2000:]}
        index += 1
    autotune.Tuned.serving = serving
    for kernel, count in served:
        if count == 0:
            yield {"kernel": kernel, "error": "no line of the table serves it"}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90])
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES))
    parser.add_argument("--modules", nargs="+", default=[*LAUNCHES, "scans"])
    parser.add_argument("--first", action="store_true")
    parser.add_argument("--quick", action="store_true", help="one call of each launcher")
    parser.add_argument("--ptx", type=Path, help="folder for the emitted code")
    options = parser.parse_args()
    for arch in options.arch:
        driver = Driver(arch, options.ptx)
        triton.runtime.driver.set_active(driver)
        for name in options.modules:
            for dtype in options.dtypes:
                for record in compile_module(name, dtype, driver, options.first, options.quick):
                    print(json.dumps({"arch": arch, "module": name, "dtype": dtype, **record}), flush=True)


if __name__ == "__main__":
    main()
