"""How the score of a model depends on its ratio."""

import math
from dataclasses import dataclass
from os import PathLike

from panther_compile.reporting.plots import draw_curve
from panther_compile.reporting.tables import render_table


@dataclass(frozen=True, slots=True)
class RatioCurve:
    """How the score of a model depends on its ratio, as far as it was measured.

    Attributes:
        points: (ratio, score), in the order in which they were measured.
        dense_score: of the dense model; higher is better.
        max_drop: how far below that a score may be.
        ratio: that was chosen, the smallest one measured that passes; None if none does.
    """

    points: tuple[tuple[float, float], ...]
    dense_score: float
    max_drop: float
    ratio: float | None

    def passes(self, score: float) -> bool:
        """Whether a score is within the drop, rounding forgiven."""
        return score >= self.dense_score - self.max_drop - 1e-12 * max(1.0, abs(self.dense_score))

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw the scores over the ratios (needs matplotlib); the kind of the picture is the file name's."""
        points = sorted(point for point in self.points if math.isfinite(point[1]))
        passes = [self.passes(score) for _, score in points]
        draw_curve(points, passes, self.dense_score, self.dense_score - self.max_drop, path)

    def __str__(self) -> str:
        """A table: one line for each ratio, then what was wanted."""
        rows = [
            (
                f"{ratio:.2f}",
                f"{score:.6g}",
                f"{self.dense_score - score:.3g}",
                "chosen" if ratio == self.ratio else "passes" if self.passes(score) else "",
            )
            for ratio, score in sorted(self.points)
        ]
        columns = (("ratio", "right"), ("score", "right"), ("drop", "right"), ("", "left"))
        footer = (f"dense score {self.dense_score:.6g}, max_drop {self.max_drop:g}",)
        return render_table("Score by ratio", columns, rows, footer)
