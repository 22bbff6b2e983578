"""The supervisor of a run: which processes have a rank, and what happens when one is lost.

Input is facts, output is orders. It has no thread, process, clock or store, so every rule is tested with
literal facts:

    source of processes                    supervisor                       launcher
      Exited, Failed, Joined, …  ─ fact ─▶  on(fact, now_s)  ─ orders ─▶  carried out by the sources and the store
      Called, Lost (torchrun)
      GuestAsked, GuestLeft (join server)

What becomes of a rank that is lost:

    the run tolerates it ─▶ Announce to the others ─▶ pause ─▶ Start a replacement under the same rank
                                            └─▶ no restart left: the place is vacant, and a guest may take it
    it does not          ─▶ the others have a moment to report ─▶ End with the error that explains the rest

The sources are child processes (`children.py`), ranks of a user's script (`script.py`), ranks that torchrun has
started (`torchrun/reception.py`), and workers that join by hand (`joining/join_server.py`). A run may have two
of them: guests join next to any other.
"""

from __future__ import annotations

import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import assert_never

from polyrhythm.communication.transports.membership import Peer
from polyrhythm.errors import RequestError, RunError
from polyrhythm.roles.world import LEADER
from polyrhythm.strategies.fault_policy import FaultPolicy
from polyrhythm.strategies.role_assignment import RoleAssignment

# Kinds of errors that a rank reports. A rank that was killed reports none, and the kind is empty.
REQUEST, RUN, PEER, BUG = "request", "run", "peer", "bug"

INTERRUPTED = "interrupted"
"""Outcome of a run that was stopped before its end."""


class RankLost(RunError):
    """The run has lost a rank and cannot continue without it; a restart from a checkpoint may help.

    Attributes:
        what: the rank, and the cause of its loss, in words.
    """

    def __init__(self, what: str, then: str) -> None:
        super().__init__(f"{what}; {then}")
        self.what = what


# Facts.


@dataclass(frozen=True)
class Exited:
    """A process has left."""

    peer: Peer
    status: int  # of its exit; negative: number of the signal that killed it
    kind: str = ""  # of its failure, if the exit itself reveals it; see `Failed`
    cause: str = ""  # why a watchdog declared it lost, if one did


@dataclass(frozen=True)
class Failed:
    """A process has reported an error, and is about to leave."""

    peer: Peer
    kind: str  # `REQUEST`, `RUN`, `PEER` (another rank was lost) or `BUG`
    error: str


@dataclass(frozen=True)
class Blamed:
    """The training of this rank was the first to raise an error of its own: those of other ranks follow from it."""

    rank: int


@dataclass(frozen=True)
class Joined:
    """A replacement takes part now: a worker is among the others, or a server has its shards."""

    rank: int


@dataclass(frozen=True)
class Waiting:
    """A replacement waits until worker 0 lets it in."""

    rank: int


@dataclass(frozen=True)
class PolicyKnown:
    """A script has sent its strategy's policy: the consequences of a loss, and the number of servers."""

    policy: FaultPolicy
    servers: int
    why_not: str = ""  # why the death of a worker ends the run, for people; empty if it does not


@dataclass(frozen=True)
class Admits:
    """A script has reported whether a worker's replacement can enter its loop."""

    why_not: str = ""  # for people; empty if it would


@dataclass(frozen=True)
class Began:
    """Worker 0 has begun to train."""


@dataclass(frozen=True)
class Ended:
    """Worker 0 has reported the end of the run, its last event."""

    outcome: str = "done"  # or `interrupted`


@dataclass(frozen=True)
class Over:
    """All ranks of a script have reached the end: a replacement would be too late."""


@dataclass(frozen=True)
class StopAsked:
    """A stop was requested."""


@dataclass(frozen=True)
class Quiet:
    """Nothing was heard until `Supervisor.next_s`."""


@dataclass(frozen=True)
class Lost:
    """Worker 0 has noticed, under torchrun, that a rank is lost."""

    rank: int


@dataclass(frozen=True)
class Called:
    """A process that torchrun has started again asks for its rank."""

    rank: int


@dataclass(frozen=True)
class Missed:
    """A rank that another process asks for has no pulse any more."""

    rank: int


