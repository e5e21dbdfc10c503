"""Progress bars that leave nothing behind."""

import threading

from tqdm import tqdm


class ProgressBar(tqdm):  # type: ignore[type-arg]
    """tqdm's bar without the thread that watches bars, which would stay for the life of the process.

    Its lock is of this process alone: tqdm's own is shared with forked ones, and stays taken if one dies.
    """

    monitor_interval = 0
    _lock = threading.RLock()
