"""The worker of Downpour.

step s-1                 step s                                        step s+1
… push, FETCH ──┐        forward, backward at w ─▶ w = what came ◀─┐   …
                └──────────────▶ server ───────────────────────────┘
                                                   w -= lr g;  sum += g;  push the sum, if due;  FETCH, if due
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polyrhythm.communication.communicator import Communicator, Handle
from polyrhythm.communication.message import Kind, Message, pack_json
from polyrhythm.errors import PeerLost
from polyrhythm.strategies.state import State
from polyrhythm.strategies.step import Step
from polyrhythm.strategies.worker_part import WorkerPart
from polyrhythm.strategies.worker_setting import WorkerSetting
from polyrhythm.training.flat_parameters import shards
from polyrhythm.training.optimizing.optimizer_plan import OptimizerPlan


@dataclass(frozen=True, kw_only=True)
class Rhythm:
    """When a worker fetches and pushes, and how far it goes by itself meanwhile.

    Attributes:
        n_fetch: steps between two fetches.
        n_push: steps between two pushes.
        local_rate: of a worker's own steps, as a multiple of the run's learning rate.
    """

    n_fetch: int
    n_push: int
    local_rate: float


class SumWorker(WorkerPart):
    """Steps on its own, pushes sums of its gradients, and takes over what the servers hold.

    Args:
        setting: the worker's.
        rhythm: when it does what.
    """

    def __init__(self, setting: WorkerSetting, rhythm: Rhythm) -> None:
        super().__init__()
        self._rank = setting.workers.rank
        self._hands_out = self._rank == 0 and not setting.succeeds
        self._flat = setting.flat
        self._rhythm = rhythm
        self._steps = setting.steps
        self._servers = _Servers(setting.network, setting.cast.servers, setting.flat.size)
        self._plan = setting.plan
        self._local = _plain_sgd(setting.plan).build(setting.flat.vector)
        self._sums = torch.zeros_like(setting.flat.vector), torch.zeros_like(setting.flat.vector)
        self._summed = 0
        self._pushed = 0
        self._stop = False
        self._restored = False

    def start(self, step: int) -> int:
        """Takes the servers' parameters; who is resumed goes on where it was, if they hold what it had pushed."""
        if self._hands_out:
            self._servers.initialise(self._plan, self._flat.vector, self._steps or 0)
        values, known = self._servers.pull()
        if self._restored and known == self._pushed:
            return step
        self._flat.vector.copy_(values)
        self._sums[0].zero_()
        self._summed, self._pushed = 0, known
        return known

    def gradients_ready(self, step: Step, learning_rate: float) -> bool:
        """Takes what was fetched, steps, and pushes and fetches what is due."""
        self._servers.note_read()
        self._take()
        if step.weight > 0:
            gradients = self._flat.gradients
            self._sums[0].add_(gradients)
            self._summed += 1
            if self._rhythm.local_rate > 0:
                self._local.step(gradients, learning_rate * self._rhythm.local_rate)
        if step.number % self._rhythm.n_push == 0 or step.number + 1 == self._steps:
            self._push(step, learning_rate)
        self._last = step, learning_rate
        if (step.number + 1) % self._rhythm.n_fetch == 0:
            self._servers.fetch(stop=step.stop)
        return self._stop

    def settle(self) -> None:
        """Takes what was fetched, and lets go what is being pushed."""
        self._take()
        self._servers.wait_for_pushes()

    def present(self) -> Tensor | None:
        """The servers' parameters are the model."""
        return self._servers.pull()[0] if self._rank == 0 else None

    def catch_up(self) -> None:
        """Worker 0, which may have been away, takes the newest parameters."""
        if self._rank == 0:
            self._flat.vector.copy_(self._servers.pull()[0])

    def end(self) -> None:
        """Pushes what is left and leaves; worker 0 waits for the final parameters."""
        self.settle()
        if self._summed:
            self._push(*self._last)
            self._servers.wait_for_pushes()
        self._servers.leave()
        if self._rank == 0:
            self._flat.vector.copy_(self._servers.pull(final=True)[0])

    def let_go(self) -> None:
        """Tells the servers that nobody needs them any more."""
        self._servers.leave()

    def state(self) -> State:
        """Gives this worker's own parameters, and the sum that is not pushed yet."""
        tensors = {"own": self._flat.vector, "sum": self._sums[0]}
        facts = {"worker": self._rank, "summed": self._summed, "pushed": self._pushed}
        return tensors, facts | {"versions": list(self._servers.versions)}

    def load_state(self, state: State) -> None:
        """Takes them back; another worker's, where this one had handed in none, are left alone."""
        tensors, facts = state
        if facts["worker"] != self._rank:
            return
        self._flat.vector.copy_(tensors["own"])
        self._sums[0].copy_(tensors["sum"])
        self._summed, self._pushed = facts["summed"], facts["pushed"]
        self._servers.versions = list(facts["versions"])
        self._restored = True

    def _take(self) -> None:
        fetched = self._servers.take()
        if fetched is not None:
            values, stop = fetched
            self._flat.vector.copy_(values)
            self._stop |= stop

    def _push(self, step: Step, learning_rate: float) -> None:
        self._servers.wait_for_pushes()  # of the sum that is overwritten next
        pushed = replace(step, weight=float(self._summed))
        self._servers.push(self._sums[0], pushed, learning_rate)
        self._sums = self._sums[1], self._sums[0]
        self._sums[0].zero_()
        self._summed, self._pushed = 0, step.number + 1


