"""Runs `polyrhythm.train` and a loop of one's own with the real MLflow and Weights & Biases, and reads what they hold.

    pip install mlflow-skinny wandb sqlalchemy
    python benchmarks/loggers/logged.py

They are too large (190 MB) to be installed for every test of the project, which test the protocol alone.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import polyrhythm
from polyrhythm.reporting.event_log import read_events
from polyrhythm.reporting.loggers import LoggedRun, MLflowLogger, WandbLogger


def own_loop(folder: Path, observers: list[Any]) -> None:
    """Train a tiny network on one worker."""
    torch.manual_seed(0)
    network = nn.Linear(4, 2)
    data = TensorDataset(torch.randn(64, 4), torch.arange(64) % 2)
    with polyrhythm.join(report=folder, observers=observers) as group:
        model, optimizer = group.distribute(network, torch.optim.SGD(network.parameters(), lr=0.1))
        for _ in group.epochs(2):
            for x, y in group.shard(DataLoader(data, 8)):
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                group.log(loss=loss)
            group.log(test_top1=0.5)


def in_mlflow(uri: str, folder: Path) -> dict[str, Any]:
    """Return what MLflow holds of its only run, by name."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name(folder.name)
    (run,) = client.search_runs([experiment.experiment_id])
    told = client.get_metric_history(run.info.run_id, "test_top1")
    return {
        "status": run.info.status,
        "strategy": run.data.params["strategy"],
        "test_top1": [(each.step, each.value) for each in told],
        "steps": run.data.metrics["final/steps"],
    }


def in_wandb(folder: Path) -> int:
    """Return how many bytes an offline run of Weights & Biases has written."""
    (written,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    return written.stat().st_size


def main() -> None:
    """Log both kinds of run, and print what was kept."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        os.environ["WANDB_SILENT"] = "true"
        for kind in ("train", "loop"):
            run, uri = root / kind, f"sqlite:///{root}/{kind}.db"
            (root / f"{kind}-wandb").mkdir()
            observers: list[Any] = [
                LoggedRun(MLflowLogger(uri, kind)),
                LoggedRun(WandbLogger("polyrhythm", str(root / f"{kind}-wandb"))),
            ]
            if kind == "loop":
                own_loop(run, observers)
            else:
                polyrhythm.train(
                    data="digits", model="mlp", workers=2, epochs=2, out=run, observers=observers
                )
            tested = sum(type(event).__name__ == "Evaluated" for event in read_events(run / "events.jsonl"))
            found = in_mlflow(uri, Path(kind))
            assert found["status"] == "FINISHED", found
            assert len(found["test_top1"]) == tested == 2, found
            print(f"{kind}: MLflow {found}; W&B {in_wandb(root / f'{kind}-wandb')} bytes", file=sys.stdout)


if __name__ == "__main__":
    main()
