"""The context of one rank, real or simulated: communicator, clock, events, and the pace of computing.

In a real run computing takes its own time; in a simulation `DrawnPace` sleeps for it. Strategies do not differ.

    real       forward pass, hooks announce uses ──▶ backward pass, hooks announce buckets ──▶ …
    simulated  for each bucket: announce its use, sleep ──▶ whole forward, whole backward
               ──▶ for each bucket: sleep, announce it ──▶ …

A simulated rank must not switch to another in the middle of a forward or backward pass: they share autograd,
the random generator and autocast. So its uses are played before the forward pass, and its buckets after the
backward pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from polyrhythm.communication.activity import Activity, Blocked
from polyrhythm.communication.arrivals import Arrivals
from polyrhythm.communication.communicator import Clock, Communicator
from polyrhythm.communication.forwarding import TimedCommunicator
from polyrhythm.communication.message import Message
from polyrhythm.errors import RunError
from polyrhythm.events import Event
from polyrhythm.roles.ledger import Ledger
from polyrhythm.roles.step_metrics import TRACED_STEPS, StepTimer, Timekeeping
from polyrhythm.strategies.fault_policy import FaultPolicy
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.strategies.server_part import ServerPart
from polyrhythm.strategies.worker_part import WorkerPart
from polyrhythm.training.flat_parameters import FlatParameters

FORWARD_SHARE = 1 / 3
"""A backward pass takes twice as long as its forward pass: one product for the weights, one for the inputs."""

Announce = Callable[[int], None]


def _ignore_time(seconds: float) -> None:
    """Ignore a time."""


@dataclass(slots=True)
class DrawnPace:
    """Sleeps for the compute time of each step on a virtual clock.

    Attributes:
        clock: clock of the simulation.
        draw_s: function that returns the compute seconds of the next step.
        evaluation_s: seconds in which one worker evaluates the model on all test images.
        evaluates: callback with the seconds of an evaluation that begins now, concurrently with the host's steps.
    """

    clock: Clock
    draw_s: Callable[[], float]
    evaluation_s: float = 0.0
    evaluates: Callable[[float], None] = _ignore_time
    _step_s: float = 0.0

    def forward(self, shares: Sequence[float], use: Announce, work: float = 1.0) -> None:
        """Sleep for a third of the step, first layers first; without buckets, `backward` sleeps for all of it.

        Args:
            shares: fraction of the pass's time per bucket, in the order of the backward pass; sums to 1.
                Empty if the strategy uses no announcements.
            use: callback for each bucket, called before the bucket is used.
            work: work of the step relative to the step that `draw_s` times; above 1 where batches have grown.
        """
        # Methods that call what an attribute holds would look it up again at each call.
        draw_s = self.draw_s
        self._step_s = draw_s() * work
        if shares:
            for bucket in reversed(range(len(shares))):
                use(bucket)
                self.clock.sleep(self._step_s * FORWARD_SHARE * shares[bucket])

    def backward(self, shares: Sequence[float], ready: Announce) -> None:
        """Sleep for the rest, and announce each bucket after its share.

        Args:
            shares: the shares given to `forward`.
            ready: callback for each bucket, called in order.
        """
        if not shares:
            self.clock.sleep(self._step_s)
            return
        for bucket, share in enumerate(shares):
            self.clock.sleep(self._step_s * (1 - FORWARD_SHARE) * share)
            ready(bucket)

    def whole(self, work: float = 1.0) -> None:
        """Sleep for a whole step without announcements; `work` as for `forward`."""
        draw_s = self.draw_s
        self.clock.sleep(draw_s() * work)

    def part(self, share: float, what: str = "") -> None:
        """Sleep for a share of the time that `forward` has drawn; for workers that compute a step in parts.

        Args:
            share: fraction of the step.
            what: activity shown in a timeline.
        """
        self.clock.sleep(self._step_s * share, what)


HandleMessage = Callable[[int, Message], list[tuple[int, Message]]]
HandleLoss = Callable[[int], list[tuple[int, Message]]]
"""Handlers of a server part for a message from a rank and for the failure of a rank; both return its replies."""


class Observer(Protocol):
    """Receives notifications of what ranks do; called on the ranks themselves."""

    def stepped(self, rank: int, step: int, vector: Tensor) -> None:
        """Called when a worker has taken a step.

        Args:
            rank: rank of the worker.
            step: number of the step.
            vector: `(n,)`, the parameters after the step; a view, which changes later.
        """

    def joined(self, rank: int, members: dict[int, int], view: str | int) -> None:
        """Called when a worker has a new view, before the parameters of its members agree.

        Args:
            rank: rank of the worker.
            members: generations of the members' processes, by rank, in order.
            view: identifier of the view.
        """

    def regrouped(self, rank: int, vector: Tensor, step: int | None = None) -> None:
        """Called when a worker has agreed with the members of its view on the step to continue with.

        Args:
            rank: rank of the worker.
            vector: `(n,)`, its parameters; a view, which changes later.
            step: next step of all members; None: each member has its own.
        """

    def caught_up(self, rank: int, step: int) -> None:
        """Called when a worker has received the state of another worker and continues with this step."""

    def handlers(self, rank: int, part: ServerPart) -> tuple[HandleMessage, HandleLoss]:
        """Return handlers of messages and failures that replace a server part's own methods."""


