"""A model trained by Transformers' `Trainer`, plain or with a strategy of Polyrhythm.

    transformers_task.py STRATEGY FOLDER WORKERS [killed|saves|resumed]

Each worker saves what it came to. Alone (`plain`), batches are as large as all workers' together.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from polyrhythm.models.create import define_missing_operators

BATCH_SIZE, EPOCHS = 8, 3
_operators = define_missing_operators()  # Transformers imports torchvision


class Points(Dataset[dict[str, Tensor]]):
    """Points of three classes, as a trainer's collator wants them."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(1)
        directions = torch.randn(6, 3, generator=generator, dtype=torch.float64)
        self.inputs = torch.randn(count, 6, generator=generator, dtype=torch.float64)
        self.labels = (self.inputs @ directions).argmax(1)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        return {"x": self.inputs[place], "labels": self.labels[place]}


class Classifier(nn.Module):
    """Returns its loss as Transformers' models do; worker 1 may be killed in the middle of epoch 1."""

    def __init__(self, killed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.network = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        self.killed = killed
        self.passes = 0

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.passes += self.training
        if self.killed and os.environ.get("RANK") == "1" and self.passes == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        logits = self.network(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def accuracy(predicted: Any) -> dict[str, float]:
    return {"accuracy": float((predicted.predictions.argmax(1) == predicted.label_ids).mean())}


def main(strategy: str, folder: Path, workers: str, how: str = "") -> None:
    warnings.simplefilter("ignore")
    from transformers import Trainer, TrainingArguments

    from polyrhythm.adapters.transformers import PolyrhythmArguments, PolyrhythmTrainer

    plain = strategy == "plain"
    options: dict[str, Any] = {
        "per_device_train_batch_size": BATCH_SIZE * (int(workers) if plain else 1),
        "per_device_eval_batch_size": BATCH_SIZE,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": EPOCHS,
        "learning_rate": 0.03,
        "max_grad_norm": 0.3,
        "optim": "adamw_torch",
        "train_sampling_strategy": "sequential",
        "eval_strategy": "epoch",
        "save_strategy": "steps" if how == "saves" else "no",
        "save_steps": 6,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_strategy": "no",
    }
    made: Any = TrainingArguments if plain else PolyrhythmArguments
    arguments = made(str(folder / "out"), **options, **({} if plain else {"strategy": strategy}))
    trainer = (Trainer if plain else PolyrhythmTrainer)(
        Classifier(killed=how == "killed"),
        arguments,
        train_dataset=Points(12 * BATCH_SIZE + 5),
        eval_dataset=Points(4 * BATCH_SIZE + 1),
        compute_metrics=accuracy,
    )
    saved = folder / "out" / "checkpoint-6"
    trainer.train(resume_from_checkpoint=str(saved) if how == "resumed" else None)
    told = [each["eval_accuracy"] for each in trainer.state.log_history if "eval_accuracy" in each]
    torch.save(
        {
            "model": trainer.model.network.state_dict(),
            "accuracy": told,
            "later": trainer.evaluate()["eval_accuracy"],
            "rate": trainer.lr_scheduler.get_last_lr()[0],
            "steps": trainer.state.global_step,
        },
        folder / f"worker-{os.environ.get('RANK', '0')}.pt",
    )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
