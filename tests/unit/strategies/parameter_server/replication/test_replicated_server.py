"""Servers that keep each other's shards, by hand-written messages, without any network."""

from __future__ import annotations

from collections import deque

import pytest
import torch

from polyrhythm.communication.message import Kind, Message, Reason, RefusedMessage, pack_json
from polyrhythm.errors import PeerLost, RequestError
from polyrhythm.strategies.parameter_server.consistency.asynchronous import Asynchronous
from polyrhythm.strategies.parameter_server.consistency.synchronous import Synchronous
from polyrhythm.strategies.parameter_server.downpour import sum_session
from polyrhythm.strategies.parameter_server.parameter_server import ParameterServer
from polyrhythm.strategies.parameter_server.replication.replicated_server import ReplicatedServer
from polyrhythm.strategies.parameter_server.serving.gate import Consistency
from polyrhythm.strategies.parameter_server.serving.session import ServerSession
from polyrhythm.strategies.parameter_server.serving.shard import shard_session
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.strategies.server_part import ServerSetting
from polyrhythm.training.flat_optimizer import Span
from polyrhythm.training.optimizer_plan import OptimizerPlan

A, B, FIRST, SECOND, THIRD = 0, 1, 2, 3, 4  # ranks: two workers, three servers
CAST = RoleAssignment((A, B), (FIRST, SECOND, THIRD))
PLAN = OptimizerPlan("SGD", (Span(0, 2, {"lr": 0.5, "momentum": 0.9}),), 0.5)
START = torch.tensor([1.0, 2.0])


def push(values: list[float], step: int = 0, version: int = 0) -> Message:
    return Message(Kind.PUSH, torch.tensor(values), version=version, step=step, learning_rate=0.5)


class Servers:
    """Three servers, whose messages to each other arrive at once unless they are held up."""

    def __init__(self, consistency: Consistency | None) -> None:
        def make(shard: int) -> ServerSession:
            if consistency is None:
                return sum_session(CAST.workers, 0)
            return shard_session(CAST.workers, consistency)

        def server(rank: int) -> ReplicatedServer:
            return ReplicatedServer(ServerSetting(CAST.servers.index(rank), CAST), CAST.workers, make)

        self.server = server
        self.parts = {rank: server(rank) for rank in CAST.servers}
        self.generations = dict.fromkeys(CAST.servers, 0)
        self.held_up: deque[tuple[int, int, Message]] = deque()
        self.holds_up = False

    def say(self, source: int, to: int, *messages: Message) -> list[tuple[int, int, Message]]:
        """Lets messages arrive; gives what workers are answered: by whom, whom, with what."""
        answers = []
        for message in messages:
            answers += self._spread(to, self.parts[to].on_message(source, message))
        return answers

    def lose(self, rank: int) -> list[tuple[int, int, Message]]:
        """Lets all hear that a rank is gone."""
        self.parts.pop(rank, None)
        self.held_up = deque(entry for entry in self.held_up if rank not in entry[:2])
        return [
            answer for other, part in self.parts.items() for answer in self._spread(other, part.on_loss(rank))
        ]

    def restart(self, rank: int) -> list[tuple[int, int, Message]]:
        """Gives a lost server a successor."""
        self.parts[rank] = self.server(rank)
        self.generations[rank] += 1
        return self._spread(rank, self.parts[rank].rejoin(self.generations[rank]))

    def deliver(self) -> list[tuple[int, int, Message]]:
        """Lets what was held up arrive."""
        self.holds_up = False
        answers = []
        while self.held_up:
            source, to, message = self.held_up.popleft()
            answers += self._spread(to, self.parts[to].on_message(source, message))
        return answers

    def _spread(self, source: int, replies: list[tuple[int, Message]]) -> list[tuple[int, int, Message]]:
        answers = []
        for to, reply in replies:
            if to in CAST.workers:
                answers.append((source, to, reply))
            elif self.holds_up:
                self.held_up.append((source, to, reply))
            elif to in self.parts:
                answers += self._spread(to, self.parts[to].on_message(source, reply))
        return answers


