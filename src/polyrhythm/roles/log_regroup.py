"""Regrouping below a strategy: the exchanges of workers are entries of a log (see `communication.log`).

worker, suspended in an exchange                 leader (worker 0)
  revoke ──────────────────────────────────────▶ revoke ──▶ all other workers are suspended as well
  StepBroken(view, report on its log) ─────────▶ waits for this from all workers that are connected; `form`
  ◀──────────────── MembershipView(workers, gives, hands, begins)
  a worker with the state ─▶ one that lacks it: its own, and its log
  a worker with a result ─▶ one that lacks it
  all: sums over the new communicator; the exchange goes on, or has its result

Where contributions are kept, breaking an exchange off costs nothing: the leader lets newcomers in at its own exchanges.
Elsewhere they are let in before a step, as in `Regroup`.
"""

from __future__ import annotations

from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.log import Report, Result
from polyrhythm.communication.message import Kind, Message
from polyrhythm.errors import PeerLost
from polyrhythm.roles.control_messages import (
    NOTHING,
    NOTHING_DONE,
    Handover,
    MembershipView,
    StepBroken,
)
from polyrhythm.roles.regroup import Participant, Regroup, RegroupControl
from polyrhythm.roles.world import LEADER, World
from polyrhythm.strategies.state import below, prefixed, without
from polyrhythm.strategies.worker_part import Logged

_LOG = "log."


class LogRegroup(Regroup):
    """Takes one worker from view to view; see `Regroup`.

    Args:
        world: where this rank is.
        control: where views come from.
        member: what the worker brings.
        workers: the communicator of all workers.
        part: the worker's, with the log.
    """

    def __init__(
        self, world: World, control: RegroupControl, member: Participant, workers: Communicator, part: Logged
    ) -> None:
        super().__init__(world, control, member, workers)
        self._logged, self._exchanger = part, part.exchanger
        self._enters = False
        self._ended: PeerLost | None = None
        """The loss that has ended a regrouping, which may have been inside an exchange."""
        self._exchanger.recover, self._exchanger.calls = self.reform, self._calls

    def check(self, step: int) -> None:
        """Note that a step is done; raise if a newcomer waits that must be let in before the next one.

        Raises:
            PeerLost: one waits.
        """
        self._attempts = 0
        if not self._exchanger.keeps and self._control.call_due(self.number, step, wait=True):
            self._agreed = not self._world.leads
            raise PeerLost(self._world.network.rank, "letting a worker in")

    def recovers_from(self, loss: PeerLost) -> bool:
        """Whether it is another loss than the one that has ended a regrouping."""
        return loss is not self._ended

    def reform(self) -> None:
        while True:
            self._begin_attempt()
            self._exchanger.break_off()
            if not self._exchanger.keeps and self.step != NOTHING_DONE:
                self.step = self._exchanger.since  # a step whose exchanges are incomplete is repeated
            if self._took_place(self._next_view()):
                self._come_in()
                return

    def enter(self) -> None:
        if self._took_place(self._next_view()):
            self._come_in()
        else:
            self.reform()

    def _come_in(self) -> None:
        """Take part in what the others exchange, if this worker has just taken a state over."""
        joins, self._exchanger.joins = self._exchanger.joins, 0
        if self._enters:
            self._enters = False
            self._logged.come_in(joins)
        if joins > 0:
            self._exchanger.rows([0] * joins)

    def _next_view(self) -> MembershipView:
        try:
            return self._control.next_view(self._word)
        except PeerLost as loss:
            self._ended = loss
            raise

    def _calls(self) -> bool:
        """Whether this worker leads, and a newcomer waits to be let in at an exchange."""
        return (
            self._exchanger.keeps
            and self._world.leads
            and self._control.call_due(self.number, self.step, wait=False)
        )

    @property
    def _word(self) -> StepBroken:
        report, log = Report(), self._exchanger.log
        if self.step != NOTHING_DONE:
            report = Report(
                steps=self.step,
                merged=log.merged,
                opened=log.opened,
                since=self._exchanger.since,
                have=tuple(log.kept),
                apart=log.apart,
                group=self._logged.group,
                inside=log.under_way is not None and not log.under_way.aside,
                over=self.over,
            )
        return StepBroken(
            number=self.number,
            progress=NOTHING,
            generation=self._world.generation,
            view=self._view,
            report=report,
        )

    def _take_place(self, view: MembershipView) -> None:
        member, workers = self._member, view.workers
        worker, flat = member.worker, member.flat
        observer, rank = self._world.observer, self._world.network.rank
        self._view = view
        ranks = [self._world.roles.workers[each] for each in workers]
        self._workers = self._world.network.regrouped(view.name, ranks, view.generations)
        self._workers.revoke_without(LEADER)
        for giver, taker in view.gives:
            if worker == giver:
                self._workers.send(workers.index(taker), self._handover())
            elif worker == taker:
                self._take_state(self._workers.receive(workers.index(giver))[1])
                if observer is not None:
                    observer.caught_up(rank, self.step)
        for number, giver, taker in view.hands:
            if worker == giver:
                self._give_result(number, workers.index(taker))
            elif worker == taker:
                self._take_result(number, workers.index(giver))
        self._exchanger.begins, self._exchanger.finished = view.begins, view.over
        flat.renew_gradients()  # the library may still write into the old ones
        if observer is not None:
            observer.joined(rank, ranks, view.name)
        self._exchanger.over(self._workers, workers)
        if observer is not None:
            observer.regrouped(rank, flat.vector)
        member.takes_place(workers.index(worker), len(workers))

    def _handover(self) -> Message:
        tensors, facts = self._logged.to_enter_with()
        kept, noted = self._exchanger.state()
        part = tensors | prefixed(_LOG, kept)
        place = {"step": self.step, "over": self.over}
        return Handover(self._member.flat.vector, part, {"part": facts, "log": noted, **place}).message()

    def _take_state(self, message: Message) -> None:
        given = Handover.from_message(message)
        self._member.flat.vector.copy_(given.vector)
        self._exchanger.load_state(below(_LOG, given.part), given.part_facts["log"])
        self.step, self.over, self._enters = given.part_facts["step"], given.part_facts["over"], True
        self._logged.enter((without(_LOG, given.part), given.part_facts["part"]), self.step)

    def _give_result(self, number: int, taker: int) -> None:
        result = self._exchanger.log.kept[number]
        self._workers.send(taker, Message(Kind.VECTOR, result.vector, weight=result.weight, stop=result.stop))

    def _take_result(self, number: int, giver: int) -> None:
        message = self._workers.receive(giver)[1]
        vector = None if message.tensor is None else message.tensor.clone()
        self._exchanger.take(number, Result(vector, message.weight, message.stop))
