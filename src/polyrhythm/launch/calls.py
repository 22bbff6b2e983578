"""Hears ranks that torchrun has started again while the others go on, on a thread of worker 0's process."""

from __future__ import annotations

import threading
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from polyrhythm.launch.gathering import CALLS, answer, answer_over, call_again, say_that_it_is_over
from polyrhythm.launch.reception import Reception

_FOREVER = timedelta(days=365)
_CLOSING_PATIENCE_S = 5.0


class Calls:
    """Answers them; a context.

    Args:
        store: where ranks call.
        name: of this start of the run.
        reception: has places.
    """

    def __init__(self, store: Any, name: str, reception: Reception) -> None:
        self._store = store.clone()
        self._hearing = store.clone()  # a connection of its own, since it waits there
        self._hearing.set_timeout(_FOREVER)
        self._name = name
        self._reception = reception
        self._unanswered: dict[str, int] = {}
        self._answered: set[str] = set()
        self._thread = threading.Thread(target=self._hear, name="calls", daemon=True)

    def __enter__(self) -> Calls:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(RuntimeError, dist.DistError):  # the store is gone, and with it whoever calls
            if self._reception.over:
                say_that_it_is_over(self._store)
            self._store.queue_push(CALLS, f"close 0 {self._name}".encode())
            self._thread.join(_CLOSING_PATIENCE_S)
            for nonce, rank in self._unanswered.items():
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
                if word == "call" and about not in self._answered:
                    self._unanswered[about] = int(rank)
                    self._reception.call(int(rank), partial(self._answer, about))

    def _answer(self, nonce: str, incarnation: int) -> None:
        self._unanswered.pop(nonce, None)
        self._answered.add(nonce)
        answer(self._store, nonce, self._name, incarnation)
