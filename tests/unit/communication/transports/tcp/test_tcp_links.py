"""Links over TCP, both ends in this process: real sockets, and connections that break."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch

from polyrhythm.communication.message import Kind, Message, Reason
from polyrhythm.communication.transports.inbox import Target, Want
from polyrhythm.communication.transports.membership import Peer
from polyrhythm.communication.transports.tcp.handshake import TcpCard
from polyrhythm.communication.transports.tcp.incoming_links import IncomingTcpLinks
from polyrhythm.communication.transports.tcp.outgoing_link import MOST_COPIED_BYTES, OutgoingTcpLink
from polyrhythm.errors import PeerLost
from unit.communication.transports.heard import PATIENCE_S, Heard
from unit.communication.transports.tcp.cutting_proxy import CuttingProxy

SOON_S = PATIENCE_S / 4
"""Of what does not wait until patience is over; it takes milliseconds."""
SENDER, RECEIVER = Peer(3, 1), Peer(4, 0)
LONG = MOST_COPIED_BYTES // 4 + 1
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int64, torch.int32)


@dataclass
class Ends:
    """Two ranks that listen, and a link from the one to the other, through a proxy if there is one."""

    source: IncomingTcpLinks
    target: IncomingTcpLinks
    link: OutgoingTcpLink
    sent: Heard
    heard: Heard
    proxy: CuttingProxy

    def send(self, elements: int, value: float = 1.0, step: int = 0) -> None:
        """Sends a message, and returns when it has left."""
        self.link.start_send(Message(Kind.PUSH, torch.full((elements,), value), step=step), 7).wait(
            PATIENCE_S
        )


@contextmanager
def linked(
    address: str = "127.0.0.1",
    key: bytes = b"secret",
    patience_s: float = PATIENCE_S,
    heard: Heard | None = None,
) -> Iterator[Ends]:
    sent, heard = Heard(), heard or Heard()
    sent.patience_s = heard.patience_s = patience_s
    source, target = (
        IncomingTcpLinks(peer, address, key, membership)
        for peer, membership in ((SENDER, sent), (RECEIVER, heard))
    )
    proxy = CuttingProxy(target.identity.card.port)
    card = target.identity.card
    if address == "127.0.0.1":
        card = replace(card, port=proxy.port)
    link = OutgoingTcpLink(source.identity, card, RECEIVER, sent)
    try:
        yield Ends(source, target, link, sent, heard, proxy)
    finally:
        link.close(PATIENCE_S)
        for end in (source, target):
            end.close(PATIENCE_S)
        proxy.close()


@pytest.mark.parametrize("elements", [0, 1, 1000, LONG - 1, LONG, 300_000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_sent_arrives(elements: int, dtype: torch.dtype) -> None:
    with linked() as ends:
        tensor = torch.randint(0, 100, (elements,)).to(dtype)
        message = Message(Kind.PARAMETERS, tensor, 5, -6, 0.25, 0.1, True, 2**32 - 1)
        ends.link.start_send(message, 9).wait(PATIENCE_S)
        context, source, found = ends.heard.messages.get(timeout=PATIENCE_S)
        assert (context, source) == (9, SENDER)
        assert found._replace(tensor=None) == message._replace(tensor=None)
        assert found.tensor.dtype == dtype
        assert torch.equal(found.tensor, tensor)
    assert ends.sent.deaf.empty()
    assert ends.heard.lost.empty()


def test_a_tensor_with_gaps_arrives_and_none_stays_none() -> None:
    with linked() as ends:
        ends.link.start_send(Message(Kind.PUSH, torch.arange(2 * LONG)[::2]), 0).wait(PATIENCE_S)
        ends.link.start_send(Message(Kind.PULL), 0).wait(PATIENCE_S)
        assert torch.equal(ends.heard.next().tensor, torch.arange(0, 2 * LONG, 2))
        assert ends.heard.next().tensor is None


def test_a_short_message_may_change_when_it_has_left_and_a_long_one_when_it_has_arrived() -> None:
    with linked() as ends:
        for elements in (3, LONG, 1_000_000):
            tensor = torch.ones(elements)
            ends.link.start_send(Message(Kind.PUSH, tensor), 0).wait(PATIENCE_S)
            tensor.fill_(2.0)
            assert ends.heard.next().tensor.unique().tolist() == [1.0]


def test_messages_of_all_sizes_keep_their_order_on_many_threads() -> None:
    threads, count = 4, 60
    with linked() as ends:

        def send_all(seed: int) -> None:
            sizes = random.Random(seed)
            handles = [
                ends.link.start_send(
                    Message(
                        Kind.PUSH,
                        torch.full((sizes.choice([0, 5, 900, LONG, 70_000]),), 1.0),
                        version=number,
                        step=seed,
                    ),
                    0,
                )
                for number in range(count)
            ]
            for handle in handles:
                handle.wait(PATIENCE_S)

        senders = [threading.Thread(target=send_all, args=(seed,)) for seed in range(threads)]
        for sender in senders:
            sender.start()
        found: dict[int, list[int]] = {seed: [] for seed in range(threads)}
        for _ in range(threads * count):
            message = ends.heard.next()
            found[message.step].append(message.version)
        for sender in senders:
            sender.join()
    assert found == {seed: list(range(count)) for seed in range(threads)}


@pytest.mark.parametrize("seed", range(12))
def test_connections_that_break_anywhere_lose_and_double_nothing(seed: int) -> None:
    draw = random.Random(seed)
    sizes = [draw.choice([0, 1, 300, LONG - 1, LONG, 40_000]) for _ in range(150)]
    with linked() as ends:
        handles = []
        for number, size in enumerate(sizes):
            if number % 15 == 0:
                ends.proxy.cut_after(draw.choice([1, 60, 150, 190, 300, 5000, 100_000, 300_000]))
            tensor = torch.full((size,), float(number))
            handles.append(ends.link.start_send(Message(Kind.PUSH, tensor, step=number), 0))
            if draw.random() < 0.1:
                handles[-1].wait(PATIENCE_S)
        for number, size in enumerate(sizes):
            message = ends.heard.next()
            assert message.step == number
            assert torch.equal(message.tensor, torch.full((size,), float(number)))
        for handle in handles:
            handle.wait(PATIENCE_S)
    assert ends.heard.messages.empty()
    assert ends.proxy.connections > 3
    assert ends.sent.deaf.empty()
    assert ends.heard.lost.empty()


class Waiting(Heard):
    """A membership in which a receive waits with memory for each long message."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = 0

    def target(self, context: int, source: Peer, message: Message, interrupt: Callable[[], None]) -> Target:
        assert message.tensor is not None
        memory = torch.full_like(message.tensor, -1.0)
        return Target(Want(context, source.rank, message.tag, (3, 4)), memory)

    def release(self, target: Target) -> None:
        target.tensor.fill_(-2.0)

    def deliver(self, context: int, source: Peer, message: Message, target: Target | None = None) -> None:
        assert target is None or message.tensor is target.tensor
        self.whole += target is not None
        super().deliver(context, source, message)


