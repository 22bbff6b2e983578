"""The worker of elastic averaging.

    begin               gradients_ready
      x ──── forward, backward at x ────▶ g ;  x -= d ;  x -= lr g
      └─ VECTOR(x) ─▶ centre ─ DIFFERENCE(d) ─┘

The gradient is that of the value before the pull, so the exchange hides behind its computation.
"""

from __future__ import annotations

from torch import Tensor

from polyrhythm.strategies.parameter_server.elastic.centre_link import CentreLink
from polyrhythm.strategies.parameter_server.elastic.local_step import LocalStep
from polyrhythm.strategies.parameter_server.elastic.rule import ElasticRule
from polyrhythm.strategies.state import State
from polyrhythm.strategies.step import Step
from polyrhythm.strategies.worker_part import WorkerPart
from polyrhythm.strategies.worker_setting import WorkerSetting


class ElasticWorker(WorkerPart):
    """Steps on its own, and exchanges every `tau` steps.

    Args:
        setting: the worker's.
        rule: when it exchanges.
        local: its own step.
    """

    def __init__(self, setting: WorkerSetting, rule: ElasticRule, local: LocalStep) -> None:
        super().__init__()
        self._rank = setting.workers.rank
        self._hands_out = self._rank == 0 and not setting.succeeds
        self._flat = setting.flat
        self._rule = rule
        self._local = local
        self._centre = CentreLink(setting)
        self._restored = False
        self._exchanging = False
        self._done = 0

    def start(self, step: int) -> int:
        """Worker 0 hands out the centre, and everyone begins there; who is resumed, where it was.

        A state that is older than this worker's last exchange is of no use: its steps would be done twice.
        """
        if self._hands_out:
            self._centre.initialise(self._local.own)
        centre, known = self._centre.pull()
        self._done = step
        if not self._restored or step < known:
            self._local.begin_from(centre)
            self._done = known
        return self._done

    def begin(self, step: Step) -> None:
        """Starts an exchange, if one is due."""
        self._local.look_ahead()
        self._exchanging = self._rule.due(step.number)
        if self._exchanging:
            self._centre.offer(self._local.own, step)

    def gradients_ready(self, step: Step, learning_rate: float) -> bool:
        """Ends the exchange, and steps."""
        stop = self._exchanging and self._centre.take(self._local.own)
        self._exchanging = False
        self._done = step.number + 1
        if step.weight > 0:
            self._local.update(self._flat.gradients, learning_rate)
        else:
            self._local.look_ahead()
        return stop

    def settle(self) -> None:
        """Leaves this worker's own parameters in the vector."""
        self._local.rest()

    def present(self) -> Tensor | None:
        """The centre is the model."""
        return self._centre.pull()[0] if self._rank == 0 else None

    def catch_up(self) -> None:
        """Goes on where it was."""
        self._local.look_ahead()

    def end(self) -> None:
        """Pulls at the centre for a last time and leaves; worker 0 waits for the final centre."""
        self._centre.part(self._local.own, self._done)
        if self._rank == 0:
            self._flat.vector.copy_(self._centre.pull(final=True)[0])

    def let_go(self) -> None:
        """Tells the servers that nobody needs them any more."""
        self._centre.let_go()

    def state(self) -> State:
        """Gives this worker's own parameters, and its optimiser's state."""
        tensors, facts = self._local.state()
        return tensors, {"worker": self._rank, **facts}

    def load_state(self, state: State) -> None:
        """Takes them back; another worker's, where this one had handed in none, are left alone."""
        if state[1]["worker"] == self._rank:
            self._local.load_state(state)
            self._restored = True
