"""Why a process was taken for lost: left in the store by who did it, before anybody can hear of the loss."""

from __future__ import annotations

from typing import Any

from polyrhythm.communication.transports.membership import Peer


def leave_cause(store: Any, peer: Peer, cause: str) -> None:
    """Says why a process is taken for lost; it is there to be read when this returns.

    Args:
        store: where the ranks meet.
        peer: the process.
        cause: what goes on after "worker 1".
    """
    key = _key(peer)
    store.set(key, cause)
    store.check([key])


def cause_of_loss(store: Any, peer: Peer) -> str:
    """Gives why a process was taken for lost, in words; empty if it was not."""
    key = _key(peer)
    return bytes(store.get(key)).decode() if store.check([key]) else ""


def _key(peer: Peer) -> str:
    return f"watchdog/cause/{peer.rank}/{peer.incarnation}"
