"""The user's own `torch.utils.checkpoint` calls, which an exporter would drop without a word.

torch.export   nodes are marked with the number of the call that they ran in, so that a stage can compute them
               again as the model would
torch.fx       cannot mark them, and refuses
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx
from torch.fx.traceback import annotate, preserve_node_meta
from torch.utils import checkpoint

from panther_compile.errors import CaptureError

_KEY = "recomputed"
# What calls without reentrance go through: since torch 2.15 the first of these, before that the other.
_GENERATORS = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")
_GENERATOR = next(name for name in _GENERATORS if hasattr(checkpoint, name))


def recomputed_region(node: fx.Node) -> int | None:
    """The number of the `checkpoint` call that a node ran in; None outside of any."""
    number = (node.meta.get("custom") or {}).get(_KEY)
    return number if isinstance(number, int) else None


@contextmanager
def checkpoints_marked() -> Iterator[None]:
    """Let nodes that are captured in here know the `checkpoint` call that they run in.

    Both kinds of calls run as plain ones: with `use_reentrant=True` torch runs a call without gradients, and
    a graph would have lost them.
    """
    numbers = itertools.count()

    def apply(function: Any, preserve: Any, *args: Any) -> Any:
        with annotate({_KEY: next(numbers)}):
            return function(*args)

    def generate(*args: Any, **kwargs: Any) -> Iterator[None]:
        with annotate({_KEY: next(numbers)}):
            yield

    with _in_place_of_torch(apply, generate), preserve_node_meta():
        yield


@contextmanager
def checkpoints_refused() -> Iterator[None]:
    """Raise a `CaptureError` where the model calls `checkpoint`."""

    def refuse(function: Any, *args: Any, **kwargs: Any) -> Any:
        name = getattr(function, "__qualname__", None) or type(function).__name__
        raise CaptureError(
            f"torch.utils.checkpoint of {name}, which torch.fx cannot keep: turn it off (of a Hugging Face "
            "model by gradient_checkpointing_disable()), and give activation_checkpointing= to "
            "parallelize_model"
        )

    with _in_place_of_torch(refuse, refuse):
        yield


@contextmanager
def _in_place_of_torch(apply: Any, generate: Any) -> Iterator[None]:
    """What `checkpoint` calls in either kind of call, wherever it was imported to."""
    reentrant, plain = checkpoint.CheckpointFunction, getattr(checkpoint, _GENERATOR)
    checkpoint.CheckpointFunction = type("Apply", (), {"apply": staticmethod(apply)})  # type: ignore[assignment,misc]
    setattr(checkpoint, _GENERATOR, generate)
    try:
        yield
    finally:
        checkpoint.CheckpointFunction = reentrant  # type: ignore[assignment,misc]
        setattr(checkpoint, _GENERATOR, plain)
