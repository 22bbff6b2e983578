"""Successors among workers that go in step with several servers, whose messages arrive in every awkward order."""

from __future__ import annotations

from collections import Counter, deque

import pytest
import torch

from polyrhythm.communication.message import Kind, Message, RefusedMessage, pack_json
from polyrhythm.strategies.aggregator import Aggregator
from polyrhythm.strategies.aggregators.krum import Krum
from polyrhythm.strategies.aggregators.weighted_mean import WeightedMean
from polyrhythm.strategies.parameter_server.consistency.synchronous import Synchronous
from polyrhythm.strategies.parameter_server.serving.rounds import Rounds
from polyrhythm.strategies.parameter_server.serving.shard import Handling, shard_session
from polyrhythm.training.optimizer_plan import OptimizerPlan, Span

STEPS = 6


class Company:
    """Workers that go in step with servers of one number each; every link delivers when it is told to."""

    def __init__(self, workers: int, servers: int, aggregator: Aggregator | None = None) -> None:
        ranks = tuple(range(100, 100 + servers))
        handling = Handling(aggregator=aggregator or WeightedMean())
        pushers = tuple(range(workers))
        self.servers = {
            rank: shard_session(pushers, Synchronous(), handling, ranks, index)
            for index, rank in enumerate(ranks)
        }
        self.held: set[tuple[int, int]] = set()
        self.over: set[int] = set()
        self.read: set[tuple[int, ...]] = set()
        """Versions of all shards that workers have gone on with."""
        self._links: dict[tuple[int, int], deque[Message]] = {}
        self._answers: dict[int, dict[int, Message]] = {}
        plan = OptimizerPlan("SGD", (Span(0, 1, {"lr": 1.0}),), 1.0)
        for server in self.servers.values():
            server.on_message(0, Message(Kind.CONFIGURE, pack_json(plan.to_json())))
            server.on_message(0, Message(Kind.PARAMETERS, torch.zeros(1)))
        for worker in pushers:
            self.come(worker)

    def come(self, worker: int) -> None:
        """A worker, or its successor, pulls."""
        self._answers[worker] = {}
        self._tell(worker, Message(Kind.PULL))

    def lose(self, worker: int) -> None:
        """A worker dies; what is under way from it never arrives, and all servers hear of it."""
        for rank, server in self.servers.items():
            self._links[worker, rank].clear()
            self._answers[worker] = {}
            self._route(rank, server.on_loss(worker))

    def settle(self) -> None:
        """Delivers all that is under way, but for links that are held."""
        while due := [link for link, queue in self._links.items() if queue and link not in self.held]:
            for source, rank in due:
                self.deliver(source, rank)

    def deliver(self, source: int, rank: int) -> None:
        """Delivers the next message of a link."""
        message = self._links[source, rank].popleft()
        self._route(rank, self.servers[rank].on_message(source, message))

    def release(self) -> None:
        """Delivers all that is under way."""
        self.held = set()
        self.settle()

    def _tell(self, worker: int, message: Message) -> None:
        for rank in self.servers:
            self._links.setdefault((worker, rank), deque()).append(message)

    def _route(self, rank: int, replies: list[tuple[int, Message]]) -> None:
        for to, reply in replies:
            if to in self.servers:
                self._links.setdefault((rank, to), deque()).append(reply)
                continue
            self._answers[to][rank] = reply
            if len(self._answers[to]) == len(self.servers):
                self._continue(to)

    def _continue(self, worker: int) -> None:
        answers, self._answers[worker] = self._answers[worker], {}
        if all(answer.kind is Kind.JOIN for answer in answers.values()):
            self._tell(worker, Message(Kind.JOIN, step=max(answer.step for answer in answers.values())))
            return
        self.read.add(tuple(answers[rank].version for rank in self.servers))
        step = min(answer.step for answer in answers.values())
        if step == STEPS:
            self.over.add(worker)
            self._tell(worker, Message(Kind.LEAVE))
            return
        for rank, answer in answers.items():
            gradient = torch.tensor([float(2 ** (worker % 4))])
            push = Message(Kind.PUSH, gradient, answer.version, step, 1.0, 1.0)
            self._links[worker, rank].append(push)


def assert_each_gradient_counts_once(company: Company, workers: int) -> None:
    assert company.over == set(range(workers))
    for server in company.servers.values():
        assert server.steps == dict.fromkeys(range(workers), STEPS)
        assert sum(server.staleness.values()) == workers * STEPS


def begun(workers: int, servers: int, aggregator: Aggregator | None = None) -> Company:
    """Gives a company that has pulled; all pushes of the first round are on their way."""
    company = Company(workers, servers, aggregator)
    for rank in company.servers:
        for worker in range(workers):
            company.deliver(worker, rank)
    return company


