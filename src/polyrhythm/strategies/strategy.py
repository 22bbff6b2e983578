"""Interface of a strategy: a configuration, a part for workers, and a part for servers if it has any.

A strategy sees tensors, a communicator and a clock. It never imports `torch.distributed`, reads a global
rank, sleeps, logs or seeds, so the same objects run on real machines and in simulation.

`Traits` are the properties of its runs, `FaultPolicy` is its reaction to failed ranks: values, computed once and
read by launchers, roles, the simulator and the generated tables. `Paper` and `Facts` are further columns of the tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from polyrhythm.communication.communicator import Communicator
from polyrhythm.errors import RequestError
from polyrhythm.partition.divided_trunk import Trunk
from polyrhythm.specs import Config
from polyrhythm.strategies.fault_policy import FaultPolicy
from polyrhythm.strategies.gradient_mean import GradientMean
from polyrhythm.strategies.placements.shared import Shared
from polyrhythm.strategies.resharding import Resharding, by_fields, same_for_all
from polyrhythm.strategies.role_assignment import Placement, RoleAssignment
from polyrhythm.strategies.server_part import ServerPart, ServerSetting
from polyrhythm.strategies.state import State
from polyrhythm.strategies.worker_part import Logged, WorkerPart, WorkerSetting
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizer_plan import OptimizerPlan

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Paper:
    """The paper that introduced a strategy."""

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
    """Texts of the generated table about a strategy: M bytes of the model, N workers, R replicas in a group.

    Attributes:
        bytes_per_step: bytes that all ranks together send for each step of one worker.
        staleness: mean staleness with equally fast workers.
        use_it: conditions under which to choose it.
    """

    bytes_per_step: str
    staleness: str
    use_it: str


class GroupOutput(Enum):
    """Output of a group of workers for servers above it, which other groups share.

    Attributes:
        GRADIENTS: the mean of its gradients, at every step, before any update with it.
        MODELS: models that are equal at the end of a round, and may be replaced before the next one.
        NOTHING: neither.
    """

    GRADIENTS = "gradients"
    MODELS = "models"
    NOTHING = "nothing"


_SHARED = Shared()


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Properties of a strategy's runs with a given number of workers. The defaults are those of large-batch training.

    Attributes:
        lockstep: whether workers are synchronous: all stop after the same step, and timing changes no result.
        local_models: whether workers hold different parameters between two exchanges.
        waits_for_slower: whether a worker may have to wait for a slower one, and not for servers and links only.
        exchange_every: steps of a worker from one exchange to the next; 0 if the only one is at the end.
        updates: number of parameter updates while every worker takes one step.
        gradients: number of gradients applied, and counted, while every worker takes one step; a mean over ranks is
            one.
        optimizer: the default optimizer, where it is not SGD with a rate that `updates` divides.
        skips_steps: whether a late worker skips steps to catch up with the others (`WorkerPart.next_step`).
        output: output of a group of workers for servers above it, which other groups share.
        groups: indices of the workers of every group that pushes one mean to servers; empty where each worker pushes
            its own gradients.
        leaves: number of servers, from the first one, that push for one group each; 0 where a group's first worker
            does.
        servers: required number of servers, independent of the number of workers.
        shards: number of shards of the parameters on the servers; each gradient counts once per shard.
        placement: placement of the servers.
        slices: number of pieces of a bucket in its messages; 1 if every message holds whole buckets. The size of the
            proxy vector of a dry run is chosen so that it is divided as evenly as the model.
        measures_staleness: whether each gradient is a separate update with a staleness known to servers.
        exact_sums: whether sums of integers are exact in its messages, so that invariants can check them.
        one_host: whether workers share memory, so that all must be on one host, and messages do not determine the run.
        sends_by_value: whether the bytes sent depend on the parameters' values, and not on their number alone.
        draws: whether the number of steps of each worker, or of each of the `groups`, may vary, so that batches can be
            assigned dynamically (`data.dealer`) instead of in fixed shares.
        waits_between_layers: whether workers wait inside a forward pass, before parameters are used.
        overlaps_passes: whether workers wait inside a pass where the backward pass announces several buckets; a loop
            need not announce any.
        counts_samples: whether a worker's contribution is weighted by its samples, so that batch sizes may differ.
        scales_parts: whether workers that occasionally wait for slower ones push each gradient in proportion to its
            samples, so that batch sizes may differ there, too.
        local_steps: whether a worker may take several local steps within one global step (`WorkerPart.local_step`).
        steps_ahead: largest lead over the slowest worker, in steps; 0: no bound.
        trunk: division of the layers before the fully connected ones, where the latter are divided (`CutsNetwork`).
        pipelines: number of pipelines, each with an equal share of a step's images; worker w is in pipeline
            w mod `pipelines`. 0: no pipelines; each worker has its own images.
    """

    lockstep: bool = True
    local_models: bool = False
    waits_for_slower: bool = True
    exchange_every: int = 1
    updates: int = 1
    gradients: int = 1
    optimizer: str = ""
    skips_steps: bool = False
    output: GroupOutput = GroupOutput.NOTHING
    groups: tuple[tuple[int, ...], ...] = ()
    leaves: int = 0
    servers: int = 0
    shards: int = 0
    placement: Placement = _SHARED
    slices: int = 1
    measures_staleness: bool = False
    exact_sums: bool = True
    one_host: bool = False
    sends_by_value: bool = False
    draws: bool = False
    waits_between_layers: bool = False
    overlaps_passes: bool = False
    counts_samples: bool = True
    scales_parts: bool = False
    local_steps: bool = False
    steps_ahead: int = 0
    trunk: Trunk | None = None
    pipelines: int = 0

    @property
    def identical(self) -> bool:
        """Whether all workers hold the same parameters after every step."""
        return self.lockstep and not self.local_models

    @property
    def mean_updates(self) -> bool:
        """Whether every worker updates its whole model with the mean of all gradients, at once.

        Optimizers may then read all workers' data in between.
        """
        return self.output is GroupOutput.GRADIENTS

    @property
    def cuts_network(self) -> bool:
        """Whether workers share a network's layers, and compute jointly (`CutsNetwork`, `ComputesStages`).

        Layers trained by another worker are received at the end of an epoch.
        """
        return self.trunk is not None or self.pipelines > 0

    @property
    def waits_inside(self) -> bool:
        """Whether workers wait for others inside their passes, and not only between them."""
        return self.waits_between_layers or self.overlaps_passes or self.cuts_network

    def units(self, workers: int) -> tuple[tuple[int, ...], ...]:
        """Return the indices of the workers that share each dynamically assigned batch, for `workers` workers."""
        return self.groups or tuple((worker,) for worker in range(workers))

    def pushers(self, roles: RoleAssignment) -> dict[int, tuple[int, ...]]:
        """Return, for each rank that pushes to servers, the indices of the workers with a part in its gradients."""
        if not self.groups:
            return {rank: (index,) for index, rank in enumerate(roles.workers)}
        if self.leaves:
            return dict(zip(roles.servers, self.groups, strict=False))
        return {roles.workers[group[0]]: group for group in self.groups}


