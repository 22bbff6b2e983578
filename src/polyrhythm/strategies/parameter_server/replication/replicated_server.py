"""A server of replicated shards: it has a copy of its own, and one of the shard of the server before it.

    worker ── PUSH ──▶ server k ── RELAY, PUSH ──▶ server k+1      takes the same entry, and keeps its answers back
           ◀─ answer ─         ◀───── PUSH ───────                 acknowledges it, by its kind

Answers of server k leave when server k+1 has the entry (primary and backup; the answers alone wait, not the server). So
an update of which any worker has heard is on both. When server k is lost, k+1 goes on with its shard: every worker
finds out by itself, and asks there what was not answered; what had been taken already is answered, and not taken
again. When k+1 is lost, k lets all answers go, and does without.

    successor of k ── JOIN ──▶ server k+1      hands over shard k as it is between two entries; what it takes from now
                   ◀─ STATE ─                  on is relayed: the successor follows, and k+1 leads
                   ── JOIN ──▶ server k-1      the same of shard k-1
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import inf

from polyrhythm.communication.message import Kind, Message, Reason, RefusedMessage
from polyrhythm.strategies.parameter_server.replication.entry import Log, Told
from polyrhythm.strategies.parameter_server.replication.shard_copy import Place, ShardCopy
from polyrhythm.strategies.parameter_server.serving.admission import admit_bare
from polyrhythm.strategies.parameter_server.serving.shard_server import Reply, ShardServer
from polyrhythm.strategies.server_part import ServerSetting
from polyrhythm.strategies.state import State

KEPT, GREETING = 1, 2
"""Tags of answers about the shard of the server before, and of a successor's word to workers that it is there."""


