"""Hugging Face Accelerate: every strategy of Polyrhythm behind its `Accelerator`.

    from polyrhythm.adapters.accelerate import PolyrhythmAccelerator

    accelerator = PolyrhythmAccelerator("local_sgd(steps=16)")        # was: Accelerator()
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    …                                                                 # the loop stays as it is
    accelerator.end_training()                                        # all have the final model

Started by `polyrhythm run --workers 2 script.py` or by torchrun; a rank that is a server serves where the accelerator
is made, and exits there. Accelerate's rules for processes apply: a loader's batch size is that of one worker, and a
scheduler steps once for each worker at every step, unless `split_batches` or `step_scheduler_with_optimizer` change
it.

Accelerate is an optional dependency: `pip install polyrhythm[accelerate]`.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from polyrhythm.api.join import Group, join, refuse_stages
from polyrhythm.api.loop.shard import Shard
from polyrhythm.errors import RequestError

try:
    from accelerate import Accelerator
    from accelerate.data_loader import DataLoaderStateMixin
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import recursively_apply, send_to_device
except ImportError as error:
    raise RequestError("Accelerate is not installed: pip install polyrhythm[accelerate]") from error

if TYPE_CHECKING:
    from polyrhythm.reporting.event_log import Observer
    from polyrhythm.strategies.strategy import Strategy

_OF_THE_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class PolyrhythmAccelerator(Accelerator):
    """An accelerator of a run's workers.

    Args:
        strategy: a spec, or a strategy.
        threads: see `polyrhythm.join`.
        report: see `polyrhythm.join`.
        observers: see `polyrhythm.join`.
        **options: options of Accelerate, such as `mixed_precision` and `gradient_accumulation_steps`.

    Attributes:
        group: the worker's.
    """

    def __init__(
        self,
        strategy: str | Strategy = "synchronous",
        *,
        threads: int | None = None,
        report: str | Path | None = None,
        observers: Sequence[Observer] = (),
        **options: Any,
    ) -> None:
        refuse_stages(strategy, "a loop of Accelerate")
        self.group: Group = join(strategy, threads=threads, report=report, observers=observers)
        self._left = False
        with as_one_process():  # else it would gather the ranks a second time, by a process group of its own
            super().__init__(**options)
        for state in (PartialState, AcceleratorState):
            state._shared_state |= {
                "num_processes": len(self.group.gather(None)),
                "process_index": self.group.rank,
                "local_process_index": self.group.rank,
            }
        atexit.register(self._leave_at_exit)

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """Distribute a model with its optimizer, and share loaders out; schedulers follow the optimizer."""
        models = [each for each in args if isinstance(each, nn.Module)]
        optimizers = [each for each in args if isinstance(each, torch.optim.Optimizer)]
        if len(models) != len(optimizers) or len(models) > 1:
            raise RequestError(
                f"prepare was given {len(models)} models and {len(optimizers)} optimizers: give one of each, together"
            )
        made: dict[int, Any] = {}
        for model, optimizer in zip(models, optimizers, strict=True):
            model.to(self.device)
            _, distributed = self.group.distribute(model, optimizer)
            made[id(model)] = self.prepare_model(model)
            made[id(optimizer)] = self.prepare_optimizer(distributed)
        found = []
        for each in args:
            if id(each) in made:
                found.append(made[id(each)])
            elif isinstance(each, torch.optim.lr_scheduler.LRScheduler):
                found.append(self.prepare_scheduler(each))
            else:
                found.append(self.prepare_data_loader(each) if hasattr(each, "__iter__") else each)
        return found[0] if len(found) == 1 else tuple(found)

    def prepare_data_loader(self, data_loader: Any, *_: Any, **__: Any) -> Any:
        """Share a loader out; after the end of training each worker has all of it."""
        share = data_loader if self._left else self.group.shard(data_loader)
        if isinstance(share, Shard):
            share.repeats = True  # `gather_for_metrics` is called for every batch, by all
        shared = SharedLoader(share, data_loader, self.device)
        self._dataloaders.append(shared)
        return shared

    def no_sync(self, model: Any) -> AbstractContextManager[None]:
        """Add gradients up without an exchange; `accumulate` uses it."""
        return self.group.accumulate()

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip the norm of the workers' mean gradient, where there is one."""
        if self.sync_gradients:
            self.group.mean_gradients()
        return super().clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip the numbers of the workers' mean gradient, where there is one."""
        if self.sync_gradients:
            self.group.mean_gradients()
        super().clip_grad_value_(parameters, clip_value)

    def gather(self, tensor: Any) -> Any:
        """Return all workers' tensors, one behind the other along the first dimension."""
        return recursively_apply(self._gathered, tensor, error_on_other_type=True)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return the same, without what a worker saw again because it had nothing left."""
        if use_gather_object:
            return [part for parts in self._gathered_values(input_data) for part in parts]
        active = self.gradient_state.active_dataloader
        repeated = isinstance(active, SharedLoader) and active.repeats
        return recursively_apply(
            lambda each: self._gathered(each, repeated=repeated), input_data, error_on_other_type=True
        )

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the sum or the mean of all workers' tensors, times a scale."""

        def reduced(each: Tensor) -> Tensor:
            gathered = self._gathered_values(each.detach().double().tolist())
            total = torch.stack([torch.tensor(part, dtype=torch.float64) for part in gathered]).sum(0)
            return (total / (len(gathered) if reduction == "mean" else 1) * scale).to(each)

        return recursively_apply(reduced, tensor, error_on_other_type=True)

    def wait_for_everyone(self) -> None:
        """Wait for all workers."""
        self._gathered_values(None)

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Let the worker that leads go first."""
        if not self.group.leads:
            self.wait_for_everyone()
        yield
        if self.group.leads:
            self.wait_for_everyone()

    local_main_process_first = main_process_first

    def save_state(self, output_dir: str | os.PathLike[str] | None = None, *_: Any, **__: Any) -> str:
        """Write the state of the whole run, with schedulers and what is registered; see `Group.save`."""
        folder = Path(output_dir or self.project_dir or "saved")
        self.group.save(folder, *self._schedulers, *self._custom_objects)
        return str(folder)

    def load_state(self, input_dir: str | os.PathLike[str] | None = None, *_: Any, **__: Any) -> None:
        """Resume from a state of `save_state`; call it right after `prepare`."""
        folder = Path(input_dir or self.project_dir or "saved")
        self.group.load(folder, *self._schedulers, *self._custom_objects)

    def end_training(self) -> None:
        """Leave with all others: the model is then the final one."""
        self.leave()
        super().end_training()

    def _gathered(self, tensor: Tensor, repeated: bool = False) -> Tensor:
        own = tensor.detach().reshape(1) if tensor.ndim == 0 else tensor.detach()
        values = self._gathered_values((own[:0] if repeated else own).double().tolist())
        parts = [torch.tensor(part, dtype=torch.float64).reshape(-1, *own.shape[1:]) for part in values]
        return torch.cat(parts).to(tensor)

    @property
    def has_left(self) -> bool:
        """Whether training is over for this worker."""
        return self._left

    def leave(self, error: BaseException | None = None) -> None:
        """Leave with all others: the model is then the final one, and each worker continues alone.

        Args:
            error: exception that ended the loop; then there is no wait for the others.
        """
        if not self._left:
            self._left = True
            self.group.__exit__(None if error is None else type(error), error, None)

    def _gathered_values(self, own: Any) -> list[Any]:
        """Return the values of all workers, in their order; after the end of training, only this worker's."""
        return [own] if self._left else self.group.gather(own)

    def _leave_at_exit(self) -> None:
        self.leave(getattr(sys, "last_value", None))


