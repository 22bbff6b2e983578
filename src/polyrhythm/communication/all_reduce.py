"""An all-reduce over one communicator, by one collective; several may be in progress at once.

Those that are started in turn (`one_by_one`) run in the background one after the other, in the order of their
start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from polyrhythm.communication.collective import Collective
from polyrhythm.communication.communicator import Communicator, Handle

Start = Callable[[Callable[[], Any]], Handle]
"""Runs a work in the background, as `Communicator.start` does."""

StartInTurn = Callable[[Start, Callable[[], Any]], Handle]


def one_by_one() -> StartInTurn:
    """Return a function that starts works in the background, each when all that it started before have ended.

    One that fails makes all that wait behind it fail with the same error.
    """
    last: Handle | None = None

    def start(run: Start, work: Callable[[], Any]) -> Handle:
        nonlocal last
        before = [last] if last is not None and not last.done() else []

        def follow() -> Any:
            while before:  # taken out, so that no chain of ended works is kept
                before.pop().wait()
            return work()

        last = run(follow)
        return last

    return start


class AllReduce:
    """Adds tensors up over all ranks of a communicator.

    Messages travel in a space of their own, numbered by call, so they meet neither other messages of the communicator
    nor those of another call.

    Args:
        communicator: communicator of the participants. All ranks must make the same calls in the same order.
        name: identifier among all-reduces on the same communicator.
        in_turn: whether each waits until those started before it have ended, so that the first is done first; else they
            share the links. A library's always do.
    """

    def __init__(
        self,
        collective: Collective,
        communicator: Communicator,
        name: str = "all-reduce",
        *,
        in_turn: bool = False,
    ) -> None:
        self._asked = collective
        self._start_in_turn = one_by_one() if in_turn and collective.in_messages else None
        self._space = collective.space(communicator, name)
        self._prepared: Collective | None = None
        self._calls = 0

    def prepare(self) -> Collective:
        """Prepare the collective, which may measure the links; else the first call does.

        Returns:
            The collective in use; what it has measured and chosen is among its fields.
        """
        if self._prepared is None:
            self._prepared = self._asked.prepared(self._space)
        return self._prepared

    def passed_on(self) -> Collective:
        """Return the collective for ranks that regroup, with what this one knows of the links."""
        return (self._prepared or self._asked).passed_on()

    def start(self, tensor: Tensor) -> Handle:
        """Start to add `tensor` up, in place, in the background; it must not change until the handle is done."""
        collective, tag = self.prepare(), self._next_tag()
        if self._start_in_turn is None:
            return collective.start(self._space, tensor, tag)
        return self._start_in_turn(self._space.start, lambda: collective.all_reduce(self._space, tensor, tag))

    def run(self, tensor: Tensor) -> None:
        """Add `tensor` up, in place."""
        collective = self.prepare()
        collective.all_reduce(self._space, tensor, self._next_tag())

    def _next_tag(self) -> int:
        self._calls = self._calls % 0xFFFFFFFF + 1  # the header has 32 bits for it; 0 is for what prepares
        return self._calls
