"""Decentralized parallel SGD (D-PSGD).

Lian, Zhang, Zhang, Hsieh, Zhang, Liu, "Can decentralized algorithms outperform centralized algorithms? A case study for
decentralized parallel stochastic gradient descent", NIPS 2017, arXiv 1705.09056.

    x_i' = sum_j W_ij x_j - lr * g_i(x_i)

W = doubly stochastic matrix of the topology (`topology`), not necessarily symmetric; x_i = parameters of worker i;
g_i = its gradient at the point before mixing. So parameters are sent while the gradient is computed. When a worker
fails, the others restart from the mean of their parameters, with a matrix for their number.

With `compress`, workers send compressed changes, and mix copies of each other's parameters (CHOCO; see `mixing.choco`):

    x_i' = x_i + gamma * sum_j W_ij (k_j - k_i) - lr * g_i(x_i)

Departures from the paper:

- Any torch optimizer replaces `- lr * g_i`. It is applied to the mixed point, as is weight decay. Its state is separate
  on each worker.
- All batches have the same weight; batch sizes in an epoch differ by at most one image.
- CHOCO-SGD sends the parameters after the update. Here they are sent before it, so that communication overlaps with the
  gradient computation; with lossless compression the result is D-PSGD.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

from pydantic import Field
from torch import Tensor

from polyrhythm.communication.communicator import Communicator, Handle
from polyrhythm.communication.message import Kind, Message
from polyrhythm.compression.payoff import Exchange
from polyrhythm.errors import RequestError
from polyrhythm.specs import chosen
from polyrhythm.strategies.compressing import Compressible
from polyrhythm.strategies.gossip.mixing.turns import InTurns, TurnsWorker
from polyrhythm.strategies.resharding import Resharding, by_fields
from polyrhythm.strategies.state import MEAN, OWN, Part, StateField
from polyrhythm.strategies.strategy import Facts, Paper, Traits
from polyrhythm.strategies.topologies.ring import Ring
from polyrhythm.strategies.topology import TOPOLOGIES, Topology
from polyrhythm.strategies.worker_part import OptimizerSource, Step, WorkerPart, WorkerSetting
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizer_plan import OptimizerPlan

if TYPE_CHECKING:
    from polyrhythm.strategies.gossip.mixing.choco import Copies


class DPSGD(InTurns, Compressible):
    """Every worker averages with its neighbors at every step, while it computes.

    Attributes:
        topology: graph of the averaging; rows and columns of its matrix must sum to 1.
        compress: compressor of the models' changes; None: none.
        consensus: gamma, the step size of compressed mixing, in (0, 1]; None: derived from the compressor.
    """

    paper: ClassVar[Paper] = Paper(
        "Lian, Zhang, Zhang, Hsieh, Zhang, Liu",
        "Can decentralized algorithms outperform centralized algorithms?",
        "NIPS",
        2017,
        "1705.09056",
    )
    facts: ClassVar[Facts] = Facts(
        bytes_per_step="2M on a ring",
        staleness="0",
        use_it="networks with slow all-to-all communication: messages to neighbors only, overlapped with computation",
    )

    topology: Annotated[Topology, chosen("topology", TOPOLOGIES)] = Ring()
    consensus: Annotated[float, Field(gt=0, le=1)] | None = None

    def check(self, workers: int, plan: OptimizerPlan | None = None) -> None:
        """Reject graphs that do not exist for this number of workers, and weights that do not preserve the mean."""
        super().check(workers, plan)
        for turn in range(self.topology.period(workers)):
            for worker in range(workers):
                shares = self.topology.shares(worker, workers, turn)
                taken = shares.own + sum(shares.takes.values())
                if abs(taken - 1) > 1e-6:
                    raise RequestError(
                        f"d_psgd: the weights of worker {worker} in topology {self.topology} sum to {taken:g}, not 1, "
                        f"so the mean would not be preserved: correct them, or use sgp(topology={self.topology})"
                    )
        if self.compress is None:
            if self.consensus is not None:
                raise RequestError("consensus is the step size of compressed mixing: give compress, too")
            return
        if self.topology.period(workers) > 1:
            raise RequestError(
                f"topology {self.topology} changes neighbors every turn, and each would need all earlier messages of "
                "a worker for its copy: use topology=ring, or leave compress out"
            )
        from polyrhythm.strategies.gossip.mixing.choco import check_choco  # no other run pays for it

        check_choco(self.compress)

    def traits(self, workers: int) -> Traits:
        by_value = self.compress is not None and self.compress.by_value
        return replace(super().traits(workers), sends_by_value=by_value)

    def exchange(self, workers: int, whole_bytes: float, payload_bytes: float) -> Exchange:
        """Return the bytes, encodings and decodings per step of the worker with the most neighbors."""
        most = max(len(self.topology.targets(worker, workers)) for worker in range(workers))
        return Exchange(most * whole_bytes, most * payload_bytes, encodings=1.0, decodings=1.0 + most)

    def resharding(self, before: int, after: int) -> Resharding:
        return by_fields(DPSGDWorker.fields, after)

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        return DPSGDWorker(setting, self)


class DPSGDWorker(TurnsWorker):
    """Sends its parameters when a step begins, and mixes them with those of its neighbors before the update."""

    follows = OptimizerSource.OBJECT
    fields = (
        StateField("parameters", Tensor, MEAN, at="_flat.vector"),
        StateField("optimizer", Part, MEAN),
        StateField("copies", Part, OWN),
    )

    def __init__(self, setting: WorkerSetting, strategy: DPSGD) -> None:
        super().__init__(setting, strategy.topology, strategy.check)
        self._optimizer = setting.plan.whole(setting.flat.vector)
        self._copies = _copies(setting.flat, strategy)
        self._sends: list[Handle] | None = None

    def initialize(self) -> None:
        if self._copies is not None:
            self._copies.begin_at(self._flat.vector)

    def begin(self, step: Step) -> None:
        """Start to send the parameters; they do not change before they are sent."""
        self._pass_stop_on(step)
        self.exchanger.attempt(lambda: self._send(step.number))

    def gradients_ready(self, step: Step, learning_rate: float) -> bool:
        """Mix, then update with the gradient of the point before mixing."""
        gradients = self._flat.gradients
        self._take_turn(lambda: self._mix(step.number))
        if self._flat.gradients is not gradients:  # a regrouping has replaced their memory
            self._flat.gradients.copy_(gradients)
        self._learn(step, lambda: self._optimizer.step(self._flat.gradients, learning_rate))
        return self._over(step)

    @property
    def pending(self) -> list[Handle]:
        return self._sends or []

    def over(self, group: Communicator) -> Self:
        self._sends = None
        return self

    def brought(self) -> tuple[Tensor, float]:
        return self._flat.vector, 1.0

    def model(self) -> Tensor:
        return self._flat.vector

    def begin_at(self, vector: Tensor) -> None:
        self._flat.vector.copy_(vector)
        self.initialize()

    def end(self) -> None:
        self._flat.vector.copy_(self.common_model())

    def _send(self, step: int) -> None:
        if not self._mixes(step):
            return
        sent = self._flat.vector
        if self._copies is not None:
            sent = self._copies.encode(sent, step, self.exchanger.workers.rank)
        message = self._ending.mark(Message(Kind.VECTOR, sent, step=step))
        self._sends = []
        for to in self._turns.shares(step).gives:
            self._sends.append(self.exchanger.workers.start_send(to, message))

    def _mix(self, step: int) -> None:
        """Mix with the neighbors' parameters; nothing changes before all have arrived."""
        if not self._mixes(step):
            return
        if self._sends is None:  # the messages sent before were to workers of another view
            self._send(step)
        shares = self._turns.shares(step)
        received = [(source, self._receive(source), weight) for source, weight in shares.takes.items()]
        for send in self._sends or ():
            send.wait()
        self._sends = None
        vector = self._flat.vector
        if self._copies is not None:
            self._copies.mix(vector, received)
            return
        vector.mul_(shares.own)
        for _, other, weight in received:
            vector.add_(other, alpha=weight)

    def _receive(self, source: int) -> Tensor:
        """Return a neighbor's parameters of this step; the neighbor is at most one step ahead."""
        message = self.exchanger.workers.receive(source)[1]
        self._ending.record(message)
        assert message.tensor is not None, "gossip carries parameters"
        return message.tensor if self._copies is not None else message.tensor.to(self._flat.vector.device)


def _copies(flat: FlatParameters, strategy: DPSGD) -> Copies | None:
    if strategy.compress is None:
        return None
    from polyrhythm.strategies.gossip.mixing.choco import Copies, consensus_step  # no other run pays for it

    gamma = consensus_step(strategy.compress) if strategy.consensus is None else strategy.consensus
    return Copies(flat, strategy.compress, gamma)
