"""Transformers' `Trainer` on Fashion-MNIST, alone or with a strategy of Polyrhythm.

python benchmarks/adapters/trainer_loop.py --out DIR
polyrhythm run --workers 2 benchmarks/adapters/trainer_loop.py --out DIR --strategy synchronous
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from fashion import EPOCHS, Network, arguments, keep, pictures
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from polyrhythm.models.create import define_missing_operators

warnings.simplefilter("ignore")
_operators = define_missing_operators()  # Transformers imports torchvision


class Named(Dataset[dict[str, Tensor]]):
    """Pictures and labels by name, in an order drawn once: its own samplers draw from other generators alone."""

    def __init__(self, data: TensorDataset, *, shuffled: bool) -> None:
        count = len(data)
        self.order = (
            torch.randperm(count, generator=torch.Generator().manual_seed(1)) if shuffled else range(count)
        )
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        x, y = self.data[int(self.order[place])]
        return {"x": x, "labels": y}


class Classifier(nn.Module):
    """Returns its loss, as Transformers' models do."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.network(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def main() -> None:
    from transformers import Trainer, TrainingArguments

    from polyrhythm.adapters.transformers import PolyrhythmArguments, PolyrhythmTrainer

    options = arguments(__doc__)
    training, testing = pictures()
    kinds: tuple[Any, Any] = (
        (PolyrhythmTrainer, PolyrhythmArguments) if options.strategy else (Trainer, TrainingArguments)
    )
    given = {"strategy": options.strategy} if options.strategy else {}
    trainer = kinds[0](
        Classifier(Network(options.killed)),
        kinds[1](
            str(options.out / "out"),
            per_device_train_batch_size=options.batch_size,
            per_device_eval_batch_size=100,
            num_train_epochs=EPOCHS,
            learning_rate=1e-3,
            optim="adamw_torch",
            train_sampling_strategy="sequential",
            eval_strategy="epoch",
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            **given,
        ),
        train_dataset=Named(training, shuffled=True),
        eval_dataset=Named(testing, shuffled=False),
        compute_metrics=lambda found: {
            "top1": float((found.predictions.argmax(1) == found.label_ids).mean())
        },
    )
    trainer.train()
    keep(options.out, trainer.model.network, trainer.evaluate()["eval_top1"])


if __name__ == "__main__":
    main()
