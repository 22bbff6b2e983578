"""Payloads that a link writes to the memory of the receive that waits for them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.message import Kind, Message, encode_header
from polyrhythm.communication.transports.inbox import Inbox
from polyrhythm.communication.transports.membership import Peer
from polyrhythm.communication.transports.tcp.handshake import Answer, Identity, TcpCard, answer
from polyrhythm.communication.transports.torch_distributed.communicator import (
    TorchDistributedCommunicator,
    connect,
)
from polyrhythm.communication.transports.torch_distributed.rendezvous import host_store, local
from polyrhythm.errors import PeerLost

PATIENCE_S = 20.0
LONG = 1_000_000
"""Numbers of a payload that arrives in many pieces."""
SENDER = Peer(1, 0)


class Sender:
    """Rank 1 of two, of which a test writes every byte."""

    def __init__(self, rank: TorchDistributedCommunicator) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._receiver = rank._home._links._tcp.identity.card
        port = self._listener.getsockname()[1]
        self._identity = Identity(SENDER, TcpCard.draw("127.0.0.1", port))
        self._connection: socket.socket | None = None

    def connect(self) -> int:
        """Opens another connection of the one link; gives how many messages the receiver has."""
        self.hang_up()
        self._connection = socket.create_connection((self._receiver.address, self._receiver.port))
        self._connection.settimeout(PATIENCE_S)
        verdict, received = answer(self._connection, self._identity, self._receiver, bytes(range(16)))
        assert verdict is Answer.GO_ON
        return received

    def write(self, message: Message, on: TorchDistributedCommunicator, share: float = 1.0) -> None:
        """Writes a message, or the first share of its payload."""
        assert self._connection is not None
        payload = b"" if message.tensor is None else message.tensor.numpy().tobytes()
        self._connection.sendall(encode_header(message, on._context) + payload[: int(share * len(payload))])

    def ended(self) -> bool:
        """Whether the receiver ends the connection, of which this waits for the end."""
        assert self._connection is not None
        try:
            while self._connection.recv(1 << 16):
                pass
        except ConnectionError:
            return True
        except TimeoutError:
            return False
        return True

    def hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def close(self) -> None:
        self.hang_up()
        self._listener.close()


class Receiving:
    """A receive in progress, on a thread of its own."""

    def __init__(self, network: Communicator, target: Tensor) -> None:
        self.result: Message | PeerLost | None = None
        self._thread = threading.Thread(target=self._receive, args=(network, target), daemon=True)
        self._thread.start()

    def _receive(self, network: Communicator, target: Tensor) -> None:
        try:
            self.result = network.receive_into(target, SENDER.rank)
        except PeerLost as loss:
            self.result = loss

    def ended(self) -> Message | PeerLost:
        self._thread.join(PATIENCE_S)
        assert self.result is not None
        return self.result


class Stages:
    """Counts the receives that wait with memory, and those that a link has begun to write to."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        offered, begun, offer, find = (
            threading.Semaphore(0),
            threading.Semaphore(0),
            Inbox.offer,
            Inbox.target,
        )

        def offer_noted(*arguments):
            target = offer(*arguments)
            offered.release()
            return target

        def found(*arguments):
            target = find(*arguments)
            if target is not None:
                begun.release()
            return target

        patch.setattr(Inbox, "offer", offer_noted)
        patch.setattr(Inbox, "target", found)
        self._offered, self._begun = offered, begun

    def await_offer(self) -> None:
        assert self._offered.acquire(timeout=PATIENCE_S)

    def await_writing(self) -> None:
        assert self._begun.acquire(timeout=PATIENCE_S)


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Stages:
    return Stages(monkeypatch)


@pytest.fixture
def network() -> Iterator[TorchDistributedCommunicator]:
    store = host_store()
    home, made = connect(local(0, 2, store.port), shared_memory=False)
    yield made
    home.lose(SENDER)  # else this one would wait for it to leave
    home.close()


@pytest.fixture
def sender(network: TorchDistributedCommunicator) -> Iterator[Sender]:
    made = Sender(network)
    assert made.connect() == 0
    yield made
    made.close()


def vector(value: float, count: int = LONG, step: int = 0) -> Message:
    return Message(Kind.VECTOR, torch.full((count,), value), step=step)


def marker(network: TorchDistributedCommunicator, sender: Sender) -> None:
    """Returns when all that the sender wrote before has been handled."""
    sender.write(Message(Kind.VECTOR, tag=99), network)
    network.receive(SENDER.rank, tag=99)


