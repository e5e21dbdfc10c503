"""How `kernels.py` runs a case: the contenders, what each is compiled with, and its times.

"triton", "operator" and "auto" call our operator, or a sketched model, with that PANTHER_COMPILE_KERNEL
("operator" is on a CPU); "two products" is plain torch; "int8" and "fp8" are two products of factors in
these types (`kernel_low_precision.py`), fused with what is around them by torch.compile.
"""

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from kernel_cases import DTYPES, LOW_PRECISION, Case, Draw, Run, Runs
from kernel_clock import (
    copies_wanted,
    device_times,
    in_microseconds,
    made_up_times,
    processor_times,
    replay_times,
)
from torch import Tensor
from torch._functorch import config as functorch_config

from panther_compile.kernels import dispatch

# Launching a graph would hide nothing more (see `device_times`), and its outputs would be overwritten by the
# next run, which the backward of an earlier one still needs.
COMPILE_MODE = "max-autotune-no-cudagraphs"
MODES = {"triton": "triton", "operator": "auto", "auto": "auto"}


@dataclass(frozen=True)
class Bench:
    """What to time on.

    Attributes:
        device: of all tensors.
        name: of the type, one of DTYPES.
        quick: whether the ceilings are measured on small tensors.
        fake: whether the device is not there, and times are made up.
    """

    device: torch.device
    name: str
    quick: bool
    fake: bool = False

    @property
    def on_cuda(self) -> bool:
        """Whether kernels can run."""
        return self.device.type == "cuda"

    @property
    def draw(self) -> Draw:
        """Where inputs come from."""
        return Draw(self.device, DTYPES[self.name])

    def times(self, run: Callable[[], Any]) -> dict[str, float]:
        """See `in_microseconds`."""
        samples, host = device_times(run, self.device) if self.on_cuda else processor_times(run)
        return in_microseconds(samples, host)


def set_precision(name: str) -> None:
    """Let float32 products be IEEE or TF32; by the older settings, which Inductor reads too."""
    tf32 = dispatch.precision_of(name) == "tf32"
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32


@contextlib.contextmanager
def kernel_mode(mode: str) -> Iterator[None]:
    """PANTHER_COMPILE_KERNEL for a while."""
    before = os.environ.get("PANTHER_COMPILE_KERNEL")
    os.environ["PANTHER_COMPILE_KERNEL"] = mode
    try:
        yield
    finally:
        del os.environ["PANTHER_COMPILE_KERNEL"]
        if before is not None:
            os.environ["PANTHER_COMPILE_KERNEL"] = before


def compiled(name: str, run: Run) -> Run:
    """The run through torch.compile if the contender is compiled, with nothing left of earlier cases."""
    if name not in ("compiled", "compiled dense", *LOW_PRECISION):
        return run
    torch._dynamo.reset()
    # A backward is timed many times on one forward, so it may not reuse the memory of what was saved for it.
    functorch_config.donated_buffer = False
    # Inductor leaves products in int8 and fp8 alone; for one row it widens weights as it reads.
    low: dict[str, Any] = {"options": {"coordinate_descent_tuning": True}}
    how = low if name in LOW_PRECISION else {"mode": COMPILE_MODE}
    return Run(torch.compile(run.function, dynamic=False, **how), run.inputs)


def run_of(name: str, case: Case, runs: Runs) -> Run:
    """What a contender runs, before it is compiled."""
    if name in LOW_PRECISION:
        assert case.quantize is not None
        return case.quantize(name, runs.plain.inputs)
    if name in MODES:
        return runs.ours
    return runs.dense if name in ("dense", "compiled dense") else runs.plain


def failures() -> tuple[type[Exception], ...]:
    """What one contender may fail with while the others go on: memory that ran out, and compilers."""
    with contextlib.suppress(ImportError):
        from triton.errors import TritonError

        return (RuntimeError, TritonError)
    return (RuntimeError,)  # torch.OutOfMemoryError and the errors of Inductor and CUDA are such


