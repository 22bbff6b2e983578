"""Waiting for other ranks: as long as it takes, but never without a word."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from polyrhythm.errors import RunError

SPEAK_AFTER_S = 30.0


def _nothing() -> None:
    """Does nothing."""


def await_key(store: Any, key: str, awaited: str, again: Callable[[], None] = _nothing) -> str:
    """Waits until somebody has set a key of the store; says every half minute whom it waits for.

    Args:
        store: where the ranks meet.
        key: to be set by another rank.
        awaited: who must do what, for people, such as `rank 0 to join`.
        again: called as often, before it waits on.

    Returns:
        The key's text.

    Raises:
        RunError: the store is gone.
    """

    def take() -> bytes:
        store.wait([key], timedelta(seconds=SPEAK_AFTER_S))
        return bytes(store.get(key))

    return _patiently(take, awaited, again)


def await_word(store: Any, queue: str, awaited: str) -> str:
    """Takes the next word of a queue; says each time that the store's own timeout has passed whom it waits for.

    Args:
        store: where the ranks meet.
        queue: to which another rank pushes words.
        awaited: who must do what, for people.

    Returns:
        The word.

    Raises:
        RunError: the store is gone.
    """
    return _patiently(lambda: bytes(store.queue_pop(queue, True)), awaited)


def _patiently(take: Callable[[], bytes], awaited: str, again: Callable[[], None] = _nothing) -> str:
    while True:
        try:
            return take().decode()
        except dist.DistStoreError:  # it took too long; a lost connection is a DistNetworkError
            _say(f"still waiting for {awaited}")
            again()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise RunError(f"the store is gone while waiting for {awaited}: {reason}") from None


@contextmanager
def speaking_up(text: Callable[[], str], after_s: float = SPEAK_AFTER_S) -> Iterator[None]:
    """Says what it is waiting for, once, if the body takes long.

    Args:
        text: gives the words, on a thread of its own; nothing is said if they are empty.
        after_s: seconds of silence.
    """
    timer = threading.Timer(after_s, lambda: _say(text()))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # it holds what `text` does, which must not be freed by a thread that Python's exit cuts short


def _say(text: str) -> None:
    if text:
        print(f"polyrhythm: {text}", file=sys.stderr, flush=True)
