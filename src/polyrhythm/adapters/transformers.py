"""Hugging Face Transformers: every strategy of Polyrhythm behind its `Trainer`.

    from polyrhythm.adapters.transformers import PolyrhythmArguments, PolyrhythmTrainer

    arguments = PolyrhythmArguments("out", strategy="local_sgd(steps=16)", …)    # was: TrainingArguments("out", …)
    trainer = PolyrhythmTrainer(model, arguments, …)                             # was: Trainer(model, arguments, …)
    trainer.train()

Started by `polyrhythm run --workers 2 script.py` or by torchrun; a rank that is a server serves where the trainer is
made, and leaves there. `per_device_train_batch_size` is that of one worker, as everywhere there. Checkpoints hold the
whole run in a folder `run` next to the model, and `resume_from_checkpoint` continues from it. After `train` all workers
hold the final model, and `evaluate` and `predict` run on each by itself. Losses that are logged are worker 0's own;
metrics are of all workers.

Transformers is an optional dependency: `pip install polyrhythm[transformers]`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyrhythm.adapters.accelerate import PolyrhythmAccelerator, as_one_process
from polyrhythm.errors import RequestError
from polyrhythm.models.create import define_missing_operators

_operators = define_missing_operators()  # its models import torchvision

try:
    from transformers import Trainer, TrainingArguments, trainer
except ImportError as error:
    raise RequestError("Transformers is not installed: pip install polyrhythm[transformers]") from error

if TYPE_CHECKING:
    import torch

_RUN = "run"
"""The folder of a checkpoint that holds the state of the run."""


@dataclass
class PolyrhythmArguments(TrainingArguments):
    """Transformers' own arguments, and how workers share the work.

    Attributes:
        strategy: a spec.
        run_report: a folder for the report of `polyrhythm.join`; None: there is none.
        average_tokens_across_devices: see `TrainingArguments`; off by default, since gradients are weighted by
            their numbers of images, which is exact for batches of unequal size.
    """

    strategy: str = field(default="synchronous", metadata={"help": "A strategy of Polyrhythm."})
    run_report: str | None = field(default=None, metadata={"help": "Folder for the run's report."})
    average_tokens_across_devices: bool = field(default=False, metadata={"help": "See TrainingArguments."})

    @cached_property
    def _setup_devices(self) -> torch.device:
        with as_one_process():  # else it would gather the ranks a second time, by a process group of its own
            found: torch.device = super()._setup_devices
        return found


class PolyrhythmTrainer(Trainer):
    """A trainer of a run's workers; its arguments are `PolyrhythmArguments`.

    Attributes:
        accelerator: the trainer's accelerator, with the worker's `group`.
    """

    accelerator: PolyrhythmAccelerator

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.args.ignore_data_skip = True  # the state of the run has each worker's position in the data
        self._eval_loaders: dict[Any, Any] = {}

    def create_accelerator_and_postprocess(self) -> None:
        """Join the run; on a server this serves, and ends the process.

        Raises:
            RequestError: the arguments are Transformers' own.
        """
        arguments = self.args
        if not isinstance(arguments, PolyrhythmArguments):
            raise RequestError(
                f"PolyrhythmTrainer was given {type(arguments).__name__}, which gathers processes by itself: give "
                "PolyrhythmArguments, with the same options"
            )
        made = partial(PolyrhythmAccelerator, arguments.strategy, report=arguments.run_report)
        with _accelerator_is(made):
            super().create_accelerator_and_postprocess()

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return a worker's share of the test images, made once; all of them after `train`."""
        key = eval_dataset if isinstance(eval_dataset, str | None) else id(eval_dataset)
        if self.accelerator.has_left:
            return super().get_eval_dataloader(eval_dataset)
        if key not in self._eval_loaders:
            self._eval_loaders[key] = super().get_eval_dataloader(eval_dataset)
        return self._eval_loaders[key]

    def _run_epoch(self, **given: Any) -> None:
        """Run an epoch, or the rest of one if the loaders yield the rest only."""
        if given["resume_from_checkpoint"] is not None and given["epoch"] == given["epochs_trained"]:
            done = self.state.global_step % given["num_update_steps_per_epoch"]
            given["num_update_steps_per_epoch"] -= done
            given["steps_in_epoch"] -= done * self.args.gradient_accumulation_steps
        super()._run_epoch(**given)

    def _finalize_training(self, *given: Any, **named: Any) -> Any:
        """Leave with all others before the best model is loaded, which is not to be overwritten by the final one."""
        self.accelerator.leave()
        return super()._finalize_training(*given, **named)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.accelerator.group.save(Path(output_dir) / _RUN, self.lr_scheduler)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.accelerator.group.load(Path(checkpoint) / _RUN, self.lr_scheduler)


@contextmanager
def _accelerator_is(made: Any) -> Iterator[None]:
    """Let the trainer make another accelerator than Accelerate's, for which it has no option."""
    own = trainer.Accelerator
    trainer.Accelerator = made
    try:
        yield
    finally:
        trainer.Accelerator = own
