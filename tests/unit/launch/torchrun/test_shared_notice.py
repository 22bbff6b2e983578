"""How ranks of torchrun learn that one of their hosts is taken away, over a store in memory."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from polyrhythm.communication.transports.torch_distributed.rendezvous import Rendezvous
from polyrhythm.events import Event, RunEnded
from polyrhythm.launch.children import MeetingPoint
from polyrhythm.launch.signals import Preemption
from polyrhythm.launch.torchrun import started_rank as shared_notice
from polyrhythm.launch.torchrun.started_rank import SharedNotice
from polyrhythm.roles.ledger import Ledger


class Ranks:
    """Two ranks that share a store."""

    def __init__(self, notice_s: float | None) -> None:
        self.store: Any = dist.HashStore()
        self.heard: list[Event] = []
        self.leader, self.other = (
            SharedNotice(Preemption(notice_s), Rendezvous(self.store, rank, 2, ""), self.heard.append)
            for rank in range(2)
        )

    def end(self, outcome: str) -> list[bool]:
        self.leader.emit(RunEnded(time_s=0, outcome=outcome, result={}))
        return [self.leader.ended_the_run(), self.other.ended_the_run()]


def test_all_ranks_leave_alike_when_one_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_notice, "_PATIENCE", timedelta(seconds=60))
    ranks = Ranks(60.0)
    ranks.other.arrive()
    ranks.store.wait(["preemption/come"], timedelta(seconds=60))
    assert ranks.end("interrupted") == [True, True]
    assert [event.outcome for event in ranks.heard if isinstance(event, RunEnded)] == ["interrupted"]


def test_a_run_that_was_done_all_the_same_is_done() -> None:
    ranks = Ranks(60.0)
    ranks.other.arrive()
    ranks.store.wait(["preemption/come"], timedelta(seconds=60))
    assert ranks.end("done") == [False, False]


def test_an_interrupt_is_no_preemption() -> None:
    assert Ranks(60.0).end("interrupted") == [False, False]
    without = Ranks(None)
    without.other.arrive()
    assert without.end("interrupted") == [False, False]


def test_where_ranks_meet_goes_through_a_pipe_and_its_key_is_not_shown() -> None:
    for ledger in (None, Ledger.of(3)):
        point = MeetingPoint(4711, "10.0.0.5", b"\x00secret\xff", {0: 1, 2: 0}, ledger)
        found = MeetingPoint.from_bytes(point.to_bytes())
        assert replace(found, ledger=None) == replace(point, ledger=None)
        assert (ledger and ledger.to_json()) == (found.ledger and found.ledger.to_json())
    assert "secret" not in repr(point)
