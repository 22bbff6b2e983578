"""A thread of its own for what waits on sockets, beside a program that computes."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class EventLoop:
    """An event loop on a thread; made and ended by the main one.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, _Result], patience_s: float | None = None) -> _Result:
        """Does something on the thread, and waits until it is done.

        Raises:
            TimeoutError: it takes longer than `patience_s`.
        """
        return self.start(work).result(patience_s)

    def start(self, work: Coroutine[Any, Any, _Result]) -> Future[_Result]:
        """Starts something on the thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def soon(self, act: Callable[[], None]) -> None:
        """Has a function called on the thread."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(act)

    def close(self) -> None:
        """Ends what is under way, and the thread."""
        with suppress(RuntimeError):
            asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_all() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    for _ in range(2):  # what has been hung up is closed a turn of the loop later
        await asyncio.sleep(0)


class Descriptors:
    """Files of this process that a forked child must not keep open: its copies would hide that they are closed."""

    def __init__(self) -> None:
        self._open: set[int] = set()

    def add(self, descriptor: int) -> None:
        """Notes one."""
        self._open.add(descriptor)

    def remove(self, descriptor: int) -> None:
        """Forgets one that is about to be closed."""
        self._open.discard(descriptor)

    def close(self) -> None:
        """Closes them all; in a forked child, which has copies of its own."""
        for descriptor in self._open:
            with suppress(OSError):
                os.close(descriptor)
        self._open.clear()


DESCRIPTORS = Descriptors()
os.register_at_fork(after_in_child=DESCRIPTORS.close)
