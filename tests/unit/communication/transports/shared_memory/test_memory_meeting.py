"""How members agree whether to share memory; threads for members."""

from __future__ import annotations

import gc
import json
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from polyrhythm.communication.transports.member_collectives import CollectiveBroken
from polyrhythm.communication.transports.shared_memory import meeting
from polyrhythm.communication.transports.shared_memory.collectives import SharedMemoryCollectives
from polyrhythm.communication.transports.shared_memory.meeting import Introduction, share_memory

RANKS = (3, 5)


class _Table:
    """Where the members meet."""

    def __init__(self, change: Callable[[str, int, str], str] = lambda name, member, word: word) -> None:
        self.names: list[str] = []
        self._words: dict[tuple[str, int], str] = {}
        self._all_have_come = threading.Barrier(len(RANKS), timeout=20)
        self._change = change

    def round_of(self, member: int) -> Callable[[str, str], Sequence[str]]:
        def exchange_texts(name: str, word: str) -> list[str]:
            self.names.append(name)
            self._words[name, member] = self._change(name, member, word)
            self._all_have_come.wait()
            return [self._words[name, other] for other in range(len(RANKS))]

        return exchange_texts


def _meet(table: _Table, introductions: list[str] | None = None) -> list[SharedMemoryCollectives | None]:
    known = introductions or [Introduction.own("127.0.0.1", shares=True).to_json()] * len(RANKS)

    def member(number: int) -> SharedMemoryCollectives | None:
        return share_memory(number, RANKS, known, table.round_of(number))

    with ThreadPoolExecutor(len(RANKS)) as threads:
        return list(threads.map(member, range(len(RANKS))))


def _refused(caplog: pytest.LogCaptureFixture, table: _Table) -> str:
    """Meets, checks that nobody shares and nothing stays open; gives the one warning."""
    gc.collect()  # a member that has mapped the memory is part of a circle
    before = len(os.listdir("/proc/self/fd"))
    with caplog.at_level(logging.WARNING):
        assert _meet(table) == [None, None]
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    (record,) = caplog.records
    return record.getMessage()


def test_members_of_one_host_share() -> None:
    first, second = _meet(_Table())
    assert first is not None
    assert second is not None
    ours, theirs = torch.arange(5.0), torch.ones(5)
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(second.all_reduce, theirs)
        first.all_reduce(ours)
        waiting.result()
    assert ours.tolist() == theirs.tolist() == [1, 2, 3, 4, 5]
    first.close()
    second.close()


@pytest.mark.parametrize(
    "other",
    [
        Introduction.own("10.0.0.7", shares=True),
        Introduction.own("127.0.0.1", shares=False),
        Introduction("another host", os.getpid()),
    ],
)
def test_members_of_two_hosts_say_no_more(other: Introduction, caplog: pytest.LogCaptureFixture) -> None:
    table = _Table()
    assert _meet(table, [Introduction.own("127.0.0.1", shares=True).to_json(), other.to_json()]) == [
        None,
        None,
    ]
    assert table.names == []
    assert caplog.records == []


def test_a_machine_that_reorders_stores_uses_the_library(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert _refused(caplog, _Table()) == (
        "no shared memory between the ranks of this host, TCP instead "
        "(rank 3: this machine does not keep the order of stores)"
    )


def test_no_memory_means_that_all_do_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(nbytes: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(meeting, "memory_file", refuse)
    assert _refused(caplog, _Table()).endswith("(rank 3: 6 MiB cannot be allocated: No space left on device)")


def test_memory_of_somebody_else_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    def forge(name: str, member: int, word: str) -> str:
        offer = json.loads(word) if name == "memory" and member == 0 else None
        return word if offer is None else json.dumps(offer | {"token": "0" * 32})

    assert _refused(caplog, _Table(forge)).endswith(
        "(rank 3: the leader's memory is not found under its process number)"
    )


def test_one_who_cannot_map_it_makes_all_do_without(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(name: str, member: int, word: str) -> str:
        return "Cannot allocate memory" if name == "mapped" and member == 1 else word

    assert _refused(caplog, _Table(refuse)).endswith("(rank 5: Cannot allocate memory)")


def test_who_fails_inside_is_missed_and_says_so_itself() -> None:
    first, second = _meet(_Table())
    assert first is not None
    assert second is not None

    def fail() -> None:
        raise ValueError("after the sum")

    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(second.all_reduce, torch.ones(3))
        with pytest.raises(ValueError, match="after the sum"):
            first.start_all_reduce(torch.ones(3), fail).wait()
        waiting.result()
    with pytest.raises(CollectiveBroken, match=r"rank 3 was stopped by ValueError$") as ours:
        first.barrier()
    with pytest.raises(CollectiveBroken, match=r"rank 3 has failed$") as theirs:
        second.barrier()
    with pytest.raises(CollectiveBroken, match=r"rank 3 has failed$"):
        second.start_all_reduce(torch.ones(3)).wait()
    assert ours.value.rank == theirs.value.rank == 3
    first.close()
    second.close()
