"""A board in a run's key-value store, on which a loop's workers agree without waiting for any one of them.

It carries texts by key, numbers that worker 0 broadcasts, and means over the workers, which do not depend on any
single worker:

    worker  ── its part ──▶ store ◀── its part ── worker       the first that finds the parts of all present workers
                        parts ◀── the first to have all ──   posts them for all: every worker has the same

It also shows the workers for which others wait in a loop (`LoopWatch`): the worker, its step, and its line of the
script.

    worker 0   waits in an exchange ──▶ asks on the board ──▶ prints the places of all
    worker 1   computes, hangs or waits   ◀── its watch answers for it, from a thread of its own

A worker without an answer is stopped, or its machine is. No worker is ended: a step may take any time.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from polyrhythm.api.loop.gradients import line_of_script
from polyrhythm.errors import RequestError
from polyrhythm.launch.patience import speaking_up
from polyrhythm.launch.script import WorkerStatus, WorkerStatuses

Found = TypeVar("Found")
_PATIENCE_S = 3.0
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.02
WATCH_PATIENCE_S = 5.0
"""Seconds of waiting in a loop before the other workers are asked for their places."""
_LOOK_EVERY_S = 0.5
_SPEAK_EVERY_S = 60.0
_ASK_EVERY_S = 2.0
_ASK = "script/watch/ask"


class StoreBoard:
    """One worker's access to the board.

    Args:
        store: key-value store of the run.
        attend: callback that handles arrived messages, called at intervals while this worker waits.
    """

    def __init__(self, store: Any, attend: Callable[[], None]) -> None:
        self._store = store
        self._attend = attend

    def post(self, key: str, text: str) -> None:
        """Set the text of a key."""
        self._store.set(key, text)

    def post_if_absent(self, key: str, text: str) -> str:
        """Set the text of a key that has none; return its present text, the same for all workers."""
        return bytes(self._store.compare_set(key, "", text)).decode()

    def read(self, key: str) -> str | None:
        """Return the text of a key, or None where it has none."""
        return bytes(self._store.get(key)).decode() if self._store.check([key]) else None

    def read_all(self, keys: Sequence[str]) -> list[str] | None:
        """Return the texts of all keys, or None as long as one has none."""
        if not self._store.check(list(keys)):
            return None
        return [bytes(text).decode() for text in self._store.multi_get(list(keys))]

    def await_one(self, keys: Sequence[str], awaited: str) -> str:
        """Wait until one of the keys has a text; after a long wait, print once what is awaited.

        Args:
            keys: keys; one of them suffices.
            awaited: description of the awaited action.

        Returns:
            The text of the first key that has one.
        """

        def look() -> str | None:
            return next((text for text in map(self.read, keys) if text is not None), None)

        return self.await_found(look, awaited)

    def await_found(self, look: Callable[[], Found | None], awaited: str) -> Found:
        """Wait until `look` returns a value; after a long wait, print once what is awaited.

        Args:
            look: returns the value, or None as long as there is none.
            awaited: description of the awaited action.
        """
        pause_s = _SHORTEST_PAUSE_S
        with speaking_up(lambda: f"still waiting for {awaited}"):
            while (found := look()) is None:
                self._attend()
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return found


def where_all_are(board: StoreBoard, worker: int, workers: int, own: str) -> str:
    """Return a line with the places of all workers, after they have diverged.

    Args:
        board: board on which each of them posts its place.
        worker: index of this worker.
        workers: number of workers.
        own: place of this worker.
    """
    board.post(f"script/where/{worker}", own)
    keys = [f"script/where/{each}" for each in range(workers)]
    until = time.monotonic() + _PATIENCE_S
    while (texts := board.read_all(keys)) is None and time.monotonic() < until:
        time.sleep(_LONGEST_PAUSE_S)
    reports = texts or [board.read(key) or "has not reported" for key in keys]
    places = ", ".join(f"worker {each} {text}" for each, text in enumerate(reports))
    return (
        f"{places}: synchronous workers must make the same number of passes, with the same options; let what is "
        "decided on one, "
        "such as leaving a batch out or lowering the learning rate, be decided on group.average of all"
    )


class Posted:
    """Numbers that worker 0 posts for all present and future workers.

    Args:
        board: board of the workers.
        name: prefix of the keys.
        rank: index of this worker.
        size: number of workers.
    """

    def __init__(self, board: StoreBoard, name: str, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._board = board
        self._name = name
        self._count = 0

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite a tensor of integers with worker 0's; all call it equally often."""
        key, self._count = f"{self._name}/{self._count}", self._count + 1
        if self.size == 1:
            return
        if self.rank == 0:  # its replacement uses the numbers of its predecessor
            own = tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes().hex()
            found = bytearray.fromhex(self._board.post_if_absent(key, own))
        else:
            found = bytearray.fromhex(self._board.await_one([key], "worker 0 to call group.shard"))
        tensor.copy_(torch.frombuffer(found, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape))

    def first(self, what: str, text: str) -> str:
        """Return the text of the first worker that has called this, the same for all; there is no waiting.

        Args:
            what: name of the text.
            text: text of this worker.
        """
        return text if self.size == 1 else self._board.post_if_absent(f"{self._name}/{what}", text)


