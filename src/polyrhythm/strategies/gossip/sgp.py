"""Stochastic gradient push (SGP).

Assran, Loizou, Ballas, Rabbat, "Stochastic gradient push for distributed deep learning", ICML 2019, arXiv 1811.10792.

    x_i <- x_i - lr * g_i(z_i)
    x_i' = sum_j P_ij x_j,  a_i' = sum_j P_ij a_j,  z_i' = x_i' / a_i'

P = column-stochastic matrix of the topology (`topology`). a_i = mass of worker i, initially 1, sent with the parameters
(`Message.weight`). z_i corrects x_i for workers that receive more than they send. The network computes with z_i. With
`overlap`, the message of a step is applied at the next step, hidden behind its computation (the paper's overlap SGP
with tau = 1).

When a worker fails, messages in transit are lost with their mass. The others restart from z = sum_j x_j / sum_j a_j
with a_i = 1. So the sum of masses is again the number of workers, and each z_i is weighted by its mass.

Departure from the paper: any torch optimizer replaces `- lr * g_i`, applied to x_i. Its state is separate on each
worker. Weight decay acts on x_i, which equals z_i where all masses are 1.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Self

import torch
from torch import Tensor

from polyrhythm.communication.communicator import Communicator, Handle
from polyrhythm.communication.message import Kind, Message
from polyrhythm.specs import chosen
from polyrhythm.strategies.gossip.mixing.replica import (
    mean_by_mass,
)
from polyrhythm.strategies.gossip.mixing.turns import InTurns, TurnsWorker
from polyrhythm.strategies.resharding import Resharding, by_fields
from polyrhythm.strategies.state import MEAN, Conversion, Part, State, StateField, check_shape, reset
from polyrhythm.strategies.strategy import Facts, Paper
from polyrhythm.strategies.topologies.one_peer_exponential import OnePeerExponential
from polyrhythm.strategies.topology import TOPOLOGIES, Topology
from polyrhythm.strategies.worker_part import OptimizerSource, Step, WorkerPart, WorkerSetting, Writes
from polyrhythm.training.optimizer_plan import update_as


class SGP(InTurns):
    """Every worker sends a share of its parameters to another worker, a different one at each step.

    Attributes:
        topology: graph of the messages; edges may be directed.
        overlap: whether the message of a step is applied at the next step.
    """

    paper: ClassVar[Paper] = Paper(
        "Assran, Loizou, Ballas, Rabbat",
        "Stochastic gradient push for distributed deep learning",
        "ICML",
        2019,
        "1811.10792",
    )
    facts: ClassVar[Facts] = Facts(
        bytes_per_step="M",
        staleness="0",
        use_it="slow networks: each worker sends one message per step, and reaches all others within a few steps",
    )
    why_not_compressed: ClassVar[str] = (
        "parameters are sent with their mass, and a compressed message would not preserve the sum: use d_psgd"
    )

    topology: Annotated[Topology, chosen("topology", TOPOLOGIES)] = OnePeerExponential()
    overlap: bool = False

    def resharding(self, before: int, after: int) -> Resharding:
        return by_fields(SGPWorker.fields, after)

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        return SGPWorker(setting, self)


class SGPWorker(TurnsWorker):
    """Holds x and a; the flat vector is z."""

    follows = OptimizerSource.PLAN
    writes = Writes.ADDED
    stores_parameters = True
    fields = (
        StateField("numerator", Tensor, Conversion(mean_by_mass, "run")),
        StateField("optimizer", Part, MEAN),
        StateField("mass", float, reset(1.0)),
        StateField("arrived", dict[int, Tensor], reset([])),
        StateField("arrived", list[float], reset([]), at="_masses"),
    )

    def __init__(self, setting: WorkerSetting, strategy: SGP) -> None:
        super().__init__(setting, strategy.topology, strategy.check, int(strategy.overlap))
        self._overlap = strategy.overlap
        self._numerator = torch.empty_like(setting.flat.vector)
        self._mass = 1.0
        self._optimizer = setting.plan.build(self._numerator)
        self._pushes: list[Handle] = []
        self._expected: list[int] = []
        self._arrived: dict[int, Tensor] = {}
        self._masses: list[float] = []
        """Received parameters that are not added yet, by number, and their masses."""

    def initialize(self) -> None:
        self._numerator.copy_(self._flat.vector)

    def gradients_ready(self, step: Step, learning_rate: float) -> bool:
        """Update x, send its shares, and add the received ones."""
        self._pass_stop_on(step)
        if self._flat.change is not None:
            self._numerator.add_(self._flat.change, alpha=self._mass)
        self._learn(step, lambda: update_as(self._optimizer, self._flat, step.plan, learning_rate))
        self._take_turn(lambda: self._push_and_take(step.number))
        torch.div(self._numerator, self._mass, out=self._flat.vector)
        return self._over(step)

    def settle(self) -> None:
        """Wait for pending messages; received ones are applied at the next step."""
        self._wait_for_pushes()
        self._receive()

    @property
    def pending(self) -> list[Handle]:
        return self._pushes

    def over(self, group: Communicator) -> Self:
        """Return this worker, without the messages in transit, nor their mass."""
        self._pushes, self._expected, self._arrived, self._masses = [], [], {}, []
        return self

    def brought(self) -> tuple[Tensor, float]:
        return self._numerator, self._mass

    def model(self) -> Tensor:
        whole = self._numerator.clone()
        for values in self._arrived.values():
            whole.add_(values)
        return whole

    def begin_at(self, vector: Tensor) -> None:
        """Copy these parameters, with a mass of 1; they include all messages sent before."""
        self._flat.vector.copy_(vector)
        self._numerator.copy_(vector)
        self._mass, self._arrived, self._masses = 1.0, {}, []

    def end(self) -> None:
        self._flat.vector.copy_(self.common_model())  # no exchange follows that could fail
        self._take_in()

    def load_state(self, state: State) -> None:
        super().load_state(state)
        for number in range(len(self._masses)):
            check_shape(f"arrived.{number}", self._arrived[number], self._numerator)
        torch.div(self._numerator, self._mass, out=self._flat.vector)

    def model_in(self, state: State) -> Tensor | None:
        tensors, facts = state
        return tensors["numerator"].div(float(facts["mass"]))

    def _push_and_take(self, step: int) -> None:
        """Take part in a turn; x and a do not change before all sends and receives have succeeded."""
        if not self._mixes(step):
            return
        self._wait_for_pushes()  # those of the last step, which may be sent during the computation, as they are copies
        if self._overlap:
            self._receive()
        shares = self._turns.shares(step)
        for to, weight in shares.gives.items():
            self._pushes.append(self.exchanger.workers.start_send(to, self._part(weight, step)))
        self._expected += shares.takes
        if not self._overlap:
            self._receive()
        self._numerator.mul_(shares.own)
        self._mass *= shares.own
        self._take_in()

    def _part(self, weight: float, step: int) -> Message:
        """Return a share of this worker's parameters, with the same share of its mass."""
        part = Message(Kind.VECTOR, self._numerator * weight, step=step, weight=self._mass * weight)
        return self._ending.mark(part)

    def _receive(self) -> None:
        """Wait for messages to this worker; a stop request in them is forwarded with its next messages."""
        for source in self._expected:
            message = self.exchanger.workers.receive(source)[1]
            self._ending.record(message)
            assert message.tensor is not None, "gossip carries parameters"
            self._arrived[len(self._masses)] = message.tensor
            self._masses.append(message.weight)
        self._expected = []

    def _take_in(self) -> None:
        for number, mass in enumerate(self._masses):
            self._numerator.add_(self._arrived[number].to(self._numerator.device))
            self._mass += mass
        self._arrived, self._masses = {}, []

    def _wait_for_pushes(self) -> None:
        for push in self._pushes:
            push.wait()
        self._pushes = []
