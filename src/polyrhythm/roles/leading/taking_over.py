"""What a successor of the leader makes of what it finds.

ledger    what has been said: nothing of it again         workers   batch-norm statistics, accounts, states
archive   the moving average of the weights               servers   the parameters, and how many of its steps count
                                                          states    the models of an epoch's end, where each has its own
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polyrhythm.errors import RequestError
from polyrhythm.evaluation.evaluate import Evaluation
from polyrhythm.roles.job import Job
from polyrhythm.roles.keeping.archive import Archive
from polyrhythm.roles.keeping.worker_state import WorkerState
from polyrhythm.roles.ledger import Ledger
from polyrhythm.roles.replica import Replica
from polyrhythm.roles.world import LEADER
from polyrhythm.strategies.worker_part import WorkerCalls
from polyrhythm.training.weight_averaging import WeightAverage


@dataclass(frozen=True)
class Unfinished:
    """What the lost leader owed to the last epoch that it had come through.

    Attributes:
        epochs: that are over.
        test: whether the model has not been tested.
        save: whether no checkpoint has been written.
        is_last: whether no epoch comes after.
        at_its_end: whether no step has been done since.
    """

    epochs: int
    test: bool
    save: bool
    is_last: bool
    at_its_end: bool

    @property
    def text(self) -> str:
        """For people."""
        return (
            f"worker 0 was lost before the model was tested after epoch {self.epochs}: its successor tests the "
            "parameters as they are now"
        )


@dataclass(frozen=True)
class Stock:
    """What the others held at the end of an epoch, as they handed it in to the lost leader, and again to its successor.

    Attributes:
        states: theirs, and that of one of them in place of worker 0's.
        models: their own, `(size,)` each.
    """

    states: dict[int, WorkerState]
    models: list[Tensor]

    @property
    def mean(self) -> Tensor:
        """The mean of their models, `(size,)`."""
        return torch.stack(self.models).mean(0)


def stock_of(states: dict[int, WorkerState], part: WorkerCalls, step: int) -> Stock | None:
    """Gives what is known of a step; None where nobody has handed in a model of its own after it.

    Args:
        states: the workers'.
        part: of the leader, which knows what is in them.
        step: at the end of an epoch.
    """
    found = {
        worker: state for worker, state in sorted(states.items()) if worker and state.account.step == step
    }
    models = [part.model_in((state.part, state.part_facts)) for state in found.values() if state.part]
    held = [model for model in models if model is not None]
    if not held:
        return None
    first = next(iter(found.values()))
    return Stock({LEADER: replace(first, account=replace(first.account, worker=LEADER))} | found, held)


def unfinished(ledger: Ledger, job: Job, step: int, *, saves: bool) -> Unfinished:
    """Tells what is left to be done of the epochs before.

    Args:
        ledger: of the run so far.
        job: what is learned.
        step: steps that the leader has done, as far as they count.
        saves: whether the run writes checkpoints.
    """
    epochs = job.calendar.epoch_of(step)
    last = epochs == job.learning.epochs  # the final model is tested when all have left
    return Unfinished(
        epochs,
        test=epochs > ledger.tested_epochs and not last,
        save=saves and epochs > ledger.saved_epochs,
        is_last=last,
        at_its_end=step == job.calendar.start(epochs),
    )


def tested_before(ledger: Ledger) -> Evaluation | None:
    """Gives what the newest test came to, but for its classes, of which nobody was told."""
    found = ledger.tested
    if found is None:
        return None
    return Evaluation(
        loss=found.test_loss,
        top1=found.test_top1,
        top5=found.test_top5,
        images=0,
        per_class=(),
        confusion=torch.empty(0, 0),
    )


def inherit_average(average: WeightAverage, archive: Archive | None, replica: Replica) -> None:
    """Goes on with the average of the newest checkpoint, or begins one at the parameters of now."""
    average.value.copy_(replica.flat.vector)
    if archive is None:
        return
    try:
        saved = archive.load().average
    except RequestError:  # nothing was saved yet
        return
    if saved:
        average.load_state_dict(saved)
