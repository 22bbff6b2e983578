"""A loop of one's own that evaluates its model in place, and a copy of it while steps continue.

    evaluated_loop_task.py STRATEGY FOLDER [FAILING]

The coordinator writes both results of each epoch. FAILING, `raise` or `skip`: the function fails at the second call.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 3


def main(strategy: str, folder: Path, failing: str = "") -> None:
    import polyrhythm

    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(96, 6, generator=generator)
    labels = inputs[:, :3].argmax(1)
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def results(model: nn.Module) -> dict[str, float]:
        logits = model(inputs)
        return {
            "test_loss": float(functional.cross_entropy(logits, labels)),
            "test_top1": float((logits.argmax(1) == labels).float().mean()),
            "bias": float(model[3].bias.double().sum()),
        }

    def slowly(model: nn.Module) -> dict[str, float]:
        time.sleep(0.2)
        return results(model)

    def broken(model: nn.Module) -> dict[str, float]:
        raise ValueError("no such column")

    with polyrhythm.join(strategy, report=folder / "report") as group:
        model, optimizer = group.distribute(model, optimizer)
        in_place, begun = [], []
        for epoch in group.epochs(EPOCHS):
            for x, y in group.shard(DataLoader(TensorDataset(inputs, labels), 8)):
                functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            if begun:
                begun[-1].wait()
            if group.leads:
                model.eval()
                with torch.no_grad():
                    in_place.append(results(model))
                model.train()
            function = broken if failing and epoch == 1 else slowly
            begun.append(group.evaluate_async(function, on_error=failing or "raise"))
    if group.leads:
        found = [each.values for each in begun]
        steps = [each.step for each in begun]
        (folder / "found.json").write_text(json.dumps([in_place, found, steps]))


if __name__ == "__main__":
    strategy, folder, *rest = sys.argv[1:]
    main(strategy, Path(folder), *rest)