def test_a_payload_is_received_where_the_receive_wants_it(network, sender, stages) -> None:
    target = torch.zeros(LONG)
    receiving = Receiving(network, target)
    stages.await_offer()
    sender.write(vector(2.0, step=5), network)
    message = receiving.ended()
    assert message.tensor is target
    assert message.step == 5
    assert target.unique().tolist() == [2.0]


@pytest.mark.parametrize(
    "message",
    [vector(2.0, 100), vector(2.0, LONG + 1), Message(Kind.VECTOR, torch.ones(LONG, dtype=torch.int32))],
    ids=["short", "another size", "another dtype"],
)
def test_what_does_not_fit_is_received_elsewhere(network, sender, stages, message) -> None:
    target = torch.zeros(LONG)
    receiving = Receiving(network, target)
    stages.await_offer()
    sender.write(message, network)
    assert torch.equal(receiving.ended().tensor, message.tensor)
    assert not target.any()


def test_messages_keep_their_order_and_the_memory_is_that_of_their_own_receive(
    network, sender, stages
) -> None:
    sender.write(vector(1.0, step=1), network)
    marker(network, sender)
    targets = [torch.zeros(LONG) for _ in range(3)]
    first = Receiving(network, targets[0]).ended()  # it was there before
    assert (first.step, first.tensor is targets[0]) == (1, False)
    for step in (2, 3):
        receiving = Receiving(network, targets[step - 1])
        stages.await_offer()
        sender.write(vector(float(step), step=step), network)
        assert receiving.ended().step == step
    assert [target.unique().tolist() for target in targets] == [[0.0], [2.0], [3.0]]


def test_a_payload_that_breaks_off_is_no_message_and_arrives_whole_over_the_next_connection(
    network, sender, stages
) -> None:
    target = torch.zeros(LONG)
    receiving = Receiving(network, target)
    stages.await_offer()
    sender.write(vector(2.0), network, share=0.7)
    stages.await_writing()
    assert sender.connect() == 0
    marker_first = Message(Kind.VECTOR, tag=99)
    sender.write(marker_first, network)
    network.receive(SENDER.rank, tag=99)
    assert receiving.result is None
    sender.write(vector(3.0), network)
    assert receiving.ended().tensor is target
    assert target.unique().tolist() == [3.0]


def test_a_receive_that_fails_gets_its_memory_back_and_later_bytes_go_elsewhere(
    network, sender, stages
) -> None:
    group = network.subgroup("group", (0, 1))
    target = torch.zeros(LONG)
    receiving = Receiving(group, target)
    stages.await_offer()
    sender.write(vector(2.0), group, share=0.7)
    stages.await_writing()
    group.revoke_here()
    assert isinstance(receiving.ended(), PeerLost)
    target.fill_(5.0)
    assert sender.ended()
    assert sender.connect() == 0  # the message has not arrived, so it is sent again
    sender.write(vector(2.0), group)
    marker(network, sender)
    assert target.unique().tolist() == [5.0]


def test_a_message_that_is_whole_when_its_receive_fails_is_kept_elsewhere(network, sender) -> None:
    home, group = network._home, network.subgroup("group", (0, 1))
    want, memory = group._want(SENDER.rank, 0), torch.zeros(LONG)
    with home._news:
        offered = home._inbox.offer(want, memory)
    message = vector(2.0)
    assert home.target(group._context, SENDER, message, lambda: None) is offered
    with home._news:
        home._inbox.withdraw(offered)
    memory.copy_(message.tensor)
    home.deliver(group._context, SENDER, message._replace(tensor=memory), offered)
    memory.fill_(5.0)
    assert group.receive(SENDER.rank)[1].tensor.unique().tolist() == [2.0]


def test_a_sender_that_is_lost_in_the_middle_of_a_payload_is_reported(network, sender, stages) -> None:
    receiving = Receiving(network, torch.zeros(LONG))
    stages.await_offer()
    sender.write(vector(2.0), network, share=0.7)
    stages.await_writing()
    network._home.lose(SENDER)
    assert isinstance(receiving.ended(), PeerLost)
    assert sender.ended()


def test_a_replacement_does_not_write_for_the_receive_that_waited_for_its_predecessor(
    network, sender, stages
) -> None:
    receiving = Receiving(network, torch.zeros(LONG))
    stages.await_offer()
    home = network._home
    with home._news:  # before the receive is notified
        home._generations[SENDER.rank] = 1
        home._inbox.regain(SENDER.rank, 1)
        assert home._inbox.target(network._context, SENDER.rank, vector(2.0)) is None
        home._news.notify_all()
    assert home.target(network._context, SENDER, vector(2.0), lambda: None) is None
    assert isinstance(receiving.ended(), PeerLost)
