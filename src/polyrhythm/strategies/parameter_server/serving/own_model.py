"""Base of a worker that trains a model of its own and exchanges it, or sums of gradients, with servers.

The servers' model is the run's. A worker begins with it, and so does the replacement of a failed one; a resumed worker
keeps its own model where the servers have all that it had sent.

`FreeLink` is a link without waiting: pushes are not answered, and parameters are fetched during a step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor

from polyrhythm.communication.communicator import Handle
from polyrhythm.communication.message import Kind, Message
from polyrhythm.strategies.parameter_server.serving.push_pull import ServerLink
from polyrhythm.strategies.resharding import (
    EVERYTHING_OF_SERVER,
    STEPS,
    Held,
    Resharding,
    steps_known,
    steps_of_servers,
)
from polyrhythm.strategies.state import StateField, Stateful
from polyrhythm.strategies.worker_part import WORKER, Step, WorkerPart, WorkerSetting
from polyrhythm.training.optimizer_plan import OptimizerPlan

Link = TypeVar("Link", bound=ServerLink)


class OwnModelWorker(WorkerPart, Generic[Link]):
    """Worker part with a model of its own; the servers' model is the run's.

    Subclasses set `_done`, the number of steps done, after each step, and `_pushed`, the number of steps in what was
    pushed to all servers, or to each.
    """

    fields: ClassVar[tuple[StateField, ...]] = (WORKER,)

    def __init__(self, setting: WorkerSetting, link: Link) -> None:
        super().__init__()
        self._rank = setting.workers.rank
        self._initializes = setting.initializes
        self._flat = setting.flat
        self._link = link
        self._done = 0
        self._pushed: Any = 0

    @classmethod
    def fits(cls, step: int, pushed: Any, known: Sequence[int]) -> bool:
        """Return whether a stored model continues; default: if servers know exactly what was pushed.

        Args:
            step: number of its steps.
            pushed: `_pushed` at that time.
            known: number of the worker's steps that each server knows.
        """
        return bool(min(known) == pushed)

    def take_over(self, values: Tensor, known: Sequence[int]) -> None:
        """Begin with the servers' parameters, `(size,)`; `known` as in `fits`."""
        raise NotImplementedError

    def depart(self) -> None:
        """Send the updates that servers lack, and leave the servers."""
        raise NotImplementedError

    def start(self, step: int) -> int:
        if self._initializes:
            self._link.initialize()
        values, known = self._link.pull_whole()
        if not (self.restored and self.fits(step, self._pushed, self._link.known)):
            self.take_over(values, self._link.known)
            step = known
        self._done = step
        return step

    def check_servers(self) -> None:
        self._link.check_losses()

    def present(self) -> Tensor | None:
        return self._link.pull_whole()[0] if self._rank == 0 else None

    def end(self) -> None:
        self.depart()
        if self._rank == 0:
            self._flat.vector.copy_(self._link.pull_whole(final=True)[0])

    def release(self) -> None:
        self._link.leave()


def of_own_models(
    part: type[OwnModelWorker[Any]],
    after: int,
    servers: tuple[StateField, ...] = (),
    remark: Callable[[Held], str] = lambda held: "",
) -> Resharding:
    """Return the resharding of workers with models of their own: each that fits what the servers know stays.

    Args:
        part: class of the workers' parts.
        after: new number of workers.
        servers: fields of a server's state that do not stay as they are.
        remark: see `Resharding`.
    """

    def fits(held: Held) -> list[int]:
        known = steps_known(held.servers)
        return [
            worker
            for worker, (_, facts) in held.workers.items()
            if part.fits(held.steps[worker], facts.get("pushed"), known[worker])
        ]

    return Resharding(
        after=after,
        text="the servers continue with their state, and {kept} workers with their own models",
        newcomers="; {new} begin with the servers' model",
        remark=remark,
        workers=part.fields,
        servers=(*servers, STEPS, EVERYTHING_OF_SERVER),
        count=steps_of_servers,
        fits=fits,
    )


class FreeLink(ServerLink, Stateful):
    """Link on which pushes are not answered and fetched parameters arrive while the worker computes."""

    def __init__(self, setting: WorkerSetting, plan: OptimizerPlan, pushes: int = 0) -> None:
        super().__init__(setting, plan, pushes)
        self.shards = self._shards
        self._read = list(self._versions)
        self._pushing: dict[int, Handle] = {}
        self._fetching: dict[int, Handle] = {}
        """Requests without an answer yet; they leave behind pushes, and are not waited for."""

    def note_read(self) -> None:
        """Record that the next gradients pushed are those of the parameters fetched last."""
        self._read = list(self._versions)

    def fetch(self, positions: Collection[int], stop: bool) -> None:
        """Request the parameters of the servers at these positions, for `take`."""
        self._fetching = {
            position: self._ask(position, Message(Kind.FETCH, stop=stop)) for position in positions
        }

    def take(self) -> list[tuple[int, Tensor | None, bool]]:
        """Return the requested position and parameters (None: unchanged), and whether this worker must stop."""
        taken = []
        for position in self._fetching:
            answer = self._answer(position)
            if answer.tensor is not None:
                self._versions[position] = answer.version
            taken.append((position, answer.tensor, answer.stop))
        self._fetching = {}
        return taken

    def push(self, position: int, pushed: Tensor, step: Step, learning_rate: float) -> None:
        """Start to push a vector to a server; it must not change before `wait_for_push`."""
        self._pushing[position] = self._ask(
            position,
            Message(
                Kind.PUSH,
                pushed,
                version=self._read[position],
                step=step.number,
                weight=step.weight,
                learning_rate=learning_rate,
                stop=step.stop,
            ),
        )

    def wait_for_push(self, position: int) -> None:
        """Wait until the vector pushed last to a server may change."""
        if position in self._pushing:
            self._pushing.pop(position).wait()

    def wait_for_pushes(self) -> None:
        """Wait until all pushed vectors may change."""
        for position in list(self._pushing):
            self.wait_for_push(position)
