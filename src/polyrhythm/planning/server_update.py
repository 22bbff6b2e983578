"""What an update costs a server's processor: a real server's part, given gradients.

    seconds(n) = a + 4 n / b      n numbers of float32; a: of any message, b: bytes/s

A server of `parameter_server` takes each gradient as its own update and answers with its shard, which is copied to the
link. Measured with the model's smallest tensor, and with all of it: a shard that fits a cache is faster.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import Tensor

from polyrhythm.communication.message import Kind, Message, pack_json
from polyrhythm.roles.job import Job
from polyrhythm.simulation.cluster import ServerUpdate
from polyrhythm.strategies.parameter_server.parameter_server import ParameterServer
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.strategies.server_part import ServerSetting
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizer_plan import OptimizerPlan

_WORKER, _SERVER = 0, 1
_WARM_UP, _UPDATES = 3, 15
_SCALE = 1e-3
"""Of the gradients, so that parameters stay ordinary numbers."""


def measure_server_update(job: Job, most_bytes_per_s: float) -> ServerUpdate | None:
    """Time a server's updates with a job's optimiser and as many numbers as its model has.

    Compute threads are the caller's; a server has one.

    Args:
        job: whose model and optimiser.
        most_bytes_per_s: that can be found, such as the speed of copying: of a small model, noise hides what its
            numbers cost beside the message.

    Returns:
        What they cost; None for an optimiser that looks at all workers' data, which servers cannot run.
    """
    model = job.make_model()
    flat = FlatParameters(model)
    plan = OptimizerPlan.of(job.learning.optimizer.create(model.parameters()), flat)
    if plan.joint is not None:
        return None
    least = min(flat.views, key=lambda view: view.stop - view.start)
    part = flat.vector[least.start : least.stop].clone()
    least_s = _update_s(plan.part(least.start, least.stop), part)
    whole_s, more = _update_s(plan, flat.vector), flat.vector.nbytes - part.nbytes
    more_s = max(whole_s - least_s, more / most_bytes_per_s)
    bandwidth = more / more_s if more else most_bytes_per_s
    return ServerUpdate(seconds=min(least_s, whole_s), bandwidth_bytes_per_s=bandwidth)


def _update_s(plan: OptimizerPlan, values: Tensor) -> float:
    """Return the median seconds of processor from a gradient's arrival until its answer is where a link takes it from.

    All of it is this thread's, so what other processes do meanwhile does not count.
    """
    server = ParameterServer().server(ServerSetting(0, RoleAssignment((_WORKER,), (_SERVER,))))
    server.on_message(_WORKER, Message(Kind.CONFIGURE, pack_json(plan.to_json())))
    server.on_message(_WORKER, Message(Kind.PARAMETERS, values))
    server.on_message(_WORKER, Message(Kind.PULL))
    gradient, link, version, seconds = _SCALE * torch.randn_like(values), torch.empty_like(values), 0, []
    for step in range(_WARM_UP + _UPDATES):
        push = Message(Kind.PUSH, gradient, version, step, 1.0, plan.rate)
        began_s = time.thread_time()
        [(_, answer)] = server.on_message(_WORKER, push)
        assert answer.tensor is not None, "a server answers with its parameters"
        link.copy_(answer.tensor)
        seconds.append(time.thread_time() - began_s)
        version = answer.version
    return statistics.median(seconds[_WARM_UP:])
