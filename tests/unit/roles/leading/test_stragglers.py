"""Who is called a straggler, from made-up reports whose times are known."""

from __future__ import annotations

from random import Random

import pytest

from polyrhythm.events import Straggler, WorkerProgress, from_json
from polyrhythm.roles.leading.leader import Stragglers


class Reports:
    """Reports of workers on their own clocks."""

    def __init__(self) -> None:
        self.stragglers = Stragglers()
        self.estimated_s: dict[int, float] = {}
        self.paused_s = 0.0

    def emit(self, worker: int, own_s: float, steps: int = 100, wait_s: float = 0.0) -> Straggler | None:
        """Reports steps of which each took a worker so long, and in all of which it waited."""
        self.estimated_s[worker] = self.estimated_s.get(worker, 0.0) + steps * own_s + wait_s
        event = WorkerProgress(
            time_s=self.estimated_s[worker], worker=worker, epoch=0, step=0, steps=steps, images=0, loss=0.0,
            learning_rate=0.0, wait_s=wait_s,
        )  # fmt: skip
        return self.stragglers.on_progress(event, self.paused_s if worker == 0 else 0.0)

    def round(self, *own_s: float, **how: float) -> list[Straggler]:
        said = [self.emit(worker, each, wait_s=how.get("wait_s", 0.0)) for worker, each in enumerate(own_s)]
        return [each for each in said if each is not None]


def test_a_straggler_is_named_once_with_its_slowdown_and_again_when_it_keeps_up() -> None:
    reports = Reports()
    rounds = [reports.round(0.1, 0.1, 0.3, 0.1) for _ in range(6)]
    assert [len(said) for said in rounds] == [0, 0, 0, 1, 0, 0]  # a warm-up, and three to judge by
    (named,) = rounds[3]
    assert (named.worker, named.slowdown) == (2, pytest.approx(3))
    assert named.text == (
        "worker 2 is a straggler: its own part of a step takes 0.3 s, 3.0 times the median's 0.1 s"
    )
    assert from_json(named.to_json()) == named
    after = [said for _ in range(4) for said in reports.round(0.1, 0.1, 0.1, 0.1)]
    assert [said.text for said in after] == ["worker 2 keeps up again"]
    assert after[0].slowdown < 1.25


def test_short_stretches_are_gathered_for_five_seconds() -> None:
    reports = Reports()
    rounds = [reports.round(0.001, 0.001, 0.003) for _ in range(60)]  # reports of 0.1 and 0.3 s
    (when,) = [number for number, said in enumerate(rounds) if said]
    assert when == 17  # after the warm-up, 17 of 0.3 s are more than 5 s


def test_who_keeps_flapping_is_named_once_unless_it_gets_worse() -> None:
    reports = Reports()
    said: list[Straggler] = []
    for slow in (0.2, 0.1, 0.2, 0.1, 0.35, 0.1):
        for _ in range(4):
            said += reports.round(0.1, 0.1, slow)
    assert [round(each.slowdown, 1) for each in said if "straggler" in each.text] == [
        2.0,
        pytest.approx(3.5, abs=1),
    ]


def test_waiting_is_not_slowness() -> None:
    """In step with others, all_peers's steps take equally long; the slow one alone does not wait."""
    reports = Reports()
    said = []
    for _ in range(6):
        said += [reports.emit(worker, 0.1, wait_s=20.0) for worker in range(3)]
        said += [reports.emit(3, 0.3, wait_s=0.0)]
    (named,) = [each for each in said if each]
    assert (named.worker, named.slowdown) == (3, pytest.approx(3))


def test_a_leader_that_tests_is_not_slow() -> None:
    reports = Reports()
    for _ in range(6):
        reports.paused_s += 50.0
        reports.estimated_s[0] = reports.estimated_s.get(0, 0.0) + 50.0
        assert reports.round(0.1, 0.1, 0.1) == []


def test_of_two_workers_the_slower_is_the_straggler() -> None:
    reports = Reports()
    (named,) = [said for _ in range(4) for said in reports.round(0.1, 0.16)]
    assert (named.worker, named.slowdown) == (1, pytest.approx(1.6))


def test_a_few_steps_of_drawn_times_are_no_evidence() -> None:
    """Exponential step times: with ten steps a report, means differ by chance; nobody is slower than the others."""
    random, reports = Random(3), Reports()
    for _ in range(50):
        for worker in range(16):
            mean_s = sum(random.expovariate(10.0) for _ in range(10)) / 10
            assert reports.emit(worker, mean_s, steps=10) is None


def test_a_successor_is_judged_anew() -> None:
    reports = Reports()
    for _ in range(4):
        reports.round(0.1, 0.1, 0.5)
    reports.stragglers.forget(2)
    assert [said for _ in range(3) for said in reports.round(0.1, 0.1, 0.5)] == []
    (named,) = reports.round(0.1, 0.1, 0.5)
    assert named.worker == 2