def test_two_successors_of_whom_each_server_has_counted_another_go_on() -> None:
    """Server 0 has A's step and not B's, and server 1 the other way round: each would wait for the other one."""
    company = begun(3, 2)
    company.deliver(1, 100)
    company.deliver(2, 101)
    company.deliver(0, 100)
    company.deliver(0, 101)
    company.lose(1)
    company.lose(2)
    assert company.servers[100].steps == {0: 1, 1: 1, 2: 0}
    assert company.servers[101].steps == {0: 1, 1: 0, 2: 1}
    company.held = {(0, 100), (0, 101)}
    company.come(1)
    company.come(2)
    company.settle()
    company.release()
    assert_each_gradient_counts_once(company, 3)


def test_successors_that_come_when_servers_are_in_different_rounds_read_the_same_one() -> None:
    """One comes while server 0 is in a round and server 1 in the next, and later another: both read equal versions."""
    company = begun(3, 2)
    for lost, late in [(1, 100), (2, 101)]:
        company.held = {(0, late)}
        company.lose(lost)
        company.settle()  # the other server ends a round without it
        company.come(lost)
        company.settle()
    company.release()
    assert_each_gradient_counts_once(company, 3)
    assert all(first == second for first, second in company.read)


def test_krum_takes_nothing_that_only_one_server_has() -> None:
    company = begun(7, 2, Krum(f=1))
    company.held = {(6, 101)}
    company.settle()
    company.lose(6)
    company.settle()
    both = company.servers.values()
    assert [server.steps[6] for server in both] == [0, 0]
    assert [server.version for server in both] == [STEPS, STEPS]
    assert [server.staleness for server in both] == [Counter({0: 6 * STEPS})] * 2


def test_a_round_that_nobody_is_left_in_is_the_same_everywhere() -> None:
    """Both die; server 0 has had one's gradient, and makes an update of it that server 1 does not make."""
    company = begun(2, 2)
    company.deliver(1, 100)
    company.lose(0)
    company.lose(1)
    assert [server.version for server in company.servers.values()] == [1, 0]
    company.come(0)
    company.come(1)
    company.release()
    assert_each_gradient_counts_once(company, 2)


def test_krum_goes_on_after_a_round_that_one_server_has_skipped() -> None:
    """Server 0 has a round's last gradient and asks what server 1 has, which has heard of that one's death before."""
    company = begun(3, 2, Krum(f=0))
    for worker in (0, 1, 2):
        company.deliver(worker, 100)
    for worker in (0, 1, 2):
        company.lose(worker)
    for worker in (0, 1, 2):
        company.come(worker)
    company.release()
    assert_each_gradient_counts_once(company, 3)
    assert [server.version for server in company.servers.values()] == [STEPS, STEPS]


class TestRounds:
    def test_a_successor_holds_a_round_up_until_it_has_named_one(self) -> None:
        rounds = Rounds(3)
        rounds.number = 4
        rounds.invite(1, later=True)
        assert (rounds.invitation(1), rounds.held_up, rounds.outside) == (5, True, 1)
        rounds.accept(1, 6)
        assert (rounds.invitation(1), rounds.held_up, rounds.outside) == (None, False, 1)
        assert rounds.admit(alone=False) == []
        rounds.number = 6
        assert rounds.admit(alone=False) == [1]
        assert rounds.outside == 0

    def test_nobody_waits_for_rounds_that_nobody_takes(self) -> None:
        rounds = Rounds(3)
        for worker, number in [(2, 3), (0, 2)]:
            rounds.invite(worker, later=False)
            rounds.accept(worker, number)
        assert rounds.admit(alone=True) == [0]
        assert rounds.number == 2

    def test_what_cannot_be_is_refused(self) -> None:
        rounds = Rounds(2)
        with pytest.raises(RefusedMessage, match="was not asked"):
            rounds.accept(0, 0)
        rounds.number = 3
        rounds.invite(0, later=False)
        with pytest.raises(RefusedMessage, match="where 3 is the first"):
            rounds.accept(0, 2)
        with pytest.raises(RefusedMessage, match="where 3 is the first"):
            rounds.accept(0, 2**40)
        rounds.forget(0)
        with pytest.raises(RefusedMessage, match="was not asked"):
            rounds.accept(0, 3)

    def test_a_gradient_that_comes_twice_is_no_part_of_the_next_round(self) -> None:
        rounds = Rounds(1)
        assert rounds.is_next(0, 7)
        rounds.take(0, 7)
        assert (rounds.is_next(0, 7), rounds.is_next(0, 8)) == (False, True)
        rounds.forget(0)
        assert rounds.is_next(0, 3)
