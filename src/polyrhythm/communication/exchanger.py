"""Exchanges of one worker, across any number of view changes: the layer below a strategy.

    strategy ── exchange ──▶ sum over the view ──▶ result ──▶ strategy
                    ▲   ✝ a member fails             │ kept until all have merged it
                    └── recover: the next view ◀─────┘ which may have sent the result

Where contributions are kept, a failure never leaves an exchange: the worker waits in it for the next view, and
contributes again or receives the result. Where sums are in place, nothing is kept: the step is repeated (`Again`), and
a worker that lacks a result receives the state of one that has merged it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from polyrhythm.communication.communicator import Communicator, Handle, all_ranks
from polyrhythm.communication.log import Entry, Log, Result
from polyrhythm.communication.message import Kind, Message
from polyrhythm.errors import PeerLost


class Again(Exception):
    """The view has changed, and the failed step is repeated from this worker's current state."""


class Sums:
    """Sums over the workers of a view."""

    def over(self, group: Communicator) -> Any:
        """Return the same sums over other workers, with the existing measurements of the links, and nothing pending."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Let the collective measure the links, if it needs to; all members must call it."""

    def commit(self) -> None:
        """Treat the last sum as complete: it was so on other workers, although it failed on this one."""

    @property
    def pending(self) -> Iterable[Handle]:
        """Operations in the background that use this worker's memory; some may be done."""
        return ()


_Sums = TypeVar("_Sums", bound=Sums)
_ROWS = (1 << 20) + 1
"""Tag of the messages of `Exchanger.rows`."""