@pytest.mark.parametrize("seed", range(4))
def test_connections_that_break_under_payloads_for_waiting_receives(seed: int) -> None:
    draw, heard, count = random.Random(seed), Waiting(), 40
    with linked(heard=heard) as ends:
        handles = []
        for number in range(count):
            if number % 4 == 0:
                ends.proxy.cut_after(draw.choice([300, 5000, 100_000, 300_000]))
            tensor = torch.full((40_000,), float(number))
            handles.append(ends.link.start_send(Message(Kind.PUSH, tensor, step=number), 0))
        for number in range(count):
            message = heard.next()
            assert message.step == number
            assert torch.equal(message.tensor, torch.full((40_000,), float(number)))
        for handle in handles:
            handle.wait(PATIENCE_S)
    assert heard.messages.empty()
    assert heard.whole == count
    assert ends.proxy.connections > 1


@pytest.mark.parametrize("elements", [10, LONG])
@pytest.mark.parametrize("passed_bytes", [1, 60, 1000])
def test_a_connection_that_breaks_under_its_only_message_does_not_lose_it(
    elements: int, passed_bytes: int
) -> None:
    with linked() as ends:
        ends.heard.greeted.get(timeout=PATIENCE_S)
        time.sleep(
            0.02
        )  # for the sender to have the connection: it writes this message without a writer's thread
        ends.proxy.cut_after(passed_bytes)
        handle = ends.link.start_send(Message(Kind.PUSH, torch.ones(elements)), 0)
        assert ends.heard.messages.get(timeout=SOON_S)[2].tensor.numel() == elements
        handle.wait(SOON_S)


