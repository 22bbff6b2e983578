"""The door, over real sockets: who knows the token is let in, and nobody and nothing else."""

from __future__ import annotations

import queue
import socket
import struct
import threading
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from multiprocessing.connection import wait
from random import Random

import pytest

from polyrhythm.communication.secret import NONCE_BYTES, PROOF_BYTES, nonce, prove
from polyrhythm.communication.transports.membership import Peer
from polyrhythm.errors import RequestError
from polyrhythm.launch.joining.connections import CROWDED, GREETING, MOST_BYTES, Address, door_key
from polyrhythm.launch.joining.join_client import Assignment, JoinClient
from polyrhythm.launch.joining.join_server import MOST_OF_AN_ADDRESS, Entrance, Inside, JoinServer
from polyrhythm.launch.supervisor import Fact, GuestAsked, GuestLeft, GuestRefused, Rules, Supervisor
from polyrhythm.strategies.role_assignment import RoleAssignment

TOKEN = "the token of this test"
KEY = door_key(TOKEN)
PATIENCE_S = 20.0
CAST = RoleAssignment((0, 2, 4), (1, 3))
OFFER = {"version": "1", "config": {"data": "digits"}}
HOSTILE, WARM_UP, FLAT_BYTES = 400, 100, 100_000
STRANGE = ("crowd", "token", "silent", "oversized", "proof", "malformed")


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


class Door:
    """A join server, and a launcher that answers those who ask for a place; rank 2 is vacant.

    Attributes:
        server: the join server.
        refused: connections that came to nothing, by reason.
    """

    def __init__(self, server: JoinServer) -> None:
        self.server = server
        self.refused: Counter[str] = Counter()
        self._supervisor = Supervisor(CAST, (0, 1, 3, 4), Rules(has_join_server=True))
        self._supervisor.open()
        self._heard: queue.SimpleQueue[Fact] = queue.SimpleQueue()
        self._counted = threading.Condition()
        self._bell, self._ringing = socket.socketpair()
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def heard(self, count: int = 1) -> list[Fact]:
        """Return what it tells next, those who ask for a place and strangers aside."""
        return [self._heard.get(timeout=PATIENCE_S) for _ in range(count)]

    def await_refusals(self, count: int) -> None:
        """Wait until so many connections have come to nothing."""
        with self._counted:
            assert self._counted.wait_for(lambda: self.refused.total() >= count, PATIENCE_S)

    def close(self) -> None:
        self._ringing.send(b"!")
        self._thread.join()
        self._bell.close()
        self._ringing.close()

    def _answer(self) -> None:
        while self._bell not in wait([self.server, self._bell]):
            for fact in self.server.poll():
                if isinstance(fact, GuestRefused):
                    with self._counted:
                        self.refused[fact.reason] += 1
                        self._counted.notify_all()
                if not (isinstance(fact, GuestRefused) and fact.reason in STRANGE):
                    self._heard.put(fact)
                for order in self._supervisor.on(fact, 0.0):
                    self.server.carry_out(order)


@pytest.fixture
def door(store: int) -> Iterator[Door]:
    entrance = Entrance(Address("127.0.0.1", 0), TOKEN)
    entrance.offer = OFFER
    server = entrance.open()
    server.open(Inside(Address("127.0.0.1", store), CAST, "start"))
    made = Door(server)
    yield made
    made.close()
    entrance.close()


@pytest.fixture
def visits() -> Iterator[list[JoinClient]]:
    made: list[JoinClient] = []
    yield made
    for visit in made:
        visit.close()


def enter(door: Door, visits: list[JoinClient]) -> JoinClient:
    visits.append(JoinClient(door.server.address, KEY))
    return visits[-1]


def test_who_knows_the_token_is_told_of_the_job_and_given_a_place(
    door: Door, visits: list[JoinClient]
) -> None:
    visit = enter(door, visits)
    assert visit.job("1") == OFFER
    door.server.begin(parameters=42)
    assert visit.take_place() == Assignment(Peer(2, 1), 42, CAST, "start")
    (came,) = door.heard()
    assert isinstance(came, GuestAsked)
    with pytest.raises(RequestError, match="refuses: all its workers are there"):
        enter(door, visits).take_place()
    asked, refused = door.heard(2)
    assert isinstance(asked, GuestAsked)
    assert isinstance(refused, GuestRefused)
    assert refused.reason == "place"
    visit.leave("its host asked it to")
    assert door.heard() == [GuestLeft(Peer(2, 1), came.address, "left: its host asked it to")]
    assert enter(door, visits).take_place() == Assignment(Peer(2, 2), 42, CAST, "start")


