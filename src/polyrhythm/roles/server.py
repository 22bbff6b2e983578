"""The server's loop: receive a message, let the server part decide, send the replies.

A message that no rank of the run would send is refused: it changes nothing, is not answered, and is counted
by its reason; the first one of each kind is written to the run's log. It never ends the run, since a stranger
may have sent it.

`Outbox` sends replies in the background while the server continues to receive; `States` carries the states of
shards between the server part and the coordinator; `Refusals` counts refused messages; `Reporter` reports the
server's progress every `REPORT_EVERY_S` seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from polyrhythm.communication.communicator import Handle
from polyrhythm.communication.message import (
    Kind,
    Message,
    Reason,
    RefusedMessage,
    pack_json,
)
from polyrhythm.errors import PeerLost
from polyrhythm.events import Notice, ServerProgress
from polyrhythm.roles.control_messages import (
    EventReport,
    ServerReady,
    ShardState,
    ShardStateRequest,
    StepsCounted,
)
from polyrhythm.roles.leader_channel import LeaderChannel
from polyrhythm.roles.world import LEADER, HandleLoss, HandleMessage, World
from polyrhythm.strategies.fault_policy import FaultPolicy
from polyrhythm.strategies.server_part import CountsLatestStaleness, KeepingPart, ServerPart, ServerSetting
from polyrhythm.strategies.strategy import Strategy
from polyrhythm.training.checkpoint import restoring

_OUTSIDE_STEPS = frozenset(
    [
        *(Kind.CONFIGURE, Kind.PARAMETERS, Kind.PULL, Kind.LEAVE, Kind.JOIN, Kind.STATE, Kind.COPY),
        *(Kind.BROKEN, Kind.REPORT),
    ]
)
"""Messages at the start and end of a run or a replacement, and after losses; their bytes are not counted by workers."""
_CHECKPOINT, _STATE, _PART = Kind.CHECKPOINT, Kind.STATE, Kind.PART  # an enum is slow to ask for its members
_NOTHING = Message(Kind.CLOSE)
_Replies = list[tuple[int, Message]]


def serve(
    strategy: Strategy, world: World, resume: bool = False, *, finite: bool = False, draws: bool = False
) -> None:
    """Serve until all workers have left.

    Args:
        strategy: maker of the server part.
        world: context of this rank.
        resume: whether the coordinator sends out a checkpoint first.
        finite: whether all gradients are known to be finite.
        draws: whether workers draw their batches, so that others take the unfinished ones of a failed worker.
    """
    network, now = world.network, world.clock.now
    servers, workers = world.roles.servers, frozenset(world.roles.workers)
    index = servers.index(network.rank)
    faults = strategy.faults(len(world.roles.workers))
    part = strategy.server(ServerSetting(index, world.roles, finite, network.lent_memory()))
    channel = LeaderChannel(world, strategy)
    states = States(part, index, channel)
    states.resume(faults.shards_of(index) if resume and not world.rejoins else [])
    reporter = Reporter(index, part, world)
    outbox = Outbox(faults, world)
    rejoining = part if world.rejoins and isinstance(part, KeepingPart) else None
    if rejoining is not None:  # it requests its shards from the others
        outbox.send(rejoining.rejoin(world.generation))
    refusals = Refusals(index, world, channel)
    on_message, on_loss = _handlers(part, world)
    bytes_sent, bytes_inside, traffic = 0, 0, network.traffic
    looked_at = now()
    # Not `while not part.done`: Python 3.11 specializes a function that is called once only at a `while True`.
    while True:
        if part.done:
            break
        try:
            source, message = network.receive()
        except PeerLost as loss:
            if not world.continues_without(loss.rank, faults):
                raise
            outbox.send(_handle_loss(part, on_loss, channel, loss))
            if draws and loss.rank in (counted := part.stats().steps):
                channel.send(StepsCounted(loss.rank, counted[loss.rank], loss.losses).message())
            looked_at = now()
            continue
        if channel.leader_lost:
            channel.check()
        kind = message[0]  # by its place: the fields of a named tuple are looked up in its class each time
        if kind is _CHECKPOINT or (kind is _STATE and source not in servers):
            with refusals.of(source):
                states.on_message(source, message)
            looked_at = now()
            continue
        of_a_step = kind not in _OUTSIDE_STEPS
        before, inside_before, began = traffic.bytes_sent, traffic.bytes_inside, now()
        if of_a_step:
            reporter.took(looked_at, began)
        try:  # `refusals.of` would take longer than all else that a message costs here
            replies = on_message(source, message)
            message = _NOTHING  # its memory is returned to its sender, which may use it once it is answered
            ended = now()
            reporter.updating_s += ended - began
            if of_a_step and source in workers:
                reporter.answered(source, replies, began, ended)
            outbox.send(replies)
            del replies  # else sent tensors would be held, and their memory not changed in place
        except RefusedMessage as refusal:
            refusals.note(source, refusal)
        del message  # its memory is returned to its sender now, not at the next message
        if of_a_step:
            bytes_sent += traffic.bytes_sent - before
            bytes_inside += traffic.bytes_inside - inside_before
        looked_at = now()
        if looked_at - reporter.reported_at_s >= REPORT_EVERY_S:
            reporter.notify(channel)
            looked_at = now()
        if rejoining is not None and rejoining.whole:
            rejoining = None
            channel.send(ServerReady(world.generation).message())
            looked_at = now()
    outbox.flush()
    if reporter.taken:
        reporter.notify(channel)
    report: dict[str, Any] = vars(part.stats()) | {
        "bytes_sent": bytes_sent,
        "bytes_inside": bytes_inside,
        "refused": dict(refusals.counted + world.refused),
    }
    if world.arrivals is not None:
        report["arrivals"] = world.arrivals.to_json()
    channel.send(Message(Kind.REPORT, pack_json(report)))


def _handlers(part: ServerPart, world: World) -> tuple[HandleMessage, HandleLoss]:
    found: tuple[HandleMessage, HandleLoss] = part.on_message, part.on_loss
    if world.observer is not None:
        found = world.observer.handlers(world.network.rank, part)
    handle, on_loss = _with_one_thread(found[0]), _with_one_thread(found[1])
    if world.handling is None:
        return handle, on_loss
    handling = world.handling

    def with_simulated_delay(source: int, message: Message) -> list[tuple[int, Message]]:
        if message.tensor is not None and message.kind not in _OUTSIDE_STEPS:
            handling(message)
        return handle(source, message)

    return with_simulated_delay, on_loss


def _with_one_thread(handle: Callable[..., _Replies]) -> Callable[..., _Replies]:
    """Compute with one thread in a simulation as well, as a server's process does: several threads round otherwise."""
    threads = torch.get_num_threads()
    if threads == 1:
        return handle

    def handled(*about: Any) -> _Replies:
        torch.set_num_threads(1)
        try:
            return handle(*about)
        finally:
            torch.set_num_threads(threads)

    return handled


