"""One host's notice, shared by all ranks of a run that torchrun has started: all leave with the same status.

SIGTERM at any rank ─▶ store: somebody is preempted ─┐
worker 0: the run has ended, done or early ──────────┴─▶ everyone leaves with 0, or with 75
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from polyrhythm.communication.transports.torch_distributed.rendezvous import Rendezvous
from polyrhythm.events import Event, RunEnded
from polyrhythm.launch.preemption import PREEMPTED, Preemption

_COME, _OUTCOME = "preemption/come", "preemption/outcome"
_PATIENCE = timedelta(seconds=30)
_INTERRUPTED = "interrupted"


class SharedNotice:
    """One rank's view of it.

    Args:
        preemption: of this host.
        rendezvous: of the rank.
        emit: takes the run's events.
    """

    def __init__(self, preemption: Preemption, rendezvous: Rendezvous, emit: Callable[[Event], None]) -> None:
        self._preemption = preemption
        self._store = rendezvous.store.clone() if preemption.is_possible else None
        self._emit = emit
        self._over = threading.Event()

    def come(self) -> None:
        """SIGTERM has come here; what is not through when the notice ends is given up."""
        if self._preemption.is_possible and not self._preemption.begun:
            self._preemption.begin()
            threading.Thread(target=self._exit_in_time, name="notice", daemon=True).start()

    def emit(self, event: Event) -> None:
        """Passes an event on; the others wait for the outcome of the run."""
        if isinstance(event, RunEnded) and self._store is not None:
            with suppress(RuntimeError):
                self._store.set(_OUTCOME, event.outcome)
        self._emit(event)

    def ended_the_run(self) -> bool:
        """Whether the run ended early for this; called once this rank has left it."""
        self._over.set()
        if self._store is None:
            return False
        try:
            if not self._preemption.begun and not self._store.check([_COME]):
                return False
            self._store.wait([_OUTCOME], _PATIENCE)
            return bytes(self._store.get(_OUTCOME)).decode() == _INTERRUPTED
        except (RuntimeError, dist.DistError):  # the store has left before this rank
            return self._preemption.begun

    def _exit_in_time(self) -> None:
        assert self._store is not None, "no notice comes where none is possible"
        with suppress(RuntimeError):
            self._store.set(_COME, "")
        if not self._over.wait(self._preemption.left_s):
            os._exit(PREEMPTED)