def begun(consistency: Consistency | None = None, *, sums: bool = False) -> Servers:
    servers = Servers(None if sums else consistency or Asynchronous())
    for rank in CAST.servers:
        servers.say(
            A,
            rank,
            Message(Kind.CONFIGURE, pack_json(PLAN.to_json())),
            Message(Kind.PARAMETERS, START.clone()),
        )
        for worker in CAST.workers:
            servers.say(worker, rank, Message(Kind.PULL))
    return servers


def relayed(servers: Servers, worker: int, to: int, message: Message) -> list[tuple[int, int, Message]]:
    return servers.say(worker, to, Message(Kind.RELAY, step=worker), message)


def values(answers: list[tuple[int, int, Message]]) -> list[tuple[int, int, list[float]]]:
    return [
        (source, to, [round(value, 6) for value in reply.tensor.tolist()])
        for source, to, reply in answers
        if reply.tensor is not None
    ]


def test_a_worker_is_answered_when_both_have_its_gradient() -> None:
    servers = begun()
    servers.holds_up = True
    assert servers.say(A, FIRST, push([2.0, 0.0])) == []
    assert [(to, message.kind) for _, to, message in servers.held_up] == [
        (SECOND, Kind.RELAY),
        (SECOND, Kind.PUSH),
    ]
    assert values(servers.deliver()) == [(FIRST, A, [0.0, 2.0])]
    own, kept = servers.parts[FIRST].state_of(0), servers.parts[SECOND].state_of(0)
    assert own[1] == kept[1]
    assert all(torch.equal(own[0][name], kept[0][name]) for name in own[0])
    assert "optimizer.state.0.momentum_buffer" in kept[0]


def test_what_the_backup_had_is_answered_again_and_not_taken_again() -> None:
    servers = begun()
    servers.say(A, FIRST, push([2.0, 0.0]))  # answered, but say that the answer is lost with the server
    assert servers.lose(FIRST) == []
    again = relayed(servers, A, SECOND, push([2.0, 0.0]))
    assert values(again) == [(SECOND, A, [0.0, 2.0])]
    assert again[0][2].tag == 1
    assert (again[0][2].version, again[0][2].step) == (1, 1)
    following = relayed(servers, A, SECOND, push([0.0, 4.0], step=1, version=1))
    assert values(following) == [(SECOND, A, [0.0 - 0.5 * 0.9 * 2.0, 0.0])]  # with the momentum of the first
    assert servers.parts[SECOND].stats().staleness == {0: 2}


def test_what_the_backup_had_not_is_taken_as_new() -> None:
    servers = begun()
    servers.holds_up = True
    servers.say(A, FIRST, push([2.0, 0.0]))
    servers.lose(FIRST)
    servers.holds_up = False
    assert values(relayed(servers, A, SECOND, push([2.0, 0.0]))) == [(SECOND, A, [0.0, 2.0])]
    assert servers.parts[SECOND].stats().staleness == {0: 1}


def test_an_answer_that_is_not_due_comes_when_it_is() -> None:
    servers = begun(Synchronous())
    servers.say(A, FIRST, push([2.0, 0.0]))
    servers.lose(FIRST)
    assert relayed(servers, A, SECOND, push([2.0, 0.0])) == []
    answers = relayed(servers, B, SECOND, push([4.0, 0.0]))
    assert values(answers) == [(SECOND, A, [-0.5, 2.0]), (SECOND, B, [-0.5, 2.0])]
    assert servers.parts[SECOND].stats().staleness == {0: 2}


def test_who_asks_before_the_backup_knows_waits() -> None:
    servers = begun()
    assert relayed(servers, A, SECOND, push([2.0, 0.0])) == []
    assert values(servers.lose(FIRST)) == [(SECOND, A, [0.0, 2.0])]


