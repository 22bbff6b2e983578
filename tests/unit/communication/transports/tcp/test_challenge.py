"""The challenge over a real connection, each side on a thread of its own."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace

import pytest

from polyrhythm.communication.message import MalformedMessage
from polyrhythm.communication.secret import NONCE_BYTES, PROOF_BYTES
from polyrhythm.communication.transports.membership import Peer
from polyrhythm.communication.transports.tcp.handshake import (
    HELLO_BYTES,
    Answer,
    Greeted,
    Identity,
    ProcessExited,
    TcpCard,
    answer,
    challenge,
    receive_greeting,
)

LINK = bytes(range(16))
SENDER = Identity(Peer(2, 1), TcpCard.draw("10.0.0.2", 4001), b"k" * 32)
RECEIVER = Identity(Peer(0, 0), TcpCard.draw("10.0.0.1", 4000), b"k" * 32)


def meet(sender: Identity, card: TcpCard, receiver: Identity) -> tuple[Greeted | None, object]:
    """Lets two meet; gives whom the receiver greeted, and the verdict that the sender got, or its error."""
    near, far = socket.socketpair()
    heard: list[object] = []

    def send() -> None:
        try:
            heard.append(answer(near, sender, card, LINK))
        except ProcessExited as error:
            heard.append(type(error))
        near.close()

    thread = threading.Thread(target=send)
    thread.start()
    greeted = challenge(far, receiver)
    if greeted is not None:
        greeted.answer(Answer.GO_ON, 2**40 + 7)
    thread.join()
    far.close()
    return greeted, heard[0]


def test_both_who_know_the_secret_learn_of_each_other() -> None:
    greeted, verdict = meet(SENDER, RECEIVER.card, RECEIVER)
    assert greeted is not None
    assert greeted.proved
    hello = greeted.hello
    assert (hello.source, hello.link, hello.address, hello.port) == (Peer(2, 1), LINK, "10.0.0.2", 4001)
    assert hello.name.hex() == SENDER.card.name
    assert verdict == (Answer.GO_ON, 2**40 + 7)


@pytest.mark.parametrize("what", ["key", "token"])
def test_who_knows_another_secret_proves_nothing_and_believes_nothing(what: str) -> None:
    stranger, card = SENDER, RECEIVER.card
    if what == "key":
        stranger = replace(SENDER, key=b"x" * 32)
    else:
        card = replace(card, token="00" * 16)
    greeted, verdict = meet(stranger, card, RECEIVER)
    assert greeted is not None
    assert not greeted.proved
    assert verdict is ProcessExited


def test_a_listener_of_another_name_is_told_nothing() -> None:
    greeted, verdict = meet(SENDER, replace(RECEIVER.card, name="11" * 16), RECEIVER)
    assert greeted is None
    assert verdict is ProcessExited


def _hello() -> bytes:
    """Overhears the hello of a sender who knows the secret, and greets it as a stranger would."""
    near, far = socket.socketpair()

    def send() -> None:
        with pytest.raises(ConnectionError):
            answer(near, SENDER, RECEIVER.card, LINK)

    thread = threading.Thread(target=send)
    thread.start()
    far.sendall(b"pRhL" + bytes.fromhex(RECEIVER.card.name) + bytes(NONCE_BYTES))
    hello = far.recv(HELLO_BYTES, socket.MSG_WAITALL)
    far.close()
    thread.join()
    near.close()
    return hello


@pytest.mark.parametrize(
    "changed", [None, 0, 5, 30, 60, HELLO_BYTES - NONCE_BYTES - PROOF_BYTES, HELLO_BYTES - 1]
)
def test_a_hello_that_was_overheard_proves_nothing_later_nor_one_that_was_changed(
    changed: int | None,
) -> None:
    hello = bytearray(_hello())
    if changed is not None:
        hello[changed] ^= 1
    near, far = socket.socketpair()
    near.sendall(hello)
    try:
        greeted = challenge(far, RECEIVER)
    except MalformedMessage:
        assert changed == 0
    else:
        assert greeted is not None
        assert not greeted.proved
    assert receive_greeting(near)[0].hex() == RECEIVER.card.name
    near.close()
    far.close()


def test_half_a_hello_is_malformed_and_none_at_all_is_nothing() -> None:
    for words, error in ((b"", None), (b"pRhL", MalformedMessage)):
        near, far = socket.socketpair()
        near.sendall(words)
        near.shutdown(socket.SHUT_WR)
        if error is None:
            assert challenge(far, RECEIVER) is None
        else:
            with pytest.raises(error):
                challenge(far, RECEIVER)
        near.close()
        far.close()
