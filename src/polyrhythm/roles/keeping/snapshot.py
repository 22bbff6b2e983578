"""A run at one moment: every rank's state."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from polyrhythm.data.dealing.begun import Begun
from polyrhythm.roles.keeping.worker_state import WorkerState
from polyrhythm.strategies.state import State


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment.

    Attributes:
        epoch: whole epochs done by the leader.
        step: steps done by the leader.
        seconds: trained so far.
        parameters: `(n,)`, the leader's.
        workers: the latest state of every worker that had sent one.
        servers: one state a server.
        average: the moving average of the weights, if there is one.
        presented: `(n,)`, the parameters that were tested, where they are neither the leader's nor the average.
        begun: what other numbers of workers did of epochs that were not over.
    """

    epoch: int
    step: int
    seconds: float
    parameters: Tensor
    workers: dict[int, WorkerState]
    servers: list[State] = field(default_factory=list)
    average: dict[str, Tensor] = field(default_factory=dict)
    presented: Tensor | None = None
    begun: Begun = field(default_factory=Begun)

    @property
    def tested(self) -> Tensor:
        """The parameters, `(n,)`, of the model as it is tested and saved."""
        if self.average:
            return self.average["value"]
        return self.parameters if self.presented is None else self.presented

    def worker(self, index: int, replicated: bool) -> WorkerState:
        """Gives a worker's state; where it had sent none, or its part is everybody's, that comes from worker 0."""
        leader = self.workers[0]
        own = replace(self.workers.get(index, leader), begun=self.begun.to_json())
        return replace(own, part=leader.part, part_facts=leader.part_facts) if replicated else own

    def behind(self, workers: int) -> set[int]:
        """Gives those of so many workers that had done fewer steps than the leader, or had said nothing."""
        return {
            index
            for index in range(workers)
            if index not in self.workers or self.workers[index].account.step < self.step
        }

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""
        named = {"parameters": self.parameters}
        for index, worker in self.workers.items():
            named |= {f"worker.{index}.{name}": value for name, value in worker.tensors().items()}
        for index, (tensors, _) in enumerate(self.servers):
            named |= {f"server.{index}.{name}": value for name, value in tensors.items()}
        if self.presented is not None:
            named["presented"] = self.presented
        return named | {f"average.{name}": value for name, value in self.average.items()}

    def facts(self) -> dict[str, Any]:
        """All that is not a tensor, JSON-able."""
        return {
            "epoch": self.epoch,
            "step": self.step,
            "seconds": self.seconds,
            "workers": {str(index): worker.facts() for index, worker in self.workers.items()},
            "servers": [facts for _, facts in self.servers],
            "begun": self.begun.to_json(),
        }

    @classmethod
    def of(cls, tensors: dict[str, Tensor], facts: dict[str, Any]) -> Snapshot:
        """Rebuilds a snapshot from `tensors` and `facts`."""
        workers = {
            int(index): WorkerState.from_tensors(_below(f"worker.{index}.", tensors), entry)
            for index, entry in facts["workers"].items()
        }
        servers = [
            (_below(f"server.{index}.", tensors), entry) for index, entry in enumerate(facts["servers"])
        ]
        return cls(
            facts["epoch"],
            facts["step"],
            facts["seconds"],
            tensors["parameters"],
            workers,
            servers,
            _below("average.", tensors),
            tensors.get("presented"),
            Begun.from_json(facts.get("begun", {})),  # older checkpoints had none
        )


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
