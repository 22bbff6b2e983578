"""Formulas of pipelines against the timetable of their schedules."""

from __future__ import annotations

import pytest

from polyrhythm.cost.pipeline import bubble, gpipe_s, idle_s, sent_bytes
from polyrhythm.partition.schedule import StageTimes, timetable
from polyrhythm.partition.schedules.gpipe import GPipe
from polyrhythm.partition.schedules.interleaved import Interleaved


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 4), (2, 4), (4, 8), (3, 9)])
@pytest.mark.parametrize("v", [1, 2])
def test_idle_time_and_bubble_are_those_of_the_timetable(ranks: int, microbatches: int, v: int) -> None:
    found = timetable(Interleaved(v=v), ranks, microbatches, lambda stage: StageTimes(2.0 / v, 4.0 / v))
    assert found.idle_s(0) == pytest.approx(idle_s(ranks, 2.0, 4.0, v))
    assert found.bubble == pytest.approx(bubble(ranks, microbatches, v))


def test_uneven_stages_and_bytes() -> None:
    times = [(1.0, 2.0), (3.0, 1.5), (0.5, 4.0)]
    found = timetable(GPipe(), 3, 5, [StageTimes(*each) for each in times])
    assert found.makespan_s == pytest.approx(gpipe_s(times, 5))
    assert sent_bytes(12, [20, 8]) == 2 * 12 * 28