def _handle_loss(
    part: ServerPart,
    on_loss: HandleLoss,
    channel: LeaderChannel,
    loss: PeerLost,
) -> list[tuple[int, Message]]:
    channel.note_loss(loss)
    if isinstance(part, KeepingPart):
        return _with_one_thread(part.on_losses)(loss.rank, loss.losses)
    return on_loss(loss.rank)


class Outbox:
    """Sends one server's replies in the background.

    A reply's tensor never changes afterwards (see `ServerPart`), so the server does not wait until it is sent. A rank
    that is answered again has received the previous answer, so at most one reply per rank is kept, with its parts. A
    reply to a failed rank that the run survives is dropped.

    Args:
        faults: fault policy, which decides which failures the run survives.
        world: context of the server.
    """

    def __init__(self, faults: FaultPolicy, world: World) -> None:
        self._faults = faults
        self._world = world
        self._start_send = world.network.start_send
        self._leaving: dict[int, Handle] = {}
        self._parts: dict[int, list[Handle]] = {}

    def send(self, replies: list[tuple[int, Message]]) -> None:
        """Start sending."""
        leaving, start_send = self._leaving, self._start_send
        for to, reply in replies:
            if reply[0] is _PART:
                self._send_part(to, reply)
                continue
            before = leaving.pop(to, None)
            try:  # not `_wait`, which would be one more call for each reply
                if before is not None:
                    before.wait()
            except PeerLost:
                if not self._world.continues_without(to, self._faults):
                    raise
            try:
                leaving[to] = start_send(to, reply)
            except PeerLost:
                if not self._world.continues_without(to, self._faults):
                    raise

    def flush(self) -> None:
        """Wait until all replies are sent."""
        for to, handle in self._leaving.items():
            self._wait(to, handle)
        self._leaving.clear()
        for to, parts in self._parts.items():
            for handle in parts:
                self._wait(to, handle)
        self._parts.clear()

    def _send_part(self, to: int, part: Message) -> None:
        """Start sending a part, after the replies that are being sent to the rank already."""
        try:
            handle = self._start_send(to, part)
        except PeerLost:
            if not self._world.continues_without(to, self._faults):
                raise
            return
        leaving = [each for each in self._parts.get(to, ()) if not each.done()]
        self._parts[to] = [*leaving, handle]

    def _wait(self, to: int, handle: Handle) -> None:
        try:
            handle.wait()
        except PeerLost:
            if not self._world.continues_without(to, self._faults):
                raise


