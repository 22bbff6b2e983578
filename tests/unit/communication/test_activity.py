"""What a rank notes of its waiting, by a clock of the host's own."""

from __future__ import annotations

import pytest

from polyrhythm.communication import activity as module
from polyrhythm.communication.activity import COMPUTING, Activity


class Clock:
    """A clock that is set by hand, in place of the host's."""

    def __init__(self) -> None:
        self.time_s = 100.0

    def now(self) -> float:
        return self.time_s

    def sleep(self, seconds: float, what: str = "") -> None:
        self.time_s += seconds


class Done:
    """The handle of something that takes two seconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def done(self) -> bool:
        return False

    def wait(self) -> str:
        self._clock.sleep(2.0)
        return "there"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(module.time, "monotonic", found.now)
    return found


def test_of_waits_inside_each_other_the_outer_counts(clock: Clock) -> None:
    activity = Activity(clock)
    assert activity.blocked is not None
    clock.sleep(5.0)
    with activity.doing("adding up"):
        clock.sleep(1.0)
        with activity.doing("meeting"):
            clock.sleep(0.5)
        assert activity.now().what == "adding up"
        clock.sleep(0.25)
    assert activity.now().what == COMPUTING
    assert activity.noted(Done(clock), "sending").wait() == "there"
    assert activity.blocked.seconds == 3.75
    assert activity.blocked.computed_s() == 105.0


def test_a_test_is_work_but_what_it_waits_for_is_not(clock: Clock) -> None:
    activity = Activity(clock)
    assert activity.blocked is not None
    with activity.doing("testing the model", takes_long=True):
        clock.sleep(4.0)
        with activity.doing("adding up"):
            clock.sleep(1.0)
        clock.sleep(2.0)
    assert activity.blocked.seconds == 1.0
