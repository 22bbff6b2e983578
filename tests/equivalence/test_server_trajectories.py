"""Whole runs of asynchronous servers, replayed from nothing but the order of arrivals by each paper's rule."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from conformance.jobs import blobs, make_job, simulated, uneven, vector_of
from equivalence.arrivals import Workers, note_arrivals
from polyrhythm.communication.message import Kind
from polyrhythm.simulation.run import ConstantCluster
from polyrhythm.strategies.parameter_server.serving.session import ServerSession

SERVERS = 2
OPTIMIZERS = [
    "sgd(lr=0.05, momentum=0)",
    "sgd(lr=0.02, momentum=0.8, nesterov=True, weight_decay=0.01)",
    "adam(lr=0.01)",
]


@pytest.fixture
def arrivals(monkeypatch):
    return note_arrivals(monkeypatch, ServerSession)


def one_that_limps(seed=0):
    """Gives step times of which some are much longer than others, and no two meet."""
    generator = torch.Generator().manual_seed(seed)

    def step_s(worker):
        return uneven(worker) * float(0.4 + 3 * torch.rand((), generator=generator) ** 3)

    return ConstantCluster(step_s=step_s)


class Servers:
    """Shards, each with an optimizer of torch's own; every gradient is an update, and whoever pushes is answered."""

    def __init__(self, job, servers=SERVERS):
        self.workers = Workers(job, servers)
        self.shards = [nn.Parameter(self.workers.start[cut].clone()) for cut in self.workers.cuts]
        self.optimizers = [job.learning.optimizer.create([shard]) for shard in self.shards]
        self.versions = [0] * servers
        self.reads = [[0] * servers for _ in range(job.workers)]
        self.staleness = Counter()
        self.gone = [set() for _ in range(servers)]

    def replay(self, arrivals):
        """Takes all that came; gives the parameters in the end."""
        for server, rank, kind, step, final in arrivals:
            if kind is Kind.PUSH:
                self.push(server, rank, step)
            elif kind is Kind.PULL and not final:
                self.pull(server, rank, step)
            elif kind is Kind.LEAVE and rank not in self.gone[server]:
                self.gone[server].add(rank)
                self.leave(server, rank)
        return torch.cat([shard.detach() for shard in self.shards])

    def gradient(self, server, rank, step):
        return self.workers.gradient(rank, step)[self.workers.cuts[server]]

    def stale(self, server, rank):
        return self.versions[server] - self.reads[rank][server]

    def update(self, server, gradient, rate, ages):
        """Takes one step of the optimizer."""
        self.shards[server].grad = gradient
        self.optimizers[server].param_groups[0]["lr"] = rate
        self.optimizers[server].step()
        self.versions[server] += 1
        self.staleness.update(ages)

    def answer(self, server, rank):
        self.workers.copies[rank][self.workers.cuts[server]] = self.shards[server].detach()
        self.reads[rank][server] = self.versions[server]

    def push(self, server, rank, step):
        gradient = self.gradient(server, rank, step)
        if self.workers.samples(rank, step):
            self.apply(server, rank, step, gradient)
        self.answer(server, rank)

    def apply(self, server, rank, step, gradient):
        raise NotImplementedError

    def pull(self, server, rank, step):
        self.answer(server, rank)

    def leave(self, server, rank):
        pass


class DelayCompensated(Servers):
    """w <- w - lr (g + l g g (w - w_bak)), l = l0 or l0 / sqrt(MS + eps), MS <- m MS + (1 - m) g g before its use."""

    def __init__(self, job, variant, lambda0, m):
        super().__init__(job)
        self.variant, self.lambda0, self.m = variant, lambda0, m
        self.squares = {}

    def whose(self, server, rank):
        """There is an MS for every worker."""
        return server, rank

    def apply(self, server, rank, step, gradient):
        bak = self.workers.copies[rank][self.workers.cuts[server]]
        strength = torch.full_like(gradient, self.lambda0)
        if self.variant == "a":
            whose = self.whose(server, rank)
            kept = self.squares.get(whose, torch.zeros_like(gradient))
            self.squares[whose] = kept = self.m * kept + (1 - self.m) * gradient**2
            strength = self.lambda0 / torch.sqrt(kept + 1e-7)
        moved = self.shards[server].detach() - bak
        corrected = gradient + strength * gradient**2 * moved
        self.update(server, corrected, self.workers.rate(step), [self.stale(server, rank)])


class StalenessAware(Servers):
    """w <- w - (lr / tau) g, and the whole lr where tau is 0."""

    def apply(self, server, rank, step, gradient):
        age = self.stale(server, rank)
        self.update(server, gradient, self.workers.rate(step) / max(1, age), [age])


