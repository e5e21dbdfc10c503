"""Layers that one forward calls several times: recurrent weights, layers that blocks or levels share.

The lockstep pauses at a layer's first call, which may be like no other: the state that an LSTM begins with
is zero. So these are fitted to all their calls in the dense model, x = z. What reaches them in the sketched
model depends on themselves, and is not known before they are there.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from panther_compile.factorization.moments import MomentSums
from panther_compile.kinds.targets import Target, watch
from panther_compile.models.batches import Call, run_dense
from panther_compile.models.watched import Arrival, Side

MAX_BYTES = 1 << 30  # of the inputs of kernels; the first ones tell enough


@dataclass(frozen=True, slots=True)
class Repeated:
    """What reaches such layers in all their calls, by name.

    Attributes:
        sums: second moments of the inputs of matrices.
        arrivals: inputs of kernels.
    """

    sums: dict[str, MomentSums] = field(default_factory=dict)
    arrivals: dict[str, list[Arrival]] = field(default_factory=dict)


def see_repeated(
    model: nn.Module,
    targets: Mapping[str, Target],
    names: Iterable[str],
    calls: Sequence[Call],
    masks: Sequence[Tensor | None],
) -> Repeated:
    """Run the dense model over the data, unless there are no such layers.

    Args:
        model: the dense model; is not changed.
        targets: by name.
        names: of the layers that are called several times; others than the targets do not count.
        calls: the data.
        masks: of each batch, see `batches.kept_positions`.
    """
    found, held = Repeated(), 0
    repeated = {name: targets[name] for name in names if name in targets}
    if not repeated:
        return found
    side = watch(model, repeated)
    for place, call in enumerate(calls):

        def see(name: str, x: Tensor, place: int = place) -> None:
            nonlocal held
            if not targets[name].view.is_matrix:
                if held <= MAX_BYTES:
                    held += x.nbytes
                    found.arrivals.setdefault(name, []).append(Arrival(place, x, x))
                return
            rows = targets[name].rows(x, masks[place])
            if len(rows):
                sums = found.sums.setdefault(name, MomentSums(rows.shape[1], rows.device))
                sums.add(rows, rows)

        with side.seen_by(see), torch.no_grad():
            run_dense(side.model, call)
    return found


def every_call(side: Side, calls: Sequence[Call]) -> dict[str, list[Arrival]]:
    """What reaches the watched layers that a batch calls several times, up to `MAX_BYTES`, by name.

    Args:
        side: a copy of the dense model; watches nothing afterwards.
        calls: the data.
    """
    found, held = dict[str, list[Arrival]](), 0
    repeated = _called_again(side, calls)

    for place, call in enumerate(calls if repeated else ()):

        def see(name: str, x: Tensor, place: int = place) -> None:
            nonlocal held
            if x.numel() and held <= MAX_BYTES:
                held += x.nbytes
                found.setdefault(name, []).append(Arrival(place, x, x))

        with side.seen_by(see, names=repeated), torch.no_grad():
            call.run(side.model)
    return found


def _called_again(side: Side, calls: Sequence[Call]) -> frozenset[str]:
    """The names of the watched layers that one of the batches calls more than once."""
    repeated = set[str]()
    for call in calls:
        called = set[str]()

        def see(name: str, x: Tensor, called: set[str] = called) -> None:
            (repeated if name in called else called).add(name)

        with side.seen_by(see), torch.no_grad():
            call.run(side.model)
    return frozenset(repeated)
