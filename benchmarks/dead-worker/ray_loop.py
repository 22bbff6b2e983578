"""Ray Train's TorchTrainer with a checkpoint every epoch, as in the fault tolerance guide of its documentation."""

import sys
import tempfile
from pathlib import Path
from typing import Any

import job
import ray
import ray.train
import ray.train.torch
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train(options: dict[str, Any]) -> None:
    """Train one worker."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = ray.train.torch.prepare_model(job.Paced(options["folder"]))
    diary = job.Diary(options["folder"])
    optimizer = torch.optim.SGD(model.parameters(), job.RATE)
    loader = DataLoader(TensorDataset(*job.dataset()), batch_size=job.BATCH, shuffle=True)
    loader = ray.train.torch.prepare_data_loader(loader)
    first, kept = 0, ray.train.get_checkpoint()
    if kept is not None:
        with kept.as_directory() as place:
            saved = torch.load(Path(place, "state.pt"))
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"] + 1
    for epoch in range(first, job.EPOCHS):
        loader.sampler.set_epoch(epoch)
        for images, labels in loader:
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            diary.write(1, images)
        with tempfile.TemporaryDirectory() as place:
            checkpoint = None
            if ray.train.get_context().get_world_rank() == 0:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state | {"epoch": epoch}, Path(place, "state.pt"))
                checkpoint = ray.train.Checkpoint.from_directory(place)
            ray.train.report({"epoch": epoch}, checkpoint=checkpoint)


if __name__ == "__main__":
    folder = sys.argv[1]
    ray.init(num_cpus=job.WORKERS)
    ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"folder": folder},
        scaling_config=ray.train.ScalingConfig(num_workers=job.WORKERS),
        run_config=ray.train.RunConfig(
            storage_path=f"{folder}-storage", failure_config=ray.train.FailureConfig(max_failures=10)
        ),
    ).fit()