def test_without_its_backup_a_server_lets_all_answers_go() -> None:
    servers = begun()
    servers.holds_up = True
    assert servers.say(A, FIRST, push([2.0, 0.0])) == []
    assert values(servers.lose(SECOND)) == [(FIRST, A, [0.0, 2.0])]
    servers.holds_up = False
    assert values(servers.say(B, FIRST, push([0.0, 2.0]))) == [(FIRST, B, [0.0 - 0.5 * 0.9 * 2.0, 1.0])]


def test_a_successor_has_all_that_the_others_had() -> None:
    servers = begun()
    servers.say(A, FIRST, push([2.0, 0.0]))
    servers.lose(FIRST)
    relayed(servers, A, SECOND, push([0.0, 4.0], step=1, version=1))
    servers.say(B, THIRD, push([0.0, 1.0]))
    greetings = servers.restart(FIRST)
    assert [(to, message.kind, message.tag) for _, to, message in greetings] == [
        (A, Kind.JOIN, 2),
        (B, Kind.JOIN, 2),
    ]
    assert servers.parts[FIRST].whole
    assert servers.parts[FIRST].stats().staleness == {}  # it only follows
    for shard, leader in ((0, SECOND), (2, THIRD)):
        expected, found = (servers.parts[rank].state_of(shard) for rank in (leader, FIRST))
        assert found[1] == expected[1]
        assert found[0].keys() == expected[0].keys()
        assert all(torch.equal(found[0][name], expected[0][name]) for name in expected[0])


def test_answers_wait_for_a_successor_from_the_moment_that_it_is_handed_a_shard() -> None:
    servers = begun()
    servers.lose(FIRST)
    servers.holds_up = True
    servers.restart(FIRST)
    (join,) = [entry for entry in servers.held_up if entry[1] == SECOND]
    servers.held_up.clear()
    assert servers.say(join[0], SECOND, join[2]) == []
    assert [message.kind for _, _, message in servers.held_up] == [Kind.STATE]
    assert relayed(servers, A, SECOND, push([2.0, 0.0])) == []
    assert values(servers.deliver()) == [(SECOND, A, [0.0, 2.0])]


def test_a_second_loss_is_borne_by_the_successor_of_the_first() -> None:
    servers = begun(Synchronous())
    servers.lose(FIRST)
    servers.restart(FIRST)
    assert relayed(servers, A, SECOND, push([2.0, 0.0])) == []  # half of an update
    assert servers.lose(SECOND) == []
    assert relayed(servers, A, FIRST, push([2.0, 0.0])) == []  # it has that already
    answers = relayed(servers, B, FIRST, push([4.0, 0.0]))
    assert values(answers) == [(FIRST, A, [-0.5, 2.0]), (FIRST, B, [-0.5, 2.0])]
    assert {message.tag for _, _, message in answers} == {0}
    servers.restart(SECOND)
    assert servers.parts[SECOND].state_of(0)[1] == servers.parts[FIRST].state_of(0)[1]


def test_who_asks_a_successor_that_only_follows_is_told_to_ask_the_other() -> None:
    servers = begun()
    servers.lose(FIRST)
    servers.restart(FIRST)
    assert servers.say(B, FIRST, Message(Kind.PULL)) == [(FIRST, B, Message(Kind.RELAY))]
    assert values(relayed(servers, B, SECOND, Message(Kind.PULL))) == [(SECOND, B, [1.0, 2.0])]


def test_pushes_without_answers_to_a_copy_that_follows_are_repeated_in_their_order() -> None:
    """The copy comes to lead between two of them: the second one must not count before the first."""
    servers = begun(sums=True)
    servers.lose(FIRST)
    servers.restart(FIRST)
    assert servers.say(A, FIRST, push([2.0, 0.0])) == []
    servers.lose(SECOND)
    answers = servers.say(A, FIRST, push([0.0, 2.0], step=1), Message(Kind.FETCH))
    assert [(to, reply.kind) for _, to, reply in answers] == [(A, Kind.RELAY)]
    for number, gradient in enumerate([[2.0, 0.0], [0.0, 2.0]]):
        assert relayed(servers, A, FIRST, push(gradient, step=number)) == []
    answers = relayed(servers, A, FIRST, Message(Kind.FETCH))
    assert values(answers) == [(FIRST, A, [-0.9, 1.0])]  # the momentum of the first is in the second
    assert answers[0][2].step == 2


