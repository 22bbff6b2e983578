"""Membership of asynchronous workers: common start, replacements, common end.

Rank 0 (`Host`) is the coordinator; every other worker is a `Member`, and `KeeperSuccessor` is rank 0's replacement,
which queries all others before it becomes the host of the run in progress.

    worker                     worker 0                    its partners
    JOIN ───────────────────▶  (waits for all living workers)
      ◀──────── PARAMETERS ──
    …                                                                     a replacement's JOIN goes to its partners too,
    JOIN ───────────────────▶ ───▶ PARAMETERS   JOIN ──────────────────▶  and it starts from the mean of their
      ◀─────────────────────────────────────────────────── PARAMETERS ──  parameters, at its last step known to them
    LEAVE ──────────────────▶  (waits for all living workers)
      ◀───────────── LEAVE ──
    PARAMETERS ─────────────▶  the mean of all: the run's final model

Until rank 0 sends `LEAVE`, all workers answer requests. Then all have taken their last step, so there are no more
requests, and a replacement that arrives now receives `LEAVE`.

If rank 0 fails and has a replacement, the others keep their messages for it:

    worker                     worker 0                    its replacement
    JOIN, EVENT, LEAVE ─────▶   ✝
    keeps it                                               (its loop starts)
      ◀────────────────────────────────────────── LEAD ──  to all
    LEAD(last known step of rank 0) ──────────────────────▶  (waits for all living workers)
    kept messages ────────────────────────────────────────▶
      ◀────────────────────────────────────────── JOIN ──  to its partners: it starts from their mean, then admits
    PARAMETERS ───────────────────────────────────────────▶  and releases the others

So a worker that has sent its model answers requests until its process may end.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple, Protocol

from torch import Tensor

from polyrhythm.communication.message import Kind, Message
from polyrhythm.errors import PeerLost
from polyrhythm.strategies.gossip.pairing.keeper import Keeper, Reply
from polyrhythm.strategies.worker_part import WorkerSetting
from polyrhythm.training.flat_parameters import FlatParameters

KINDS = (Kind.JOIN, Kind.PARAMETERS, Kind.LEAVE, Kind.EVENT, Kind.LEAD)
"""Message kinds of the membership; the keeper handles all others. `EVENT` forwards a stop request."""


class Standing(IntEnum):
    """State of a worker, as reported to a new rank 0."""

    OUTSIDE = 0  # it has not requested admission
    ENTERING = 1  # replacement before its first step
    WAITING = 2  # waits for the initial parameters of the run
    RESUMED = 3  # the same, with the parameters of a checkpoint
    INSIDE = 4  # it has parameters and takes steps

    @property
    def first(self) -> bool:
        """Whether it waits for the start of the run."""
        return self in (Standing.WAITING, Standing.RESUMED)

    @property
    def has_parameters(self) -> bool:
        """Whether it can send parameters to a joining worker."""
        return self in (Standing.RESUMED, Standing.INSIDE)


class Membership(Protocol):
    """One worker's side of the membership: start, replacements, end."""

    @property
    def over(self) -> bool:
        """Whether no more messages have to be handled."""

    def on_message(self, source: int, message: Message) -> list[Reply]:
        """Process a message and return the replies."""

    def on_loss(self, rank: int) -> list[Reply]:
        """Handle the failure of a worker and return the replies."""


class Admission(NamedTuple):
    """Reply to a worker that requests admission.

    Attributes:
        values: parameters, `(n,)`; None if the sender has none.
        step: step of the sender; for a replacement, the latest step of its predecessor known to the sender.
        succeeds: whether the receiver is a replacement; its partners may know a later step of its predecessor.
    """

    values: Tensor | None
    step: int
    succeeds: bool = False

    def message(self) -> Message:
        """Return the message to send."""
        return Message(Kind.PARAMETERS, self.values, step=self.step, version=int(self.succeeds))

    @classmethod
    def of(cls, message: Message) -> Admission:
        """Return the content of a message made by `message`."""
        return cls(message.tensor, message.step, bool(message.version))


class Introduction(NamedTuple):
    """Report of a worker to a new worker 0.

    Attributes:
        standing: state of the worker.
        latest: latest step of the failed worker 0 known to the worker.
        stop: whether the run has received a stop request.
    """

    standing: Standing
    latest: int
    stop: bool

    def message(self) -> Message:
        """Return the message to send."""
        return Message(Kind.LEAD, version=self.standing, step=self.latest, stop=self.stop)

    @classmethod
    def of(cls, message: Message) -> Introduction:
        """Return the content of a message made by `message`."""
        return cls(Standing(message.version), message.step, message.stop)


