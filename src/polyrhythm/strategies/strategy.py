"""What every strategy is made of: a configuration, a part for workers, and a part for servers if it has any.

A strategy sees tensors, a communicator and a clock. It never imports `torch.distributed`, reads a global
rank, sleeps, logs or seeds, so the same objects run on real machines and in simulation.

`Traits` are what holds for its runs, `FaultPolicy` is what it does when a rank is lost: values, computed once and
read by launchers, roles, the simulator and the generated tables. `Paper` and `Facts` are what those tables state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor, nn

from polyrhythm.communication.communicator import Communicator
from polyrhythm.errors import RequestError
from polyrhythm.partition.divided_trunk import Trunk
from polyrhythm.specs import Config
from polyrhythm.strategies.fault_policy import FaultPolicy
from polyrhythm.strategies.gradient_mean import GradientMean
from polyrhythm.strategies.placements.shared import Shared
from polyrhythm.strategies.role_assignment import Placement, RoleAssignment
from polyrhythm.strategies.server_part import ServerPart, ServerSetting
from polyrhythm.strategies.state import Resharding, State, same_for_all
from polyrhythm.strategies.worker_part import WorkerPart, WorkerSetting
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.model_sizes import ModelSizes
from polyrhythm.training.optimizer_plan import OptimizerPlan

if TYPE_CHECKING:
    from polyrhythm.partition.outlook import Outlook, Pace


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
        """Return the citation on one line."""
        number = f", arXiv {self.arxiv}" if self.arxiv else ""
        return f"{self.authors}, “{self.title}”, {self.venue} {self.year}{number}"


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


class GroupOutput(Enum):
    """What a group of its workers has for servers above it, which other groups share.

    Attributes:
        GRADIENTS: the mean of its gradients, at every step, before anybody has updated anything with it.
        MODELS: models that are equal at the end of a round, and may be others when the next one begins.
        NOTHING: neither.
    """

    GRADIENTS = "gradients"
    MODELS = "models"
    NOTHING = "nothing"


_SHARED = Shared()


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What holds for the runs of a strategy with a number of workers. The defaults are those of one large batch.

    Attributes:
        lockstep: whether workers take their steps together: all stop after the same one, and timing changes no result.
        local_models: whether workers hold different parameters between two exchanges.
        waits_for_slower: whether a worker may have to wait for a slower one, and not for servers and links only.
        exchange_every: steps of a worker from one exchange to the next; 0 if there is one in the end only.
        updates: how many updates the parameters get while every worker takes one step.
        gradients: how many gradients are applied, and counted, meanwhile; a mean over ranks is one.
        rate_divisor: of the default learning rate, so that the updates of a step together count as one.
        optimizer: the default optimiser, where it is another than SGD with that rate.
        reads_newest: whether every step ends with the newest parameters there are, so that all send equally many bytes.
        skips_steps: whether a late worker skips steps to catch up with the others (`SkipsSteps.next_step`).
        output: what a group of its workers has for servers above it, which other groups share.
        groups: indices of the workers of every group that pushes one mean to servers; empty where each worker pushes
            its own gradients.
        leaves: how many of the servers, the first ones, push for a group each; 0 where its first worker does.
        servers: how many ranks must be servers, however many workers there are.
        shards: into how many shards these cut the parameters; each gradient counts once a shard.
        placement: where servers run.
        slices: into how many pieces its messages cut a bucket; 1 if every message holds whole buckets. The few numbers
            that stand for a model in a dry run are chosen so that they are cut as evenly as the model.
        mean_updates: whether every worker updates its whole model with the mean of all gradients, at once, so that
            optimisers may look at all workers' data in between.
        tells_staleness: whether each gradient is an update of its own, of which servers know how old it is.
        exact_sums: whether sums of whole numbers are exact on the way, so that invariants can check them.
        plain_alone: whether one worker trains as without any strategy, bit for bit.
        replayable: whether the order in which each rank receives messages determines the run.
        one_host: whether all workers must be on one host.
        sends_by_value: whether the bytes sent depend on the parameters' values, and not on their number alone.
        draws: whether each worker, or each of the `groups`, may take as many steps as it comes to, so that its batches
            can be drawn from a common deal (`data.dealer`) in place of a fixed share.
        common_start: whether workers, which go in lockstep, can be set to a common point between two steps.
        waits_between_layers: whether workers wait inside a forward pass, before parameters are used.
        overlaps_passes: whether workers do so where the backward pass announces its buckets, and there are several;
            a loop need not announce any.
        counts_samples: whether a worker's contribution counts for its samples, so that batches may be of unequal sizes.
        scales_parts: whether workers that wait for slower ones now and then push each gradient in proportion to its
            samples, so that batches may be of unequal sizes there, too.
        local_steps: whether a worker may take several steps of its own in one of all (`TakesLocalSteps`).
        steps_ahead: by how many steps these may be ahead of the slowest; 0: there is no bound.
        cuts_network: whether workers share a network's layers, and compute together (`CutsNetwork`, `ComputesStages`);
            what another worker trains of them comes at the end of an epoch.
        trunk: how they share the layers before the fully connected ones (`CutsNetwork`).
        pipelines: where workers form pipelines, into how many parts a step's images are dealt, one a pipeline; worker w
            is in pipeline w mod `pipelines`. 0: each worker has images of its own.
    """

    lockstep: bool = True
    local_models: bool = False
    waits_for_slower: bool = True
    exchange_every: int = 1
    updates: int = 1
    gradients: int = 1
    rate_divisor: int = 1
    optimizer: str = ""
    reads_newest: bool = True
    skips_steps: bool = False
    output: GroupOutput = GroupOutput.NOTHING
    groups: tuple[tuple[int, ...], ...] = ()
    leaves: int = 0
    servers: int = 0
    shards: int = 0
    placement: Placement = _SHARED
    slices: int = 1
    mean_updates: bool = False
    tells_staleness: bool = False
    exact_sums: bool = True
    plain_alone: bool = True
    replayable: bool = True
    one_host: bool = False
    sends_by_value: bool = False
    draws: bool = False
    common_start: bool = False
    waits_between_layers: bool = False
    overlaps_passes: bool = False
    counts_samples: bool = True
    scales_parts: bool = False
    local_steps: bool = False
    steps_ahead: int = 0
    cuts_network: bool = False
    trunk: Trunk = "copied"
    pipelines: int = 0

    @property
    def identical(self) -> bool:
        """Whether all workers hold the same parameters after every step."""
        return self.lockstep and not self.local_models

    @property
    def waits_inside(self) -> bool:
        """Whether workers wait for others inside their passes, and not only between them."""
        return self.waits_between_layers or self.overlaps_passes or self.cuts_network

    def units(self, workers: int) -> tuple[tuple[int, ...], ...]:
        """Return who takes batches of a deal together, by their indices among so many workers."""
        return self.groups or tuple((worker,) for worker in range(workers))

    def pushers(self, roles: RoleAssignment) -> dict[int, tuple[int, ...]]:
        """Return, for each rank that pushes gradients to servers, the indices of the workers whose mean it pushes."""
        if not self.groups:
            return {rank: (index,) for index, rank in enumerate(roles.workers)}
        if self.leaves:
            return dict(zip(roles.servers, self.groups, strict=False))
        return {roles.workers[group[0]]: group for group in self.groups}


