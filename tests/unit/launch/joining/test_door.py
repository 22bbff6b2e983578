"""The door, over real sockets: who knows the token is let in, and nobody and nothing else."""

from __future__ import annotations

import select
import socket
import struct
import threading
import tracemalloc
from collections.abc import Iterator
from random import Random

import pytest

from polyrhythm.communication.secret import NONCE_BYTES, PROOF_BYTES, nonce, prove
from polyrhythm.communication.transports.membership import Peer
from polyrhythm.errors import RequestError
from polyrhythm.launch.joining.connections import GREETING, MOST_BYTES, Address
from polyrhythm.launch.joining.join_client import Place, Visit
from polyrhythm.launch.joining.join_server import Door, Entrance, Inside, News
from polyrhythm.launch.joining.token import door_key
from polyrhythm.strategies.role_assignment import RoleAssignment

TOKEN = "the token of this test"
KEY = door_key(TOKEN)
PATIENCE_S = 20.0
CAST = RoleAssignment((0, 2, 4), (1, 3))
OFFER = {"version": "1", "config": {"data": "digits"}}
HOSTILE, WARM_UP, FLAT_BYTES = 400, 100, 100_000


def echo(store: socket.socket) -> None:
    """A store that says what it hears."""
    while True:
        try:
            connection, _ = store.accept()
        except OSError:
            return
        with connection:
            while heard := connection.recv(1000):
                connection.sendall(heard)


@pytest.fixture
def store() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=echo, args=(listener,))
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.fixture
def door(store: int) -> Iterator[Door]:
    entrance = Entrance(Address("127.0.0.1", 0), TOKEN)
    entrance.offer = OFFER
    made = entrance.open()
    made.open(Inside(Address("127.0.0.1", store), CAST, "start"))
    yield made
    entrance.close()


def news(door: Door, count: int = 1) -> list[News]:
    found: list[News] = []
    while len(found) < count:
        assert select.select([door], [], [], PATIENCE_S)[0], f"only heard {found}"
        found += door.news()
    return found


@pytest.fixture
def visits(door: Door) -> Iterator[list[Visit]]:
    made: list[Visit] = []
    yield made
    for visit in made:
        visit.close()


def enter(door: Door, visits: list[Visit]) -> Visit:
    visits.append(Visit(door.address, KEY))
    return visits[-1]


def test_who_knows_the_token_is_told_of_the_job_and_given_a_place(door: Door, visits: list[Visit]) -> None:
    visit = enter(door, visits)
    assert visit.job("1") == OFFER
    door.vacate(Peer(2, 0))
    door.begin(parameters=42)
    assert visit.take_place() == Place(Peer(2, 1), 42, CAST, "start")
    (came,) = news(door)
    assert (came.what, came.peer) == ("came", Peer(2, 1))
    with pytest.raises(RequestError, match="refuses: all its workers are there"):
        enter(door, visits).take_place()
    assert [(each.what, each.reason) for each in news(door)] == [("refused", "place")]
    visit.leave("its host asked it to")
    (went,) = news(door)
    assert (went.what, went.peer, went.why) == ("went", Peer(2, 1), "left: its host asked it to")
    assert enter(door, visits).take_place() == Place(Peer(2, 2), 42, CAST, "start")


def test_who_dies_without_a_word_leaves_its_place(door: Door, visits: list[Visit]) -> None:
    door.vacate(Peer(1, 0))
    door.begin(parameters=1)
    enter(door, visits).take_place()
    visits.pop().close()
    came, went = news(door, 2)
    assert (came.what, went.what, went.peer, went.why) == ("came", "went", Peer(1, 1), "is gone")


def test_who_has_taken_all_its_steps_needs_no_successor(door: Door, visits: list[Visit]) -> None:
    door.vacate(Peer(1, 0))
    door.begin(parameters=1)
    visit = enter(door, visits)
    visit.take_place()
    visit.leave(None)
    assert [each.what for each in news(door, 2)] == ["came", "done"]
    with pytest.raises(RequestError, match="all its workers are there"):
        enter(door, visits).take_place()


def test_guests_hear_that_the_run_stops_and_that_it_is_over(door: Door, visits: list[Visit]) -> None:
    door.vacate(Peer(1, 0))
    door.begin(parameters=1)
    visit = enter(door, visits)
    visit.take_place()
    stopped, over = threading.Event(), threading.Event()
    why: list[str] = []

    def is_over(said: str) -> None:
        why.append(said)
        over.set()

    visit.listen(stopped.set, is_over)
    door.ask_to_stop()
    assert stopped.wait(PATIENCE_S)
    assert not over.is_set()
    door.end()
    assert over.wait(PATIENCE_S)
    assert why == ["the run is over"]
    with pytest.raises(RequestError, match="refuses: it is over"):
        enter(door, visits).take_place()


