"""The real communicator, over real processes: what it does, and what happens when one of them dies."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable

import pytest
import torch

from conformance.communicator_checks import CHECKS, SIZE, run
from conformance.rank_processes import RankProcesses, Seat
from on_processes.greeting import SOON_S, greet_all, loss
from polyrhythm.communication.communicator import Communicator, Handle
from polyrhythm.communication.message import Kind, Message
from polyrhythm.communication.transports.tcp.handshake import TcpCard
from polyrhythm.communication.transports.tcp.outgoing_link import MOST_COPIED_BYTES
from polyrhythm.communication.transports.torch_distributed import rank as rank_module
from polyrhythm.errors import PeerLost

LONG = MOST_COPIED_BYTES // 4 + 1
"""Elements of a message that has left only when it has arrived: what is on its way may be lost with its process."""
BROKEN = r"^a collective broke, so a rank is gone: [^.\[]+( \[127.0.0.1\]:\d+(: [\w ]+)?)?$"


def _check_all(seat: Seat) -> None:
    home, network = seat.connect()
    for check in CHECKS:
        run(check, network)
        seat.tell(check.__name__)
    home.close()


@pytest.fixture(params=[True, False], ids=["memory", "tcp"], scope="module")
def shared_memory(request: pytest.FixtureRequest) -> bool:
    """Whether links between ranks go through shared memory."""
    return bool(request.param)


@pytest.fixture(scope="module")
def checked(shared_memory: bool) -> dict[str, str]:
    """Runs all checks in one set of ranks; gives what went wrong, by check."""
    wrong: dict[str, str] = {}
    with RankProcesses(_check_all, SIZE, shared_memory=shared_memory) as ranks:
        for check in CHECKS:
            try:
                assert ranks.hear_all(range(SIZE)) == [check.__name__] * SIZE
            except AssertionError as error:
                wrong[check.__name__] = str(error)
                break
        else:
            ranks.wait_for_end(range(SIZE))
    failed = next(iter(wrong), None)
    names = [check.__name__ for check in CHECKS]
    for name in names[names.index(failed) + 1 :] if failed else []:
        wrong[name] = f"not reached: {failed} failed"
    return wrong


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_real_ranks(checked: dict[str, str], check: Callable[[Communicator], None]) -> None:
    assert check.__name__ not in checked, checked[check.__name__]


def _outlive_rank_1(seat: Seat) -> None:
    _home, network = seat.connect()
    greet_all(network)
    pair = network.subgroup("survivors", [0, 2]) if seat.rank != 1 else network
    seat.tell("ready")
    if seat.rank == 1:
        network.receive(0, tag=99)
    elif seat.rank == 0:
        seat.tell(loss(lambda: network.receive(1)))
        seat.wait_for_word()  # until rank 2 has heard of it too
        network.send(2, Message(Kind.PUSH, version=5))
        pair.send(1, Message(Kind.PUSH, version=6))
    else:
        seat.tell(loss(network.receive))
        assert network.receive()[1].version == 5  # each loss is told once to whoever waits for anyone,
        assert pair.receive()[1].version == 6  # and not to groups that the lost rank is no member of
    seat.tell("survived")


def test_receivers_hear_of_a_killed_peer(shared_memory: bool) -> None:
    with RankProcesses(_outlive_rank_1, 3, shared_memory=shared_memory) as ranks:
        ranks.hear_all(range(3))
        killed_at = ranks.kill(1)
        for rank in (0, 2):
            lost, heard_at = ranks.hear(rank)
            assert lost == 1
            assert heard_at - killed_at < SOON_S
        ranks.say(0, "go")
        assert ranks.hear_all([0, 2]) == ["survived"] * 2
        ranks.wait_for_end([0, 2])


def _wait_for_a_first_word(seat: Seat) -> None:
    _home, network = seat.connect()
    if seat.rank == 1:
        network.receive(0)
        seat.tell("ready")
        network.receive(0)
    network.send(1, Message(Kind.PULL))
    seat.tell(loss(lambda: network.receive(1)))


def test_a_peer_that_never_spoke_is_missed_too(shared_memory: bool) -> None:
    with RankProcesses(_wait_for_a_first_word, 2, shared_memory=shared_memory) as ranks:
        ranks.hear(1)
        killed_at = ranks.kill(1)
        lost, heard_at = ranks.hear(0)
        assert lost == 1
        assert heard_at - killed_at < SOON_S


def _poll_until_lost(seat: Seat) -> None:
    _home, network = seat.connect()
    greet_all(network)
    seat.tell("ready")
    if seat.rank == 1:
        network.receive(0)
    while True:
        try:
            assert network.poll(1) is None
        except PeerLost as error:
            seat.tell((error.rank, time.monotonic()))
            return
        network.clock.sleep(1e-3)


def test_who_polls_hears_of_a_killed_peer(shared_memory: bool) -> None:
    with RankProcesses(_poll_until_lost, 2, shared_memory=shared_memory) as ranks:
        ranks.hear_all(range(2))
        killed_at = ranks.kill(1)
        lost, heard_at = ranks.hear(0)
        assert lost == 1
        assert heard_at - killed_at < SOON_S


def _send_into_the_void(seat: Seat) -> None:
    _home, network = seat.connect()
    greet_all(network)
    seat.tell("ready")
    if seat.rank == 1:
        network.receive(0)
    seat.wait_for_word()
    large = torch.zeros(10_000_000)
    handle = network.start_send(1, Message(Kind.PUSH, large))
    seat.tell(handle.done())
    seat.tell(loss(handle.wait))
    seat.tell(loss(lambda: network.send(1, Message(Kind.PULL))))


def test_sending_to_a_killed_peer_fails_and_does_not_hang() -> None:
    with RankProcesses(_send_into_the_void, 2, shared_memory=False) as ranks:
        ranks.hear_all(range(2))
        ranks.signal(1, signal.SIGSTOP)  # so that the message is under way when the peer dies
        ranks.say(0, "go")
        assert ranks.hear(0) is False
        killed_at = ranks.kill(1)
        for _ in range(2):
            lost, heard_at = ranks.hear(0)
            assert lost == 1
            assert heard_at - killed_at < SOON_S


def _first_send_after_the_death(seat: Seat) -> None:
    home, network = seat.connect()
    if seat.rank == 1:
        seat.tell("ready")
        network.receive(0)
    seat.wait_for_word()
    seat.tell(loss(lambda: network.send(1, Message(Kind.PULL)))[0])
    network.send(2, Message(Kind.PULL)) if seat.rank == 0 else network.receive(0)
    home.close()


def test_a_link_to_the_dead_cannot_be_opened(shared_memory: bool) -> None:
    with RankProcesses(_first_send_after_the_death, 3, shared_memory=shared_memory) as ranks:
        ranks.hear(1)
        ranks.kill(1)
        for rank in (0, 2):
            ranks.say(rank, "go")
        assert ranks.hear_all([0, 2]) == [1, 1]
        ranks.wait_for_end([0, 2])


def _connect_and_die(seat: Seat) -> None:
    if seat.rank == 1:
        store = seat.rendezvous().store
        store.wait(["joined/0"])
        card = TcpCard.from_text(store.get("card/tcp/0/0").decode())
        connection = socket.create_connection((card.address, card.port))
        connection.recv(1)  # it has been accepted
        seat.tell("connected")
        seat.wait_for_word()
    _home, network = seat.connect()
    seat.wait_for_word()
    if seat.rank == 2:
        network.send(0, Message(Kind.PULL, version=8))
        return
    assert network.receive(2)[1].version == 8
    seat.tell(loss(lambda: network.receive(2))[0])


def test_who_dies_while_opening_a_link_keeps_nobody_out() -> None:
    with RankProcesses(_connect_and_die, 3, shared_memory=False) as ranks:
        ranks.hear(1)
        ranks.kill(1)
        for rank in (0, 2):
            ranks.say(rank, "go")
        assert ranks.hear(0) == 2


def _reduce_without_rank_2(seat: Seat, known: bool) -> None:
    _home, network = seat.connect()
    if known:
        greet_all(network)
    total = torch.ones(1000)
    network.all_reduce(total)
    assert total[0] == 5
    seat.tell("ready")
    if seat.rank == 2:
        network.receive(0, tag=99)
    seat.wait_for_word()
    handles: list[Handle] = []

    def reduce_twice() -> None:
        handles.extend(network.start_all_reduce(torch.ones(100_000)) for _ in range(2))
        handles[0].wait()

    with pytest.raises(PeerLost, match=BROKEN):
        reduce_twice()
    seat.tell(time.monotonic())
    for again in (*(handle.wait for handle in handles), network.barrier):
        with pytest.raises(PeerLost, match=BROKEN):
            again()
    if known:
        with pytest.raises(PeerLost):
            network.subgroup("never reduced before", range(5)).all_reduce(torch.ones(3))
    rest = network.subgroup("survivors", [0, 1, 3, 4])
    total = torch.ones(1000)
    rest.all_reduce(total)
    assert total[-1] == 4
    seat.tell("survived")
    seat.wait_for_word()


@pytest.mark.parametrize("known", [True, False], ids=["linked", "never linked"])
def test_a_collective_with_a_dead_member_fails_on_all(shared_memory: bool, known: bool) -> None:
    survivors = [0, 1, 3, 4]
    with RankProcesses(_reduce_without_rank_2, 5, known, shared_memory=shared_memory) as ranks:
        ranks.hear_all(range(5))
        ranks.kill(2)
        started_at = time.monotonic()
        for rank in survivors:
            ranks.say(rank, "go")
        for failed_at in ranks.hear_all(survivors):
            assert failed_at - started_at < 2 * SOON_S  # none of them leaves before all have failed
        assert ranks.hear_all(survivors) == ["survived"] * 4


def _close_well(seat: Seat) -> None:
    before = threading.enumerate()
    home, network = seat.connect()
    greet_all(network)
    network.start(lambda: None).wait()
    network.barrier()
    started_at = time.monotonic()
    home.close()
    seat.tell((time.monotonic() - started_at, [t.name for t in threading.enumerate() if t not in before]))


def test_closing_leaves_no_thread_behind(shared_memory: bool) -> None:
    with RankProcesses(_close_well, 3, shared_memory=shared_memory) as ranks:
        for seconds, threads in ranks.hear_all(range(3)):
            assert threads == []
            assert seconds < SOON_S
        ranks.wait_for_end(range(3))


def _close_after_a_death(seat: Seat) -> None:
    home, network = seat.connect()
    greet_all(network)
    seat.tell("ready")
    if seat.rank == 1:
        network.receive(0, tag=99)
    seat.wait_for_word()
    started_at = time.monotonic()
    home.close()
    seat.tell(time.monotonic() - started_at)


def test_survivors_close_in_good_order(shared_memory: bool) -> None:
    with RankProcesses(_close_after_a_death, 3, shared_memory=shared_memory) as ranks:
        ranks.hear_all(range(3))
        ranks.kill(1)
        for rank in (0, 2):
            ranks.say(rank, "go")
        assert max(ranks.hear_all([0, 2])) < SOON_S
        ranks.wait_for_end([0, 2])


def _speak_last(seat: Seat) -> None:
    _home, network = seat.connect()
    greet_all(network)
    if seat.rank == 1:
        for version in range(100):
            network.send(0, Message(Kind.PUSH, torch.ones(LONG), version=version))
        return  # and is gone, without closing
    for version in range(100):
        assert network.receive(1)[1].version == version
    seat.tell(loss(lambda: network.receive(1))[0])


def test_what_a_lost_peer_sent_before_still_counts(shared_memory: bool) -> None:
    with RankProcesses(_speak_last, 2, shared_memory=shared_memory) as ranks:
        assert ranks.hear(0) == 1


def _leave_early(seat: Seat) -> None:
    rank_module.CLOSING_PATIENCE_S = 0.2  # the leaver does not wait long for those who go on
    home, network = seat.connect()
    greet_all(network)
    if seat.rank == 0:
        seat.tell("waiting")
        seat.tell(network.receive()[0])
    if seat.rank == 2:
        seat.wait_for_word()
        network.send(0, Message(Kind.PUSH))
    home.close()


def test_who_leaves_in_good_order_is_not_lost(shared_memory: bool) -> None:
    with RankProcesses(_leave_early, 3, shared_memory=shared_memory) as ranks:
        ranks.hear(0)
        ranks.wait_for_end([1])
        ranks.say(2, "go")
        assert ranks.hear(0) == 2
        ranks.wait_for_end([0, 2])
