"""The job with Lightning, which starts its second process itself."""

import contextlib
import logging
import sys
import warnings

import job
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

# Lightning imports torchvision, which lacks its operators next to another build of torch.
for name in ("nms", "qnms"):
    with contextlib.suppress(RuntimeError):
        torch.library.define(
            f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )

from lightning.pytorch import LightningModule, Trainer  # noqa: E402

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Task(LightningModule):
    """The network and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.network = job.network()

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss of a batch."""
        return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return job.optimizer_of(self)


task = Task()
quiet = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=int(sys.argv[2]), **quiet)
trainer.fit(task, DataLoader(job.read("train", int(sys.argv[1])), job.BATCH_SIZE, shuffle=True))
if trainer.is_global_zero:
    print(job.accuracy(task.network))