def test_the_store_is_reached_through_the_door(door: Door, visits: list[Visit]) -> None:
    visit = enter(door, visits)
    with socket.create_connection(("127.0.0.1", visit.store_port), PATIENCE_S) as connection:
        for length in (1, 1000, 300_000):
            sent = Random(length).randbytes(length)
            threading.Thread(target=connection.sendall, args=(sent,)).start()
            heard = b""
            while len(heard) < length:
                heard += connection.recv(length - len(heard))
            assert heard == sent


def test_another_version_is_refused_in_one_line(door: Door, visits: list[Visit]) -> None:
    with pytest.raises(RequestError, match=r"refuses: it runs Polyrhythm 1, you 2: install the same$"):
        enter(door, visits).job("2")
    assert [each.reason for each in news(door)] == ["version"]
    assert door.refused == {"version": 1}


def test_another_token_is_refused_on_both_sides_and_counted(door: Door) -> None:
    with pytest.raises(RequestError, match=r"^the run at 127\.0\.0\.1:\d+ has another token: give its own$"):
        Visit(door.address, door_key(TOKEN + "!"))
    (refused,) = news(door)
    assert (refused.what, refused.reason) == ("refused", "token")
    assert door.refused == {"token": 1}


def test_a_visitor_trusts_no_door_that_does_not_know_the_token() -> None:
    """It says that all is well, and cannot prove it."""

    def pretend(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(GREETING + nonce())
            connection.recv(NONCE_BYTES + PROOF_BYTES, socket.MSG_WAITALL)
            connection.sendall(b"+" + nonce())

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=pretend, args=(listener,))
        thread.start()
        with pytest.raises(RequestError, match="does not know the token, and is not to be trusted"):
            Visit(Address("127.0.0.1", listener.getsockname()[1]), KEY)
        thread.join()


def test_where_nobody_listens_one_is_asked_whether_the_run_is_under_way() -> None:
    with socket.socket() as holding:  # the port, so that nobody else listens there
        holding.bind(("127.0.0.1", 0))
        port = holding.getsockname()[1]
        with pytest.raises(
            RequestError, match=rf"cannot reach 127.0.0.1:{port} \(Connection refused\): is the run under way"
        ):
            Visit(Address("127.0.0.1", port), KEY)


def test_a_proof_that_was_heard_is_of_no_use(door: Door) -> None:
    """The door's number is another each time."""
    with socket.create_connection(door.address, PATIENCE_S) as first:
        asked = first.recv(len(GREETING) + NONCE_BYTES, socket.MSG_WAITALL)[len(GREETING) :]
        ours = nonce()
        heard = ours + prove(KEY, "visitor", asked, ours)
        first.sendall(heard)
        assert first.recv(1) == b"+"
    with socket.create_connection(door.address, PATIENCE_S) as second:
        second.recv(len(GREETING) + NONCE_BYTES, socket.MSG_WAITALL)
        second.sendall(heard)
        assert second.recv(1) == b"-"
        assert second.recv(1) == b""
    assert news(door)[-1].reason == "token"


def hostile(random: Random, admitted: bool) -> bytes:
    """What a stranger sends, or one who knows the token and has a bug, or changes what others send."""
    if not admitted:
        return random.randbytes(random.choice([0, 1, NONCE_BYTES, NONCE_BYTES + PROOF_BYTES, 500]))
    length = random.choice([0, 1, 20, MOST_BYTES + 1, 2**32 - 1])
    return struct.pack(">I", length) + random.randbytes(
        random.choice([0, PROOF_BYTES, PROOF_BYTES + 20, 300])
    )


def knock(door: Door, random: Random) -> None:
    admitted = random.random() < 0.5
    with socket.create_connection(door.address, PATIENCE_S) as connection:
        asked = connection.recv(len(GREETING) + NONCE_BYTES, socket.MSG_WAITALL)[len(GREETING) :]
        if admitted:
            ours = nonce()
            connection.sendall(ours + prove(KEY, "visitor", asked, ours))
            connection.recv(1 + PROOF_BYTES, socket.MSG_WAITALL)
        connection.sendall(hostile(random, admitted))
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1000):
            pass


def test_whatever_comes_instead_of_a_proof_changes_nothing(door: Door, visits: list[Visit]) -> None:
    door.vacate(Peer(1, 0))
    door.begin(parameters=7)
    random = Random(1)
    for _ in range(WARM_UP):
        knock(door, random)
    door.news()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(HOSTILE):
            knock(door, random)
        door.news()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < FLAT_BYTES
    assert door.refused["token"] + door.refused["silent"] > HOSTILE / 3
    assert door.refused["oversized"] > HOSTILE / 20
    assert enter(door, visits).take_place() == Place(Peer(1, 1), 7, CAST, "start")
