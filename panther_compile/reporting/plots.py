"""Pictures for people: what `report.plot` and `curve.plot` draw. matplotlib is loaded when one is drawn."""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

from panther_compile.errors import ConfigError, MissingExtraError
from panther_compile.storage import checked_path, replace_file

_BLUE, _ORANGE, _GREY, _PALE = "#4878a8", "#d9822b", "#8a8a8a", "#dbe4ec"
_MARKS = (("o", _BLUE, _BLUE), ("o", "white", _ORANGE), ("|", _GREY, None))  # marker, face, edge
_EDGE = 1.0  # errors beyond that are written, so that one layer does not squeeze all the others
_LONGEST = 44  # characters of a name
_ROW = 0.165  # inches for each layer


def new_figure(width: float, height: float) -> Any:
    """An empty figure of matplotlib; inches.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            'pictures need matplotlib: pip install "panther-compile[plot]"', name=error.name
        ) from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: str | PathLike[str], *, dpi: int) -> None:
    """Write a figure, whole or not at all; its kind is that of the file name, PNG if that has none.

    Raises:
        ConfigError: it is of no kind that matplotlib writes, or the file cannot be written.
        ConfigTypeError: the path is none.
    """
    place = checked_path(path, "path")
    kind, kinds = place.suffix.removeprefix(".").lower(), figure.canvas.get_supported_filetypes()
    if not place.name or kind not in ("", *kinds):
        raise ConfigError(
            f"path={str(path)!r}, wanted the name of a file that ends in one of {', '.join(kinds)}"
        )
    if not kind:
        kind, place = "png", place.with_name(f"{place.name.rstrip('.')}.png")
    try:
        replace_file(place, lambda draft: figure.savefig(draft, dpi=dpi, format=kind))
    except OSError as error:
        raise ConfigError(f"cannot write the picture {path}: {error}") from error


def draw_layers(
    title: str,
    names: Sequence[str],
    kept: Sequence[float],
    errors: Mapping[str, Sequence[float | None]],
    sensitivity: Sequence[float | None],
    path: str | PathLike[str],
) -> None:
    """One row for each layer: the share that is kept, the errors, and the sensitivity where there is one.

    Args:
        title: above the picture.
        names: of the layers.
        kept: stored over dense numbers.
        errors: relative, by what they are of; None where unknown.
        sensitivity: drawn on a logarithmic axis; None where unknown.
        path: of the file.
    """
    has_sensitivity = any(sensitivity)
    widths = (2.2, 3.4, 1.8) if has_sensitivity else (2.2, 3.4)
    figure = new_figure(11, 1.7 + _ROW * len(names))
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    axes = figure.subplots(1, len(widths), sharey=True, squeeze=False, width_ratios=widths)[0]
    places = range(len(names))

    axes[0].barh(places, [1.0] * len(names), color=_PALE, height=0.72)
    axes[0].barh(places, kept, color=_BLUE, height=0.72)
    axes[0].set(xlim=(0, 1), ylim=(max(len(names), 1) - 0.5, -0.5), yticks=places)
    axes[0].set_xlabel("stored share", fontsize=8)
    axes[0].set_yticklabels([_short(name) for name in names], fontsize=7)

    beyond: dict[int, list[str]] = {}
    for (label, values), (marker, face, edge) in zip(errors.items(), _MARKS, strict=False):
        known = [(value, place) for place, value in enumerate(values) if value is not None]
        if known:
            found, rows = zip(*((min(value, _EDGE), place) for value, place in known), strict=True)
            axes[1].scatter(found, rows, s=20, marker=marker, c=face, edgecolors=edge, label=label, zorder=2)
        for value, place in known:
            if value > _EDGE:
                beyond.setdefault(place, []).append(f"{value:.3g}")
    for place, texts in beyond.items():
        axes[1].text(_EDGE + 0.02, place, ", ".join(texts), fontsize=7, va="center", color="#555555")
    axes[1].set_xlim(0, _EDGE + 0.12)
    axes[1].set_xlabel("relative error; what is off the scale is written at its end", fontsize=8)
    if axes[1].collections:
        figure.legend(
            *axes[1].get_legend_handles_labels(),
            fontsize=8,
            ncols=3,
            frameon=False,
            loc="outside upper right",
        )

    if has_sensitivity:
        places_of = [place for place, value in enumerate(sensitivity) if value]
        axes[2].scatter([sensitivity[place] for place in places_of], places_of, s=18, color=_BLUE)
        axes[2].set(xscale="log")
        axes[2].set_xlabel("sensitivity (log)", fontsize=8)
    is_tall = len(names) > 60  # the axes are then named where reading starts
    for place, axis in enumerate(axes):
        axis.tick_params(axis="x", labelsize=7, top=is_tall, labeltop=is_tall)
        axis.xaxis.set_label_position("top" if is_tall else "bottom")
        axis.tick_params(axis="y", length=0)
        axis.spines[["top", "right", "left"]].set_visible(False)
        if place:
            axis.set_axisbelow(True)
            axis.grid(color="#ececec", linewidth=0.6)
    save_figure(figure, path, dpi=130)


def draw_curve(
    points: Sequence[tuple[float, float]],
    passes: Sequence[bool],
    dense_score: float,
    least_score: float,
    path: str | PathLike[str],
) -> None:
    """The scores over the ratios, and the lines of the dense score and of the least that is wanted.

    Args:
        points: (ratio, score), by rising ratio.
        passes: whether the score of each is enough; the first that is was chosen.
        dense_score: of the dense model.
        least_score: that is enough.
        path: of the file.
    """
    figure = new_figure(7, 4.2)
    axis = figure.add_subplot()
    axis.plot(*zip(*points, strict=True), color=_GREY, linewidth=1, zorder=1)
    for enough, color, label in ((True, _BLUE, "within max_drop"), (False, _ORANGE, "below it")):
        some = [point for point, ok in zip(points, passes, strict=True) if ok is enough]
        if some:
            ratios, scores = zip(*some, strict=True)
            axis.scatter(ratios, scores, color=color, s=32, label=label, zorder=2)
    axis.axhline(dense_score, color=_GREY, linewidth=1, label="dense")
    axis.axhline(least_score, color=_GREY, linewidth=1, linestyle="--", label="dense less max_drop")
    if any(passes):
        ratio, score = points[passes.index(True)]
        axis.scatter([ratio], [score], s=130, facecolors="none", edgecolors=_BLUE, zorder=3)
        axis.annotate(
            f"{ratio:.2f}",
            (ratio, score),
            textcoords="offset points",
            xytext=(8, -14),
            fontsize=9,
            color=_BLUE,
        )
    axis.set(xlabel="ratio", ylabel="score", xlim=(0, 1))
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, loc="lower right", frameon=False)
    save_figure(figure, path, dpi=130)


def _short(name: str) -> str:
    """The end of a long name, which tells layers apart better than its beginning."""
    return name if len(name) <= _LONGEST else "…" + name[1 - _LONGEST :].lstrip(".")
