"""Regrouping: workers in lockstep go on without one that is lost, or with one that has joined.

    worker                               leader (worker 0)
                                           a successor has come: calls all to break off before a step to come
      a collective breaks, or it is time   one breaks, or a worker says so, or it is time
      revoke ────────────────────────────▶ revoke ──────────▶ all others: whatever they wait for breaks
      BROKEN(round, how far it has come) ▶ waits for this message from all workers that are there
      ◀──────────── membership view(workers, steps, who is newest, who is behind)
      the newest ─▶ those who are behind: parameters, and the state of its part
      all: their parts go on with the new communicator; a step that broke is begun again

After Bland, Bouteiller, Herault, Bosilca, Dongarra, "Post-failure recovery of MPI communication capability",
IJHPCA 2013 (revoke, shrink, agree), with the leader in place of the agreement: if it is lost, its successor
asks all again.

A membership view (`Formation`) is the set of workers that train together, and how far they have come. A
worker that has met the others waits for all of them at the next meeting, which is every step or seldom. So
the result of a meeting is held by some worker, which hands it on, or by none, and they meet again. The leader
may be lost like any other worker: what it knew of earlier views travels in each view, so that any member of
the latest one can tell its successor.

A worker that does not lead asks the leader for the next view, or its successor (`RemoteFormations`):

worker                          leader     its successor
  BROKEN ────────────────────────▶ dies
  waits: no message of the old one is answered
  ◀──────────────────────────────────────── LEAD
  BROKEN, with the view that broke ────────▶ collects the pending members

Where groups regroup apart (`GroupRegroup`), those who are left of a worker's group go on with each other, and
other groups are not involved:

member                                 server (`GroupServer`)
a collective of the group breaks       hears of the loss, or a successor asks to be let in
gives up what was under way ─────────▶ waits for this message from all members of the group that are there
◀───────────────────────────────────── who goes on together
all: begin anew at what the servers have of the group
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor

from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.message import (
    Kind,
    Message,
    pack_json,
    pack_tensors,
    unpack_json,
    unpack_tensors,
)
from polyrhythm.communication.transports.member_collectives import UNKNOWN_RANK
from polyrhythm.errors import PeerLost, RunError
from polyrhythm.roles.leader_channel import LeaderChannel
from polyrhythm.roles.world import LEADER, World
from polyrhythm.strategies.fault_policy import FaultPolicy
from polyrhythm.strategies.worker_part import WorkerCalls
from polyrhythm.training.flat_parameters import FlatParameters

TAG = 2
"""Nothing else that the leader sends a worker can be taken for a formation."""


@dataclass(frozen=True, order=True)
class Done:
    """How far a worker has come.

    Attributes:
        over: whether it has done all that there was to do.
        meetings: of all workers that it has been at; see `Regroups.meetings`.
        steps: that it has done.
    """

    over: bool = field(default=False, kw_only=True)
    meetings: int
    steps: int


NOTHING_DONE = -1
"""Steps of a worker that holds no parameters yet, and meetings."""
NOTHING = Done(NOTHING_DONE, NOTHING_DONE)


@dataclass(frozen=True, kw_only=True)
class Formation:
    """The workers that go in step from now on.

    Attributes:
        round: how many formations there have been before.
        workers: their indices among all workers of the run, in order; worker 0 leads.
        incarnations: how many have had each one's number before it.
        step: steps that the newest has done.
        newest: the worker that has come furthest, and hands on what it holds.
        behind: those who have not met the others so often.
        over: whether nothing is left to do but to leave.
        absences: since which step which workers have taken no part, oldest first, this formation's last.
        missed: after how many steps of the others which workers were missed, be they replaced or not.
    """

    round: int
    workers: tuple[int, ...]
    incarnations: tuple[int, ...] = ()
    step: int = 0
    newest: int = 0
    behind: tuple[int, ...] = ()
    over: bool = False
    absences: tuple[tuple[int, tuple[int, ...]], ...] = ((0, ()),)
    missed: tuple[tuple[int, int], ...] = ()

    @property
    def leader(self) -> int:
        """How many have led before the one that made it."""
        return self.incarnations[0] if self.incarnations else 0

    @property
    def name(self) -> str:
        """Names the communicator of those workers; two leaders may make formations of the same round."""
        return f"workers {self.round} of {self.leader}"

    def message(self) -> Message:
        """Packs it to be sent."""
        return Message(Kind.REGROUP, pack_json(asdict(self)), tag=TAG)

    @classmethod
    def of(cls, message: Message) -> Formation:
        """Reads what `message` wrote."""
        assert message.tensor is not None, "a formation travels as text"
        return cls.from_json(unpack_json(message.tensor))

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Formation:
        """Reads what is left of `asdict` in JSON."""
        plain = {name: tuple(told[name]) for name in ("workers", "incarnations", "behind")}
        absences = tuple((step, tuple(absent)) for step, absent in told["absences"])
        return cls(**told | plain | {"absences": absences, "missed": tuple(map(tuple, told["missed"]))})


@dataclass(frozen=True, kw_only=True)
class Broken:
    """A worker's word that a step cannot be finished.

    Attributes:
        round: of the formation that broke.
        done: how far the worker has come.
        incarnation: how many have had its number before it.
        formation: that broke, for a leader who has not made it.
    """

    round: int
    done: Done
    incarnation: int = 0
    formation: Formation | None = None

    def message(self) -> Message:
        """Packs it to be sent."""
        return Message(Kind.BROKEN, pack_json(asdict(self)))

    @classmethod
    def of(cls, message: Message) -> Broken:
        """Reads what `message` wrote."""
        assert message.tensor is not None, "a worker says how far it has come"
        told = unpack_json(message.tensor)
        formation = None if told["formation"] is None else Formation.from_json(told["formation"])
        return cls(**told | {"done": Done(**told["done"]), "formation": formation})


_VECTOR, _PART = "vector", "part."
_MOST_IN_VAIN = 100


class FormationSource(Protocol):
    """Where a worker gets formations: the leader makes them (`Assembly`), others ask for them (`RemoteFormations`)."""

    def breaks_off(self, round_: int, step: int, *, wait: bool) -> bool:
        """Whether this worker must regroup before a step, since another waits for a formation.

        Args:
            round_: of the present formation.
            step: the step's number.
            wait: whether regrouping before the step after it would do as well.
        """

    def first_formation(self) -> Formation:
        """Waits for the formation into which this worker, a successor, is let.

        Raises:
            PeerLost: somebody is gone whom the run needs.
        """

    def next_formation(self, word: Broken) -> Formation:
        """Waits for the next formation, made once all who are there have said how far they have come.

        Args:
            word: how far this worker has come.

        Raises:
            PeerLost: somebody is gone whom the run needs.
        """


@dataclass(frozen=True)
class Member:
    """What a worker brings into a formation.

    Attributes:
        worker: its index.
        part: its side of the strategy.
        flat: its parameters and gradients.
        takes_place: called after each formation with this worker's place among its members, and their number; it
            shares out the data.
        stands_in: called instead where a group regroups apart: with the absent workers of the group, this worker's
            place among those present, and their number.
    """

    worker: int
    part: WorkerCalls
    flat: FlatParameters
    takes_place: Callable[[int, int], None]
    stands_in: Callable[[tuple[int, ...], int, int], None]


class Regroup:
    """Takes one worker from formation to formation: a formation is the set of workers that train together.

    Args:
        world: where this rank is.
        formations: gives the next one.
        member: what it brings.
        workers: the communicator of all workers, which the part has been made with.

    Attributes:
        step: steps that this worker has done; kept by its loop.
        over: whether it has done all that there is to do.
    """

    def __init__(
        self, world: World, formations: FormationSource, member: Member, workers: Communicator
    ) -> None:
        self.step = NOTHING_DONE
        self.over = False
        self._world = world
        self._formations = formations
        self._member = member
        self._workers = workers
        self._everyone = tuple(range(workers.size))
        self._formation: Formation | None = None
        self._in_vain = 0
        self._agreed = False
        """Whether the leader asked for this regrouping, and so revokes the communicator itself."""
        if not world.rejoins:  # else nobody uses this one any more
            workers.revoke_without(LEADER)  # the leader would have passed a revocation on

    @property
    def leader(self) -> int:
        """How many have led before the one in whose formation this worker is."""
        return 0 if self._formation is None else self._formation.leader

    @property
    def round(self) -> int:
        """How many formations there have been before the present one."""
        return 0 if self._formation is None else self._formation.round

    @property
    def members(self) -> tuple[int, ...]:
        """The workers of the present formation, by their indices."""
        return self._everyone if self._formation is None else self._formation.workers

    def check(self, step: int) -> None:
        """Called before a step: raises if a worker waits for the next formation.

        Only before a step in which all communicate, so that the others notice soon.

        Args:
            step: its number.

        Raises:
            PeerLost: one waits.
        """
        self._in_vain = 0
        part = self._member.part
        if not part.lets_in(step):
            return
        if self._formations.breaks_off(self.round, step, wait=part.lets_in(step + 1)):
            self._agreed = not self._world.leads
            raise PeerLost(self._world.network.rank, "letting a worker in")

    def recovers_from(self, loss: PeerLost) -> bool:
        """Always: whether the run can go on is known only after asking the others."""
        return True

    def reform(self) -> None:
        """Regroups with whoever is there, until a formation holds; then all have met equally often.

        Raises:
            PeerLost: somebody is gone whom the run needs.
            RunError: it has been tried again and again, and nobody was lost.
        """
        while True:
            self._in_vain += 1
            if self._in_vain > _MOST_IN_VAIN:
                raise RunError(f"workers have regrouped {_MOST_IN_VAIN} times, and no step came of it")
            if not self._agreed:
                self._workers.revoke()
            self._agreed = False
            self._member.part.break_off()
            if self.step != NOTHING_DONE:
                self.step = self._member.part.begun_again(self.step)
            if self._took_place(self._formations.next_formation(self._word)):
                return

    def enter(self) -> None:
        """Enters the first formation, as a successor that has asked to, or that leads.

        Raises:
            PeerLost: somebody is gone whom the run needs.
        """
        if not self._took_place(self._formations.first_formation()):
            self.reform()

    @property
    def _word(self) -> Broken:
        formation, done = self._formation, NOTHING
        if self.step != NOTHING_DONE:
            done = Done(self._member.part.meetings(self.step), self.step, over=self.over)
        round_ = 0 if formation is None else formation.round
        return Broken(round=round_, done=done, incarnation=self._world.incarnation, formation=formation)

    def _took_place(self, formation: Formation) -> bool:
        try:
            self._take_place(formation)
        except PeerLost:
            return False
        return True

    def _take_place(self, formation: Formation) -> None:
        member, workers = self._member, formation.workers
        self._formation = formation
        ranks = [self._world.cast.workers[worker] for worker in workers]
        self._workers = self._world.network.regrouped(formation.name, ranks, formation.incarnations)
        self._workers.revoke_without(LEADER)
        if member.worker == formation.newest:
            for other in formation.behind:
                self._workers.send(workers.index(other), self._state())
        elif member.worker in formation.behind:
            message = self._workers.receive(workers.index(formation.newest))[1]
            assert message.tensor is not None, "the newest hands on what it holds"
            self._take_over(message.tensor, formation)
        self.over = formation.over
        member.flat.renew_gradients()  # the library may still write into the old ones
        if self.over:  # nothing is left but to leave with what there is
            return
        observer, rank = self._world.observer, self._world.network.rank
        if observer is not None:
            observer.joined(rank, ranks, formation.name)
        member.part.regroup(self._workers, workers)
        if observer is not None:
            observer.regrouped(rank, member.flat.vector)
        member.takes_place(workers.index(member.worker), len(workers))

    def _state(self) -> Message:
        tensors, facts = self._member.part.state()
        named = {_PART + name: value for name, value in tensors.items()} | {_VECTOR: self._member.flat.vector}
        return Message(Kind.STATE, pack_tensors(named, facts))

    def _take_over(self, payload: Tensor, formation: Formation) -> None:
        tensors, facts = unpack_tensors(payload)
        self._member.flat.vector.copy_(tensors.pop(_VECTOR))
        newest = {name.removeprefix(_PART): value for name, value in tensors.items()}
        step = self._member.part.take_over((newest, facts), self.step, formation.step)
        if self._world.observer is not None:
            self._world.observer.caught_up(self._world.network.rank, step)
        self.step = formation.step if formation.over else step


class RemoteFormations:
    """Gets one worker's formations from the leader; see `FormationSource`.

    Args:
        channel: to whoever leads.
        incarnation: how many have had this worker's number before it.
    """

    def __init__(self, channel: LeaderChannel, incarnation: int) -> None:
        self._channel = channel
        self._newcomer = Broken(round=0, done=NOTHING, incarnation=incarnation)

    def breaks_off(self, round_: int, step: int, *, wait: bool) -> bool:
        """Whether the leader has asked all to regroup before this step."""
        call = self._channel.call
        return call is not None and call[0] == round_ and step >= call[1]

    def first_formation(self) -> Formation:
        """Waits for a successor's first formation; asks again if the leader that it has asked is lost."""
        return self._answer() or self.next_formation(self._newcomer)

    def next_formation(self, word: Broken) -> Formation:
        """Tells the leader how far this worker has come, and waits for the formation."""
        while True:
            self._channel.await_leader()
            known = word.formation is None or word.formation.leader == self._channel.leader
            self._channel.answer((replace(word, formation=None) if known else word).message())
            if (formation := self._answer()) is not None:
                return formation

    def _answer(self) -> Formation | None:
        """Waits for the leader's answer; None where the leader is lost."""
        if self._channel.leader_lost:
            return None
        try:
            return Formation.of(self._channel.receive(TAG))
        except PeerLost:
            if not self._channel.survives_leader:
                raise
            return None


