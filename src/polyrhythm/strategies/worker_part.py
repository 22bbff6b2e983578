"""The worker's side of a strategy: the calls that a training loop makes around the forward and backward pass.

`WorkerPart` has what every strategy needs. What only some need are small bases that a part takes on besides, such as
`OverlapsBackward` or `Regroups`. `WorkerCalls` binds all of them once, so that a loop asks no part what it is.

`WorkerSetting` is what a worker part is built from, `Step` describes one of its gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.exchanger import Exchanger
from polyrhythm.partition.hybrid_pass import Loss
from polyrhythm.partition.ownership import Division
from polyrhythm.partition.pipeline_pass import Lap
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.strategies.state import State
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.model_sizes import PieceSize
from polyrhythm.training.optimizer_plan import OptimizerPlan

if TYPE_CHECKING:
    from polyrhythm.partition.outlook import Outlook


@dataclass(slots=True)
class Step:
    """One gradient of one worker, known before it is computed.

    Nobody changes it, but for its learning rate. A frozen one takes four times as long to make, and every step makes
    one.

    Attributes:
        number: the worker's steps before this one.
        weight: samples that the gradient is the mean of, in units of a full batch; 0 for an empty batch.
        stop: whether this worker has been asked to stop.
        share: this worker's part of a full global batch, over an equal part.
        plan: of the optimiser as it is at this step, in a user's own loop that has changed more than the learning rate;
            None: as at the start.
        learning_rate: the one to update with, where it is known before the backward pass; else None.
    """

    number: int
    weight: float = 1.0
    stop: bool = False
    share: float = 1.0
    plan: OptimizerPlan | None = None
    learning_rate: float | None = None


@dataclass(frozen=True)
class WorkerSetting:
    """What a worker part works with.

    Attributes:
        network: all ranks of the run.
        workers: the workers only; `workers.rank` is this worker's index.
        roles: which ranks of `network` do what.
        flat: the model's parameters and gradients.
        plan: the user's optimiser.
        steps: that every worker takes in the whole run; None where nobody can tell (a user's own loop).
        succeeds: whether this worker is the successor of one that was lost, and the servers have all they need.
        generation: how many have had this worker's rank before it.
        leader_returns: whether worker 0 gets a successor when it is lost.
        joined: called by parts of `Traits.mean_updates` with the workers that take their steps together, before the
            first one and whenever they are others.
    """

    network: Communicator
    workers: Communicator
    roles: RoleAssignment
    flat: FlatParameters
    plan: OptimizerPlan
    steps: int | None = None
    succeeds: bool = False
    generation: int = 0
    leader_returns: bool = False
    joined: Callable[[Communicator], None] = lambda workers: None


class Follows(Enum):
    """What of a user's own loop an update follows, besides gradients and learning rates.

    Attributes:
        NOTHING: all else is as at the start.
        PLAN: options, and which parameters have a gradient, travel with the step (`Step.plan`).
        OBJECT: everything, since the user's own optimiser object makes it (`OptimizerPlan.whole`).
    """

    NOTHING = "learning rates"
    PLAN = "options"
    OBJECT = "object"


class Writes(Enum):
    """What becomes of parameters that a user's own loop changes in the flat vector between two steps.

    Attributes:
        LOST: they are overwritten, so the loop is refused.
        KEPT: training goes on from them.
        ADDED: how far they moved (`FlatParameters.change`) is added to where the worker's parameters are kept.
        IN_STEP: servers take them, where all workers hold, and so change, the same parameters.
    """

    LOST = "lost"
    KEPT = "kept"
    ADDED = "added"
    IN_STEP = "in step"


class WorkerPart:
    """What a strategy does on one worker.

    The training loop calls it in this order, with the calls of what it takes on besides in brackets:

        start ─▶ ( [begin] ─▶ [before_use(b)…] forward ─▶ [bucket_ready(b)…] backward ─▶ gradients_ready )…
              ─▶ settle ─▶ [present] ─▶ [catch_up] ─▶ ( … )… ─▶ settle ─▶ end ─▶ [let_go] ─▶ [close]

    Attributes:
        staleness: how many gradients were applied at which staleness, where the worker knows it.
        replicated: whether `state` is the same on all workers, so that one copy of it is enough.
        follows: what of a user's own loop its updates follow.
        writes: what becomes of parameters that such a loop changes between two steps.
    """

    replicated: bool = False
    follows: Follows = Follows.NOTHING
    writes: Writes = Writes.LOST

    def __init__(self) -> None:
        self.staleness: Counter[int] = Counter()

    def start(self, step: int) -> int:
        """Agree with the others on the parameters to start from.

        Args:
            step: where this worker would start (0, or what a checkpoint says).

        Returns:
            Where it must start: a server may know better than a checkpoint which gradients have been applied.
        """
        raise NotImplementedError

    def gradients_ready(self, step: Step, learning_rate: float) -> bool:
        """Exchange the gradients, which are final now, and update the parameters.

        Afterwards the loop zeroes the gradients; a part that sends them later sends a copy.

        Args:
            step: the one; may weigh less than `begin` was told if no bucket has been announced.
            learning_rate: the one to update with.

        Returns:
            Whether this worker must stop after this step, because a rank was asked to. In lockstep, all workers get
            the same answer at the same step.
        """
        raise NotImplementedError

    def settle(self) -> None:
        """Complete pending exchanges and updates, so that the flat vector holds this worker's current model."""

    def end(self) -> None:
        """Leave the other workers.

        On worker 0 the flat vector then holds the run's final parameters, at the latest after `UsesServers.let_go`.
        """

    def state(self) -> State:
        """Return what a resumed worker needs beside the parameters."""
        return {}, {}

    def load_state(self, state: State) -> None:
        """Restore what `state` returned; called before `start`."""


class BeginsEarly:
    """Taken on by a part that does something before a step is computed, such as sending parameters."""

    def begin(self, step: Step) -> None:
        """Begin a step, before anything of it is computed."""
        raise NotImplementedError


class OverlapsBackward(BeginsEarly):
    """Taken on by a part that sends gradients while the backward pass goes on."""

    def bucket_ready(self, bucket: int) -> None:
        """Note that the gradients of a bucket are final, during the backward pass; buckets come in order.

        A loop may still not call it.
        """
        raise NotImplementedError


PLACES = 63
"""Least number that is no place in a program."""


class HoldsMeanGradient:
    """Taken on where every worker has the mean of all gradients, of all parameters, before it updates with it.

    A loop may then call `average` and `update` in place of `gradients_ready`, and look at or change the mean between
    the two, as a user's loop does that clips it.
    """

    @property
    def averaged(self) -> int:
        """How many times the gradients were averaged since the last update."""
        raise NotImplementedError

    @property
    def mean_weight(self) -> float:
        """Of the latest mean, in full batches of a worker; the flat gradients hold it until they are zeroed."""
        raise NotImplementedError

    def average(self, step: Step, place: int = 0) -> None:
        """Overwrite the gradients with the workers' mean.

        It may be called several times before `update`: others may be added to gradients that are a mean already.
        A parameter is then listed in the flat vector's `without_gradient` only if it is so on all workers.

        Args:
            step: the one whose gradients these are; `stop` is not regarded.
            place: where this worker is in its program, from 0 to `PLACES`; must be the same on all.

        Raises:
            OutOfStep: it is not, on all workers.
        """
        raise NotImplementedError

    def update(self, learning_rate: float) -> None:
        """Update the parameters with the gradients as they are, unless the latest mean was of no weight."""
        raise NotImplementedError


class LazyUse:
    """Taken on by a part that updates parameters just before they are used again."""

    def before_use(self, bucket: int) -> None:
        """Update a bucket before a layer with parameters of it runs forward; every loop calls it, after `begin`."""
        raise NotImplementedError


class CutsNetwork:
    """Taken on by a part that computes a network's last layers with the others; see `Traits.cuts_network`."""

    def divide(self, division: Division) -> None:
        """Note which numbers of the network are this worker's; called before `load_state` and `start`."""
        raise NotImplementedError

    def compute(self, step: Step, images: Tensor, loss: Loss) -> float:
        """Compute the gradients of a step together with the others.

        Args:
            step: as it was given to `begin`.
            images: (B, C, H, W); maybe none.
            loss: of some of them.

        Returns:
            Their mean loss; 0 without any.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class SharedBatch:
    """A batch whose gradients workers compute together.

    Attributes:
        images: (B, C, H, W); maybe none.
        full: B of a batch that is not ragged.
        loss: of some of them.
        learning_rate: to update with.
        seed: fixes the random numbers that are drawn next, from the number of a microbatch and of a layer.
        pass_time: lets a share of the time of a step of this worker pass, where time is virtual, for what is told.
        lap: notes what has just been done: which part of the step it belongs to, and what it was.
    """

    images: Tensor
    full: int
    loss: Loss
    learning_rate: float
    seed: Callable[[int, int], None]
    pass_time: Callable[[float, str], None]
    lap: Callable[[Lap, str], None]


@dataclass(frozen=True)
class Surroundings:
    """What stages of a network are cut for.

    Attributes:
        images: of a step, that workers compute together; 0: nobody knows.
        tested: images that are tested at once, at most.
        saves: whether checkpoints are written.
        writes: whether the network is written in the end.
        room: bytes that a rank may take; None: nobody knows.
        now: tells the time, where it is real; None: it is virtual.
    """

    images: int = 0
    tested: int = 0
    saves: bool = False
    writes: bool = False
    room: int | None = None
    now: Callable[[], float] | None = None


class ComputesStages:
    """Taken on by a part that computes stages of a network, and passes on what others need; see `Traits.pipelines`.

    Attributes:
        outlook: on worker 0, what is to be expected of the run, once the network is known.
    """

    outlook: Outlook | None = None

    def take_network(self, model: nn.Module, image: Tensor, around: Surroundings) -> None:
        """Take the network, whose parameters are views of the flat vector; called before `load_state` and `start`.

        Args:
            model: on its device; on all workers but worker 0 it may be of shapes alone, on the meta device.
            image: (1, C, H, W), zeros like the pictures that it will see, on the device.
            around: what it is cut for.

        Raises:
            RequestError: it cannot be cut so.
        """
        raise NotImplementedError

    @property
    def reads_images(self) -> bool:
        """Whether stages of this worker take pictures; those of others are given none."""
        raise NotImplementedError

    def take_sizes(self, pieces: tuple[PieceSize, ...]) -> None:
        """Take the sizes of a network, for a dry run.

        Args:
            pieces: between which it can be cut; none where only the number of its parameters is known.
        """
        raise NotImplementedError

    def compute_stages(self, step: Step, batch: SharedBatch) -> float:
        """Compute the gradients of a step together with the others.

        Args:
            step: as it was given to `begin`.
            batch: of all workers of its pipeline.

        Returns:
            Its mean loss; 0 without any images.
        """
        raise NotImplementedError

    def compute_dry(
        self,
        step: Step,
        images: int,
        full: int,
        pass_time: Callable[[float, str], None],
        lap: Callable[[Lap, str], None],
    ) -> None:
        """Exchange what a step would, and let its time pass.

        Args:
            step: as it was given to `begin`.
            images: of the batch that workers compute together.
            full: of one that is not ragged.
            pass_time: lets a share of the time of a step of this worker pass, for what is told.
            lap: as in `SharedBatch`.
        """
        raise NotImplementedError


class SkipsSteps:
    """Taken on by a part that the others do not always wait for; see `Traits.skips_steps`."""

    def next_step(self, step: int) -> int:
        """Return the step that follows a completed one; this worker skips the steps between.

        A user's own loop, which cannot skip, computes them for nothing.
        """
        raise NotImplementedError


class Presents:
    """Taken on where the model to be tested is not always worker 0's own."""

    def present(self) -> Tensor | None:
        """Return the run's model as it is now (a centre, a mean), `(size,)`; None for that of worker 0.

        Called on every worker after every epoch but the last, after which `end` leaves the model in the flat vector.
        Training goes on from the flat vector as it is.
        """
        raise NotImplementedError


class CatchesUp:
    """Taken on where others go on while a worker is evaluating."""

    def catch_up(self) -> None:
        """Take over what others did meanwhile; called on every worker after every epoch but the last."""
        raise NotImplementedError


class UsesServers:
    """Taken on by a part whose parameters are on servers."""

    def let_go(self) -> None:
        """Let the servers go, when all workers have left; called on worker 0 only."""
        raise NotImplementedError

    def check_servers(self) -> None:
        """Check which servers were lost since they were last asked, so that their successors are asked."""


class Background:
    """Taken on by a part that does something in the background."""

    def close(self) -> None:
        """End what this worker does in the background; called last, when no rank needs it any more."""
        raise NotImplementedError


class TakesLocalSteps:
    """Taken on where a worker may take several steps of its own in one of all; see `Traits.local_steps`."""

    def local_step(self, step: Step, learning_rate: float) -> None:
        """Update this worker's parameters with the flat gradients, before the last gradient of a step of all.

        Args:
            step: of all.
            learning_rate: to update with.
        """
        raise NotImplementedError


class CommonStart:
    """Taken on where all workers can be set to a common point between two steps; see `Traits.common_start`."""

    def common_model(self) -> Tensor:
        """Return the mean of all workers' models, `(size,)`; called on all."""
        raise NotImplementedError

    def begin_at(self, vector: Tensor) -> None:
        """Continue from another point.

        Args:
            vector: `(size,)`, the same bits on all; copied.
        """
        raise NotImplementedError


class HoldsModel:
    """Taken on by a part whose state holds the worker's model."""

    def model_in(self, state: State) -> Tensor | None:
        """Return the model, `(size,)`, that a worker held when `state` returned this; None where it holds none.

        Args:
            state: of any worker.
        """
        raise NotImplementedError


class HearsOfStop:
    """Taken on by a part that learns as it comes, or in regrouping, that others have stopped."""

    @property
    def has_stopped(self) -> bool:
        """Whether others have stopped where this worker is."""
        return False


class Logged(HearsOfStop):
    """Taken on by a part whose exchanges are entries of a log, below which all workers regroup.

    Attributes:
        exchanger: carries them out.
        group: neighbouring workers that meet among themselves as well; 0: none do.
    """

    exchanger: Exchanger[Any]
    group: int = 0

    def to_enter_with(self) -> State:
        """Return what a worker begins with that takes over from this one, beside the parameters and the log."""
        raise NotImplementedError

    def enter(self, state: State) -> None:
        """Begin at the place of another worker, given its `to_enter_with`; parameters and log are copied already."""
        raise NotImplementedError

    def come_in(self, joins: int) -> None:
        """Take part in what the others are doing between two steps; called after `enter`, when the view holds.

        Args:
            joins: what they exchange; see `Entry.aside`.
        """


class Regroups(WorkerPart, HearsOfStop):
    """Taken on by a part whose workers regroup (`OnLoss.REGROUP`).

    A worker is lost or comes: all break off what is under way, and agree on where the others go on.

        break_off ─▶ begun_again ─▶ meetings ─▶ ( take_over, if behind ) ─▶ regroup
    """

    def regroup(self, workers: Communicator, members: tuple[int, ...]) -> None:
        """Continue with other workers than before; a successor begins with it.

        All members have met equally often: those who had less often have been given another's flat vector and `state`
        (`take_over`). Gradients are zero, in new memory, and nothing is under way. A step that broke is begun again.

        Args:
            workers: those that go in lockstep from now on; all of them are told at the same place.
            members: their indices among all workers of the run, in the same order; worker 0 is always there.

        Raises:
            PeerLost: another is lost meanwhile; then it is called again, after `break_off`.
        """
        raise NotImplementedError

    def break_off(self) -> None:
        """Give up whatever is under way on the workers' communicator, which has been revoked.

        Afterwards nothing of that touches the flat vector or the gradients any more.
        """

    def begun_again(self, step: int) -> int:
        """Return with how many steps done this worker continues after `break_off`; fewer, if the latest was not whole.

        Args:
            step: that it had done.
        """
        return step

    def meetings(self, step: int) -> int:
        """Return how many times all workers have met, none going on before all had come, in so many steps.

        A worker that has met less often than another is behind it; others need not have done equally many steps to
        regroup.

        Args:
            step: steps done.
        """
        return step

    def exchanges(self, step: int) -> int:
        """Return how many times others have been given what this worker has learned, in so many steps.

        What a lost worker did since the last time is gone. Default: at every meeting.

        Args:
            step: steps done.
        """
        return self.meetings(step)

    def lets_in(self, step: int) -> bool:
        """Return whether a step may be broken off, before it begins, to let a worker in; default: one with a meeting.

        Args:
            step: its number.
        """
        return self.meetings(step + 1) > self.meetings(step)

    def take_over(self, newest: State, done: int, step: int) -> int:
        """Take over the state of the newest worker, where this one is behind; its flat vector is copied already.

        Args:
            newest: the result of `state` there.
            done: steps that this worker has done; negative for a successor that has just come.
            step: steps that the newest worker has done.

        Returns:
            Steps that this worker has done now.
        """
        self.load_state(newest)
        return step


class Reassembled(NamedTuple):
    """How a member of a group goes on after another of it was lost, or came.

    Attributes:
        step: steps that all of the group have done now.
        over: whether nothing is left but to leave.
        there: the group's workers that are there, by their indices, in their order, with how many have had each one's
            rank before it.
        absent: those of the group that are not.
        round: how many times the group has regrouped.
    """

    step: int
    over: bool
    there: dict[int, int]
    absent: tuple[int, ...]
    round: int


class RegroupsApart:
    """Taken on by a part whose group regroups by itself (`OnLoss.REGROUP_GROUP`)."""

    @property
    def due(self) -> bool:
        """Whether another waits to be let into this worker's group."""
        return False

    def reassemble(self, *, enters: bool) -> Reassembled:
        """Continue with those of this worker's group who are there.

        What was under way in the group is given up, and a step that servers have not taken is begun again by all.

        Args:
            enters: whether this worker is a successor, which has not been in the group.

        Raises:
            PeerLost: another of the group is lost meanwhile, and then it is called again; or a server is.
        """
        raise NotImplementedError


class WorkerCalls:
    """All calls on one worker's part, bound once; those of what it does not take on do nothing, or what is usual.

    Args:
        part: of the worker.

    Attributes:
        inner: the part.
        replicated: see `WorkerPart`.
        follows: likewise.
        writes: likewise; they are kept where the user's own object makes the updates.
        uses_bucket_ready: whether it makes use of `bucket_ready`.
        holds_mean: whether it has `average` and `update`.
        uses_before_use: whether it needs `before_use`.
        skips_steps: whether `next_step` may skip some.
        logged: the part, if its exchanges are entries of a log; else None.
    """

    def __init__(self, part: WorkerPart) -> None:
        self.inner = part
        self.replicated, self.follows = part.replicated, part.follows
        self.writes = Writes.KEPT if part.follows is Follows.OBJECT else part.writes
        self.start, self.gradients_ready = part.start, part.gradients_ready
        self.begin = part.begin if isinstance(part, BeginsEarly) else _ignore_step
        self.settle, self.end, self.state, self.load_state = (
            part.settle,
            part.end,
            part.state,
            part.load_state,
        )
        self.uses_bucket_ready = isinstance(part, OverlapsBackward)
        self.bucket_ready = part.bucket_ready if isinstance(part, OverlapsBackward) else _ignore
        self.holds_mean = isinstance(part, HoldsMeanGradient) and not isinstance(part, SkipsSteps)
        if isinstance(part, HoldsMeanGradient):
            self.average, self.update = part.average, part.update
        self._holder = part if isinstance(part, HoldsMeanGradient) else None
        self.uses_before_use = isinstance(part, LazyUse)
        self.before_use = part.before_use if isinstance(part, LazyUse) else _ignore
        if isinstance(part, CutsNetwork):
            self.divide, self.compute = part.divide, part.compute
        if isinstance(part, ComputesStages):
            self.take_network, self.take_sizes = part.take_network, part.take_sizes
            self.compute_stages, self.compute_dry = part.compute_stages, part.compute_dry
        self._stages = part if isinstance(part, ComputesStages) else None
        self.skips_steps = isinstance(part, SkipsSteps)
        self.next_step = part.next_step if isinstance(part, SkipsSteps) else _following
        self.present: Callable[[], Tensor | None] = part.present if isinstance(part, Presents) else _nothing
        self.catch_up = part.catch_up if isinstance(part, CatchesUp) else _nothing
        self.let_go = part.let_go if isinstance(part, UsesServers) else _nothing
        self.check_servers = part.check_servers if isinstance(part, UsesServers) else _nothing
        self.close = part.close if isinstance(part, Background) else _nothing
        if isinstance(part, TakesLocalSteps):
            self.local_step = part.local_step
        if isinstance(part, CommonStart):
            self.common_model, self.begin_at = part.common_model, part.begin_at
        self.model_in: Callable[[State], Tensor | None] = (
            part.model_in if isinstance(part, HoldsModel) else _no_model
        )
        self._hears = part if isinstance(part, HearsOfStop) else None
        self.logged = part if isinstance(part, Logged) else None
        if isinstance(part, Regroups):
            self.regroup, self.break_off, self.begun_again = part.regroup, part.break_off, part.begun_again
            self.meetings, self.exchanges, self.lets_in = part.meetings, part.exchanges, part.lets_in
            self.take_over = part.take_over
        self._apart = part if isinstance(part, RegroupsApart) else None
        if isinstance(part, RegroupsApart):
            self.reassemble = part.reassemble

    @property
    def staleness(self) -> Counter[int]:
        """See `WorkerPart`."""
        return self.inner.staleness

    @property
    def outlook(self) -> Outlook | None:
        """See `ComputesStages`."""
        return None if self._stages is None else self._stages.outlook

    @property
    def reads_images(self) -> bool:
        """See `ComputesStages`."""
        return self._stages is None or self._stages.reads_images

    @property
    def averaged(self) -> int:
        """How many times the gradients were averaged since the last update, where the part holds their mean."""
        return 0 if self._holder is None else self._holder.averaged

    @property
    def mean_weight(self) -> float:
        """See `HoldsMeanGradient`; 0 where the part holds no mean."""
        return 0.0 if self._holder is None else self._holder.mean_weight

    @property
    def has_stopped(self) -> bool:
        """Whether others have stopped where this worker is."""
        return self._hears is not None and self._hears.has_stopped

    @property
    def exchanger(self) -> Exchanger[Any] | None:
        """See `Logged`."""
        return None if self.logged is None else self.logged.exchanger

    @property
    def due(self) -> bool:
        """Whether another waits to be let into this worker's group, where that regroups by itself."""
        return self._apart is not None and self._apart.due


def _nothing() -> None:
    pass


def _ignore(bucket: int) -> None:
    pass


def _ignore_step(step: Step) -> None:
    pass


def _following(step: int) -> int:
    return step + 1


def _no_model(state: State) -> None:
    pass
