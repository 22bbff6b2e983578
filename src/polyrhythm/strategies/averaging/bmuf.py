"""Blockwise model-update filtering (BMUF): momentum over the means of models.

Chen, Huo, "Scalable training of deep learning machines by incremental block training with intra-block parallel
optimization and blockwise model-update filtering", ICASSP 2016.

    G(t) = mean_i w_i - S(t-1),   D(t) = m * D(t-1) + z * G(t),   W(t) = W(t-1) + D(t)
    S(t) = W(t)                   classical
    S(t) = W(t) + m * D(t)        nesterov

S = common starting point of a block of `steps` local steps, W = the model that is evaluated and saved, m =
`block_momentum` (default 1 - 1/N), z = `block_lr`. With `nesterov`, W is kept apart from S, as in the paper, so that
momentum counts once; in fairseq and CNTK, the look-ahead S replaces W in the next block. Batch-norm statistics are
never averaged in training.

Departure from the paper: any optimizer replaces SGD, and `optimizer_state` selects the treatment of its state at the
end of a block.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from polyrhythm.strategies.averaging.rounds.averaging import CompressedAveraging
from polyrhythm.strategies.averaging.rounds.model_mean import AtAverage
from polyrhythm.strategies.averaging.rounds.rounds_worker import Outer, Rounds, RoundsWorker
from polyrhythm.strategies.state import StateField
from polyrhythm.strategies.strategy import Facts, Paper
from polyrhythm.strategies.worker_part import WorkerPart, WorkerSetting
from polyrhythm.training.quantities import Count, Decay, Positive


class BMUF(CompressedAveraging):
    """Workers take local steps for a block; momentum is then applied to the step to the mean of their models.

    Attributes:
        steps: number of local steps of each worker in a block.
        block_momentum: momentum coefficient of the block updates; None: 1 - 1/N.
        block_lr: factor of the step to the mean.
        nesterov: whether blocks start at a look-ahead point along the momentum.
        optimizer_state: treatment of the local optimizer state (momentum etc.) after a block: keep, average or reset.
        collective: algorithm that sums the models.
        compress: compressor of each worker's change in a round; None: none.
    """

    paper: ClassVar[Paper] = Paper(
        "Chen, Huo",
        "Scalable training of deep learning machines by incremental block training with intra-block parallel "
        "optimization and blockwise model-update filtering",
        "ICASSP",
        2016,
    )
    facts: ClassVar[Facts] = Facts(
        bytes_per_step="2M(N-1)/(NH)",
        staleness="0",
        use_it="as local SGD, with many workers: momentum compensates for the averaging",
    )

    steps: Count = 16
    block_momentum: Decay | None = None
    block_lr: Positive = 1.0
    nesterov: bool = False
    optimizer_state: AtAverage = "keep"

    @property
    def period(self) -> int:
        return self.steps

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        momentum = self.block_momentum
        if momentum is None:
            momentum = 1 - 1 / setting.workers.size
        rounds = Rounds(
            steps=self.steps,
            collective=self.collective,
            optimizer_state=self.optimizer_state,
            outer=BlockMomentum(momentum, self.block_lr, nesterov=self.nesterov),
            mean=self.mean,
        )
        return RoundsWorker(setting, rounds)


class BlockMomentum(Outer):
    """Update rule of this module; see `Outer`.

    Args:
        momentum: m.
        block_lr: z.
        nesterov: whether S is ahead of W.
    """

    fields = StateField("model", Tensor), StateField("beginning", Tensor), StateField("update", Tensor)

    def __init__(self, momentum: float, block_lr: float, *, nesterov: bool) -> None:
        self._momentum = momentum
        self._block_lr = block_lr
        self._nesterov = nesterov
        self._model = self._beginning = self._update = torch.empty(0)

    def start(self, vector: Tensor) -> None:
        """Start the first block at the model, `(size,)`."""
        self._model, self._beginning = vector.clone(), vector.clone()
        self._update = torch.zeros_like(vector)

    def step(self, vector: Tensor, learning_rate: float) -> None:
        """Replace the mean of all models in `vector` by the starting point of the next block, in place."""
        model, beginning, update = self._model, self._beginning, self._update
        before = model.clone()
        # W(t-1) + z G + m D(t-1), as a `lerp`: with m = 0 and z = 1 it is the mean, bit for bit
        model.copy_(beginning.lerp(vector, self._block_lr))
        if self._nesterov:  # S(t-1) = W(t-1) + m D(t-1) is the start of the `lerp`
            update.copy_(model).sub_(before)
            vector.copy_(model).add_(update, alpha=self._momentum)
        else:
            model.add_(update, alpha=self._momentum)
            update.copy_(model).sub_(before)
            vector.copy_(model)
        beginning.copy_(vector)

    def model(self) -> Tensor | None:
        """Return W, `(size,)`; None where it is also the starting point."""
        return self._model if self._nesterov else None
