import pytest

from panther_compile.partition.stages.schedule import count_in_flight, order_actions, peak_bytes, simulate


def run(schedule, devices, microbatches, stages_per_device=1, forward=1.0, backward=2.0):
    orders = order_actions(schedule, devices, microbatches, stages_per_device=stages_per_device)
    stages = devices * stages_per_device
    return orders, simulate(orders, [forward] * stages, [backward] * stages)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("devices", "microbatches"), [(1, 1), (2, 3), (4, 8), (4, 2)])
def test_equal_stages_take_the_known_time(schedule, devices, microbatches):
    _, timeline = run(schedule, devices, microbatches)
    assert timeline.seconds == pytest.approx((microbatches + devices - 1) * 3.0)
    assert timeline.bubble == pytest.approx((devices - 1) / (microbatches + devices - 1))


@pytest.mark.parametrize(("devices", "microbatches"), [(2, 4), (4, 8), (4, 16)])
def test_interleaving_divides_the_bubble(devices, microbatches):
    _, plain = run("1f1b", devices, microbatches)
    _, interleaved = run("interleaved", devices, microbatches, 2, 0.5, 1.0)
    waiting = (devices - 1) * 3.0
    assert plain.seconds == pytest.approx(microbatches * 3.0 + waiting)
    assert interleaved.seconds == pytest.approx(microbatches * 3.0 + waiting / 2)


@pytest.mark.parametrize(
    ("schedule", "stages_per_device"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)]
)
def test_every_action_runs_once(schedule, stages_per_device):
    orders, timeline = run(schedule, 3, 6, stages_per_device)
    actions = [slot.action for slot in timeline.slots]
    assert len(actions) == len(set(actions)) == 2 * 6 * 3 * stages_per_device
    assert all(action.stage % 3 == device for device, order in enumerate(orders) for action in order)


def test_microbatches_in_flight():
    assert count_in_flight("gpipe", 3, 5) == (5, 5, 5)
    assert count_in_flight("1f1b", 3, 5) == (3, 2, 1)
    assert count_in_flight("1f1b", 3, 2) == (2, 2, 1)


@pytest.mark.parametrize("devices", [1, 2, 5])
@pytest.mark.parametrize("microbatches", [5, 10, 30])
@pytest.mark.parametrize(
    ("schedule", "stages_per_device"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)]
)
def test_as_many_are_in_flight_as_one_counts(schedule, devices, microbatches, stages_per_device):
    orders = order_actions(schedule, devices, microbatches, stages_per_device=stages_per_device)
    peak = [0] * devices * stages_per_device
    for order in orders:
        held = [0] * len(peak)
        for action in order:
            held[action.stage] += 1 if action.kind == "F" else -1
            peak[action.stage] = max(peak[action.stage], held[action.stage])
    assert count_in_flight(schedule, devices, microbatches, stages_per_device) == tuple(peak)


@pytest.mark.parametrize(("devices", "stages_per_device"), [(2, 1), (2, 2), (3, 4)])
def test_stages_of_a_device_do_not_peak_together(devices, stages_per_device):
    sizes = [7 * number % 5 + 1 for number in range(devices * stages_per_device)]
    schedule = "interleaved" if stages_per_device > 1 else "1f1b"
    most = []
    for order in order_actions(schedule, devices, 12, stages_per_device=stages_per_device):
        held = [0]
        for action in order:
            held.append(held[-1] + sizes[action.stage] * (1 if action.kind == "F" else -1))
        most.append(max(held))
    assert peak_bytes(schedule, devices, 12, sizes) == tuple(most)
    counts = count_in_flight(schedule, devices, 12, stages_per_device)
    apart = [sum(map(int.__mul__, counts[at::devices], sizes[at::devices])) for at in range(devices)]
    assert (apart > most) == (stages_per_device > 1)


def test_the_slowest_stage_sets_the_pace():
    orders = order_actions("1f1b", 3, 50)
    timeline = simulate(orders, [1, 2, 1], [1, 3, 1])
    assert timeline.seconds == pytest.approx(50 * 5 + 2)


def test_tails_follow_the_last_backward():
    orders = order_actions("1f1b", 2, 2)
    assert simulate(orders, [1, 1], [1, 1], [0, 5]).seconds == pytest.approx(10.0)
    assert simulate(orders, [1, 1], [1, 1], [5, 0]).seconds == pytest.approx(11.0)


def test_inference_has_no_backward():
    orders = order_actions("1f1b", 2, 4, training=False)
    assert simulate(orders, [1, 1], [0, 0]).seconds == pytest.approx(5.0)
