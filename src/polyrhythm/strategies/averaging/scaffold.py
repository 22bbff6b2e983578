"""SCAFFOLD: local steps with control variates, which remove the variance between the workers' gradients.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: stochastic controlled averaging for federated learning",
ICML 2020, arXiv 1910.06378.

    y_i <- y_i - lr * (g_i(y_i) - c_i + c)       H times, from y_i = x
    c_i <- the mean of the H gradients g_i
    x   <- (1/N) * sum_j y_j,   c <- (1/N) * sum_j c_j

H = `steps`. c_i estimates the gradient of worker i over its own images, c that over all images; both are 0 in the first
round, which is local SGD. The rule is SVRG's (Johnson, Zhang, NIPS 2013; distributed: De, Goldstein, ICDM 2016, arXiv
1512.01708) with two changes. The difference is between workers instead of images, and the full gradient at a snapshot
is the mean of the previous round's gradients. SVRG itself is `--svrg` (`training.svrg`). With plain SGD and a constant
rate, c_i is option II of the paper, c_i - c + (x - y_i) / (H * lr).

Models and variates are averaged in one exchange with the weights of `local_sgd`. A worker that joins has no variates
until the next mean, and so have all after a resume with another number of workers.

Departures from the paper: all workers take part in every round; the global step is 1, as in the paper's runs; any
optimizer replaces plain SGD, and `optimizer_state` selects the treatment of its state.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from polyrhythm.strategies.averaging.rounds.averaging import Averaging
from polyrhythm.strategies.averaging.rounds.model_mean import AtAverage
from polyrhythm.strategies.averaging.rounds.rounds_worker import Correction, Rounds, RoundsWorker
from polyrhythm.strategies.state import UNCHANGED, StateField
from polyrhythm.strategies.strategy import Facts, Paper
from polyrhythm.strategies.worker_part import WorkerPart, WorkerSetting
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.quantities import Count


class Scaffold(Averaging):
    """Workers take local steps, corrected by the difference of their gradients from all workers', and average models.

    Attributes:
        steps: number of local steps of each worker between two means.
        optimizer_state: treatment of the optimizer state (momentum etc.) at a mean: keep, average or reset.
        collective: algorithm that sums the models.
    """

    paper: ClassVar[Paper] = Paper(
        "Karimireddy, Kale, Mohri, Reddi, Stich, Suresh",
        "SCAFFOLD: stochastic controlled averaging for federated learning",
        "ICML",
        2020,
        "1910.06378",
    )
    facts: ClassVar[Facts] = Facts(
        bytes_per_step="4M(N-1)/(NH)",
        staleness="0",
        use_it="as local SGD with long rounds, where workers have different images",
    )
    why_not_compressed: ClassVar[str] = (
        "compression errors of models would enter the control variates, which never correct them: use local_sgd"
    )

    steps: Count = 8
    optimizer_state: AtAverage = "keep"

    @property
    def period(self) -> int:
        return self.steps

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        rounds = Rounds(
            steps=self.steps,
            collective=self.collective,
            optimizer_state=self.optimizer_state,
            correction=ControlVariates(setting.flat),
        )
        return RoundsWorker(setting, rounds)


class ControlVariates(Correction):
    """Update rule of this module; see `Correction`. Its memory is that of three models.

    Args:
        flat: flat vector with the gradients.
    """

    averages = True
    fields = (
        StateField("own", Tensor, absent=UNCHANGED),
        StateField("common", Tensor, absent=UNCHANGED),
        StateField("sum", Tensor, absent=UNCHANGED),
        StateField("steps", int, absent=0),
    )

    def __init__(self, flat: FlatParameters) -> None:
        self._flat = flat
        self._own, self._common, self._sum = (torch.zeros_like(flat.vector) for _ in range(3))
        self._steps = 0

    def apply(self, beginning: Tensor) -> None:
        self._sum.add_(self._flat.gradients)
        self._steps += 1
        self._flat.gradients.add_(self._common - self._own)

    def to_average(self) -> Tensor:
        """Return c_i after the round; that of the round before if this worker has taken no step."""
        return self._sum / self._steps if self._steps else self._own.clone()

    def end_round(self, mean: Tensor, average: Tensor | None, *, counts: bool) -> None:
        assert average is not None, "it averages its vectors"
        self._own, self._common = self.to_average(), average.clone()
        self._sum.zero_()
        self._steps = 0
