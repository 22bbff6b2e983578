"""Asynchronous decentralized parallel SGD (AD-PSGD).

Lian, Zhang, Zhang, Liu, "Asynchronous decentralized parallel stochastic gradient descent", ICML 2018, arXiv
1710.06952.

    x_i, x_j <- (x_i + x_j)/2      for a random neighbor j, while g_i is computed
    x_i <- x_i - lr * g_i(x_i as it was read)

Pairs are edges of the topology (`topology`) between workers of different colors. Active workers send a request at every
step, and passive workers reply, so there are no cyclic waits (see `pairing/keeper.py`). An average is atomic on both
sides: the active worker changes nothing between request and reply, and the passive worker handles one request at a
time. Staleness = number of averages between the reading of the parameters and the update. After an epoch the model of
worker 0 is evaluated; at the end, the mean of all models.

Departures from the paper:

- The reply is half of the difference and not x_j, so the sum over all workers is preserved under interleaving.
- Any torch optimizer replaces `- lr * g_i`. Its state is separate on each worker.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from torch import Tensor

from polyrhythm.communication.message import Kind, Message
from polyrhythm.specs import chosen
from polyrhythm.strategies.fault_policy import FaultPolicy
from polyrhythm.strategies.gossip.mixing.turns import remark
from polyrhythm.strategies.gossip.pairing.keeper import Keeper, place_of
from polyrhythm.strategies.gossip.pairing.service import KeeperService
from polyrhythm.strategies.resharding import Resharding, by_fields
from polyrhythm.strategies.state import MEAN, Part, StateField
from polyrhythm.strategies.strategy import Facts, Paper, Remarks, Strategy, Traits
from polyrhythm.strategies.topologies.ring import Ring
from polyrhythm.strategies.topology import TOPOLOGIES, Topology
from polyrhythm.strategies.worker_part import OptimizerSource, Step, WorkerPart, WorkerSetting, Writes
from polyrhythm.training.optimizer_plan import OptimizerPlan


class ADPSGD(Strategy, Remarks):
    """Every worker averages with one neighbor at a time, and waits for no other worker.

    Attributes:
        topology: graph of the averaging pairs; directions of its edges are ignored.
    """

    paper: ClassVar[Paper] = Paper(
        "Lian, Zhang, Zhang, Liu",
        "Asynchronous decentralized parallel stochastic gradient descent",
        "ICML",
        2018,
        "1710.06952",
    )
    facts: ClassVar[Facts] = Facts(
        bytes_per_step="M",
        staleness="1",
        use_it="uneven, slow or unreliable machines on a slow network, without servers",
    )
    why_not_compressed: ClassVar[str] = (
        "pairs are random, and each worker would need copies of all others: use d_psgd"
    )

    topology: Annotated[Topology, chosen("topology", TOPOLOGIES)] = Ring()

    def check(self, workers: int, plan: OptimizerPlan | None = None) -> None:
        super().check(workers, plan)
        self.topology.check(workers)

    def remark(self, workers: int) -> str:
        return remark(self.topology, workers)

    def traits(self, workers: int) -> Traits:
        """Return the traits of asynchronous workers; a single worker is synchronous and reads its newest parameters."""
        alone = workers == 1
        return Traits(lockstep=alone, waits_for_slower=False, draws=not alone)

    def faults(self, workers: int) -> FaultPolicy:
        if workers == 1:
            return FaultPolicy()
        # A replacement of rank 0 learns the membership from the others, and admits and releases them.
        return FaultPolicy.independent(workers)

    def resharding(self, before: int, after: int) -> Resharding:
        return by_fields(ADPSGDWorker.fields, after, together=False)

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        return ADPSGDWorker(setting, self.topology)


class ADPSGDWorker(WorkerPart):
    """Notifies its keeper when a step begins and when there is a gradient."""

    follows = OptimizerSource.PLAN
    writes = Writes.ADDED
    fields = (
        StateField("parameters", Tensor, MEAN, at="_newest"),
        StateField("optimizer", Part, MEAN, at="_keeper.optimizer"),
    )

    def __init__(self, setting: WorkerSetting, topology: Topology) -> None:
        super().__init__()
        self._flat = setting.flat
        self._place = place_of(topology, setting.roles.workers, setting.workers.rank)
        self._keeper = Keeper(self._place, setting)
        self._keeper.staleness = self.staleness
        self._service = KeeperService(setting, self._keeper)
        self._training = False

    def start(self, step: int) -> int:
        step = self._service.join(step, restored=self.restored)
        self._training = True
        return step

    def begin(self, step: Step) -> None:
        if self._place.active:
            self._service.notify(Message(Kind.DIFFERENCE, step=step.number))

    def gradients_ready(self, step: Step, learning_rate: float) -> bool:
        if step.stop and self._place.others:
            self._service.notify(Message(Kind.EVENT, stop=True))
        self._keeper.plan = step.plan
        push = Message(Kind.PUSH, step=step.number, weight=step.weight, learning_rate=learning_rate)
        return self._service.ask(push).stop or step.stop

    def catch_up(self) -> None:
        self._service.ask(Message(Kind.PULL))

    def end(self) -> None:
        self._service.leave()
        self._training = False

    def release(self) -> None:
        self._service.release()

    def close(self) -> None:
        self._service.close()

    @property
    def _newest(self) -> Tensor:
        """This worker's model, `(size,)`; in training, between two averages."""
        newest = self._keeper.copy() if self._training else None
        return self._flat.vector if newest is None else newest
