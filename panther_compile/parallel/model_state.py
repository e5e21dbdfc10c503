"""Parameters and buffers of a rank's stages under the user's names: this rank's, or the whole model's."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from panther_compile.errors import CheckpointMismatchError, some_names
from panther_compile.layers.base import Spec, difference_of_specs
from panther_compile.parallel.devices import Devices
from panther_compile.parallel.pieces import whole_shape
from panther_compile.parallel.stage_module import StageModule
from panther_compile.parallel.tensor import join_shards
from panther_compile.partition.shards.placements import Shard


@dataclass(frozen=True)
class Names:
    """The user's names of a model's tensors.

    Attributes:
        first: every name of the model's state dict -> the first name of the same tensor.
        rest: tensors that no stage holds, by first name.
        sketches: the specs of its sketched layers, by name: how factors of the same shapes are read.
    """

    first: Mapping[str, str]
    rest: Mapping[str, Tensor]
    sketches: Mapping[str, Spec]

    def other_sketches(self, saved: Mapping[str, Spec]) -> Iterator[str]:
        """What of a state is of another sketch, one line a layer; what is not known passes.

        Args:
            saved: the specs of the layers that it is of, by name.
        """
        for name, spec in self.sketches.items():
            if shown := difference_of_specs(saved.get(name, spec), spec):
                yield f"{name}: {shown}"


class Holder(Protocol):
    """What holds the stages of a rank."""

    devices: Devices
    names: Names

    @property
    def stages(self) -> Mapping[int, nn.Module]:
        """Stages by index."""

    @property
    def layouts(self) -> Mapping[str, Shard]:
        """Layouts of the parameters that the tp axis divides, by name."""


def held_parameters(stage: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters of a stage under the user's names; tied ones once.

    Args:
        stage: `StageModule`, or the user's own model.
    """
    if isinstance(stage, StageModule):
        yield from stage.held_parameters()
    else:
        yield from stage.named_parameters()


def held_buffers(stage: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers of a stage under the user's names.

    Args:
        stage: `StageModule`, or the user's own model.
    """
    if isinstance(stage, StageModule):
        yield from stage.held_buffers()
    else:
        yield from stage.named_buffers()


def own_state(holder: Holder) -> dict[str, Tensor]:
    """This rank's tensors as they are, under every name that the model has for them."""
    own = _own_tensors(holder)
    return {name: own[first].detach() for name, first in holder.names.first.items() if first in own}


def full_state(holder: Holder) -> dict[str, Tensor]:
    """The whole model's tensors, on the CPU of every rank; every rank has to call this."""
    own = _own_tensors(holder)
    whole = {name: _whole(holder, name, tensor.detach()).cpu() for name, tensor in own.items()}
    parts: list[Any] = [None] * holder.devices.shape.pp
    dist.all_gather_object(parts, whole, group=holder.devices.group("pp"))
    found = {name: tensor.detach().cpu() for name, tensor in holder.names.rest.items()}
    for part in parts:
        found |= part
    state = {name: found[first] for name, first in holder.names.first.items()}
    return with_specs(state, holder.names.sketches)


def specs_of(state: Mapping[str, Tensor]) -> dict[str, Spec]:
    """The specs of sketched layers that a state dict was written with, by name; none of a plain mapping."""
    metadata = getattr(state, "_metadata", {}).items()
    return {name: kept["sketch_spec"] for name, kept in metadata if "sketch_spec" in kept}


def with_specs(state: Mapping[str, Tensor], sketches: Mapping[str, Spec]) -> dict[str, Tensor]:
    """A state dict with what torch hands to each layer beside its tensors: what its factors are.

    Args:
        state: under the user's names.
        sketches: see `Names`.
    """
    found = OrderedDict(state)
    found._metadata = {name: {"sketch_spec": spec} for name, spec in sketches.items()}  # type: ignore[attr-defined]
    return found


@torch.no_grad()
def load_state(holder: Holder, state: Mapping[str, Tensor]) -> None:
    """Copy parameters and buffers in: of the whole model, or what `own_state` gave on this rank.

    Args:
        holder: of this rank's stages.
        state: under the user's names.

    Raises:
        CheckpointMismatchError: a name is none of the model's, or a tensor is missing, of another shape, or
            of another sketch; nothing is changed then.
    """
    for shown in holder.names.other_sketches(specs_of(state)):
        raise CheckpointMismatchError(f"a state for {_stages(holder)}: {shown}")
    own = _own_tensors(holder)
    held = {**holder.names.rest, **own}
    _check_names(holder, state, own)
    values: dict[str, Tensor] = {}
    for name, first in holder.names.first.items():
        if first not in held or name not in state:
            continue
        value, layout, tp = state[name], holder.layouts.get(first), holder.devices.shape.tp
        wanted = whole_shape(held[first], layout, tp)
        if tuple(value.shape) not in (wanted, tuple(held[first].shape)):
            raise CheckpointMismatchError(
                f"{name} of {_stages(holder)} has the shape {wanted}, and {tuple(value.shape)} is given"
            )
        is_divided = layout is not None and tuple(value.shape) == wanted
        values[first] = layout.local(value, tp, holder.devices.tp) if layout and is_divided else value
    copies = list(holder.names.rest.items())
    for stage in holder.stages.values():
        copies += [*held_parameters(stage), *held_buffers(stage)]
    for first, tensor in copies:
        if first in values:
            tensor.copy_(laid_out_like(values[first], tensor))


def _check_names(holder: Holder, state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Check as `nn.Module.load_state_dict` does; a state of this rank alone has no names of other stages.

    Raises:
        CheckpointMismatchError: a name is none of the model's, or is missing.
    """
    first = holder.names.first
    mine = [name for name, one in first.items() if one in own]
    unknown = sorted(set(state) - set(first))
    missing = [name for name in (first if set(state) - set(mine) else mine) if name not in state]
    for names, text in ((unknown, "not in the model"), (missing, "not given")):
        if names:
            raise CheckpointMismatchError(
                f"a state for {_stages(holder)} does not fit the model: {some_names(names)} "
                f"{'is' if len(names) == 1 else 'are'} {text}"
            )


def _whole(holder: Holder, name: str, tensor: Tensor) -> Tensor:
    """The tensor that all ranks of a stage have together."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    layout = holder.layouts.get(name)
    return tensor if layout is None else join_shards(tensor, layout, holder.devices.group("tp"))


def _own_tensors(holder: Holder) -> dict[str, Tensor]:
    """Parameters and buffers of this rank's stages by first name; of several copies, the last."""
    own: dict[str, Tensor] = {}
    for stage in holder.stages.values():
        own |= dict(held_parameters(stage))
        own |= dict(held_buffers(stage))
    return own


def laid_out_like(value: Tensor, tensor: Tensor | None) -> Tensor:
    """A value in the layout of a tensor: in shards where that is.

    Args:
        value: whole, or in shards already.
        tensor: that takes it; None if there is none.
    """
    if isinstance(tensor, DTensor) and not isinstance(value, DTensor):
        value = value.to(tensor.device)
        return distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
    return value


def _stages(holder: Holder) -> str:
    return f"stage {', '.join(map(str, holder.stages))}"
