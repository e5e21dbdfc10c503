"""Runs of the dense model over the data: what reaches some of its layers, added up."""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from panther_compile.calibration.shared_input import InputGroups
from panther_compile.calibration.ties import Ties
from panther_compile.factorization.moments import MomentSums
from panther_compile.kinds.kernel_metric import KernelSums
from panther_compile.kinds.table import TableSums
from panther_compile.kinds.targets import Target
from panther_compile.models.batches import Call, check_rows, kept_positions, run_dense
from panther_compile.models.watched import Side
from panther_compile.reporting.progress import ProgressBar


@dataclass(frozen=True)
class DataPass:
    """The model and the data that it is run on, once for each group of layers.

    Attributes:
        side: a copy of the model that watches the layers.
        calls: the data.
        ties: sums of layers whose tables others use too; what reaches those is added to them.
        repeated: layers that a batch calls more than once, whose moments no other layer has.
        progress: whether to show a bar; None shows it on a terminal.
    """

    side: Side
    calls: Sequence[Call]
    ties: Ties
    repeated: Container[str]
    progress: bool | None

    def over(self, targets: Mapping[str, Target]) -> "Arrived":
        """Run the model; what reached some layers.

        Args:
            targets: the layers, by name.

        Raises:
            DataError: NaN or Inf reaches a layer; the message names layer and batch.
        """
        arrived = Arrived(targets)
        followers = [
            other for target in targets.values() for other in target.ties if other in self.ties.views
        ]
        for place, call in enumerate(ProgressBar(self.calls, desc="moments", progress=self.progress)):
            kept = kept_positions(self.side.model, call)
            see = partial(arrived.see, place=place, call=call, kept=kept, seen={}, repeated=self.repeated)
            add = partial(self.ties.add, kept=kept)
            with (
                self.side.seen_by(see, arrived.size, targets),
                self.side.seen_by(add, names=followers),
                torch.no_grad(),
            ):
                run_dense(self.side.model, call)
        return arrived


@dataclass
class Arrived:
    """What reached some layers.

    Attributes:
        targets: the layers, by name.
        rows: how many reached each.
        power: sum of the squared outputs of a row, of kernels.
        others: sums of kernels and tables, by name; a layer that needs none is missing.
        inputs: which layers were given the same tensors.
    """

    targets: Mapping[str, Target]
    rows: dict[str, int] = field(default_factory=dict)
    power: dict[str, float] = field(default_factory=dict)
    others: dict[str, KernelSums | TableSums] = field(init=False)
    inputs: InputGroups = field(default_factory=InputGroups)
    _sums: dict[str, MomentSums] = field(default_factory=dict)
    _same_as: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        views = {name: target.view for name, target in self.targets.items() if not target.view.is_matrix}
        self.others = {name: made for name, view in views.items() if (made := view.input_sums()) is not None}

    def moments(self) -> Iterator[tuple[str, MomentSums]]:
        """Second moments of the inputs of matrices; layers that are given the same tensor share them."""
        for name in self.targets:
            if (first := self._same_as.get(name, name)) in self._sums:
                yield name, self._sums[first]

    def size(self, name: str, out: Tensor) -> Tensor:
        """Note how large the outputs of a kernel are."""
        view = self.targets[name].view
        if not view.is_matrix:
            rows = max(1, out.numel() // out.shape[view.channel_dim])
            self.power[name] = float(out.double().square().sum()) / rows
        return out

    def see(
        self,
        name: str,
        x: Tensor,
        *,
        place: int,
        call: Call,
        kept: Tensor | None,
        seen: dict[int, tuple[str, Tensor]],
        repeated: Container[str],
    ) -> None:
        """Add what reaches a layer.

        Args:
            name: of the layer.
            x: its input.
            place: of the batch in the data.
            call: the batch.
            kept: see `Target.rows`.
            seen: what reached layers in this batch, by address; held, so that none is used again.
            repeated: see `DataPass`.
        """
        target = self.targets[name]
        rows = target.rows(x, kept)
        if not len(rows):  # of an expert that no token is routed to
            return
        check_rows(rows, name, call)
        self.rows[name] = self.rows.get(name, 0) + len(rows)
        self.inputs.see(place, name, x)
        if not target.view.is_matrix:
            sums = self.others.get(name)
            if isinstance(sums, TableSums):
                sums.add(rows)
            elif sums is not None:
                sums.add(x)
            return
        first, _ = (name, x) if name in repeated else seen.setdefault(id(x), (name, x))
        if name not in self._sums and first != name and target.view.is_linear:
            self._same_as.setdefault(name, first)
        if self._same_as.get(name) != first:
            if name not in self._sums:
                self._sums[name] = MomentSums(rows.shape[1], rows.device)
            self._sums[name].add(rows, rows)
