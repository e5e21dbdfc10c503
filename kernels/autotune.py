"""The block sizes that each kernel runs with, from a table, unless PANTHER_COMPILE_TUNE=1 asks for timing.

The lines of decoding are the fastest of an H200 (docs/benchmarks/kernels.md); the others were not compared.
What a line says of types and widths comes from the code that Triton emits for compute capability 9.0: within
them no configuration keeps more than 64 bytes of registers in memory (tests/kernels/test_emitted_code.py).
The first line that serves a call is taken: nothing is timed and one configuration is compiled, so the first
call is as short as can be, and a CUDA graph can be captured. With PANTHER_COMPILE_TUNE=1 all lines that serve
are timed once for each size, by Triton's tuner, one thread at a time; its choices are kept on disk beside
Triton's compiled code. While a graph is captured, nothing is timed.
"""

import functools
import os
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton

from panther_compile.kernels.dispatch import is_capturing

HALF, TF32, IEEE = "half", "tf32", "ieee"
KINDS = (HALF, TF32, IEEE)
_MULTIPROCESSORS = 132  # of an H100; so many programs of a block of rows fill it
_TUNING = threading.RLock()
_ANY = 1 << 30


class Call(NamedTuple):
    """What decides which lines of the table serve a call.

    Attributes:
        kind: of products: "half", "tf32" or "ieee".
        width: the rank, padded to its pieces, or what else the registers of a kernel grow with.
        rows: all that are divided into blocks of rows.
        aligned: whether sizes are multiples of 16, so that rows are loaded 16 bytes at a time.
    """

    kind: str
    width: int = 0
    rows: int = 0
    aligned: bool = True


def kind_of(dtype: torch.dtype, precision: str) -> str:
    """The kind of the products of tensors of this type."""
    return HALF if dtype.itemsize == 2 else precision


@dataclass(frozen=True)
class Blocks:
    """One configuration, and what it is for.

    Attributes:
        sizes: its constants.
        warps: of a program.
        stages: of its pipelines.
        kinds: of products, see `Call`.
        widest: the largest width.
        rows: the fewest rows.
        aligned: whether it is for aligned sizes alone: element by element it would need more registers.
        shared: bytes of shared memory from the width and the size of an element, if they may be too many.
    """

    sizes: dict[str, int]
    warps: int
    stages: int
    kinds: tuple[str, ...] = KINDS
    widest: int = _ANY
    rows: int = 0
    aligned: bool = False
    shared: Callable[["Blocks", int, int], int] | None = None

    def serves(self, call: Call, shared_limit: int) -> bool:
        """Whether a call may run with it, on a device whose programs have so much shared memory."""
        bytes_ = self.shared(self, call.width, 2 if call.kind == HALF else 4) if self.shared else 0
        fits = call.kind in self.kinds and call.width <= self.widest and bytes_ <= shared_limit
        return fits and call.rows >= self.rows and (call.aligned or not self.aligned)

    @property
    def constants(self) -> dict[str, int]:
        """Keyword arguments of a launch."""
        return {**self.sizes, "num_warps": self.warps, "num_stages": self.stages}


def _fused_shared(blocks: Blocks, width: int, itemsize: int) -> int:
    """What the loops of the fused kernels keep of x and down, then of up."""
    rows = blocks.sizes.get("BLOCK_M", blocks.sizes.get("BLOCK_P", 0))
    first = blocks.sizes["BLOCK_K"] * (rows + width)
    return blocks.stages * max(first, width * blocks.sizes["BLOCK_O"]) * itemsize


def _fused(
    blocks: tuple[int, int, int],
    warps: int,
    stages: int,
    kind: str,
    widest: int,
    rows: int = 0,
    aligned: bool = False,
) -> Blocks:
    sizes = dict(zip(("BLOCK_M", "BLOCK_K", "BLOCK_O"), blocks, strict=True))
    return Blocks(sizes, warps, stages, (kind,), widest, rows, aligned, _fused_shared)


def _product(
    rows: int,
    columns: int,
    k: int,
    warps: int,
    stages: int,
    kinds: tuple[str, ...] = KINDS,
    widest: int = _ANY,
) -> Blocks:
    return Blocks({"BLOCK_M": rows, "BLOCK_N": columns, "BLOCK_K": k}, warps, stages, kinds, widest)


