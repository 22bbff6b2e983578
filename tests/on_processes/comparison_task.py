"""The two loops of docs/migrate.md, as they stand there, one after the other in the same processes of torchrun.

    comparison_task.py PAGE FOLDER

Each saves its model as FOLDER/before/model.pt and FOLDER/after/model.pt.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

POINTS, EPOCHS = 32, 4
"""As many points as two workers take in a step, so the order in which either loop shuffles does not count."""


def loop(page: str, name: str) -> str:
    found = re.search(rf"<!-- {name}: .*?-->\n```python\n(.*?)```", page, re.DOTALL)
    assert found, f"no loop {name} on the page"
    return found[1]


def run(page: str, name: str, folder: Path) -> dict[str, object]:
    """Runs a loop, and gives all that it has made, so that none of it ends before the process does."""
    torch.manual_seed(0)
    inputs = torch.randn(POINTS, 6, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    names: dict[str, object] = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "criterion": nn.CrossEntropyLoss(),
        "data": TensorDataset(inputs, inputs[:, :3].argmax(1)),
        "epochs": EPOCHS,
    }
    (folder / name).mkdir(exist_ok=True)
    os.chdir(folder / name)
    exec(loop(page, name), names)
    return names


if __name__ == "__main__":
    page, folder = Path(sys.argv[1]).read_text(), Path(sys.argv[2])
    kept = [run(page, name, folder) for name in ("before", "after")]
    sys.stdout.flush()
    # DDP's end waits, with the interpreter's lock held, for a thread of gloo's that may want that lock: a deadlock.
    os._exit(0)
