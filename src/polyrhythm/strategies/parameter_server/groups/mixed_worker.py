"""The worker of mixed mode: a member of a group, whose leader talks to the servers for all."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from polyrhythm.communication.communicator import Communicator
from polyrhythm.strategies.parameter_server.groups.inside_part import Contribution, InsidePart
from polyrhythm.strategies.parameter_server.serving.push_pull import PushPull
from polyrhythm.strategies.state import State
from polyrhythm.strategies.step import Step
from polyrhythm.strategies.worker_part import WorkerPart, WorkerSetting


class MixedWorker(WorkerPart):
    """Goes on with its group; the group's leader pushes what comes of it, and hands the answer on.

    Args:
        setting: this worker's.
        group: whose member it is; its rank 0 leads.
        inside: what goes on there.
    """

    hears_buckets: ClassVar[bool] = True

    def __init__(self, setting: WorkerSetting, group: Communicator, inside: InsidePart) -> None:
        super().__init__()
        self._group = group
        self._flat = setting.flat
        self._inside = inside
        self._servers = PushPull(setting, inside.plan) if group.rank == 0 else None
        self._leads_run = setting.workers.rank == 0
        self._left_out = 0

    def start(self, step: int) -> int:
        """Worker 0 hands out the shards; leaders pull; groups share what their leader got."""
        if self._leads_run and self._servers is not None:
            self._servers.initialise()
        reached = self._servers.pull() if self._servers is not None else 0
        contributions = int(self._share(reached)[0])
        if self._inside.resume(step, contributions):
            return step
        self._inside.start(contributions * self._inside.steps)
        return contributions * self._inside.steps

    def begin(self, step: Step) -> None:
        """A step begins inside."""
        self._inside.begin(step)

    def bucket_ready(self, bucket: int) -> None:
        """The gradients of this bucket are final."""
        self._inside.bucket_ready(bucket)

    def gradients_ready(self, step: Step, learning_rate: float) -> bool:
        """Goes on inside, and exchanges what comes of it through the leader, if it is time to."""
        self._left_out = 0
        contribution = self._inside.contribute(step, learning_rate)
        return contribution is not None and self._exchange(contribution)

    def next_step(self, step: int) -> int:
        """Where the servers are, if they did not wait for this group."""
        return step + 1 + self._left_out

    def settle(self) -> None:
        """Nothing is under way between two steps."""

    def present(self) -> Tensor | None:
        """The group's model, where its members have models of their own."""
        return self._inside.present()

    def catch_up(self) -> None:
        """Takes the newest parameters, the whole group together, unless its members are apart."""
        if self._inside.apart:
            return
        if self._servers is not None:
            self._servers.pull()
        self._share(0.0)
        self._inside.refresh()

    def end(self) -> None:
        """Pushes what is left; leaders leave, and worker 0 waits for the final parameters."""
        left = self._inside.rest()
        if left is not None:
            self._exchange(left)
        if self._servers is not None:
            self._servers.leave()
            if self._leads_run:
                self._servers.pull(final=True)

    def let_go(self) -> None:
        """Tells the servers that nobody needs them any more."""
        assert self._servers is not None, "worker 0 leads its group"
        self._servers.leave()

    def state(self) -> State:
        """Gives what goes on inside."""
        return self._inside.state()

    def load_state(self, state: State) -> None:
        """Takes back what `state` gave."""
        self._inside.load_state(state)

    def _exchange(self, contribution: Contribution) -> bool:
        """Pushes what the group has, and shares the answer; gives whether all must stop."""
        step, stop = contribution.step, False
        if self._servers is not None:
            stop = self._servers.push_and_pull(step, step.weight, contribution.learning_rate)
            self._left_out = max(0, self._servers.reached - step.number - 1)
        shared_stop, left_out = self._share(float(stop), self._left_out)
        self._left_out = int(left_out)
        self._inside.refresh()
        return bool(shared_stop)

    def _share(self, *numbers: float) -> list[float]:
        """Gives all members the leader's parameters and one or two numbers of its."""
        shared = self._flat.vector_and_tail
        tail = shared[-len(numbers) :]
        tail.copy_(tail.new_tensor(numbers))
        self._group.broadcast(shared)
        found: list[float] = tail.tolist()
        return found