LEADER = 0
"""Rank that coordinates the run (evaluates, saves, reports); always a worker."""


class RankExited(RunError):
    """This worker was asked to leave between two steps; the other workers continue."""


class StopRequest:
    """A request from outside (a signal) to stop the run or to remove this worker; checked in every step.

    Attributes:
        requested: whether the run must stop.
        leave_requested: whether this worker must leave and the others continue; never requested of worker 0.
    """

    def __init__(self) -> None:
        self.requested = False
        self.leave_requested = False

    def request(self) -> None:
        """Ask the run to stop."""
        self.requested = True

    def request_leave(self) -> None:
        """Ask this worker to leave."""
        self.leave_requested = True


def _ignore(event: Event) -> None:
    """Ignore an event."""


@dataclass(frozen=True)
class World:
    """Context of one rank.

    Attributes:
        network: communicator of all ranks, used by strategies.
        roles: assignment of workers and servers to ranks.
        pace: virtual compute time; None: passes take real time, and hooks announce uses and buckets during a
            pass.
        stop: pending stop request.
        emit: receiver of the run's events; called on the coordinator only.
        arrivals: order of received messages, where the network records it.
        generation: number of failed processes that had this rank before.
        activity: current activity of this rank, for its watchdog.
        timer: timer of a worker's phases; None: phases are not timed.
        refused: connections and bytes from strangers that this rank has rejected, by reason.
        leader_returns: whether a failed worker 0 is replaced.
        ledger: ledger of the run so far on this rank's clock, for a replacement of worker 0.
        observer: observer of a simulated run; None: there is none.
        handling: function that sleeps for a server's handling time of a message; None: it takes its own time.
        opened: callback with the worker part and the parameters of a worker, once they are made; for injected faults.
    """

    network: Communicator
    roles: RoleAssignment
    pace: DrawnPace | None = None
    stop: StopRequest = field(default_factory=StopRequest)
    emit: Callable[[Event], None] = _ignore
    arrivals: Arrivals | None = None
    generation: int = 0
    activity: Activity = field(default_factory=Activity)
    timer: StepTimer | None = None
    refused: Counter[str] = field(default_factory=Counter)
    leader_returns: bool = False
    ledger: Ledger | None = None
    observer: Observer | None = None
    handling: Callable[[Message], None] | None = None
    opened: Callable[[WorkerPart, FlatParameters], None] | None = None

    @property
    def rejoins(self) -> bool:
        """Whether this rank replaces a failed one in a running job."""
        return self.generation > 0

    @property
    def clock(self) -> Clock:
        """The network's clock."""
        return self.network.clock

    @property
    def is_worker(self) -> bool:
        """Whether this rank is a worker."""
        return self.roles.works(self.network.rank)

    @property
    def leads(self) -> bool:
        """Whether this rank is the coordinator."""
        return self.network.rank == LEADER

    def continues_without(self, rank: int, faults: FaultPolicy) -> bool:
        """Return whether a run with this fault policy survives the failure of a rank."""
        return faults.survives(rank, self.roles, leader_returns=self.leader_returns)

    def timed(self, finish: Callable[[], None] = lambda: None) -> World:
        """Return this context with a timer, and with a network that reports its blocking time to the timer.

        Args:
            finish: function that waits for the device to finish its queued work.
        """
        blocked = Blocked(self.clock)
        keeping = Timekeeping(finish=finish, traced_steps=TRACED_STEPS)
        if self.pace is not None:
            keeping = Timekeeping(forward_share=FORWARD_SHARE)
        timer = StepTimer(self.clock, blocked, keeping)
        return replace(self, network=TimedCommunicator(self.network, blocked), timer=timer)

    def watched(self) -> tuple[World, Blocked]:
        """Return a copy of this context that measures the blocking time of this rank, and the measurement."""
        if self.activity.blocked is not None:  # a real rank notes what it waits for, for its watchdog
            return self, self.activity.blocked
        blocked = Blocked(self.clock)
        return replace(self, network=TimedCommunicator(self.network, blocked)), blocked

    def control(self) -> Communicator:
        """Return the communicator for states, reports and events."""
        return self.network.subgroup("control", range(self.network.size))

    def workers(self) -> Communicator:
        """Return the communicator of all workers."""
        return self.network.subgroup("workers", self.roles.workers)
