"""Whole runs of Gaia's sites, replayed from nothing but the order of arrivals, number by number of every packet."""

from __future__ import annotations

from math import sqrt

import pytest
import torch
from torch import nn

from conformance.jobs import blobs, make_job, simulated, uneven, vector_of
from equivalence.arrivals import Workers
from polyrhythm.communication.message import Kind
from polyrhythm.simulation.run import ConstantCluster
from polyrhythm.strategies.parameter_server.gaia import Gaia
from polyrhythm.strategies.parameter_server.serving.session import ServerSession

SHARDS = 2


@pytest.fixture
def arrivals(monkeypatch):
    """Fills with (the server's number, the sender, the kind, the step or round, whether the end is meant)."""
    seen = []
    make, take = Gaia.server, ServerSession.on_message

    def server(self, setting):
        part = make(self, setting)
        part.number = setting.index
        return part

    def on_message(self, source, message):
        seen.append((self.number, source, message.kind, message.step, message.version, message.stop))
        return take(self, source, message)

    monkeypatch.setattr(Gaia, "server", server)
    monkeypatch.setattr(ServerSession, "on_message", on_message)
    return seen


class Copy:
    """A site's copy of a shard: parameters, what others were not told of, and what is known of the others."""

    def __init__(self, start, others, optimizer):
        self.w = nn.Parameter(start.clone())
        self.optimizer = optimizer.create([self.w])
        self.unsent = torch.zeros_like(start)
        self.rounds = self.version = 0
        self.packets = {}
        self.heard = dict.fromkeys(others, 0)
        self.announced = {}
        self.gone = set()
        self.pushed, self.waiting, self.reading = {}, set(), set()

    def update(self, gradient, rate):
        before = self.w.detach().clone()
        self.w.grad = gradient
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()
        self.unsent = self.unsent + (self.w.detach() - before)
        self.version += 1

    def send(self, chosen):
        self.rounds += 1
        self.packets[self.rounds] = torch.where(chosen, self.unsent, 0.0) if chosen.any() else None
        self.unsent = torch.where(chosen, 0.0, self.unsent)

    def lags(self, most):
        there = [rounds for site, rounds in self.heard.items() if site not in self.gone]
        return self.rounds - min(there, default=self.rounds) > most


