"""What a pipeline's devices do one after the other, and when: the schedules, and a simulator of events.

Stages are numbered along the model. Device d of D holds stage d, and with interleaving also stages D + d,
2 D + d and so on. Every microbatch runs forward (F) and then backward (B) through every stage, here two
stages and three microbatches:

    gpipe   device 0  F0 F1 F2             B0 B1 B2        all forward, then all backward
            device 1     F0 F1 F2 B0 B1 B2
    1f1b    device 0  F0 F1    B0 F2 B1    B2              a stage holds at most D - d microbatches
            device 1     F0 B0 F1 B1 F2 B2

1f1b is that of PipeDream-Flush (Narayanan et al., ICML 2021), interleaved that of Megatron-LM (Narayanan et
al., SC 2021), which is 1f1b over groups of D microbatches, each group once through every stage of a device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SCHEDULES = ("gpipe", "1f1b", "interleaved")
Counts = NDArray[np.int_]


@dataclass(frozen=True, slots=True)
class Action:
    """Run one microbatch through one stage, forward or backward."""

    kind: str
    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Slot:
    """When an action ran, in seconds from the start of the step."""

    device: int
    action: Action
    start: float
    finish: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """One step of a pipeline.

    Attributes:
        slots: every action, device by device.
        seconds: of the step, what follows the last backward included.
        bubble: share of the devices' time in which they wait, up to the last backward.
    """

    slots: tuple[Slot, ...]
    seconds: float
    bubble: float


def order_actions(
    schedule: str, devices: int, microbatches: int, *, stages_per_device: int = 1, training: bool = True
) -> tuple[tuple[Action, ...], ...]:
    """The actions of each device, in order."""
    if schedule != "interleaved":
        assert stages_per_device == 1, "only the interleaved schedule gives a device several stages"
    total = microbatches * stages_per_device
    orders = []
    for device in range(devices):
        warmup = _warmup(schedule, device, devices, total, stages_per_device) if training else total
        forward = [_nth("F", n, device, devices, stages_per_device) for n in range(total)]
        backward = [_nth("B", n, device, devices, stages_per_device) for n in range(total)]
        order = forward[:warmup]
        if training:
            for pair in zip(forward[warmup:], backward, strict=False):
                order.extend(pair)
            order.extend(backward[total - warmup :])
        orders.append(tuple(order))
    return tuple(orders)


def _nth(kind: str, number: int, device: int, devices: int, stages_per_device: int) -> Action:
    """The n-th forward or backward of a device: groups of as many microbatches as there are devices."""
    if stages_per_device == 1:
        return Action(kind, device, number)
    group, place = divmod(number, devices * stages_per_device)
    turn, offset = divmod(place, devices)
    turn = turn if kind == "F" else stages_per_device - 1 - turn
    return Action(kind, turn * devices + device, group * devices + offset)


def count_in_flight(
    schedule: str, devices: int, microbatches: int, stages_per_device: int = 1
) -> tuple[int, ...]:
    """The most microbatches of each stage that have run forward and wait for their backward.

    After the warmup each step is a forward and then a backward; what that leaves waiting repeats after as
    many steps as a device has stages and the pipeline devices.
    """
    held = [_held(schedule, device, devices, microbatches, stages_per_device) for device in range(devices)]
    return tuple(np.stack([one.max(axis=1) for one in held], axis=1).ravel().tolist())


def peak_bytes(schedule: str, devices: int, microbatches: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """The most that the microbatches take which a device holds at once; its stages do not hold most together.

    Args:
        schedule: its name.
        devices: along the pipeline.
        microbatches: of a step.
        sizes: bytes of a microbatch in each stage.
    """
    of_turn = np.array(sizes, dtype=np.int64).reshape(-1, devices)
    return tuple(
        int((of_turn[:, device] @ _held(schedule, device, devices, microbatches, len(of_turn))).max())
        for device in range(devices)
    )


def _held(schedule: str, device: int, devices: int, microbatches: int, stages_per_device: int) -> Counts:
    """Microbatches that wait in each stage of a device, behind each forward after its warmup: (stages, n)."""
    total = microbatches * stages_per_device
    warmup = _warmup(schedule, device, devices, total, stages_per_device)
    steps = np.arange(max(1, min(total - warmup, devices * stages_per_device)))
    forward = np.minimum(steps + warmup + 1, total)
    return np.stack(
        [
            _of_turn(forward, turn, devices, stages_per_device)
            - _of_turn(steps, stages_per_device - 1 - turn, devices, stages_per_device)
            for turn in range(stages_per_device)
        ]
    )


def _warmup(schedule: str, device: int, devices: int, total: int, stages_per_device: int) -> int:
    """Forwards of a device before those that a backward follows."""
    if schedule == "gpipe":
        return total
    if schedule == "1f1b":
        return min(total, devices - device - 1)
    return min(total, 2 * (devices - device - 1) + (stages_per_device - 1) * devices)


def _of_turn(count: Counts, turn: int, devices: int, stages_per_device: int) -> Counts:
    """How many of the first actions of a device are of its stage of some turn."""
    groups, place = np.divmod(count, devices * stages_per_device)
    found: Counts = groups * devices + np.clip(place - turn * devices, 0, devices)
    return found


def simulate(
    orders: Sequence[Sequence[Action]],
    forward_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    tail_seconds: Sequence[float] = (),
) -> Timeline:
    """Run the orders.

    Args:
        orders: of `order_actions`.
        forward_seconds: of each stage and one microbatch, receiving and sending included.
        backward_seconds: likewise.
        tail_seconds: of each device after its last action, as for reducing gradients.
    """
    last = len(forward_seconds) - 1
    finished: dict[Action, float] = {}
    free = [0.0] * len(orders)
    position = [0] * len(orders)
    slots: list[list[Slot]] = [[] for _ in orders]
    waiting = set(range(len(orders)))
    while waiting:
        before = sum(position)
        for device in sorted(waiting):
            order = orders[device]
            while position[device] < len(order):
                action = order[position[device]]
                needed = _needs(action, last)
                if any(other not in finished for other in needed):
                    break
                start = max([free[device], *(finished[other] for other in needed)])
                spent = forward_seconds if action.kind == "F" else backward_seconds
                finish = start + spent[action.stage]
                finished[action] = free[device] = finish
                slots[device].append(Slot(device, action, start, finish))
                position[device] += 1
            if position[device] == len(order):
                waiting.discard(device)
        assert sum(position) > before, "the schedule waits for itself"
    whole = max(free)
    busy = sum(slot.finish - slot.start for line in slots for slot in line)
    tails = list(tail_seconds) or [0.0] * len(orders)
    return Timeline(
        slots=tuple(slot for line in slots for slot in line),
        seconds=max(end + tail for end, tail in zip(free, tails, strict=True)),
        bubble=1 - busy / (whole * len(orders)) if whole else 0.0,
    )


def _needs(action: Action, last: int) -> tuple[Action, ...]:
    """What has to be finished before an action can start."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind == "F":
        return (Action("F", stage - 1, microbatch),) if stage else ()
    own = Action("F", stage, microbatch)
    return (own, Action("B", stage + 1, microbatch)) if stage < last else (own,)
