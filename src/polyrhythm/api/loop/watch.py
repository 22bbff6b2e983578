"""Names whoever keeps the others waiting in a user's own loop: the worker, its step, and the line of its script.

    worker 0   waits in an exchange ──▶ asks on the board ──▶ says where all are
    worker 1   computes, hangs or waits   ◀── its watch answers for it, from a thread of its own

Whoever does not answer is stopped, or its machine is. Nobody is ended: a step may take as long as the script wants.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from polyrhythm.api.loop.gradients import line_of_script
from polyrhythm.api.loop.store_board import StoreBoard

PATIENCE_S = 5.0
_LOOK_EVERY_S = 0.5
_SPEAK_EVERY_S = 60.0
_ASK = "script/watch/ask"


class LoopWatch:
    """One worker's watch, on a thread of its own; it watches the thread that makes it.

    Args:
        board: to ask and answer on; used by nobody else at the same time.
        worker: its index.
        workers: how many there are.
        steps: returns how many steps this worker has done.
        say: takes a line to be printed.
        patience_s: of waiting, before the others are asked where they are.
    """

    def __init__(
        self,
        board: StoreBoard,
        worker: int,
        workers: int,
        steps: Callable[[], int],
        say: Callable[[str], None],
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._board = board
        self._worker = worker
        self._workers = workers
        self._steps = steps
        self._say = say
        self._patience_s = patience_s
        self._look_every_s = min(_LOOK_EVERY_S, patience_s / 2)
        self._watched = threading.get_ident()
        self._waits_since: float | None = None
        self._step_since = time.monotonic()
        self._said_at: float | None = None
        self._answered = ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        if workers > 1:
            self._thread.start()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Take note that this worker waits for others inside."""
        self._waits_since = time.monotonic()
        try:
            yield
        finally:
            self._waits_since, self._said_at, self._step_since = None, None, time.monotonic()

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
        return self._said_at is None or now - self._said_at >= _SPEAK_EVERY_S

    def _answer(self) -> None:
        asked = self._board.read(_ASK)
        if asked is not None and asked != self._answered:
            self._answered = asked
            self._board.post(f"{asked}/{self._worker}", self._where())

    def _ask(self, since: float) -> None:
        name = f"script/watch/{self._worker}/{time.monotonic_ns()}"
        self._board.post(_ASK, name)
        until = time.monotonic() + 4 * self._look_every_s
        others = [worker for worker in range(self._workers) if worker != self._worker]
        told: dict[int, str | None] = {}
        while (
            not self._over.wait(self._look_every_s / 4)
            and time.monotonic() < until
            and None in (told := {worker: self._board.read(f"{name}/{worker}") for worker in others}).values()
        ):
            self._answer()
        if self._waits_since != since:
            return
        self._said_at = time.monotonic()
        places = ", ".join(f"worker {worker} {told.get(worker) or 'gives no answer'}" for worker in others)
        self._say(f"worker {self._worker} {self._where()}: {places}")

    def _where(self) -> str:
        waits, now = self._waits_since, time.monotonic()
        line = line_of_script(sys._current_frames().get(self._watched))
        if waits is not None:
            return f"waits at step {self._steps()} for {now - waits:.0f} s{line}"
        return f"is at step {self._steps()}, {now - self._step_since:.0f} s after its last exchange{line}"
