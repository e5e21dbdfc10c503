"""Models that compute parts again by `torch.utils.checkpoint` with `use_reentrant=True`.

Such a part runs without gradients, and can be gone through by `loss.backward()` alone: `torch.autograd.grad`,
which fitting and healing call, raises. Where nothing asks for gradients it warns of that.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils import checkpoint


@contextmanager
def without_reentrant() -> Iterator[None]:
    """Let parts that are called here be computed again as with `use_reentrant=False`.

    Whatever `checkpoint` was imported as, it looks up what is replaced.
    """
    module: Any = checkpoint
    theirs = module.CheckpointFunction
    module.CheckpointFunction = _NotReentrant
    try:
        yield
    finally:
        module.CheckpointFunction = theirs


class _NotReentrant:
    """Stands for torch's function."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        """See torch."""
        return checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve)
