"""Notices of many ranks: the first ones as they come, the others together."""

from __future__ import annotations

from polyrhythm.reporting.notices import PAUSE_S, SHOWN, Notices


def lost(worker: int) -> str:
    return f"worker {worker} (rank {worker}) was killed by SIGKILL; the others continue (restart 1 of 3)"


def test_hundreds_of_workers_that_die_take_few_lines_that_name_some_and_count_all() -> None:
    notices = Notices()
    lines = [line for worker in range(200) for line in notices.add(lost(worker), worker / 1000)]
    assert lines == [lost(worker) for worker in range(SHOWN)]
    assert notices.due(SHOWN / 1000 + PAUSE_S - 0.001) == []
    (line,) = notices.due(SHOWN / 1000 + PAUSE_S)
    assert line == f"{lost(199)} (195 more like this: workers 4, 5, 6, 7, 8, 9, 10, 11, …)"
    assert notices.rest() == []


def test_a_notice_of_another_kind_is_shown_at_once_and_a_single_one_as_it_is() -> None:
    notices = Notices()
    for worker in range(SHOWN + 1):
        notices.add(lost(worker), 0.0)
    assert notices.add("the disk is full", 0.1) == ["the disk is full"]
    assert notices.rest() == [lost(SHOWN)]


def test_lists_of_different_lengths_are_of_one_kind() -> None:
    notices = Notices()
    texts = [f"waits for ranks {', '.join(map(str, range(count)))}" for count in range(1, SHOWN + 3)]
    assert [line for text in texts for line in notices.add(text, 0.0)] == texts[:SHOWN]
    assert notices.rest() == [f"{texts[-1]} (1 more like this)"]
