"""Testing and saving on behalf of the leader: collects a checkpoint of all ranks, and evaluates the model.

The result of a test goes with the checkpoint that is saved after it, by which the best checkpoint is known.
The model as it is tested and saved is not always the model as it is trained: `Presentation` puts averaged
weights and the mean batch-norm statistics of all workers in its place.
"""

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
from polyrhythm.events import Evaluated
from polyrhythm.models.weights import save_weights
from polyrhythm.roles.job import Job
from polyrhythm.roles.keeping.archive import Archive, Archivist, Snapshot
from polyrhythm.roles.keeping.worker_state import WorkerState, mean_buffers
from polyrhythm.roles.leading.leader import EventEmitter, Leader
from polyrhythm.roles.leading.taking_over import inherit_average, tested_before
from polyrhythm.roles.ledger import Ledger
from polyrhythm.roles.replica import Replica
from polyrhythm.roles.world import World
from polyrhythm.training.weight_averaging import WeightAverage


class CheckpointCollector:
    """Tests and saves on behalf of the leader.

    Args:
        job: what is learned.
        world: where the leader is.
        replica: the leader's.
        leader: has the workers' states, and asks servers for theirs.
        emitter: emits what was tested and saved.
        ledger: of the run so far.

    Attributes:
        job: what is learned, with what others did of it.
        found: by the newest test, if there was one.
    """

    def __init__(
        self,
        job: Job,
        world: World,
        replica: Replica,
        leader: Leader,
        emitter: EventEmitter,
        ledger: Ledger,
    ) -> None:
        self.job = job
        self._world = world
        self._replica = replica
        self._leader = leader
        self._emitter = emitter
        self._presentation = Presentation(job, replica)
        self._archive = Archive(job) if job.keeping.folder is not None else None
        self._archivist = self._employed()
        self.found = tested_before(ledger)

    @property
    def saves(self) -> bool:
        """Whether the run writes checkpoints."""
        return self._archivist is not None

    @property
    def averages(self) -> bool:
        """Whether the moving average of the weights is what is tested."""
        return self._presentation.average is not None

    @property
    def remarks(self) -> list[str]:
        """What is to be said of the checkpoint that was loaded."""
        return [] if self._archive is None else self._archive.remarks

    def load(self) -> Snapshot:
        """Read the newest checkpoint, and go on with its average."""
        assert self._archive is not None, "a resumed run has a folder"
        snapshot = self._archive.load()
        if self._presentation.average is not None and snapshot.average:
            self._presentation.average.load_state_dict(snapshot.average)
        return snapshot

    def inherit(self) -> None:
        """Goes on with the lost leader's average of the weights, as far as it is known."""
        if self._presentation.average is not None:
            inherit_average(self._presentation.average, self._archive, self._replica)

    def step_done(self) -> None:
        """Keeps the weight average, for which the step must be over."""
        if self._archivist is not None:
            self._archivist.look()
        if self._presentation.average is not None:
            self._replica.settle()
            self._presentation.average.update(self._replica.flat.vector)

    def evaluate(self, epoch: int, presented: Tensor | None = None) -> None:
        """Tests the model.

        Args:
            epoch: epochs that are over.
            presented: `(size,)`, the parameters to test, where they are not the replica's; averaged weights go before.
        """
        with self._world.activity.doing("testing the model", takes_long=True):
            found = self._presentation.evaluate(self._leader.workers.in_order, presented)
        self.found = found
        self._emitter.say(
            Evaluated(time_s=0, epoch=epoch, test_loss=found.loss, test_top1=found.top1, test_top5=found.top5)
        )

    def snapshot(self, epoch: int, step: int, presented: Tensor | None = None) -> Snapshot | None:
        """Copies the run's state, if it is kept; what workers and servers hand in is a copy already.

        Args:
            epoch: epochs that are over.
            step: steps that the leader has done.
            presented: `(size,)`, the parameters that were tested, where they are not the replica's.
        """
        if self._archivist is None:
            return None
        self._archivist.wait()  # before there is one more copy
        average = {} if self._presentation.average is None else self._presentation.average.state_dict()
        self._replica.part.check_servers()
        return Snapshot(
            epoch=epoch,
            step=step,
            seconds=self._emitter.total_s,
            parameters=self._replica.flat.vector.detach().to("cpu", copy=True),
            workers=dict(self._leader.workers.states),
            servers=self._leader.servers.ask(),
            average={name: value.detach().to("cpu", copy=True) for name, value in average.items()},
            presented=None if average or presented is None else presented.detach().to("cpu", copy=True),
            begun=self.job.begun,
        )

    def save(self, snapshot: Snapshot | None, *, tested: bool = False) -> None:
        """Has the run's state written.

        Args:
            snapshot: nothing of it may change any more; None: it is not kept.
            tested: whether the newest test was of this model.
        """
        if self._archivist is not None and snapshot is not None:
            self._archivist.begin(snapshot, self.found.top1 if tested and self.found is not None else None)

    def finish(self) -> None:
        """Tests and saves the final model."""
        self.evaluate(self.job.learning.epochs)
        if self.job.keeping.folder is not None:
            path = self.job.keeping.folder / "model.safetensors"
            self._presentation.save(path, self._leader.workers.in_order, self.job.keeping.claim)
        if self._archivist is not None and self.found is not None:
            self._archivist.tested(self.found.top1)

    def wait(self) -> None:
        """Waits until no checkpoint is under way."""
        if self._archivist is not None:
            self._archivist.wait()

    def _employed(self) -> Archivist | None:
        if self._archive is None or not self.job.keeping.checkpoints:
            return None
        return Archivist(
            self._archive, self._world.activity, self._emitter.say, beside=self._world.pace is None
        )


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