UNPUBLISHED = Paper("", "unpublished", "", 0)
UNKNOWN = Facts(bytes_per_step="", staleness="", use_it="")


class Strategy(Config):
    """A strategy's configuration; declares the properties of its runs, and constructs its worker and server parts.

    Methods of only some strategies are in small additional base classes: `Remarks`, `SizesBuckets`,
    `AveragesGradients` and `RecutsServers`.

    Attributes:
        paper: paper that introduced it; for the generated tables.
        facts: texts for the generated tables.
        part: class of its workers' parts, built from a `WorkerSetting` and the strategy; None: `worker` is overridden.
        why_not_compressed: reason for the missing `compress` key, and alternatives, for an error message.
    """

    paper: ClassVar[Paper] = UNPUBLISHED
    facts: ClassVar[Facts] = UNKNOWN
    part: ClassVar[type[WorkerPart] | None] = None
    why_not_compressed: ClassVar[str] = (
        "nothing here decodes what its ranks send; use synchronous, parameter_server or local_sgd"
    )

    def traits(self, workers: int) -> Traits:
        """Return the properties of runs with `workers` workers."""
        return Traits()

    def faults(self, workers: int) -> FaultPolicy:
        """Return the fault policy of runs with `workers` workers.

        By default, workers in lockstep with logged exchanges regroup; of others, none may fail.
        """
        logged = self.part is not None and issubclass(self.part, Logged)
        return FaultPolicy.regrouping(workers, possible=logged and self.traits(workers).lockstep)

    def in_own_loop(self) -> Strategy:
        """Return the strategy for a user's own loop, which may read all state between two steps."""
        return self

    def check(self, workers: int, plan: OptimizerPlan | None = None) -> None:
        """Check that the options work with `workers` workers and the optimizer.

        Optimizers that servers cannot run are rejected elsewhere.

        Args:
            workers: number of workers.
            plan: plan of the user's optimizer; None before it is known.

        Raises:
            RequestError: they do not; the message has the reason and a remedy.
        """
        if workers < 1:
            raise RequestError(f"workers must be at least 1 (given {workers})")

    def check_model(self, flat: FlatParameters) -> None:
        """Check that the model works with these options.

        Raises:
            RequestError: it does not; the message has the reason and a remedy.
        """

    def resharding(self, before: int, after: int) -> Resharding:
        """Return how a checkpoint of `before` workers is converted for `after` workers.

        Args:
            before: number of workers that wrote the checkpoint.
            after: number of workers that resume from it.

        Raises:
            RequestError: the conversion is impossible with this strategy.
        """
        both = [self.traits(workers) for workers in (before, after)]
        if self.part is not None and self.part.fields and both[0].lockstep and not both[0].servers:
            return by_fields(self.part.fields, after)
        if both[0].servers or not all(traits.identical for traits in both):
            raise needs_as_many(self, before)
        return same_for_all(after)

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        """Return the part of one worker: by default, of the class `part`."""
        make: Any = self.part
        made: WorkerPart = make(setting, self)
        return made

    def server(self, setting: ServerSetting) -> ServerPart:
        """Return the part of one server."""
        raise RequestError(f"{self.name} has no servers")


