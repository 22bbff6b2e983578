"""All links of one rank, to and from the others: through shared memory inside a host, over TCP else."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict

from polyrhythm.communication.transports.membership import Membership, Peer
from polyrhythm.communication.transports.shared_memory.frames import Card
from polyrhythm.communication.transports.shared_memory.host import host_key
from polyrhythm.communication.transports.shared_memory.incoming import IncomingMemoryLinks
from polyrhythm.communication.transports.shared_memory.outgoing import OutgoingMemoryLink
from polyrhythm.communication.transports.tcp.card import TcpCard
from polyrhythm.communication.transports.tcp.incoming_links import IncomingTcpLinks
from polyrhythm.communication.transports.tcp.outgoing_link import OutgoingTcpLink
from polyrhythm.communication.transports.torch_distributed.groups import Groups
from polyrhythm.communication.transports.torch_distributed.link_words import (
    Cards,
    WordListener,
    await_joined,
    join,
)
from polyrhythm.communication.transports.torch_distributed.rendezvous import Rendezvous
from polyrhythm.errors import RunError

_LAST_WORDS_PATIENCE_S = 0.5
_log = logging.getLogger(__name__)

OutgoingLink = OutgoingMemoryLink | OutgoingTcpLink


class Links:
    """The links of one rank; a link to another is opened when it is first asked for.

    Args:
        rendezvous: how to meet the others.
        groups: lends connections to the store.
        membership: is told what happens on the links.
        shared_memory: whether to use it inside a host.

    Raises:
        RunError: this rank cannot listen at its address.
    """

    def __init__(
        self, rendezvous: Rendezvous, groups: Groups, membership: Membership, shared_memory: bool
    ) -> None:
        self._rendezvous = rendezvous
        self._groups = groups
        self._membership = membership
        self._outgoing: dict[int, OutgoingLink] = {}
        # A lock a link: one that hangs holds up no other.
        self._opening: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)
        self._tcp = self._listen()
        self._memory = self._listen_on_host() if shared_memory else None
        memory_card = "" if self._memory is None else self._memory.card.to_text()
        self._cards = Cards(memory_card, self._tcp.identity.card.to_text())

    def join(self) -> None:
        """Lets others open links, and hears of losses; word of one may be waiting already."""
        self._words = WordListener(self._rendezvous, self._membership)
        join(self._rendezvous, self._cards)

    def to(self, rank: int) -> OutgoingLink:
        """Gives the link to the newest process of a rank.

        Raises:
            PeerLost: it is gone.
        """
        with self._opening[rank]:
            link = self._outgoing.get(rank)
            if link is None or link.incarnation < self._membership.incarnation(rank):
                if isinstance(link, OutgoingTcpLink):  # to a predecessor
                    link.give_up()
                link = self._outgoing[rank] = self._open(rank)
        return link

    def wait_for_last_words(self, peer: Peer) -> None:
        """Returns when all that a peer sent before it left has been delivered, if that is soon."""
        self._tcp.wait_for_last_words(peer, _LAST_WORDS_PATIENCE_S)
        if self._memory is not None:
            self._memory.wait_for_last_words(peer, _LAST_WORDS_PATIENCE_S)

    def give_up(self, peer: Peer) -> None:
        """Ends what is sent to a peer, or comes from it: nobody waits for a host that is cut off."""
        self._tcp.give_up(peer)
        link = self._outgoing.get(peer.rank)
        if isinstance(link, OutgoingTcpLink) and link.incarnation == peer.incarnation:
            link.give_up()

    def close_outgoing(self, patience_s: float) -> None:
        """Tells all receivers that nothing more will come."""
        deadline_s = time.monotonic() + patience_s
        for link in list(self._outgoing.values()):
            link.close(max(0.0, deadline_s - time.monotonic()))

    def close_incoming(self, patience_s: float) -> None:
        """Waits for the last words of all senders; nothing can be received any more."""
        self._words.close(patience_s)
        self._tcp.close(patience_s)
        if self._memory is not None:
            self._memory.close(patience_s)

    def _listen(self) -> IncomingTcpLinks:
        own = self._rendezvous
        try:
            return IncomingTcpLinks(own.own, own.address, own.key, self._membership)
        except OSError as error:
            raise RunError(
                f"rank {own.rank} cannot listen at {own.address} ({error.strerror or error}): is it an address of this "
                "host?"
            ) from None

    def _listen_on_host(self) -> IncomingMemoryLinks | None:
        try:
            return IncomingMemoryLinks(host_key(self._rendezvous.address), self._membership)
        except OSError as error:
            _log.warning("no shared memory for messages on this host (%s): they go over TCP", error)
            return None

    def _open(self, rank: int) -> OutgoingLink:
        peer = Peer(rank, self._membership.incarnation(rank))
        cards = await_joined(self._groups, peer, self._membership)
        card = Card.from_text(cards.memory)
        ours = None if self._memory is None else self._memory.card
        if card is None or ours is None or card.host != ours.host:
            return OutgoingTcpLink(self._tcp.identity, TcpCard.from_text(cards.tcp), peer, self._membership)
        return OutgoingMemoryLink(card, self._rendezvous.own, peer, self._membership)