class ReplicatedServer:
    """One server; see `ServerPart` and `KeepingPart`.

    Args:
        setting: this server's.
        pushers: ranks that push gradients, in their order.
        make: makes the server of a shard, given its number.
    """

    def __init__(
        self, setting: ServerSetting, pushers: tuple[int, ...], make: Callable[[int], ShardServer]
    ) -> None:
        servers, index = setting.cast.servers, setting.index
        before, after = (index - 1) % len(servers), (index + 1) % len(servers)
        self._pushers = pushers
        self._heard: Counter[int] = Counter()
        self._own = ShardCopy(Log(index, make(index)), Place(servers[after], 0, pushers), leads=True)
        kept = Place(servers[before], KEPT, pushers)
        self._copies = [self._own, ShardCopy(Log(before, make(before)), kept, leads=False)]
        self._announced: dict[int, tuple[ShardCopy, int, Message]] = {}

    @property
    def parts(self) -> list[ShardServer]:
        """The servers of the shards that workers ask for here."""
        return [copy.part for copy in self._copies if copy.leads]

    @property
    def version(self) -> int:
        """Updates of its own shard."""
        return self._own.part.version

    @property
    def staleness(self) -> Counter[int]:
        """How many gradients were applied at which staleness, on all shards that workers ask for here."""
        return sum((part.staleness for part in self.parts), Counter())

    @property
    def dropped(self) -> int:
        """Gradients that came too late."""
        return sum(part.dropped for part in self.parts)

    @property
    def not_finite(self) -> int:
        """How many gradients were left out since they were not finite."""
        return sum(part.not_finite for part in self.parts)

    @property
    def ejected(self) -> int:
        """How many pushers were let go."""
        return sum(part.ejected for part in self.parts)

    @property
    def steps(self) -> dict[int, int]:
        """How many gradients of each pusher need not be pushed again."""
        return {rank: min(copy.part.steps[rank] for copy in self._copies) for rank in self._pushers}

    @property
    def left_out(self) -> dict[int, list[list[int]]]:
        """For each rank, stretches of its steps of which no gradient was applied, of all shards asked for here."""
        found: dict[int, list[list[int]]] = {}
        for part in self.parts:
            for rank, stretches in part.left_out.items():
                found.setdefault(rank, []).extend(stretches)
        return found

    @property
    def done(self) -> bool:
        """Whether both shards are over, and all that was relayed has been acknowledged."""
        return all(copy.done for copy in self._copies)

    @property
    def whole(self) -> bool:
        """Whether it has all of both shards, so that either of those who have the others may be lost."""
        return all(copy.whole for copy in self._copies)

    def watch(self, told: Told) -> None:
        """Lets somebody hear of every entry of both shards that can be lost no more; of some, from both servers."""
        for copy in self._copies:
            copy.log.told = told

    def rejoin(self, incarnation: int) -> list[Reply]:
        """Begins as the successor of so many lost servers: greets workers, and asks its neighbours for both shards."""
        greetings = [(rank, Message(Kind.JOIN, tag=GREETING)) for rank in self._pushers]
        return greetings + [copy.begin_empty(incarnation) for copy in self._copies]

    def on_message(self, source: int, message: Message) -> list[Reply]:
        """Takes a message from a pusher, or from another server, and gives the replies.

        Raises:
            RefusedMessage: a message that nobody of ours sends now.
        """
        if source in self._announced:
            copy, pusher, announcement = self._announced.pop(source)
            if source == pusher:
                return copy.ask_after_loss(pusher, message, int(announcement.weight))
            return copy.follow(pusher, message, again=announcement.stop)
        if message.kind is Kind.RELAY:
            self._announce(source, message)
            return []
        if source in self._pushers:
            return self._own.ask(source, message)
        return self._hear_server(self._copy(source, message), message)

    def on_loss(self, rank: int) -> list[Reply]:
        """Goes on without a server, or without a pusher until a successor of it pulls."""
        return self.on_losses(rank, self._heard[rank] + 1)

    def on_losses(self, rank: int, losses: int) -> list[Reply]:
        """Goes on without so many that had a rank."""
        self._heard[rank] = losses
        self._announced.pop(rank, None)
        replies: list[Reply] = []
        for copy in self._copies:
            if rank in self._pushers:
                replies += copy.lose_pusher(rank, losses)
            elif rank == copy.other:
                replies += copy.lose_other()
        return replies

    def state_of(self, shard: int) -> State:
        """Gives all that a resumed server of a shard needs.

        Raises:
            RefusedMessage: it is none of its two, or there are no parameters yet.
        """
        return self._part_of(shard).state()

    def load_state_of(self, shard: int, state: State) -> None:
        """Takes back what `state_of` gave, for one of its two shards."""
        self._part_of(shard).load_state(state)

    def state(self) -> State:
        """Gives the state of its own shard."""
        return self._own.part.state()

    def load_state(self, state: State) -> None:
        """Takes back what `state` gave."""
        self._own.part.load_state(state)

    def _part_of(self, shard: int) -> ShardServer:
        for copy in self._copies:
            if copy.log.shard == shard:
                return copy.part
        raise RefusedMessage(Reason.NUMBERS, f"shard {shard} is not here")

    def _copy(self, source: int, message: Message) -> ShardCopy:
        """Gives the copy that another server speaks of."""
        for copy in self._copies:
            if (copy.other, copy.log.shard) == (source, message.version):
                return copy
        text = f"rank {source} has nothing to say of shard {message.version} here ({message.kind.name})"
        raise RefusedMessage(Reason.SENDER, text)

    def _hear_server(self, copy: ShardCopy, message: Message) -> list[Reply]:
        if message.kind is Kind.STATE:
            copy.take_over(message)
            return []
        admit_bare(message._replace(version=0))
        return copy.hand_over() if message.kind is Kind.JOIN else copy.acknowledged(message)

    def _announce(self, source: int, message: Message) -> None:
        """Notes whose entry the next message of a server is, or of which shard a worker's, whose server is lost."""
        if not 0 <= message.step < len(self._pushers):
            raise RefusedMessage(Reason.SENDER, f"rank {source} relayed for pusher {message.step}")
        pusher = self._pushers[message.step]
        if source not in self._pushers:
            self._announced[source] = self._copy(source, message), pusher, message
            return
        copies = [copy for copy in self._copies if copy.log.shard == message.version]
        if pusher != source or message.stop or not copies or not 0 <= message.weight < inf:
            text = f"rank {source} relayed for pusher {message.step}, of shard {message.version}"
            raise RefusedMessage(Reason.SENDER, text)
        self._announced[source] = copies[0], pusher, message
