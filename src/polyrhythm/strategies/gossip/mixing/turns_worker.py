"""What workers have in common that mix in turns: how they go on without one that is lost, and with its successor.

    worker 0   turn 3, turn 4 ┃                              ┃ turn 6 …
    worker 1   turn 3, turn 4, turn 5 ┃ all take one point   ┃ turn 6 …
    worker 2   turn 3, lost           ┃ (`reunion.py`)       ┃
    worker 3   turn 3 ┃                 step 4 and 5 alone ──▶ turn 6 …

No turn joins all, so those who are left have come to different steps. They begin anew at the mean of what they hold, by
their masses, as if each had a mass of 1. Who is behind takes its steps up to where the first is without mixing, so no
step is left out; then all mix by the matrices of the topology for so many (`turns.made_anew`). What a worker has
learned in a step that broke is in the mean, and not applied again. A successor brings nothing to the mean, and takes
it; unless all others are lost before it is made.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

from torch import Tensor

from polyrhythm.communication.communicator import Communicator
from polyrhythm.strategies.gossip.mixing.reunion import Progress, Reunion
from polyrhythm.strategies.gossip.mixing.turns import Turns, made_anew
from polyrhythm.strategies.state import State
from polyrhythm.strategies.step import Step
from polyrhythm.strategies.topology import Topology
from polyrhythm.strategies.worker_part import WorkerPart
from polyrhythm.strategies.worker_setting import WorkerSetting

REUNITE = "the others begin anew at the mean of what they hold, with a matrix for their number; a successor joins them"
"""What happens when a worker dies."""
_NEVER = -1


class TurnsWorker(WorkerPart):
    """Mixes in turns.

    Args:
        setting: the worker's.
        topology: who mixes with whom.
        check: refuses a number of workers that cannot have it.
        delay: steps after which a message counts.
    """

    def __init__(
        self, setting: WorkerSetting, topology: Topology, check: Callable[[int], None], delay: int = 0
    ) -> None:
        super().__init__()
        self._workers = setting.workers
        self._flat = setting.flat
        self._topology = topology
        self._check = check
        self._delay = delay
        self._turns = Turns(topology, setting.workers)
        self._ending = self._turns.ending(delay)
        self._reunion = Reunion(self._begin_together)
        self._brings = True
        self._done = 0
        self._updated = _NEVER
        self._mixes_from = 0
        self._presented = self._presented_to_all = _NEVER

    @abstractmethod
    def brought(self) -> tuple[Tensor, float]:
        """Gives what this worker brings to a reunion: its parameters, `(size,)`, times their mass, and the mass."""

    def present(self) -> Tensor | None:
        """Gives the mean of all workers, unless some have had it already."""
        self._presented = self._done
        return self.common_model() if self._done > self._presented_to_all else None

    def meetings(self, step: int) -> int:
        """None: nobody waits for all."""
        return 0

    def exchanges(self, step: int) -> int:
        """One a step."""
        return step

    def lets_in(self, step: int) -> bool:
        """Always: the rest hears of it at its next turn."""
        return True

    def regroup(self, workers: Communicator, members: tuple[int, ...]) -> None:
        """Meets those who are there, and mixes with them from now on."""
        self._workers = workers
        own = Progress(steps=self._done, presented=self._presented, last=self._ending.last)
        told = self._reunion.tell(workers, own, self._flat.vector)
        self._reunion.meet(workers, *self.brought(), brings=self._brings)
        self._mixes_from = max(worker.steps for worker in told)
        self._presented_to_all = max(worker.presented for worker in told)
        self._turns = Turns(made_anew(self._topology, self._check, workers.size), workers)
        known = [worker.last for worker in told if worker.last is not None]
        self._ending = self._turns.ending(self._delay, min(known, default=None))

    @property
    def has_stopped(self) -> bool:
        """Whether the last step is over; nobody mixes after it."""
        return self._ending.after(self._done - 1)

    def take_over(self, newest: State, done: int, step: int) -> int:
        """Begins as the newest is; or takes its model, and counts the last step, whose mean it has missed."""
        if done < 0:
            self.load_state(newest)
            self._done, self._updated = step, _NEVER
            self._presented = step  # after so many steps it goes on, and is at no presentation
        else:
            # The vector is the newest's; its own is in that mean, and must not be handed on.
            self.begin_at(self._flat.vector)
            self._done = done + 1
        self._brings = False
        return self._done

    def _mixes(self, step: int) -> bool:
        """Whether this worker mixes in a step, where all are."""
        return step >= self._mixes_from

    def _pass_stop_on(self, step: Step) -> None:
        """Passes a request to stop on."""
        if step.stop:
            self._ending.request_stop(max(step.number, self._mixes_from))

    def _learn(self, step: Step, update: Callable[[], None]) -> None:
        """Applies a step's gradients, once and if they weigh anything."""
        if step.weight > 0 and self._updated != step.number:
            update()
            self.staleness[0] += 1
        self._updated = step.number

    def _over(self, step: Step) -> bool:
        """A step is over: gives whether this worker stops after it."""
        self._done = step.number + 1
        return self._ending.after(step.number)

    def _begin_together(self, point: Tensor) -> None:
        self.begin_at(point)
        self._brings = True
