"""The model as it is tested and saved, which is not always the model as it is trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from polyrhythm.claim import UNCLAIMED, Unclaimed
from polyrhythm.data.dataset import Split
from polyrhythm.evaluation.evaluate import Evaluation, evaluate
from polyrhythm.models.weights import save_weights
from polyrhythm.roles.job import Job
from polyrhythm.roles.keeping.worker_state import WorkerState, mean_buffers
from polyrhythm.roles.replica import Replica
from polyrhythm.training.averaging.weight_average import WeightAverage


@dataclass(frozen=True)
class _InDtype:
    """A split whose pictures have the model's dtype, as they have in training."""

    split: Split
    dtype: torch.dtype

    def __len__(self) -> int:
        return len(self.split)

    @property
    def labels(self) -> Tensor:
        return self.split.labels

    def images(self, indices: Tensor) -> Tensor:
        return self.split.images(indices).to(self.dtype)


class Presentation:
    """Shows a replica with averaged weights, if it keeps them, and with everybody's batch-norm statistics.

    Args:
        job: what is learned.
        replica: the leader's.

    Attributes:
        average: the moving average of the weights, if the job wants one.
    """

    def __init__(self, job: Job, replica: Replica) -> None:
        self._job = job
        self._replica = replica
        decay = job.learning.weight_average
        self.average = WeightAverage(replica.flat.vector, decay) if decay else None

    def evaluate(self, states: list[WorkerState], presented: Tensor | None = None) -> Evaluation:
        """Tests the model.

        Args:
            states: the workers', worker 0's first.
            presented: `(size,)`, the parameters to test, where they are not the replica's; averaged weights go before.
        """
        dataset = self._job.dataset
        with self._shown(states, presented):
            test = _InDtype(dataset.test, self._replica.flat.vector.dtype)
            return evaluate(self._replica.model, test, classes=dataset.classes, device=self._job.device)

    def save(self, path: Path, states: list[WorkerState], claim: Unclaimed = UNCLAIMED) -> None:
        """Writes the model's weights, and what is needed to use them."""
        dataset = self._job.dataset
        facts = {
            "model": self._job.model_name,
            "data": dataset.name,
            "classes": "\n".join(dataset.classes),
            "image_shape": ",".join(map(str, dataset.image_shape)),
            "shown": str(dataset.shown),
            "black": ",".join(map(str, dataset.black)),
            "white": ",".join(map(str, dataset.white)),
        }
        with self._shown(states):
            save_weights(self._replica.model, path, facts, claim)

    @contextmanager
    def _shown(self, states: list[WorkerState], presented: Tensor | None = None) -> Iterator[None]:
        vector, buffers = self._replica.flat.vector, self._replica.buffers
        trained = vector.clone()
        own = {name: value.clone() for name, value in buffers.items()}
        if self.average is not None:
            vector.copy_(self.average.value)
        elif presented is not None:
            vector.copy_(presented)
        for name, value in mean_buffers(states).items():
            buffers[name].copy_(value)
        try:
            yield
        finally:
            vector.copy_(trained)
            for name, value in own.items():
                buffers[name].copy_(value)