class Exchanger(Generic[_Sums]):
    """Exchanges of one worker.

    Args:
        workers: communicator of the first view.
        sums: sums over the workers of the first view.
        met: callback after each measurement of the links, in the first and every later view; may be replaced.

    Attributes:
        log: log of the exchanges.
        workers: communicator of the current view.
        members: indices of the view's workers in the first view, in rank order.
        sums: sums over the current view.
        keeps: whether contributions are kept; initially False.
        mixes: whether workers also exchange messages outside the log, in every step; see `attempt`.
        since: number of steps done when the latest result of a step was merged; set by the strategy's part.
        begins: the first entry of the current view that no member had opened before it.
        finished: whether a member of the current view has done all its steps, so that the others only have to leave.
        joins: payload of the exchange between two steps during which this worker joined; see `Entry.aside`.
        arrived: result of the started exchange, after it is merged and before it is used.
        relayed: whether the latest result of a step was received from another worker; False after other exchanges.
        ended: whether the run of these workers is over, so that no pending exchange gets a result any more.
        met: the given callback.
        recover: callback after a failed exchange; returns once the next view is agreed. None: failures are raised.
        recovers_from: function that returns whether that is possible after a failure.
        repeats: whether a worker repeats its step when its state is replaced in a pending exchange; else it stays in
            the exchange, with the contribution that it has made.
        replaced: whether the state was replaced during the latest `recover`.
        calls: function that returns whether this worker must trigger regrouping before its exchange, to admit a
            joining worker.
    """

    def __init__(
        self, workers: Communicator, sums: _Sums, met: Callable[[Communicator], None] = lambda workers: None
    ) -> None:
        self.log = Log()
        self.workers, self.sums = workers, sums
        self.members = all_ranks(workers.size)
        self.keeps = self.mixes = self.relayed = self.finished = self.ended = False
        self.repeats, self.replaced = True, False
        self.since = self.begins = self.joins = 0
        self.arrived: Result | None = None
        self.recover: Callable[[], None] | None = None
        self.recovers_from: Callable[[PeerLost], bool] = lambda loss: True
        self.calls: Callable[[], bool] = lambda: False
        self.met = met
        self._started: tuple[Entry, Callable[[_Sums, int], Callable[[], Result]]] | None = None
        self._wait: Callable[[], Result] | None = None
        self._aside = 0

    def prepare(self) -> None:
        """Let the sums measure the links; all members must call it."""
        self.sums.prepare()
        self.met(self.workers)

    def break_off(self) -> None:
        """Cancel the pending sums: afterwards they touch no memory of this worker any more."""
        if self._started is not None and self._wait is not None:
            with suppress(PeerLost):
                self.log.complete(self._started[0], self._waited(self.sums, self._started[0].number))
        for handle in self.sums.pending:  # they fail once the group is revoked
            with suppress(PeerLost):
                handle.wait()
        if not self.keeps:
            self.log.give_up()
            self._aside = 0

    def take(self, number: int, result: Result) -> None:
        """Store a result received from another worker, of the pending exchange or of a later one."""
        entry = self.log.under_way
        if entry is not None and entry.number == number:
            self.sums.commit()
        self.log.take(number, result)

    def over(self, workers: Communicator, members: tuple[int, ...]) -> None:
        """Continue with other workers; all of them must call it."""
        self.workers, self.members, self.sums = workers, members, self.sums.over(workers)
        self.prepare()
        self._begin()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the log as (tensors, other values), for a worker that joins with a copy of this worker's state."""
        kept = self.log.kept
        tensors = {str(number): result.vector for number, result in kept.items() if result.vector is not None}
        facts = {number: (result.weight, result.stop) for number, result in kept.items()}
        return tensors, {
            "merged": self.log.merged,
            "since": self.since,
            "keeps": self.keeps,
            "kept": facts,
            "apart": self.log.apart,
            "joins": self._aside,
        }

    def load_state(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Continue from the `state` of another worker."""
        kept = {int(k): Result(tensors.get(str(k)), *values) for k, values in facts["kept"].items()}
        pending = self.log.under_way
        self.log.load(facts["merged"], kept, facts["apart"])
        self.state_replaced()
        if pending is not None and not self.repeats:
            self.log.reopen(pending)
        self.since, self.joins, self.keeps = facts["since"], facts["joins"], facts["keeps"]

    def state_replaced(self) -> None:
        """Note that this worker continues from another state, without the exchanges that it had started before."""
        self.replaced = True
        if self.repeats:
            self._started = self._wait = self.arrived = None

    @property
    def admits_between(self) -> bool:
        """Whether replacements join before a step; else they join at any exchange of the coordinator."""
        return self.mixes or not self.keeps

    @property
    def under_way(self) -> bool:
        """Whether a started exchange is still pending."""
        return self._started is not None

    def start(self, run: Callable[[_Sums, int], Callable[[], Result]]) -> None:
        """Start the next exchange of a step in the background; `finish` completes it. One at a time; see `exchange`.

        Args:
            run: function that starts it, given the sums and the number of the entry, and returns a function that waits
                for the result; called again if a member fails.
        """
        self._started = self.log.open(), run
        self._begin()

    def finish(self) -> Result:
        """Return the result of the started exchange, and count it as merged."""
        self.arrive()
        result, self.arrived = self.arrived, None
        assert result is not None, "something was started"
        return result

    def arrive(self) -> None:
        """Wait for the result of the started exchange, count it as merged, and keep it in `arrived`."""
        if self._started is not None:
            entry = self._started[0]
            self._complete(self._waited, entry)
            self._started = None
            self.arrived = self.log.merge(entry)

    def _begin(self) -> None:
        self._wait = None
        if self._started is not None and self._started[0].result is None:
            entry, run = self._started
            try:
                self._wait = run(self.sums, entry.number)
            except PeerLost as loss:  # raised where the result is waited for
                self._wait = partial(_raise, loss)

    def _waited(self, sums: _Sums, number: int) -> Result:
        wait, self._wait = self._wait, None
        assert wait is not None, "the exchange was started in this view"
        return wait()

    def sum(self, vector: Tensor) -> Tensor:
        """Return the sum of all workers' vectors, in an exchange outside the steps.

        Args:
            vector: own vector, `(n,)`; not changed.
        """

        def run(_: _Sums, number: int) -> Result:
            total = vector.clone()
            self.workers.all_reduce(total)
            return Result(total, 1.0, False)

        total = self.exchange(run, aside=len(vector)).vector
        assert total is not None, "all bring something"
        return total

    def rows(self, own: list[int]) -> dict[int, list[int]]:
        """Return the numbers of each participating worker, by worker index, in an exchange outside the steps.

        Args:
            own: own numbers, equally many on all workers; zeros on a joining worker.
        """

        def run(_: _Sums, number: int) -> Result:
            table = _gathered(own, self.workers)
            rows = [[member, *row] for member, row in zip(self.members, table, strict=True)]
            return Result(torch.tensor(rows).flatten(), 1.0, False)

        table = self.exchange(run, aside=len(own)).vector
        assert table is not None, "all bring something"
        return {member: row for member, *row in table.view(-1, len(own) + 1).tolist()}

    def exchange(self, run: Callable[[_Sums, int], Result], *, aside: int = 0, apart: bool = False) -> Result:
        """Return the result of the next exchange, and count it as merged.

        Args:
            run: function that carries it out, given the sums and the number of the entry; called again with other sums
                if a member fails. Where contributions are kept, it must change nothing else before it returns.
            aside: see `Entry`.
            apart: see `Entry`.

        Raises:
            Again: it failed, and contributions are not kept, or these workers' run is over.
            PeerLost: it failed, and the run cannot continue without the failed worker.
        """
        self._aside = aside
        if self._started is not None:
            self.arrive()
        entry = self.log.open(aside=aside, apart=apart)
        self._complete(run, entry)
        result = self.log.merge(entry)
        if aside:
            self._aside, self.relayed = 0, False
        if not self.keeps:
            self.log.forget()
        return result

    def attempt(self, act: Callable[[], None]) -> bool:
        """Call `act`, which exchanges messages outside the log; return whether no member failed.

        If one did, the next view is agreed when this returns False.

        Raises:
            PeerLost: the run cannot continue without the failed worker.
        """
        try:
            act()
            return True
        except PeerLost as loss:
            if self.recover is None or not self.recovers_from(loss):
                raise
        self.recover()
        return False

    def _complete(self, run: Callable[[_Sums, int], Result], entry: Entry) -> None:
        self.relayed = False
        while entry.result is None:
            if not self._completes(run, entry):
                assert self.recover is not None, "else the loss is raised"
                kept = self.keeps  # before `recover`, which may load a state that sets it
                self.replaced = False
                self.recover()  # outside the handler: its error would keep pending sums alive
                if self.ended or not kept or (self.replaced and self.repeats):
                    raise Again
                self.relayed = entry.result is not None

    def _completes(self, run: Callable[[_Sums, int], Result], entry: Entry) -> bool:
        try:
            if self.calls():
                return False
            self.log.complete(entry, run(self.sums, entry.number))
        except PeerLost as loss:
            if self.recover is None or not self.recovers_from(loss):
                raise
            return False
        return True


def _raise(loss: PeerLost) -> Result:
    raise loss


def _gathered(own: list[int], workers: Communicator) -> list[list[int]]:
    """Return the numbers of all workers, gathered by rank 0."""
    if workers.rank > 0:
        workers.send(0, Message(Kind.VECTOR, torch.tensor(own), tag=_ROWS))
        received = workers.receive(0, _ROWS)[1].tensor
        assert received is not None, "they are numbers"
        table: list[list[int]] = received.view(-1, len(own)).tolist()
        return table
    table = [own]
    for source in range(1, workers.size):
        received = workers.receive(source, _ROWS)[1].tensor
        assert received is not None, "they are numbers"
        table.append(received.tolist())
    message = Message(Kind.VECTOR, torch.tensor(table).flatten(), tag=_ROWS)
    for to in range(1, workers.size):
        workers.send(to, message)
    return table
