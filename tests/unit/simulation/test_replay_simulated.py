"""Recordings made in the simulator itself, where one seed of delays is one real run."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from conformance.jobs import in_step, make_job, out_of_step, result_of, strategy
from polyrhythm.communication.arrivals import Arrivals
from polyrhythm.communication.communicator import Communicator, Handle
from polyrhythm.communication.forwarding import ForwardingCommunicator, RecordingCommunicator
from polyrhythm.communication.message import Message
from polyrhythm.events import Event
from polyrhythm.roles.checkpointing.recording import Recording, recording_of
from polyrhythm.roles.job import CheckpointConfig, Job
from polyrhythm.roles.world import World
from polyrhythm.simulation.replay import replay
from polyrhythm.simulation.run import run_rank, simulate
from polyrhythm.simulation.simulated_run import ConstantCluster, RankProgram, constant_run
from polyrhythm.strategies.role_assignment import RoleAssignment

WORKERS = 4


class Erratic(ForwardingCommunicator):
    """Takes its time before every message."""

    def __init__(self, inner: Communicator, seed: int) -> None:
        super().__init__(inner)
        chance = random.Random(f"{seed}/{inner.rank}")

        def start_send(to: int, message: Message) -> Handle:
            inner.clock.sleep(chance.uniform(0.0, 0.1))
            return inner.start_send(to, message)

        self.start_send = start_send


def _job(spec: str) -> Job:
    return replace(make_job(spec, WORKERS), checkpointing=CheckpointConfig(checkpoints=0))


def _roles(job: Job) -> RoleAssignment:
    servers = job.traits.servers
    return RoleAssignment(tuple(range(WORKERS)), tuple(range(WORKERS, WORKERS + servers)))


@cache
def _recorded(spec: str, seed: int = 0) -> Recording:
    job, noted, events = _job(spec), dict[int, Arrivals](), list[Event]()
    roles = _roles(job)

    def role(world: World) -> None:
        found = noted[world.network.rank] = Arrivals()
        run_rank(job, replace(world, network=RecordingCommunicator(Erratic(world.network, seed), found)))

    constant_run(roles, RankProgram(role), events.append, ConstantCluster()).play()
    return recording_of(
        job, roles, noted, outcome="done", parameters_sha256=result_of(events)["parameters_sha256"]
    )


def _undirected(spec: str) -> str:
    return str(result_of(simulate(_job(spec)))["parameters_sha256"])


def _tampered(recording: Recording, rank: int, change: Callable[[Arrivals], None]) -> Recording:
    ranks = {number: Arrivals.from_json(entry.to_json()) for number, entry in recording.ranks.items()}
    change(ranks[rank])
    return replace(recording, ranks=ranks)


@pytest.mark.parametrize(
    "spec", [spec for spec in out_of_step(WORKERS) if not strategy(spec).traits(WORKERS).one_host]
)
def test_an_asynchronous_run_comes_out_the_same_bit_for_bit(spec: str) -> None:
    recording = _recorded(spec)
    found = replay(_job(spec), recording)
    assert found.difference is None
    assert found.parameters_sha256 == recording.parameters_sha256
    assert found.messages == recording.messages > 20 // max(1, strategy(spec).traits(WORKERS).exchange_every)
    assert _undirected(spec) != recording.parameters_sha256  # so the order did matter


@pytest.mark.parametrize("spec", in_step(WORKERS))
def test_a_run_in_step_comes_out_the_same_bit_for_bit(spec: str) -> None:
    found = replay(_job(spec), _recorded(spec))
    assert found.difference is None
    assert found.parameters_sha256 == _recorded(spec).parameters_sha256


def test_two_runs_differ_and_each_is_replayed_as_it_was() -> None:
    spec = "parameter_server"
    recordings = [_recorded(spec, seed) for seed in (1, 2)]
    assert len({recording.parameters_sha256 for recording in recordings}) == 2
    for recording in recordings:
        assert replay(_job(spec), recording).parameters_sha256 == recording.parameters_sha256


def test_a_swapped_pair_is_found_where_it_is() -> None:
    spec = "parameter_server(servers=3)"
    recording, rank = _recorded(spec), WORKERS + 1
    sources = recording.ranks[rank].sources
    place = next(number for number in range(12, len(sources)) if sources[number] != sources[number + 1])

    def swap(arrivals: Arrivals) -> None:
        arrivals.sources[place], arrivals.sources[place + 1] = sources[place + 1], sources[place]

    found = replay(_job(spec), _tampered(recording, rank, swap))
    assert found.difference is not None
    assert (found.difference.rank, found.difference.message) == (rank, place)
    assert found.difference.source == sources[place + 1]
    assert found.parameters_sha256 != recording.parameters_sha256


def test_an_order_that_leads_nowhere_is_a_difference() -> None:
    recording = _recorded("parameter_server")

    def repeat(arrivals: Arrivals) -> None:
        arrivals.sources[0] = 3  # which pulls only once before the server has parameters

    found = replay(_job("parameter_server"), _tampered(recording, WORKERS, repeat))
    assert found.parameters_sha256 is None
    assert found.difference is not None
    assert (found.difference.rank, found.difference.message) == (WORKERS, 0)


def test_a_recording_that_is_too_short_is_a_difference() -> None:
    recording = _recorded("parameter_server")
    length = recording.messages - 1

    def shorten(arrivals: Arrivals) -> None:
        arrivals.sources.pop()
        arrivals.checks.pop()

    found = replay(_job("parameter_server"), _tampered(recording, WORKERS, shorten))
    assert found.difference is not None
    assert (
        found.difference.text == f"rank {WORKERS} waits for more than the {length} messages of the recording"
    )


def test_a_recording_that_is_too_long_is_a_difference() -> None:
    recording = _recorded("parameter_server")

    def lengthen(arrivals: Arrivals) -> None:
        arrivals.sources.append(1)
        arrivals.checks.append(1)

    found = replay(_job("parameter_server"), _tampered(recording, WORKERS, lengthen))
    assert found.difference is not None
    assert (found.difference.rank, found.difference.message) == (WORKERS, recording.messages)
    assert found.difference.text == f"recorded messages of rank {WORKERS} that the replay lacks: 1"


def test_other_parameters_at_the_end_are_a_difference() -> None:
    recording = replace(_recorded("synchronous"), parameters_sha256="0" * 64)
    found = replay(_job("synchronous"), recording)
    assert found.difference is not None
    assert found.difference.text == "the parameters differ, and no message does"
    assert found.summed_ranks == WORKERS