class Ends:
    """Posts the end of one worker's loop, and determines when all have ended.

    Args:
        worker: index of the worker.
        board: board of the workers.
        statuses: statuses of the workers; those that have failed, or are behind the others, are not awaited.
    """

    def __init__(self, worker: int, board: StoreBoard, statuses: WorkerStatuses) -> None:
        self._worker = worker
        self._board = board
        self._statuses = statuses

    def print_line(self, loop: str) -> None:
        """Post that this worker's loop has ended.

        Args:
            loop: name of the loop, the same on all.
        """
        self._board.post(_end_key(loop, self._worker), "")

    def last(self, loop: str, exchanges: int, together: int) -> int | None:
        """Return the number of exchanges after which all have reached the end of their loops; None while one continues.

        The first worker that finds all loops ended posts the number for all, since a worker may fail between two of
        them. Others may then be in an exchange that waits for this worker, so the last exchange is not the present one.

        Args:
            loop: name of the loop.
            exchanges: number of exchanges in which this worker has taken part.
            together: greatest number of exchanges by which a worker can be ahead of another.
        """
        key = f"script/ended/{loop}"
        if (value := self._board.read(key)) is None:
            statuses = enumerate(self._statuses.read())
            here = [worker for worker, status in statuses if status is WorkerStatus.HERE]
            if self._board.read_all([_end_key(loop, worker) for worker in here]) is None:
                return None
            value = self._board.post_if_absent(key, str((exchanges // together + 1) * together))
        return int(value)


def _end_key(loop: str, worker: int) -> str:
    return f"script/ended/{loop}/{worker}"


class Means:
    """Takes part in means, and in other meetings of all workers, for one of them.

    Args:
        worker: index of the worker.
        board: board on which parts are posted.
        statuses: statuses of the workers; those that have failed, or are behind the others, are not awaited.
        awaited: returns the workers that have a share of the current epoch.

    Attributes:
        place: returns the steps done by this worker, and the means of gradients of the current step; None where
            workers do not all take part in every exchange.
    """

    def __init__(
        self, worker: int, board: StoreBoard, statuses: WorkerStatuses, awaited: Callable[[], Collection[int]]
    ) -> None:
        self.place: Callable[[], tuple[int, int] | None] = lambda: None
        self._worker = worker
        self._board = board
        self._statuses = statuses
        self._awaited = awaited
        self._asked = ""
        self._asked_at = self._looked_at = 0.0

    def mean(self, number: int, value: float, weight: float, called: str = "group.average") -> float:
        """Return the weighted mean of the workers' values, in their order; wait for all present workers.

        Args:
            number: number of the meeting, from 0; that of a finished one returns its mean again.
            value: value of this worker.
            weight: weight of the value.
            called: see `gather`.
        """
        pairs = self.gather(number, [value * weight, weight], called)
        total, weights = (sum(column) for column in zip(*pairs, strict=True))
        return float(total / weights)

    def gather(self, number: int, value: Any, called: str = "group.gather") -> list[Any]:
        """Return the values of all present workers, in their order, the same on all.

        Args:
            number: number of the meeting, from 0; that of a finished one returns its result again.
            value: value of this worker, JSON-able.
            called: name of the method that all must call.

        Raises:
            RequestError: another worker is in another meeting, has left, or waits in an exchange for this one.
        """
        # JSON keeps all bits of doubles.
        self._board.post(_part_key(number, self._worker), json.dumps([called, value]))
        self._asked_at = self._looked_at = time.monotonic()
        answers = self._board.await_found(lambda: self._parts(number, called), f"the others to call {called}")
        parts = [json.loads(part) for part in json.loads(answers)]
        if len({part[0] for part in parts}) > 1:
            raise RequestError(
                f"workers call {' and '.join(sorted({part[0] for part in parts}))} where all must call the same: call "
                "each at the same place on all workers"
            )
        return [part[1] for part in parts]

    def _parts(self, number: int, called: str) -> str | None:
        key = f"script/met/{number}"
        if (text := self._board.read(key)) is not None:
            return text
        here = {worker for worker, status in enumerate(self._statuses.read()) if status is WorkerStatus.HERE}
        awaited = sorted(here.intersection(self._awaited()) | {self._worker})
        parts = self._board.read_all([_part_key(number, worker) for worker in awaited])
        if parts is None:
            self.check_others(number, called, awaited)
            return None
        return self._board.post_if_absent(key, json.dumps(parts))

    def check_others(self, number: int, called: str, awaited: Collection[int]) -> None:
        """Request the places of the awaited workers at intervals, and end a wait that no other worker can end.

        Args:
            number: number of the meeting.
            called: see `gather`.
            awaited: indices of the awaited workers.

        Raises:
            RequestError: one has left, or waits in an exchange that this worker has not reached.
        """
        now = time.monotonic()
        if now - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = now
        own = self.place()
        for worker in awaited:
            why = ""
            if self._board.read(left_key(worker)) is not None:
                why = "has left the loop"
            elif own is not None and self._asked:
                asked = json.loads(self._board.read(_exchange_key(self._asked, worker)) or "null")
                if asked is not None and own <= tuple(asked):  # else it waits for what this worker has sent
                    why = f"waits for this one in the exchange of step {asked[0]}"
            if why and self._board.read(_part_key(number, worker)) is None:
                raise RequestError(
                    f"worker {self._worker} is in {called}, and worker {worker} {why}: call {called} at the same place "
                    "on all workers, not only on the one that leads"
                )
        if now - self._asked_at >= _ASK_EVERY_S:
            self._asked, self._asked_at = f"script/watch/{self._worker}/{time.monotonic_ns()}", now
            self._board.post(_ASK, self._asked)


def left_key(worker: int) -> str:
    """Return the key that a worker sets at the end of its loop."""
    return f"script/left/{worker}"


def _exchange_key(asked: str, worker: int) -> str:
    return f"{asked}/{worker}/exchange"


def _part_key(number: int, worker: int) -> str:
    return f"script/part/{number}/{worker}"


class LoopWatch:
    """One worker's watch, on a thread of its own; it watches the thread that makes it.

    Args:
        board: board for requests and answers; not used by others at the same time.
        worker: index of the worker.
        workers: number of workers.
        steps: returns the steps done by this worker.
        print_line: function that prints a line.
        patience_s: seconds of waiting before the other workers are asked for their places.

    Attributes:
        exchange: exchange with all others in which this worker waits: its step, and mean of gradients; else None.
    """

    def __init__(
        self,
        board: StoreBoard,
        worker: int,
        workers: int,
        steps: Callable[[], int],
        print_line: Callable[[str], None],
        patience_s: float = WATCH_PATIENCE_S,
    ) -> None:
        self.exchange: tuple[int, int] | None = None
        self._board = board
        self._worker = worker
        self._workers = workers
        self._steps = steps
        self._print_line = print_line
        self._patience_s = patience_s
        self._look_every_s = min(_LOOK_EVERY_S, patience_s / 2)
        self._watched = threading.get_ident()
        self._waits_since: float | None = None
        self._step_since = time.monotonic()
        self._reported_at: float | None = None
        self._answered = ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        if workers > 1:
            self._thread.start()

    @contextmanager
    def waiting(self, exchange: tuple[int, int] | None = None) -> Iterator[None]:
        """Record that this worker waits for others inside.

        Args:
            exchange: see the attribute.
        """
        self._waits_since = time.monotonic()
        self.exchange = exchange
        try:
            yield
        finally:
            self.exchange = None
            self._waits_since, self._reported_at, self._step_since = None, None, time.monotonic()

    def close(self) -> None:
        """End the watch."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(self._look_every_s):
            try:
                self._answer()
                since, now = self._waits_since, time.monotonic()
                if since is not None and now - since >= self._patience_s and self._is_time(now):
                    self._ask(since)
            except RuntimeError:  # the store is gone, and with it the run
                return

    def _is_time(self, now: float) -> bool:
        return self._reported_at is None or now - self._reported_at >= _SPEAK_EVERY_S

    def _answer(self) -> None:
        asked = self._board.read(_ASK)
        if asked is not None and asked != self._answered:
            self._answered = asked
            self._board.post(_exchange_key(asked, self._worker), json.dumps(self.exchange))
            self._board.post(f"{asked}/{self._worker}", self._where())

    def _ask(self, since: float) -> None:
        name = f"script/watch/{self._worker}/{time.monotonic_ns()}"
        self._board.post(_ASK, name)
        until = time.monotonic() + 4 * self._look_every_s
        others = [worker for worker in range(self._workers) if worker != self._worker]
        answers: dict[int, str | None] = {}
        while (
            not self._over.wait(self._look_every_s / 4)
            and time.monotonic() < until
            and None
            in (answers := {worker: self._board.read(f"{name}/{worker}") for worker in others}).values()
        ):
            self._answer()
        if self._waits_since != since:
            return
        self._reported_at = time.monotonic()
        places = ", ".join(f"worker {worker} {answers.get(worker) or 'gives no answer'}" for worker in others)
        self._print_line(f"worker {self._worker} {self._where()}: {places}")

    def _where(self) -> str:
        waits, now = self._waits_since, time.monotonic()
        line = line_of_script(sys._current_frames().get(self._watched))
        if waits is not None:
            return f"waits at step {self._steps()} for {now - waits:.0f} s{line}"
        return f"is at step {self._steps()}, {now - self._step_since:.0f} s after its last exchange{line}"