class SharedLoader(DataLoaderStateMixin):
    """A worker's share of a loader, on its device; notifies Accelerate of its last batch.

    Args:
        shard: the share, or the loader itself.
        loader: the user's.
        device: device of the model.
    """

    def __init__(self, shard: Shard | DataLoader[Any], loader: Any, device: torch.device) -> None:
        self.gradient_state = GradientState()
        self.dataset = getattr(loader, "dataset", None)
        self.batch_size = getattr(loader, "batch_size", None)
        self._shard = shard
        self._device = device

    def __len__(self) -> int:
        return len(self._shard)

    @property
    def repeats(self) -> bool:
        """Whether the latest batch is one that another worker has seen as well."""
        return isinstance(self._shard, Shard) and self._shard.weight == 0

    def __iter__(self) -> Iterator[Any]:
        self.end_of_dataloader, self.remainder = False, -1
        self.gradient_state._add_dataloader(self)
        batches = iter(self._shard)
        steps = self._shard.steps if isinstance(self._shard, Shard) else len(self._shard)
        try:
            for number, batch in enumerate(batches, 1):
                self.end_of_dataloader = number == steps
                yield send_to_device(batch, self._device)
        finally:
            if self.end_of_dataloader:  # a loop that counts its batches does not ask whether there is another
                next(batches, None)
            self.gradient_state._remove_dataloader(self)


@contextmanager
def as_one_process() -> Iterator[None]:
    """Hide from a library that this process is one of several, so that it gathers none by itself."""
    hidden = {name: os.environ.pop(name) for name in _OF_THE_LAUNCHER if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)