class Softsync(Servers):
    """w <- w - (1 / c) sum_l lr(tau_l) g_l over the next c gradients, c = floor(N / n); samples weigh alike."""

    def __init__(self, job, n, damped):
        super().__init__(job)
        self.c, self.damped = job.workers // n, damped
        self.held = [[] for _ in self.shards]

    def push(self, server, rank, step):
        gradient = self.gradient(server, rank, step)
        held = self.held[server]
        held.append((rank, self.workers.samples(rank, step), self.reads[rank][server], step, gradient))
        if len(held) == self.c:
            self.take_held(server)
        self.answer(server, rank)

    def leave(self, server, rank):
        if len(self.gone[server]) == self.workers.job.workers:
            self.take_held(server)

    def take_held(self, server):
        held = sorted((entry for entry in self.held[server] if entry[1]), key=lambda entry: entry[0])
        self.held[server] = []
        if not held:
            return
        ages = [self.versions[server] - read for _, _, read, _, _ in held]
        damping = [1 / max(1, age) if self.damped else 1.0 for age in ages]
        shares = [samples * factor for (_, samples, _, _, _), factor in zip(held, damping, strict=True)]
        rate = sum(self.workers.rate(step) for _, _, _, step, _ in held) / len(held)
        gradient = sum(share * entry[4] for share, entry in zip(shares, held, strict=True)) / sum(shares)
        self.update(server, gradient, rate * sum(shares) / sum(entry[1] for entry in held), ages)


class BoundedStaleness(Servers):
    """A worker with c steps done goes on once c - s <= min c_j, with its own copy if that has all steps before c - s.

    Its own copy has its own updates, which an optimizer of its own makes.
    """

    def __init__(self, job, s, cached):
        super().__init__(job)
        self.s, self.cached = s, cached
        self.clocks = [[0] * job.workers for _ in self.shards]
        self.holds = [[-1] * job.workers for _ in self.shards]
        self.waiting = [set() for _ in self.shards]
        self.own = [nn.Parameter(copy) for copy in self.workers.copies]
        self.workers.copies = [own.data for own in self.own]
        self.local = [job.learning.optimizer.create([own]) for own in self.own]
        self.taken = [set() for _ in self.own]
        self.acknowledged = self.waited = 0

    def pull(self, server, rank, step):
        self.holds[server][rank] = -1
        self.waiting[server].add(rank)
        self.let_on(server)

    def push(self, server, rank, step):
        gradient = self.gradient(server, rank, step)
        if self.cached and step not in self.taken[rank]:
            self.take_own_step(rank, step)
        if self.workers.samples(rank, step):
            self.update(server, gradient, self.workers.rate(step), [self.stale(server, rank)])
            self.reads[rank][server] += 1  # its copy has its own update
        self.clocks[server][rank] = step + 1
        self.waiting[server].add(rank)
        self.let_on(server)
        self.waited += rank in self.waiting[server]

    def leave(self, server, rank):
        self.let_on(server)

    def take_own_step(self, rank, step):
        self.taken[rank].add(step)
        if self.workers.samples(rank, step):
            self.own[rank].grad = self.workers.gradient(rank, step)
            self.local[rank].param_groups[0]["lr"] = self.workers.rate(step)
            self.local[rank].step()

    def let_on(self, server):
        clocks, there = self.clocks[server], set(range(len(self.own))) - self.gone[server]
        slowest = min((clocks[rank] for rank in there), default=0)
        for rank in [rank for rank in self.waiting[server] if clocks[rank] - self.s <= slowest]:
            self.waiting[server].discard(rank)
            if self.cached and self.holds[server][rank] >= max(0, clocks[rank] - self.s):
                self.acknowledged += 1
            else:
                self.holds[server][rank] = slowest
                self.answer(server, rank)


class Backup(Servers):
    """w <- w - lr (mean of the first N gradients of the current step); what comes later is dropped."""

    def __init__(self, job, spare):
        super().__init__(job)
        self.needed = job.workers - spare
        self.step = [0] * len(self.shards)
        self.held = [{} for _ in self.shards]
        self.dropped = 0

    def push(self, server, rank, step):
        gradient = self.gradient(server, rank, step)
        if step < self.step[server]:
            self.dropped += 1
            self.answer(server, rank)
            return
        self.held[server][rank] = gradient
        self.take_held(server)

    def leave(self, server, rank):
        self.held[server].pop(rank, None)
        self.take_held(server)

    def take_held(self, server):
        held, there = self.held[server], self.workers.job.workers - len(self.gone[server])
        if not held or len(held) < min(self.needed, there):
            return
        step, ranks = self.step[server], sorted(held)
        samples = [self.workers.samples(rank, step) for rank in ranks]
        if sum(samples):
            mean = sum(count * held[rank] for count, rank in zip(samples, ranks, strict=True)) / sum(samples)
            self.update(server, mean, self.workers.rate(step), [0 for count in samples if count])
        self.held[server] = {}
        self.step[server] += 1
        for rank in ranks:
            self.answer(server, rank)