class Sites:
    """|U_j| > t_0 / sqrt(t) |w_j|: U_j is sent in round t, and becomes 0."""

    def __init__(self, job, sites, threshold, lag, barrier):
        self.workers = Workers(job, SHARDS)
        self.threshold, self.lag, self.barrier = threshold, lag, barrier
        ends = [job.workers * site // sites for site in range(sites + 1)]
        self.members = [range(ends[site], ends[site + 1]) for site in range(sites)]
        self.copies = {
            (site, shard): Copy(self.workers.start[cut], set(range(sites)) - {site}, job.learning.optimizer)
            for site in range(sites)
            for shard, cut in enumerate(self.workers.cuts)
        }
        self.left = {place: set() for place in self.copies}
        self.reads = {}
        self.staleness = {}
        self.told, self.large = set(), set()
        self.sent = self.kept = self.held_back = self.blocked = 0

    def replay(self, arrivals):
        """Takes all that came; gives what worker 0's site has in the end."""
        for number, source, kind, step, rounds, stop in arrivals:
            place = divmod(number, SHARDS)
            if source >= self.workers.job.workers:
                self.hear(place, divmod(source - self.workers.job.workers, SHARDS)[0], kind, rounds, stop)
            elif kind is Kind.PUSH:
                self.push(place, source, step)
            elif kind is Kind.PULL and not stop:
                self.copies[place].reading.add(source)
                self.let_on(place)
            elif kind is Kind.LEAVE and source not in self.left[place]:
                self.left[place].add(source)
                if len(self.left[place]) == len(self.members[place[0]]):
                    copy = self.copies[place]
                    copy.send(copy.unsent != 0)
        return torch.cat([self.copies[0, shard].w.detach() for shard in range(SHARDS)])

    def push(self, place, rank, step):
        copy, members = self.copies[place], self.members[place[0]]
        copy.pushed[rank] = self.workers.gradient(rank, step)[self.workers.cuts[place[1]]]
        if len(copy.pushed) < len(members):
            return
        samples = {each: self.workers.samples(each, step) for each in members}
        if whole := sum(samples.values()):
            mean = sum(samples[each] * copy.pushed[each] for each in members) / whole
            for each in members:
                if samples[each]:
                    age = copy.version - self.reads[place, each]
                    self.staleness[age] = self.staleness.get(age, 0) + 1
            copy.update(mean, self.workers.rate(step))
        w, u = copy.w.detach(), copy.unsent
        chosen = u.abs() > self.threshold / sqrt(copy.rounds + 1) * w.abs()
        self.sent += int(chosen.sum())
        self.kept += int((~chosen & (u != 0)).sum())
        copy.send(chosen)
        if min(2 * int(chosen.sum()), len(w)) > self.barrier * len(
            w
        ):  # a number and its place, or all numbers
            self.large.add((*place, copy.rounds))
        copy.pushed = {}
        copy.waiting |= {*members}
        self.let_on(place)

    def hear(self, place, site, kind, rounds, stop):
        copy = self.copies[place]
        if kind is Kind.ANNOUNCE:
            copy.announced[site] = rounds
            self.told.add((site, place[1], rounds))
        elif kind in (Kind.DIFFERENCE, Kind.LEAVE):
            packet = self.copies[site, place[1]].packets[rounds]
            assert rounds == copy.heard[site] + 1
            copy.heard[site] = rounds
            if packet is not None:
                copy.w.data.add_(packet)
                copy.version += 1
            if copy.announced.get(site) == rounds:
                del copy.announced[site]
            if kind is Kind.LEAVE:
                copy.gone.add(site)
        self.let_on(place)

    def let_on(self, place):
        copy = self.copies[place]
        if copy.lags(self.lag):
            self.held_back += bool(copy.waiting)
        else:
            copy.reading |= copy.waiting
            copy.waiting = set()
        if copy.announced:
            self.blocked += bool(copy.reading)
            return
        for rank in copy.reading:
            self.workers.copies[rank][self.workers.cuts[place[1]]] = copy.w.detach()
            self.reads[place, rank] = copy.version
        copy.reading = set()


def one_that_limps(latency_s):
    generator = torch.Generator().manual_seed(1)

    def step_s(worker):
        return uneven(worker) * float(0.4 + 3 * torch.rand((), generator=generator) ** 3)

    return ConstantCluster(step_s=step_s, latency_s=latency_s, bandwidth_bytes_per_s=2e5)


def replayed(arrivals, optimizer="sgd(lr=0.02, momentum=0.8)", workers=4, sites=2, latency_s=0.003, **rule):
    """Trains and replays; gives the reference, what it comes to, what was found, and the run's figures.

    The last step of an epoch has an empty batch, or two.
    """
    rule = {"threshold": 0.05, "lag": 1, "barrier": 0.5} | rule
    keys = ", ".join(f"{key}={value}" for key, value in rule.items())
    job = make_job(
        f"gaia(sites={sites}, servers={SHARDS}, {keys})",
        workers,
        dtype=torch.float64,
        dataset=blobs(train=12 * workers + 6),
        optimizer=optimizer,
    )
    trained = simulated(job, one_that_limps(latency_s))
    reference = Sites(job, sites, **rule)
    return reference, reference.replay(arrivals), vector_of(trained.models[0]), trained.result


@pytest.mark.parametrize(
    "optimizer", ["sgd(lr=0.05, momentum=0)", "sgd(lr=0.02, momentum=0.8)", "adam(lr=0.01)"]
)
@pytest.mark.parametrize(("threshold", "lag", "barrier"), [(0.01, 1, 0.5), (0.1, 0, 0.1), (0.4, 3, 1.0)])
@pytest.mark.parametrize(("workers", "sites"), [(4, 2), (5, 3)])
def test_gaia(workers, sites, threshold, lag, barrier, optimizer, arrivals):
    reference, expected, found, result = replayed(
        arrivals, optimizer, workers, sites, threshold=threshold, lag=lag, barrier=barrier
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    told = result["staleness"]["histogram"]
    assert {int(age): count for age, count in told.items()} == reference.staleness
    assert min(reference.sent, reference.kept) > 50
    assert reference.told == reference.large
    assert (reference.workers.start - found).abs().max() > 0.02