class GroupRegroup:
    """Takes one worker from formation to formation of its group.

    Args:
        world: where this rank is.
        faults: of the strategy, which regroups apart.
        member: what it brings.

    Attributes:
        step: steps that this worker has done; kept by its loop.
        over: whether its group has done all that there is to do.
    """

    def __init__(self, world: World, faults: FaultPolicy, member: Member) -> None:
        self.step = NOTHING_DONE
        self.over = False
        self._world = world
        self._faults = faults
        self._member = member
        self._in_vain = 0
        self._there: tuple[int, ...] | None = None
        self._missed: set[int] = set()

    @property
    def due(self) -> bool:
        """Whether somebody of the present formation is lost, so that the others may wait for this worker."""
        return bool(self._missed) and not self.over

    def lose(self, worker: int) -> None:
        """Notes that a worker of the same group is lost, while this one waits for others elsewhere."""
        if self._there is None or worker in self._there:
            self._missed.add(worker)

    def recovers_from(self, loss: PeerLost) -> bool:
        """Whether a worker is lost that the run can go on without; the loss of a server is handled elsewhere."""
        if loss.rank in (UNKNOWN_RANK, self._world.network.rank):
            return True
        workers = self._world.cast.workers
        return loss.rank in workers and self._world.goes_on_without(loss.rank, self._faults)

    def check(self, step: int) -> None:
        """Called before a step: raises if a successor waits to be let into the group.

        Args:
            step: its number.

        Raises:
            PeerLost: one waits.
        """
        self._in_vain = 0
        if self._member.part.due:
            raise PeerLost(self._world.network.rank, "letting a worker in")

    def reform(self) -> None:
        """Regroups with those of the group who are there.

        Raises:
            PeerLost: somebody is gone whom the run needs.
            RunError: it has been tried again and again, and no step came of it.
        """
        self._reassemble(enters=False)

    def enter(self) -> None:
        """Enters the group, as a successor.

        Raises:
            PeerLost: somebody is gone whom the run needs, or the run is ending.
        """
        self._reassemble(enters=True)

    def _reassemble(self, *, enters: bool) -> None:
        while True:
            self._in_vain += 1
            if self._in_vain > _MOST_IN_VAIN:
                raise RunError(f"a group has regrouped {_MOST_IN_VAIN} times, and no step came of it")
            try:
                found = self._member.part.reassemble(enters=enters)
                break
            except PeerLost as loss:
                if not self.recovers_from(loss):
                    raise
            enters = False  # it has been let in, and another was lost since
        self.step, self.over, self._there = found.step, found.over, found.there
        if self._world.observer is not None:
            rank, workers = self._world.network.rank, self._world.cast.workers
            there = (rank,) if found.over else tuple(workers[worker] for worker in found.there)
            self._world.observer.joined(rank, there, found.round)
            self._world.observer.regrouped(rank, self._member.flat.vector, found.step)
        self._missed.intersection_update(found.there)
        if not found.over:
            place = found.there.index(self._member.worker)
            self._member.stands_in(found.absent, place, len(found.there))
