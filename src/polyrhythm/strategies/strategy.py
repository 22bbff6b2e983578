"""What every strategy is made of: a configuration, a part for workers, and a part for servers if it has any.

A strategy sees tensors, a communicator and a clock. It never imports `torch.distributed`, reads a global rank,
sleeps, logs or seeds, so the same objects run on real machines and in simulation.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from torch import Tensor

from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.message import Message
from polyrhythm.errors import RequestError
from polyrhythm.specs import Config
from polyrhythm.strategies.cast import Cast
from polyrhythm.strategies.invariant import Conditions, Invariant
from polyrhythm.strategies.invariants.progress import Progress
from polyrhythm.strategies.invariants.versions import Versions
from polyrhythm.strategies.placement import Placement
from polyrhythm.strategies.placements.shared import Shared
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizer_plan import OptimizerPlan

State = tuple[dict[str, Tensor], dict[str, Any]]
"""Named tensors and JSON-able facts: all that a resumed part needs."""


@dataclass(frozen=True)
class Paper:
    """Where a strategy comes from."""

    authors: str
    title: str
    venue: str
    year: int
    arxiv: str = ""

    @property
    def short(self) -> str:
        """First author and year."""
        first, others = self.authors.split(",")[0], "," in self.authors
        return f"{first}{' et al.' if others else ''} {self.year}"

    def __str__(self) -> str:
        """Gives the citation on one line."""
        number = f", arXiv {self.arxiv}" if self.arxiv else ""
        return f"{self.authors}, “{self.title}”, {self.venue} {self.year}{number}"


@dataclass(frozen=True)
class Step:
    """One gradient of one worker, known before it is computed.

    Attributes:
        number: the worker's steps before this one.
        weight: samples that the gradient is the mean of, in units of a full batch; 0 for an empty batch.
        stop: whether this worker has been asked to stop.
    """

    number: int
    weight: float = 1.0
    stop: bool = False


@dataclass(frozen=True)
class WorkerSetting:
    """What a worker part works with.

    Attributes:
        network: all ranks of the run.
        workers: the workers only; `workers.rank` is this worker's index.
        cast: which ranks of `network` do what.
        flat: the model's parameters and gradients.
        plan: the user's optimiser.
        steps: that every worker takes in the whole run; None where nobody can tell (a user's own loop).
    """

    network: Communicator
    workers: Communicator
    cast: Cast
    flat: FlatParameters
    plan: OptimizerPlan
    steps: int | None = None


@dataclass(frozen=True)
class ServerSetting:
    """What a server part works with.

    Attributes:
        index: of its shard.
        cast: which ranks do what.
    """

    index: int
    cast: Cast


class WorkerPart:
    """The worker's side.

    The training loop calls it in this order:

        start ─▶ ( begin ─▶ before_use(b)… forward ─▶ bucket_ready(b)… backward ─▶ gradients_ready )…
              ─▶ settle ─▶ present ─▶ catch_up ─▶ ( … )… ─▶ settle ─▶ end ─▶ let_go

    Attributes:
        staleness: how many gradients were applied at which staleness, where this side knows it.
        replicated: whether `state` is the same on all workers, so that one copy of it is enough.
        hears_buckets: whether it wants `bucket_ready`; even then a loop may leave it out.
        hears_use: whether it wants `before_use`; then it must be called, and `begin` with it.
    """

    replicated: ClassVar[bool] = False
    hears_buckets: ClassVar[bool] = False
    hears_use: ClassVar[bool] = False

    def __init__(self) -> None:
        self.staleness: Counter[int] = Counter()

    def start(self, step: int) -> int:
        """Agrees with the others on the parameters to start from.

        Args:
            step: where this worker would start (0, or what a checkpoint says).

        Returns:
            Where it must start: a server may know better than a checkpoint which gradients have been applied.
        """
        raise NotImplementedError

    def begin(self, step: Step) -> None:
        """A step begins. Nothing of it has been computed."""

    def before_use(self, bucket: int) -> None:
        """A layer with parameters of this bucket is about to run forward."""

    def bucket_ready(self, bucket: int) -> None:
        """The gradients of this bucket are final, while the backward pass goes on. Buckets come in order."""

    def gradients_ready(self, step: Step, learning_rate: float) -> bool:
        """All gradients are final: exchange and update.

        Afterwards the loop zeroes the gradients; a part that sends them later sends a copy.

        Args:
            step: as it was given to `begin`; may weigh less if no bucket has been announced.
            learning_rate: the one to update with.

        Returns:
            Whether this worker must stop after this step, because someone was asked to. Where workers go in step,
            all get the same answer at the same step.
        """
        raise NotImplementedError

    def next_step(self, step: int) -> int:
        """Says which step comes after one that is over: not always the next, where the others did not wait.

        Asked after every step. Steps that are left out are over for this worker; a user's own loop, which cannot skip,
        computes them for nothing.
        """
        return step + 1

    def settle(self) -> None:
        """Finishes what is under way, so that the flat vector holds this worker's current model."""

    def break_off(self) -> None:
        """The workers' communicator has been revoked: gives up whatever is under way on it.

        Afterwards nothing of that touches the flat vector or the gradients any more.
        """

    def regroup(self, workers: Communicator, members: tuple[int, ...]) -> None:
        """Goes on with other workers than before, where the strategy `regroups`; a successor begins with it.

        All members hold the same number of steps: those who had done fewer have been given another's flat vector and
        `state`. Gradients are zero, in new memory, and nothing is under way. The step that nobody holds is begun again.

        Args:
            workers: those that go in step from now on; all of them are told at the same place.
            members: their indices among all workers of the run, in the same order; worker 0 is always there.

        Raises:
            PeerLost: another is lost meanwhile; then it is called again, after `break_off`.
        """
        raise NotImplementedError

    def present(self) -> Tensor | None:
        """An epoch is over: gives the model to be tested, where it is not worker 0's own.

        Every worker is asked after every epoch but the last; after that, `end` leaves the model in the flat vector.
        Training goes on from the flat vector as it is.

        Returns:
            `(size,)`, the run's model as it is now (a centre, a mean); None for that of worker 0.
        """
        return None

    def catch_up(self) -> None:
        """An epoch is over, and this worker may have been away to evaluate: takes what others did meanwhile.

        Every worker is told after every epoch but the last.
        """

    def end(self) -> None:
        """Leaves. On worker 0 the flat vector then holds the run's final parameters."""

    def let_go(self) -> None:
        """All workers have left: lets the servers go. Called on worker 0 only, last of all."""

    def state(self) -> State:
        """Gives what a resumed worker needs beside the parameters."""
        return {}, {}

    def load_state(self, state: State) -> None:
        """Takes back what `state` gave; called before `start`."""


class ServerPart(Protocol):
    """The server's side: a message comes in, replies go out. Needs no network to be tested.

    Attributes:
        staleness: how many gradients were applied at which staleness.
        version: updates applied so far.
        done: whether all workers have left.
        steps: how many gradients of each rank it holds.
    """

    staleness: Counter[int]
    version: int

    @property
    def steps(self) -> dict[int, int]:
        """How many gradients of each rank it holds, those of earlier sessions included."""

    @property
    def done(self) -> bool:
        """Whether all workers have left, and worker 0 has let the servers go."""

    def on_message(self, source: int, message: Message) -> list[tuple[int, Message]]:
        """Takes a message from a rank and gives the replies, with the ranks that they go to.

        The tensors of replies must not change afterwards: they leave while the server goes on.
        """

    def on_loss(self, rank: int) -> list[tuple[int, Message]]:
        """A worker is gone; gives the replies that this sets free.

        It may come back: a successor under the same rank begins with `PULL`. Called only where the strategy
        `goes_on`.
        """

    def state(self) -> State:
        """Gives all that a resumed server needs, parameters included."""

    def load_state(self, state: State) -> None:
        """Takes back what `state` gave, before any message."""


@dataclass
class Facts:
    """What the generated table says of a strategy: M bytes of the model, N workers, R replicas in a group.

    Attributes:
        bytes_per_step: that all ranks together send for each step of one worker.
        staleness: mean, of equal workers.
        use_it: when to choose it.
        when_a_worker_dies: what happens.
    """

    bytes_per_step: str
    staleness: str
    use_it: str
    when_a_worker_dies: str = field(
        default="the run stops and names it; `--resume` goes on from the last checkpoint"
    )


class Strategy(Config):
    """A strategy's configuration, and the maker of its parts.

    Attributes:
        paper: where it comes from.
        facts: what the generated tables say of it.
        plain_alone: whether one worker of it trains as without any strategy, bit for bit.
        replayable: whether the order in which ranks hear each other decides all of a run.
        one_host: whether all workers must be on one host.
        sends_by_value: whether what is sent depends on the parameters' values, and not on their number alone.
    """

    paper: ClassVar[Paper]
    facts: ClassVar[Facts]
    plain_alone: ClassVar[bool] = True
    replayable: ClassVar[bool] = True
    one_host: ClassVar[bool] = False
    sends_by_value: ClassVar[bool] = False

    @property
    def family(self) -> str:
        """The folder that it lives in."""
        return type(self).__module__.split(".")[-2]

    @property
    def server_count(self) -> int:
        """How many ranks must be servers."""
        return 0

    @property
    def shard_count(self) -> int:
        """Into how many shards servers cut the parameters; that many of them count every gradient."""
        return self.server_count

    @property
    def server_placement(self) -> Placement:
        """Where servers run."""
        return Shared()

    def check(self, workers: int) -> None:
        """Refuses what cannot be right.

        Raises:
            RequestError: with the reason and what would work.
        """
        if workers < 1:
            raise RequestError(f"workers must be at least 1 (given {workers})")

    def caution(self, workers: int, learning_rate: float) -> str:
        """Says in one line what may go wrong though it is allowed; empty if nothing is known.

        Args:
            workers: how many there are.
            learning_rate: of the run, before any schedule.
        """
        return ""

    def remark(self, workers: int) -> str:
        """Says in one line what is worth knowing of so many workers when a run starts; empty if nothing is."""
        return ""

    def in_step(self, workers: int) -> bool:
        """Whether workers take their steps together: all stop after the same one, and timing changes no result."""
        raise NotImplementedError

    def agrees(self, workers: int) -> bool:
        """Whether all workers hold the same parameters after every step."""
        return self.in_step(workers)

    def round_steps(self, workers: int) -> int:
        """How many steps a worker takes from one exchange to the next; 0 if there is one in the end only."""
        return 1

    def goes_on(self, workers: int) -> bool:
        """Whether the others go on when a worker is lost, and a successor of it may join them.

        The leader's loss ends every run.
        """
        return False

    def spares(self, workers: int) -> int:
        """How many workers may be lost at once while the others go on."""
        return workers - 1 if self.goes_on(workers) else 0

    def regroups(self, workers: int) -> bool:
        """Whether workers that go in step go on by regrouping (`WorkerPart.regroup`) when one is lost or comes.

        Such a strategy `goes_on`, and all that its parts wait for passes through the workers' communicator.
        """
        return False

    def updates_per_step(self, workers: int) -> int:
        """How many updates the parameters get while every worker takes one step."""
        raise NotImplementedError

    def shares_rate(self, workers: int) -> int:
        """Among how many updates the default learning rate is shared out."""
        return self.updates_per_step(workers)

    def gradients_per_step(self, workers: int) -> int:
        """How many gradients are applied, and counted, while every worker takes one step; a mean over ranks is one."""
        return self.updates_per_step(workers)

    def reads_every_step(self, workers: int) -> bool:
        """Whether every step ends with the newest parameters there are, so that all steps send equally many bytes."""
        return True

    def slices(self, workers: int) -> int:
        """Into how many pieces its messages cut a bucket; 1 if no message holds a piece of one.

        Few numbers that stand for a model are chosen so that they can be cut as evenly as the model.
        """
        return 1

    def bucket_bytes_for(self, workers: Communicator | None, like: Tensor) -> int | None:
        """Gives the least bytes of a bucket of gradients; None for the default. All workers call it together.

        Args:
            workers: may be used to find out about the links; None before a rehearsal, which has none yet.
            like: a tensor of the gradients' dtype and device.

        Raises:
            RequestError: it would have to find out, and cannot.
        """
        return None

    def invariants(self, conditions: Conditions) -> list[Invariant]:
        """Makes what must hold after every event of a run."""
        return [Progress(conditions.patience_s), Versions()]

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        """Makes the part of one worker."""
        raise NotImplementedError

    def server(self, setting: ServerSetting) -> ServerPart:
        """Makes the part of one server."""
        raise RequestError(f"{self.name} has no servers")