_TENSOR = (HALF, TF32)
_TABLE: dict[str, tuple[Blocks, ...]] = {
    "sketched_linear": (
        _fused((128, 64, 64), 8, 3, HALF, 256, rows=128 * _MULTIPROCESSORS, aligned=True),
        _fused((64, 64, 64), 4, 3, HALF, 256, aligned=True),
        _fused((64, 32, 64), 8, 2, HALF, 256),
        _fused((64, 32, 64), 8, 3, TF32, 128),
        _fused((64, 32, 32), 8, 2, TF32, 128),
        _fused((32, 32, 32), 8, 2, IEEE, 128),
    ),
    # The width is the number of tiles that a program keeps besides its sums.
    "product": (
        _product(128, 128, 64, 8, 3, (HALF,), 0),
        _product(64, 128, 64, 4, 3, (HALF,), 0),
        _product(64, 64, 32, 4, 3, _TENSOR),
        _product(32, 32, 32, 4, 2),
    ),
    "weight_grad": (
        _product(64, 64, 64, 4, 3, (HALF,)),
        _product(64, 64, 32, 4, 3, _TENSOR),
        _product(32, 32, 32, 4, 2),
    ),
    # The width is the number of rows, 1 or 16; the rows of the table are features that come out.
    "decode_latent": (
        Blocks({"BLOCK_N": 8, "BLOCK_K": 256}, 4, 3, widest=1),
        Blocks({"BLOCK_N": 16, "BLOCK_K": 256}, 4, 3, widest=1),
        Blocks({"BLOCK_N": 16, "BLOCK_K": 128}, 2, 3, (HALF,)),
        Blocks({"BLOCK_N": 32, "BLOCK_K": 128}, 4, 3, (HALF,)),
        Blocks({"BLOCK_N": 16, "BLOCK_K": 128}, 4, 3, _TENSOR),
        Blocks({"BLOCK_N": 16, "BLOCK_K": 32}, 4, 3),
    ),
    "decode_output": (
        Blocks({"BLOCK_N": 16, "BLOCK_K": 256}, 4, 3, widest=1, rows=2 * _MULTIPROCESSORS * 16),
        Blocks({"BLOCK_N": 8, "BLOCK_K": 256}, 4, 3, widest=1, rows=_MULTIPROCESSORS * 8),
        Blocks({"BLOCK_N": 4, "BLOCK_K": 256}, 4, 3, widest=1),
        Blocks({"BLOCK_N": 32, "BLOCK_K": 256}, 4, 3, (HALF,)),
        Blocks({"BLOCK_N": 32, "BLOCK_K": 128}, 4, 3, (HALF,)),
        Blocks({"BLOCK_N": 16, "BLOCK_K": 64}, 4, 3, _TENSOR),
        Blocks({"BLOCK_N": 16, "BLOCK_K": 32}, 4, 3),
    ),
    "sketched_conv2d": (
        Blocks({"BLOCK_P": 64, "BLOCK_K": 64, "BLOCK_O": 64}, 8, 2, (HALF,), 128, shared=_fused_shared),
        Blocks({"BLOCK_P": 32, "BLOCK_K": 32, "BLOCK_O": 32}, 4, 2, _TENSOR, 128, shared=_fused_shared),
        Blocks({"BLOCK_P": 32, "BLOCK_K": 32, "BLOCK_O": 32}, 8, 2, (IEEE,), 128, shared=_fused_shared),
    ),
    # The width is that of q, k and v; the rows are those of a chunk.
    "favor": (
        Blocks({"BLOCK_M": 32}, 8, 1, _TENSOR, 128),
        Blocks({"BLOCK_M": 64}, 8, 1, (HALF,), 64, rows=128),
        Blocks({"BLOCK_M": 16}, 8, 1, (IEEE,), 64),
    ),
}

# Small enough that small test shapes have several blocks in every direction.
_INTERPRETED = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 32, "BLOCK_O": 16, "BLOCK_P": 32}


def blocks_of(kernel: str) -> tuple[Blocks, ...]:
    """The lines of a kernel; one of small blocks under the interpreter, which has no device."""
    table = _TABLE[kernel]
    if triton.knobs.runtime.interpret:
        return (Blocks({name: _INTERPRETED[name] for name in table[0].sizes}, 1, 1),)
    return table


