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


def test_a_site_without_workers_holds_nothing_and_is_let_go():
    made = site_session(Gaia(), (), (3, 4), ())
    made.load_state(unpack_tensors(pack_tensors(*made.state())))
    made.on_message(3, Message(Kind.OVER))
    assert made.done


def test_what_nobody_sends_is_named():
    pair = Pair()
    with pytest.raises(RunError, match="a site received PUSH from rank 2, which is no part of it"):
        pair.say(2, 3, push([1.0] * 4))
    with pytest.raises(RunError, match="cannot do anything with VECTOR from rank 1"):
        pair.say(1, 3, Message(Kind.VECTOR, torch.zeros(4)))


@pytest.mark.parametrize("wrong", [{"version": 0}, {"version": 1, "tensor": torch.zeros(1)}])
def test_an_announcement_that_cannot_be_is_refused(wrong):
    pair = Pair(barrier=0.5)
    with pytest.raises(RunError, match="ANNOUNCE arrived"):
        pair.say(3, 4, Message(Kind.ANNOUNCE, **wrong))
    assert set(pair.say(2, 4, Message(Kind.PULL))) == {2}