UNPUBLISHED = Paper("", "unpublished", "", 0)
UNKNOWN = Facts(bytes_per_step="", staleness="", use_it="")


class Strategy(Config):
    """A strategy's configuration; declares what holds for its runs, and makes its worker and server parts.

    What only some strategies offer besides are small bases that they take on: `Remarks`, `HasStages`,
    `SizesBuckets`, `AveragesGradients` and `RecutsServers`.

    Attributes:
        paper: that it comes from; for the generated tables.
        facts: for the generated tables.
        why_not_compressed: why it has no `compress` key, and what has, for an error's text.
    """

    paper: ClassVar[Paper] = UNPUBLISHED
    facts: ClassVar[Facts] = UNKNOWN
    why_not_compressed: ClassVar[str] = (
        "nothing here decodes what its ranks send; use synchronous, parameter_server or local_sgd"
    )

    def traits(self, workers: int) -> Traits:
        """Return what holds for runs with so many workers."""
        return Traits()

    def faults(self, workers: int) -> FaultPolicy:
        """Return what such a run does when a rank is lost."""
        return FaultPolicy()

    def in_own_loop(self) -> Strategy:
        """Return what it is in a loop that a user writes, which may look at all between two steps."""
        return self

    def check(self, workers: int, plan: OptimizerPlan | None = None) -> None:
        """Refuse options that cannot work with so many workers, or an optimiser that they cannot run.

        What servers cannot run is refused elsewhere.

        Args:
            workers: how many there are.
            plan: of the user's optimiser; None before that is known.

        Raises:
            RequestError: with the reason and what would work.
        """
        if workers < 1:
            raise RequestError(f"workers must be at least 1 (given {workers})")

    def check_model(self, flat: FlatParameters) -> None:
        """Refuse a model that cannot work with these options.

        Raises:
            RequestError: with the reason and what would work.
        """

    def resharding(self, before: int, after: int) -> Resharding:
        """Return how a checkpoint of `before` workers is converted for `after` workers.

        Args:
            before: how many workers wrote it.
            after: how many resume from it.

        Raises:
            RequestError: that is impossible with this strategy.
        """
        both = [self.traits(workers) for workers in (before, after)]
        if both[0].servers or not all(traits.identical for traits in both):
            raise needs_as_many(self, before)
        return same_for_all(after)

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        """Return the part of one worker."""
        raise NotImplementedError

    def server(self, setting: ServerSetting) -> ServerPart:
        """Return the part of one server."""
        raise RequestError(f"{self.name} has no servers")


def needs_as_many(strategy: Strategy, before: int) -> RequestError:
    """Return the error that refuses another number of workers than there were before."""
    return RequestError(
        f"{strategy} goes on with as many workers as it had: resume with --workers {before}, or begin a new run from "
        "the saved weights"
    )