def needs_as_many(strategy: Strategy, before: int) -> RequestError:
    """Return the error for a resumed run with a different number of workers."""
    return RequestError(
        f"{strategy} continues with as many workers as it had: resume with --workers {before}, or begin a new run from "
        "the saved weights"
    )


class Remarks:
    """Base of a strategy with warnings or remarks about a configuration."""

    def caution(self, workers: int, learning_rate: float) -> str:
        """Return a warning of one line about a configuration that is allowed but may fail; empty if there is none.

        Args:
            workers: number of workers.
            learning_rate: learning rate of the run, before any schedule.
        """
        return ""

    def remark(self, workers: int) -> str:
        """Return a remark of one line for the start of a run with `workers` workers; empty if there is none."""
        return ""


class SizesBuckets:
    """Base of a strategy that chooses the size of gradient buckets."""

    def bucket_bytes_for(self, workers: Communicator | None, like: Tensor) -> int | None:
        """Return the minimum size of a gradient bucket in bytes; None for the default. All workers call it together.

        Args:
            workers: communicator for measurements of the links; None before a dry run, which has none yet.
            like: a tensor of the gradients' dtype and device.

        Raises:
            RequestError: a measurement is needed and impossible.
        """
        raise NotImplementedError


class AveragesGradients:
    """Base of a strategy with groups that push gradients to servers above them (`GroupOutput.GRADIENTS`)."""

    def gradient_mean(self, group: Communicator, flat: FlatParameters) -> GradientMean:
        """Return the object that averages a group's gradients."""
        raise NotImplementedError


class RecutsServers:
    """Base of a strategy that can resume from a checkpoint with a different division into servers."""

    def continues_from(self, before: Strategy) -> bool:
        """Return whether a run can resume from a checkpoint of another strategy, its servers' states `recut`."""
        raise NotImplementedError

    def recut(self, states: Sequence[State], plan: OptimizerPlan) -> list[State]:
        """Return the states of this strategy's servers, from those of a run that it `continues_from`.

        Args:
            states: states of all servers of the earlier run.
            plan: plan of the user's optimizer.

        Raises:
            RequestError: they cannot be converted.
        """
        raise NotImplementedError