def test_who_dies_without_a_word_leaves_its_place(door: Door, visits: list[JoinClient]) -> None:
    door.server.begin(parameters=1)
    enter(door, visits).take_place()
    visits.pop().close()
    came, went = door.heard(2)
    assert isinstance(came, GuestAsked)
    assert went == GuestLeft(Peer(2, 1), came.address, "is gone")


def test_who_has_taken_all_its_steps_needs_no_successor(door: Door, visits: list[JoinClient]) -> None:
    door.server.begin(parameters=1)
    visit = enter(door, visits)
    visit.take_place()
    visit.leave(None)
    came, went = door.heard(2)
    assert isinstance(came, GuestAsked)
    assert went == GuestLeft(Peer(2, 1), came.address, done=True)
    with pytest.raises(RequestError, match="all its workers are there"):
        enter(door, visits).take_place()


def test_guests_hear_that_the_run_stops_and_that_it_is_over(door: Door, visits: list[JoinClient]) -> None:
    door.server.begin(parameters=1)
    visit = enter(door, visits)
    visit.take_place()
    stopped, over = threading.Event(), threading.Event()
    why: list[str] = []

    def is_over(said: str) -> None:
        why.append(said)
        over.set()

    visit.listen(stopped.set, is_over)
    door.server.ask_to_stop()
    assert stopped.wait(PATIENCE_S)
    assert not over.is_set()
    door.server.end()
    assert over.wait(PATIENCE_S)
    assert why == ["the run is over"]
    with pytest.raises(RequestError, match="refuses: it is over"):
        enter(door, visits).take_place()


def test_who_waits_for_a_place_when_the_run_ends_is_told_so(visits: list[JoinClient]) -> None:
    """Nobody decides about it any more."""
    entrance = Entrance(Address("127.0.0.1", 0), TOKEN)
    entrance.offer = OFFER
    server = entrance.open()
    server.open(Inside(Address("127.0.0.1", 1), CAST))
    server.begin(parameters=1)
    with closing(entrance), ThreadPoolExecutor(1) as pool:
        visits.append(JoinClient(server.address, KEY))
        coming = pool.submit(visits[-1].take_place)
        assert wait([server], PATIENCE_S)
        assert [type(fact) for fact in server.poll()] == [GuestAsked]
        server.end()
        with pytest.raises(RequestError, match="refuses: it is over"):
            coming.result(PATIENCE_S)


def test_the_store_is_reached_through_the_door(door: Door, visits: list[JoinClient]) -> None:
    visit = enter(door, visits)
    with socket.create_connection(("127.0.0.1", visit.store_port), PATIENCE_S) as connection:
        for length in (1, 1000, 300_000):
            sent = Random(length).randbytes(length)
            threading.Thread(target=connection.sendall, args=(sent,)).start()
            heard = b""
            while len(heard) < length:
                heard += connection.recv(length - len(heard))
            assert heard == sent


def test_another_version_is_refused_in_one_line(door: Door, visits: list[JoinClient]) -> None:
    with pytest.raises(RequestError, match=r"refuses: it runs Polyrhythm 1, you 2: install the same$"):
        enter(door, visits).job("2")
    (refused,) = door.heard()
    assert isinstance(refused, GuestRefused)
    assert refused.reason == "version"
    assert door.refused == {"version": 1}


def test_another_token_is_refused_on_both_sides_and_counted(door: Door) -> None:
    with pytest.raises(RequestError, match=r"^the run at 127\.0\.0\.1:\d+ has another token: give its own$"):
        JoinClient(door.server.address, door_key(TOKEN + "!"))
    door.await_refusals(1)
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
            JoinClient(Address("127.0.0.1", listener.getsockname()[1]), KEY)
        thread.join()


def test_where_nobody_listens_one_is_asked_whether_the_run_is_under_way() -> None:
    with socket.socket() as holding:  # the port, so that nobody else listens there
        holding.bind(("127.0.0.1", 0))
        port = holding.getsockname()[1]
        with pytest.raises(
            RequestError,
            match=rf"cannot reach 127.0.0.1:{port} \(Connection refused\): is the run still active",
        ):
            JoinClient(Address("127.0.0.1", port), KEY)


