"""Under every kernel test: uninitialized memory is NaN, and bfloat16 works in Triton's interpreter."""

import numpy as np
import pytest
import torch
from triton import knobs


@pytest.fixture(autouse=True)
def _poison():
    """Make torch.empty and its like return NaN, so that what a kernel leaves out shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(autouse=True)
def _bfloat16(monkeypatch):
    """Two faults of the interpreter (seen in Triton 3.9): tl.dot multiplies the bits of bfloat16
    operands as integers, and a cast to bfloat16 truncates where a GPU rounds to nearest even."""
    if not knobs.runtime.interpret:
        return
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    dot, cast = builder.create_dot, builder.cast_impl

    def create_dot(self, a, b, *rest):
        a, b = (cast(self, one, tl.float32) if one.dtype.scalar == tl.bfloat16 else one for one in (a, b))
        return dot(self, a, b, *rest)

    def cast_impl(self, source, target):
        if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
            bits = np.ascontiguousarray(source.data, dtype=np.float32).view(np.uint32).astype(np.uint64)
            rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
            data = np.where(np.isnan(source.data), np.uint16(0x7FC0), rounded)
            return interpreter.TensorHandle(data, tl.bfloat16)
        return cast(self, source, target)

    monkeypatch.setattr(builder, "create_dot", create_dot)
    monkeypatch.setattr(builder, "cast_impl", cast_impl)


@pytest.fixture
def each_configuration(monkeypatch):
    """A function of modules: in each turn another line of the table leads in all their kernels."""

    def turns(*modules):
        kernels = [one for module in modules for one in vars(module).values() if hasattr(one, "configs")]
        every = [one.configs for one in kernels]
        for place in range(max(map(len, every))):
            for kernel, configs in zip(kernels, every, strict=True):
                monkeypatch.setattr(kernel, "configs", configs[place:] or configs[-1:])
            yield place

    return turns