def played(spec, arrivals, around=None, workers=4, images=50, **learning):
    """Trains; gives the job, its parameters and its figures. The last step of an epoch has two empty batches."""
    job = make_job(spec, workers, dtype=torch.float64, dataset=blobs(train=images), **learning)
    trained = simulated(job, around or one_that_limps())
    assert len({arrival.server for arrival in arrivals}) == SERVERS
    return job, vector_of(trained.models[0]), trained.result


def assert_same(reference, arrivals, found, result):
    torch.testing.assert_close(reference.replay(arrivals), found, rtol=1e-12, atol=1e-14)
    told = result["staleness"]["histogram"]
    assert {int(age): count for age, count in told.items()} == dict(reference.staleness)
    assert (reference.workers.start - found).abs().max() > 0.02


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("variant", "lambda0", "m"), [("c", 0.5, 0.0), ("a", 2.0, 0.9), ("a", 1.0, 0.0)])
def test_dc_asgd(variant, lambda0, m, optimizer, arrivals):
    spec = f"dc_asgd(servers={SERVERS}, variant={variant}, lambda0={lambda0}, m={m})"
    job, found, result = played(spec, arrivals, optimizer=optimizer)
    assert_same(DelayCompensated(job, variant, lambda0, m), arrivals, found, result)
    if variant == "c":  # and the correction matters
        uncompensated = DelayCompensated(job, "c", 0.0, m).replay(arrivals)
        assert (uncompensated - found).abs().max() > 1e-5


def test_without_memory_dc_asgd_is_the_absolute_gradient(arrivals):
    """With m = 0 and epsilon next to 0: lambda_t g g = lambda0 |g|."""

    class Absolute(DelayCompensated):
        def apply(self, server, rank, step, gradient):
            moved = self.shards[server].detach() - self.workers.copies[rank][self.workers.cuts[server]]
            corrected = gradient + self.lambda0 * gradient.abs() * moved
            self.update(server, corrected, self.workers.rate(step), [self.stale(server, rank)])

    spec = f"dc_asgd(servers={SERVERS}, m=0.0, epsilon=1e-30)"
    job, found, result = played(spec, arrivals, optimizer=OPTIMIZERS[0])
    assert_same(Absolute(job, "a", 2.0, 0.0), arrivals, found, result)


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_staleness_aware(optimizer, schedule, arrivals):
    spec = f"staleness_aware(servers={SERVERS})"
    job, found, result = played(spec, arrivals, optimizer=optimizer, schedule=schedule)
    reference = StalenessAware(job)
    assert_same(reference, arrivals, found, result)
    assert max(reference.staleness) > 3


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("merge", ["plain", "staleness_aware"])
@pytest.mark.parametrize(("n", "workers", "images"), [(1, 4, 50), (2, 5, 63), (1, 3, 41)])
def test_softsync(n, workers, images, merge, optimizer, arrivals):
    """Of five with n = 2 an update takes two, and the last one is left over."""
    spec = f"softsync(servers={SERVERS}, n={n}, merge={merge})"
    job, found, result = played(spec, arrivals, workers=workers, images=images, optimizer=optimizer)
    assert_same(Softsync(job, n, merge == "staleness_aware"), arrivals, found, result)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("s", [1, 2])
def test_bounded_staleness(s, cached, optimizer, arrivals):
    spec = f"parameter_server(servers={SERVERS}, consistency=bounded_staleness(s={s}, cached_reads={cached}))"
    job, found, result = played(spec, arrivals, optimizer=optimizer)
    reference = BoundedStaleness(job, s, cached)
    assert_same(reference, arrivals, found, result)
    assert reference.waited > 0
    assert (reference.acknowledged > 0) == cached


def test_ssp_is_bounded_staleness_with_cached_reads(arrivals):
    job, found, result = played(f"ssp(servers={SERVERS}, s=2)", arrivals)
    assert_same(BoundedStaleness(job, 2, cached=True), arrivals, found, result)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("spare", "workers", "images"), [(1, 4, 50), (2, 5, 63)])
def test_backup_workers(spare, workers, images, optimizer, arrivals):
    """Each is the slowest now and then, and every server has first ones of its own."""
    spec = f"backup_workers(servers={SERVERS}, spare={spare})"
    job, found, result = played(spec, arrivals, workers=workers, images=images, optimizer=optimizer)
    reference = Backup(job, spare)
    assert_same(reference, arrivals, found, result)
    assert reference.dropped > 3
    assert set(reference.staleness) == {0}


def test_every_worker_has_a_mean_square_of_its_own(arrivals):
    """With one for all of them the run would end elsewhere, so the test above tells them apart."""

    class Common(DelayCompensated):
        def whose(self, server, rank):
            return server

    job, found, _ = played(f"dc_asgd(servers={SERVERS}, m=0.9)", arrivals, optimizer=OPTIMIZERS[0])
    assert (Common(job, "a", 2.0, 0.9).replay(arrivals) - found).abs().max() > 1e-5