def test_eighty_silent_strangers_keep_nobody_out(door: Door, visits: list[JoinClient]) -> None:
    """From the guest's own address, and more than may be there at once: the oldest of them go."""
    door.server.begin(parameters=7)
    crowd = [socket.create_connection(door.server.address, PATIENCE_S) for _ in range(80)]
    guest = enter(door, visits)
    assert guest.job("1") == OFFER
    assert guest.take_place() == Assignment(Peer(2, 1), 7, CAST, "start")
    greeted = crowd[0].recv(1000, socket.MSG_WAITALL)
    assert greeted.startswith(GREETING)
    assert greeted[len(GREETING) + NONCE_BYTES :] == CROWDED
    assert door.refused == {"crowd": 80 - MOST_OF_AN_ADDRESS + 1}
    for connection in crowd:
        connection.close()


def test_an_address_that_crowds_the_door_sends_away_its_own_only(door: Door) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.2", 0))
        other.connect(door.server.address)
        other.settimeout(PATIENCE_S)
        asked = other.recv(len(GREETING) + NONCE_BYTES, socket.MSG_WAITALL)[len(GREETING) :]
        crowd = [socket.create_connection(door.server.address, PATIENCE_S) for _ in range(80)]
        door.await_refusals(80 - MOST_OF_AN_ADDRESS)
        ours = nonce()
        other.sendall(ours + prove(KEY, "visitor", asked, ours))
        assert other.recv(1) == b"+"
        for connection in crowd:
            connection.close()


def test_who_is_sent_away_in_a_crowd_comes_again() -> None:
    """A door that is crowded twice, and then asks for a proof."""
    came = []

    def crowded(listener: socket.socket) -> None:
        for verdict in (b"~", b"~", b"-"):
            connection, _ = listener.accept()
            with connection:
                came.append(verdict)
                connection.sendall(GREETING + nonce())
                connection.recv(NONCE_BYTES + PROOF_BYTES, socket.MSG_WAITALL)
                connection.sendall(verdict)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=crowded, args=(listener,))
        thread.start()
        with pytest.raises(RequestError, match="has another token"):
            JoinClient(Address("127.0.0.1", listener.getsockname()[1]), KEY)
        thread.join()
    assert came == [b"~", b"~", b"-"]


def test_a_proof_that_was_heard_is_of_no_use(door: Door) -> None:
    """The door's number is another each time."""
    with socket.create_connection(door.server.address, PATIENCE_S) as first:
        asked = first.recv(len(GREETING) + NONCE_BYTES, socket.MSG_WAITALL)[len(GREETING) :]
        ours = nonce()
        heard = ours + prove(KEY, "visitor", asked, ours)
        first.sendall(heard)
        assert first.recv(1) == b"+"
    with socket.create_connection(door.server.address, PATIENCE_S) as second:
        second.recv(len(GREETING) + NONCE_BYTES, socket.MSG_WAITALL)
        second.sendall(heard)
        assert second.recv(1) == b"-"
        assert second.recv(1) == b""
    door.await_refusals(1)
    assert door.refused == {"token": 1}


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
    with socket.create_connection(door.server.address, PATIENCE_S) as connection:
        asked = connection.recv(len(GREETING) + NONCE_BYTES, socket.MSG_WAITALL)[len(GREETING) :]
        if admitted:
            ours = nonce()
            connection.sendall(ours + prove(KEY, "visitor", asked, ours))
            connection.recv(1 + PROOF_BYTES, socket.MSG_WAITALL)
        connection.sendall(hostile(random, admitted))
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1000):
            pass


def test_whatever_comes_instead_of_a_proof_changes_nothing(door: Door, visits: list[JoinClient]) -> None:
    door.server.begin(parameters=7)
    random = Random(1)
    for _ in range(WARM_UP):
        knock(door, random)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(HOSTILE):
            knock(door, random)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < FLAT_BYTES
    assert enter(door, visits).take_place() == Assignment(Peer(2, 1), 7, CAST, "start")
    assert door.refused["token"] + door.refused["silent"] > HOSTILE / 3
    assert door.refused["oversized"] > HOSTILE / 20
