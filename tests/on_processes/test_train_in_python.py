"""`polyrhythm.train` in a script, with objects of its own."""

from __future__ import annotations

import sys
from pathlib import Path

from on_processes.commands import Result, finished
from polyrhythm.reporting.event_log import read_events

SCRIPT = """
import json

import torch
from torch import nn

import polyrhythm

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, images):
        return self.body(images)

def part(count, seed):
    images = torch.rand(count, 3, 2, 2, generator=torch.Generator().manual_seed(seed))
    return images, images.mean(dim=(2, 3)).argmax(dim=1)

{guard}
    torch.manual_seed(0)
    data = (part(600, 1), part(90, 2))
    run = polyrhythm.train(
        data=data, model=Net(), strategy="synchronous", workers={workers}, epochs=10, batch_size=16,
        optimizer="adam(lr=0.02)", out="run",
    )
    print(json.dumps({{"outcome": run.outcome, "folder": str(run.folder), **run.figures}}))
"""


def start(folder: Path, guard: str, workers: int) -> Result:
    script = folder / "script.py"
    script.write_text(SCRIPT.format(guard=guard, workers=workers))
    return finished([sys.executable, script], folder)


def test_a_script_trains_its_own_model_on_its_own_tensors(tmp_path: Path) -> None:
    done = start(tmp_path, 'if __name__ == "__main__":', workers=2)
    found = done.figures
    assert (found["outcome"], found["folder"], found["model"]) == ("done", "run", "Net")
    assert (found["workers"], found["servers"], found["epochs"]) == (2, 0, 10)
    assert found["test_top1"] > 0.9  # of three classes: the brightest channel
    assert read_events(tmp_path / "run" / "events.jsonl")
    assert (tmp_path / "run" / "model.safetensors").is_file()
    assert "model: <your own Net>" in (tmp_path / "run" / "config.yaml").read_text()


def test_a_script_without_a_guard_is_told_to_have_one(tmp_path: Path) -> None:
    done = start(tmp_path, "if True:", workers=1)
    assert done.status == 1
    assert "workers import this script again" in done.err.splitlines()[-1]
    assert 'below an `if __name__ == "__main__":`' in done.err.splitlines()[-1]
