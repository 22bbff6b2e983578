"""The server's loop: receive, let the server part decide, send.

A message that nobody of ours would send is refused: it changes nothing, is answered by nobody and counted by its
reason, and the run's log hears of the first of each kind. It never ends the run, since a stranger may have sent it.
"""

from __future__ import annotations

from typing import Any

from polyrhythm.communication.message import Kind, Message, RefusedMessage, pack_json
from polyrhythm.errors import PeerLost
from polyrhythm.roles.leader_channel import LeaderChannel
from polyrhythm.roles.serving.entry import Entry
from polyrhythm.roles.serving.outbox import Outbox
from polyrhythm.roles.serving.refusals import Refusals
from polyrhythm.roles.serving.reporter import REPORT_EVERY_S, Reporter
from polyrhythm.roles.serving.states import States
from polyrhythm.roles.world import World
from polyrhythm.strategies.server_part import KeepingPart, ServerPart, ServerSetting
from polyrhythm.strategies.strategy import Strategy

_OUTSIDE_STEPS = frozenset(
    [
        *(Kind.CONFIGURE, Kind.PARAMETERS, Kind.PULL, Kind.LEAVE, Kind.JOIN, Kind.STATE),
        *(Kind.BROKEN, Kind.REPORT),
    ]
)
"""What a run or a successor begins with, a run ends with, and losses cost; workers do not count those bytes either."""
_CHECKPOINT, _STATE = Kind.CHECKPOINT, Kind.STATE  # an enum is slow to ask for its members


def serve(strategy: Strategy, world: World, resume: bool = False, *, finite: bool = False) -> None:
    """Serves until all workers have left.

    Args:
        strategy: makes the server part.
        world: where this rank is.
        resume: whether the leader hands out a checkpoint first.
        finite: whether all gradients are known to be finite.
    """
    network, now = world.network, world.clock.now
    servers = world.cast.servers
    index = servers.index(network.rank)
    part = strategy.server(ServerSetting(index, world.cast, finite))
    channel = LeaderChannel(world, strategy)
    states = States(part, index, channel)
    states.resume(strategy.holds(index) if resume and not world.rejoins else [])
    reporter = Reporter(index, part, world)
    outbox = Outbox(strategy, world)
    entry = Entry(part, world, outbox)
    refusals = Refusals(index, world, channel)
    bytes_sent = 0
    while not part.done:
        looked_at = now()
        try:
            source, message = network.receive()
        except PeerLost as loss:
            if not world.goes_on_without(loss.rank, strategy):
                raise
            outbox.send(_handle_loss(part, channel, loss))
            continue
        channel.check_if_leader_lost()
        kind = message.kind
        if kind is _CHECKPOINT or (kind is _STATE and source not in servers):
            with refusals.of(source):
                states.on_message(source, message)
            continue
        of_a_step = kind not in _OUTSIDE_STEPS
        before, began = network.bytes_sent, now()
        if of_a_step:
            reporter.took(looked_at, began)
        try:  # `refusals.of` would take longer than all else that a message costs here
            replies = part.on_message(source, message)
            reporter.updating_s += now() - began
            outbox.send(replies)
        except RefusedMessage as refusal:
            refusals.note(source, refusal)
        if of_a_step:
            bytes_sent += network.bytes_sent - before
        if now() - reporter.said_at_s >= REPORT_EVERY_S:
            reporter.tell(channel)
        if entry.due:
            entry.tell(channel)
    outbox.flush()
    reporter.tell_the_rest(channel)
    counts = {"bytes_sent": bytes_sent, "refused": dict(refusals.counted + world.refused)}
    channel.send(Message(Kind.REPORT, pack_json(_last_words(part, world) | counts)))


def _handle_loss(part: ServerPart, channel: LeaderChannel, loss: PeerLost) -> list[tuple[int, Message]]:
    channel.note_loss(loss)
    if isinstance(part, KeepingPart):
        return part.on_losses(loss.rank, loss.losses)
    return part.on_loss(loss.rank)


def _last_words(part: ServerPart, world: World) -> dict[str, Any]:
    words = {
        "staleness": dict(part.staleness),
        "version": part.version,
        "steps": part.steps,
        "not_finite": getattr(part, "not_finite", 0),  # only some look
        "ejected": getattr(part, "ejected", 0),
        "dropped": getattr(part, "dropped", 0),
        "left_out": getattr(part, "left_out", {}),
        "absent": getattr(part, "absent", {}),
    }
    return words if world.arrivals is None else words | {"arrivals": world.arrivals.to_json()}
