"""A Lightning module as its guides have it, plain or with a strategy of Polyrhythm.

    lightning_task.py STRATEGY FOLDER WORKERS [killed]

Each worker saves what it came to. Alone (`plain`), batches are as large as all workers' together.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from polyrhythm.models.create import define_missing_operators

_operators = define_missing_operators()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint
    from torchmetrics.classification import MulticlassAccuracy

BATCH_SIZE, EPOCHS = 8, 3
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def points(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    directions = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    inputs = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, (inputs @ directions).argmax(1))


class Classifier(LightningModule):
    """Classifies points; worker 1 may be killed in the middle of epoch 1."""

    def __init__(self, killed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.network = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        self.accuracy: list[float] = []
        self.tested: list[int] = []
        self.metric = MulticlassAccuracy(num_classes=3, average="micro")
        self.killed = killed

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        if self.killed and self.global_rank == 1 and (self.current_epoch, index) == (1, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        x, y = batch
        return nn.functional.cross_entropy(self.network(x), y)

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        x, y = batch
        right = (self.network(x).argmax(1) == y).double().mean()
        self.log("accuracy", right, sync_dist=True, batch_size=len(x))
        self.metric(self.network(x), y)
        self.log("metric", self.metric)
        self.log("tested", float(len(x)), sync_dist=True, reduce_fx="sum")

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.accuracy.append(float(self.trainer.callback_metrics["accuracy"]))
            assert abs(float(self.trainer.callback_metrics["metric"]) - self.accuracy[-1]) < 1e-6
            self.tested.append(int(self.trainer.callback_metrics["tested"]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.8)]


class Finetuned(Classifier):
    """Has a backbone, which a callback freezes at first."""

    @property
    def backbone(self) -> nn.Module:
        return self.network[0]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(
            [each for each in self.parameters() if each.requires_grad], lr=0.2, momentum=0.9
        )


class TwoOptimizers(Classifier):
    """Would step them by hand."""

    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]


def fitted(
    folder: Path,
    size: int,
    *,
    module: Classifier,
    resumes: str = "",
    validation: int = 4 * BATCH_SIZE,
    more: Sequence[Callable[[], Callback]] = (),
    **options: Any,
) -> Classifier:
    """Fit a module on shuffled batches of a size, the last one ragged, and validate it after each epoch.

    Args:
        folder: takes checkpoints.
        size: of a batch.
        module: what is fitted.
        resumes: the checkpoint to go on from.
        validation: images to validate on.
        more: make further callbacks.
        **options: of the trainer.
    """
    trainer = Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        callbacks=[
            ModelCheckpoint(folder / "saved", filename="{epoch}", save_top_k=-1),
            *(make() for make in more),
        ],
        gradient_clip_val=0.3 if module.automatic_optimization else None,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        default_root_dir=folder,
        **options,
    )
    generator = torch.Generator().manual_seed(3)
    training = DataLoader(points(7 * BATCH_SIZE + 4), size, shuffle=True, generator=generator)
    found = str(folder / "saved" / resumes) if resumes else None
    trainer.fit(module, training, DataLoader(points(validation), size), ckpt_path=found, weights_only=True)
    return module


def main(strategy: str, folder: Path, workers: str, how: str = "") -> None:
    from polyrhythm.adapters.lightning import PolyrhythmStrategy

    warnings.simplefilter("ignore")
    module = Classifier(killed=how == "killed")
    if strategy == "plain":
        fitted(folder, BATCH_SIZE * int(workers), module=module)
    else:
        fitted(folder, BATCH_SIZE, module=module, strategy=PolyrhythmStrategy(strategy))
    rank = os.environ.get("RANK", "0")
    torch.save(
        {"model": module.network.state_dict(), "accuracy": module.accuracy}, folder / f"worker-{rank}.pt"
    )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
