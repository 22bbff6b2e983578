"""Decoupled DiLoCo against its rule in plain torch."""

import pytest
import torch

from conformance.jobs import blobs, cosine, gradient, make_job, simulated, uneven, vector_of
from polyrhythm.events import Notice, WorkerProgress
from polyrhythm.simulation.run import ConstantCluster
from polyrhythm.training.flat_parameters import shards
from tolerances import REORDERED

UNEVEN = ConstantCluster(step_s=uneven)
PERIOD, RATE, MOMENTUM = 4, 0.5, 0.7
OUTER = f"sgd(lr={RATE}, momentum={MOMENTUM}, nesterov=true)"


class Fragment:
    """What a server holds of a fragment, by the paper's rule."""

    def __init__(self, values, quorum):
        self.values, self.quorum, self.momentum, self.held = values.clone(), quorum, None, []

    def decide(self, present):
        if self.held and len({worker for worker, _, _ in self.held}) >= min(self.quorum, present):
            changes, weights = {}, {}
            for worker, change, weight in self.held:  # a learner ahead of the others has pushed several
                changes[worker] = changes.get(worker, 0) + change
                weights[worker] = weights.get(worker, 0) + weight
            mean = sum(weights[worker] * changes[worker] for worker in changes) / sum(weights.values())
            self.momentum = mean if self.momentum is None else MOMENTUM * self.momentum + mean
            self.values = self.values - RATE * (mean + MOMENTUM * self.momentum)
            self.held = []


def by_hand(job, steps, quorum, servers):
    """Plays the rule, a learner's step at a time, in the order in which the steps end; gives the servers' model."""
    torch.manual_seed(job.learning.seed)
    first = vector_of(job.make_model())
    places = shards(len(first), servers)
    fragments = [Fragment(first[place], quorum) for place in places]
    own, base = ([first.clone() for _ in range(job.workers)] for _ in range(2))
    images, taken = ([[0] * servers for _ in range(job.workers)] for _ in range(2))
    asked = [{} for _ in range(job.workers)]
    waiting = [set() for _ in range(job.workers)]
    present = set(range(job.workers))

    def take(worker):
        for number, merged in asked[worker].items():
            if merged is not None:
                place = places[number]
                own[worker][place] += merged - base[worker][place]
                base[worker][place] = merged
                waiting[worker].remove(number)
        asked[worker] = {}

    def push(worker, number):
        if taken[worker][number]:
            place = places[number]
            weight = images[worker][number] ** 2 / taken[worker][number]
            fragments[number].held.append((worker, base[worker][place] - own[worker][place], weight))
            base[worker][place] = own[worker][place]
            images[worker][number] = taken[worker][number] = 0
            waiting[worker].add(number)
            fragments[number].decide(len(present))

    def depart(worker):
        take(worker)
        for number in range(servers):
            push(worker, number)
        present.remove(worker)
        for fragment in fragments:
            fragment.decide(len(present))

    ends = sorted(
        ((step + 1) * uneven(worker), worker, step) for worker in range(job.workers) for step in range(steps)
    )
    for _, worker, step in ends:
        found = gradient(job, own[worker], worker, step)
        take(worker)
        own[worker] = own[worker] - cosine(job, step, steps) * found
        for number in range(servers):
            images[worker][number] += 1
            taken[worker][number] += 1
            if (step + 1 + number * PERIOD // servers) % PERIOD == 0:
                push(worker, number)
        asked[worker] = {
            number: None
            if worker in {other for other, _, _ in fragments[number].held}
            else fragments[number].values.clone()
            for number in waiting[worker]
        }
        if step + 1 == steps and worker > 0:
            depart(worker)
    depart(0)  # after the others, for which worker 0 waits at the end of a run
    return torch.cat([fragment.values for fragment in fragments])


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize(("workers", "quorum"), [(2, 1), (2, 2), (3, 2), (3, 3)])
def test_learners_by_hand(workers, quorum, servers):
    steps = 11
    spec = f"decoupled_diloco(steps={PERIOD}, quorum={quorum}, servers={servers}, outer={OUTER})"
    job = make_job(
        spec,
        workers,
        dtype=torch.float64,
        optimizer="sgd(lr=0.2, momentum=0)",
        dataset=blobs(train=4 * workers * steps),
        epochs=1,
    )
    trained = simulated(job, UNEVEN)
    expected = by_hand(job, steps, quorum, servers)
    torch.testing.assert_close(vector_of(trained.models[0]), expected, **REORDERED)


def test_learners_do_not_wait_for_a_slow_one_and_every_step_counts():
    """Quick learners push changes before earlier ones are merged, which waits for the slow one."""
    count, seconds = 40, [0.01, 0.01, 0.035]
    job = make_job(
        "decoupled_diloco(steps=2)", 3, dataset=blobs(train=4 * 3 * count), epochs=1, optimizer="sgd(lr=0.1)"
    )
    trained = simulated(job, ConstantCluster(step_s=seconds.__getitem__))
    ends = {event.worker: event.time_s for event in trained.events if isinstance(event, WorkerProgress)}
    for worker in range(3):
        assert ends[worker] < 1.1 * count * seconds[worker]
    assert not [
        event.text for event in trained.events if isinstance(event, Notice) and "refused" in event.text
    ]
    assert sum(trained.result["staleness"]["histogram"].values()) == 2 * 3 * count