class _Servers:
    """A worker's end of all shards."""

    def __init__(self, network: Communicator, servers: tuple[int, ...], size: int) -> None:
        self.versions = [0] * len(servers)
        self._read = self.versions
        self._network = network
        self._servers = servers
        self._shards = shards(size, len(servers))
        self._pushing: list[Handle] = []
        self._fetching = False

    def initialise(self, plan: OptimizerPlan, vector: Tensor, steps: int) -> None:
        """Gives every server its shard, how to optimise it, and how many steps a worker takes (0: nobody can tell)."""
        for server, shard in zip(self._servers, self._shards, strict=True):
            text = pack_json(plan.part(shard.start, shard.stop).to_json())
            self._network.send(server, Message(Kind.CONFIGURE, text, step=steps))
            self._network.send(server, Message(Kind.PARAMETERS, vector[shard]))

    def pull(self, final: bool = False) -> tuple[Tensor, int]:
        """Waits for the parameters, and how many of this worker's gradients all servers hold."""
        for server in self._servers:
            self._network.send(server, Message(Kind.PULL, stop=final))
        values, steps, _ = self._answers()
        return values, steps

    def note_read(self) -> None:
        """The gradient that is ready was computed from what is there now."""
        self._read = list(self.versions)

    def fetch(self, stop: bool) -> None:
        """Asks for the parameters, to be taken later."""
        for server in self._servers:
            self._network.send(server, Message(Kind.FETCH, stop=stop))
        self._fetching = True

    def take(self) -> tuple[Tensor, bool] | None:
        """Waits for what was asked for, if anything was; gives it, and whether this worker must stop."""
        if not self._fetching:
            return None
        self._fetching = False
        values, _, stop = self._answers()
        return values, stop

    def push(self, total: Tensor, step: Step, learning_rate: float) -> None:
        """Starts to push a sum, which must not change before `wait_for_pushes`."""
        self._pushing = [
            self._network.start_send(
                server,
                Message(
                    Kind.PUSH,
                    total[shard],
                    version=version,
                    step=step.number,
                    weight=step.weight,
                    learning_rate=learning_rate,
                    stop=step.stop,
                ),
            )
            for server, shard, version in zip(self._servers, self._shards, self._read, strict=True)
        ]

    def wait_for_pushes(self) -> None:
        """Waits until what is being pushed may change."""
        for handle in self._pushing:
            handle.wait()
        self._pushing = []

    def leave(self) -> None:
        """Tells all servers that nothing more will be pushed; after the final pull, that they may go."""
        for server in self._servers:
            self._network.send(server, Message(Kind.LEAVE))

    def _answers(self) -> tuple[Tensor, int, bool]:
        pieces, steps, stop = [], [], False
        for position, server in enumerate(self._servers):
            answer = self._network.receive(server)[1]
            if answer.kind is Kind.LEAVE:
                raise PeerLost(server, "joining a run that is ending")
            assert answer.tensor is not None, "an answer carries parameters"
            pieces.append(answer.tensor)
            steps.append(answer.step)
            self.versions[position] = answer.version
            stop |= answer.stop
        return torch.cat(pieces), min(steps), stop


def _plain_sgd(plan: OptimizerPlan) -> OptimizerPlan:
    """Gives SGD without momentum for the same numbers, at the same ratios of learning rates."""
    spans = tuple(replace(span, options={"lr": span.options["lr"]}) for span in plan.spans)
    return OptimizerPlan("SGD", spans, plan.rate)
