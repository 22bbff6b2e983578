"""A server of replicated shards: it has a copy of its own, and one of the shard of the server before it.

    worker ── PUSH ──▶ server k ── RELAY, PUSH ──▶ server k+1    takes the same entry, withholds its answers
           ◀─ answer ─         ◀───── PUSH ───────               acknowledges it, by its kind

Answers of server k leave when server k+1 has the entry (primary and backup; the answers alone wait, not the
server). So an update that any worker has received is on both. When server k is lost, k+1 continues with its
shard: every worker detects the loss by itself, and asks there for open answers; requests that had been taken
already are answered, and not taken again. When k+1 is lost, k releases all answers, and does without.

    replacement of k ─ JOIN ─▶ server k+1    sends shard k as it is between two entries; later entries
                   ◀─ STATE ─                are relayed: the replacement follows, and k+1 leads
                   ── JOIN ──▶ server k-1    the same of shard k-1
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from polyrhythm.communication.message import (
    Kind,
    Message,
    Reason,
    RefusedMessage,
)
from polyrhythm.strategies.parameter_server.replication.messages import (
    GREETING,
    KEPT,
    AboutShard,
    Handover,
    Relay,
)
from polyrhythm.strategies.parameter_server.replication.shard_copy import ShardCopy
from polyrhythm.strategies.parameter_server.replication.shard_log import Log, Observer
from polyrhythm.strategies.parameter_server.serving.admission import admit_bare
from polyrhythm.strategies.parameter_server.serving.rule import Reply
from polyrhythm.strategies.parameter_server.serving.session import ServerSession
from polyrhythm.strategies.server_part import ServerSetting, ServerStats
from polyrhythm.strategies.state import OF_SERVER, Part, State, StateField, Stateful


class ReplicatedServer(Stateful):
    """One server; see `ServerPart` and `KeepingPart`.

    Args:
        pushers: ranks that push gradients, in their order.
        make: factory of the server of a shard, given its number.
    """

    fields = (StateField("", Part, OF_SERVER, at="_own.part"),)  # of its own shard

    def __init__(
        self, setting: ServerSetting, pushers: tuple[int, ...], make: Callable[[int], ServerSession]
    ) -> None:
        servers, index = setting.roles.servers, setting.index
        before, after = (index - 1) % len(servers), (index + 1) % len(servers)
        self._pushers = pushers
        self._latest: Counter[int] = Counter()
        self._own = ShardCopy(Log(index, make(index)), servers[after], 0, pushers, leads=True)
        kept = ShardCopy(Log(before, make(before)), servers[before], KEPT, pushers, leads=False)
        self._copies = [self._own, kept]
        self._announced: dict[int, tuple[ShardCopy, int, Relay]] = {}

    @property
    def parts(self) -> list[ServerSession]:
        """The servers of the shards that workers ask for here."""
        return [copy.part for copy in self._copies if copy.leads]

    @property
    def steps(self) -> dict[int, int]:
        """Number of gradients of each pusher that need not be pushed again."""
        return {rank: min(copy.part.steps[rank] for copy in self._copies) for rank in self._pushers}

    def stats(self) -> ServerStats:
        """Return the counters of all shards served here; the version is that of its own shard."""
        counted = [part.stats() for part in self.parts]
        left_out: dict[int, list[list[int]]] = {}
        for stats in counted:
            for rank, stretches in stats.left_out.items():
                left_out.setdefault(rank, []).extend(stretches)
        return ServerStats(
            dict(sum((Counter(stats.staleness) for stats in counted), Counter())),
            self._own.part.version,
            self.steps,
            sum(stats.not_finite for stats in counted),
            sum(stats.ejected for stats in counted),
            sum(stats.dropped for stats in counted),
            left_out,
        )

    @property
    def done(self) -> bool:
        """Whether both shards are over, and all that was relayed has been acknowledged."""
        return all(copy.done for copy in self._copies)

    @property
    def whole(self) -> bool:
        """Whether it has all of both shards, so that either holder of the others may be lost."""
        return all(copy.whole for copy in self._copies)

    def watch(self, observer: Observer) -> None:
        """Report every entry of both shards that can be lost no more; some of them from both servers."""
        for copy in self._copies:
            copy.log.observer = observer

    def rejoin(self, generation: int) -> list[Reply]:
        """Begin as the replacement of this generation: greet workers, request both shards from the neighbors."""
        greetings = [(rank, Message(Kind.JOIN, tag=GREETING)) for rank in self._pushers]
        return greetings + [copy.begin_empty(generation) for copy in self._copies]

    def on_message(self, source: int, message: Message) -> list[Reply]:
        """Handle a message from a pusher or another server; raise `RefusedMessage` if no rank sends it now."""
        if source in self._announced:
            copy, pusher, relay = self._announced.pop(source)
            if source == pusher:
                return copy.ask_after_loss(pusher, message, relay.losses)
            return copy.follow(pusher, message, again=relay.again)
        if message.kind is Kind.RELAY:
            self._announce(source, message)
            return []
        if source in self._pushers:
            return self._own.ask(source, message)
        return self._handle_server(source, message)

    def on_loss(self, rank: int) -> list[Reply]:
        """Continue without a server, or without a pusher until a replacement of it pulls."""
        return self.on_losses(rank, self._latest[rank] + 1)

    def on_losses(self, rank: int, losses: int) -> list[Reply]:
        """Handle `losses` successive failures of `rank`."""
        self._latest[rank] = losses
        self._announced.pop(rank, None)
        replies: list[Reply] = []
        for copy in self._copies:
            if rank in self._pushers:
                replies += copy.lose_pusher(rank, losses)
            elif rank == copy.other:
                replies += copy.lose_other()
        return replies

    def state_of(self, shard: int) -> State:
        """Return all that a resumed server of a shard needs; raise `RefusedMessage` if there is none here."""
        return self.part_of(shard).state()

    def load_state_of(self, shard: int, state: State) -> None:
        """Take back what `state_of` gave, for one of its two shards."""
        self.part_of(shard).load_state(state)

    def part_of(self, shard: int) -> ServerSession:
        """Return the session of a shard; raise `RefusedMessage` if it is none of its two."""
        for copy in self._copies:
            if copy.log.shard == shard:
                return copy.part
        raise RefusedMessage(Reason.NUMBERS, f"shard {shard} is not here")

    def _copy(self, source: int, shard: int, kind: Kind) -> ShardCopy:
        for copy in self._copies:
            if (copy.other, copy.log.shard) == (source, shard):
                return copy
        text = f"rank {source} sends nothing about shard {shard} here ({kind.name})"
        raise RefusedMessage(Reason.SENDER, text)

    def _handle_server(self, source: int, message: Message) -> list[Reply]:
        if message.kind is Kind.STATE:
            handover = Handover.of(message)
            self._copy(source, handover.shard, message.kind).take_over(handover)
            return []
        about = AboutShard.of(message)
        copy = self._copy(source, about.shard, about.kind)
        admit_bare(message._replace(version=0))
        return copy.transfer() if about.kind is Kind.COPY else copy.acknowledged(about)

    def _announce(self, source: int, message: Message) -> None:
        """Note the pusher of a server's next entry, or the lost server's shard that a worker's is for."""
        relay = Relay.of(source, message)
        if not 0 <= relay.pusher < len(self._pushers):
            raise RefusedMessage(Reason.SENDER, f"rank {source} relayed for pusher {relay.pusher}")
        pusher = self._pushers[relay.pusher]
        if source not in self._pushers:
            self._announced[source] = self._copy(source, relay.shard, message.kind), pusher, relay
            return
        copies = [copy for copy in self._copies if copy.log.shard == relay.shard]
        if pusher != source or relay.again or not copies:
            text = f"rank {source} relayed for pusher {relay.pusher}, of shard {relay.shard}"
            raise RefusedMessage(Reason.SENDER, text)
        self._announced[source] = copies[0], pusher, relay
