"""A loop as the guides of Accelerate have it, with its own accelerator or Polyrhythm's.

    accelerate_task.py STRATEGY FOLDER WORKERS [killed | saves | resumed]

Each worker saves what it came to. Alone (`plain`), batches are as large as all workers' together, and the schedule,
which steps once for each process, is as many times as fast.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE, EPOCHS = 8, 4


def points(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    directions = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    inputs = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, (inputs @ directions).argmax(1))


def main(strategy: str, folder: Path, workers: str, how: str = "") -> None:
    warnings.simplefilter("ignore")
    many = int(workers)
    accelerator: Any
    if strategy == "plain":
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    else:
        from polyrhythm.adapters.accelerate import PolyrhythmAccelerator

        accelerator = PolyrhythmAccelerator(strategy, gradient_accumulation_steps=2)
    together = many if strategy == "plain" else 1

    torch.manual_seed(2)
    model: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scheduler: Any = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97**together)
    generator = torch.Generator().manual_seed(3)
    # The ragged batch makes a step of its own: passes that are added up without an exchange count as one batch.
    training: Any = DataLoader(
        points(12 * BATCH_SIZE + 5), BATCH_SIZE * together, shuffle=True, generator=generator
    )
    testing: Any = DataLoader(points(4 * BATCH_SIZE + 1), BATCH_SIZE * together)
    model, optimizer, training, testing, scheduler = accelerator.prepare(
        model, optimizer, training, testing, scheduler
    )
    first = 0
    if how == "resumed":
        accelerator.load_state(folder / "saved")
        first = 2
    rates, right = [], torch.empty(0)
    for epoch in range(first, EPOCHS):
        model.train()
        for step, (x, y) in enumerate(training):
            if how == "killed" and (accelerator.process_index, epoch, step) == (1, 1, 2):
                os.kill(os.getpid(), signal.SIGKILL)
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.3)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            rates.append(scheduler.get_last_lr()[0])
        model.eval()
        with torch.no_grad():
            found = [accelerator.gather_for_metrics(model(x).argmax(1) == y) for x, y in testing]
        right = torch.cat(found)
        if how == "saves" and epoch == 1:
            accelerator.save_state(folder / "saved")
    accelerator.wait_for_everyone()
    mean = float(accelerator.reduce(torch.tensor(float(accelerator.process_index)), "mean"))
    accelerator.end_training()
    torch.save(
        {
            "model": accelerator.unwrap_model(model).state_dict(),
            "rate": rates[-1],
            "tested": len(right),
            "accuracy": float(right.double().mean()),
            "processes": accelerator.num_processes,
            "main": accelerator.is_main_process,
            "mean": mean,
        },
        folder / f"worker-{os.environ.get('RANK', '0')}.pt",
    )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
