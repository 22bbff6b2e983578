"""The final model on all workers, in a simulated group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from polyrhythm.api.final_model import share_final_model
from polyrhythm.communication.transports.simulated.network import ConstantNetwork
from polyrhythm.communication.transports.simulated.transport import SimulatedCluster
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime


def test_parameters_and_counters_are_worker_0s_and_statistics_are_averaged() -> None:
    norms = [nn.BatchNorm1d(2) for _ in range(3)]
    third = torch.tensor([1 / 3, -float("inf")])
    replicas: list[Any] = []
    for worker, norm in enumerate(norms):
        assert norm.running_mean is not None
        assert norm.num_batches_tracked is not None
        norm.running_mean.copy_(torch.tensor([1.0, 10.0]) * worker)
        norm.num_batches_tracked.fill_(5 + worker)
        norm.register_buffer("constant", third.clone())
        vector = torch.full((4,), float(worker))
        replicas.append(
            SimpleNamespace(flat=SimpleNamespace(vector=vector), buffers=dict(norm.named_buffers()))
        )

    time = VirtualTime()
    cluster = SimulatedCluster(time, ConstantNetwork(time, 1e-5, 1e9), 3)
    for worker, replica in enumerate(replicas):
        network = cluster.communicator(worker)
        time.spawn(
            f"worker {worker}", lambda replica=replica, network=network: share_final_model(replica, network)
        )
    time.run()

    for replica in replicas:
        assert replica.flat.vector.tolist() == [0.0] * 4
        assert replica.buffers["running_mean"].tolist() == [1.0, 10.0]
        assert replica.buffers["num_batches_tracked"].item() == 5
        assert torch.equal(replica.buffers["constant"], third)