def forward_of(run: Run) -> Callable[[], Any]:
    """A call without gradients."""

    def forward() -> Any:
        with torch.no_grad():
            return run.function(*run.inputs)

    return forward


def backward_of(run: Run) -> Callable[[], Any]:
    """The gradients of all inputs, for the same gradients of the outputs whoever computes them."""
    outputs = as_tuple(run.function(*run.inputs))
    torch.manual_seed(0)
    grads = [torch.randn_like(one) for one in outputs]
    return lambda: torch.autograd.grad(outputs, run.inputs, grads, retain_graph=True)


def as_tuple(found: Any) -> tuple[Tensor, ...]:
    """One tensor or several, as several."""
    return found if isinstance(found, tuple) else (found,)


def difference(found: Any, wanted: Any) -> float:
    """The largest of |a - b| / |b| over the tensors, Frobenius norms in float32; NaN never is the smaller."""
    pairs = zip(as_tuple(found), as_tuple(wanted), strict=True)
    ratios = [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs]
    return max(ratios, key=lambda ratio: math.inf if math.isnan(ratio) else ratio)


def measure(case: Case, wanted: Sequence[tuple[str, str]], bench: Bench) -> Iterator[dict[str, Any]]:
    """A record for each contender and pass that is wanted: its times, or the "error" that it failed with."""
    runs: Runs | None = None
    ready: dict[str, Run] = {}
    makers = {"forward": forward_of, "backward": backward_of}
    for name, direction in wanted:
        record: dict[str, Any] = {"contender": name, "pass": direction}
        with kernel_mode(MODES.get(name, "torch")):
            try:
                runs = runs or case.build(bench.draw)
                if name not in ready:
                    ready[name] = compiled(name, run_of(name, case, runs))
                run = makers[direction](ready[name])
                if bench.on_cuda and direction == "forward" and case.vectors <= dispatch.MAX_DECODE_ROWS:
                    record |= replayed(case, name, ready[name], bench)
                else:
                    record |= bench.times(run)
                if name in ("triton", "operator"):
                    found = run()
                    with kernel_mode("torch"):
                        record["difference"] = difference(found, makers[direction](runs.plain)())
            except failures() as error:
                record["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        yield record


def replayed(case: Case, name: str, run: Run, bench: Bench) -> dict[str, float]:
    """Times of a few rows: see `replay_times`; the function with inputs of its own in every run.

    The weights of a whole model are not inputs, and more than a cache holds.
    """
    runs = [run]
    if not case.is_model:
        count = copies_wanted(case.traffic * bench.draw.dtype.itemsize, bench.device)
        inputs = (run_of(name, case, case.build(bench.draw)).inputs for _ in range(count))
        runs = [Run(run.function, one) for one in inputs]
    samples = replay_times([forward_of(one) for one in runs], bench.device)
    return {**in_microseconds(samples, 0.0), "replayed": float(len(runs))}


def make_up(
    case: Case, wanted: Sequence[tuple[str, str]], bench: Bench, found: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Records as `measure` gives them, of a device that is not there; no tensor is made."""
    for name, direction in wanted:
        what = (case.labels, name, direction, bench.name)
        more = {"difference": 0.0} if name == "triton" else {}
        times = made_up_times(found["bound"] * (1 if direction == "forward" else 2), *what)
        yield {"contender": name, "pass": direction, **times, **more}


def ceilings(bench: Bench) -> dict[str, float]:
    """Operations and bytes in a second: a large square product, and a large copy."""
    if bench.fake:
        return {"operations_per_second": 7e14, "bytes_per_second": 3e12}
    size = 512 if bench.quick else 8192
    a = bench.draw(size, size).detach()
    source = torch.empty(2**22 if bench.quick else 2**29, device=bench.device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return {
        "operations_per_second": 2e6 * size**3 / bench.times(lambda: a @ a)["microseconds"],
        "bytes_per_second": 2e6 * source.numel() / bench.times(lambda: target.copy_(source))["microseconds"],
    }
