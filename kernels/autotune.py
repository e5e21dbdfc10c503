"""The block sizes that each kernel is tried with.

None of them was timed yet. tests/kernels/compile_without_gpu.py compiles them and prints their registers,
shared memory and stack; what does not fit some rank or type, the tuner drops. A line that a recorded
benchmark does not choose goes.
"""

from typing import Any

import triton

# kernel -> (block sizes, warps, stages)
_TABLE: dict[str, tuple[tuple[dict[str, int], int, int], ...]] = {
    "sketched_linear": (
        ({"BLOCK_M": 128, "BLOCK_K": 32, "BLOCK_O": 64, "SPLITS": 1}, 8, 3),
        ({"BLOCK_M": 64, "BLOCK_K": 32, "BLOCK_O": 64, "SPLITS": 1}, 8, 3),
        ({"BLOCK_M": 64, "BLOCK_K": 64, "BLOCK_O": 64, "SPLITS": 2}, 8, 2),
        ({"BLOCK_M": 32, "BLOCK_K": 32, "BLOCK_O": 64, "SPLITS": 4}, 4, 2),
        ({"BLOCK_M": 16, "BLOCK_K": 32, "BLOCK_O": 32, "SPLITS": 1}, 4, 2),
    ),
    "product": (
        ({"BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_K": 32}, 4, 3),
        ({"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 32}, 4, 3),
        ({"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32}, 4, 3),
        ({"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 32}, 4, 2),
    ),
    "weight_grad": (
        ({"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32}, 4, 3),
        ({"BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_K": 32}, 8, 3),
        ({"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 32}, 4, 2),
    ),
    "decode_latent": (
        ({"BLOCK_N": 16, "BLOCK_K": 256}, 4, 3),
        ({"BLOCK_N": 16, "BLOCK_K": 128}, 4, 3),
        ({"BLOCK_N": 32, "BLOCK_K": 128}, 4, 3),
    ),
    "decode_output": (
        ({"BLOCK_N": 16, "BLOCK_K": 128}, 4, 3),
        ({"BLOCK_N": 32, "BLOCK_K": 128}, 4, 3),
        ({"BLOCK_N": 64, "BLOCK_K": 64}, 4, 3),
    ),
    "sketched_conv2d": (
        ({"BLOCK_P": 64, "BLOCK_K": 32, "BLOCK_O": 64}, 8, 3),
        ({"BLOCK_P": 64, "BLOCK_K": 64, "BLOCK_O": 64}, 8, 2),
        ({"BLOCK_P": 32, "BLOCK_K": 32, "BLOCK_O": 32}, 4, 2),
    ),
    "favor": (
        ({"BLOCK_M": 16}, 8, 1),
        ({"BLOCK_M": 32}, 8, 1),
        ({"BLOCK_M": 16}, 16, 1),
    ),
}

# Small enough that small test shapes have several blocks in every direction, and split.
_INTERPRETED = {
    "BLOCK_M": 16,
    "BLOCK_N": 16,
    "BLOCK_K": 32,
    "BLOCK_O": 16,
    "BLOCK_P": 32,
    "SPLITS": 2,
}


def configs_for(kernel: str) -> list[Any]:
    """The configurations of a kernel: one under the interpreter, which has no device to time them on."""
    table = _TABLE[kernel]
    if triton.knobs.runtime.interpret:
        blocks = {name: _INTERPRETED[name] for name in table[0][0]}
        return [triton.Config(blocks, num_warps=1, num_stages=1)]
    return [triton.Config(blocks, num_warps=warps, num_stages=stages) for blocks, warps, stages in table]


def chunk_length() -> int:
    """Rows of q, k and v to a chunk of the random-feature attention."""
    return 16 if triton.knobs.runtime.interpret else 64
