"""How the workers of a user's loop come together: at the beginning, and as successors of those who were lost."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from polyrhythm.api.loop.bulletin import Bulletin
from polyrhythm.api.loop.coordinator import LoopCoordinator
from polyrhythm.api.loop.epochs import Begun
from polyrhythm.api.loop.leader import LoopLeader
from polyrhythm.api.loop.member import LoopMember
from polyrhythm.api.loop.position import UNKNOWN, Position, find_position
from polyrhythm.api.loop.progress import Progress
from polyrhythm.errors import PeerLost, RunError
from polyrhythm.launch.script.meeting import begun_key
from polyrhythm.launch.script.places import Place, Places
from polyrhythm.roles.regrouping.worker_group import WorkerGroup
from polyrhythm.roles.replica import Replica
from polyrhythm.roles.welcome import join, share_untrained
from polyrhythm.roles.world import LEADER, World
from polyrhythm.strategies.strategy import Strategy


class LoopEntry:
    """Brings one worker into the loop of the others; see `Entry`.

    Args:
        world: where this rank is.
        strategy: says which losses the run survives.
        bulletin: where workers leave word.
        places: of the workers.
        progress: how far this worker has come in its loop.
        coordinator: the leader, or its stand-in here.

    Attributes:
        rejoins: whether this worker is a successor, and the others are under way.
        waits: whether successors wait for the beginning of an epoch; one of worker 0 does not.
    """

    def __init__(
        self,
        world: World,
        strategy: Strategy,
        bulletin: Bulletin,
        places: Places,
        progress: Progress,
        coordinator: LoopCoordinator,
    ) -> None:
        workers = len(world.cast.workers)
        self.rejoins = world.rejoins
        self.waits = strategy.regroups(workers)
        self._stays_behind = strategy.leaves_behind(workers)
        self._world = world
        self._strategy = strategy
        self._bulletin = bulletin
        self._places = places
        self._progress = progress
        self._course = progress.course
        self._coordinator = coordinator
        self._leader = coordinator if isinstance(coordinator, LoopLeader) else None
        self._position: Position | None = None
        self._worker = world.cast.workers.index(world.network.rank)
        self._group: WorkerGroup | None = None

    def begin(self, replica: Replica, group: WorkerGroup, step: int) -> int:
        """Starts a replica with all others, or among them; gives the step to begin with.

        Args:
            replica: this worker's.
            group: of the worker.
            step: where it would start.
        """
        self._group = group
        if self.rejoins:
            return self._rejoin(replica, group, step)
        if self._strategy.goes_on(len(self._world.cast.workers)):
            share_untrained(self._world, replica)
        else:
            replica.share_untrained()
        self._coordinator.introduce(replica)
        return group.start(step)

    def let_in(self, begun: Begun, entering: Sequence[int]) -> None:
        """Lets those in who wait at the door, if this worker leads; the others break their next step off for it."""
        position, self._position = self._position, None
        # In the middle of an epoch whoever led before has let others into it.
        inside = position is not None and position.taken > 0
        if self._leader is None or not entering or inside:
            return
        for worker in entering:
            self._bulletin.post(_entered_key(worker), begun.to_text())
        if self._leader.admit(entering, lambda worker: self._places.of(worker) is not Place.WAITING):
            self._coordinator.reform()

    def present(self) -> tuple[list[int], list[int]]:
        """Gives the workers that are to have a share of what begins, and who of them wait to be let in.

        Those who go in step know who does, and worker 0 always does again; but where they meet seldom, the launcher may
        know earlier that one of them is lost. Others hear of losses from it alone, some earlier than others.
        """
        places = self._places.read()
        waiting = [worker for worker, place in enumerate(places) if place is Place.WAITING]
        there = {worker for worker, place in enumerate(places) if place in (Place.HERE, Place.BEHIND)}
        members = None if self._group is None else self._group.members
        if members is not None:
            there = {worker for worker in members if worker in there or worker == LEADER}
        return sorted({*there, *waiting}), waiting

    def entered(self) -> Begun:
        """Says that this worker, a successor, is there; gives the epoch with which it begins."""
        waited = self.waits and self._leader is None
        begun = Begun.from_text(
            self._bulletin.read(_entered_key(self._worker) if waited else begun_key(self._worker))
        )
        if self.waits and not waited:
            begun = self._come_to_position(begun)
        self._places.set(self._worker, Place.BEHIND if self._stays_behind else Place.HERE)
        return begun

    def go_on(self, begun: Begun) -> None:
        """Goes on behind what whoever came before has taken, or with the step with which the others are."""
        assert self._course.optimizer is not None, "a loop has something to train"
        if self._position is not None:
            self._course.come_to(self._position)
            self._progress.leaves_out = self._position.taken
        elif self.waits:
            self._course.optimizer.go_on_at(begun.steps)
        else:
            self._progress.leaves_out = max(0, self._course.optimizer.steps - begun.steps)

    def begins(self, begun: Begun) -> None:
        """An epoch begins for this worker."""
        self._progress.begin(begun)

    def _come_to_position(self, begun: Begun) -> Begun:
        """Waits until one of those who go in step has said at which batch they are; gives the epoch of that."""
        regroup, incarnation = self._coordinator.regroup, self._world.incarnation
        assert regroup is not None, "who goes in step regroups"
        last = begun.loop, begun.epoch
        found = self._bulletin.await_found(
            lambda: find_position(self._bulletin, incarnation, regroup.step, last),
            "another worker to say where the loops are",
        )
        if found.taken == UNKNOWN:
            raise RunError(
                "worker 0 was lost in the middle of an epoch whose batches do not come from group.shard, so its "
                "successor cannot leave out those that are taken: use group.shard"
            )
        self._position = found
        return Begun(found.loop, found.epoch, found.steps)

    def _rejoin(self, replica: Replica, group: WorkerGroup, step: int) -> int:
        if self._leader is not None:
            self._leader.take_up(replica)
            return group.start(step)
        assert isinstance(self._coordinator, LoopMember), "only one leads"
        if self.waits:
            self._places.set(self._worker, Place.WAITING)
        try:
            join(self._world, replica, self._coordinator.channel)
            self._coordinator.introduce(replica)
            return group.start(step)
        except PeerLost as loss:
            print(f"polyrhythm: worker {self._worker} is not let in any more: {loss}", file=sys.stderr)
            sys.stderr.flush()
            os._exit(0)


def _entered_key(worker: int) -> str:
    return f"script/entered/{worker}"
