"""Compositions of the parameter server over real processes: what only real links and deaths can show."""

from __future__ import annotations

import multiprocessing
import os
import signal
from dataclasses import replace

import pytest
import torch

from conformance.jobs import blobs, make_job, perceptron, result_of, saved_vector, simulated, vector_of
from on_processes.brake import Brake
from polyrhythm.events import Event, RunStarted, WorkerLost
from polyrhythm.launch.children import run_local
from polyrhythm.roles.job import Job


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(job: Job, tell=lambda event: None) -> list[Event]:
    events: list[Event] = []

    def hear(event: Event) -> None:
        events.append(event)
        tell(event)

    run_local(job, hear, threads=1)
    return events


def test_servers_that_exchange_distances_give_the_bits_of_the_simulation(tmp_path):
    spec = "parameter_server(servers=2, consistency=synchronous, aggregator=multi_krum(f=0))"
    job = make_job(spec, 3, dataset=blobs(train=48), folder=tmp_path, checkpoints=0)
    result = result_of(run(job))
    expected = simulated(job)
    assert torch.equal(saved_vector(tmp_path), vector_of(expected.models[0]))
    assert result["bytes_sent_per_step"] == expected.result["bytes_sent_per_step"]


def test_cached_reads_spare_bytes_and_apply_every_gradient_once(tmp_path):
    job = make_job("ssp(s=3, servers=2)", 3, dataset=blobs(train=240), folder=tmp_path, epochs=4)
    result = result_of(run(job))
    assert sum(result["staleness"]["histogram"].values()) == 3 * 80 * 2
    up, headers = 103 * 4, 2 * 2 * 64
    assert up + headers < result["bytes_sent_per_step"] < 2 * up + headers
    assert result["test_top1"] > 0.6  # three classes: a third by chance


def test_a_dead_worker_is_spared(tmp_path):
    killed, brake = [], Brake(tmp_path / "brake", 0)

    def kill(event: Event) -> None:
        if isinstance(event, RunStarted):
            [victim] = [child for child in multiprocessing.active_children() if child.name.endswith("rank 1")]
            os.kill(victim.pid, signal.SIGKILL)
            brake.release()
            killed.append(event)

    job = make_job("backup_workers(spare=1)", 3, dataset=blobs(train=240), folder=tmp_path, epochs=10)
    events = run(replace(job, make_model=lambda: brake.on(perceptron())), kill)
    result = result_of(events)
    assert killed
    assert sum(isinstance(event, WorkerLost) for event in events) == 1
    assert (result["steps"], result["workers_lost"]) == (200, 1)
    assert sum(result["staleness"]["histogram"].values()) == 2 * 200
