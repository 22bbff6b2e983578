"""A strategy of your own in forty lines: workers step alone, and average their models after every other step.

    python examples/own_strategy.py

What it may declare and do besides: docs/tutorials/own-strategy.md.
"""

from __future__ import annotations

import tempfile
from typing import Any, ClassVar

from torch import Tensor

import polyrhythm
from polyrhythm.communication.collectives.library import Library
from polyrhythm.communication.exchanger import Exchanger
from polyrhythm.strategies.averaging.rounds.model_mean import ModelMean
from polyrhythm.strategies.state import MEAN, Part, StateField
from polyrhythm.strategies.strategy import Strategy, Traits
from polyrhythm.strategies.worker_part import Logged, WorkerPart


class EveryOtherWorker(Logged):
    """One worker."""

    fields = (
        StateField("vector", Tensor, MEAN, at="_flat.vector"),
        StateField("optimizer", Part, MEAN),
    )

    def __init__(self, setting: Any, strategy: Strategy) -> None:
        super().__init__()
        self._flat = setting.flat
        self._optimizer = setting.plan.build(setting.flat.vector)
        self.exchanger = Exchanger(setting.workers, ModelMean(setting.workers, setting.flat, Library()))
        self.exchanger.keeps = True  # contributions, to repeat a broken exchange with the survivors

    def since(self, step: int) -> int:
        return step - step % 2

    def gradients_ready(self, step: Any, learning_rate: float) -> bool:
        self._optimizer.step(self._flat.gradients, learning_rate)
        if step.number % 2 == 0:
            return False
        mean = self.exchanger.exchange(lambda models, number: models.take(step.stop))
        self._flat.vector.copy_(mean.vector)
        self.exchanger.since = step.number + 1
        return bool(mean.stop)


class EveryOther(Strategy):
    """The configuration; its fields would be the keys of its spec."""

    part: ClassVar[type[WorkerPart]] = EveryOtherWorker

    def traits(self, workers: int) -> Traits:
        return Traits(local_models=workers > 1, exchange_every=2)


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
