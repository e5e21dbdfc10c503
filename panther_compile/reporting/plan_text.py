"""Plans in words: what divided the budget, and how fast the whole model is."""

from collections.abc import Mapping

from panther_compile.reporting.layer_table import Column
from panther_compile.reporting.tables import number, share

PLAN_COLUMNS: tuple[Column, ...] = (
    ("layer", "left", lambda line: line.name or "(model)"),
    ("kind", "left", lambda line: line.kind),
    ("shape", "left", lambda line: "x".join(map(str, line.shape))),
    ("scheme", "left", lambda line: line.choice.scheme if line.choice else "dense"),
    ("rank", "right", lambda line: "x".join(map(str, line.choice.ranks)) if line.choice else ""),
    ("dense", "right", lambda line: f"{line.dense_numbers:,}"),
    ("stored", "right", lambda line: f"{line.stored_numbers:,}"),
    ("ratio", "right", lambda line: share(line.stored_numbers, line.dense_numbers)),
    ("weight error", "right", lambda line: number(line.choice.error if line.choice else None)),
    ("why", "left", lambda line: "; ".join(filter(None, (line.shared_text, line.reason)))),
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
