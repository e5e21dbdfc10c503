"""One run of the dense model over all batches, before any of them is learnt from."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from panther_compile.calibration.unlike import UNLIKE, NormSums
from panther_compile.kinds.base import Kind
from panther_compile.kinds.targets import find_targets, watch
from panther_compile.models.batches import Call, check_rows, kept_positions, run_dense
from panther_compile.models.surroundings import without_fast_attention
from panther_compile.records import Site


@dataclass(frozen=True, slots=True)
class FirstLook:
    """What a run over all batches shows.

    Attributes:
        repeated: names of the layers that one of the batches calls more than once.
        hidden: names of those called under a transform of `torch.func`, where their input cannot be read.
        off: how far they are off the statistics of batch norms, see `off_batch_norms`.
    """

    repeated: frozenset[str] = frozenset()
    hidden: frozenset[str] = frozenset()
    off: float = 0.0

    @property
    def unlike(self) -> str:
        """What is said of data of another kind than the model was trained on; empty if it is not."""
        if not self.off > UNLIKE:
            return ""
        return (
            "the data is unlike what the model was trained on: it is off the statistics of its batch norms "
            f"by {self.off:.2g}, where {UNLIKE} is much, and is not used"
        )


@without_fast_attention()
def look_at(model: nn.Module, sites: Iterable[tuple[Site, Kind]], calls: Sequence[Call]) -> FirstLook:
    """Run the dense model over all batches.

    Batches made up beside data are left out: the model is known to run on them.

    Args:
        model: the dense model; is not changed, nor is its mode.
        sites: layers to be sketched, with their kinds.
        calls: the data.

    Raises:
        ConfigTypeError: the model cannot be copied.
        DataError: the model raises on a batch, or NaN or Inf reaches a layer.
    """
    if not calls:
        return FirstLook()
    targets, _ = find_targets([site for site, _ in sites])
    side, repeated = watch(model, targets), set[str]()
    norms = NormSums(side.model)
    for call in [call for call in calls if call.place is not None] or calls:
        kept, called = kept_positions(side.model, call), set[str]()

        def see(
            name: str,
            x: Tensor,
            kept: Tensor | None = kept,
            call: Call = call,
            called: set[str] = called,
        ) -> None:
            (repeated if name in called else called).add(name)
            check_rows(targets[name].rows(x, kept), name, call)

        with norms.seen(), side.seen_by(see), torch.no_grad():
            run_dense(side.model, call)
    hidden = frozenset(name for name, one in side.watched.items() if one.hidden)
    return FirstLook(frozenset(repeated), hidden, norms.off())
