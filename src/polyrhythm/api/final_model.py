"""Giving all workers the run's final model, so that any of them may save it."""

from __future__ import annotations

import torch

from polyrhythm.communication.communicator import Communicator
from polyrhythm.roles.replica import Replica


def share_final_model(replica: Replica, workers: Communicator) -> None:
    """Makes all workers' models equal, once training has ended.

    Parameters are worker 0's. Batch-norm statistics, which each worker has kept on its own, are averaged; buffers
    that are equal everywhere keep their bits, and counters are worker 0's.

    Args:
        replica: changed in place.
        workers: all of them.
    """
    workers.broadcast(replica.flat.vector)
    for buffer in replica.buffers.values():
        own = buffer.detach().clone()
        workers.broadcast(buffer)
        if buffer.is_floating_point():
            # Not the plain mean: summing equal numbers and dividing again would not always give them back.
            away = torch.where(own == buffer, torch.zeros_like(own), own - buffer).contiguous()
            workers.all_reduce(away)
            buffer.add_(away / workers.size)