class States:
    """Answers the coordinator's requests for states on one server, and loads the state of a checkpoint.

    Args:
        part: server part.
        own: number of its own shard.
        channel: channel to the coordinator.
    """

    def __init__(self, part: ServerPart, own: int, channel: LeaderChannel) -> None:
        self._part = part
        self._own = own
        self._channel = channel

    def resume(self, shards: Sequence[int]) -> None:
        """Receive the state from which the run resumes from the coordinator.

        Args:
            shards: the server's own, then the copies that it keeps.
        """
        for shard in shards:
            _, message = self._channel.control.receive(LEADER)
            self._load(shard, ShardState.from_message(message))

    def on_message(self, source: int, message: Message) -> None:
        """Send the coordinator the state of a shard, or load one before there is any.

        Raises:
            RefusedMessage: another rank asks, the shard is not here, or the message is too late or holds no state.
        """
        if source != LEADER:
            raise RefusedMessage(Reason.SENDER, f"rank {source} asked for a checkpoint")
        if message.kind is Kind.CHECKPOINT:
            self._send_shard(ShardStateRequest.from_message(message).shard)
            return
        try:
            self._part.state()
        except RefusedMessage:  # there are no parameters yet
            state = ShardState.from_message(message)
        else:
            raise RefusedMessage(Reason.ORDER, "the state of a shard arrived although training has begun")
        self._load(state.shard, state)

    def _load(self, shard: int, message: ShardState) -> None:
        state = message.tensors, message.facts
        with restoring("the saved state of this server"):
            if shard == self._own:
                self._part.load_state(state)
            elif isinstance(self._part, KeepingPart):
                self._part.load_state_of(shard, state)

    def _send_shard(self, shard: int) -> None:
        """Only servers that keep others' shards have more than one."""
        if shard == self._own:
            state = self._part.state()
        elif isinstance(self._part, KeepingPart):
            state = self._part.state_of(shard)
        else:
            raise RefusedMessage(
                Reason.NUMBERS, f"the state of shard {shard} was asked for, which is not here"
            )
        self._channel.answer(ShardState(shard, *state).message())


