"""What one unit keeps of its activations within a budget, chosen from what its first call was seen to do.

A call on inputs of new shapes is computed again whole, and watched meanwhile: which operations run, the bytes
of what they give, what the backward needs. `partition.graph.budget` chooses among their results, and calls on
inputs of the same shapes keep those, by the number of the operation in the call.

Never kept is a view, a random result, one that other devices take part in, and one that is written in place
after it was read. What is written before is kept with it: a kept result is given back as it is in the end.
A call that runs other operations than the first on inputs of the same shapes is computed again whole.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from panther_compile.factorization import cost
from panther_compile.models.outputs import tensors_in
from panther_compile.parallel.kept_results import Policy, contexts_keeping
from panther_compile.partition.graph.budget import choose_kept
from panther_compile.partition.graph.narrowing import (
    is_attention,
    is_same_again,
    storage,
    storages,
    written_storages,
)

_MOST_SHAPES = 64


@dataclass(frozen=True)
class Choice:
    """What to keep of a call.

    Attributes:
        operations: that ran in the call that was watched.
        kept: numbers of those whose results are kept, and of those that write into them.
        limit: bytes to keep.
    """

    operations: tuple[Any, ...]
    kept: frozenset[int]
    limit: int


class KeptWithinBudget:
    """The choices of one unit, by the shapes of its inputs.

    Args:
        unit: whose inputs are read before each call.
        budget: between 0 and 1.
        device: that seconds are estimated for; an itemsize of 1 makes its numbers bytes.
    """

    def __init__(self, unit: nn.Module, budget: float, device: cost.Device) -> None:
        self.choices: dict[object, Choice] = {}
        self._unit, self._budget, self._device = unit, budget, device
        self._shapes: object = None
        self._has_warned = False
        unit.register_forward_pre_hook(self._read_shapes, with_kwargs=True)

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Contexts of a forward of the unit and of its recomputation, for `torch.utils.checkpoint`."""
        choice = self.choices.get(self._shapes)
        if choice is not None:
            return contexts_keeping(_Followed(choice, self._warn))
        if len(self.choices) == _MOST_SHAPES:
            self._warn(f"its inputs have had more than {_MOST_SHAPES} shapes")
            return nullcontext(), nullcontext()
        watched = _Watched({storage(one) for one in self._unit.parameters()}, self._device)
        forward, again = contexts_keeping(watched)
        return self._watch(watched, self._shapes, forward), again

    @contextmanager
    def _watch(
        self, watched: "_Watched", shapes: object, forward: AbstractContextManager[Any]
    ) -> Iterator[None]:
        pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(False)  # of the checkpoint

        def note(tensor: Tensor) -> Any:
            watched.saves(tensor)
            return pack(tensor)

        with saved_tensors_hooks(note, unpack), forward:
            yield
        self.choices[shapes] = watched.choose(self._budget)

    def _read_shapes(self, unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [(one.shape, one.dtype, one.requires_grad) for one in leaves if isinstance(one, Tensor)]
        self._shapes = (unit.training, torch.is_autocast_enabled(), *tensors)

    def _warn(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"activation_checkpointing={self._budget}: {type(self._unit).__name__} is computed again "
                f"whole where {why}",
                stacklevel=2,
            )


class _Followed(Policy):
    """Keeps what was chosen, as long as the operations are those that were watched, and there is room."""

    def __init__(self, choice: Choice, warn: Callable[[str], None]) -> None:
        super().__init__()
        self._choice, self._warn = choice, warn
        self._number, self._room = -1, choice.limit

    def decide(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> bool:
        """Whether it was chosen."""
        self._number += 1
        if not self.holds:
            return False
        known = self._choice.operations
        is_known = self._number < len(known) and known[self._number] is op
        keeps = is_known and self._number in self._choice.kept
        if keeps and not op._schema.is_mutable:
            self._room -= _made_bytes(result)
        if not is_known or self._room < 0:
            self.holds = False
            self._warn("it runs other operations than before on inputs of the same shapes")
        return keeps and self.holds


class _Watched(Policy):
    """Keeps nothing, and takes notes of what could be kept.

    Args:
        held: storages of parameters.
        device: that seconds are estimated for.
    """

    def __init__(self, held: set[int], device: cost.Device) -> None:
        super().__init__()
        self._held, self._device = held, device
        self._operations: list[Any] = []
        self._seconds: list[float] = []
        self._sizes: dict[int, int] = {}  # of results that can be kept
        self._writes: dict[int, list[int]] = {}  # operations that write into them
        self._makers: dict[int, int] = {}  # the operation that made each storage
        self._read = set[int]()  # operations whose results were read
        self._saved: dict[tuple[int, int], int] = {}  # bytes of each result that the backward needs
        self._last = 0  # operations before this one run again

    def decide(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> bool:
        """Whether it is kept: it is not."""
        number = len(self._operations)
        self._operations.append(op)
        self._seconds.append(self._estimate(op, args, kwargs, result))
        given, made = storages((args, kwargs)), storages(result)
        written, is_same = written_storages(op, args, kwargs), is_same_again(op, args, kwargs)
        for key in written & self._makers.keys():
            maker = self._makers[key]
            if is_same and written == {key} and maker not in self._read and op._schema.returns:
                self._seconds[maker] += self._seconds[number]
                self._writes.setdefault(maker, []).append(number)
            else:
                self._sizes.pop(maker, None)
        if written or not made or not made <= given:  # a view reads nothing
            self._read |= {self._makers[key] for key in given - written if key in self._makers}
        self._makers |= dict.fromkeys(made - given, number)
        if is_same and made and not made & given and not written:
            self._sizes[number] = _made_bytes(result)
        return False

    def saves(self, tensor: Tensor) -> None:
        """Count what the backward needs, unless it was given to the unit."""
        self._last = len(self._operations)
        for key in storages(tensor) & self._makers.keys():
            self._saved[self._makers[key], key] = tensor.untyped_storage().nbytes()

    def choose(self, budget: float) -> Choice:
        """What to keep of calls like this one."""
        limit = int(budget * sum(self._saved.values()))
        numbers = [number for number in self._sizes if number < self._last]
        chosen = choose_kept(
            [self._seconds[number] for number in numbers],
            [self._sizes[number] for number in numbers],
            limit,
        )
        kept = (numbers[one] for one in chosen)
        return Choice(
            tuple(self._operations),
            frozenset(number for one in kept for number in (one, *self._writes.get(one, ()))),
            limit,
        )

    def _estimate(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> float:
        """Seconds of an operation."""
        count = flop_registry.get(op.overloadpacket)
        if count is None and is_attention(op):  # of a CPU
            flops = sdpa_flop_count(*(one.shape for one in args[:3]))
        else:
            flops = count(*args, **kwargs, out_val=result) if count else 0
        activations = weights = 0
        for one in tensors_in((args, kwargs, result)):
            is_held = bool(storages(one) & self._held)
            weights += one.nbytes * is_held
            activations += one.nbytes * (not is_held)
        return cost.seconds((cost.Product(flops / 2, activations, weights),), self._device, itemsize=1)


def _made_bytes(result: Any) -> int:
    made = {storage(one): one.untyped_storage().nbytes() for one in tensors_in(result)}
    return sum(made.values())
