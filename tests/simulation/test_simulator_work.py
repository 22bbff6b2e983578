"""What the simulator does for a step of many workers: counted, since times depend on the machine."""

from __future__ import annotations

import gc
import sys
from types import FrameType
from typing import Any

import pytest
import torch

from polyrhythm.communication.collectives.binomial_tree import BinomialTree
from polyrhythm.roles.dry_run import DryRun
from polyrhythm.roles.leading.leader import Leader
from polyrhythm.simulation.cluster import Cluster
from polyrhythm.simulation.layout import lay_out
from polyrhythm.simulation.run import simulate_dry_on
from polyrhythm.strategies.averaging.local_sgd import LocalSGD
from polyrhythm.strategies.parameter_server.parameter_server import ParameterServer
from polyrhythm.training.model_sizes import ModelSizes

WORKERS, FEW, MANY = 40, 20, 40
MOST_CALLS, MOST_CALLS_IN_C = 84.1, 72


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
    gc.collect()
    gc.disable()  # what earlier tests left is not finalized while calls are counted
    sys.setprofile(counted)
    try:
        simulate_dry_on(layout, dry_run, lambda event: None)
    finally:
        sys.setprofile(None)
        gc.enable()
    return counted


def test_a_step_of_two_messages_takes_so_many_calls_and_none_of_torch() -> None:
    _counted(FEW)  # what is cached is there
    few, many = _counted(FEW), _counted(MANY)
    steps = WORKERS * (MANY - FEW)
    calls = (many.calls - few.calls) / steps
    calls_in_c = (many.calls_in_c - few.calls_in_c) / steps
    of_torch = (many.calls_of_torch - few.calls_of_torch) / steps
    assert 60 < calls <= MOST_CALLS
    assert 40 < calls_in_c <= MOST_CALLS_IN_C
    assert of_torch <= 0.1  # servers say now and then what they have done


def _as_long_as(length: int) -> int:
    """Return the number of containers with exactly this length."""
    kinds = (tuple, list, dict, set, frozenset)
    found = {
        id(each)
        for owner in gc.get_objects()
        for each in gc.get_referents(owner)
        if type(each) in kinds and len(each) == length
    }
    return len(found)


def test_workers_share_what_has_an_entry_for_each_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """10,000 workers with a list each of all workers took 4 GB for each such list."""
    workers = 211
    cluster = Cluster.model_validate(
        {
            "name": "many",
            "hosts": [{"name": "workers", "count": workers}],
            "nic": {"latency_s": 50e-6, "bandwidth_bytes_per_s": 1.25e9},
            "inside": {"latency_s": 5e-6, "bandwidth_bytes_per_s": 1e10},
            "step_time": "constant(seconds=0.1)",
        }
    )
    strategy = LocalSGD(steps=2, collective=BinomialTree())  # others cut vectors into a slice for each worker
    layout = lay_out(cluster, workers, 0, strategy.traits(workers).placement)
    dry_run = DryRun(strategy=strategy, workers=workers, sizes=ModelSizes((100,), (1.0,)), steps=2)
    counts = list[int]()
    leave = Leader.leave

    def counted(leader: Leader, record: Any) -> Any:
        counts.append(_as_long_as(workers))
        return leave(leader, record)

    monkeypatch.setattr(Leader, "leave", counted)
    simulate_dry_on(layout, dry_run, lambda event: None)
    assert len(counts) == 1
    assert counts[0] < workers // 2
