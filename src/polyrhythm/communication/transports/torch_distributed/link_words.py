"""What ranks leave for each other in the store: where they can be reached, and who is lost."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any, NamedTuple

import torch.distributed as dist

from polyrhythm.communication.transports.membership import Membership, Peer
from polyrhythm.communication.transports.torch_distributed.groups import FOREVER, Groups
from polyrhythm.communication.transports.torch_distributed.rendezvous import Rendezvous
from polyrhythm.errors import PeerLost

_CLOSE = "close"
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.05


class Cards(NamedTuple):
    """How a rank is reached.

    Attributes:
        memory: by ranks of its host; empty if it shares no memory.
        tcp: by all others.
    """

    memory: str
    tcp: str


def join(rendezvous: Rendezvous, cards: Cards) -> None:
    """Says that links to this rank may be opened from now on.

    Args:
        rendezvous: where to say it.
        cards: how to open them.
    """
    store = rendezvous.store
    for key, card in zip(_cards(rendezvous.own), cards, strict=True):
        store.set(key, card)
    store.set(_joined(rendezvous.rank), str(rendezvous.incarnation))


def await_joined(groups: Groups, peer: Peer, membership: Membership) -> Cards:
    """Waits until a peer has joined, and gives its cards.

    Raises:
        PeerLost: it is gone.
    """
    key, pause_s = _joined(peer.rank), _SHORTEST_PAUSE_S
    with groups.connection() as store:
        # a number that is lower is its predecessor's
        while not store.check([key]) or (joined := int(store.get(key))) < peer.incarnation:
            if membership.is_lost(peer.rank):
                raise PeerLost(peer.rank, "opening a link to it")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        if joined > peer.incarnation:  # it has a successor already
            membership.lose_receiver(peer)
            raise PeerLost(peer.rank, "opening a link to it")
        return Cards(*(str(card.decode()) for card in store.multi_get(list(_cards(peer)))))


def tell_of_start(store: Any, peer: Peer) -> None:
    """Says that a process is about to be started, for who comes by itself before that one can be reached.

    Args:
        store: where the ranks meet.
        peer: which rank, and how many have had it before.
    """
    store.set(_started(peer.rank), str(peer.incarnation))


def newest_incarnations(store: Any, size: int) -> dict[int, int]:
    """Gives the newest incarnation of every rank that has joined, or is about to.

    Args:
        store: where the ranks meet.
        size: how many ranks there are.
    """
    found: dict[int, int] = {}
    for rank in range(size):
        told = [int(store.get(key)) for key in (_joined(rank), _started(rank)) if store.check([key])]
        if told:
            found[rank] = max(told)
    return found


def tell_of_loss(store: Any, lost: Peer, to: Peer) -> None:
    """Leaves word for a rank that another is gone; who has seen a process die need not wait until links break.

    Args:
        store: where the ranks meet.
        lost: who is gone.
        to: who is told.
    """
    store.queue_push(_words(to), f"{lost.rank} {lost.incarnation}".encode())


class WordListener:
    """Hears what `tell_of_loss` leaves for this rank, on a thread of its own.

    Args:
        rendezvous: where words are left.
        membership: is told of losses.
    """

    def __init__(self, rendezvous: Rendezvous, membership: Membership) -> None:
        self._words = _words(rendezvous.own)
        self._closing_store = rendezvous.store
        self._store = rendezvous.store.clone()  # a connection of its own, since it waits there
        self._store.set_timeout(FOREVER)
        self._membership = membership
        self._thread = threading.Thread(target=self._listen, name="words of loss", daemon=True)
        self._thread.start()

    def close(self, patience_s: float) -> None:
        """Listens no longer."""
        with suppress(RuntimeError):  # the store is gone, and so the thread has ended
            self._closing_store.queue_push(self._words, _CLOSE.encode())
        self._thread.join(patience_s)

    def _listen(self) -> None:
        while True:
            try:
                word = self._store.queue_pop(self._words, True).decode()
            except (RuntimeError, dist.DistError):
                return  # the store is gone, and with it the run
            if word == _CLOSE:
                return
            # On a thread of its own: it waits for the peer's last words, and several may be lost at once.
            lost = Peer(*map(int, word.split()))
            threading.Thread(target=self._membership.lose_receiver, args=(lost,), daemon=True).start()


def _cards(peer: Peer) -> tuple[str, str]:
    return f"card/{peer.rank}/{peer.incarnation}", f"card/tcp/{peer.rank}/{peer.incarnation}"


def _joined(rank: int) -> str:
    return f"joined/{rank}"


def _started(rank: int) -> str:
    return f"started/{rank}"


def _words(to: Peer) -> str:
    return f"words/{to.rank}/{to.incarnation}"
