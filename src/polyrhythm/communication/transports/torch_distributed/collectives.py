"""Collectives of gloo, whose failure on one rank is made everybody's failure."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from polyrhythm.communication.transports.collective_broken import CollectiveBroken

_LOOK_EVERY = timedelta(milliseconds=50)


class CollectiveHandle:
    """A collective of the library under way, and what to do with its result.

    Args:
        work: the library's; None where there is nothing to do.
        finish: called once, when the work has ended.
        fail: told once, with the reason, when the work broke.
    """

    def __init__(
        self, work: Any, finish: Callable[[], None] | None = None, fail: Callable[[str], None] | None = None
    ) -> None:
        self._work = work
        self._finish = finish
        self._fail = fail
        self._reason = ""

    def done(self) -> bool:
        """Whether the collective has ended."""
        work = self._work
        return work is None or bool(work.is_completed())

    def wait(self) -> None:
        """Blocks until the collective has ended.

        Raises:
            CollectiveBroken: a rank is gone.
        """
        if self._work is not None:
            self._end()
        if self._reason:
            raise CollectiveBroken(self._reason)

    def _end(self) -> None:
        # In a frame of its own: the traceback of what `wait` raises must not hold the work, and so its connections.
        work = self._work
        try:
            while not self._ends(work):
                if self._reason:  # somebody has given the whole group up
                    return
        except RuntimeError as error:
            reason = _essence(str(error))
        else:
            if self._finish is not None and self._work is not None:
                self._finish()
            self._work = None
            return
        self.let_go(reason)
        del work
        if self._fail is not None:
            self._fail(reason)

    def _ends(self, work: Any) -> bool:
        """Waits, but no longer than until somebody may have given up; tells whether the collective has ended.

        Raises:
            RuntimeError: it broke.
        """
        if self._fail is None:  # nobody gives up
            work.wait()
            return True
        try:
            work.wait(_LOOK_EVERY)
        except RuntimeError:
            if not work.is_completed():
                return False  # it only takes long
            work.wait()  # it may have ended well since; else this raises what broke it
        return True

    def under_way(self) -> Any:
        """Gives the library's work, if it has not ended."""
        return None if self.done() else self._work

    def let_go(self, reason: str) -> None:
        """Gives the collective up; `wait` raises `reason` from now on."""
        self._work, self._reason = None, self._reason or reason


class GlooCollectives:
    """The gloo group of one communicator.

    Gloo breaks only those collectives that talk to the lost rank themselves; the other members would wait for ever
    for those that have failed. So a rank that sees one break lets go of the whole group. That closes its
    connections, and so the news travels around:

        rank 2 dies ─▶ 1 and 3 fail and let go ─▶ 0 and 4 fail and let go ─▶ …

    Args:
        group: the gloo group.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._handles: weakref.WeakSet[CollectiveHandle] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._reason = ""

    def start(
        self, operation: Callable[[Any], Any], finish: Callable[[], None] | None = None
    ) -> CollectiveHandle:
        """Starts a collective.

        Args:
            operation: starts it on the group, gives the library's work.
            finish: called when it has ended well.

        Raises:
            CollectiveBroken: an earlier one broke.
        """
        with self._lock:  # every rank must start its collectives in the same order
            if self._group is None:
                raise CollectiveBroken(self._reason)
            handle = CollectiveHandle(operation(self._group), finish, self._let_go)
            self._handles.add(handle)
        return handle

    def start_all_reduce(self, tensor: Tensor, finish: Callable[[], None] | None = None) -> CollectiveHandle:
        """Starts to add up over all members, in place; `finish` is called when it has ended well."""
        return self.start(lambda group: group.allreduce([tensor]), finish)

    def all_reduce(self, tensor: Tensor) -> None:
        """Adds up over all members, in place."""
        self.start_all_reduce(tensor).wait()

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Overwrites a tensor with member `root`'s."""
        copy = tensor.detach().contiguous()
        self.start(lambda group: group.broadcast(copy, root)).wait()
        if copy.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(copy)

    def barrier(self) -> None:
        """Returns when all members have called it."""
        self.all_reduce(torch.zeros(1))

    def give_up(self, reason: CollectiveBroken) -> None:
        """Ends all collectives, also those that wait for someone who is there and says nothing."""
        with self._lock:
            under_way = [work for handle in self._handles if (work := handle.under_way()) is not None]
            if under_way:  # the library cannot let go of them, and would wait for ever if it were made to
                _keep_for_ever((self._group, under_way))
        self._let_go(reason.reason)

    def close(self) -> None:
        """Leaves nothing behind: the library ends its connections with the process."""

    def _let_go(self, reason: str) -> None:
        with self._lock:
            handles, self._handles = list(self._handles), weakref.WeakSet()
            group, self._group, self._reason = self._group, None, reason
        for handle in handles:  # each holds the group's connections open
            handle.let_go(reason)
        del group


def _keep_for_ever(kept: Any) -> None:
    """Sees to it that something is never torn down, not even when the process ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def _essence(text: str) -> str:
    """Takes the first sentence of the library's message, without its place in the library."""
    sentence = text.splitlines()[0].partition(". ")[0]
    return sentence.partition("] ")[2] if sentence.startswith("[/") else sentence
