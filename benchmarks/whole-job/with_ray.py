"""The job with Ray Train, in a cluster of this machine that Ray starts and ends."""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = os.getcwd()


def train(settings: dict[str, Any]) -> None:
    """Train on one worker."""
    sys.path.insert(0, FOLDER)
    import job
    import torch.distributed as dist
    from ray.train.torch import prepare_data_loader, prepare_model
    from torch import nn
    from torch.utils.data import DataLoader

    network = job.network()
    optimizer = job.optimizer_of(network)
    model = prepare_model(network)
    loader = prepare_data_loader(
        DataLoader(job.read("train", settings["images"]), job.BATCH_SIZE, shuffle=True)
    )
    for epoch in range(settings["epochs"]):
        loader.sampler.set_epoch(epoch)
        for images, labels in loader:
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    if dist.get_rank() == 0:
        Path(settings["result"]).write_text(str(job.accuracy(network)))


if __name__ == "__main__":
    import ray
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(_node_ip_address="127.0.0.1", num_cpus=2, include_dashboard=False)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "accuracy"
        settings = {"images": int(sys.argv[1]), "epochs": int(sys.argv[2]), "result": str(result)}
        TorchTrainer(train, train_loop_config=settings, scaling_config=ScalingConfig(num_workers=2)).fit()
        accuracy = result.read_text()
    ray.shutdown()
    print(accuracy)
