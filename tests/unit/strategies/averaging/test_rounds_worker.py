"""Rounds of local steps, worker by worker: what a mean conserves, who hears of a stop, what a checkpoint holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from conformance.jobs import (
    make_job,
    resumed,
    sha256_of,
    simulated,
    stop_at,
    strategy,
    uneven,
    vector_of,
    with_batch_norm,
)
from polyrhythm.communication.transports.simulated.communicator import SimulatedCluster
from polyrhythm.communication.transports.simulated.network import ConstantNetwork
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime
from polyrhythm.errors import RequestError
from polyrhythm.simulation.run import ConstantCluster
from polyrhythm.simulation.trials import try_seeds
from polyrhythm.strategies.averaging.rounds.model_mean import ModelMean
from polyrhythm.strategies.role_assignment import roles_in_order
from polyrhythm.strategies.worker_part import Step, WorkerSetting
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizer_plan import OptimizerPlan
from sample import failures_of
from simulation.trying import trial

WORKERS = 3
RATE = 0.5
UNEVEN = ConstantCluster(step_s=uneven)


def together(spec, play, workers=WORKERS):
    """Runs `play(part, flat, worker)` on every worker in virtual time; gives their vectors in the end."""
    time = VirtualTime()
    cluster = SimulatedCluster(time, ConstantNetwork(time), workers)
    vectors = {}

    def run(rank):
        network = cluster.communicator(rank)
        model = nn.Linear(4, 1, bias=False)
        model.weight.data = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
        flat = FlatParameters(model)
        plan = OptimizerPlan.of(torch.optim.SGD(model.parameters(), lr=RATE), flat)
        setting = WorkerSetting(network, network, roles_in_order(workers, 0), flat, plan)
        play(strategy(spec).worker(setting), flat, rank)
        vectors[rank] = flat.vector.clone()

    for rank in range(workers):
        time.spawn(f"worker {rank}", lambda rank=rank: run(rank))
    time.run()
    return [vectors[rank] for rank in range(workers)]


def take(part, flat, number, gradient, *, stop=False, weight=1.0):
    flat.gradients.fill_(gradient)
    step = Step(number, weight, stop)
    part.begin(step)
    return part.gradients_ready(step, RATE)


def test_a_mean_changes_no_mean_and_makes_all_equal():
    before = {}

    def play(part, flat, worker):
        part.start(0)
        take(part, flat, 0, 6.0 * worker)
        before[worker] = flat.vector.clone()
        take(part, flat, 1, 0.0)

    vectors = together("local_sgd(steps=2)", play)
    assert torch.equal(before[1], torch.tensor([-2.0, -1.0, 0.0, 1.0]))  # 1 - 0.5 * 6 …
    assert all(torch.equal(vector, (before[0] + before[1] + before[2]) / 3) for vector in vectors)
    assert vectors[0].tolist() == [-2.0, -1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    "spec",
    [
        "local_sgd(steps=2)",
        "bmuf(steps=2, nesterov=True)",
        "slowmo(steps=2)",
        "diloco(steps=2)",
        "scaffold(steps=2)",
        "admm(steps=2)",
        "parallel_sgd",
    ],
)
def test_zero_gradients_change_nothing(spec):
    def play(part, flat, worker):
        part.start(0)
        for number in range(5):
            take(part, flat, number, 0.0)
        part.end()

    for vector in together(spec, play, 2):
        assert vector.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_an_empty_batch_is_no_step_and_its_model_still_counts():
    def play(part, flat, worker):
        part.start(0)
        take(part, flat, 0, 8.0, weight=float(worker))
        part.end()
        assert part.staleness[0] == worker

    for vector in together("local_sgd(steps=1)", play, 2):
        assert vector.tolist() == [-1.0, 0.0, 1.0, 2.0]  # halfway between the start and a step of 4


def test_who_wants_to_stop_is_heard_at_a_mean_and_at_a_look():
    heard = {}

    def play(part, flat, worker):
        part.start(0)
        at_a_mean = [take(part, flat, number, 0.0, stop=worker == 2 and number == 1) for number in range(4)]
        heard[worker] = at_a_mean

    together("local_sgd(steps=4)", play)
    assert heard == {worker: [False, False, False, True] for worker in range(WORKERS)}

    def look(part, flat, worker):
        part.start(0)
        take(part, flat, 0, 0.0, stop=worker == 1)
        part.present()
        heard[worker] = take(part, flat, 1, 0.0)

    together("parallel_sgd", look)
    assert heard == dict.fromkeys(range(WORKERS), True)


def test_what_is_presented_is_the_mean_and_changes_nothing():
    def play(part, flat, worker):
        part.start(0)
        assert part.present() is None  # all are equal
        take(part, flat, 0, 2.0 * worker)
        own = flat.vector.clone()
        assert part.present().tolist() == [0.0, 1.0, 2.0, 3.0]
        assert torch.equal(flat.vector, own)
        take(part, flat, 1, 0.0)
        assert part.present() is None

    together("local_sgd(steps=2)", play)


def test_nesterov_blocks_begin_ahead_of_the_model_that_is_presented_and_left():
    def play(part, flat, worker):
        part.start(0)
        take(part, flat, 0, 2.0)  # everyone: minus 1
        assert part.present().tolist() == [0.0, 1.0, 2.0, 3.0]
        assert flat.vector.tolist() == [-0.5, 0.5, 1.5, 2.5]
        part.end()

    for vector in together("bmuf(steps=1, block_momentum=0.5, nesterov=True)", play, 2):
        assert vector.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_slowmo_with_a_rate_of_nothing_goes_to_the_mean():
    def play(part, flat, worker):
        part.start(0)
        flat.gradients.fill_(0.0)
        flat.vector.add_(worker)  # as if it had moved
        part.begin(Step(0))
        part.gradients_ready(Step(0), 0.0)

    for vector in together("slowmo(steps=1)", play, 2):
        assert vector.tolist() == [1.5, 2.5, 3.5, 4.5]


@pytest.mark.parametrize(
    "spec",
    [
        "local_sgd(steps=3, optimizer_state=average)",
        "post_local_sgd(after=4, steps=3)",
        "hierarchical_averaging(steps=2, steps_between=4)",
        "slowmo(steps=3)",
        "diloco(steps=3)",
    ],
)
@pytest.mark.parametrize("stop_s", [0.044, 0.079])
def test_a_resumed_run_has_the_same_bits(spec, stop_s, tmp_path):
    job = make_job(spec, WORKERS)
    kept = replace(job, checkpointing=replace(job.checkpointing, folder=tmp_path))
    stopped = simulated(kept, stop_at(stop_s))
    assert stopped.events[-1].outcome == "interrupted"
    assert 0 < stopped.checkpoint_steps[-1] < 10
    again = simulated(resumed(kept), UNEVEN)
    assert again.sha256 == simulated(job, UNEVEN).sha256


def test_batch_norm_statistics_stay_each_workers_own():
    trained = simulated(make_job("local_sgd(steps=1)", WORKERS, model=with_batch_norm), UNEVEN)
    vectors = [vector_of(model) for model in trained.models]
    assert all(torch.equal(vectors[0], vector) for vector in vectors)
    assert trained.sha256 == sha256_of(vectors[0])
    means = [dict(model.named_buffers())["1.running_mean"] for model in trained.models]
    assert not torch.equal(means[0], means[1])


@pytest.mark.parametrize(
    "spec",
    [
        "local_sgd(steps=2)",
        "hierarchical_averaging(group=2, steps=2, steps_between=4)",
        "post_local_sgd(after=3, steps=2)",
        "post_local_sgd(after=0.5, steps=3)",
        "diloco(steps=2)",
    ],
)
def test_invariants_hold_whatever_goes_wrong(spec):
    assert failures_of(trial(spec, workers=3, steps=10), range(20)) == ()


def test_a_mean_that_leaves_somebody_out_is_noticed(monkeypatch):
    def halved(self, stop, weight=1.0):
        found = take_all(self, stop, weight)
        return found._replace(vector=found.vector * 0.5)

    take_all = ModelMean.take
    monkeypatch.setattr(ModelMean, "take", halved)
    tried = try_seeds(trial("local_sgd(steps=2)", workers=3, steps=4), range(1))
    assert "the sum of all workers' mean gradients" in tried.failures[0].what


@pytest.mark.parametrize(
    ("spec", "workers", "words"),
    [
        ("local_sgd(steps=0)", 2, "steps should be greater than or equal to 1"),
        ("diloco(outer=none)", 2, "diloco needs an outer optimizer: give outer=sgd"),
        ("diloco(outer=sdg)", 2, "unknown outer optimizer 'sdg'"),
        ("hierarchical_averaging(group=4)", 3, "group=4 is larger than all 3 workers: give a smaller group"),
        ("hierarchical_averaging(steps=8)", 2, "no mean is of a group alone: give a larger steps_between"),
        ("post_local_sgd(after=2.5)", 2, "neither a share of the run nor a whole number of steps"),
        ("bmuf(block_momentum=1)", 2, "block_momentum should be less than 1"),
        ("local_sgd(optimizer_state=forget)", 2, "should be 'keep', 'average' or 'reset'"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(spec, workers, words):
    with pytest.raises(RequestError) as caught:
        strategy(spec).check(workers)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_share_of_a_run_of_unknown_length_is_refused():
    with pytest.raises(
        RequestError, match=r"after=0\.5 is a share of the run, and the length of your own loop"
    ):
        strategy("post_local_sgd(after=0.5)").first_local_step(None)
    assert strategy("post_local_sgd(after=0)").first_local_step(None) == 0
