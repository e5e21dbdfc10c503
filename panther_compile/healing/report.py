"""What healing did: kept on the model it healed."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torch import nn

from panther_compile.errors import NoTargetError
from panther_compile.records import Fitted, kept_attribute
from panther_compile.reporting.tables import counted, render_table

HEALING_ATTRIBUTE = "_panther_healing"
HEALED_SINCE = "healed since, the errors are those before"


@dataclass(frozen=True, slots=True)
class HealReport:
    """Losses on batches that were never trained on, before and after.

    Attributes:
        before: losses at each landmark, and under "output" of the model's result.
        after: the same for the state that was kept.
        steps: number of steps that were taken.
        kept_step: after which of them the state was the best; 0 if none improved on the start, which is then
            what was kept.
        stopped: why healing ended.
        batches: trained on, and held out.
        lr: the rate of the last steps, see `heal`.
        blocks_reverted: landmarks whose layers are as they were, as the model does better with them so.
    """

    before: dict[str, float]
    after: dict[str, float]
    steps: int
    kept_step: int
    stopped: str
    batches: tuple[int, int]
    lr: float
    blocks_reverted: tuple[str, ...] = ()

    @property
    def reverted(self) -> bool:
        """Whether the model is as it was, as no step made it better."""
        return self.kept_step == 0

    def line(self) -> str:
        """How much closer the result came, in a line."""
        before, after = self.before["output"], self.after["output"]
        return (
            f"healed: {self.steps} steps, the one after {self.kept_step} kept; held-out loss of the outputs "
            f"{before:.5f} to {after:.5f}"
        )

    def __str__(self) -> str:
        """A table: one line for each landmark and the result."""
        names = dict.fromkeys((*self.before, *self.after))
        rows = [(name, *(_written(losses, name) for losses in (self.before, self.after))) for name in names]
        footer = (
            f"{self.steps} steps on {counted(self.batches[0], 'batch')}, {self.batches[1]} held out, "
            f"at last at a rate of {self.lr:g}; {self.stopped}",
            "no step improved on the start: nothing was changed"
            if self.reverted
            else f"kept: the state after step {self.kept_step}",
            *(f"{name}: got worse, as it was before" for name in self.blocks_reverted),
        )
        columns = (("held-out loss at", "left"), ("before", "right"), ("after", "right"))
        return render_table("Healing", columns, rows, footer)


def _written(losses: Mapping[str, float], name: str) -> str:
    return f"{losses[name]:.5f}" if name in losses else ""


def heal_report(model: nn.Module) -> HealReport:
    """What `heal` did to a model.

    Raises:
        ConfigTypeError: it is no `nn.Module`.
        NoTargetError: it was never healed, or loaded from a file since.
    """
    report: HealReport | None = kept_attribute(model, HEALING_ATTRIBUTE)
    if report is None:
        raise NoTargetError(f"{type(model).__name__} holds no report of healing: call heal first")
    return report


def noted_as_healed(fitted: Mapping[str, Fitted], reverted: Iterable[str] = ()) -> dict[str, Fitted]:
    """What came of the layers, which says that they were healed since.

    Args:
        fitted: by the name of the layer.
        reverted: names of blocks whose layers are as they were.
    """
    inside = tuple(f"{name}." for name in reverted)
    return {name: one if f"{name}.".startswith(inside) else _healed(one) for name, one in fitted.items()}


def _healed(one: Fitted) -> Fitted:
    return replace(one, note="; ".join(dict.fromkeys(filter(None, (one.note, HEALED_SINCE)))))
