"""Two sites by hand-written messages, without any network: workers 0, 1 and 2; servers 3 and 4, and an idle 5."""

import pytest
import torch

from polyrhythm.communication.message import Kind, Message, pack_json, pack_tensors, unpack_tensors
from polyrhythm.errors import RunError
from polyrhythm.strategies.parameter_server.gaia import Gaia, SiteMap, site_session
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.training.flat_optimizer import Span
from polyrhythm.training.optimizer_plan import OptimizerPlan

PLAN = OptimizerPlan("SGD", (Span(0, 4, {"lr": 0.5}),), 0.5)
START = torch.tensor([4.0, 8.0, 16.0, 32.0])


class Pair:
    """Two sites whose messages to each other wait in a queue until they are delivered."""

    def __init__(self, threshold=0.0, lag=9, barrier=1.0):
        terms = Gaia(threshold=threshold, lag=lag, barrier=barrier)
        self.servers = {3: site_session(terms, (0, 1), (4,), (5,)), 4: site_session(terms, (2,), (3,), (5,))}
        self.queue = []
        self.begin()

    def begin(self):
        self.say(0, 3, Message(Kind.CONFIGURE, pack_json(PLAN.to_json())))
        self.say(0, 3, Message(Kind.PARAMETERS, START.clone()))
        self.deliver()

    def say(self, source, server, message):
        """Gives what workers get; what other servers get waits."""
        replies = self.servers[server].on_message(source, message)
        self.queue += [(server, to, reply) for to, reply in replies if to in (*self.servers, 5)]
        return {to: reply for to, reply in replies if to not in (*self.servers, 5)}

    def deliver(self):
        heard = {}
        while self.queue:
            source, to, message = self.queue.pop(0)
            if to in self.servers:
                heard |= self.say(source, to, message)
        return heard

    def values(self, server):
        return self.servers[server].values

    def retained(self, server):
        return self.servers[server].state()[0]["retained"]


def push(values, step=0, weight=1.0, stop=False, version=0):
    return Message(
        Kind.PUSH,
        torch.tensor(values),
        version=version,
        step=step,
        weight=weight,
        learning_rate=0.5,
        stop=stop,
    )


def test_workers_and_servers_are_shared_out_among_sites():
    sites = SiteMap.of(RoleAssignment((0, 1, 2), (3, 4, 5, 6)), 2)
    assert sites == SiteMap(((0,), (1, 2)), ((3, 4), (5, 6)))
    assert [sites.site_of(worker) for worker in (0, 1, 2)] == [0, 1, 1]
    few = SiteMap.of(RoleAssignment((0,), (1, 2)), 2)
    assert (few.members, few.busy) == (((0,), ()), (0,))


def test_a_site_goes_together_and_tells_the_other_everything_where_the_threshold_is_0():
    pair = Pair()
    assert pair.say(1, 3, push([4.0, 0.0, 0.0, 8.0])) == {}
    answers = pair.say(0, 3, push([4.0, 0.0, 4.0, 0.0]))
    assert {to: reply.tensor.tolist() for to, reply in answers.items()} == {
        0: [2.0, 8.0, 15.0, 30.0],
        1: [2.0, 8.0, 15.0, 30.0],
    }
    assert torch.equal(pair.values(4), START)
    pair.deliver()
    assert torch.equal(pair.values(4), pair.values(3))
    assert not pair.retained(3).any()
    assert (pair.servers[3].version, pair.servers[4].version) == (1, 1)


def test_what_is_not_significant_stays_and_copies_differ_by_just_that():
    pair = Pair(threshold=0.1)
    generator = torch.Generator().manual_seed(0)
    total = {3: torch.zeros(4), 4: torch.zeros(4)}
    for step in range(6):
        one, two, three = (torch.randint(-4, 5, (4,), generator=generator).float() for _ in range(3))
        pair.say(0, 3, push(one.tolist(), step))
        pair.say(1, 3, push(two.tolist(), step))
        pair.say(2, 4, push(three.tolist(), step))
        pair.deliver()
        total[3] -= 0.5 * (one + two) / 2
        total[4] -= 0.5 * three
        assert torch.equal(pair.values(3), START + total[3] + total[4] - pair.retained(4))
        assert torch.equal(pair.values(4), START + total[3] + total[4] - pair.retained(3))
    assert pair.retained(3).any()


def test_a_site_waits_for_one_that_is_too_many_rounds_behind():
    pair = Pair(lag=1)
    assert set(pair.say(2, 4, push([1.0] * 4, 0))) == {2}
    assert pair.say(2, 4, push([1.0] * 4, 1)) == {}  # two rounds ahead
    pair.say(0, 3, push([1.0] * 4, 0))
    pair.say(1, 3, push([1.0] * 4, 0))
    assert set(pair.deliver()) == {2}


@pytest.mark.parametrize("how", ["stop", "leave"])
def test_nobody_waits_for_a_site_that_stops_or_has_left(how):
    pair = Pair(lag=0)
    assert pair.say(2, 4, push([1.0] * 4, 0)) == {}
    if how == "stop":
        pair.say(0, 3, push([1.0] * 4, 0, stop=True))
        told = pair.say(1, 3, push([1.0] * 4, 0)) | pair.deliver()
        assert {to: reply.stop for to, reply in told.items()} == {0: True, 1: True, 2: True}
        assert set(pair.say(2, 4, push([1.0] * 4, 1))) == {2}
    else:
        pair.say(0, 3, Message(Kind.LEAVE))
        pair.say(1, 3, Message(Kind.LEAVE))
        assert set(pair.deliver()) == {2}