@dataclass(frozen=True)
class GuestAsked:
    """A worker that knows the run's token asks for a place."""

    guest: int  # number of its connection
    address: str  # its address, for people


@dataclass(frozen=True)
class GuestLeft:
    """A guest is gone."""

    peer: Peer  # the place that it had
    address: str  # its address, for people
    why: str = ""  # for people
    done: bool = False  # it has taken all its steps, and needs no replacement


@dataclass(frozen=True)
class GuestRefused:
    """The join server has refused a connection."""

    address: str  # its address, for people
    reason: str  # in one word, for counting
    why: str


Fact = (
    Exited
    | Failed
    | Blamed
    | Joined
    | Waiting
    | PolicyKnown
    | Admits
    | Began
    | Ended
    | Over
    | StopAsked
    | Quiet
    | Lost
    | Called
    | Missed
    | GuestAsked
    | GuestLeft
    | GuestRefused
)


# Orders.


@dataclass(frozen=True)
class Start:
    """Start a process for a rank; under torchrun, let the one in that asks for it."""

    peer: Peer
    met: Mapping[int, int] = field(
        default_factory=dict
    )  # generations of the ranks that are there, and guests


@dataclass(frozen=True)
class Kill:
    """End a process at once; no fact about it is expected."""

    peer: Peer


@dataclass(frozen=True)
class Announce:
    """Notify a process that another one is lost, or that a place is vacant."""

    lost: Peer
    to: Peer


@dataclass(frozen=True)
class Vacate:
    """Mark a worker's place as vacant, until a replacement arrives, if one is expected."""

    rank: int
    coming: bool


@dataclass(frozen=True)
class Seat:
    """Give a guest its place."""

    guest: int
    peer: Peer


@dataclass(frozen=True)
class Refuse:
    """Notify a guest that no place is vacant."""

    guest: int


@dataclass(frozen=True)
class CloseJoinServer:
    """Stop admitting guests, and notify them that the run is over."""


@dataclass(frozen=True)
class Stop:
    """Ask all ranks to stop."""


@dataclass(frozen=True)
class PrintMessage:
    """Print a message for users."""

    text: str


@dataclass(frozen=True)
class End:
    """The run has ended, well or with an error."""

    error: Exception | None = None


Order = Start | Kill | Announce | Vacate | Seat | Refuse | CloseJoinServer | Stop | PrintMessage | End


FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
PERIOD_S = 3600.0
"""For which a restart counts: a rank that fails now and then is started again, and one that fails at once is not."""
_LIVES = 4
"""A replacement that lives for this many of the pauses before it has done well: the next pause is short again."""


