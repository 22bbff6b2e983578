"""Schedules of pipelines, unit by unit, and what follows from them: idle time and live activations."""

from __future__ import annotations

import pytest

from polyrhythm.errors import RequestError
from polyrhythm.partition.schedule import SCHEDULES, Schedule, StageTimes, Timetable, timetable
from polyrhythm.specs import build, choices

TABLES = {
    "gpipe": """
        F0 F1 F2 F3 .. .. .. .. B0 B1 B2 B3
        .. F0 F1 F2 F3 .. .. B0 B1 B2 B3
        .. .. F0 F1 F2 F3 B0 B1 B2 B3
    """,
    "one_forward_one_backward": """
        F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
        .. F0 F1 .. B0 F2 B1 F3 B2 .. B3
        .. .. F0 B0 F1 B1 F2 B2 F3 B3
    """,
    "zero_bubble": """
        F0 F1 F2 .. .. B0 W0 F3 B1 W1 B2 W2 B3 W3
        .. F0 F1 .. B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
        .. .. F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3
    """,
}
INTERLEAVED = [
    "f0 f1 F0 F1 f2 B0 f3 B1 F2 b0 F3 b1 B2 B3 b2 b3",
    "f0 f1 F0 B0 F1 B1 f2 b0 f3 b1 F2 B2 F3 B3 b2 b3",
]
SIZES = [(ranks, microbatches) for ranks in (1, 2, 3, 4, 8) for microbatches in (1, 2, 3, 4, 8, 16)]


def schedule(spec: str) -> Schedule:
    made = build("schedule", spec, SCHEDULES)
    assert isinstance(made, Schedule)
    return made


def even(spec: str, ranks: int, microbatches: int, times: StageTimes) -> Timetable:
    return timetable(schedule(spec), ranks, microbatches, lambda stage: times)


@pytest.mark.parametrize("name", TABLES)
def test_a_schedule_is_its_table(name: str) -> None:
    found = even(name, 3, 4, StageTimes())
    assert [found.picture(rank) for rank in range(3)] == TABLES[name].strip().replace("  ", "").splitlines()


def test_the_interleaved_order_is_its_table() -> None:
    for rank, row in enumerate(INTERLEAVED):
        units = schedule("interleaved(v=2)").units(rank, 2, 4)
        told = [
            f"{unit.kind.upper() if unit.chunk else unit.kind.lower()}{unit.microbatch}" for unit in units
        ]
        assert " ".join(told) == row


@pytest.mark.parametrize("name", sorted(choices(SCHEDULES)))
@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_every_unit_comes_once_and_gradients_are_added_up_in_ascending_order(
    name: str, ranks: int, microbatches: int
) -> None:
    made = schedule(name)
    try:
        made.check(ranks, microbatches)
    except RequestError:
        return
    for rank in range(ranks):
        units = list(made.units(rank, ranks, microbatches))
        kinds = "FBW" if made.splits_backward else "FB"
        assert len(units) == len(set(units)) == len(kinds) * made.chunks * microbatches
        for kind in kinds:
            for chunk in range(made.chunks):
                numbers = [unit.microbatch for unit in units if (unit.kind, unit.chunk) == (kind, chunk)]
                assert numbers == list(range(microbatches))


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_idle_time_and_live_activations_are_those_of_the_formulas(ranks: int, microbatches: int) -> None:
    times = StageTimes(forward=2.0, backward=3.0)
    for name in ("gpipe", "one_forward_one_backward"):
        found = even(name, ranks, microbatches, times)
        for rank in range(ranks):
            assert found.idle_s(rank) == (ranks - 1) * 5
            expected = microbatches if name == "gpipe" else min(microbatches, ranks - rank)
            assert found.live(rank) == expected
    if microbatches >= ranks:
        split = even("zero_bubble", ranks, microbatches, StageTimes(2.0, 3.0, 1.0))
        for rank in range(ranks):
            assert split.idle_s(rank) == (ranks - 1) * (2 + 3 - 1)
            assert split.live(rank) == min(microbatches, ranks - rank)
            assert split.live(rank, until="W") == ranks


@pytest.mark.parametrize("v", [1, 2, 4])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (3, 6)])
def test_interleaving_divides_the_idle_time(v: int, ranks: int, microbatches: int) -> None:
    found = even(f"interleaved(v={v})", ranks, microbatches, StageTimes(2.0 / v, 4.0 / v))
    for rank in range(ranks):
        assert found.idle_s(rank) == pytest.approx((ranks - 1) * 6 / v)
        most = (v - 1) * ranks + 2 * (ranks - 1 - rank) + 1
        assert found.live(rank) == min(v * microbatches, most)


def test_uneven_stages_of_gpipe_take_as_long_as_the_formula_says() -> None:
    times = [StageTimes(1.0, 2.0), StageTimes(3.0, 1.5), StageTimes(0.5, 4.0)]
    found = timetable(schedule("gpipe"), 3, 5, times)
    whole = sum(each.forward + each.backward for each in times)
    assert found.makespan_s == pytest.approx(whole + 4 * (3.0 + 4.0))


def test_wrong_numbers_are_refused_with_what_would_do() -> None:
    with pytest.raises(RequestError, match=r"5 microbatches out in 2 rounds, .*: ask for a multiple of 2"):
        schedule("interleaved").check(2, 5)
    with pytest.raises(RequestError, match=r"ask for at least 4 .given 3."):
        schedule("double_buffered").check(4, 3)


@pytest.mark.parametrize("copies", [(2, 1), (1, 2), (3, 1, 2), (1, 1, 4)])
@pytest.mark.parametrize("name", ["gpipe", "one_forward_one_backward"])
def test_microbatches_are_dealt_out_among_copies_and_no_order_waits_for_itself(
    name: str, copies: tuple[int, ...]
) -> None:
    for microbatches in (max(copies), 4, 7):
        found = timetable(schedule(name), len(copies), microbatches, lambda stage: StageTimes(), copies)
        assert len(found.ranks) == sum(copies)
        row = 0
        for count in copies:
            for copy in range(count):
                units = [span.unit for span in found.ranks[row]]
                own = list(range(copy, microbatches, count))
                assert [unit.microbatch for unit in units if unit.kind == "F"] == own
                assert [unit.microbatch for unit in units if unit.kind == "B"] == own
                row += 1


def test_copies_of_a_stage_that_takes_longer_keep_the_others_busy() -> None:
    """A stage of two copies that takes twice as long is as fast as the other one."""
    times = [StageTimes(2, 4), StageTimes(1, 2)]
    found = timetable(schedule("one_forward_one_backward"), 2, 40, times, (2, 1))
    assert found.makespan_s == pytest.approx(40 * 3, rel=0.1)
    assert timetable(schedule("one_forward_one_backward"), 2, 40, times).makespan_s > 40 * 6