def test_who_has_slept_through_two_losses_is_told_that_the_lost_one_is_there_again() -> None:
    servers = begun()
    for rank in (FIRST, SECOND):
        servers.lose(rank)
        servers.restart(rank)
    stale = Message(Kind.RELAY, step=B, weight=1.0), Message(Kind.PULL)  # it knows of one loss of each
    assert servers.say(B, SECOND, *stale) == [(SECOND, B, Message(Kind.RELAY, tag=1))]
    fresh = Message(Kind.RELAY, step=B, weight=2.0), Message(Kind.PULL)  # and now of the first one's second
    assert servers.say(B, SECOND, *fresh) == []
    assert values(servers.lose(FIRST)) == [(SECOND, B, [1.0, 2.0])]


def test_an_answer_that_is_given_again_is_read_on_both_servers() -> None:
    """Else the shares of what a worker read, and with delay compensation the parameters, would differ."""
    servers = begun()
    servers.say(A, FIRST, push([2.0, 0.0]))
    servers.lose(FIRST)
    servers.restart(FIRST)
    relayed(servers, B, SECOND, push([0.0, 4.0]))
    assert values(relayed(servers, A, SECOND, push([2.0, 0.0]))) == [(SECOND, A, [-0.9, 0.0])]
    kept, follower = (servers.parts[rank].part_of(0).exact_state()[1] for rank in (SECOND, FIRST))
    assert kept["pushers"]["read_version"] == [2, 2]
    assert follower == kept


def test_a_shard_is_handed_over_as_soon_as_there_are_parameters() -> None:
    servers = Servers(Asynchronous())
    servers.lose(FIRST)
    servers.restart(FIRST)
    assert not servers.parts[FIRST].whole
    beginning = Message(Kind.CONFIGURE, pack_json(PLAN.to_json())), Message(Kind.PARAMETERS, START.clone())
    for message in beginning:
        relayed(servers, A, SECOND, message)
        servers.say(A, THIRD, message)
    assert servers.parts[FIRST].whole
    assert servers.parts[FIRST].state_of(0)[0]["values"].tolist() == START.tolist()


def test_of_a_loss_that_was_handed_over_a_successor_hears_without_doing_anything() -> None:
    servers = begun(Synchronous())
    servers.lose(FIRST)
    servers.parts[SECOND].on_losses(B, 1)
    servers.restart(FIRST)
    before = servers.parts[FIRST].part_of(0).exact_state()[1]
    assert servers.parts[FIRST].on_losses(B, 1) == []
    relayed(servers, B, SECOND, Message(Kind.PULL))  # its successor
    servers.lose(SECOND)
    assert servers.parts[FIRST].part_of(0).exact_state()[1]["pushers"]["left"] == [False, False]
    assert before["pushers"]["left"] == [False, True]


def test_a_shard_that_nobody_has_any_more_ends_a_successor() -> None:
    servers = begun()
    servers.lose(FIRST)
    servers.holds_up = True
    servers.restart(FIRST)
    with pytest.raises(PeerLost, match="taking over shard 0"):
        servers.parts[FIRST].on_loss(SECOND)


def test_what_is_owed_to_a_lost_worker_is_not_for_its_successor() -> None:
    servers = begun()
    servers.holds_up = True
    servers.say(B, FIRST, push([2.0, 0.0]))
    lost = [Message(Kind.RELAY, step=1), Message(Kind.LOST, version=1)]
    assert servers.parts[FIRST].on_loss(B) == [(SECOND, message) for message in lost]
    servers.held_up.extend((FIRST, SECOND, message) for message in lost)
    assert servers.deliver() == []
    successor = servers.say(B, FIRST, Message(Kind.PULL))
    assert [(to, reply.step) for _, to, reply in successor] == [(B, 1)]  # the predecessor's gradient counts