class Succession:
    """When lost ranks are started again: after half a second, and after twice as long if the last process died soon.

    Args:
        restarts: the most replacements that a rank may have within `PERIOD_S`.
    """

    def __init__(self, restarts: int) -> None:
        self._restarts = restarts
        self._lost_s: defaultdict[int, list[float]] = defaultdict(list)
        self._last: dict[int, tuple[float, float]] = {}
        self._due: list[tuple[float, Peer]] = []

    def used(self, rank: int, now_s: float) -> int:
        """Return the number of replacements of a rank that count now."""
        self._lost_s[rank] = [at_s for at_s in self._lost_s[rank] if now_s - at_s < PERIOD_S]
        return len(self._lost_s[rank])

    def allows(self, rank: int, now_s: float) -> bool:
        """Return whether a rank may have another replacement."""
        return self.used(rank, now_s) < self._restarts

    def lose(self, peer: Peer, now_s: float, *, awaited: bool = False) -> float | None:
        """Note a loss; return the seconds until its replacement starts, or None if there is none.

        Args:
            peer: the process that is lost.
            now_s: the present time.
            awaited: whether all others wait for the replacement: it starts at once, unless the last one died soon.
        """
        if not self.allows(peer.rank, now_s):
            return None
        self._lost_s[peer.rank].append(now_s)
        pause_s = self._pause_s(peer.rank, now_s, awaited=awaited)
        self._last[peer.rank] = pause_s, now_s + pause_s
        self._due.append((now_s + pause_s, Peer(peer.rank, peer.generation + 1)))
        return pause_s

    def take_due(self, now_s: float) -> list[Peer]:
        """Return the replacements that are due, each once."""
        due = [peer for at_s, peer in self._due if at_s <= now_s]
        self._due = [entry for entry in self._due if entry[0] > now_s]
        return due

    def next_s(self) -> float | None:
        """Return when the next replacement is due, if there is one."""
        return min((at_s for at_s, _ in self._due), default=None)

    @property
    def awaited(self) -> set[int]:
        """Ranks with a replacement that is due."""
        return {peer.rank for _, peer in self._due}

    def forgive(self, rank: int) -> None:
        """Let the last loss of a rank not count."""
        del self._lost_s[rank][-1:]

    def cancel(self, spare: int | None = None) -> None:
        """Start no more processes, except a replacement of `spare` that is due."""
        self._due = [entry for entry in self._due if entry[1].rank == spare]
        self._restarts = 0

    def _pause_s(self, rank: int, now_s: float, *, awaited: bool) -> float:
        if not self._died_soon(rank, now_s):
            return 0.0 if awaited else FIRST_PAUSE_S
        pause_s, _ = self._last[rank]
        return min(2 * pause_s, LONGEST_PAUSE_S) or FIRST_PAUSE_S

    def _died_soon(self, rank: int, now_s: float) -> bool:
        if rank not in self._last:
            return False
        pause_s, started_at_s = self._last[rank]
        return now_s - started_at_s < _LIVES * (pause_s or FIRST_PAUSE_S)


@dataclass
class Member:
    """The newest process of a rank.

    Attributes:
        peer: the rank, and the number of its previous processes.
        guest: whether it has joined by hand.
        takes_part: whether it is a member, according to rank 0.
        waits: whether it waits to be let in.
        status: status of its exit; None while it runs.
        kind: kind of its failure; empty for a rank that was killed.
        error: error that it reported.
        cause: why a watchdog declared it lost.
    """

    peer: Peer
    guest: bool = False
    takes_part: bool = False
    waits: bool = False
    status: int | None = None
    kind: str = ""
    error: str = ""
    cause: str = ""

    @property
    def running(self) -> bool:
        """Whether it has not left."""
        return self.status is None

    @property
    def failed(self) -> bool:
        """Whether it has left with a failure, or will."""
        return bool(self.status) or bool(self.kind)

    @property
    def death(self) -> str:
        """Description of its exit."""
        if self.cause:
            return self.cause
        if self.error:
            return f"failed: {self.error}"
        if self.status is None:
            return "raised an error and did not leave"
        if self.status < 0:
            return f"was killed by {signal.Signals(-self.status).name}"
        return f"left with status {self.status}"


_NOT_SAID = (
    "its place stays empty, since the loop does not report its position: write `for epoch in group.epochs(n)`"
)


@dataclass(frozen=True)
class Rules:
    """Facts about a run that its supervisor needs.

    Attributes:
        restarts: the most replacements that a rank may have within an hour; 0 where the source cannot start processes.
        min_workers: minimum number of workers; with fewer the run fails.
        too_few: returns the error of a run with the given number of workers.
        last_words_s: seconds for the others to report their observations, once a rank has failed.
        resume: instructions to resume after a failure, for users; None for a script, which has no checkpoints
            of ours.
        has_join_server: whether workers may join by hand.
    """

    restarts: int = 0
    min_workers: int = 0
    too_few: Callable[[int], RunError] = lambda left: RunError(f"{left} workers remain")
    last_words_s: float = 2.0
    resume: str | None = None
    has_join_server: bool = False


