"""A Lightning module on Fashion-MNIST, as its guides have it, alone or with a strategy of Polyrhythm.

python benchmarks/adapters/lightning_loop.py --out DIR
polyrhythm run --workers 2 benchmarks/adapters/lightning_loop.py --out DIR --strategy synchronous
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from fashion import EPOCHS, Network, arguments, keep, pictures
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from polyrhythm.models.create import define_missing_operators

_operators = define_missing_operators()
warnings.simplefilter("ignore")
from lightning.pytorch import LightningModule, Trainer  # noqa: E402

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Classifier(LightningModule):
    """Adam, a schedule by epochs, and accuracy on the test set."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.network(x), y)

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        x, y = batch
        right = (self.network(x).argmax(1) == y).double().mean()
        self.log("top1", right, sync_dist=True, batch_size=len(x))

    def configure_optimizers(self) -> Any:
        optimizer = optim.Adam(self.parameters(), lr=1e-3)
        return [optimizer], [optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)]


def main() -> None:
    options = arguments(__doc__)
    training, testing = pictures()
    given: dict[str, Any] = {}
    if options.strategy:
        from polyrhythm.adapters.lightning import PolyrhythmStrategy

        given["strategy"] = PolyrhythmStrategy(options.strategy)
    trainer = Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **given,
    )
    network = Network(options.killed)
    loader = DataLoader(
        training, options.batch_size, shuffle=True, generator=torch.Generator().manual_seed(1)
    )
    trainer.fit(Classifier(network), loader, DataLoader(testing, 100))
    network.eval()
    x, y = testing.tensors
    keep(options.out, network, float((network(x).argmax(1) == y).double().mean()))


if __name__ == "__main__":
    main()
