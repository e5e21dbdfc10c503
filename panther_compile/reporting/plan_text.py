"""Plans in words: what divided the budget, and how fast the whole model is."""

from collections.abc import Mapping

PLAN_COLUMNS = (
    ("layer", "left"),
    ("kind", "left"),
    ("shape", "left"),
    ("scheme", "left"),
    ("rank", "right"),
    ("dense", "right"),
    ("stored", "right"),
    ("ratio", "right"),
    ("weight error", "right"),
    ("why", "left"),
)


def allocation_text(allocation: str, tried: Mapping[str, float], undecided: str = "") -> str:
    """How the budget was divided, and what each allocation tried came to; empty without data."""
    scores = ", ".join(f"{name} {distance:.3g}" for name, distance in tried.items())
    distances = f"; distance from the dense model on held-out data: {scores}" if tried else ""
    noted = f"; {undecided}" if undecided else ""
    return f"ranks divided by {allocation}{distances}{noted}" if allocation else ""


def seconds_text(seconds: Mapping[str, float]) -> str:
    """How fast the whole model is; empty where that was not timed."""
    if not seconds:
        return ""
    dense, sketched = seconds["dense"], seconds["sketched"]
    return (
        f"whole model, timed here: {sketched * 1e3:.3g} ms, dense {dense * 1e3:.3g} ms, "
        f"{dense / sketched:.2f}x"
    )
