"""The deal of a run with dynamic batches: its owner on worker 0, and every worker's hand.

    worker                                worker 0, in the background
      DRAW(step) ── 64 bytes ──────────▶  Dealer.draw ─▶ event `BatchesDrawn` ─▶ launcher: ledger
      ◀────────── GRANT(stretch) ───────

A worker requests a grant at the beginning of its last batch, so the answer arrives before it is needed; a stretch holds
many batches (see `data/dealer.py`). The owner is a separate task, which answers at once however slow worker 0 is.

Every grant is reported to the launcher first, so a replacement of worker 0 knows all grants of its predecessor.
Members of a group in lockstep send separate requests, and get the same grant.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, astuple
from threading import Lock
from typing import Any, NamedTuple

import torch

from polyrhythm.communication.communicator import Communicator, Handle
from polyrhythm.communication.message import Kind, Message
from polyrhythm.data.dealer import Dealer, DrawnBatch, Grant
from polyrhythm.errors import PeerLost, RunError
from polyrhythm.events import BatchesDrawn
from polyrhythm.roles.world import LEADER, World

MOST_STEPS = 1 << 62
"""Upper bound of a worker's steps, where the number is not known beforehand."""
_GRANT_TAG = 1


class Draw(NamedTuple):
    """Request of a worker for the grant that holds a step.

    Attributes:
        generation: number of previous processes of its rank.
        step: step that it is about to compute.
    """

    generation: int
    step: int

    def message(self) -> Message:
        """Pack it into a message."""
        return Message(Kind.DRAW, version=self.generation, step=self.step)

    @classmethod
    def of(cls, message: Message) -> Draw:
        """Parse the result of `message`."""
        return cls(message.version, message.step)


def deal_communicator(world: World) -> Communicator:
    """Return the workers' communicator for the deal."""
    return world.network.subgroup("deal", world.roles.workers)


