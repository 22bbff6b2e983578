"""Parameter server.

Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012, for sharded servers that own the optimiser; Campos
et al., "Distributed training strategies for a computer vision deep learning algorithm on a distributed GPU
cluster", ICCS 2017, for its two modes.

    synchronous    w' = w - lr * sum_i b_i g_i(w) / sum_i b_i      when all workers' gradients are there
    asynchronous   w' = w - lr * g_i(w_old)                        whenever one arrives

Any optimiser takes the place of plain SGD; it runs on the server, on its shard. Departure: workers get the new
parameters in answer to their gradient, so a step costs one round trip.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from polyrhythm.specs import chosen
from polyrhythm.strategies.invariant import Conditions, Invariant
from polyrhythm.strategies.invariants.replicas import Replicas
from polyrhythm.strategies.parameter_server.consistency.asynchronous import Asynchronous
from polyrhythm.strategies.parameter_server.serving.gate import Consistency
from polyrhythm.strategies.parameter_server.serving.invariants import serving_invariants
from polyrhythm.strategies.parameter_server.serving.push_pull import PushPull
from polyrhythm.strategies.parameter_server.serving.shard_server import ShardServer
from polyrhythm.strategies.placement import Placement
from polyrhythm.strategies.placements.shared import Shared
from polyrhythm.strategies.strategy import (
    Facts,
    Paper,
    ServerPart,
    ServerSetting,
    Step,
    Strategy,
    WorkerPart,
    WorkerSetting,
)

CONSISTENCIES = "polyrhythm.strategies.parameter_server.consistency"
PLACEMENTS = "polyrhythm.strategies.placements"


class ParameterServer(Strategy):
    """Servers hold the parameters in shards and run the optimiser; workers push gradients and pull parameters.

    Attributes:
        servers: how many, each with an equal shard.
        consistency: who may proceed when.
        placement: where servers run.
    """

    paper: ClassVar[Paper] = Paper(
        "Dean, Corrado, Monga, Chen, Devin et al.", "Large Scale Distributed Deep Networks", "NIPS", 2012
    )
    facts: ClassVar[Facts] = Facts(
        bytes_per_step="2M",
        staleness="N-1 (0 if synchronous)",
        use_it="asynchronous: uneven machines, of which none should wait for another",
        when_a_worker_dies=(
            "asynchronous: the others go on, and a successor takes over the steps that are left (the leader's loss "
            "stops the run); synchronous: the run stops and names it; `--resume` goes on from the last checkpoint"
        ),
    )

    servers: int = Field(default=1, ge=1)
    consistency: Annotated[Consistency, chosen("consistency", CONSISTENCIES)] = Asynchronous()
    placement: Annotated[Placement, chosen("placement", PLACEMENTS)] = Shared()

    @property
    def server_count(self) -> int:
        """As asked."""
        return self.servers

    @property
    def server_placement(self) -> Placement:
        """As asked."""
        return self.placement

    def in_step(self, workers: int) -> bool:
        """As the consistency has it."""
        return self.consistency.in_step()

    def goes_on(self, workers: int) -> bool:
        """Where nobody waits for anybody."""
        return not self.consistency.in_step()

    def updates_per_step(self, workers: int) -> int:
        """One where workers go in step, else one a worker."""
        return 1 if self.consistency.in_step() else workers

    def invariants(self, conditions: Conditions) -> list[Invariant]:
        """Those of servers, each worker pushing its own gradients; and equal replicas where workers go in step."""
        workers = conditions.cast.workers
        pushers = {rank: (index,) for index, rank in enumerate(workers)}
        found = super().invariants(conditions)
        found += serving_invariants(conditions, pushers, in_step=self.consistency.in_step())
        if self.consistency.in_step():
            found.append(Replicas(conditions, [workers], alone=True))
        return found

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        """Makes the part of one worker."""
        return ParameterServerWorker(setting)

    def server(self, setting: ServerSetting) -> ServerPart:
        """Makes the part of one server."""
        return ShardServer(setting.cast.workers, self.consistency)


class ParameterServerWorker(WorkerPart):
    """Pushes the gradients of every step and goes on with what the servers answer."""

    def __init__(self, setting: WorkerSetting) -> None:
        super().__init__()
        self._leads = setting.workers.rank == 0
        self._servers = PushPull(setting)

    def start(self, step: int) -> int:
        """Worker 0 hands out the shards; everyone takes the servers' parameters."""
        if self._leads:
            self._servers.initialise()
        return self._servers.pull()

    def gradients_ready(self, step: Step, learning_rate: float) -> bool:
        """Pushes, and takes the answers."""
        return self._servers.push_and_pull(step, step.weight, learning_rate)

    def catch_up(self) -> None:
        """Takes the newest parameters; a gradient of old ones would be as stale as this worker was long away."""
        self._servers.pull()

    def end(self) -> None:
        """Leaves; worker 0 waits for the final parameters."""
        self._servers.leave()
        if self._leads:
            self._servers.pull(final=True)

    def let_go(self) -> None:
        """Tells the servers that nobody needs them any more."""
        self._servers.leave()
