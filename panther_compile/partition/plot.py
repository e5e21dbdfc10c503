"""A partition as a picture: what each stage costs, and the schedule in time."""

from collections.abc import Sequence
from os import PathLike

from panther_compile.partition.records import Stage
from panther_compile.partition.stages.schedule import Timeline
from panther_compile.reporting.plots import new_figure, save_figure

_PARTS = (
    ("forward", "forward_seconds", "#4878a8"),
    ("backward", "backward_seconds", "#e0a458"),
    ("receive", "receive_seconds", "#9c9c9c"),
    ("send", "send_seconds", "#c8c8c8"),
)
_MEMORY = (
    ("parameters", "parameter_bytes", "#4878a8"),
    ("gradients", "gradient_bytes", "#8fb4d4"),
    ("optimizer", "optimizer_bytes", "#c5d9ea"),
)


def draw(title: str, stages: Sequence[Stage], timeline: Timeline, path: str | PathLike[str]) -> None:
    """Write the picture; its kind is that of the file name.

    Args:
        title: above it.
        stages: along the model.
        timeline: of one step.
        path: of the file.
    """
    devices = 1 + max(slot.device for slot in timeline.slots)
    figure = new_figure(11, 4.6 + 0.35 * devices)
    grid = figure.add_gridspec(2, 2, height_ratios=(3.2, 1.2 + 0.45 * devices))
    figure.suptitle(title, fontsize=10)
    places = [stage.index for stage in stages]

    left = figure.add_subplot(grid[0, 0])
    below = [0.0] * len(stages)
    for label, attribute, color in _PARTS:
        heights = [getattr(stage, attribute) * 1e3 for stage in stages]
        left.bar(places, heights, bottom=below, label=label, color=color)
        below = [base + height for base, height in zip(below, heights, strict=True)]
    left.set(xlabel="stage", ylabel="ms for each microbatch", xticks=places)
    left.margins(y=0.2)
    left.legend(fontsize=7, ncols=len(_PARTS), loc="upper center")

    right = figure.add_subplot(grid[0, 1])
    below = [0.0] * len(stages)
    for label, attribute, color in _MEMORY:
        heights = [getattr(stage, attribute) / 1e6 for stage in stages]
        right.bar(places, heights, bottom=below, label=label, color=color)
        below = [base + height for base, height in zip(below, heights, strict=True)]
    rest = [stage.memory_bytes / 1e6 - base for stage, base in zip(stages, below, strict=True)]
    right.bar(places, rest, bottom=below, label="activations in flight, buffers", color="#e0a458")
    right.set(xlabel="stage", ylabel="MB at the peak", xticks=places)
    right.margins(y=0.2)
    right.legend(fontsize=7, ncols=2, loc="upper center")

    gantt = figure.add_subplot(grid[1, :])
    for slot in timeline.slots:
        is_forward = slot.action.kind == "F"
        shade = 1.0 if (slot.action.stage // devices) % 2 == 0 else 0.6
        gantt.barh(
            slot.device,
            (slot.finish - slot.start) * 1e3,
            left=slot.start * 1e3,
            color="#4878a8" if is_forward else "#e0a458",
            alpha=shade,
            edgecolor="white",
            linewidth=0.5,
        )
        if len(timeline.slots) <= 200:
            middle = (slot.start + slot.finish) / 2 * 1e3
            gantt.text(middle, slot.device, str(slot.action.microbatch), ha="center", va="center", fontsize=6)
    gantt.set(
        xlabel=f"ms; forward blue, backward orange, number of the microbatch; bubble {timeline.bubble:.1%}",
        ylabel="device",
        yticks=range(devices),
        ylim=(devices - 0.5, -0.5),
        xlim=(0, timeline.seconds * 1e3),
    )
    save_figure(figure, path, dpi=100)
