"""A strategy of your own in thirty lines: workers average their gradients at every other step, and step alone between.

    python examples/own_strategy.py

What it may declare and do besides: docs/tutorials/own-strategy.md.
"""

from __future__ import annotations

import tempfile
from typing import Any

import polyrhythm
from polyrhythm.strategies.strategy import Strategy
from polyrhythm.strategies.worker_part import WorkerPart


class EveryOther(Strategy):
    """The configuration; its fields would be the keys of its spec."""

    def worker(self, setting: Any) -> WorkerPart:
        return EveryOtherWorker(setting)


class EveryOtherWorker(WorkerPart):
    """What a worker does with its gradients."""

    def __init__(self, setting: Any) -> None:
        super().__init__()
        self._workers, self._flat = setting.workers, setting.flat
        self._optimizer = setting.plan.build(setting.flat.vector)

    def start(self, step: int) -> int:
        self._workers.broadcast(self._flat.vector)
        return step

    def gradients_ready(self, step: Any, learning_rate: float) -> bool:
        if step.number % 2 == 0:
            self._workers.all_reduce(self._flat.gradients)
            self._flat.gradients /= self._workers.size
        self._optimizer.step(self._flat.gradients, learning_rate)
        return False

    def state(self) -> Any:
        return self._optimizer.state()

    def load_state(self, state: Any) -> None:
        self._optimizer.load_state(*state)


def main() -> None:
    """Simulate it beside the strategy that averages at every step."""
    for name, strategy in (("every other step", EveryOther()), ("every step", "synchronous")):
        with tempfile.TemporaryDirectory() as scratch:
            run = polyrhythm.simulate(
                cluster="office",
                strategy=strategy,
                data="digits",
                model="mlp",
                batch_size=16,
                epochs=3,
                workers=3,
                out=scratch,
            )
        done = run.figures
        print(f"{name:17} {done['seconds']:5.2f} virtual seconds  top-1 {100 * done['test_top1']:.1f} %")


if __name__ == "__main__":
    main()
