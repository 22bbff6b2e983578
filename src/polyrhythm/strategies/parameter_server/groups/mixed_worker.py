"""The worker of mixed mode: a member of a group, one of which talks to the servers for all."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from polyrhythm.strategies.parameter_server.groups.circle import Circle
from polyrhythm.strategies.parameter_server.groups.inside_part import Contribution, InsidePart
from polyrhythm.strategies.parameter_server.serving.push_pull import PushPull
from polyrhythm.strategies.regrouping import Reassembled
from polyrhythm.strategies.state import State
from polyrhythm.strategies.step import Step
from polyrhythm.strategies.worker_part import WorkerPart
from polyrhythm.strategies.worker_setting import WorkerSetting


class MixedWorker(WorkerPart):
    """Goes on with its group; whoever speaks for the group pushes what comes of it, and hands the answer on.

    When somebody of the group is lost, or comes, those who are there begin anew at what the servers have: the
    parameters, and how many of the group's contributions are in them. So a contribution that was under way is either
    there, or made again.

    Args:
        setting: this worker's.
        circle: its group.
        inside: what goes on there.
    """

    uses_bucket_ready: ClassVar[bool] = True

    def __init__(self, setting: WorkerSetting, circle: Circle, inside: InsidePart) -> None:
        super().__init__()
        self._setting = setting
        self._circle = circle
        self._flat = setting.flat
        self._inside = inside
        self._leads_run = setting.workers.rank == 0
        self._servers = self._link() if circle.speaks and not setting.succeeds else None
        self._left_out = 0
        self._done = 0
        self._regrouped_at: int | None = None

    def start(self, step: int) -> int:
        """Worker 0 hands out the shards; speakers pull; groups share what theirs got."""
        if self._leads_run and self._servers is not None:
            self._servers.initialise()
        reached = self._servers.pull() if self._servers is not None else 0
        contributions = int(self._share(reached)[0])
        if self._inside.resume(step, contributions):
            self._done = step
            return step
        return self._begin_at(contributions)

    def begin(self, step: Step) -> None:
        """A step begins inside."""
        self._inside.begin(step)

    def bucket_ready(self, bucket: int) -> None:
        """The gradients of this bucket are final."""
        self._inside.bucket_ready(bucket)

    def gradients_ready(self, step: Step, learning_rate: float) -> bool:
        """Goes on inside, and exchanges what comes of it through the speaker, if it is time to."""
        self._left_out = 0
        contribution = self._inside.contribute(step, learning_rate)
        stop = contribution is not None and self._exchange(contribution)
        self._done = self.next_step(step.number)
        return stop

    def next_step(self, step: int) -> int:
        """Where the servers are, if they did not wait for this group."""
        return step + 1 + self._left_out

    def settle(self) -> None:
        """Nothing is under way between two steps."""

    def present(self) -> Tensor | None:
        """The group's model, where its members have models of their own."""
        return self._inside.present()

    def catch_up(self) -> None:
        """Takes the newest parameters, the whole group together, unless its members are apart or have them already."""
        if self._inside.apart or self._regrouped_at == self._done:
            return
        if self._servers is not None:
            self._servers.pull()
        self._share(0.0)
        self._inside.refresh()

    @property
    def due(self) -> bool:
        """Whether somebody waits to be let in."""
        return self._circle.due

    def reassemble(self, *, enters: bool) -> Reassembled:
        """Goes on with those who are there, at what the servers have of the group."""
        circle = self._circle
        if not enters:
            circle.break_off()
            self._inside.break_off()
        goes_on = circle.enter() if enters else circle.go_on()
        if goes_on:
            self._flat.renew_gradients()  # the library may still write into the old ones
            self._inside.regroup(circle.group)
            self._servers = self._link() if circle.speaks else None
            reached = self._servers.pull() if self._servers is not None else 0
            self._regrouped_at = self._begin_at(int(self._share(reached)[0]))
        else:
            self._done = circle.steps * self._inside.steps
        absent = tuple(worker for worker in circle.everybody if worker not in circle.there)
        return Reassembled(self._done, not goes_on, circle.there, absent, circle.round)

    def end(self) -> None:
        """Pushes what is left; speakers leave, and worker 0 waits for the final parameters."""
        left = self._inside.rest()
        if left is not None:
            self._exchange(left)
        if self._servers is not None:
            self._servers.leave()
        if self._leads_run:
            self._servers = self._servers or self._link()
            self._servers.pull(final=True)

    def let_go(self) -> None:
        """Tells the servers that nobody needs them any more."""
        assert self._servers is not None, "worker 0 has asked them for the final parameters"
        self._servers.leave()

    def state(self) -> State:
        """Gives what goes on inside."""
        return self._inside.state()

    def load_state(self, state: State) -> None:
        """Takes back what `state` gave."""
        self._inside.load_state(state)

    def _link(self) -> PushPull:
        steps = self._setting.steps or 0
        return PushPull(self._setting, self._inside.plan, -(-steps // self._inside.steps))

    def _begin_at(self, contributions: int) -> int:
        self._inside.start(contributions * self._inside.steps)
        self._done = contributions * self._inside.steps
        return self._done

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
        """Gives all members the speaker's parameters and one or two numbers of its."""
        shared = self._flat.vector_and_tail
        tail = shared[-len(numbers) :]
        tail.copy_(tail.new_tensor(numbers))
        self._circle.group.broadcast(shared)
        found: list[float] = tail.tolist()
        return found