def test_an_idle_connection_that_breaks_is_opened_again() -> None:
    with linked() as ends:
        for number in range(5):
            ends.send(10, step=number)
            assert ends.heard.next().step == number
            ends.proxy.cut()
        ends.send(LONG, step=5)
        assert ends.heard.next().step == 5
    assert ends.heard.greeted.get(timeout=PATIENCE_S) == SENDER
    assert ends.heard.greeted.empty()


def test_a_receiver_that_is_gone_is_missed_at_once_and_what_waits_fails() -> None:
    with linked() as ends:
        ends.send(1)
        long = ends.link.start_send(Message(Kind.PUSH, torch.zeros(20_000_000)), 0)
        gone_at_s = time.monotonic()
        ends.proxy.close()
        assert ends.sent.deaf.get(timeout=PATIENCE_S) == RECEIVER
        with pytest.raises(PeerLost):
            long.wait(PATIENCE_S)
        assert time.monotonic() - gone_at_s < SOON_S
        with pytest.raises(PeerLost):
            ends.link.start_send(Message(Kind.PULL), 0)


def test_a_sender_that_is_gone_is_missed_at_once() -> None:
    with linked() as ends:
        ends.send(1)
        ends.heard.next()
        gone_at_s = time.monotonic()
        ends.source._listener.shutdown(socket.SHUT_RDWR)  # as when the process dies: first all is closed,
        ends.link.give_up()  # and nobody connects again
        assert ends.heard.lost.get(timeout=PATIENCE_S) == SENDER
        assert time.monotonic() - gone_at_s < SOON_S


def test_another_process_at_the_same_port_is_not_taken_for_the_one_that_was_there() -> None:
    with linked() as ends:
        ends.send(1)
        other = IncomingTcpLinks(RECEIVER, "127.0.0.1", b"secret", Heard())
        ends.proxy.port_behind = other.identity.card.port
        ends.proxy.cut()
        assert ends.sent.deaf.get(timeout=PATIENCE_S) == RECEIVER
        other.close(PATIENCE_S)


def test_who_cannot_be_reached_is_lost_when_patience_is_over() -> None:
    with linked(patience_s=0.3) as ends:
        ends.send(1)
        silent = socket.create_server(("127.0.0.1", 0))
        ends.proxy.port_behind = silent.getsockname()[1]

        def hang_up_on_all() -> None:
            while True:
                try:
                    silent.accept()[0].close()
                except OSError:
                    return

        hanging = threading.Thread(target=hang_up_on_all)
        hanging.start()
        cut_at_s = time.monotonic()
        ends.proxy.cut()
        assert ends.sent.deaf.get(timeout=PATIENCE_S) == RECEIVER
        assert 0.3 <= time.monotonic() - cut_at_s < SOON_S
        silent.shutdown(socket.SHUT_RDWR)
        hanging.join()
        silent.close()