class Host:
    """Membership on worker 0; see `Membership`.

    Args:
        keeper: keeper of worker 0's parameters.
        flat: flat vector, which holds the run's final model at the end.
    """

    def __init__(self, keeper: Keeper, flat: FlatParameters) -> None:
        self.over = False
        self._keeper = keeper
        self._flat = flat
        self._own = keeper.place.rank
        self._present = set(keeper.place.workers)
        self._begun = self._closing = self._ended = False
        self._waiting: dict[int, int] = {}
        self._known: set[int] = set()
        self._left: set[int] = set()
        self._contributed: set[int] = set()
        self._total = keeper.values

    def on_message(self, source: int, message: Message) -> list[Reply]:
        """Admit workers, forward a stop request, and collect the final models."""
        if message.kind is Kind.EVENT:
            return self._stop()
        if message.kind is Kind.JOIN:
            return self._join(source, message.step)
        if message.kind is Kind.LEAVE:
            return self._leave(source)
        if message.kind is Kind.LEAD:
            # From a replacement that found the query in its inbox; its request for admission follows.
            return []
        assert message.tensor is not None, "a leaving worker sends its parameters"
        self._total.add_(message.tensor.to(self._total.device))
        self._contributed.add(source)
        return self._end()

    def take_over(self, step: int, present: set[int], first: set[int]) -> list[Reply]:
        """Continue a run in progress with the parameters of the flat vector.

        Args:
            step: step of its own worker.
            present: ranks of the other present workers.
            first: ranks of those among them that wait for the start of the run.
        """
        self._begun = True
        self._present = {self._own, *present}
        self._known = {*self._keeper.place.workers} - first  # partners may know later steps of these
        self._keeper.make_ready(step)
        return [self._keeper.answer(step=step)]

    def begin_again(self, present: set[int]) -> list[Reply]:
        """Start a run in which no remaining worker has taken a step.

        Args:
            present: ranks of the other present workers.
        """
        self._present = {self._own, *present}
        return self._join(self._own, 0)

    def on_loss(self, rank: int) -> list[Reply]:
        """Stop waiting for a failed worker."""
        self._waiting.pop(rank, None)
        if rank not in self._contributed:
            self._present.discard(rank)
        return self._end() if self._closing else [*self._begin(), *self._close()]

    def _join(self, rank: int, step: int) -> list[Reply]:
        if self._closing:
            return [(rank, Message(Kind.LEAVE))]
        self._present.add(rank)
        self._left.discard(rank)
        self._keeper.absent.discard(rank)
        if self._begun:
            return [(rank, self._answer_to(rank, step))]
        self._waiting[rank] = step
        return self._begin()

    def _answer_to(self, rank: int, step: int) -> Message:
        """Return the admission of a worker to a run in progress."""
        values = self._keeper.copy()
        if rank not in self._known:
            self._known.add(rank)
            return Admission(values, self._keeper.step).message()
        step = max(step, self._keeper.latest.get(rank, 0))
        return Admission(values, step, succeeds=True).message()

    def _begin(self) -> list[Reply]:
        if self._begun or not self._waiting.keys() >= self._present:
            return []
        self._begun = True
        self._known = set(self._waiting)
        self._keeper.make_ready(self._waiting[self._own])
        self._keeper.latest.update(self._waiting)  # for replacements of workers without a later message
        stated = Admission(self._keeper.copy(), self._keeper.step).message()
        return [
            self._keeper.answer(step=self._keeper.step) if rank == self._own else (rank, stated)
            for rank in self._waiting
        ]

    def _stop(self) -> list[Reply]:
        if self._keeper.stop:
            return []
        self._keeper.stop = True
        return [(rank, Message(Kind.EVENT, stop=True)) for rank in self._present - {self._own}]

    def _leave(self, rank: int) -> list[Reply]:
        if self._ended:  # a `LEAVE` of its own worker ends the host
            self.over |= rank == self._own
            return []
        self._left.add(rank)
        return self._close()

    def _close(self) -> list[Reply]:
        """Once all have taken their last step, request their models."""
        if self._closing or not self._left >= self._present:
            return []
        self._closing = True
        self._total = self._keeper.values.clone()
        self._contributed = {self._own}
        asked = [(rank, Message(Kind.LEAVE)) for rank in self._present - {self._own}]
        return asked or self._end()

    def _end(self) -> list[Reply]:
        """Once all models have arrived, write their mean to the flat vector."""
        if self._ended or not self._contributed >= self._present:
            return []
        self._ended = True
        self._flat.vector.copy_(self._total.div_(len(self._contributed)))
        return [self._keeper.answer()]


