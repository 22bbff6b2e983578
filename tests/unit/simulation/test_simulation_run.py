from __future__ import annotations

from dataclasses import replace

import pytest

from conformance.jobs import make_job, result_of
from polyrhythm.communication.transports.simulated.virtual_time import Deadlock
from polyrhythm.events import Event, RunEnded, RunStarted, WorkerProgress
from polyrhythm.roles.job import Job
from polyrhythm.simulation.run import ConstantCluster, simulate
from polyrhythm.strategies.allreduce.synchronous import Synchronous, SynchronousWorker
from polyrhythm.strategies.worker_part import Step, WorkerPart, WorkerSetting

FAST = {"latency_s": 0.0, "bandwidth_bytes_per_s": 1e30}


def _last_step_s(events: list[Event], worker: int) -> float:
    return max(
        event.time_s for event in events if isinstance(event, WorkerProgress) and event.worker == worker
    )


def test_one_worker_takes_its_steps_times() -> None:
    job = make_job("synchronous")
    events = simulate(job, ConstantCluster(step_s=lambda worker: 0.25, **FAST))
    assert isinstance(events[0], RunStarted)
    assert events[0].time_s == 0
    assert isinstance(events[-1], RunEnded)
    steps = 2 * 14  # two epochs of 53 images, 4 at a time
    assert result_of(events)["steps"] == steps
    assert result_of(events)["seconds"] == pytest.approx(0.25 * steps, rel=1e-12)


def test_workers_in_step_go_at_the_slowest_ones_pace() -> None:
    job = make_job("synchronous", 3)
    events = simulate(job, ConstantCluster(step_s=lambda worker: [0.1, 0.4, 0.2][worker], **FAST))
    steps = 2 * 5  # two epochs of 53 images, 4 at a time on each of 3 workers
    assert result_of(events)["steps"] == steps
    for worker in range(3):
        assert _last_step_s(events, worker) == pytest.approx(0.4 * steps, rel=1e-9)


def test_workers_out_of_step_go_at_their_own_pace() -> None:
    job = make_job("parameter_server(placement=dedicated)", 3)
    paces = [0.1, 0.4, 0.2]
    events = simulate(job, ConstantCluster(step_s=lambda worker: paces[worker], **FAST))
    for worker, pace in enumerate(paces):
        said = [event for event in events if isinstance(event, WorkerProgress) and event.worker == worker]
        assert sum(event.steps for event in said) == 10
        assert said[-1].step == 10
        assert _last_step_s(events, worker) >= pace * 10 * (1 - 1e-9)
    assert _last_step_s(events, 2) < _last_step_s(events, 1)


def test_a_slow_network_costs_what_its_formula_says() -> None:
    latency_s, bandwidth = 0.01, 1e5
    around = ConstantCluster(step_s=lambda worker: 0.1, latency_s=latency_s, bandwidth_bytes_per_s=bandwidth)
    events = simulate(make_job("synchronous", 2), around)
    first = next(event for event in events if isinstance(event, WorkerProgress) and event.worker == 0)
    # 103 parameters and a tail of two, to each other at once; the other worker begins a latency later
    exchange_s = latency_s + (105 * 4 + 64) / bandwidth
    assert first.step == 5  # whole half seconds have passed: nobody has sent anything else yet
    assert first.time_s == pytest.approx(5 * (0.1 + exchange_s) + latency_s, rel=1e-9)
    assert first.wait_s == pytest.approx(5 * exchange_s + latency_s, rel=1e-9)


class _Deaf(SynchronousWorker):
    """Waits for a message that nobody sends."""

    def begin(self, step: Step) -> None:
        self.exchanger.workers.receive()


class _Waiting(Synchronous):
    def worker(self, setting: WorkerSetting) -> WorkerPart:
        return _Deaf(setting, self.gradient_mean(setting.workers, setting.flat))


def _with(strategy: Synchronous) -> Job:
    return replace(make_job("synchronous", 2), strategy=strategy)


def test_a_strategy_that_waits_for_ever_is_named() -> None:
    with pytest.raises(Deadlock, match=r"worker 0 waits for .*; worker 1 waits for a message from anyone"):
        simulate(_with(_Waiting()))
