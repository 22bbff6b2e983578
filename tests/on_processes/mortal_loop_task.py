"""A loop of one's own in which a worker is killed, and which its successor may join.

    mortal_loop_task.py STRATEGY FOLDER EPOCHS VICTIM [WORD [HOW]]

The first process of rank VICTIM is killed before step KILLED_AT of epoch 1 has its gradients, which are exchanged as
soon as they are there: a worker at its own, a server at worker 0's. With a word, worker 1 ends epoch 1 only when its
successor has begun (`begun`), waits to be let in (`waiting`), or has come into the loop (`inside`). HOW `joined`:
within `group.join`. Each worker notes its batches and saves its final model.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

WORKERS, POINTS, BATCH_SIZE, RATE, KILLED_AT = 3, 48, 4, 0.05, 2


def points() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(POINTS, 6, generator=generator, dtype=torch.float64)
    return inputs, inputs[:, :3].argmax(1)


def network() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def optimizer_of(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)


def schedule_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.StepLR:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)


def main(strategy: str, folder: Path, epochs: int, victim: int, word: str = "", how: str = "") -> None:
    import polyrhythm
    from polyrhythm.launch.script import WorkerStatus, WorkerStatuses
    from polyrhythm.training.flat_optimizer import make_optimizers_quickly

    make_optimizers_quickly()
    process = folder / f"process-{os.environ['RANK']}"
    rejoins = os.environ["POLYRHYTHM_GENERATION"] != "0"
    process.write_text(str(os.getpid()))
    if rejoins and victim >= WORKERS:
        (folder / "begun").touch()
    inputs, labels = points()
    diary = []
    with polyrhythm.join(strategy) as group:
        store = group._home.rendezvous.store  # a place is nothing that users could ask for
        model = network()
        model, optimizer = group.distribute(model, optimizer_of(model))
        scheduler = schedule_of(optimizer)
        shard = group.shard(DataLoader(TensorDataset(torch.arange(POINTS)), BATCH_SIZE))
        if rejoins:
            (folder / "begun").touch()
        for epoch in group.epochs(epochs, scheduler):
            seen: list[list[int]] = []
            if rejoins:
                (folder / "inside").touch()
            with group.join() if how == "joined" else nullcontext():
                for (indices,) in shard:
                    loss = functional.cross_entropy(model(inputs[indices]), labels[indices])
                    killer = victim if victim < WORKERS else 0
                    if (group.rank, epoch, len(seen), rejoins) == (killer, 1, KILLED_AT, False):
                        os.kill(int((folder / f"process-{victim}").read_text()), signal.SIGKILL)
                    loss.backward()
                    optimizer.step()
                    seen.append(indices.tolist())
            scheduler.step()
            while word and (group.rank, epoch) == (1, 1) and not (folder / word).exists():
                if word == "waiting" and WorkerStatuses(store, WORKERS).of(victim) is WorkerStatus.WAITING:
                    break
                time.sleep(0.01)
            mean = group.average(group.rank)
            facts = {"epoch": epoch, "seen": seen, "workers": group.workers, "mean": mean}
            diary.append(facts | {"rate": optimizer.param_groups[0]["lr"], "length": len(shard)})
    name = f"worker-{group.rank}"
    (folder / f"{name}.json").write_text(json.dumps({"diary": diary, "steps": optimizer.steps}))
    torch.save(model.state_dict(), folder / f"{name}.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
