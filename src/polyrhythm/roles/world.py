"""The context of one rank, real or simulated: communicator, clock, events, and the pace of computing.

A strategy cannot tell which of the two it runs in. In reality computing passes time by itself; in simulation
`DrawnPace` passes the time that it takes.

    real       forward, whose hooks announce each use ──▶ backward, whose hooks announce each bucket ──▶ …
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

FORWARD_SHARE = 1 / 3
"""A backward pass takes twice as long as its forward pass: one product for the weights, one for the inputs."""

Announce = Callable[[int], None]


@dataclass(slots=True)
class DrawnPace:
    """Passes the time of a step on a virtual clock.

    Attributes:
        clock: the simulation's.
        draw_s: gives the compute seconds of the next step.
    """

    clock: Clock
    draw_s: Callable[[], float]
    _step_s: float = 0.0

    def forward(self, shares: Sequence[float], use: Announce, work: float = 1.0) -> None:
        """Sleep for a third of the step, the first layers' share first; not yet, if nobody listens.

        Args:
            shares: of the pass's time, a bucket each, in the order of the backward pass; they add up to 1. Empty if
                nobody listens.
            use: called with each bucket before it is used.
            work: of the step, in units of what `draw_s` gives the time of: more where batches have grown.
        """
        # A call of what an object holds, written as one of its methods, is looked up anew.
        draw_s = self.draw_s
        self._step_s = draw_s() * work
        if shares:
            for bucket in reversed(range(len(shares))):
                use(bucket)
                self.clock.sleep(self._step_s * FORWARD_SHARE * shares[bucket])

    def backward(self, shares: Sequence[float], ready: Announce) -> None:
        """Sleep for the rest, and announce each bucket after its share.

        Args:
            shares: as given to `forward`.
            ready: called with each bucket in order.
        """
        if not shares:
            self.clock.sleep(self._step_s)
            return
        for bucket, share in enumerate(shares):
            self.clock.sleep(self._step_s * (1 - FORWARD_SHARE) * share)
            ready(bucket)

    def whole(self, work: float = 1.0) -> None:
        """Sleep for a step of which nobody hears anything in between; `work` as for `forward`."""
        draw_s = self.draw_s
        self.clock.sleep(draw_s() * work)

    def part(self, share: float, what: str = "") -> None:
        """Sleep for a share of the step that `forward` has drawn the time of, for who computes it in parts.

        Args:
            share: of the step.
            what: is computed meanwhile, for a timeline.
        """
        self.clock.sleep(self._step_s * share, what)


HandleMessage = Callable[[int, Message], list[tuple[int, Message]]]
HandleLoss = Callable[[int], list[tuple[int, Message]]]
"""What a server part does with a message from a rank, and with the loss of a rank; both return its replies."""


class Observer(Protocol):
    """Sees from outside what ranks do; called on the ranks themselves. Without one, nothing is called."""

    def stepped(self, rank: int, step: int, vector: Tensor) -> None:
        """Called when a worker has taken a step.

        Args:
            rank: of the worker.
            step: its number.
            vector: `(n,)`, the parameters after it; a view, which changes later.
        """

    def joined(self, rank: int, members: dict[int, int], view: str | int) -> None:
        """Called when a worker knows with which others it goes on, before their parameters agree.

        Args:
            rank: of the worker.
            members: generations of the members' processes, by rank, in order.
            view: tells these members from the same ones before or later.
        """

    def regrouped(self, rank: int, vector: Tensor, step: int | None = None) -> None:
        """Called when a worker has agreed with the members of its view on where to go on.

        Args:
            rank: of the worker.
            vector: `(n,)`, its parameters; a view, which changes later.
            step: with which all of them go on; None: each with its own.
        """

    def caught_up(self, rank: int, step: int) -> None:
        """Called when a worker has taken over the state of another, and goes on with this step."""

    def handlers(self, rank: int, part: ServerPart) -> tuple[HandleMessage, HandleLoss]:
        """Return what handles messages and losses in the place of a server part's own methods."""


LEADER = 0
"""The rank that evaluates, saves and speaks for the run: always a worker."""


class Departed(RunError):
    """This worker was asked to leave between two steps; the others go on without it."""


class StopRequest:
    """A request from outside (a signal) that the run stop, or that this worker leave it; looked at in every step.

    Attributes:
        requested: whether the run must stop.
        leave_requested: whether this worker must leave while the others go on; never asked of worker 0.
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
    """What surrounds one rank.

    Attributes:
        network: all ranks; strategies talk here.
        roles: which of them do what.
        pace: how computing passes time; None: by itself, and hooks announce uses and buckets while a pass runs.
        stop: whether someone wants to stop.
        emit: takes the run's events; called on the leader only.
        arrivals: whom this rank has heard, where the network notes it.
        generation: how many ranks have had this number before, and were lost.
        activity: what this rank is doing, for its watchdog.
        timer: measures where a worker's steps go; None: nobody wants to know.
        refused: links and bytes at this rank that nobody of ours sends, by reason.
        leader_returns: whether worker 0 gets a successor when it is lost.
        ledger: of the run so far, on this rank's clock, for a successor of worker 0.
        observer: of a simulated run; None: nobody observes it.
        handling: passes the time that a server takes for a message of a step; None: it passes by itself.
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

    @property
    def rejoins(self) -> bool:
        """Whether this rank is the successor of one that was lost, and the others are under way."""
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
        """Whether this rank speaks for the run."""
        return self.network.rank == LEADER

    def goes_on_without(self, rank: int, faults: FaultPolicy) -> bool:
        """Return whether a run with this policy goes on when a rank is lost."""
        return faults.survives(rank, self.roles, leader_returns=self.leader_returns)

    def timed(self, finish: Callable[[], None] = lambda: None) -> World:
        """Return this world with a timer, and with a network that tells it for how long it blocks.

        Args:
            finish: returns when the device has done what it was told.
        """
        blocked = Blocked(self.clock)
        keeping = Timekeeping(finish=finish, traced_steps=TRACED_STEPS)
        if self.pace is not None:
            keeping = Timekeeping(forward_share=FORWARD_SHARE)
        timer = StepTimer(self.clock, blocked, keeping)
        return replace(self, network=TimedCommunicator(self.network, blocked), timer=timer)

    def watched(self) -> tuple[World, Blocked]:
        """Return this world, in which it is added up for how long this rank stands still, and the sum."""
        if self.activity.blocked is not None:  # a real rank notes what it waits for, for its watchdog
            return self, self.activity.blocked
        blocked = Blocked(self.clock)
        return replace(self, network=TimedCommunicator(self.network, blocked)), blocked

    def control(self) -> Communicator:
        """Make the communicator for what is not training: states, reports, events."""
        return self.network.subgroup("control", range(self.network.size))

    def workers(self) -> Communicator:
        """Make the workers' communicator."""
        return self.network.subgroup("workers", self.roles.workers)
