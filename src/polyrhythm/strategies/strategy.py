"""What every strategy is made of: a configuration, a part for workers, and a part for servers if it has any.

A strategy sees tensors, a communicator and a clock. It never imports `torch.distributed`, reads a global
rank, sleeps, logs or seeds, so the same objects run on real machines and in simulation.

`Paper` and `Facts` are what the generated tables state about a strategy; `GroupOutput` is what a group of workers
in lockstep has for servers that it shares with other groups.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

from torch import Tensor

from polyrhythm.communication.communicator import Communicator
from polyrhythm.errors import RequestError
from polyrhythm.specs import Config
from polyrhythm.strategies.gradient_mean import GradientMean
from polyrhythm.strategies.placements.shared import Shared
from polyrhythm.strategies.role_assignment import Placement, RoleAssignment
from polyrhythm.strategies.server_part import ServerPart, ServerSetting
from polyrhythm.strategies.state import Resharding, State, same_for_all
from polyrhythm.strategies.worker_part import WorkerPart, WorkerSetting
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizer_plan import OptimizerPlan


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
    """What it has, and when.

    Attributes:
        GRADIENTS: the mean of its gradients, at every step, before anybody has updated anything with it.
        MODELS: models that are equal at the end of a round, and may be others when the next one begins.
        NOTHING: neither.
    """

    GRADIENTS = "gradients"
    MODELS = "models"
    NOTHING = "nothing"


class Strategy(Config):
    """A strategy's configuration; makes its worker and server parts, and says what holds for its runs.

    Attributes:
        paper: that it comes from.
        facts: for the generated tables.
        plain_alone: whether one worker of it trains as without any strategy, bit for bit.
        replayable: whether the order in which each rank receives messages determines the run.
        one_host: whether all workers must be on one host.
        sends_by_value: whether the bytes sent depend on the parameters' values, and not on their number alone.
        can_begin_anew: whether its workers, which go in step, can be set to a common point between two steps.
        begins_again: whether workers that regroup may have to repeat a step that they had completed.
        waits_between_layers: whether workers wait inside a forward pass, before parameters are used.
        cuts_network: whether workers share a network's last layers, and so compute together (`WorkerPart.compute`);
            what another worker trains of them comes at the end of an epoch.
        offers: what a group of its workers has for servers above it, which other groups share.
    """

    paper: ClassVar[Paper]
    facts: ClassVar[Facts]
    plain_alone: ClassVar[bool] = True
    replayable: ClassVar[bool] = True
    one_host: ClassVar[bool] = False
    sends_by_value: ClassVar[bool] = False
    can_begin_anew: ClassVar[bool] = False
    begins_again: ClassVar[bool] = False
    waits_between_layers: ClassVar[bool] = False
    cuts_network: ClassVar[bool] = False
    offers: ClassVar[GroupOutput] = GroupOutput.NOTHING

    @property
    def family(self) -> str:
        """The folder that it is defined in, such as `allreduce`."""
        return type(self).__module__.split(".")[-2]

    @property
    def server_count(self) -> int:
        """How many ranks must be servers."""
        return 0

    @property
    def shard_count(self) -> int:
        """Into how many shards servers cut the parameters; each gradient counts once a shard."""
        return self.server_count

    def holders(self, shard: int) -> tuple[int, ...]:
        """Gives the indices of the servers that hold a shard: the one that workers ask first, then its replicas."""
        return (shard,)

    def holds(self, server: int) -> list[int]:
        """Gives the shards that a server holds, its own first."""
        others = [shard for shard in range(self.server_count) if shard != server]
        return [server, *(shard for shard in others if server in self.holders(shard))]

    def goes_on_from(self, before: Strategy) -> bool:
        """Whether a run can resume from a checkpoint of another strategy, its servers' states converted by `recut`."""
        return self == before

    def recut(self, states: Sequence[State], plan: OptimizerPlan) -> list[State]:
        """Gives the states of this strategy's servers, from those of a run that it `goes_on_from`.

        Args:
            states: of all servers that there were.
            plan: of the user's optimiser.

        Raises:
            RequestError: they cannot be cut so.
        """
        return list(states)

    def resharding(self, before: int, after: int) -> Resharding:
        """Return how a checkpoint of `before` workers is converted for `after` workers.

        Args:
            before: how many workers wrote it.
            after: how many resume from it.

        Raises:
            RequestError: that is impossible with this strategy.
        """
        if self.server_count or not all(self.agrees(workers) for workers in (before, after)):
            raise self.needs_as_many(before)
        return same_for_all(after)

    def needs_as_many(self, before: int) -> RequestError:
        """Makes the error that refuses another number of workers."""
        return RequestError(
            f"{self} goes on with as many workers as it had: resume with --workers {before}, or begin a new run from "
            "the saved weights"
        )

    def spares_servers(self, lost: Collection[int]) -> bool:
        """Whether every shard is still held by a server when those of these indices are lost."""
        shards = range(self.server_count)
        return all(any(server not in lost for server in self.holders(shard)) for shard in shards)

    @property
    def server_placement(self) -> Placement:
        """Where servers run."""
        return Shared()

    def check(self, workers: int) -> None:
        """Refuses options that cannot work with so many workers.

        Raises:
            RequestError: with the reason and what would work.
        """
        if workers < 1:
            raise RequestError(f"workers must be at least 1 (given {workers})")

    def check_optimizer(self, plan: OptimizerPlan, workers: int) -> None:
        """Refuses an optimiser that this strategy's workers cannot run; what servers cannot run is refused elsewhere.

        Args:
            plan: of the user's optimiser.
            workers: how many there are.

        Raises:
            RequestError: with the reason and what would work.
        """

    def caution(self, workers: int, learning_rate: float) -> str:
        """Gives a warning of one line about a configuration that is allowed but may fail; empty if there is none.

        Args:
            workers: how many there are.
            learning_rate: of the run, before any schedule.
        """
        return ""

    def remark(self, workers: int) -> str:
        """Gives a remark of one line for the start of a run with so many workers; empty if there is none."""
        return ""

    def in_step(self, workers: int) -> bool:
        """Whether workers take their steps together: all stop after the same one, and timing changes no result."""
        raise NotImplementedError

    def waits_for_slower(self, workers: int) -> bool:
        """Whether a worker may have to wait for a slower one; free-running workers wait for servers and links only."""
        return True

    def agrees(self, workers: int) -> bool:
        """Whether all workers hold the same parameters after every step."""
        return self.in_step(workers)

    def round_steps(self, workers: int) -> int:
        """How many steps a worker takes from one exchange to the next; 0 if there is one in the end only."""
        return 1

    def goes_on(self, workers: int) -> bool:
        """Whether the others go on when a worker other than 0 is lost, and its successor may join them.

        For worker 0 see `spares_leader`.
        """
        return False

    def spares_leader(self, workers: int) -> bool:
        """Whether the run survives the loss of worker 0, until its successor takes over the lead.

        It does where servers hold the parameters and workers wait for no other worker, and where those who are left
        regroup, since each of them holds the parameters.
        """
        if self.regroups(workers):
            return True
        free = not (self.regroups(workers) or self.in_step(workers))
        return self.goes_on(workers) and self.server_count > 0 and free

    def spares(self, workers: int) -> int:
        """How many workers may be lost at once while the others go on."""
        return workers - 1 if self.goes_on(workers) else 0

    def regroups(self, workers: int) -> bool:
        """Whether workers that go in step go on by regrouping (`WorkerPart.regroup`) when one is lost or comes.

        Such a strategy `goes_on`, and all that its parts wait for passes through the workers' communicator.
        """
        return False

    def leaves_behind(self, workers: int) -> bool:
        """Whether a successor stays some steps behind the others and cannot take a step unless they take theirs.

        Waiting for it anywhere but in a step would then be a deadlock.
        """
        return self.in_step(workers) and not self.regroups(workers)

    def regroups_apart(self, workers: int) -> bool:
        """Whether a group of workers regroups by itself (`WorkerPart.reassemble`), without the other groups.

        Such a strategy `goes_on`, and its servers decide who is in a group.
        """
        return False

    def leaves_out_not_finite(self, workers: int) -> bool:
        """Whether a gradient that is not finite is left out, and the run goes on without it."""
        return False

    def leaves_steps_out(self, workers: int) -> bool:
        """Whether a late worker skips steps to catch up with the others (`WorkerPart.next_step`)."""
        return False

    def updates_per_step(self, workers: int) -> int:
        """How many updates the parameters get while every worker takes one step."""
        raise NotImplementedError

    def shares_rate(self, workers: int) -> int:
        """By what the default learning rate is divided, so that the updates of a step together count as one."""
        return self.updates_per_step(workers)

    def gradients_per_step(self, workers: int) -> int:
        """How many gradients are applied, and counted, while every worker takes one step; a mean over ranks is one."""
        return self.updates_per_step(workers)

    def reads_every_step(self, workers: int) -> bool:
        """Whether every step ends with the newest parameters there are, so that all steps send equally many bytes."""
        return True

    def contributors(self, cast: RoleAssignment) -> dict[int, tuple[int, ...]]:
        """Gives, for each rank that pushes gradients to servers, the indices of the workers whose mean it pushes."""
        return {rank: (index,) for index, rank in enumerate(cast.workers)}

    def slices(self, workers: int) -> int:
        """Into how many pieces its messages cut a bucket; 1 if every message holds whole buckets.

        A rehearsal's few numbers, which stand for a model, are chosen so that they are cut as evenly as the model.
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

    def keeps_sums(self) -> bool:
        """Whether sums of whole numbers are exact on the way, so that invariants can check them."""
        return True

    def gradient_mean(self, group: Communicator, flat: FlatParameters) -> GradientMean:
        """Makes what averages a group's gradients, where that is what it has for servers above it (`offers`)."""
        raise NotImplementedError

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        """Makes the part of one worker."""
        raise NotImplementedError

    def server(self, setting: ServerSetting) -> ServerPart:
        """Makes the part of one server."""
        raise RequestError(f"{self.name} has no servers")