def test_a_link_that_is_given_up_ends_all_waiting_at_once() -> None:
    with linked() as ends:
        blocked = threading.Event()
        ends.heard.deliver = lambda *_: blocked.wait()  # the receiver takes nothing more
        handles = [ends.link.start_send(Message(Kind.PUSH, torch.zeros(5_000_000)), 0) for _ in range(3)]
        ends.link.give_up()
        for handle in handles[1:]:
            with pytest.raises(PeerLost):
                handle.wait(SOON_S)
        blocked.set()
        ends.target.give_up(SENDER)  # its process lives, so the receiver would wait for another connection
    assert ends.sent.deaf.empty()  # who gave it up knows


def test_a_sender_that_was_given_up_is_told_when_it_connects_again() -> None:
    with linked() as ends:
        ends.send(1)
        ends.heard.next()
        ends.target.give_up(SENDER)
        assert ends.sent.deaf.get(timeout=PATIENCE_S) == RECEIVER
    assert ends.heard.lost.empty()


def test_a_sender_that_is_lost_already_cannot_open_a_link() -> None:
    sent, heard = Heard(), Heard()
    heard.gone.add(SENDER.rank)
    source, target = (
        IncomingTcpLinks(SENDER, "127.0.0.1", b"", sent),
        IncomingTcpLinks(RECEIVER, "127.0.0.1", b"", heard),
    )
    link = OutgoingTcpLink(source.identity, target.identity.card, RECEIVER, sent)
    assert sent.deaf.get(timeout=PATIENCE_S) == RECEIVER
    assert heard.greeted.empty()
    for end in (link, source, target):
        end.close(PATIENCE_S)


def test_a_receiver_that_leaves_is_not_lost_and_hears_the_last_words() -> None:
    with linked() as ends:
        ends.send(1)
        leaving = threading.Thread(target=ends.target.close, args=(PATIENCE_S,))
        leaving.start()
        ends.send(LONG, step=1)
        ends.proxy.cut()
        ends.send(LONG, step=2)
        assert [ends.heard.next().step for _ in range(3)] == [0, 1, 2]
        ends.link.close(PATIENCE_S)
        leaving.join(PATIENCE_S)
        assert not leaving.is_alive()
    assert ends.sent.deaf.empty()
    assert ends.heard.lost.empty()


@pytest.mark.parametrize("wrong", ["key", "token"])
def test_who_does_not_know_the_secret_is_refused(wrong: str) -> None:
    with linked() as ends:
        sent = Heard()
        stranger = IncomingTcpLinks(SENDER, "127.0.0.1", b"guess" if wrong == "key" else b"secret", sent)
        card = ends.target.identity.card
        if wrong == "token":
            card = replace(card, token="00" * 16)
        link = OutgoingTcpLink(stranger.identity, card, RECEIVER, sent)
        assert sent.deaf.get(timeout=PATIENCE_S) == RECEIVER
        assert ends.heard.refused.get(timeout=PATIENCE_S) == (SENDER, Reason.SENDER)
        ends.send(1)  # the honest one's link is as it was
        assert ends.heard.next().kind is Kind.PUSH
        for end in (link, stranger):
            end.close(PATIENCE_S)


def test_a_second_link_of_the_same_process_is_somebody_elses() -> None:
    with linked() as ends:
        ends.send(1)
        sent = Heard()
        second = OutgoingTcpLink(ends.source.identity, ends.target.identity.card, RECEIVER, sent)
        assert ends.heard.refused.get(timeout=PATIENCE_S) == (SENDER, Reason.SENDER)
        second.close(PATIENCE_S)
        ends.send(LONG)


def test_addresses_of_ipv6_work() -> None:
    with linked("::1") as ends:
        ends.send(LONG)
        assert ends.heard.next().tensor.sum() == LONG
        ends.send(3)
        assert ends.heard.next().tensor.sum() == 3


def test_cards_travel_as_text() -> None:
    card = TcpCard.draw("10.0.0.1", 4711)
    assert TcpCard.from_text(card.to_text()) == card
    assert card != TcpCard.draw("10.0.0.1", 4711)
    assert card.token not in repr(card)
