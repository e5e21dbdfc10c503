"""Results of a unit that are kept from its forward, and given back where it is computed again."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

from panther_compile.errors import ParallelError
from panther_compile.models.outputs import tensors_in
from panther_compile.partition.graph.narrowing import storages, written_storages

# Whether torch asks what to keep of an operation before it runs it, as it does before 2.13.
_ASKS_FIRST = "op_output" not in inspect.signature(SelectiveCheckpointContext).parameters


def contexts_keeping(policy: "Policy") -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts of one forward of a unit and of its recomputation, for `torch.utils.checkpoint`."""
    forward, again = create_selective_checkpoint_contexts(policy, allow_cache_entry_mutation=True)
    return _Forward(policy, forward), _Recomputation(policy, again)


def _detached(tensor: Tensor) -> Tensor:
    """The same memory and count of writes, without a place in autograd's graph."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


class Policy(ABC):
    """What to keep of one forward.

    Attributes:
        holds: whether kept results are given back; otherwise the unit is computed again as a whole.
        asked_again: operations of the recomputation so far.
        early: runs operations that torch asks about first.
    """

    def __init__(self) -> None:
        self.holds = True
        self.asked_again = 0
        self._decided: list[bool] = []
        self.early = _Early()
        self._given_back: list[Tensor] = []
        self._versions: list[int] = []

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """Whether to keep the result, as torch asks it."""
        if ctx.is_recompute:  # torch before 2.13 asks again
            keeps = self._decided[self.asked_again]
            self.asked_again += 1
        else:
            result = self.early.run(op, args, kwargs) if _ASKS_FIRST else ctx.op_output
            keeps = self.decide(op, args, kwargs, result)
            self._decided.append(keeps)
            if keeps:
                self._given_back += map(_detached, tensors_in(result))
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    def end(self) -> None:
        """The forward is over: what is kept is given back as it is now."""
        self._versions = [tensor._version for tensor in self._given_back]

    def check(self) -> None:
        """Refuse what somebody has written in place since then, as torch counts the writes.

        Raises:
            ParallelError: a kept result was written.
        """
        if self.holds and self._versions != [tensor._version for tensor in self._given_back]:
            raise ParallelError(
                "a module is computed again in the backward, and a result that it keeps was written in place "
                "after its forward: the gradients would be of other values. Write a new tensor there "
                "(x = x + y for x += y), or give activation_checkpointing='none' or 'full'"
            )

    @abstractmethod
    def decide(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> bool:
        """Whether to keep the result of an operation of the forward; each is asked for once, in order."""


class KeptByKind(Policy):
    """Keeps what is chosen by its kind, and what is written into it in place.

    A kept result is given back as it is in the end: with what was written into it, which is not run again.
    That is wrong for an operation that read it before and is run again, and where what was written is random:
    the unit is then computed again as a whole.

    Args:
        chooses: whether to keep the result of an operation, of its arguments.
    """

    def __init__(self, chooses: Callable[[Any, Sequence[Any], Mapping[str, Any]], bool]) -> None:
        super().__init__()
        self._chooses = chooses
        self._kept = set[int]()
        self._read = set[int]()

    def decide(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> bool:
        """Whether it is chosen, or writes into what is."""
        if not self.holds:
            return False
        written = written_storages(op, args, kwargs)
        if written & self._kept:
            again = written & self._read or not written <= self._kept or not op._schema.returns
            if again or torch.Tag.nondeterministic_seeded in op.tags:
                self.holds = False
            return self.holds
        given, made = storages((args, kwargs)), storages(result)
        keeps = self._chooses(op, args, kwargs)
        if keeps:
            self._kept |= made
        elif written or not made <= given:  # a view reads nothing
            self._read |= given & self._kept
        return keeps


class _Early(TorchDispatchMode):
    """Runs an operation where torch asks what to keep of it first, and gives torch the result then.

    It lies under torch's own mode.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[Any, Any] = {}  # the operation that torch runs next, and its result

    def run(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result of an operation, which torch asks for next."""
        result = op(*args, **kwargs)
        self._made[op] = result
        return result

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._made.pop(op) if op in self._made else op(*args, **(kwargs or {}))


class _Forward:
    """The context of a forward."""

    def __init__(self, policy: Policy, forward: AbstractContextManager[Any]) -> None:
        self._policy, self._forward = policy, forward
        self._early: AbstractContextManager[Any] = policy.early if _ASKS_FIRST else nullcontext()

    def __enter__(self) -> None:
        self._early.__enter__()
        self._forward.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        self._policy.end()
        handled = self._forward.__exit__(*error)
        self._early.__exit__(*error)
        return handled


class _Recomputation:
    """The context of a recomputation, in which kept results are given back where the policy holds."""

    def __init__(self, policy: Policy, again: AbstractContextManager[Any]) -> None:
        self._policy, self._again = policy, again

    def __enter__(self) -> None:
        self._policy.asked_again = 0
        self._policy.check()
        self._entered = self._again if self._policy.holds else nullcontext()
        self._entered.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.__exit__(*error)
