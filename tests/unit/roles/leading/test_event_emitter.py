"""The time of a run, as the leader tells it."""

from __future__ import annotations

from types import SimpleNamespace

from polyrhythm.events import Event, Notice
from polyrhythm.roles.leading.leader import EventEmitter
from polyrhythm.roles.ledger import Ledger


def test_times_count_from_when_training_started() -> None:
    clock = SimpleNamespace(now=lambda: now_s)
    said: list[Event] = []
    now_s = 3.0
    ledger = Ledger.of(2)
    ledger.earlier_s, ledger.paused_s = 100.0, 0.5
    narrator = EventEmitter(SimpleNamespace(clock=clock, emit=said.append), ledger)  # type: ignore[arg-type]
    now_s = 10.0
    narrator.begin()
    now_s = 12.0
    narrator.emit(Notice(time_s=0, text="two seconds"))
    assert said == [Notice(time_s=2.0, text="two seconds")]
    assert (narrator.elapsed_s, narrator.total_s, narrator.trained_s) == (2.0, 102.0, 1.5)
    narrator.take_up(4.0)
    assert (narrator.elapsed_s, narrator.total_s, narrator.trained_s) == (8.0, 108.0, 7.5)
