"""What ranks leave for each other in the store, so that links can be opened: who has joined, and who is invited."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from polyrhythm.communication.transports.membership import Membership, Peer
from polyrhythm.communication.transports.torch_distributed.groups import FOREVER, Groups
from polyrhythm.communication.transports.torch_distributed.rendezvous import Rendezvous
from polyrhythm.errors import PeerLost

CLOSE, LOST = "close", "lost"
"""Invitations that are none: to accept no more, and that a peer is gone."""

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.05


def join(rendezvous: Rendezvous, card: str) -> None:
    """Says that links to this rank may be opened from now on.

    Args:
        rendezvous: where to say it.
        card: how ranks of the same host reach this one; empty if they have no way of their own.
    """
    rendezvous.store.set(_card(rendezvous.own), card)
    rendezvous.store.set(_joined(rendezvous.rank), str(rendezvous.incarnation))


def await_joined(groups: Groups, peer: Peer, membership: Membership) -> str:
    """Waits until a peer has joined, and gives its card.

    Raises:
        PeerLost: it is gone.
    """
    with groups.connection() as store:
        await_word(store, _joined(peer.rank), peer.rank, membership, FOREVER)
        if int(store.get(_joined(peer.rank))) > peer.incarnation:  # it has a successor already
            membership.lose_receiver(peer)
            raise PeerLost(peer.rank, "opening a link to it")
        return str(store.get(_card(peer)).decode())


def tell_of_loss(store: Any, lost: Peer, to: Peer) -> None:
    """Leaves word for a rank that another is gone; who has seen a process die need not wait until links break.

    Args:
        store: where the ranks meet.
        lost: who is gone.
        to: who is told.
    """
    store.queue_push(invitations(to), f"{LOST} {lost.rank} {lost.incarnation}".encode())


def await_word(store: Any, key: str, to: int, membership: Membership, patience: timedelta) -> None:
    """Waits until a key is in the store.

    Raises:
        PeerLost: rank `to`, who is to set it, is gone, or does not for so long.
    """
    give_up_at, pause_s = time.monotonic() + patience.total_seconds(), _SHORTEST_PAUSE_S
    while not store.check([key]):
        if membership.is_lost(to) or time.monotonic() > give_up_at:
            raise PeerLost(to, "opening a link to it")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _card(peer: Peer) -> str:
    return f"card/{peer.rank}/{peer.incarnation}"


def _joined(rank: int) -> str:
    return f"joined/{rank}"


def invitations(to: Peer) -> str:
    """Names the queue in which links to a rank are announced."""
    return f"invitations/{to.rank}/{to.incarnation}"


def accepted(link: str) -> str:
    """Names the key that says that a link is accepted."""
    return f"accepted/{link}"


def link_name(source: int, to: int, number: int) -> str:
    """Names the group of a link."""
    return f"link/{source}-{to}/{number}"
