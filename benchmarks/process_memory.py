"""Memory of this process, as Linux counts it."""

from pathlib import Path


def process_memory(kind: str) -> float:
    """Bytes: now (VmRSS), of that its own (RssAnon), or at the peak (VmHWM); NaN where no system tells.

    getrusage would start from the peak of the parent process.
    """
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    found = (float(line.split()[1]) * 1024 for line in lines if line.startswith(f"{kind}:"))
    return next(found, float("nan"))


def watch_peak() -> None:
    """Have the peak be that from here on."""
    Path("/proc/self/clear_refs").write_text("5")
