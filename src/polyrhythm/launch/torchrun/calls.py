"""Hears ranks that torchrun has started again while the others go on, on threads of worker 0's process.

call of rank r ─▶ r is known to be lost: it comes in as the successor
             └──▶ r shows no pulse for as long as the watchdog bears: lost, unknown to all (it had no links yet)
             └──▶ r lives: whoever calls waits
"""

from __future__ import annotations

import threading
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from polyrhythm.communication.transports.torch_distributed.rendezvous import Rendezvous
from polyrhythm.launch.pulse import read
from polyrhythm.launch.torchrun.gathering import (
    CALLS,
    Gathered,
    answer,
    answer_over,
    call_again,
    say_that_it_is_over,
)
from polyrhythm.launch.torchrun.reception import Reception

_FOREVER = timedelta(days=365)
_CLOSING_PATIENCE_S = 5.0


class Calls:
    """Answers them; a context.

    Args:
        outside: of worker 0, as torchrun has it: where ranks call.
        start: of the run that is under way.
        reception: has places.
        silence_s: without a pulse, after which a rank that is called for is gone.
    """

    def __init__(self, outside: Rendezvous, start: Gathered, reception: Reception, silence_s: float) -> None:
        self._store: Any = outside.store.clone()
        self._pulses: Any = start.rendezvous.store.clone()
        self._hearing: Any = outside.store.clone()  # a connection of its own, since it waits there
        self._hearing.set_timeout(_FOREVER)
        self._name = start.name
        self._reception = reception
        self._silence_s = silence_s
        self._unanswered: dict[str, int] = {}
        self._answered = set(start.answered)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._hear, name="calls", daemon=True)

    def __enter__(self) -> Calls:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        with suppress(RuntimeError, dist.DistError):  # the store is gone, and with it whoever calls
            if self._reception.over:
                say_that_it_is_over(self._store)
            self._store.queue_push(CALLS, f"close 0 {self._name}".encode())
            self._thread.join(_CLOSING_PATIENCE_S)
            for nonce, rank in list(self._unanswered.items()):
                if self._reception.over:
                    answer_over(self._store, nonce)
                else:  # for the next worker 0
                    call_again(self._store, rank, nonce)

    def _hear(self) -> None:
        with suppress(RuntimeError, dist.DistError):
            while True:
                word, rank, about = self._hearing.queue_pop(CALLS, True).decode().split()
                if word == "close" and about == self._name:
                    return
                if word == "call" and about not in self._answered and about not in self._unanswered:
                    self._take(int(rank), about)

    def _take(self, rank: int, nonce: str) -> None:
        self._unanswered[nonce] = rank
        self._reception.call(rank, partial(self._answer, nonce))
        if nonce in self._unanswered:
            threading.Thread(target=self._doubt, args=(rank, nonce), name="doubt", daemon=True).start()

    def _answer(self, nonce: str, incarnation: int) -> None:
        self._unanswered.pop(nonce, None)
        self._answered.add(nonce)
        answer(self._store, nonce, self._name, incarnation)

    def _doubt(self, rank: int, nonce: str) -> None:
        """Sees whether the process that is said to have a rank lives, for as long as somebody else calls for it."""
        with suppress(RuntimeError, dist.DistError):
            before = read(self._pulses, [rank]).get(rank)
            while not self._over.wait(self._silence_s) and nonce in self._unanswered:
                now = read(self._pulses, [rank]).get(rank)
                if now is None or (now == before and not now.left):
                    self._reception.miss(rank)
                before = now
