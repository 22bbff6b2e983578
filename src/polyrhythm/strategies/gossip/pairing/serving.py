"""The loop in the background of a worker in which its keeper lives."""

from __future__ import annotations

from contextlib import suppress

from polyrhythm.communication.communicator import Communicator, Handle
from polyrhythm.communication.message import Kind
from polyrhythm.errors import PeerLost
from polyrhythm.strategies.gossip.pairing.keeper import Keeper, Reply
from polyrhythm.strategies.gossip.pairing.membership import KINDS, Membership


def serve(network: Communicator, keeper: Keeper, membership: Membership) -> None:
    """Handles messages until worker 0 has let all workers go.

    Args:
        network: of all ranks.
        keeper: of the worker's parameters.
        membership: lets workers in and out.

    Raises:
        PeerLost: worker 0 is gone; the worker has been told by an answer of kind `LEAVE`.
    """
    leaving: dict[int, Handle] = {}
    try:
        while not membership.over:
            replies = _replies(network, keeper, membership)
            while replies:
                replies = _send(network, replies, leaving, keeper, membership)
    except Exception:
        network.send(*keeper.answer(Kind.LEAVE))
        raise
    for handle in leaving.values():
        with suppress(PeerLost):
            handle.wait()


def _replies(network: Communicator, keeper: Keeper, membership: Membership) -> list[Reply]:
    try:
        source, message = network.receive()
    except PeerLost as loss:
        return _on_loss(loss.rank, keeper, membership)
    return (membership if message.kind in KINDS else keeper).on_message(source, message)


def _on_loss(rank: int, keeper: Keeper, membership: Membership) -> list[Reply]:
    return [*membership.on_loss(rank), *keeper.on_loss(rank)]


def _send(
    network: Communicator,
    replies: list[Reply],
    leaving: dict[int, Handle],
    keeper: Keeper,
    membership: Membership,
) -> list[Reply]:
    """Starts to send, and gives what is to be sent because a receiver is lost.

    Whoever is sent something again has had the last, so at most one message a rank is leaving.
    """
    more: list[Reply] = []
    for to, reply in replies:
        with suppress(PeerLost):  # it may have been a predecessor's
            if to in leaving:
                leaving.pop(to).wait()
        try:
            leaving[to] = network.start_send(to, reply)
        except PeerLost:
            more += _on_loss(to, keeper, membership)
    return more