class Dealt:
    """Batches that have been dealt to each worker.

    Args:
        dealer: dealer of the batches.
        units: indices of the workers of each unit.
    """

    def __init__(self, dealer: Dealer, units: tuple[tuple[int, ...], ...]) -> None:
        self.dealer = dealer
        self.units = units
        self.unit_of = {worker: unit for unit, workers in enumerate(units) for worker in workers}

    def images(self, step: int, worker: int) -> int:
        """Return the images in a worker's batch of one of its steps; 0 where it has been dealt none."""
        unit = self.unit_of[worker]
        if step not in self.dealer.steps_of(unit):
            return 0
        members, place = len(self.units[unit]), self.units[unit].index(worker)
        return max(0, -(-(self.dealer.images_of(unit, step) - place) // members))

    def images_from(self, worker: int, step: int) -> int:
        """Return the images that a worker has been dealt from one of its steps on."""
        steps = self.dealer.steps_of(self.unit_of[worker])
        return sum(self.images(each, worker) for each in range(max(step, steps.start), steps.stop))


class Deal:
    """Owner of a run's deal, on worker 0.

    Args:
        dealer: dealer that decides.
        units: indices of the workers of each unit.
        communicator: communicator of all workers for the deal.
        now: returns the time, in seconds.
        sink: receiver of events, which sets their time, from any thread; None: events are not needed.
        begun_in: number of finished epochs when the session started.

    Attributes:
        opening: initial state of the deal, as `state` writes it.
    """

    def __init__(
        self,
        dealer: Dealer,
        units: tuple[tuple[int, ...], ...],
        communicator: Communicator,
        now: Callable[[], float],
        sink: Callable[[BatchesDrawn], None] | None,
        begun_in: int = 0,
    ) -> None:
        self._dealer = dealer
        self._begun_in = begun_in
        self._dealt = Dealt(dealer, units)
        self._units, self._unit_of = units, self._dealt.unit_of
        self._gone: set[int] = set()
        self._generations: Counter[int] = Counter()
        self._first: dict[tuple[int, int], int | None] = {}
        """The step at which each process of a worker, by its generation, has begun to draw, if known."""
        self._communicator = communicator
        self._now = now
        self._sink = sink
        self._unsaid: list[BatchesDrawn] | None = []
        self.opening = dealer.to_json()
        self._lock = Lock()
        self._leaving: dict[int, Handle] = {}
        self._serving: Handle | None = None

    def open(self) -> None:
        """Start answering workers, in the background."""
        self._serving = self._communicator.start(self._serve_or_report)

    def inherit(self, worker: int, generation: int) -> None:
        """Record which process of a worker has drawn from the deal under its previous owner.

        Args:
            worker: index of the worker.
            generation: number of previous processes of its rank.
        """
        self._generations[worker] = generation
        self._first[worker, generation] = None

    def begin(self) -> None:
        """Note that the run has been announced, so that events may follow."""
        with self._lock:
            for event in self._unsaid or ():
                self._emit_now(event)
            self._unsaid = None

    def close(self) -> None:
        """Stop answering: all workers have left."""
        if self._serving is not None:
            self._communicator.send(LEADER, Message(Kind.LEAVE))
            self._serving.wait()
            self._serving = None

    def lose(self, worker: int, step: int, losses: int, *, reported: bool = True) -> None:
        """Take back the unfinished batches of a failed worker's unit, if no member of it remains.

        Args:
            worker: index of the worker.
            step: number of its steps that count.
            losses: number of processes of its rank that have failed.
            reported: whether this process reported `step`; else a previous one, which may have counted otherwise.
        """
        with self._lock:
            first = self._first.pop((worker, losses - 1), None)
            if not reported and first is not None:
                step = first
            unit = self._unit_of[worker]
            if self._generations[worker] >= losses:  # a replacement has drawn already
                self._emit_returned(unit, self._dealer.return_former(unit, step))
                return
            self._generations[worker] = losses  # requests of the failed process may still arrive
            self._gone.add(worker)
            if self._gone.issuperset(self._units[unit]):
                self._emit_returned(unit, self._dealer.return_batches(unit, step))

    def images(self, step: int, worker: int) -> int:
        """Return the images in a worker's batch of one of its steps; 0 where it has been dealt none."""
        with self._lock:
            return self._dealt.images(step, worker)

    def images_from(self, worker: int, step: int) -> int:
        """Return the images that a worker has been dealt from one of its steps on."""
        with self._lock:
            return self._dealt.images_from(worker, step)

    def epoch_of(self, worker: int, step: int) -> int:
        """Return the epoch of a worker's step; that of its next draw, if it has none."""
        with self._lock:
            return self._dealer.progress_of(self._unit_of[worker], step)[0]

    @property
    def undealt(self) -> int:
        """Number of images that have not been granted."""
        with self._lock:
            return self._dealer.undealt

    @property
    def grants(self) -> list[list[Grant]]:
        """All grants of each unit."""
        with self._lock:
            return self._dealer.grants

    def state(self) -> dict[str, Any]:
        """Return the deal as a JSON-able dict."""
        with self._lock:
            return self._dealer.to_json()

    def _emit_returned(self, unit: int, given: list[Grant]) -> None:
        for grant in given:
            self._emit(BatchesDrawn(time_s=0, unit=unit, **asdict(grant)))

    def _emit(self, event: BatchesDrawn) -> None:
        """Emit an event, in the order in which the deal changes; call it under the lock."""
        if self._unsaid is None:
            self._emit_now(event)
        else:
            self._unsaid.append(event)

    def _emit_now(self, event: BatchesDrawn) -> None:
        if self._sink is not None:
            self._sink(event)

    def _serve_or_report(self) -> None:
        try:
            self._serve()
        except Exception:
            # Such as a closed launcher: worker 0 must not wait for ever, nor others for it.
            self._communicator.send(LEADER, Message(Kind.LEAVE, tag=_GRANT_TAG))
            raise

    def _serve(self) -> None:
        while True:
            try:
                source, message = self._communicator.receive()
            except PeerLost:  # the coordinator learns of it elsewhere
                continue
            if message.kind is Kind.LEAVE:
                break
            self._answer(source, Draw.of(message))
        for handle in self._leaving.values():
            with suppress(PeerLost):
                handle.wait()

    def _answer(self, worker: int, asked: Draw) -> None:
        with self._lock:
            if asked.generation < self._generations[worker]:  # of a failed process, on a slow link
                return
            self._generations[worker] = asked.generation
            self._gone.discard(worker)
            unit = self._unit_of[worker]
            undealt, held = self._dealer.undealt, self._dealer.steps_of(unit)
            end = held.stop
            grant = self._dealer.draw(unit, asked.step, self._now())
            anew = asked.step not in range(held.start, held.stop + 1)
            begins = not asked.generation and (worker, 0) not in self._first
            # A process that continues its predecessor's steps is judged by that one's reports until its own first
            # report.
            self._first.setdefault((worker, asked.generation), asked.step if anew else None)
            if self._dealer.undealt < undealt:  # else it was granted before, or no batches remain
                self._emit(BatchesDrawn(time_s=0, unit=unit, **asdict(grant)))
            elif self._dealer.steps_of(unit).stop != end:  # it counts its steps from a new origin
                self._emit_returned(unit, [Grant(asked.step, 0, 0, 0, 0)])
            # Others may have drawn whole epochs before its first batch: these are to be tested and saved, too.
            advance_to = (
                self._begun_in if begins else max(grant.epoch, self._dealer.advance_to(unit, asked.step))
            )
        numbers = torch.tensor(astuple(grant))
        answer = Message(Kind.GRANT, numbers, version=advance_to, step=asked.step, tag=_GRANT_TAG)
        with suppress(PeerLost):
            if (before := self._leaving.pop(worker, None)) is not None:
                before.wait()
            self._leaving[worker] = self._communicator.start_send(worker, answer)


class DealtBatches:
    """The batches that one worker has drawn.

    Args:
        communicator: communicator of all workers for the deal.
        await_leader: function that waits for a new coordinator if the failed rank was the coordinator; returns
            whether the run continues.
        now: returns the time, in seconds.
        generation: number of previous processes of this worker's rank.

    Attributes:
        waited_s: seconds that this worker has waited for batches.
    """

    def __init__(
        self,
        communicator: Communicator,
        await_leader: Callable[[PeerLost], bool],
        now: Callable[[], float],
        generation: int,
    ) -> None:
        self.waited_s = 0.0
        self._communicator = communicator
        self._await_leader = await_leader
        self._now = now
        self._generation = generation
        self._grants: list[Grant] = []
        self._asked = self._following = -1
        self._begins_at = 0
        self._asking: Handle | None = None

    def grant(self, step: int) -> Grant:
        """Return the grant that holds a step, waiting for it if necessary; one without batches at the run's end."""
        while True:
            for grant in self._grants:
                if grant.step <= step < grant.end or (not grant.batches and grant.step == step):
                    return grant
            if self._asked != step:
                self._ask(step)
            self._receive()

    def epoch(self, step: int) -> int:
        """Return the epoch of a step; the number of epochs, where no batches remain."""
        return self.grant(step).epoch

    def advance_to(self, step: int) -> int:
        """Return the epoch in which this process begins at a step; all earlier epochs have ended.

        It may differ from the epoch of the step's batch: it is earlier if other workers drew whole epochs before this
        batch, and later if a failed worker returned the batch after its group had entered a later epoch.
        """
        self.grant(step)
        return self._begins_at

    def batches(self, epoch: int, step: int) -> Iterator[DrawnBatch]:
        """Yield the batches of an epoch from a step on, one per step."""
        while (grant := self.grant(step)).epoch == epoch and grant.batches:
            while step < grant.end:
                batch, step = grant.batch(step), step + 1
                if step == grant.end and self._asked != step:
                    self._ask(step)
                self._following = step
                yield batch

    def ask_again(self) -> None:
        """Forget that no batches remained: others may have returned some since."""
        self._grants = [grant for grant in self._grants if grant.batches]
        self._asked = -1

    @property
    def ready(self) -> bool:
        """Whether the batch after the last one of `batches` is available without waiting, or there is none."""
        with suppress(PeerLost):
            while (found := self._communicator.poll(None, _GRANT_TAG)) is not None:
                if found[1].kind is Kind.LEAVE:
                    raise RunError("worker 0 deals no more batches, since it failed")
                self._keep(found[1])
        step = self._following
        return any(grant.step <= step < grant.end or not grant.batches for grant in self._grants)

    def _ask(self, step: int) -> None:
        self._asked = step
        try:
            # Kept: dropping the handle of a send may cancel it.
            self._asking = self._communicator.start_send(LEADER, Draw(self._generation, step).message())
        except PeerLost as loss:
            self._wait_for_leader(loss)

    def _receive(self) -> None:
        began_s = self._now()
        try:
            message = self._communicator.receive(None, _GRANT_TAG)[1]
            if message.kind is Kind.LEAVE:
                raise RunError("worker 0 deals no more batches, since it failed")
            self._keep(message)
        except PeerLost as loss:
            self._wait_for_leader(loss)
        self.waited_s += self._now() - began_s

    def _keep(self, message: Message) -> None:
        assert message.tensor is not None, "a grant has its numbers with it"
        grant = Grant(*message.tensor.tolist())
        self._begins_at = message.version
        # The previous one is still needed where a step is repeated.
        self._grants = [*self._grants[-1:], grant]

    def _wait_for_leader(self, loss: PeerLost) -> None:
        if loss.rank != LEADER:
            return
        if not self._await_leader(loss):
            raise loss
        self._asked = -1