class Remarks:
    """Taken on by a strategy that has something to say about a configuration."""

    def caution(self, workers: int, learning_rate: float) -> str:
        """Return a warning of one line about a configuration that is allowed but may fail; empty if there is none.

        Args:
            workers: how many there are.
            learning_rate: of the run, before any schedule.
        """
        return ""

    def remark(self, workers: int) -> str:
        """Return a remark of one line for the start of a run with so many workers; empty if there is none."""
        return ""


class HasStages:
    """Taken on by a strategy whose workers hold stages of a network (`Traits.pipelines`)."""

    def check_network(self, model: nn.Module, flat: FlatParameters, image: Tensor, workers: int) -> None:
        """Refuse a network that cannot be cut for so many workers.

        Args:
            model: on the CPU; not changed.
            flat: its parameters.
            image: (1, C, H, W), zeros like the pictures that it will see.
            workers: how many there are.

        Raises:
            RequestError: with the reason and the place.
        """
        raise NotImplementedError

    @property
    def cuts_anew(self) -> bool:
        """Whether the network may be cut elsewhere when a run is resumed."""
        raise NotImplementedError

    @property
    def chooses_copies(self) -> bool:
        """Whether `with_copies` is left to choose how many copies stages have."""
        raise NotImplementedError

    def has_become(self, other: Strategy) -> bool:
        """Whether another strategy is this one with its copies chosen."""
        raise NotImplementedError

    def workers_of_ranks(self, workers: int) -> tuple[range, ...]:
        """Return the workers that hold the copies of each rank's stages, by their indices among so many."""
        raise NotImplementedError

    def with_copies(
        self,
        make_model: Callable[[], nn.Module],
        image_shape: tuple[int, int, int],
        workers: int,
        images: int,
        pace_of: Callable[[Sequence[range]], Pace] | None = None,
        measured: Callable[[int], Sequence[float]] | None = None,
    ) -> Strategy:
        """Return the strategy with the copies of every stage given, where it is to choose them itself.

        Args:
            make_model: makes the network; of shapes alone, or with numbers.
            image_shape: (C, H, W).
            workers: to share out.
            images: of a step, of all of them.
            pace_of: returns how fast ranks are, from the workers that each has; None: nobody knows, and all alike.
            measured: returns the seconds of each piece of the network for a microbatch of so many pictures; None: its
                operations tell.

        Raises:
            RequestError: it cannot be cut so.
        """
        raise NotImplementedError

    def settled(
        self,
        model: nn.Module,
        image: Tensor,
        workers: int,
        images: int,
        plan: OptimizerPlan,
        pace: Pace,
        room: Sequence[float],
    ) -> tuple[Strategy, Outlook]:
        """Return the strategy with the network cut at given places, and what is to be expected of it.

        Args:
            model: the network; with shapes alone, or with numbers.
            image: (1, C, H, W).
            workers: how many there are.
            images: of a step, in one pipeline.
            plan: of the optimiser.
            pace: of the ranks of a pipeline.
            room: bytes that each rank has; infinite where nobody knows.

        Raises:
            RequestError: it cannot be cut so, or a rank has not the memory for its stages.
        """
        raise NotImplementedError

    def sizes_of_parts(
        self, sizes: ModelSizes, model: nn.Module, image_shape: tuple[int, int, int], workers: int
    ) -> ModelSizes:
        """Return the sizes of a model with those of the parts that it is cut into, for a dry run.

        Args:
            sizes: of the whole.
            model: on the meta device.
            image_shape: (C, H, W) of a picture.
            workers: how many there are.

        Raises:
            RequestError: it cannot be cut so.
        """
        raise NotImplementedError


class SizesBuckets:
    """Taken on by a strategy that decides how large the buckets of gradients are."""

    def bucket_bytes_for(self, workers: Communicator | None, like: Tensor) -> int | None:
        """Return the least bytes of a bucket of gradients; None for the default. All workers call it together.

        Args:
            workers: may be used to find out about the links; None before a dry run, which has none yet.
            like: a tensor of the gradients' dtype and device.

        Raises:
            RequestError: it would have to find out, and cannot.
        """
        raise NotImplementedError


class AveragesGradients:
    """Taken on by a strategy whose groups have gradients for servers above them (`GroupOutput.GRADIENTS`)."""

    def gradient_mean(self, group: Communicator, flat: FlatParameters) -> GradientMean:
        """Return what averages a group's gradients."""
        raise NotImplementedError


class RecutsServers:
    """Taken on by a strategy that can resume from a checkpoint of other servers than its own."""

    def goes_on_from(self, before: Strategy) -> bool:
        """Return whether a run can resume from a checkpoint of another strategy, its servers' states `recut`."""
        raise NotImplementedError

    def recut(self, states: Sequence[State], plan: OptimizerPlan) -> list[State]:
        """Return the states of this strategy's servers, from those of a run that it `goes_on_from`.

        Args:
            states: of all servers that there were.
            plan: of the user's optimiser.

        Raises:
            RequestError: they cannot be cut so.
        """
        raise NotImplementedError
