"""Workers that average models in rounds lose some of their number: the mean is theirs who are left."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn import functional

from conformance.jobs import blobs, cosine, make_job, perceptron, result_of
from polyrhythm.data.dealing import dealt, epoch_order
from polyrhythm.simulation.trials import play, try_seeds
from polyrhythm.strategies.averaging.rounds.rounds_worker import RoundsWorker
from polyrhythm.verification.invariant import Violation
from sample import failures_of
from simulation.deaths import BATCH_SIZE, IMAGES, LENGTH, STEPS, WORKERS, events_of
from simulation.trying import trial

ROUND = 4
WHOLE_S = 0.17  # a little less than a run takes
MOMENTS = [round(WHOLE_S * number / 8, 5) for number in range(8)]
IN_ROUND_TWO_S = 0.1  # during step 5 of workers that take 10, 13.7 and 17.4 ms a step
AVERAGING = [
    f"local_sgd(steps={ROUND})",
    "post_local_sgd(after=4, steps=2)",
    "hierarchical_averaging(group=2, steps=1, steps_between=3)",
    "parallel_sgd",
    "bmuf(steps=2, nesterov=True, optimizer_state=average)",
    "slowmo(steps=2, optimizer_state=reset)",
    "scaffold(steps=2, optimizer_state=average)",
    "admm(steps=2)",
    f"diloco(steps={ROUND})",
    f"diloco(steps={ROUND}, fragments=2, delay=1, mixing=0.5)",
    f"diloco(steps={ROUND}, delay=3)",
]


def job_of(spec, optimizer="sgd"):
    return make_job(spec, WORKERS, dataset=blobs(IMAGES), batch_size=BATCH_SIZE, optimizer=optimizer)


def trained(spec, kills, successors=(), optimizer="sgd"):
    """Runs a job; gives its events and its final parameters."""
    job, models = job_of(spec, optimizer), []

    def make():
        models.append(job.make_model())
        return models[-1]

    events = events_of(replace(job, make_model=make), kills, successors)
    return events, torch.cat([value.detach().flatten() for value in models[0].parameters()])


class Plain:
    """One worker of the reference, in plain torch."""

    def __init__(self, job):
        torch.manual_seed(job.learning.seed)
        self.job = job
        self.model = perceptron()
        self.optimizer = job.learning.optimizer.create(self.model.parameters())

    def step(self, number, place, present, term):
        data = self.job.dataset.train
        order = epoch_order(IMAGES, number // LENGTH, self.job.learning.seed)
        seen = dealt(order, number % LENGTH, place, present, WORKERS * BATCH_SIZE)
        for group in self.optimizer.param_groups:
            group["lr"] = cosine(self.job, number, STEPS)
        self.optimizer.zero_grad()
        functional.cross_entropy(self.model(data.images(seen)), data.labels[seen]).backward()
        gradient = torch.cat([value.grad.flatten() for value in self.model.parameters()])
        added, start = term(self.vector, gradient), 0
        for value in self.model.parameters():
            value.grad += added[start : start + value.numel()].view_as(value)
            start += value.numel()
        self.optimizer.step()

    @property
    def vector(self):
        return torch.cat([value.detach().flatten() for value in self.model.parameters()])

    def put(self, vector):
        torch.nn.utils.vector_to_parameters(vector.clone(), self.model.parameters())


class Mean:
    """The rule of a round in plain torch: no term, and the mean of those models that count."""

    def __init__(self, vector):
        self.zeros = torch.zeros_like(vector)
        self.start = vector.clone()

    def term(self, worker, vector, gradient):
        return self.zeros

    def end_round(self, vectors, counting):
        self.start = torch.stack([vectors[worker] for worker in counting]).mean(0)
        return self.start


class Duals(Mean):
    """ADMM's."""

    def __init__(self, vector):
        super().__init__(vector)
        self.duals = [self.zeros] * WORKERS

    def term(self, worker, vector, gradient):
        return RHO * (vector - self.start + self.duals[worker])

    def end_round(self, vectors, counting):
        self.start = torch.stack([vectors[worker] + self.duals[worker] for worker in counting]).mean(0)
        for worker, dual in enumerate(self.duals):
            moved = dual + vectors[worker] - self.start
            self.duals[worker] = moved if worker in counting else self.zeros
        assert sum(self.duals).abs().max() < 1e-5, "also after the loss of one"
        return self.start


class Variates(Mean):
    """SCAFFOLD's."""

    def __init__(self, vector):
        super().__init__(vector)
        self.own, self.common, self.seen = [self.zeros] * WORKERS, self.zeros, [[] for _ in range(WORKERS)]

    def term(self, worker, vector, gradient):
        self.seen[worker].append(gradient)
        return self.common - self.own[worker]

    def end_round(self, vectors, counting):
        for worker, seen in enumerate(self.seen):
            self.own[worker] = torch.stack(seen).mean(0) if worker in counting else self.zeros
        self.common = torch.stack([self.own[worker] for worker in counting]).mean(0)
        self.seen = [[] for _ in range(WORKERS)]
        return super().end_round(vectors, counting)


RHO = 0.5
RULES = {"scaffold": Variates, "admm": Duals}


class Outer:
    """DiLoCo's outer optimizer in plain torch; without one, the mean is the model."""

    def __init__(self, vector, used):
        self.model = torch.nn.Parameter(vector.clone())
        self.optimizer = torch.optim.SGD([self.model], lr=0.7, momentum=0.9, nesterov=True) if used else None

    def step(self, mean):
        if self.optimizer is None:
            return mean
        self.model.grad = self.model.detach() - mean
        self.optimizer.step()
        return self.model.detach().clone()


