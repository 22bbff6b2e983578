"""Waiting for other ranks: with a word every half minute, and not for ever."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from polyrhythm.errors import RunError

SPEAK_AFTER_S = 30.0
LIMIT_S = 1800.0
"""Seconds for which ranks wait for each other at the start by default."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _GROWTH = 0.001, 0.1, 1.3
Found = TypeVar("Found")


def _nothing() -> None:
    """Does nothing."""


class Patience:
    """Time limit of a rank that waits for others to join; one for all its waits.

    Args:
        limit_s: seconds from now on, after which it ends with an error that names the missing ranks.
        look: callback, called repeatedly during the wait; an exception in it ends the wait.
        until_s: end on the monotonic clock, if the limit has been running for some time; None: it begins now.
    """

    def __init__(
        self, limit_s: float = LIMIT_S, look: Callable[[], None] = _nothing, until_s: float | None = None
    ) -> None:
        self._limit_s = limit_s
        self._until_s = time.monotonic() + limit_s if until_s is None else until_s
        self._look = look

    def looking(self, look: Callable[[], None]) -> Patience:
        """Return the remaining time, with a function to call while it lasts."""
        return Patience(self._limit_s, look, self._until_s)

    def key(self, store: Any, key: str, rank: int, again: Callable[[], None] = _nothing) -> str:
        """Wait until another rank has set a key of the store, and return its text.

        Args:
            store: store where the ranks meet.
            key: key that it sets.
            rank: rank that sets the key.
            again: callback, called every half minute of the wait.

        Raises:
            RunError: the key was not set in time, or the store is gone.
        """
        return self._until(lambda: _text(store, key), lambda: [rank], again)

    def keys(self, store: Any, name: Callable[[int], str], ranks: Sequence[int]) -> list[str]:
        """Wait until all ranks have set a key each, and return their texts; errors as for `key`.

        Args:
            store: store where the ranks meet.
            name: name of a rank's key.
            ranks: all ranks; the first of them waits for all others before it sets its own key.
        """

        def absent() -> list[int]:
            missing = [rank for rank in ranks if not store.check([name(rank)])]
            return [rank for rank in missing if rank != ranks[0]] or missing

        return [self._until(lambda rank=rank: _text(store, name(rank)), absent) for rank in ranks]  # type: ignore[misc]

    def word(self, store: Any, queue: str, absent: Callable[[], Sequence[int]]) -> str:
        """Return the next word of a queue that no other process takes words from; errors as for `key`.

        Args:
            store: store where the ranks meet.
            queue: queue to which other ranks push words.
            absent: returns the ranks that are waited for.
        """

        def take() -> str | None:
            return bytes(store.queue_pop(queue, False)).decode() if store.queue_len(queue) else None

        return self._until(take, absent)

    def _until(
        self,
        take: Callable[[], Found | None],
        absent: Callable[[], Sequence[int]],
        again: Callable[[], None] = _nothing,
    ) -> Found:
        # Not the store's own wait: PyTorch logs its timeout, and it could not check anything else in the
        # meantime.
        pause_s, speaks_s = _FIRST_PAUSE_S, time.monotonic() + SPEAK_AFTER_S
        while True:
            with _store_asked():
                found = take()
                if found is not None:
                    return found
                self._look()
                now_s = time.monotonic()
                if now_s >= self._until_s:
                    raise RunError(self._in_vain(absent()))
                if now_s >= speaks_s:
                    _print_line(f"still waiting for {_named(absent())} to join")
                    again()
                    speaks_s = now_s + SPEAK_AFTER_S
            time.sleep(pause_s)
            pause_s = min(_GROWTH * pause_s, _LONGEST_PAUSE_S)

    def _in_vain(self, absent: Sequence[int]) -> str:
        return (
            f"{_named(absent)} {'has' if len(absent) == 1 else 'have'} not joined within {self._limit_s:g} s: see what "
            "becomes of it there before it trains, or give it longer with --gather-s"
        )


@contextmanager
def _store_asked() -> Iterator[None]:
    try:
        yield
    except RunError:
        raise
    except dist.DistStoreError:  # it takes long to answer; a lost connection is a DistNetworkError
        return
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise RunError(f"the store is gone while waiting for other ranks to join: {reason}") from None


def _text(store: Any, key: str) -> str | None:
    return bytes(store.get(key)).decode() if store.check([key]) else None


def _named(ranks: Sequence[int]) -> str:
    *others, last = map(str, ranks)
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"


@contextmanager
def speaking_up(text: Callable[[], str], after_s: float = SPEAK_AFTER_S) -> Iterator[None]:
    """Print the awaited event, once, if the body takes long.

    Args:
        text: function that returns the text, called on a thread of its own; an empty text is not printed.
        after_s: seconds of silence.
    """
    timer = threading.Timer(after_s, lambda: _print_line(text()))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # it holds what `text` does, which must not be freed by a thread that Python's exit cuts short


def _print_line(text: str) -> None:
    if text:
        print(f"polyrhythm: {text}", file=sys.stderr, flush=True)
