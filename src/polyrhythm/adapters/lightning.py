"""PyTorch Lightning: every strategy of Polyrhythm as a `Strategy` of its `Trainer`.

    from polyrhythm.adapters.lightning import PolyrhythmStrategy

    trainer = Trainer(strategy=PolyrhythmStrategy("local_sgd(steps=16)"), max_epochs=10)
    trainer.fit(model, loader)

Started by `polyrhythm run --workers 2 script.py` or by torchrun; a rank that is a server serves inside `fit`, and
leaves at its end. `fit` shares loaders out by itself, those of validation too, and its checkpoints hold the whole run.
After `fit` all workers hold the final model; `validate` and `test` then run on each alone, over all images.

Lightning is an optional dependency: `pip install polyrhythm[lightning]`.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polyrhythm.api.join import Group, join, process_rank, refuse_stages
from polyrhythm.errors import RequestError
from polyrhythm.models.create import define_missing_operators

_operators = define_missing_operators()  # Lightning imports torchvision

try:
    from lightning.pytorch.strategies import ParallelStrategy
    from lightning.pytorch.trainer.states import TrainerFn
except ImportError as error:
    raise RequestError("PyTorch Lightning is not installed: pip install polyrhythm[lightning]") from error

if TYPE_CHECKING:
    from polyrhythm.reporting.event_log import Observer
    from polyrhythm.strategies.strategy import Strategy


class PolyrhythmStrategy(ParallelStrategy):
    """Trains with a strategy of Polyrhythm.

    Args:
        strategy: a spec, or a strategy.
        threads: see `polyrhythm.join`.
        report: see `polyrhythm.join`.
        observers: see `polyrhythm.join`.
        **options: options of Lightning's own strategies: `accelerator`, `precision_plugin`, `checkpoint_io`.

    Attributes:
        group: the worker's, during `fit`.
    """

    strategy_name = "polyrhythm"

    def __init__(
        self,
        strategy: str | Strategy = "synchronous",
        *,
        threads: int | None = None,
        report: str | Path | None = None,
        observers: Sequence[Observer] = (),
        **options: Any,
    ) -> None:
        refuse_stages(strategy, "Lightning's trainer")
        super().__init__(**options)
        self.group: Group | None = None
        self._spec = strategy
        self._joining: dict[str, Any] = {"threads": threads, "report": report, "observers": observers}
        self._rank = process_rank()

    @property
    def root_device(self) -> torch.device:
        """Device of the module in training."""
        devices = self.parallel_devices
        return devices[self.local_rank % len(devices)] if devices else torch.device("cpu")

    @property
    def global_rank(self) -> int:
        """This worker's index, or the process's before `fit`."""
        return self._rank if self.group is None else self.group.rank

    @property
    def local_rank(self) -> int:
        """The same: a worker's device is that of its index."""
        return self.global_rank

    @property
    def node_rank(self) -> int:
        """Always 0: hosts are not counted apart."""
        return 0

    @property
    def world_size(self) -> int:
        """Workers that share the data; 1 outside of `fit`."""
        return 1 if self.group is None else self.group.workers

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0 if self.group is None else self.group.leads

    @property
    def is_distributed(self) -> bool:
        """Whether `sync_dist=True` is to ask all workers."""
        return self.group is not None

    def setup_environment(self) -> None:
        """Join the run; on a server this serves, and ends the process."""
        if self._fits and self.group is None:
            self.group = join(self._spec, **self._joining)
        super().setup_environment()

    def model_to_device(self) -> None:
        """Move the module to its device."""
        assert self.model is not None, "Lightning connects a model first"
        self.model.to(self.root_device)

    def setup(self, trainer: Any) -> None:
        """Distribute the model and its optimizer.

        Raises:
            RequestError: the module has no optimizer, or several.
        """
        super().setup(trainer)
        if self.group is None or not self._fits:
            return
        if len(self.optimizers) != 1:
            raise RequestError(
                f"configure_optimizers returns {len(self.optimizers)} optimizers: give one, with param groups for what "
                "differs"
            )
        assert self.lightning_module is not None, "Lightning connects a module first"
        trainer._accelerator_connector.use_distributed_sampler = (
            False  # `process_dataloader` shares loaders out
        )
        _, optimizer = self.group.distribute(self.lightning_module, self.optimizers[0])
        self.optimizers = [optimizer]

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return this worker's share of a loader."""
        return dataloader if self.group is None else self.group.shard(dataloader)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Add gradients up without an exchange, as for `accumulate_grad_batches`."""
        if self.group is None:
            yield
            return
        with self.group.accumulate():
            yield

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the mean, or the sum, of the workers' numbers."""
        if self.group is None or not isinstance(tensor, Tensor | float | int):
            return tensor
        given = torch.as_tensor(tensor)
        gathered = self._gathered(given)
        total = gathered.sum(0)
        if not str(reduce_op).lower().endswith(("mean", "avg")):
            return total.to(given)
        mean = total / len(gathered)
        # Lightning divides the mean of sums by that of counts, so that the latter must keep its fraction.
        return mean.to(given) if given.is_floating_point() else mean.to(given.device)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all workers, or any of them, have decided so."""
        decisions = [decision] if self.group is None else self.group.gather(bool(decision))
        return min(decisions) if all else max(decisions)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all workers."""
        if self.group is not None:
            self.group.gather(None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the first worker's object: numbers, texts, paths, and lists and dicts of them."""
        if self.group is None:
            return obj
        gathered = self.group.gather(_plain(obj) if self.group.rank == src or self.group.leads else None)
        return Path(gathered[0]) if isinstance(obj, Path) else gathered[0]

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return all workers' tensors, `(workers, …)`."""
        if self.group is None:
            return tensor
        return self._gathered(tensor).to(tensor)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state of the whole run, for a checkpoint."""
        return super().optimizer_state(optimizer) if self.group is None else self.group.state_dict()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Continue the run that wrote a checkpoint."""
        if self.group is None:
            super().load_optimizer_state_dict(checkpoint)
        else:
            self.group.load_state_dict(checkpoint["optimizer_states"][0])

    def on_train_end(self) -> None:
        """Leave with all others; the module then has the final model."""
        super().on_train_end()
        self._leave(None)

    def on_exception(self, exception: BaseException) -> None:
        """Leave without notice."""
        super().on_exception(exception)
        self._leave(exception)

    def teardown(self) -> None:
        """Leave, if the run has ended before its training."""
        group, self.group = self.group, None
        if group is not None:
            group.__exit__(RuntimeError, RuntimeError("fit has ended early"), None)
        self.cluster_environment = self.cluster_environment or _nothing_to_tear_down()
        super().teardown()

    def _gathered(self, own: Tensor) -> Tensor:
        """Return all workers' tensors, `(workers, …)`, as float64."""
        assert self.group is not None, "there is a group only inside fit"
        gathered = self.group.gather(own.detach().double().tolist())
        return torch.stack([torch.tensor(each, dtype=torch.float64) for each in gathered])

    @property
    def _fits(self) -> bool:
        module = self.lightning_module
        return module is not None and module.trainer.state.fn == TrainerFn.FITTING

    def _leave(self, error: BaseException | None) -> None:
        group, self.group = self.group, None
        if group is not None:
            self._rank = group.rank
            group.__exit__(None if error is None else type(error), error, None)


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _nothing_to_tear_down() -> Any:
    from lightning.fabric.plugins.environments.lightning import LightningEnvironment

    return LightningEnvironment()
