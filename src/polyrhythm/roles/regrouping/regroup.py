"""Regrouping: workers that go in step go on without one that is lost, or with one that has come.

    worker                               leader (worker 0)
                                           a successor has come: calls all to break off before a step to come
      a collective breaks, or it is time   one breaks, or a worker says so, or it is time
      revoke ────────────────────────────▶ revoke ──────────▶ all others: whatever they wait for breaks
      BROKEN(round, how far it has come) ▶ waits for this word of everyone who is there
      ◀──────────── formation(workers, steps, who is newest, who is behind)
      the newest ─▶ those who are behind: parameters, and the state of its part
      all: their parts go on with the new communicator; a step that broke is begun again

After Bland, Bouteiller, Herault, Bosilca, Dongarra, "Post-failure recovery of MPI communication capability", IJHPCA
2013 (revoke, shrink, agree), with the leader in place of the agreement: if it is lost, its successor asks all again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.message import Kind, Message, pack_tensors, unpack_tensors
from polyrhythm.errors import PeerLost, RunError
from polyrhythm.roles.regrouping.formation import NOTHING, NOTHING_DONE, Broken, Done, Formation
from polyrhythm.roles.world import LEADER, World
from polyrhythm.strategies.worker_part import WorkerPart
from polyrhythm.training.flat_parameters import FlatParameters

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
    part: WorkerPart
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
        member.part.regroup(self._workers, workers)
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
        self.step = formation.step if formation.over else step
