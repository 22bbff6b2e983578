"""What the simulator does for a step of many workers: counted, since times depend on the machine."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch

from polyrhythm.roles.dry_run import DryRun
from polyrhythm.simulation.cluster import Cluster
from polyrhythm.simulation.layout import lay_out
from polyrhythm.simulation.run import simulate_dry_on
from polyrhythm.strategies.parameter_server.parameter_server import ParameterServer
from polyrhythm.training.model_sizes import ModelSizes

WORKERS, FEW, MANY = 40, 20, 40
MOST_CALLS, MOST_CALLS_IN_C = 84, 72


class _Counted:
    """Counts calls while it is in force: of Python functions, of functions in C, and of torch's among those."""

    def __init__(self) -> None:
        self.calls = self.calls_in_c = self.calls_of_torch = 0

    def __call__(self, frame: FrameType, event: str, function: Any) -> None:
        if event == "call":
            self.calls += 1
        elif event == "c_call":
            self.calls_in_c += 1
            owner = getattr(function, "__self__", None)
            self.calls_of_torch += isinstance(owner, torch.Tensor)


def _counted(steps: int) -> _Counted:
    cluster = Cluster.model_validate(
        {
            "name": "many",
            "hosts": [{"name": "workers", "count": WORKERS}, {"name": "server", "count": 1}],
            "nic": {"latency_s": 50e-6, "bandwidth_bytes_per_s": 1.25e9},
            "inside": {"latency_s": 5e-6, "bandwidth_bytes_per_s": 1e10},
            "step_time": "exponential(mean=0.1)",
        }
    )
    strategy = ParameterServer(servers=1, placement="dedicated")
    layout = lay_out(cluster, WORKERS, 1, strategy.traits(WORKERS).placement)
    dry_run = DryRun(strategy=strategy, workers=WORKERS, sizes=ModelSizes((1_000_000,), (1.0,)), steps=steps)
    counted = _Counted()
    sys.setprofile(counted)
    try:
        simulate_dry_on(layout, dry_run, lambda event: None)
    finally:
        sys.setprofile(None)
    return counted


def test_a_step_of_two_messages_takes_so_many_calls_and_none_of_torch() -> None:
    few, many = _counted(FEW), _counted(MANY)
    steps = WORKERS * (MANY - FEW)
    calls = (many.calls - few.calls) / steps
    calls_in_c = (many.calls_in_c - few.calls_in_c) / steps
    of_torch = (many.calls_of_torch - few.calls_of_torch) / steps
    assert 60 < calls <= MOST_CALLS
    assert 40 < calls_in_c <= MOST_CALLS_IN_C
    assert of_torch <= 0.1  # servers say now and then what they have done
