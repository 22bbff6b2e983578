"""One run on hosts chosen by an engine: the start of ranks, and the consequences of a rank's end.

The store in which ranks meet is in this process, so it outlives every rank. A rank that ends is answered as torchrun's
static rendezvous does it, one rank at a time (`launch/torchrun/reception.py` lets it in again):

    ends with                            ─▶
    0                                       done; once rank 0 is, the others have a moment to leave
    2, 75, 130                              the request was wrong; preempted; interrupted: the job ends so
    1, or by a signal, or with its host     it is started again, as long as `restarts` last; without rank 0 the others
                                            end as well, and the whole run begins again from its last checkpoint
"""

from __future__ import annotations

import os
import queue
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from polyrhythm.launch.torchrun.gathering import RETURN_VARIABLE
from polyrhythm.specs import IMPORTS

LEADER = 0
_FINAL = {2, 75, 130}
_LEAVE_S = 60.0
_AGAIN_S = 1.0
_LOOK_EVERY_S = 0.2
LOST = 255
"""Status of a rank on a failed host."""


class Place(Protocol):
    """A host, as this process reaches it; its messages go into the queue given at construction, as (index, message)."""

    name: str

    def start(self, rank: int, environment: Mapping[str, str], words: Sequence[str]) -> None:
        """Start a rank there; a failed place is reopened first. Raises OSError if that is not possible."""

    def signal(self, number: int) -> None:
        """Send a signal to all ranks there."""

    def close(self) -> None:
        """End all ranks there."""


@dataclass
class _Rank:
    place: int
    words: Sequence[str]
    environment: dict[str, str]
    restarts: int
    lives: bool = False
    status: int | None = None
    again_at: float | None = None


class PlacedRun:
    """Keeps the ranks of one run going.

    Args:
        places: the hosts.
        placed: host index of every rank.
        messages: queue of the hosts' messages.
        words: words of every rank.
        meeting: address and port of the store.
        restarts: number of times that a rank is restarted.
        emit: receiver of rank, stream (1 or 2) and a line that the rank has printed.
        notify: receiver of lines of the run itself.
        hosts: hosts of every rank, the number of its machine, where several places are on one; None: a place
            is a machine.
    """

    def __init__(
        self,
        places: Sequence[Place],
        placed: Sequence[int],
        messages: queue.Queue[tuple[int, Mapping[str, Any]]],
        words: Sequence[Sequence[str]],
        meeting: tuple[str, int],
        restarts: int,
        emit: Callable[[int, int, str], None],
        notify: Callable[[str], None],
        hosts: Sequence[int] | None = None,
    ) -> None:
        self._places, self._messages, self._emit, self._notify = places, messages, emit, notify
        self._stop = 0
        self._ranks = [
            _Rank(place, words[rank], variables(rank, hosts or placed, meeting), restarts)
            for rank, place in enumerate(placed)
        ]

    def stop(self, number: int) -> None:
        """Ask all ranks to stop, by a signal, or by one that was asked for before; signal handlers may call it."""
        self._stop = self._stop or number

    def carry_out(self) -> int:
        """Start all ranks and return the job's exit status once all have ended."""
        for rank in range(len(self._ranks)):
            self._start(rank)
        ends = float("inf")
        while (
            any(each.lives or each.again_at is not None for each in self._ranks) and time.monotonic() < ends
        ):
            with suppress(queue.Empty):
                self._handle(*self._messages.get(timeout=_LOOK_EVERY_S))
            if self._stop:
                for place in self._places:
                    place.signal(self._stop)
                self._stop = 0
            for rank, each in enumerate(self._ranks):
                if each.again_at is not None and time.monotonic() >= each.again_at:
                    self._start(rank)
            if self._ranks[LEADER].status is not None and ends == float("inf"):
                ends = time.monotonic() + _LEAVE_S
                for each in self._ranks:
                    each.again_at = None
        return self._outcome()

    def _outcome(self) -> int:
        leader = self._ranks[LEADER].status
        wrong = [each.status for each in self._ranks if each.status in _FINAL]
        if leader in (0, *_FINAL):
            return int(leader or 0)
        return int(wrong[0] or 1) if wrong else 1

    def _start(self, rank: int) -> None:
        each = self._ranks[rank]
        each.again_at, each.lives = None, True
        try:
            self._places[each.place].start(rank, each.environment, each.words)
        except OSError as error:
            self._notify(f"{self._places[each.place].name} cannot be reached: {error}")
            self._ended(rank, LOST)

    def _handle(self, place: int, what: Mapping[str, Any]) -> None:
        if "line" in what:
            self._emit(what["rank"], what["stream"], what["line"])
        elif "status" in what:
            self._ended(what["rank"], what["status"])
        elif "gone" in what:
            lost = [rank for rank, each in enumerate(self._ranks) if each.place == place and each.lives]
            if lost:
                self._notify(f"{self._places[place].name} is gone: {what['gone']}")
            for rank in lost:
                self._ended(rank, LOST)

    def _ended(self, rank: int, status: int) -> None:
        each, name = self._ranks[rank], self._places[self._ranks[rank].place].name
        each.lives = False
        if status == 0 or status in _FINAL:
            each.status = status
            return
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        if each.restarts == 0 or self._ranks[LEADER].status is not None:
            if status not in (1, LOST):
                self._notify(f"rank {rank} on {name} {how}")
            if rank == LEADER:
                each.status = 1
            return
        each.restarts -= 1
        each.again_at = time.monotonic() + _AGAIN_S
        if status != LOST:
            self._notify(f"rank {rank} on {name} {how}: it is started again")
        if rank == LEADER:  # the others end with it, and all meet again
            for other in self._ranks:
                if not other.lives and other.again_at is None and other.status is None:
                    other.again_at = each.again_at


def print_line(rank: int, stream: int, line: str) -> None:
    """Print a rank's output (of stream 1 or 2): that of rank 0 unchanged, that of others with their rank."""
    target = sys.stdout if stream == 1 and rank == LEADER else sys.stderr
    print(line if rank == LEADER else f"rank {rank}: {line}", file=target, flush=True)


def variables(rank: int, placed: Sequence[int], meeting: tuple[str, int]) -> dict[str, str]:
    """Return torchrun's variables for a rank.

    Args:
        rank: number of the rank.
        placed: host index of every rank.
        meeting: address and port of a store that no rank hosts.
    """
    here = [other for other, place in enumerate(placed) if place == placed[rank]]
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(placed)),
        "LOCAL_RANK": str(here.index(rank)),
        "LOCAL_WORLD_SIZE": str(len(here)),
        "GROUP_RANK": str(placed[rank]),
        "MASTER_ADDR": meeting[0],
        "MASTER_PORT": str(meeting[1]),
        "TORCHELASTIC_RUN_ID": "polyrhythm",  # a rank leaves with the process that has started it
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        RETURN_VARIABLE: "1",
        **({IMPORTS: os.environ[IMPORTS]} if IMPORTS in os.environ else {}),
    }
