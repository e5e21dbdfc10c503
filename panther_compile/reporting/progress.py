"""Progress bars that leave nothing behind."""

from tqdm import tqdm


class ProgressBar(tqdm):  # type: ignore[type-arg]
    """tqdm's bar without the thread that watches bars, which would stay for the life of the process."""

    monitor_interval = 0
