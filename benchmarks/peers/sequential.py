"""Layer by layer in the order of execution, each fitted to the inputs that the layers before it now give.

Block by block where the model has a chain of them: the inputs of a block are kept, so that only the block
itself runs again. The layers of a block that share an input are fitted together.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from peers.calibration import call, input_groups, listening, main_output, told
from peers.job import Job
from peers.layers import input_rows


@dataclass(frozen=True)
class Drift:
    """Inputs of one layer, X (N, I) in the dense model and X' in the compressed one; float64.

    Attributes:
        now: (I, I), X'^T X'.
        cross: (I, I), X^T X'.
    """

    now: Tensor
    cross: Tensor


@dataclass
class Call:
    """The arguments of a block."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self, block: nn.Module) -> Any:
        """Call it."""
        return block(*self.args, **self.kwargs)

    def following(self, output: Any) -> "Call":
        """The call of the next block: the first argument is what this one gives."""
        return Call((main_output(output), *self.args[1:]), self.kwargs)


class _ReachedError(Exception):
    """Stops a run where enough is known."""


def call_counts(block: nn.Module, names: Sequence[str], run: Callable[[], Any]) -> Counter[str]:
    """How often each layer is called in one run."""
    counts = Counter[str]()
    with listening(block, names, lambda name, _: counts.update([name])):
        run()
    return counts


def layer_inputs(block: nn.Module, name: str, run: Callable[[], Any], calls: int = 1) -> Tensor:
    """The inputs of one layer in so many calls, one after the other; what comes after them does not run."""
    found: list[Tensor] = []

    def tell(_: str, x: Tensor) -> None:
        found.append(x)
        if len(found) == calls:
            raise _ReachedError

    with listening(block, [name], tell), suppress(_ReachedError):
        run()
    return torch.cat(found)


def block_calls(model: nn.Module, block: str, batches: Sequence[Any]) -> list[Call]:
    """What a block is called with."""
    if not block:
        return [
            Call((), batch)
            if isinstance(batch, dict)
            else Call(batch if isinstance(batch, tuple) else (batch,), {})
            for batch in batches
        ]
    calls: list[Call] = []

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(Call(args, kwargs))

    handle = model.get_submodule(block).register_forward_pre_hook(keep, with_kwargs=True)
    try:
        for batch in batches:
            call(model, batch)
    finally:
        handle.remove()
    return calls


Fit = Callable[[nn.Module, Tensor, str, Drift], nn.Module]
"""(layer, weight (O, I), name, drift) to what takes its place."""
Refine = Callable[[nn.Module, Sequence[Any], list[Call], list[Tensor]], None]
"""(compressed block, batches of the model, its calls on them, outputs of the dense one)."""


@torch.no_grad()
def replace_in_order(job: Job, fit: Fit, refine: Refine | None = None) -> nn.Module:
    """A copy of the model with its layers replaced one after the other."""
    small = job.copy()
    blocks = job.blocks or ("",)
    dense_calls = block_calls(job.dense, blocks[0], job.batches)
    small_calls = dense_calls
    done = 0
    for block in blocks:
        dense_block, small_block = (m.get_submodule(block) for m in (job.dense, small))
        prefix = f"{block}." if block else ""
        names = [name.removeprefix(prefix) for name in job.names if name.startswith(prefix)]
        done += len(names)
        groups = input_groups(dense_block, names, lambda: dense_calls[0].run(dense_block))  # noqa: B023
        counts = call_counts(dense_block, names, lambda: dense_calls[0].run(dense_block))  # noqa: B023
        for group in groups:
            first = group[0]
            calls = list(zip(job.batches, dense_calls, small_calls, strict=True))
            drift = _drift(dense_block, small_block, first, counts[first], calls)
            for name in group:
                layer = small_block.get_submodule(name)
                small_block.set_submodule(name, fit(layer, job.weight(prefix + name), prefix + name, drift))
        if block:
            wanted = [c.run(dense_block) for c in dense_calls]
            if refine is not None:
                with torch.enable_grad():
                    outputs = [main_output(w).detach() for w in wanted]
                    refine(small_block, job.batches, small_calls, outputs)
            given = [c.run(small_block) for c in small_calls]
            dense_calls = [c.following(w) for c, w in zip(dense_calls, wanted, strict=True)]
            small_calls = [c.following(g) for c, g in zip(small_calls, given, strict=True)]
    if done != len(job.names):
        raise ValueError(f"{len(job.names) - done} layers are in no block of {', '.join(blocks)}")
    return small


def _drift(
    dense: nn.Module,
    small: nn.Module,
    name: str,
    count: int,
    calls: list[tuple[Any, Call, Call]],
) -> Drift:
    now: Tensor | float = 0.0
    cross: Tensor | float = 0.0
    layer = dense.get_submodule(name)
    for batch, *both in calls:
        old, new = (
            input_rows(layer, told(batch, layer_inputs(block, name, lambda: one.run(block), count)))  # noqa: B023
            for block, one in zip((dense, small), both, strict=True)
        )
        now = now + (new.T @ new).double()
        cross = cross + (old.T @ new).double()
    assert isinstance(now, Tensor)
    assert isinstance(cross, Tensor)
    return Drift(now, cross)