class Tuned:
    """A kernel with its lines of the table.

    Attributes:
        fn: the kernel.
        configs: its lines.
        best: the line that was fastest, by what was timed.
        do_bench: what times a call; Triton's own if None.
    """

    def __init__(self, fn: Any, kernel: str, key: Sequence[str]) -> None:
        self.fn = fn
        self.configs: Sequence[Blocks] = blocks_of(kernel)
        self.key = list(key)
        self.best: dict[Hashable, dict[str, int]] = {}
        self.do_bench: Any = None

    def launch(self, grid: Any, call: Call, *args: Any, **constants: Any) -> None:
        """Run the kernel with the line for this call: the fastest one if it was timed, else the first."""
        lines = self.serving(call)
        chosen = lines[0].constants
        if len(lines) > 1 and os.environ.get("PANTHER_COMPILE_TUNE") == "1":
            chosen = self._timed(lines, grid, args, constants) or chosen
        self.fn[grid](*args, **constants, **chosen)

    def serving(self, call: Call) -> list[Blocks]:
        """The lines that serve a call; the last one, which is the smallest, where none does."""
        limit = _shared_limit()
        return [one for one in self.configs if one.serves(call, limit)] or list(self.configs[-1:])

    def _timed(
        self, lines: Sequence[Blocks], grid: Any, args: tuple[Any, ...], constants: dict[str, Any]
    ) -> dict[str, int] | None:
        """The fastest line for these sizes and types, timed if it was not; None while a graph is captured."""
        given = dict(zip(self.fn.arg_names, args, strict=False)) | constants
        types = tuple(str(one.dtype) for one in args if isinstance(one, torch.Tensor))
        key = (*(given[name] for name in self.key), *types, _device())
        # Triton's tuner keeps the arguments of the call that it times in itself.
        with _TUNING:
            if key in self.best or is_capturing():
                return self.best.get(key)
            configs = [triton.Config(one.sizes, num_warps=one.warps, num_stages=one.stages) for one in lines]
            tuner = triton.autotune(configs, key=self.key, cache_results=True, do_bench=self.do_bench)(
                self.fn
            )
            tuner[grid](*args, **constants)
            fastest = lines[configs.index(tuner.best_config)]
            self.best[key] = fastest.constants
            return self.best[key]


def tuned(kernel: str, key: Sequence[str]) -> Callable[[Any], Tuned]:
    """Decorate a kernel with its lines of the table; `key` names the arguments for which it is timed anew."""
    return lambda fn: Tuned(fn, kernel, key)


def _device() -> int | None:
    """The current CUDA device, None without one."""
    return torch.cuda.current_device() if torch.cuda.is_available() else None


def _shared_limit() -> int:
    """Bytes of shared memory that a program may have on the current device."""
    if triton.knobs.runtime.interpret:
        return 1 << 30
    driver = triton.runtime.driver.active
    return _shared_limit_of(driver, driver.get_current_device())


@functools.cache
def _shared_limit_of(driver: Any, device: int) -> int:
    """See `_shared_limit`; asked once, for the clock rates among the properties take a millisecond."""
    limit: int = driver.utils.get_device_properties(device)["max_shared_mem"]
    return limit


def compute_capability() -> int:
    """Capability of the current CUDA device, 90 for 9.0; 0 for others, and under the interpreter."""
    if triton.knobs.runtime.interpret:
        return 0
    driver = triton.runtime.driver.active
    return _compute_capability_of(driver, driver.get_current_device())


@functools.cache
def _compute_capability_of(driver: Any, device: int) -> int:
    """See `compute_capability`; the device is the current one."""
    target = driver.get_current_target()
    return int(target.arch) if target.backend == "cuda" else 0


def chunk_length(kind: str, rows: int, *, backward: bool) -> int:
    """Rows of q, k and v to a chunk of the random-feature attention.

    The states are moved four times, 16 M (V + 2) / length bytes a row; within a chunk a row costs
    2 (M + V) length operations in TF32. At 346 TFLOP/s and 3 TB/s, an H100's, 256 features and 64 columns
    that is 1.7 ns a row in chunks of 64, 1.1 of 128 and 1.6 of 256. At 256 the output kernel does not compile
    (158 registers to a thread, of 128); in the backward 64 already spill 80 to 300 bytes.

    Args:
        kind: of products, see `Call`.
        rows: of all heads together; few are divided more finely, so that no multiprocessor is idle.
        backward: whether gradients are computed.
    """
    if triton.knobs.runtime.interpret:
        return 16
    if kind == IEEE or backward:
        return 32
    return 128 if rows >= 128 * _MULTIPROCESSORS else 64
