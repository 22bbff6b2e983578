"""Groups of mixed mode lose members, and get them back, at every moment of a run: they regroup inside and push on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from conformance.jobs import blobs, make_job, result_of, strategy
from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.message import Kind, Message
from polyrhythm.events import Event, RunEnded, WorkerProgress
from polyrhythm.roles.job import FaultTolerance, Job
from polyrhythm.simulation.injection.fault import parse_faults
from polyrhythm.simulation.trials import ExactGradients, play, try_seeds
from polyrhythm.strategies.parameter_server.groups.group_server import GroupServer
from polyrhythm.strategies.parameter_server.mixed import Models, ServersOfGroup
from polyrhythm.strategies.parameter_server.serving.rule import Reply
from sample import failures_of
from simulation.deaths import events_of
from simulation.trying import trial

WORKERS, IMAGES, BATCH_SIZE = 4, 70, 4
LENGTH = 5  # steps of an epoch; 70 images are 4 full steps of 16, and 6 are left for the last one
STEPS = 2 * LENGTH
WHOLE_S = 0.25
MOMENTS = [round(WHOLE_S * number / 6, 5) for number in range(6)]
FREE = [
    "mixed(replicas=2)",
    "mixed(replicas=3, servers=2)",
    "mixed(replicas=2, servers=2, consistency=bounded_staleness(s=1))",
    "mixed(replicas=3, consistency=softsync)",
    "mixed(replicas=2, consistency=backup(spare=1))",
    "mixed(replicas=3, inside=synchronous(collective=ring))",
]


def job_of(spec: str = "mixed(replicas=2, servers=2)", fault_tolerance: FaultTolerance | None = None) -> Job:
    job = make_job(spec, WORKERS, dataset=blobs(IMAGES), batch_size=BATCH_SIZE)
    return job if fault_tolerance is None else replace(job, fault_tolerance=fault_tolerance)


def steps_by(events: list[Event], worker: int) -> list[int]:
    return [event.step for event in events if isinstance(event, WorkerProgress) and event.worker == worker]


def gradients(events: list[Event]) -> int:
    """Counts those that groups pushed and servers applied, on both shards."""
    return sum(result_of(events)["staleness"]["histogram"].values())


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("at_s", MOMENTS)
def test_a_group_goes_on_without_a_member_and_sees_all_its_images(rank: int, at_s: float) -> None:
    """Rank 2 speaks for its group; what it had pushed counts once on both servers."""
    events = events_of(job_of(), [(at_s, rank)])
    result = result_of(events)
    assert isinstance(events[-1], RunEnded)
    assert (events[-1].outcome, result["steps"], result["images_not_seen"]) == ("done", STEPS, 0)
    assert gradients(events) == 2 * 2 * STEPS
    assert all(steps_by(events, worker)[-1] == STEPS for worker in range(WORKERS) if worker != rank)


@pytest.mark.parametrize("pause_s", [0.0005, 0.03])
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("at_s", MOMENTS[::2])
def test_a_successor_is_let_in_between_two_steps(rank: int, pause_s: float, at_s: float) -> None:
    events = events_of(job_of(), [(at_s, rank)], [(at_s + pause_s, rank)])
    result = result_of(events)
    assert (result["steps"], result["images_not_seen"]) == (STEPS, 0)
    assert gradients(events) == 2 * 2 * STEPS
    if at_s + pause_s < WHOLE_S / 2:
        assert result["workers_joined"] == 1
        assert steps_by(events, rank)[-1] == STEPS


@pytest.mark.parametrize("at_s", MOMENTS[1::2])
def test_a_group_that_all_are_lost_of_is_as_a_lost_worker(at_s: float) -> None:
    """The other group goes on; a successor of either takes the steps that are left of both."""
    events = events_of(job_of(), [(at_s, 2), (at_s + 0.001, 3)])
    result = result_of(events)
    done = gradients(events) / 2 - STEPS
    assert result["workers_lost"] in (0, 2)
    assert (done == STEPS) == (result["images_not_seen"] == 0)
    back = events_of(job_of(), [(at_s, 2), (at_s + 0.001, 3)], [(at_s + 0.01, 3)])
    if result_of(back)["workers_joined"]:
        assert (gradients(back), result_of(back)["images_not_seen"]) == (2 * 2 * STEPS, 0)


def test_rescaling_leaves_the_share_of_a_lost_member_out() -> None:
    events = events_of(job_of(fault_tolerance=FaultTolerance(rescale=True)), [(0.06, 3)])
    missing = result_of(events)["images_not_seen"]
    assert 0 < missing < 2 * (4 * BATCH_SIZE + 1)
    assert gradients(events) == 2 * 2 * STEPS


@pytest.mark.parametrize("spec", FREE)
def test_every_gradient_counts_once_under_many_seeds(spec: str) -> None:
    assert failures_of(trial(spec, workers=6, steps=6), range(12)) == ()


def test_a_step_that_a_new_speaker_leaves_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    meet = ServersOfGroup.meet

    def hasty(self: ServersOfGroup, group: Communicator) -> None:
        again = self.group is not None
        meet(self, group)
        self.reached += again

    monkeypatch.setattr(ServersOfGroup, "meet", hasty)
    assert try_seeds(trial("mixed(replicas=3)", workers=6, steps=6), range(8)).failures


def test_a_step_that_counts_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = GroupServer._begin_to_speak

    def forgetful(self: GroupServer, name: int, source: int) -> list[Reply]:
        row = self._session._of_rank[name]
        row.steps = max(0, row.steps - 1)
        return begin(self, name, source)

    monkeypatch.setattr(GroupServer, "_begin_to_speak", forgetful)
    assert try_seeds(trial("mixed(replicas=3)", workers=6, steps=6), range(8)).failures


def test_all_groups_go_on_and_declare_it() -> None:
    assert all(
        strategy(spec).faults(4).continues and strategy(spec).faults(4).leader for spec in FREE + ROUNDS
    )
    assert strategy(FREE[4]).faults(4).spares == 1


# Groups that push rounds: members are in different places, of which servers know nothing.

_ROUNDS = 3
ROUNDS = [
    f"mixed(replicas=3, servers=2, inside=local_sgd(steps={_ROUNDS}))",
    f"mixed(replicas=3, consistency=synchronous, inside=local_sgd(steps={_ROUNDS}, optimizer_state=average))",
    "mixed(replicas=2, servers=2, consistency=bounded_staleness(s=1), inside=local_sgd(steps=2))",
    "mixed(replicas=4, inside=hierarchical_averaging(group=2, steps=1, steps_between=3))",
]


@pytest.mark.parametrize("spec", ROUNDS)
def test_every_round_counts_once_under_many_seeds(spec: str) -> None:
    """7 steps are no whole number of rounds: the last, which is shorter, may be the one that breaks."""
    assert failures_of(trial(spec, workers=6, steps=7), range(8)) == ()


@pytest.mark.parametrize("back_s", [None, 0.03])
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("at_s", MOMENTS[1:5])
def test_a_group_that_pushes_rounds_goes_on_without_a_member(
    rank: int, at_s: float, back_s: float | None
) -> None:
    """Rank 2 speaks for its group. Of the images, only those of the round in which it was lost are missed."""
    spec = f"mixed(replicas=2, servers=2, inside=local_sgd(steps={_ROUNDS}))"
    successors = [] if back_s is None else [(at_s + back_s, rank)]
    events = events_of(job_of(spec), [(at_s, rank)], successors)
    result = result_of(events)
    assert isinstance(events[-1], RunEnded)
    assert (events[-1].outcome, result["steps"], result["workers_lost"]) == ("done", STEPS, 1)
    assert result["workers_joined"] == len(successors)
    assert gradients(events) == 2 * 2 * -(-STEPS // _ROUNDS)
    assert 0 < result["images_not_seen"] <= (_ROUNDS + bool(successors)) * (BATCH_SIZE + 1)


class Last:
    """The parameters with which servers let a run go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        inner = GroupServer.on_message

        def on_message(server: GroupServer, source: int, message: Message) -> list[Reply]:
            replies = inner(server, source, message)
            for _, reply in replies:
                if reply.kind is Kind.PARAMETERS and reply.tensor is not None:
                    self.values = reply.tensor.clone()
            return replies

        monkeypatch.setattr(GroupServer, "on_message", on_message)