class Member:
    """Membership of a worker other than 0; see `Membership`.

    Args:
        keeper: keeper of the worker's parameters.
        setting: setting of the worker; its flat vector receives the initial parameters.
        restored: whether that already holds the parameters of a checkpoint.
    """

    def __init__(self, keeper: Keeper, setting: WorkerSetting, *, restored: bool) -> None:
        self.over = False
        self._keeper = keeper
        self._flat = setting.flat
        self._restored = restored
        self._host_returns = setting.leader_returns
        self._leader = keeper.place.workers[0]
        self._away = self._news = False
        self._succeeds = setting.succeeds
        self._joins: Message | None = None
        """First message of its own worker, until rank 0 has answered it."""
        self._received = self._stop_requested = self._left = self._released = False
        self._step = 0
        self._asked: set[int] = set()
        self._found: list[Tensor] = []

    def on_message(self, source: int, message: Message) -> list[Reply]:
        """Join, answer joining workers, and leave."""
        if source == self._keeper.place.rank:
            return self._forward(message)
        if message.kind is Kind.LEAD:
            return self._introduce()
        if message.kind is Kind.EVENT:
            return self._stop()
        if message.kind is Kind.LEAVE:
            return self._leave()
        if message.kind is Kind.JOIN:
            return self._welcome(source)
        return self._begin_with(source, message)

    def on_loss(self, rank: int) -> list[Reply]:
        """Continue without a failed partner, or without worker 0 until its replacement sends `LEAD`.

        Raises:
            PeerLost: worker 0 failed, and has no replacement.
        """
        if rank != self._leader:
            return self._answered_by(rank)
        if not self._host_returns:
            raise PeerLost(rank, "waiting for a message from anyone")
        self._away = self._news = True
        return self._report_failures()

    def stay(self) -> None:
        """Continue to answer after its worker has left, until that worker sends another `LEAVE`."""
        self.over = False

    def _forward(self, message: Message) -> list[Reply]:
        """Forward a message of its own worker to worker 0, or later to its replacement."""
        if self._released:
            self.over = True
            return []
        if message.kind is Kind.JOIN:
            self._joins, self._received = message, True
        self._stop_requested |= message.kind is Kind.EVENT
        self._left |= message.kind is Kind.LEAVE
        return self._report_failures() + ([] if self._away else [(self._leader, message)])

    def _report_failures(self) -> list[Reply]:
        """Report each failure of worker 0 once to its own worker, if that worker waits for a reply.

        The worker's control loop can then receive messages of a new rank 0, which may wait for it there.
        """
        waits = self._joins is not None or self._left
        if not (self._news and waits):
            return []
        self._news = False
        return [self._keeper.answer(Kind.LEAD)]

    @property
    def _standing(self) -> Standing:
        if self._keeper.ready or not self._received:
            return Standing.INSIDE if self._keeper.ready else Standing.OUTSIDE
        if self._succeeds:
            return Standing.ENTERING
        return Standing.RESUMED if self._restored else Standing.WAITING

    def _introduce(self) -> list[Reply]:
        """Send a new worker 0 a report, and the messages that the failed one may not have received."""
        self._away = False
        keeper = self._keeper
        keeper.absent.discard(self._leader)
        stop = keeper.stop or self._stop_requested
        here = Introduction(self._standing, keeper.latest.get(self._leader, 0), stop).message()
        words = [here] if self._joins is None else [here, self._joins]
        if self._left:
            words.append(Message(Kind.LEAVE))
        return [(self._leader, word) for word in words]

    def _welcome(self, rank: int) -> list[Reply]:
        keeper = self._keeper
        keeper.absent.discard(rank)
        values = self._flat.vector.clone() if self._standing is Standing.RESUMED else keeper.copy()
        return [(rank, Admission(values, keeper.latest.get(rank, 0)).message())]

    def _begin_with(self, source: int, message: Message) -> list[Reply]:
        """Process a reply to `JOIN`."""
        admission = Admission.of(message)
        if source != self._leader:
            self._step = max(self._step, admission.step)
            self._found += [admission.values] if admission.values is not None else []
            return self._answered_by(source)
        joins, self._joins = self._joins, None
        if joins is None:
            return []  # reply to a repeated message
        assert admission.values is not None, "worker 0 has parameters"
        if not self._restored:
            self._flat.vector.copy_(admission.values)
        if not admission.succeeds:  # the step is rank 0's; its replacement may need it
            self._step, self._keeper.latest[self._leader] = joins.step, admission.step
            return self._begin()
        self._step = max(self._step, joins.step, admission.step)
        place = self._keeper.place
        self._found = [admission.values] if self._leader in place.partners else []
        self._asked = {*place.partners} - {self._leader}
        return [(rank, Message(Kind.JOIN)) for rank in self._asked] or self._begin()

    def _answered_by(self, rank: int) -> list[Reply]:
        if rank not in self._asked:
            return []
        self._asked.discard(rank)
        return [] if self._asked else self._begin()

    def _begin(self) -> list[Reply]:
        if self._found:
            self._flat.vector.copy_(sum(self._found[1:], self._found[0]) / len(self._found))
            self._found = []
        self._keeper.make_ready(self._step)
        return [self._keeper.answer(step=self._step)]

    def _stop(self) -> list[Reply]:
        self._keeper.stop = True
        return []

    def _leave(self) -> list[Reply]:
        if not self._keeper.ready:
            self.over = True
            return [self._keeper.answer(Kind.LEAVE)]
        model = (self._leader, Message(Kind.PARAMETERS, self._keeper.values))
        if self._released:
            return [model]
        self._released = self.over = True
        return [model, self._keeper.answer()]


