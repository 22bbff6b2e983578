"""ADMM: consensus by the alternating direction method of multipliers.

Boyd, Parikh, Chu, Peleato, Eckstein, "Distributed optimization and statistical learning via the alternating direction
method of multipliers", Foundations and Trends in Machine Learning 2011, section 7.1 in scaled form.

    x_i <- x_i - lr * (g_i(x_i) + rho * (x_i - z + u_i))       H times, from x_i = z
    z   <- (1/N) * sum_j (x_j + u_j)
    u_i <- u_i + x_i - z

H = `steps`, x_i = local model, u_i = scaled dual of a worker, z = consensus, the model that is evaluated and saved. At
a fixed point all x_i are z and g_i = -rho * u_i, so the workers' gradients need not agree there, only their sum is 0.
Local SGD has no such point where workers have different images.

The duals sum up to 0, unless a worker has failed or joined: a joining worker's dual is 0, as are all after a resume
with another number of workers. The next z then makes the sum 0 again. Weights are those of `local_sgd`.

Departures from the paper: instead of an exact minimum over x_i, H steps of any optimizer on one batch each, which
section 3.4.4 permits (inexact minimization). They start at z instead of the previous x_i, so that a joining worker
needs no other worker's state. `optimizer_state` selects the treatment of the optimizer state at a consensus.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from polyrhythm.communication.collective import Collective
from polyrhythm.communication.communicator import Communicator
from polyrhythm.strategies.averaging.rounds.averaging import Averaging
from polyrhythm.strategies.averaging.rounds.model_mean import AtAverage, ModelMean
from polyrhythm.strategies.averaging.rounds.rounds_worker import Correction, Rounds, RoundsWorker
from polyrhythm.strategies.state import UNCHANGED, StateField
from polyrhythm.strategies.strategy import Facts, Paper
from polyrhythm.strategies.worker_part import WorkerPart, WorkerSetting
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.quantities import Count, Positive


class ADMM(Averaging):
    """Workers take local steps toward a consensus; a dual variable of each keeps track of its disagreement.

    Attributes:
        steps: number of local steps of each worker between two consensus updates.
        rho: strength of the pull to the consensus.
        optimizer_state: treatment of the optimizer state (momentum etc.) at a consensus: keep, average or reset.
        collective: algorithm that sums the models.
    """

    paper: ClassVar[Paper] = Paper(
        "Boyd, Parikh, Chu, Peleato, Eckstein",
        "Distributed optimization and statistical learning via the alternating direction method of multipliers",
        "Foundations and Trends in Machine Learning",
        2011,
    )
    facts: ClassVar[Facts] = Facts(
        bytes_per_step="2M(N-1)/(NH)",
        staleness="0",
        use_it="as scaffold, with half the traffic and one more key to tune, rho",
    )
    why_not_compressed: ClassVar[str] = (
        "duals would add up the compression errors of all rounds: use local_sgd or diloco"
    )

    steps: Count = 8
    rho: Positive = 0.1
    optimizer_state: AtAverage = "keep"

    @property
    def period(self) -> int:
        return self.steps

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        dual = ScaledDual(setting.flat, self.rho)
        rounds = Rounds(
            steps=self.steps,
            collective=self.collective,
            optimizer_state=self.optimizer_state,
            correction=dual,
            mean=lambda group, flat: Consensus(group, flat, self.collective, dual),
        )
        return RoundsWorker(setting, rounds)


class ScaledDual(Correction):
    """Update rule of this module; see `Correction`.

    Args:
        flat: x_i, and its gradients.
        rho: strength of the pull to the consensus.

    Attributes:
        vector: u_i, `(size,)`.
    """

    fields = (StateField("dual", Tensor, at="vector", absent=UNCHANGED),)

    def __init__(self, flat: FlatParameters, rho: float) -> None:
        self._flat = flat
        self._rho = rho
        self.vector = torch.zeros_like(flat.vector)

    def apply(self, beginning: Tensor) -> None:
        self._flat.gradients.add_(self._flat.vector - beginning + self.vector, alpha=self._rho)

    def end_round(self, mean: Tensor, average: Tensor | None, *, counts: bool) -> None:
        if counts:
            self.vector.add_(self._flat.vector).sub_(mean)
        else:  # x_i began as a copy of another worker's, with that worker's disagreement
            self.vector.zero_()


class Consensus(ModelMean):
    """Mean of x_i + u_i.

    Args:
        group: communicator of the members; all must call at the same steps.
        flat: x_i of this member.
        collective: algorithm that sums the vectors.
        dual: u_i of this member.
    """

    def __init__(
        self, group: Communicator, flat: FlatParameters, collective: Collective, dual: ScaledDual
    ) -> None:
        super().__init__(group, flat, collective)
        self._dual = dual

    def over(self, group: Communicator) -> Consensus:
        return Consensus(group, self._flat, self._sum.passed_on(), self._dual)

    def _contribution(self) -> Tensor:
        whole = super()._contribution()
        whole[: self._flat.size].add_(self._dual.vector)
        return whole
