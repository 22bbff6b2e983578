"""How computing passes time."""

import pytest

from polyrhythm.roles.world import DrawnPace


class Clock:
    """Notes how long it was slept on."""

    def __init__(self):
        self.slept = []

    def now(self):
        return sum(self.slept)

    def sleep(self, seconds):
        self.slept.append(seconds)


def test_a_drawn_step_is_a_third_forward_and_the_rest_by_shares_of_buckets():
    clock, used, announced = Clock(), [], []
    pace = DrawnPace(clock, lambda: 0.3)
    pace.forward([0.5, 0.25, 0.25], lambda bucket: used.append((bucket, clock.now())))
    assert [bucket for bucket, _ in used] == [2, 1, 0], "the backward pass fills the last layers first"
    assert [at for _, at in used] == pytest.approx([0.0, 0.025, 0.05])
    assert clock.now() == pytest.approx(0.1)
    pace.backward([0.5, 0.25, 0.25], lambda bucket: announced.append((bucket, clock.now())))
    assert [bucket for bucket, _ in announced] == [0, 1, 2]
    assert [at for _, at in announced] == pytest.approx([0.2, 0.25, 0.3])


def test_a_drawn_step_that_nobody_listens_to_passes_at_once():
    clock = Clock()
    pace = DrawnPace(clock, lambda: 0.3)
    pace.forward([], lambda bucket: None)
    pace.backward([], lambda bucket: None)
    assert clock.slept == [0.3]


def test_every_step_is_drawn_anew():
    times = iter([0.3, 0.6])
    clock = Clock()
    pace = DrawnPace(clock, lambda: next(times))
    for _ in range(2):
        pace.forward([1.0], lambda bucket: None)
        pace.backward([1.0], lambda bucket: None)
    assert clock.slept == pytest.approx([0.1, 0.2, 0.2, 0.4])
