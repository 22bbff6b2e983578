"""Sites go on without workers that are lost; nobody waits for a site that has lost all of its own."""

from __future__ import annotations

from polyrhythm.communication.message import Kind, Message
from unit.strategies.parameter_server.sites.test_site_server import Pair, push

LEAVES, ASKS = Message(Kind.LEAVE), Message(Kind.PULL)
WANTS_ALL = Message(Kind.PULL, stop=True)


class Losing(Pair):
    """Two sites, of workers 0 and 1 at server 3, and of worker 2 at server 4."""

    def lose(self, worker, server):
        replies = self.servers[server].on_loss(worker)
        self.queue += [(server, to, reply) for to, reply in replies if to in (*self.servers, 5)]
        return {to: reply for to, reply in replies if to not in (*self.servers, 5)}

    def succeed(self, worker, server):
        """A successor pulls, and comes in at the round that it is told."""
        asked = self.say(worker, server, ASKS)[worker]
        assert asked.kind is Kind.JOIN
        return self.say(worker, server, asked)


def test_a_site_goes_on_with_those_who_are_left_and_what_a_lost_worker_had_pushed():
    pair = Losing()
    pair.say(1, 3, push([4.0, 0.0, 0.0, 8.0]))
    assert pair.lose(1, 3) == {}
    [answer] = pair.say(0, 3, push([4.0, 0.0, 4.0, 0.0])).values()
    assert answer.tensor.tolist() == [2.0, 8.0, 15.0, 30.0]
    assert pair.succeed(1, 3)[1].step == 1
    assert pair.say(0, 3, push([2.0, 0.0, 0.0, 0.0], step=1, version=1)) == {}
    answers = pair.say(1, 3, push([6.0, 0.0, 0.0, 0.0], step=1, version=1))
    assert {to: reply.tensor.tolist()[0] for to, reply in answers.items()} == {0: 0.0, 1: 0.0}
    assert pair.servers[3].steps == {0: 2, 1: 2}


def test_nobody_waits_for_a_site_whose_workers_are_all_lost_until_it_goes_on():
    pair = Losing(lag=0)
    assert pair.say(2, 4, push([0.0, 0.0, 0.0, 2.0])) == {}  # it waits for the other site
    assert pair.lose(0, 3) == {}
    assert pair.lose(1, 3) == {}
    assert list(pair.deliver()) == [2]
    for step in range(1, 4):
        assert list(pair.say(2, 4, push([0.0] * 4, step=step, version=step))) == [2]
    pair.deliver()
    pair.succeed(1, 3)
    assert list(pair.say(1, 3, push([2.0, 0.0, 0.0, 0.0], version=1))) == []  # in round 5, as the others soon
    [told] = [message for _, to, message in pair.queue if to == 4]
    assert (told.kind, told.version) == (Kind.DIFFERENCE, 5)
    pair.deliver()
    answers = pair.say(2, 4, push([0.0] * 4, step=4, version=5))
    assert list({**answers, **pair.deliver()}) == [2, 1]
    assert pair.values(3).tolist() == pair.values(4).tolist() == [3.0, 8.0, 16.0, 31.0]


def test_a_site_whose_workers_are_lost_gives_its_last_when_the_final_parameters_are_wanted():
    pair = Losing(threshold=1.0)  # nothing of what is pushed is significant
    pair.say(2, 4, push([2.0, 2.0, 2.0, 2.0]))
    pair.lose(2, 4)
    pair.deliver()
    for worker in (0, 1):
        pair.say(worker, 3, LEAVES)
    assert pair.say(0, 3, WANTS_ALL) == {}
    final = pair.deliver()[0]
    assert final.tensor.tolist() == [3.0, 7.0, 15.0, 31.0]
    assert pair.say(2, 4, ASKS)[2].kind is Kind.LEAVE  # a successor would change what is final


def test_a_site_that_has_a_worker_again_gives_its_last_when_that_one_has_left():
    pair = Losing(threshold=1.0)
    pair.lose(2, 4)
    pair.deliver()
    for worker in (0, 1):
        pair.say(worker, 3, LEAVES)
    pair.succeed(2, 4)
    pair.say(0, 3, WANTS_ALL)
    assert pair.deliver() == {}
    pair.say(2, 4, push([2.0, 2.0, 2.0, 2.0]))
    assert pair.deliver() == {}
    pair.say(2, 4, LEAVES)
    assert pair.deliver()[0].tensor.tolist() == [3.0, 7.0, 15.0, 31.0]


def test_a_site_may_lose_its_workers_before_there_are_parameters():
    pair = Losing.__new__(Losing)
    pair.begin = lambda: None
    Pair.__init__(pair, lag=0)
    pair.lose(2, 4)
    Pair.begin(pair)
    assert pair.succeed(2, 4)[2].tensor.tolist() == [4.0, 8.0, 16.0, 32.0]
    pair.say(0, 3, push([0.0] * 4))
    assert set(pair.say(1, 3, push([0.0] * 4))) == {0, 1}  # nobody waits for the other site's round
