"""A site's server: a shard of its own full copy of the parameters.

workers of the site ── PUSH ─▶ held until all are there ─▶ optimiser step: w += u, U += u
other sites         ◀─ what of U is significant ──┘      ─▶ w += what they send
workers of the site ◀─ PARAMETERS ── unless another site is too many rounds behind, or has announced a large packet

Without a lost worker its site goes on with those who are left, as servers in lock-step do. A site whose workers are all
lost is not waited for; when one of them has a successor, its rounds count on from the slowest site's. In the end such a
site is asked for its last, after which it lets nobody in. Whoever had asked for that may be lost, and has a successor:
one that asks again, and has no step left to take.
"""

from __future__ import annotations

from collections import Counter

from polyrhythm.communication.message import Kind, Message, Reason, RefusedMessage
from polyrhythm.strategies.parameter_server.consistency.synchronous import SynchronousGate
from polyrhythm.strategies.parameter_server.serving.admission import (
    admit_announcement,
    admit_bare,
    admit_push,
    payload,
)
from polyrhythm.strategies.parameter_server.serving.gate import Decision
from polyrhythm.strategies.parameter_server.serving.held import Held
from polyrhythm.strategies.parameter_server.serving.presence import Presence
from polyrhythm.strategies.parameter_server.serving.shard import Pushed
from polyrhythm.strategies.parameter_server.sites.post import Post
from polyrhythm.strategies.parameter_server.sites.site_copy import SiteCopy
from polyrhythm.strategies.parameter_server.sites.site_rule import SiteRule
from polyrhythm.strategies.state import State

Reply = tuple[int, Message]