class KeeperSuccessor:
    """Membership of worker 0's replacement: queries all workers, starts from their mean, then acts as the host.

    It waits for all living workers, since an unknown one would never be released. Their messages to the host are kept
    until then.

    Args:
        keeper: keeper of its parameters.
        flat: flat vector, which receives the initial parameters, and holds the run's final model at the end.
    """

    def __init__(self, keeper: Keeper, flat: FlatParameters) -> None:
        self._keeper = keeper
        self._flat = flat
        self._host = Host(keeper, flat)
        self._leads = self._called = self._stop = False
        self._awaited: set[int] = set()
        self._present: set[int] = set()
        self._giving: set[int] = set()
        self._first: set[int] = set()
        self._asked: set[int] = set()
        self._found: list[Tensor] = []
        self._step = 0
        self._later: list[tuple[int, Message]] = []

    @property
    def over(self) -> bool:
        """Whether no more messages have to be handled."""
        return self._host.over

    def on_message(self, source: int, message: Message) -> list[Reply]:
        """Collect reports and parameters; afterwards handle messages as the host."""
        if self._leads:
            return self._host.on_message(source, message)
        if source == self._keeper.place.rank:
            return self._call()
        if message.kind is Kind.LEAD:
            return self._handle(source, message)
        if message.kind is Kind.PARAMETERS:
            return self._take(source, message)
        self._later.append((source, message))
        return []

    def on_loss(self, rank: int) -> list[Reply]:
        """Stop waiting for a failed worker."""
        if self._leads:
            return self._host.on_loss(rank)
        for group in (self._awaited, self._present, self._giving, self._first, self._asked):
            group.discard(rank)
        self._later = [(source, message) for source, message in self._later if source != rank]
        return self._request_when_all_reported()

    def _call(self) -> list[Reply]:
        self._called = True
        self._awaited = set(self._keeper.place.others)
        return [(rank, Message(Kind.LEAD)) for rank in sorted(self._awaited)]

    def _handle(self, rank: int, message: Message) -> list[Reply]:
        self._awaited.discard(rank)
        standing, step, stop = Introduction.of(message)
        self._step = max(self._step, step)
        self._stop |= stop
        if standing is not Standing.OUTSIDE:
            self._present.add(rank)
        if standing.has_parameters:
            self._giving.add(rank)
        if standing.first:
            self._first.add(rank)
        return self._request_when_all_reported()

    def _take(self, rank: int, message: Message) -> list[Reply]:
        if rank in self._asked and message.tensor is not None:
            self._found.append(message.tensor)
        self._asked.discard(rank)
        return self._request_when_all_reported()

    def _request_when_all_reported(self) -> list[Reply]:
        """Request parameters once all workers have reported, and become the host once they have arrived.

        Raises:
            PeerLost: no worker has parameters.
        """
        if not self._called or self._awaited or self._asked:
            return []
        if self._found:
            self._flat.vector.copy_(sum(self._found[1:], self._found[0]) / len(self._found))
            self._found = []
            return self._lead(self._host.take_over(self._step, self._present, self._first))
        if self._first and not self._giving:  # its own initial parameters equal those of its predecessor
            return self._lead(self._host.begin_again(self._present))
        self._asked = self._giving & {*self._keeper.place.partners} or set(self._giving)
        if not self._asked:
            raise PeerLost(self._keeper.place.rank, "looking for a worker with parameters")
        return [(rank, Message(Kind.JOIN)) for rank in sorted(self._asked)]

    def _lead(self, replies: list[Reply]) -> list[Reply]:
        self._leads = True
        waiting, self._later = self._later, []
        if self._stop:
            waiting.insert(0, (self._keeper.place.rank, Message(Kind.EVENT, stop=True)))
        for source, message in waiting:
            replies += self._host.on_message(source, message)
        return replies