def reference(job, *, comes_back):
    """Trains as a run in which worker 1 is lost in the second round, and comes back before its end or never."""
    workers = [Plain(job) for _ in range(WORKERS)]
    outer = Outer(workers[0].vector, used="diloco" in str(job.strategy))
    rule = RULES.get(job.strategy.name, Mean)(workers[0].vector)
    there, counting = [0, 1, 2], [0, 1, 2]
    for number in range(STEPS):
        if number == 2 * ROUND - 1:  # the second round's mean, in which worker 1's replacement comes in
            counting = [0, 2]
        if number == 2 * ROUND and not comes_back:
            there = counting = [0, 2]
        for place, worker in enumerate(there):
            workers[worker].step(number, place, len(there), partial(rule.term, worker))
        if number == 2 * ROUND - 1 and comes_back:
            workers[1] = copy.deepcopy(workers[0])
        if (number + 1) % ROUND == 0 or number + 1 == STEPS:
            mean = outer.step(rule.end_round([worker.vector for worker in workers], counting))
            for worker in workers:
                worker.put(mean)
            counting = there
    return workers[0].vector


@pytest.mark.parametrize("comes_back", [False, True])
@pytest.mark.parametrize("optimizer", ["sgd(lr=0.1, momentum=0.9)", "adamw(lr=0.01)"])
@pytest.mark.parametrize(
    "spec",
    [
        f"local_sgd(steps={ROUND})",
        f"diloco(steps={ROUND})",
        f"scaffold(steps={ROUND})",
        f"admm(steps={ROUND}, rho={RHO})",
    ],
)
def test_recovery_takes_the_way_of_plain_torch(spec, optimizer, comes_back):
    """What the lost worker did in its round is gone; its successor counts from the mean on."""
    successors = [(IN_ROUND_TWO_S + 0.002, 1)] if comes_back else []
    events, vector = trained(spec, [(IN_ROUND_TWO_S, 1)], successors, optimizer)
    result = result_of(events)
    assert (result["steps"], result["workers_lost"], result["workers_joined"]) == (STEPS, 1, int(comes_back))
    plain = reference(job_of(spec, optimizer), comes_back=comes_back)
    assert torch.allclose(vector, plain, atol=1e-6)
    shares = [len(dealt(torch.arange(IMAGES), step % LENGTH, 1, 3, 12)) for step in range(ROUND, 2 * ROUND)]
    assert result["images_not_seen"] == sum(shares)


@pytest.mark.parametrize("pause_s", [None, 0.0005, 0.03])
@pytest.mark.parametrize("spec", AVERAGING)
def test_the_others_go_on_whenever_a_worker_dies(spec, pause_s):
    for at_s in MOMENTS:
        successors = [(at_s + pause_s, 1)] if pause_s is not None and at_s + pause_s < WHOLE_S else []
        events, vector = trained(spec, [(at_s, 1)], successors)
        assert (events[-1].outcome, result_of(events)["steps"]) == ("done", STEPS)
        assert torch.isfinite(vector).all()


def test_all_but_the_leader_may_be_lost_and_come_back():
    kills = [(0.03, 1), (0.031, 2), (0.06, 1), (0.09, 2)]
    events, _ = trained("local_sgd(steps=2)", kills, [(0.05, 1), (0.031, 2), (0.0601, 1)])
    assert (events[-1].outcome, result_of(events)["steps"]) == ("done", STEPS)
    assert result_of(events)["workers_lost"] >= 3
    assert result_of(events)["workers_joined"] >= 2


@pytest.mark.parametrize(
    "spec", ["local_sgd(steps=4)", "post_local_sgd(after=2, steps=3)", "local_sgd(steps=1)"]
)
def test_every_update_counts_once_under_many_seeds(spec):
    assert failures_of(trial(spec, steps=8), range(100, 112)) == ()


@pytest.mark.parametrize(
    ("spec", "drawn"), [("post_local_sgd(after=4, steps=2)", [1009, 1145]), ("local_sgd(steps=1)", [1177])]
)
def test_the_last_mean_of_gradients_and_of_models_is_handed_to_who_lacks_it(spec, drawn):
    """Found by drawn faults: local steps begin on one worker, or the run ends, while another lacks a mean."""
    assert try_seeds(trial(spec, workers=4, steps=8), drawn).failures == ()


def test_a_model_that_is_a_copy_of_another_and_counts_is_noticed(monkeypatch):
    kill = "kill(rank=1, at_s=0.05, restart_after_s=0.001)"
    tried = trial("local_sgd(steps=4)", steps=8, faults=kill)
    play(tried, 0, lambda event: None)
    load_fields = RoundsWorker.load_fields

    def counted(self, fields, state):
        load_fields(self, fields, state)
        self._weight = 1.0

    monkeypatch.setattr(RoundsWorker, "load_fields", counted)
    with pytest.raises(Violation, match="the sum of all workers' mean gradients"):
        play(tried, 0, lambda event: None)


@pytest.mark.parametrize("options", ["steps=4, fragments=2, delay=1, mixing=0.5", "steps=4, delay=3"])
def test_streaming_runs_end_under_many_seeds_of_faults(options):
    """Workers, the leader among them, die and come back while means are on their way; nothing stands still."""
    assert failures_of(trial(f"diloco({options})", steps=8), range(12)) == ()
