"""Results of a unit that are kept from its forward, and given back where it is computed again."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from panther_compile.partition.graph.narrowing import storages, written_storages

# Whether to keep the result of an operation: of it, its arguments and its result, once for each in a forward.
Chooses = Callable[[Any, Sequence[Any], Mapping[str, Any], Any], bool]


def contexts_keeping(chooses: Chooses) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts of one forward of a unit and of its recomputation, for `torch.utils.checkpoint`."""
    policy = _Policy(chooses)
    forward, again = create_selective_checkpoint_contexts(policy, allow_cache_entry_mutation=True)
    return forward, _Recomputation(policy, again)


class _Policy:
    """What to keep of one forward: what is chosen, and what is written into it in place.

    A kept result is given back as it is in the end: with what was written into it, which is not run again.
    That is wrong for an operation that read it before and is run again, and where what was written is random:
    the unit is then computed again as a whole.

    Args:
        chooses: whether to keep the result of an operation.
    """

    def __init__(self, chooses: Chooses) -> None:
        self.holds = True
        self.asked_again = 0
        self._chooses = chooses
        self._kept = set[int]()
        self._read = set[int]()
        self._decided: list[bool] = []

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if ctx.is_recompute:  # torch before 2.13 asks again
            keeps = self._decided[self.asked_again]
            self.asked_again += 1
        else:
            keeps = self._decide(op, args, kwargs, ctx.op_output)
            self._decided.append(keeps)
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    def _decide(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> bool:
        keeps = self._chooses(op, args, kwargs, result)
        if not self.holds:
            return False
        written = written_storages(op, args, kwargs)
        if written & self._kept:
            again = written & self._read or not written <= self._kept or not op._schema.returns
            if again or torch.Tag.nondeterministic_seeded in op.tags:
                self.holds = False
            return self.holds
        given, made = storages((args, kwargs)), storages(result)
        if keeps:
            self._kept |= made
        elif written or not made <= given:  # a view reads nothing
            self._read |= given & self._kept
        return keeps


class _Recomputation:
    """The context of a recomputation, in which kept results are given back where the policy holds."""

    def __init__(self, policy: _Policy, again: AbstractContextManager[Any]) -> None:
        self._policy, self._again = policy, again

    def __enter__(self) -> None:
        self._policy.asked_again = 0
        self._entered = self._again if self._policy.holds else nullcontext()
        self._entered.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.__exit__(*error)
