"""What ranks leave for each other in the store, and what comes of it over real links."""

from __future__ import annotations

from dataclasses import replace
from threading import Thread

import pytest

from polyrhythm.communication.message import Kind, Message
from polyrhythm.communication.transports.membership import Peer
from polyrhythm.communication.transports.sockets import listen
from polyrhythm.communication.transports.tcp.handshake import TcpCard
from polyrhythm.communication.transports.torch_distributed import rank, rendezvous
from polyrhythm.communication.transports.torch_distributed.communicator import connect
from polyrhythm.communication.transports.torch_distributed.rendezvous import (
    Cards,
    join,
    newest_generations,
    record_start,
)
from polyrhythm.errors import PeerLost, RequestError

SIZE, LEADER, GUEST = 3, 0, 2


def test_the_newest_of_a_rank_is_the_one_that_has_joined_or_is_about_to() -> None:
    store = rendezvous.host_store()
    assert newest_generations(store, SIZE) == {}
    join(rendezvous.local(LEADER, SIZE, store.port), Cards("", ""))
    record_start(store, Peer(1, 2))
    assert newest_generations(store, SIZE) == {0: 0, 1: 2}
    record_start(store, Peer(LEADER, 1))
    assert newest_generations(store, SIZE) == {0: 1, 1: 2}
    join(rendezvous.local(LEADER, SIZE, store.port, 3), Cards("", ""))
    assert newest_generations(store, SIZE) == {0: 3, 1: 2}


def test_a_guest_reaches_a_successor_of_worker_0_that_cannot_be_reached_yet() -> None:
    """That one knows nothing of the guest, and would tell it nothing when it takes up the lead."""
    store = rendezvous.host_store()
    join(rendezvous.local(LEADER, SIZE, store.port), Cards("", ""))  # it is dead by now
    record_start(store, Peer(LEADER, 1))
    guest = replace(rendezvous.local(GUEST, SIZE, store.port, 1), met=newest_generations(store, SIZE))
    home, network = connect(guest)
    asking = network.start(lambda: network.send(LEADER, Message(Kind.JOIN, version=1)))
    heirs_home, heir = connect(rendezvous.local(LEADER, SIZE, store.port, 1))
    with pytest.raises(PeerLost):  # of who had the guest's place
        heir.receive()
    source, message = heir.receive()
    assert (source, message.kind, message.version) == (GUEST, Kind.JOIN, 1)
    asking.wait()
    heir.send(GUEST, Message(Kind.STATE))
    assert network.receive(LEADER)[1].kind is Kind.STATE
    closing = Thread(target=heirs_home.close)  # each waits for the other's last words
    closing.start()
    home.close()
    closing.join()


def test_a_guest_is_told_which_rank_it_cannot_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 can be reached; rank 1 has joined, and its port is closed, as behind a firewall."""
    monkeypatch.setattr(rank, "_REACH_PATIENCE_S", 0.1)
    store = rendezvous.host_store()
    leaders_home, _ = connect(rendezvous.local(LEADER, SIZE, store.port))
    home, _ = connect(rendezvous.local(GUEST, SIZE, store.port, 1))
    home.check_reachable()
    hidden = listen(rendezvous.LOOPBACK)
    card = TcpCard.draw(*hidden.getsockname())
    hidden.close()
    join(rendezvous.local(1, SIZE, store.port), Cards("", card.to_text()))
    with pytest.raises(RequestError, match=f"cannot reach rank 1 of the run at 127.0.0.1:{card.port}, "):
        home.check_reachable()
    home.lose(Peer(1, 0))  # of who is lost, other ranks take no notice either
    home.check_reachable()
    closing = Thread(target=leaders_home.close)
    closing.start()
    home.close()
    closing.join()
