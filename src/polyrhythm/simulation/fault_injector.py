"""Inject faults into a simulated run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from random import Random

from polyrhythm.communication.transports.simulated.rank import SimulatedRank
from polyrhythm.communication.transports.simulated.virtual_time import Deadlock
from polyrhythm.data.seeding import seed_for
from polyrhythm.errors import PeerLost, RunError
from polyrhythm.events import Event
from polyrhythm.roles.ledger import Ledger
from polyrhythm.roles.world import LEADER, World
from polyrhythm.simulation.injection.fault import Fault, FaultyLinks
from polyrhythm.simulation.simulated_run import Draw, SimulatedRun
from polyrhythm.strategies.strategy import Strategy
from polyrhythm.strategies.worker_part import WorkerPart
from polyrhythm.training.flat_parameters import FlatParameters

Slowness = Callable[[], float]


class FaultInjector:
    """A simulated run with faults.

    A rank that loses a required peer fails with it, as its process would. The run ends with it unless the
    others can continue without it.

    Args:
        run: the run; changed in place, before it begins.
        strategy: strategy of the run; its fault policy determines the ranks that the run needs.
        faults: faults that occur.
        seed: seed of everything about faults that is random.
        host_of: the number of each rank's host; default: every rank has its own.

    Attributes:
        roles: ranks by role.
        time: time of all ranks.
        host_of: the number of each rank's host.
        links: links between all ranks.
        killed_at_s: time of each rank's latest kill.
        states: worker part and parameters of every worker, by rank.

    Raises:
        RequestError: a fault names a rank or host that is not there.
    """

    def __init__(
        self,
        run: SimulatedRun,
        strategy: Strategy,
        faults: Sequence[Fault],
        *,
        seed: int = 0,
        host_of: Sequence[int] | None = None,
    ) -> None:
        self.roles = run.roles
        self.time = run.time
        self.host_of = tuple(host_of) if host_of is not None else tuple(range(run.roles.size))
        self.links = FaultyLinks(run.time, run.network)
        self.killed_at_s: dict[int, float] = {}
        self.states: dict[int, tuple[WorkerPart, FlatParameters]] = {}
        self._run = run
        self._policy = strategy.faults(len(run.roles.workers))
        self._recurring = 0
        self._steps_begun: Counter[int] = Counter()
        self._after_step: dict[tuple[int, int], list[Callable[[], None]]] = {}
        self._slowness: dict[int, list[Slowness]] = {}
        for fault in faults:
            fault.check(self)
        if faults:
            run.draws = partial(self._draws, run.draws)
        role = run.program.role
        run.program = replace(run.program, role=lambda world: self._run_role(role, world))
        deadly = [fault for fault in faults if fault.kills(LEADER, self)]
        if deadly and all(fault.returns_rank(LEADER, self) for fault in deadly):
            self._keep_ledger()
        for number, fault in enumerate(faults):
            fault.begin(self, Random(seed_for("fault", seed, number)))

    @property
    def ranks(self) -> list[SimulatedRank]:
        """The latest rank of every number."""
        return self._run.cluster.ranks

    def play(self) -> None:
        """Run to the end.

        Raises:
            RunError: a rank was killed that the run needs.
            Deadlock: no rank can continue.
        """
        if self.links.disturbed:
            self._run.cluster.courier = self.links
        try:
            self._run.run()
            self._check_leader()
        except PeerLost as loss:
            if loss.rank not in self.killed_at_s:
                raise
            raise RunError(f"{self._death(loss.rank)}, and the run needs it: {loss}") from loss
        except Deadlock as standstill:
            if self._sent_to_dead_server():
                raise RunError(
                    f"{self._death(LEADER)}, and the run needs it: the servers were being let go"
                ) from None
            if not self._end_late_successors():
                deaths = "; ".join(map(self._death, self.killed_at_s))
                raise (Deadlock(f"{standstill} ({deaths})") if deaths else standstill) from None
        finally:
            self.time.close()

    def can_spare(self, rank: int) -> bool:
        """Return whether the run continues without a rank."""
        returns = self._run.ledger is not None
        return self._policy.survives(rank, self.roles, leader_returns=returns)

    def kill(self, rank: int) -> None:
        """Kill a rank, unless it has ended already.

        Raises:
            PeerLost: it was the coordinator, and a replacement would have no state to continue from.
        """
        if self._run.tasks[rank].ended:
            return
        self._end(rank)
        if rank == LEADER and self._run.ledger is not None and self._over:
            raise PeerLost(rank, "before training has begun, or when others had left")

    def restart(self, rank: int) -> None:
        """Start a replacement, unless the rank is alive or the run is over."""
        if not self.ranks[rank].alive and not self._over:
            self._run.cluster.replace(rank)
            self._run.spawn(rank)

    def living(self, ranks: Sequence[int]) -> list[int]:
        """Return those of some ranks that have not ended."""
        return [rank for rank in ranks if not self._run.tasks[rank].ended]

    def when_done(self, rank: int, steps: int, action: Callable[[], None]) -> None:
        """Call `action` when a worker has done `steps` steps and is about to begin another."""
        self._after_step.setdefault((rank, steps), []).append(action)

    def slow(self, rank: int, factor: Slowness) -> None:
        """Multiply a worker's step times by what `factor` returns when each step begins."""
        self._slowness.setdefault(rank, []).append(factor)

    def repeat(self, gap_s: Callable[[], float], action: Callable[[], None]) -> None:
        """Call `action` repeatedly after `gap_s()` seconds, while the run continues."""
        self._recurring += 1

        def again() -> None:
            self._recurring -= 1
            if self.time.queued > self._recurring:  # else no rank will ever continue
                action()
                self.repeat(gap_s, action)

        self.time.at(self.time.now() + gap_s(), again)

    @property
    def _over(self) -> bool:
        """Whether a replacement has no state to continue from: rank 0 has ended, or is lost and cannot be replaced."""
        if self.ranks[LEADER].alive:
            return self._run.tasks[LEADER].ended
        ledger, tasks = self._run.ledger, self._run.tasks
        holders = self.roles.servers or self.roles.workers
        dismissed = any(self.ranks[holder].alive and tasks[holder].ended for holder in holders)
        return ledger is None or not ledger.began or dismissed

    def _keep_ledger(self) -> None:
        if not self._policy.leader:
            return
        run, ledger, emit = self._run, Ledger.of(len(self.roles.workers)), self._run.emit

        def keep(event: Event) -> None:
            ledger.note(event, self.time.now())
            emit(event)

        run.ledger, run.emit = ledger, keep

    def _end(self, rank: int) -> None:
        self.killed_at_s[rank] = self.time.now()
        self._run.cluster.kill(rank)

    def _draws(self, inner: Callable[[int], Draw], rank: int) -> Draw:
        draw = inner(rank)

        def drawn() -> float:
            for action in self._after_step.pop((rank, self._steps_begun[rank]), ()):
                self.time.at(self.time.now(), action)
            self._steps_begun[rank] += 1
            seconds = draw()
            for factor in self._slowness.get(rank, ()):
                seconds *= factor()
            return seconds

        return drawn

    def _run_role(self, role: Callable[[World], None], world: World) -> None:
        rank = world.network.rank

        def opened(part: WorkerPart, flat: FlatParameters) -> None:
            self.states[rank] = part, flat

        try:
            role(replace(world, opened=opened))
        except PeerLost as loss:
            dead = loss.rank in self.killed_at_s and not self.ranks[loss.rank].alive
            if rank == LEADER or not self.can_spare(rank) or (dead and not self.can_spare(loss.rank)):
                raise
            self.time.at(self.time.now(), partial(self._end, rank))

    def _check_leader(self) -> None:
        """Raise if the run has ended without a report: worker 0 is lost, and no other rank needed it any more."""
        if not self.ranks[LEADER].alive:
            raise RunError(f"{self._death(LEADER)}, and the run needs it: no rank remains that could end it")

    def _sent_to_dead_server(self) -> bool:
        """Return whether worker 0's replacement waits for servers that its predecessor had let go at the end."""
        servers = self.roles.servers
        return bool(self.ranks[LEADER].generation and self.living([LEADER])) and any(
            self.ranks[server].alive and self._run.tasks[server].ended for server in servers
        )

    def _end_late_successors(self) -> bool:
        """End replacements that arrived when no rank was left to serve them; return whether nothing else is stuck."""
        stuck = self.living(range(self.roles.size))
        late = all(rank in self.killed_at_s and self.ranks[rank].generation for rank in stuck)
        if not (stuck and late) or self.living([LEADER]):
            return False
        for rank in stuck:
            self._end(rank)
        return True

    def _death(self, rank: int) -> str:
        what = "worker" if rank in self.roles.workers else "server"
        return f"{what} {rank} was killed at {self.killed_at_s[rank]:g} s"