def test_the_backup_forgets_a_worker_of_whose_loss_the_lost_server_had_not_told() -> None:
    servers = begun(Synchronous())
    servers.say(A, FIRST, push([2.0, 0.0]))
    servers.parts[SECOND].on_loss(B)
    servers.lose(FIRST)
    assert values(relayed(servers, A, SECOND, push([2.0, 0.0]))) == [(SECOND, A, [0.0, 2.0])]


def test_all_end_together_and_leaving_is_answered() -> None:
    servers = begun()
    for worker in (B, A):
        for rank in CAST.servers:
            assert [reply.kind for _, _, reply in servers.say(worker, rank, Message(Kind.LEAVE))] == [
                Kind.LEAVE
            ]
    for rank in CAST.servers:
        assert values(servers.say(A, rank, Message(Kind.PULL, stop=True))) == [(rank, A, [1.0, 2.0])]
    for rank in CAST.servers:
        assert not all(part.done for part in servers.parts.values())
        servers.say(A, rank, Message(Kind.LEAVE))
    assert all(part.done for part in servers.parts.values())


@pytest.mark.parametrize(
    ("source", "to", "message", "reason"),
    [
        (FIRST, THIRD, Message(Kind.RELAY, step=0), Reason.SENDER),  # third keeps second's
        (A, SECOND, Message(Kind.RELAY, step=B), Reason.SENDER),
        (A, SECOND, Message(Kind.RELAY, step=A, version=2), Reason.SENDER),  # third's
        (A, SECOND, Message(Kind.RELAY, step=A, stop=True), Reason.SENDER),
        (FIRST, SECOND, Message(Kind.RELAY, step=7), Reason.SENDER),
        (SECOND, FIRST, Message(Kind.PUSH), Reason.ORDER),  # nothing is there to be acknowledged
        (THIRD, SECOND, Message(Kind.PULL, version=1), Reason.ORDER),
        (THIRD, SECOND, Message(Kind.COPY, version=1), Reason.ORDER),  # it has not been lost
        (THIRD, SECOND, Message(Kind.STATE, START, version=1), Reason.ORDER),  # nor has second
        (FIRST, SECOND, Message(Kind.PULL), Reason.ORDER),  # of no pusher: nor is anything to be acknowledged
        (FIRST, SECOND, Message(Kind.PULL, version=2), Reason.SENDER),
        (A, FIRST, push([1.0, 2.0, 3.0]), Reason.PAYLOAD),
    ],
)
def test_what_nobody_of_ours_sends_is_refused(source: int, to: int, message: Message, reason: Reason) -> None:
    servers = begun()
    with pytest.raises(RefusedMessage) as refused:
        servers.parts[to].on_message(source, message)
    assert refused.value.reason is reason
    assert servers.parts[to].stats().version == 0


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"servers": 1}, "ask for servers=2, or for replicas=1"),
        ({"servers": 2, "aggregator": "krum(f=1)", "consistency": "synchronous"}, "use replicas=1"),
    ],
)
def test_what_cannot_be_on_two_servers_is_refused(options: dict[str, object], hint: str) -> None:
    with pytest.raises(RequestError, match=hint):
        ParameterServer(replicas=2, **options).check(5)


def test_one_server_may_be_lost_and_neighbors_not() -> None:
    faults = ParameterServer(servers=4, replicas=2).faults(5)
    assert [faults.holders_of(shard) for shard in range(4)] == [(0, 1), (1, 2), (2, 3), (3, 0)]
    assert [faults.shards_of(server) for server in range(4)] == [[0, 3], [1, 0], [2, 1], [3, 2]]
    assert faults.keeps_shards([0, 2])
    assert not faults.keeps_shards([3, 0])
    assert not ParameterServer(servers=4).faults(5).keeps_shards([1])