class Refusals:
    """Counts refused messages, and reports to the run's log the first from each rank for each reason.

    Args:
        index: index of the server.
        world: context of the server.
        channel: channel to the coordinator.

    Attributes:
        counted: number of refused messages, by reason.
    """

    def __init__(self, index: int, world: World, channel: LeaderChannel) -> None:
        self.counted: Counter[str] = Counter()
        self._index = index
        self._clock = world.clock
        self._channel = channel
        self._reported: set[tuple[int, Reason]] = set()
        self._started_at = self._clock.now()

    @contextmanager
    def of(self, source: int) -> Iterator[None]:
        """Count refusals of a message from this rank instead of raising them."""
        try:
            yield
        except RefusedMessage as refusal:
            self.note(source, refusal)

    def note(self, source: int, refusal: RefusedMessage) -> None:
        """Count a refusal, and report the first of its kind."""
        self.counted[refusal.reason.value] += 1
        if (source, refusal.reason) in self._reported:
            return
        self._reported.add((source, refusal.reason))
        text = f"server {self._index} refused a message from rank {source} ({refusal.reason}): {refusal}"
        notice = Notice(time_s=self._clock.now() - self._started_at, text=text)
        self._channel.send(EventReport(notice).message())


REPORT_EVERY_S = 0.5
AT_ONCE_S = 1e-4
"""Longest time in seconds of receiving a message that counts as already waiting."""


class Reporter:
    """Periodic reports of a server's work.

    Args:
        index: index of the server.
        part: server part.
        world: context of the server.

    Attributes:
        reported_at_s: time of the last report.
        updating_s: seconds for which its part has handled messages since then.
        taken: number of messages of steps since then.
    """

    def __init__(self, index: int, part: ServerPart, world: World) -> None:
        self._index = index
        self._part = part
        self._now = world.clock.now
        self._started_at = self.reported_at_s = self._now()
        self._latest_staleness: Callable[[], dict[int, int]] = (
            part.latest_staleness if isinstance(part, CountsLatestStaleness) else _gained(part)
        )
        self._begun = False
        self._wait_s = 0.0
        self.taken = 0
        self._waits = 0
        self.updating_s = self._held_s = 0.0
        self._holds: dict[int, float] = {}

    def answered(
        self, source: int, replies: list[tuple[int, Message]], began_s: float, ended_s: float
    ) -> None:
        """Add up how long other workers' gradients, which are answered now, have waited here for this one's.

        Args:
            source: rank of the worker that has sent a gradient.
            replies: replies with their ranks.
            began_s: time at which handling of it began.
            ended_s: time at which that was done.
        """
        holds = self._holds
        holds[source] = ended_s
        for to, _ in replies:
            since_s = holds.pop(to, None)
            if since_s is not None and to != source:
                self._held_s += began_s - since_s

    def took(self, looked_at_s: float, now_s: float) -> None:
        """Count a message that has just arrived, and the server's wait for it.

        Args:
            looked_at_s: time at which the wait began.
            now_s: the present time.
        """
        if not self._begun:  # training starts with the first step; event times count from there
            self._begun = True
            self._started_at = self.reported_at_s = now_s
            self.updating_s = 0.0
        waited_s = now_s - looked_at_s
        self.taken += 1
        if waited_s > AT_ONCE_S:
            self._waits += 1
            self._wait_s += waited_s

    def notify(self, channel: LeaderChannel) -> None:
        """Send the coordinator the server's progress."""
        channel.send(EventReport(self._event()).message())

    def _event(self) -> ServerProgress:
        """Return the progress since the last call, and reset it."""
        now, stats = self._now(), self._part.stats()
        seconds = now - self.reported_at_s
        idle_s = min(self._wait_s, seconds)  # the wait for the first message began before
        event = ServerProgress(
            time_s=now - self._started_at,
            server=self._index,
            version=stats.version,
            staleness=self._latest_staleness(),
            seconds=seconds,
            busy_share=1 - idle_s / seconds if seconds > 0 else 0.0,
            queue=self.taken / max(1, self._waits),
            dropped=stats.dropped,
            updating_s=self.updating_s,
            held_s=self._held_s,
        )
        self.reported_at_s = now
        self._wait_s, self.taken, self._waits, self.updating_s, self._held_s = 0.0, 0, 0, 0.0, 0.0
        return event


def _gained(part: ServerPart) -> Callable[[], dict[int, int]]:
    """Return a function that counts the staleness of the gradients applied since its last call."""
    counts = Counter(part.stats().staleness)

    def latest() -> dict[int, int]:
        nonlocal counts
        before, counts = counts, Counter(part.stats().staleness)
        return dict(counts - before)

    return latest