def moved(exact: ExactGradients, members: Sequence[int], number: int) -> Tensor:
    """What a group of these members has moved by in a round: the mean of the sums of their gradients."""
    steps = range(number * _ROUNDS, (number + 1) * _ROUNDS)
    sums = [torch.stack([exact(worker, step) for step in steps]).sum(0) for worker in members]
    return torch.stack(sums).sum(0) / len(members)


KILLS = [(3, at_ms) for at_ms in range(1, 240, 7)] + [(4, 50 + half_ms / 2) for half_ms in range(20)]


def test_what_a_lost_member_did_in_its_round_is_gone_and_nothing_else_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks 3 to 5 are the second group, for which 3 speaks; the mean reaches one after the other; sums are exact."""
    last = Last(monkeypatch)
    spec = f"mixed(replicas=3, inside=local_sgd(steps={_ROUNDS}, collective=binomial_tree))"
    tried = trial(spec, workers=6, steps=3 * _ROUNDS, step_time="constant(seconds=0.01)")
    exact = ExactGradients(tried.dry_run.stand_in.numbers, 6)
    first = sum(moved(exact, (0, 1, 2), number) for number in range(3))
    with_all: dict[tuple[int, float], int] = {}
    for rank, at_ms in KILLS:
        faults = parse_faults(f"kill(rank={rank}, at_s={at_ms / 1000})")
        play(replace(tried, faults=faults), 1, lambda event: None)
        left = [member for member in (3, 4, 5) if member != rank]
        ways = [(rounds, [(3, 4, 5)] * rounds + [left] * (3 - rounds)) for rounds in range(4)]
        # One that had not begun takes part in the first round with a copy of another's model, which counts once.
        ways += [(0, [[alone], left, left]) for alone in left]
        for rounds, there in ways:
            second = sum(moved(exact, ranks, number) for number, ranks in enumerate(there))
            if torch.equal(last.values, -(first + second)):
                with_all[rank, at_ms] = rounds
        assert (rank, at_ms) in with_all, f"rank {rank}, killed at {at_ms} ms"
    of_speaker, of_other = ([with_all[kill] for kill in KILLS if kill[0] == rank] for rank in (3, 4))
    assert (of_speaker, of_other) == (sorted(of_speaker), sorted(of_other))
    assert (set(of_speaker), set(of_other)) == ({0, 1, 2, 3}, {0, 1})


def test_movements_that_are_forgotten_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model begins its round anew."""
    met = Models._met

    def forgetful(self: Models, group: Communicator) -> None:
        again = group is not self.servers.group
        met(self, group)
        if again:
            self._flat.vector.copy_(self._read)

    monkeypatch.setattr(Models, "_met", forgetful)
    with pytest.raises(AssertionError, match="killed at"):
        test_what_a_lost_member_did_in_its_round_is_gone_and_nothing_else_is(monkeypatch)