class SiteServer:
    """One server; see `ServerPart`.

    Args:
        members: ranks of the site's workers.
        peers: ranks of the same shard's servers at the other sites that have workers.
        idle: ranks of the same shard's servers at sites without.
        rule: of all sites.

    Attributes:
        done: whether it has been let go.
    """

    def __init__(
        self, members: tuple[int, ...], peers: tuple[int, ...], idle: tuple[int, ...], rule: SiteRule
    ) -> None:
        self.done = False
        self._presence = Presence(members)
        self._post = Post(peers)
        self._idle = idle
        self._rule = rule
        self._copy = SiteCopy()
        self._gate = SynchronousGate(len(members))
        self._held = Held(len(members))
        self._lost: set[int] = set()
        self._ending = self._through = False
        self._asker: int | None = None
        """Who has asked for the final parameters, be it there or not."""
        self._waiting: list[int] = []
        self._reading: list[int] = []
        self._stop = False

    @property
    def version(self) -> int:
        """Updates of this copy so far, those from other sites included."""
        return self._copy.version

    @property
    def staleness(self) -> Counter[int]:
        """How many gradients were applied at which staleness."""
        return self._copy.staleness

    @property
    def steps(self) -> dict[int, int]:
        """How many gradients of each worker of the site it holds."""
        return dict(zip(self._presence.pushers, self._held.steps, strict=True))

    def on_message(self, source: int, message: Message) -> list[Reply]:
        """Takes a message from a worker of the site or from another site, and gives the replies.

        Raises:
            RefusedMessage: a message that none of them sends.
        """
        if source not in self._presence.numbers:
            return self._hear_server(source, message)
        if message.kind is Kind.PUSH:
            return self._push(source, message)
        if message.kind is Kind.PULL:
            return self._pull(source, message)
        if message.kind is Kind.LEAVE:
            return self._leave(source)
        if message.kind is Kind.JOIN:
            admit_bare(message._replace(step=0))
            return self._carry_out(self._gate.enter(self._presence.numbers[source], message.step))
        return self._begin(source, message, self._post.peers)

    def on_loss(self, rank: int) -> list[Reply]:
        """Goes on without a worker of the site, until a successor pulls; what it has pushed still counts."""
        if rank not in self._presence.numbers or not self._presence.lose(rank):
            return []
        self._lost.add(rank)
        self._waiting = [other for other in self._waiting if other != rank]
        self._reading = [other for other in self._reading if other != rank]
        return self._go_on_without(rank)

    def state(self) -> State:
        """Gives all that a resumed server needs: parameters, what is unsent, and what is on its way."""
        if not self._copy.ready:
            return {}, {}
        tensors, facts = self._copy.state()
        kept, clocks = self._post.state()
        return tensors | kept, facts | {"steps": list(self._held.steps), "post": clocks}

    def load_state(self, state: State) -> None:
        """Takes back what `state` gave; worker 0's initial parameters are then not needed."""
        if not state[1]:
            return
        tensors, facts = state
        self._held.steps = list(facts["steps"])
        self._post.load_state(tensors, facts["post"])
        self._copy.load_state(state)

    def _hear_server(self, source: int, message: Message) -> list[Reply]:
        if message.kind is Kind.LEAVE and message.stop:
            self.done = True
            return []
        if source not in self._post.peers:
            raise RefusedMessage(
                Reason.SENDER, f"a site heard {message.kind.name} from rank {source}, which is no part of it"
            )
        if message.kind is Kind.ANNOUNCE:
            admit_announcement(message)
            self._post.expect(source, message)
            asked = self._presence.final is not None and message.stop
            return self._let_on() + ([(source, Message(Kind.PULL, stop=True))] if asked else [])
        if message.kind is Kind.PULL:
            admit_bare(message)
            self._ending = True
            return self._send_the_last()
        if message.kind not in (Kind.DIFFERENCE, Kind.LEAVE):
            return self._begin(source, message, ())
        packet = self._post.hear(source, message)
        self._stop |= message.stop
        if packet is not None:
            self._copy.take_in(packet)
        return self._let_on() + self._answer_final()

    def _begin(self, source: int, message: Message, tell: tuple[int, ...]) -> list[Reply]:
        """Takes the plan or the parameters, which worker 0's site passes on to the others."""
        if message.kind is Kind.CONFIGURE:
            self._copy.configure(message)
            return [(peer, message) for peer in tell]
        if message.kind is not Kind.PARAMETERS:
            raise RefusedMessage(
                Reason.KIND, f"a site cannot do anything with {message.kind.name} from rank {source}"
            )
        values = payload(message)
        replies = [(peer, message._replace(tensor=values.clone())) for peer in tell]
        if self._copy.initialise(values):
            replies += self._post.tell_again()
        asking, self._presence.asking = self._presence.asking, []
        return replies + [self._answer(rank) for rank in asking]

    def _pull(self, source: int, message: Message) -> list[Reply]:
        if message.stop:  # the final parameters
            self._presence.final, self._asker, self._ending = source, source, True
            asked = [(peer, Message(Kind.PULL, stop=True)) for peer in self._post.asleep]
            return self._send_the_last() + self._answer_final() + asked
        number = self._presence.numbers[source]
        if not self._presence.is_there(source):  # a successor
            if self._ending and source != self._asker:
                return [(source, Message(Kind.LEAVE))]
            self._presence.enter(source)
            self._lost.discard(source)
            self._gate.join(number)
            return [(source, Message(Kind.JOIN, step=self._gate.rounds.invitation(number) or 0))]
        if not self._copy.ready:
            self._presence.asking.append(source)
            return []
        self._reading.append(source)
        return self._let_read()

    def _push(self, source: int, message: Message) -> list[Reply]:
        worker = self._presence.numbers[source]
        due = self._held.steps[worker]
        admit_push(message, self._copy.values, self.version, due)
        self._stop |= message.stop
        if message.step < due:
            if not self._gate.rounds.is_next(worker, message.step):
                return [self._answer(source)]
            message = message._replace(weight=0.0)  # the server of another shard may lack it
        self._held.hold(Pushed(worker, message))
        return self._carry_out(self._gate.arrive(worker, message.step))

    def _carry_out(self, decision: Decision) -> list[Reply]:
        """Makes a round's update, if there is one; who is to be answered waits for the other sites."""
        taken = [self._held.take(worker) for worker in decision.apply]
        self._held.count(taken)
        for worker in decision.answer:
            self._held.settle(worker, None)
        sources = [self._presence.pushers[worker] for worker in decision.answer]
        if not self._copy.ready:
            self._presence.asking += sources
            return []
        self._waiting += sources
        return (self._update([entry.message for entry in taken]) if taken else []) + self._let_on()

    def _update(self, pushed: list[Message]) -> list[Reply]:
        """Makes a round's update, and tells the other sites what of all updates is significant."""
        self._copy.update(pushed)
        packet = self._copy.significant(self._rule.threshold_of(self._post.clock + 1))
        large = self._rule.is_large(packet, self._copy.values)
        return self._post.tell(packet, stop=self._stop, large=large)

    def _let_on(self) -> list[Reply]:
        """Answers the workers of a round, unless another site is too far behind; and all who may read."""
        if self._stop or self._post.clock - self._post.slowest <= self._rule.lag:
            self._reading += self._waiting
            self._waiting = []
        return self._let_read()

    def _let_read(self) -> list[Reply]:
        """Answers those who want to read, unless a packet has been announced that they must not miss."""
        if self._post.awaits:
            return []
        reading, self._reading = self._reading, []
        return [self._answer(rank) for rank in reading]

    def _leave(self, source: int) -> list[Reply]:
        """A worker leaves; with the last, all that is unsent goes to the others. Worker 0's second leave ends it."""
        if not self._presence.leave(source):
            self.done = True
            return [(rank, Message(Kind.LEAVE, stop=True)) for rank in (*self._post.peers, *self._idle)]
        return self._go_on_without(source)

    def _go_on_without(self, rank: int) -> list[Reply]:
        replies = self._carry_out(self._gate.leave(self._presence.numbers[rank]))
        if self._lost and not (self._presence.there or self._ending):
            return replies + self._post.sleep()
        return replies + self._send_the_last() + self._answer_final()

    def _send_the_last(self) -> list[Reply]:
        """Sends all that is unsent, if no worker of this site will push again."""
        if self._presence.there or self._through:
            return []
        self._through = True
        return self._post.tell(self._copy.untold(), stop=False, last=True)

    def _answer_final(self) -> list[Reply]:
        final = self._presence.ready_to_end
        if final is None or not self._post.all_gone:
            return []
        self._presence.final = None  # once
        return [self._answer(final)]

    def _answer(self, rank: int) -> Reply:
        values = self._copy.shown()
        return rank, Message(
            Kind.PARAMETERS, values, version=self.version, step=self.steps[rank], stop=self._stop
        )
