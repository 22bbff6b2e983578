"""A server of replicated shards: it has one of its own, and keeps that of the server before it.

    worker ── PUSH ──▶ server k ── RELAY, PUSH ──▶ server k+1      takes the same entry, and keeps its answers back
           ◀─ answer ─         ◀───── PUSH ───────                 acknowledges it, by its kind

Answers of server k leave when server k+1 has the entry (primary and backup; the answers alone wait, not the server). So
an update of which any worker has heard is on both. When server k is lost, k+1 goes on with its shard: every worker
finds out by itself, and asks there what was not answered; what had been taken already is answered, and not taken
again. When k+1 is lost, k lets all answers go, and does without.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from polyrhythm.communication.message import Kind, Message, Reason, RefusedMessage
from polyrhythm.strategies.parameter_server.replication.entry import Entry, Log, Told
from polyrhythm.strategies.parameter_server.replication.kept_shard import KeptShard
from polyrhythm.strategies.parameter_server.serving.shard_server import Reply, ShardServer
from polyrhythm.strategies.server_part import ServerSetting
from polyrhythm.strategies.state import State


class ReplicatedServer:
    """One server; see `ServerPart`.

    Args:
        setting: this server's.
        pushers: ranks that push gradients, in their order.
        make: makes the server of a shard, given its number.
    """

    def __init__(
        self, setting: ServerSetting, pushers: tuple[int, ...], make: Callable[[int], ShardServer]
    ) -> None:
        servers, index = setting.cast.servers, setting.index
        before = (index - 1) % len(servers)
        self._pushers = pushers
        self._numbers = {rank: number for number, rank in enumerate(pushers)}
        self._log = Log(index, make(index))
        self._own = self._log.part
        self._kept = KeptShard(Log(before, make(before)), pushers)
        self._primary = servers[before]
        self._backup: int | None = servers[(index + 1) % len(servers)]
        self._unacknowledged: deque[Entry] = deque()
        self._relayed: dict[int, int] = {}

    @property
    def parts(self) -> list[ShardServer]:
        """The servers of the shards that workers ask for here."""
        return [self._own, self._kept.part] if self._kept.serves else [self._own]

    @property
    def version(self) -> int:
        """Updates of its own shard."""
        return self._own.version

    @property
    def staleness(self) -> Counter[int]:
        """How many gradients were applied at which staleness, on all shards that workers ask for here."""
        return sum((part.staleness for part in self.parts[1:]), Counter(self._own.staleness))

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
        return {rank: min(part.steps[rank] for part in self.parts) for rank in self._pushers}

    @property
    def done(self) -> bool:
        """Whether both shards are over, and all that was relayed has been acknowledged."""
        return self._own.done and self._kept.part.done and not self._unacknowledged

    def watch(self, told: Told) -> None:
        """Lets somebody hear of every entry of both shards that can be lost no more; of some, from both servers."""
        self._log.told = self._kept.log.told = told

    def on_message(self, source: int, message: Message) -> list[Reply]:
        """Takes a message from a pusher, or from another server, and gives the replies.

        Raises:
            RefusedMessage: a message that nobody of ours sends now.
        """
        if source in self._relayed:
            pusher = self._pushers[self._relayed.pop(source)]
            return self._for_kept(source, pusher, message)
        if message.kind is Kind.RELAY:
            return self._announce(source, message)
        if source == self._backup and source not in self._numbers:
            return self._acknowledged(message)
        return self._take(source, message)

    def on_loss(self, rank: int) -> list[Reply]:
        """Goes on without a server, or without a pusher until a successor of it pulls."""
        self._relayed.pop(rank, None)
        replies: list[Reply] = []
        if rank == self._backup:
            self._backup = None
            while self._unacknowledged:
                replies += self._release()
        if rank == self._primary:
            replies += self._kept.promote()
        if rank in self._numbers:
            for entry in self._unacknowledged:  # what is owed to the lost one is not for its successor
                entry.replies[:] = [reply for reply in entry.replies if reply[0] != rank]
            replies = self._take(rank, None) + self._kept.lose(rank)
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
        return self._own.state()

    def load_state(self, state: State) -> None:
        """Takes back what `state` gave."""
        self._own.load_state(state)

    def _part_of(self, shard: int) -> ShardServer:
        for log in (self._log, self._kept.log):
            if log.shard == shard:
                return log.part
        raise RefusedMessage(Reason.NUMBERS, f"shard {shard} is not here")

    def _take(self, source: int, message: Message | None) -> list[Reply]:
        """Takes an entry of its own shard; its answers wait until the backup has it as well."""
        if self._own.done:  # the backup may be through, and acknowledges nothing any more
            return [] if message is None else self._own.on_message(source, message)
        relayed = message
        if (
            message is not None and message.kind is Kind.PARAMETERS
        ):  # which this server changes in place from now on
            relayed = message.received()
        entry = self._log.take(source, message)
        if message is not None and message.kind is Kind.LEAVE:
            entry.replies.append((source, Message(Kind.LEAVE)))  # else nobody would know that both have it
        self._unacknowledged.append(entry)
        if self._backup is None:
            return self._release()
        announced = Message(Kind.RELAY, step=self._numbers[source], stop=message is None)
        following = [] if relayed is None else [(self._backup, relayed)]
        return [(self._backup, announced), *following]

    def _acknowledged(self, message: Message) -> list[Reply]:
        """The backup has one more entry; it says so by the kind, so that bytes of steps are told from others."""
        if not self._unacknowledged:
            raise RefusedMessage(
                Reason.ORDER, f"a server acknowledged a {message.kind.name} that is not there"
            )
        return self._release()

    def _release(self) -> list[Reply]:
        entry = self._unacknowledged.popleft()
        self._log.tell(entry)
        return entry.replies

    def _announce(self, source: int, message: Message) -> list[Reply]:
        """Notes whose entry the next message of a server is, or whose request a worker's is, for the kept shard."""
        allowed = source == self._primary or self._numbers.get(source) == message.step
        if not allowed or not 0 <= message.step < len(self._pushers):
            raise RefusedMessage(Reason.SENDER, f"rank {source} relayed for pusher {message.step}")
        if not message.stop:
            self._relayed[source] = message.step
            return []
        if source != self._primary:
            raise RefusedMessage(Reason.SENDER, f"rank {source} said that pusher {message.step} is lost")
        return self._for_kept(source, self._pushers[message.step], None)

    def _for_kept(self, source: int, pusher: int, message: Message | None) -> list[Reply]:
        if source != self._primary:
            assert message is not None, "only a server says that others are lost"
            return self._kept.ask(pusher, message)
        self._kept.follow(pusher, message)
        return [(source, Message(Kind.LEAVE if message is None else message.kind))]