def test_staleness_counts_what_other_sites_sent_meanwhile():
    pair = Pair()
    for step in range(2):
        pair.say(2, 4, push([1.0] * 4, step, version=step))
    pair.deliver()
    pair.say(0, 3, push([1.0] * 4, 0, version=0))
    pair.say(1, 3, push([1.0] * 4, 0, version=2))
    assert pair.servers[3].staleness == {2: 1, 0: 1}
    assert pair.servers[3].steps == {0: 1, 1: 1}


def test_the_final_model_holds_what_all_sites_had_kept():
    pair = Pair(threshold=1e9)
    pair.say(2, 4, push([4.0, 0.0, 0.0, 0.0]))
    for rank in (0, 1):
        pair.say(rank, 3, push([0.0, 8.0, 0.0, 0.0]))
    pair.deliver()
    assert pair.values(3).tolist() == [4.0, 4.0, 16.0, 32.0]
    for rank in (0, 1):
        pair.say(rank, 3, Message(Kind.LEAVE))
    assert pair.say(0, 3, Message(Kind.PULL, stop=True)) == {}
    pair.say(2, 4, Message(Kind.LEAVE))
    assert pair.deliver()[0].tensor.tolist() == [2.0, 4.0, 16.0, 32.0]
    pair.say(0, 3, Message(Kind.LEAVE))
    assert [(to, message.kind, message.stop) for _, to, message in pair.queue] == [
        (4, Kind.LEAVE, True),
        (5, Kind.LEAVE, True),
    ]
    pair.deliver()
    assert all(server.done for server in pair.servers.values())


def test_what_was_on_its_way_at_a_checkpoint_is_sent_again_and_heard_once():
    pair = Pair()
    pair.say(2, 4, push([2.0, 0.0, 0.0, 0.0], 0))
    pair.deliver()  # the first has come, and nobody has said so yet
    pair.say(2, 4, push([0.0, 4.0, 0.0, 0.0], 1))  # the second is on its way
    states = {rank: unpack_tensors(pack_tensors(*server.state())) for rank, server in pair.servers.items()}
    pair.deliver()
    expected = pair.values(3).clone()
    again = Pair.__new__(Pair)
    terms = Gaia(threshold=0.0, lag=9)
    again.servers = {3: site_session(terms, (0, 1), (4,), (5,)), 4: site_session(terms, (2,), (3,), (5,))}
    again.queue = []
    for rank, server in again.servers.items():
        server.load_state(states[rank])
    again.begin()
    assert torch.equal(again.values(3), expected)
    assert again.servers[4].steps == {2: 2}
    repeated = again.say(2, 4, push([9.0] * 4, 1))  # which it has had
    assert repeated[2].step == 2
    assert torch.equal(again.values(4), expected)


def test_a_site_without_workers_holds_nothing_and_is_let_go():
    made = site_session(Gaia(), (), (3, 4), ())
    made.load_state(unpack_tensors(pack_tensors(*made.state())))
    made.on_message(3, Message(Kind.LEAVE, stop=True))
    assert made.done


def test_what_nobody_sends_is_named():
    pair = Pair()
    with pytest.raises(RunError, match="a site received PUSH from rank 2, which is no part of it"):
        pair.say(2, 3, push([1.0] * 4))
    with pytest.raises(RunError, match="cannot do anything with VECTOR from rank 1"):
        pair.say(1, 3, Message(Kind.VECTOR, torch.zeros(4)))


def announced(pair):
    return [(to, message.kind.name) for _, to, message in pair.queue]


def test_a_large_packet_is_announced_and_readers_wait_for_it():
    pair = Pair(barrier=0.5)
    pair.say(0, 3, push([4.0] * 4))
    assert set(pair.say(1, 3, push([4.0] * 4))) == {0, 1}
    assert announced(pair) == [(4, "ANNOUNCE"), (4, "DIFFERENCE")]
    (_, _, announcement), packet = pair.queue
    pair.queue = []
    assert pair.say(3, 4, announcement) == {}
    assert pair.say(2, 4, Message(Kind.PULL)) == {}  # readers wait, also those that have done their step
    assert pair.say(2, 4, push([0.0] * 4)) == {}
    told = pair.say(3, 4, packet[2])
    assert told[2].tensor.tolist() == [2.0, 6.0, 14.0, 30.0]
    assert torch.equal(pair.values(4), pair.values(3))


def test_what_is_no_larger_than_the_barrier_is_not_announced():
    pair = Pair(barrier=0.5)
    pair.say(0, 3, push([4.0, 0.0, 0.0, 0.0]))
    pair.say(1, 3, push([4.0, 0.0, 0.0, 0.0]))  # one number and its place are 2 of 4
    assert announced(pair) == [(4, "DIFFERENCE")]
    never = Pair(barrier=1.0)
    never.say(0, 3, push([4.0] * 4))
    never.say(1, 3, push([4.0] * 4))
    assert announced(never) == [(4, "DIFFERENCE")]


def test_a_packet_that_has_come_before_its_announcement_again_is_not_waited_for():
    pair = Pair(barrier=0.5)
    pair.say(0, 3, push([4.0] * 4))
    pair.say(1, 3, push([4.0] * 4))
    (_, _, announcement), _ = pair.queue
    pair.deliver()
    assert pair.say(3, 4, announcement) == {}
    assert set(pair.say(2, 4, Message(Kind.PULL))) == {2}


@pytest.mark.parametrize("wrong", [{"version": 0}, {"version": 1, "tensor": torch.zeros(1)}])
def test_an_announcement_that_cannot_be_is_refused(wrong):
    pair = Pair(barrier=0.5)
    with pytest.raises(RunError, match="ANNOUNCE arrived"):
        pair.say(3, 4, Message(Kind.ANNOUNCE, **wrong))
    assert set(pair.say(2, 4, Message(Kind.PULL))) == {2}
