"""Progress bars that leave nothing behind."""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from tqdm import tqdm

T = TypeVar("T")
_BY_WORK = "{desc}: {percentage:3.0f}%|{bar}| {postfix[0]}/{postfix[1]} [{elapsed}<{remaining}]"


class ProgressBar(tqdm):  # type: ignore[type-arg]
    """tqdm's bar without the thread that watches bars, which would stay for the life of the process.

    Its lock is of this process alone: tqdm's own is shared with forked ones, and stays taken if one dies.

    Args:
        progress: whether to show it; None shows it on a terminal.
        *args, **options: of tqdm.
    """

    monitor_interval = 0
    _lock = threading.RLock()

    def __init__(self, *args: Any, progress: bool | None = None, **options: Any) -> None:
        """Make one as tqdm does, that is gone from the screen once it is through."""
        super().__init__(*args, leave=False, disable=_is_hidden(progress), **options)


def _is_hidden(progress: bool | None) -> bool:
    if progress is not None:
        return not progress
    return sys.stderr is None or not sys.stderr.isatty()  # a process without a console has none


def with_progress(
    items: Sequence[T], work: Callable[[T], float], *, desc: str, progress: bool | None
) -> Iterator[T]:
    """Items behind a bar, whose time left goes by the work that each is, not by their number."""
    if _is_hidden(progress):
        yield from items
        return
    todo = [work(item) for item in items]
    count = [0, len(items)]
    # The mean of all that was done: the pace of the last item is that of its shape.
    options: dict[str, Any] = dict(bar_format=_BY_WORK, postfix=count, smoothing=0)
    with ProgressBar(total=sum(todo), desc=desc, progress=True, **options) as bar:
        for item, done in zip(items, todo, strict=True):
            yield item
            count[0] += 1
            bar.update(done)
