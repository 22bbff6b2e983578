"""The worker of all strategies whose workers push every gradient, and go on with what the servers answer."""

from __future__ import annotations

from polyrhythm.strategies.parameter_server.serving.not_finite import is_finite
from polyrhythm.strategies.parameter_server.serving.push_pull import PushPull
from polyrhythm.strategies.state import State
from polyrhythm.strategies.step import Step
from polyrhythm.strategies.worker_part import WorkerPart
from polyrhythm.strategies.worker_setting import WorkerSetting


class ServedWorker(WorkerPart):
    """Pushes the gradients of every step and goes on with what the servers answer.

    Args:
        setting: this worker's.
        servers: its way to the servers, where it is another than the plain one.
        own_updates: whether it updates its own copy, in case that an answer is empty.
        dropped_late: whether servers drop a gradient that comes late. Others may then wait for another one of whoever
            stops, which for its part may wait for their states; so it leaves before that.
    """

    def __init__(
        self,
        setting: WorkerSetting,
        servers: PushPull | None = None,
        *,
        own_updates: bool = False,
        dropped_late: bool = False,
    ) -> None:
        super().__init__()
        self._leaves_at_once = dropped_late
        self._has_left = False
        self._leads = setting.workers.rank == 0
        self._hands_out = self._leads and not setting.succeeds
        self._servers = servers or PushPull(setting)
        self._flat = setting.flat
        self._optimizer = setting.plan.build(setting.flat.vector) if own_updates else None

    def start(self, step: int) -> int:
        """Worker 0 hands out the shards; everyone takes the servers' parameters, and leaves if it is told to stop.

        Others may wait for a gradient of it in the step under way, while as worker 0 it waits for them to stop.
        """
        if self._hands_out:
            self._servers.initialise()
        reached = self._servers.pull()
        if self._servers.stops:
            self._leave()
        return reached

    def gradients_ready(self, step: Step, learning_rate: float) -> bool:
        """Pushes, and takes the answers, which overwrite an update of its own where they are not empty.

        Servers leave out a gradient that is not finite; so it is not taken into the worker's own copy either.
        """
        self._servers.push(step, step.weight, learning_rate)
        if self._optimizer is not None and step.weight > 0 and is_finite(self._flat.gradients):
            self._optimizer.step(self._flat.gradients, learning_rate)
        stops = self._servers.take()
        if stops and self._leaves_at_once:
            self._leave()
        return stops

    def check_servers(self) -> None:
        """Takes note of servers that were lost while nothing was asked of them."""
        self._servers.check_losses()

    def next_step(self, step: int) -> int:
        """Where the servers are, if they did not wait for this worker."""
        reached = self._servers.reached
        return reached if reached > step else step + 1

    @property
    def has_stopped(self) -> bool:
        """Whether the answer to its last pull said so; a successor's push would wait for those who push no more."""
        return self._servers.stops

    def catch_up(self) -> None:
        """Takes the newest parameters; a gradient of old ones would be as stale as this worker was long away.

        Who has left takes none: it pushes no more, and servers would let it in again.
        """
        if not self._has_left:
            self._servers.pull()

    def end(self) -> None:
        """Leaves; worker 0 waits for the final parameters."""
        self._leave()
        if self._leads:
            self._servers.pull(final=True)

    def _leave(self) -> None:
        if not self._has_left:
            self._servers.leave()
            self._has_left = True

    def let_go(self) -> None:
        """Tells the servers that nobody needs them any more."""
        self._servers.leave()

    def state(self) -> State:
        """The state of the optimiser of its own, if it has one; parameters come from the servers."""
        return self._optimizer.state() if self._optimizer is not None else ({}, {})

    def load_state(self, state: State) -> None:
        """Takes back what `state` gave."""
        if self._optimizer is not None:
            self._optimizer.load_state(*state)