class Supervisor:
    """Decides what is done about every process of a run.

    Args:
        roles: the ranks by role.
        started: the ranks that have a process from the start; the places of other workers are vacant.
        rules: rules of the run.
        policy: losses that the run survives; None: not known yet.
        admits: reason why replacements of workers cannot enter, empty if they can; None: not known yet.

    Attributes:
        failure: the error of a run that was stopped because too few workers were left, once it has stopped.
    """

    def __init__(
        self,
        roles: RoleAssignment,
        started: Iterable[int],
        rules: Rules,
        policy: FaultPolicy | None = None,
        admits: str | None = None,
    ) -> None:
        self.failure: RunError | None = None
        self._roles = roles
        self._rules = rules
        self._policy = policy
        self._why_not = ""
        self._admits = admits
        self._members = {rank: Member(Peer(rank, 0)) for rank in started}
        # The newest process of a rank, present or lost.
        self._newest = {rank: member.peer for rank, member in self._members.items()}
        # For a worker's rank without a process, the process that a guest would be; torchrun's servers have
        # places too.
        self._vacant: dict[int, Peer] = {}
        self._absent: dict[int, Peer] = {}
        self._any_lost = False
        self._calling: set[int] = set()
        self._succession = Succession(rules.restarts)
        self._refused: Counter[str] = Counter()
        self._blamed: int | None = None
        self._began = self._ended = self._over = self._stopping = self._closed = False
        self._too_few: RunError | None = None
        self._give_up_at_s: float | None = None
        self._now_s = 0.0
        self._orders: list[Order] = []

    @property
    def next_s(self) -> float | None:
        """The time at which it must hear `Quiet`, unless it hears something else before."""
        return self._succession.next_s() if self._give_up_at_s is None else self._give_up_at_s

    @property
    def guests(self) -> list[Peer]:
        """The guests that are there."""
        return [member.peer for member in self._members.values() if member.guest]

    def name(self, rank: int) -> str:
        """Return the name of a rank, for people."""
        if rank in self._roles.workers:
            return f"worker {self._roles.workers.index(rank)} (rank {rank})"
        return f"server {self._roles.servers.index(rank)} (rank {rank})"

    def open(self) -> list[Order]:
        """Return the orders that announce the vacant places to the members."""
        for rank in self._roles.workers:
            if rank not in self._members:
                self._lose(Peer(rank, 0))
                self._vacant[rank] = Peer(rank, 1)
        return self._given()

    def on(self, fact: Fact, now_s: float) -> list[Order]:
        """Take a fact at `now_s` of a monotonic clock, and return what is to be done, in this order."""
        self._now_s = now_s
        match fact:
            case Exited() | Failed():
                self._on_failure(fact)
            case Blamed(rank=rank):
                self._blamed = rank
            case Joined(rank=rank):
                self._absent.pop(rank, None)
                if member := self._members.get(rank):
                    member.takes_part, member.waits = True, False
            case Waiting(rank=rank):
                if member := self._members.get(rank):
                    member.waits = True
            case PolicyKnown():
                self._on_policy(fact)
            case Admits(why_not=why_not):
                self._admits = why_not
            case Began():
                self._began = True
                for member in self._members.values():
                    member.takes_part |= member.peer.generation == 0
            case Ended():
                self._on_end(fact)
            case Over():
                self._over = True
            case StopAsked():
                self._stopping = True
            case Quiet():
                pass
            case Lost():
                self._on_lost(fact)
            case Called():
                self._on_call(fact)
            case Missed(rank=rank):
                if rank in self._calling and not self._is_guest(rank):
                    self._release(self._newest[rank])
            case GuestAsked():
                self._on_guest(fact)
            case GuestLeft():
                self._on_guest_left(fact)
            case GuestRefused():
                self._refused[fact.reason] += 1
                if (
                    self._refused[fact.reason] == 1 and not self._ended
                ):  # the first of each reason; all are counted
                    self._notify(f"the join server refused {fact.address} ({fact.reason}): {fact.why}")
            case _ as never:
                assert_never(never)
        if not self._closed:
            self._settle(quiet=isinstance(fact, Quiet))
        return self._given()

    def _given(self) -> list[Order]:
        given, self._orders = self._orders, []
        return given

    def _on_failure(self, fact: Exited | Failed) -> None:
        member = self._members.get(fact.peer.rank)
        if member is None or member.peer != fact.peer:  # killed on our order
            return
        if isinstance(fact, Failed):
            member.kind, member.error = fact.kind, fact.error
        else:
            member.status, member.cause = fact.status, fact.cause
            member.kind = member.kind or fact.kind

    def _on_policy(self, fact: PolicyKnown) -> None:
        """Start the servers that a script asks for."""
        self._policy, self._why_not = fact.policy, fact.why_not
        if self._give_up_at_s is not None:
            return
        workers = len(self._roles.workers)
        self._roles = RoleAssignment(self._roles.workers, tuple(range(workers, workers + fact.servers)))
        for rank in self._roles.servers:
            self._members[rank] = Member(Peer(rank, 0), takes_part=True)
            self._newest[rank] = Peer(rank, 0)
            self._orders.append(Start(Peer(rank, 0)))

    def _on_end(self, fact: Ended) -> None:
        self._ended = True
        if self._rules.has_join_server:
            if refused := self._refused.total():
                reasons = ", ".join(f"{count} {reason}" for reason, count in self._refused.most_common())
                visitors = "visitor" if refused == 1 else "visitors"
                self._notify(f"the join server refused {refused} {visitors}: {reasons}")
            self._orders.append(CloseJoinServer())
        if fact.outcome == INTERRUPTED:  # the coordinator was stopped
            self.failure = self._too_few

    # Guests, and ranks that torchrun starts again.

    def _on_guest(self, fact: GuestAsked) -> None:
        vacant = [rank for rank in self._vacant if self._roles.works(rank)]
        if not vacant or self._ended:
            self._orders.append(Refuse(fact.guest))
            return
        newcomer = self._vacant.pop(min(vacant))
        self._admit(Member(newcomer, guest=True))
        self._orders.append(Seat(fact.guest, newcomer))
        self._notify(f"{fact.address} takes the place of {self.name(newcomer.rank)}")

    def _on_guest_left(self, fact: GuestLeft) -> None:
        rank = fact.peer.rank
        if not self._is_guest(rank) or self._members[rank].peer != fact.peer:
            return
        if fact.done or self._ended:
            del self._members[rank]
            return
        self._release(fact.peer)
        self._notify(f"{self.name(rank)}, which joined from {fact.address}, {fact.why}; its place is vacant")

    def _on_lost(self, fact: Lost) -> None:
        rank = fact.rank
        member = self._members.get(rank)
        # The join server reports guests; a replacement that does not take part yet is not the process that
        # was lost.
        if member is None or member.guest or not member.takes_part:
            return
        self._release(member.peer)
        if self._rules.has_join_server and rank in self._roles.workers and rank in self._vacant:
            self._notify(f"the place of {self.name(rank)} is vacant for a joining worker")

    def _on_call(self, fact: Called) -> None:
        rank = fact.rank
        if rank not in self._newest:
            return
        self._calling.add(rank)
        self._answer_call(rank)
        member = self._members.get(rank)
        undecided = member is None or not (member.takes_part or member.guest)
        if rank in self._calling and self._began and undecided:
            # The last process died before it took part: torchrun has one at a time.
            self._release(self._newest[rank])

    def _release(self, lost: Peer) -> None:
        """Announce a loss; its place is vacant, and given to the process that asks for it, if there is one."""
        self._lose(lost)
        self._vacant[lost.rank] = Peer(lost.rank, lost.generation + 1)
        self._answer_call(lost.rank)

    def _answer_call(self, rank: int) -> None:
        if rank in self._calling and rank in self._vacant:
            self._calling.remove(rank)
            self._start(self._vacant.pop(rank))

    def _is_guest(self, rank: int) -> bool:
        return rank in self._members and self._members[rank].guest

    # Losses and replacements.

    def _settle(self, *, quiet: bool) -> None:
        """Do what follows from all facts together."""
        leader = self._members.get(LEADER)
        if leader is not None and not leader.running and (self._ended or not leader.failed):
            self._over = True
        if self._over:
            self._see_off()
        if self._over or self._stopping:  # but the others wait for a replacement of worker 0
            self._succession.cancel(spare=None if self._over else LEADER)
        while self._give_up_at_s is None:
            failed = self._failed
            if any(not self._is_tolerated(member) for member in failed):
                self._give_up_at_s = self._now_s + self._last_words_s(failed)
                break
            gone = [member for member in failed if not member.running]
            if not gone:
                break
            self._handle_loss(min(gone, key=lambda member: member.peer.rank))
        if self._give_up_at_s is None:
            for peer in self._succession.take_due(self._now_s):
                self._start(peer)
        self._end_if_over(quiet=quiet)

    def _end_if_over(self, *, quiet: bool) -> None:
        running = any(member.running and not member.guest for member in self._members.values())
        if self._give_up_at_s is None:
            over = not running and self._succession.next_s() is None
        else:
            over = not running or (quiet and self._now_s >= self._give_up_at_s)
        if over:
            self._closed = True
            self._orders.append(End(self._error()))

    @property
    def _failed(self) -> list[Member]:
        return [member for member in self._members.values() if member.failed]

    def _last_words_s(self, failed: list[Member]) -> float:
        """Return how long the others may report what they saw."""
        # In a user's loop, ranks that wait for a replacement of rank 0 cannot report its end.
        waiting = self._policy is not None and self._policy.leader and self._rules.restarts > 0
        led = any(member.peer.rank == LEADER for member in failed)
        return 0.0 if self._rules.resume is None and waiting and led else self._rules.last_words_s

    def _see_off(self) -> None:
        """End replacements that are too late to take part; those that found no members are no failures."""
        for rank, member in list(self._members.items()):
            if member.peer.generation and not member.takes_part and not member.guest:
                self._orders.append(Kill(member.peer))
                del self._members[rank]

    def _is_tolerated(self, member: Member) -> bool:
        """Return whether the run continues without a rank; an error of its own would also be its replacement's."""
        rank = member.peer.rank
        if rank == LEADER and (member.kind or self._ended):
            return self._ended  # the run was over when it died
        if rank == LEADER and not self._leader_returns:
            return False
        if member.kind not in ("", PEER) or self._blamed is not None or self._policy is None:
            return False
        lost = [each for each in self._absent if each in self._roles.servers]
        return self._policy.survives(rank, self._roles, lost, leader_returns=True)

    @property
    def _leader_returns(self) -> bool:
        """Whether a replacement of worker 0 would find all that it needs."""
        holders = self._roles.servers or self._roles.workers
        others = [self._members[rank] for rank in holders if rank in self._members and rank != LEADER]
        dismissed = any(not member.running and not member.failed for member in others)
        admitted = self._admits == "" and self._succession.allows(LEADER, self._now_s)
        return self._began and admitted and not (dismissed or self._stopping or self._over)

    def _handle_loss(self, lost: Member) -> None:
        """Announce a loss to the others and to people; a replacement is due after a pause, if there is one."""
        peer, rank = lost.peer, lost.peer.rank
        if rank == LEADER:
            self._start_waiting_ones_over()
        self._lose(peer)
        if self._ended:  # the last event of the run has been reported
            if rank == LEADER:
                self._end_waiting_ones()
            return
        awaited = rank == LEADER and self._policy is not None and self._policy.regroups
        pause_s, then = self._succeed(peer, awaited=awaited)
        if rank in self._roles.servers:
            held = "another server with its shards continues with them"
            self._notify(f"{self.name(rank)} {lost.death}; {held}{then}")
            return
        self._orders.append(Vacate(rank, coming=pause_s is not None))
        if pause_s is None and self._rules.has_join_server:
            self._vacant[rank] = Peer(rank, peer.generation + 1)
            then = ", and its place is vacant for a joining worker"
        others = "the others wait for its replacement" if awaited else "the others continue"
        self._notify(f"{self.name(rank)} {lost.death}; {others}{then}")
        if pause_s is None and not self._over:
            self._stop_if_too_few()

    def _succeed(self, peer: Peer, *, awaited: bool) -> tuple[float | None, str]:
        """Schedule a replacement if allowed; return the seconds until its start, and a message for users."""
        if not self._succession.allows(peer.rank, self._now_s) or self._stopping or self._over:
            return None, ""
        if self._roles.works(peer.rank):
            why_not = _NOT_SAID if self._admits is None else self._admits
            if why_not:
                return None, f"; {why_not}"
        pause_s = self._succession.lose(peer, self._now_s, awaited=awaited)
        used = f"{self._succession.used(peer.rank, self._now_s)} of {self._rules.restarts}"
        when = f"in {pause_s:g} s" if pause_s else "at once"
        return pause_s, f", and it is started again {when} (restart {used})"

    def _stop_if_too_few(self) -> None:
        if self._left >= self._rules.min_workers:
            return
        # Worker 0 may not know of all that died.
        if self._too_few is not None or not self._stopping:  # else people have asked for it
            self._too_few = self._rules.too_few(self._left)
        self._stopping = True
        self._orders.append(Stop())

    def _end_waiting_ones(self) -> None:
        """End the processes that worker 0 had no time to release: they have nothing more to do."""
        for rank, member in list(self._members.items()):
            if member.running and not member.guest:
                self._orders.append(Kill(member.peer))
                del self._members[rank]

    def _start_waiting_ones_over(self) -> None:
        """Restart the processes that wait for rank 0: its replacement cannot know their progress."""
        for member in [member for member in self._members.values() if member.waits and member.running]:
            self._orders.append(Kill(member.peer))
            member.status = -signal.SIGKILL
            self._succession.forgive(member.peer.rank)  # it has done nothing wrong
            self._handle_loss(member)

    @property
    def _left(self) -> int:
        """Number of workers that are present, will be again, or have taken all their steps."""
        workers = [self._members[rank] for rank in self._roles.workers if rank in self._members]
        awaited = self._succession.awaited & {*self._roles.workers}
        return sum(member.running or not member.failed for member in workers) + len(awaited)

    def _start(self, peer: Peer) -> None:
        there = [member.peer for member in self._members.values() if member.running and not member.failed]
        self._admit(Member(peer))
        self._orders.append(Start(peer, dict(there)))

    def _admit(self, newcomer: Member) -> None:
        """Add a process, and send it the members that it would wait for; a server counts once it has its shards."""
        peer = newcomer.peer
        self._members[peer.rank], self._newest[peer.rank] = newcomer, peer
        if peer.rank in self._roles.workers:
            self._absent.pop(peer.rank, None)
        self._orders += [Announce(lost, peer) for rank, lost in self._absent.items() if rank != peer.rank]

    def _lose(self, lost: Peer) -> None:
        """Announce to all that a process is lost, or that its place is vacant."""
        self._members.pop(lost.rank, None)
        self._absent[lost.rank] = lost
        self._any_lost = True
        self._orders += [Announce(lost, member.peer) for member in self._members.values() if member.running]

    # The end.

    def _error(self) -> Exception | None:
        """Return the error of the run, if it has failed."""
        if not self._failed:
            return self.failure
        error = self._verdict()
        if isinstance(error, RankLost) and self._stopping:  # no restart of the run is wanted
            return RunError(str(error))
        return error

    def _verdict(self) -> Exception:
        """Return the failure that explains the others: a lost peer is only an echo of one."""
        failed = self._failed
        if self._blamed is not None and self._blamed in self._members:
            failed = [self._members[self._blamed]]
        for member in failed:
            if member.kind == REQUEST:
                return RequestError(member.error)
        # A killed one could not report it; the others noticed.
        killed = [member for member in failed if not member.kind and not member.running]
        if killed:
            return self._rank_lost(min(killed, key=lambda member: member.status or 0))
        for member in failed:
            if member.kind in (RUN, BUG):
                return RunError(self._what_failed(member))
        if self._any_lost and self._rules.resume is not None:  # which may have been too many
            return RankLost(self._what_failed(failed[0]), self._rules.resume)
        return RunError(self._what_failed(failed[0]))

    def _rank_lost(self, member: Member) -> RunError:
        what, rank = f"{self.name(member.peer.rank)} {member.death}", member.peer.rank
        if self._rules.resume is not None:
            return RankLost(what, self._rules.resume)
        why = self._why_not if self._roles.works(rank) else ""
        return RunError(f"{what}; {why}" if why else what)

    def _what_failed(self, member: Member) -> str:
        name = self.name(member.peer.rank)
        return f"{name}: {member.error}" if member.error else f"{name} {member.death}"

    def _notify(self, text: str) -> None:
        self._orders.append(PrintMessage(text))
