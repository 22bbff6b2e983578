"""A rank that died comes back under its number, over real processes."""

from __future__ import annotations

import signal
import time

import torch

from conformance.rank_processes import PATIENCE_S, RankProcesses, Seat
from polyrhythm.communication.message import Kind, Message
from polyrhythm.communication.transports.membership import Peer
from polyrhythm.communication.transports.torch_distributed.rendezvous import record_loss
from polyrhythm.errors import PeerLost


def _heard(network, source=None):
    """Gives what comes next: the version of a message, or who is lost."""
    try:
        return network.receive(source)[1].version
    except PeerLost as error:
        return f"lost {error.rank}"


def _serve_a_successor(seat: Seat) -> None:
    home, network = seat.connect()
    if seat.rank == 1:
        network.send(0, Message(Kind.PULL, torch.ones(3), version=10 + seat.generation))
        seat.tell(_heard(network, 0))
        seat.wait_for_word()
    else:
        seat.tell(_heard(network))
        network.send(1, Message(Kind.PARAMETERS, version=20))
        seat.wait_for_word()  # by then the first has died, and its successor has asked
        news = [_heard(network), _heard(network)]
        network.send(1, Message(Kind.PARAMETERS, version=21))
        seat.tell(news)
    home.close()


def test_a_successor_is_heard_after_the_loss_and_gets_its_own_answers() -> None:
    with RankProcesses(_serve_a_successor, 2) as ranks:
        assert [ranks.hear(0), ranks.hear(1)] == [10, 20]
        ranks.kill(1)
        ranks.succeed(1)
        ranks.say(0, "go")
        assert ranks.hear(0) == ["lost 1", 11]
        assert ranks.hear(1) == 21
        ranks.say(1, "leave")
        ranks.wait_for_end([0, 1])


def _answer_the_dead(seat: Seat) -> None:
    _home, network = seat.connect()
    if seat.rank == 1:
        network.send(0, Message(Kind.PULL, version=10 + seat.generation))
        seat.tell("asked")
        seat.tell(_heard(network, 0))
        return
    seat.tell(_heard(network))
    seat.wait_for_word()
    # the successor has joined and asked: only its loss tells the first from it
    try:
        network.send(1, Message(Kind.PARAMETERS, version=20))
        seat.tell("sent")
    except PeerLost as error:
        seat.tell(f"lost {error.rank}")
    news = [_heard(network), _heard(network)]
    network.send(1, Message(Kind.PARAMETERS, version=21))
    seat.tell(news)
    seat.wait_for_word()


def test_an_answer_to_the_dead_does_not_reach_its_successor() -> None:
    with RankProcesses(_answer_the_dead, 2) as ranks:
        assert [ranks.hear(0), ranks.hear(1)] == [10, "asked"]
        ranks.signal(0, signal.SIGSTOP)  # so that rank 0 opens its first link to rank 1 after all this
        ranks.say(0, "go")
        ranks.kill(1)
        ranks.succeed(1)
        assert ranks.hear(1) == "asked"
        ranks.signal(0, signal.SIGCONT)
        assert ranks.hear(0) == "lost 1"
        assert ranks.hear(0) == ["lost 1", 11]
        assert ranks.hear(1) == 21


def _wait_for_a_stranger(seat: Seat) -> None:
    _home, network = seat.connect()
    seat.tell("ready")
    started_at = time.monotonic()
    seat.tell((_heard(network, 1 - seat.rank), time.monotonic() - started_at))


def test_word_of_a_death_reaches_who_has_no_link_to_the_dead() -> None:
    with RankProcesses(_wait_for_a_stranger, 2) as ranks:
        ranks.hear_all(range(2))
        ranks.kill(1)
        record_loss(ranks.store, Peer(1, 0), Peer(0, 0))
        assert ranks.hear(0)[0] == "lost 1"


def _open_a_link_to_one_who_never_joins(seat: Seat) -> None:
    if seat.rank == 1:
        seat.tell("alive")
        seat.wait_for_word()
    _home, network = seat.connect()
    seat.tell("ready")
    started_at = time.monotonic()
    try:
        network.send(1, Message(Kind.PARAMETERS))
    except PeerLost as error:
        seat.tell((error.rank, time.monotonic() - started_at))


def test_nobody_waits_for_one_who_died_before_it_joined() -> None:
    with RankProcesses(_open_a_link_to_one_who_never_joins, 2) as ranks:
        assert [ranks.hear(0), ranks.hear(1)] == ["ready", "alive"]
        ranks.kill(1)
        record_loss(ranks.store, Peer(1, 0), Peer(0, 0))
        lost, seconds = ranks.hear(0)
        assert lost == 1
        assert seconds < PATIENCE_S / 2  # which includes the wait for rank 1 to be there at all


def _send_beside_one_who_has_not_joined(seat: Seat) -> None:
    if seat.rank == 2:
        seat.wait_for_word()
    home, network = seat.connect()
    if seat.rank == 0:
        network.send(1, Message(Kind.PULL, version=7))
        waiting = network.start(lambda: network.send(2, Message(Kind.PULL, version=9)))
        network.send(1, Message(Kind.PULL, version=8))
        seat.tell(waiting.done())
        waiting.wait()
    else:
        seat.tell([_heard(network, 0) for _ in range(3 - seat.rank)])
    home.close()


def test_a_link_that_cannot_be_opened_yet_holds_up_no_other() -> None:
    with RankProcesses(_send_beside_one_who_has_not_joined, 3) as ranks:
        assert ranks.hear(1) == [7, 8]
        assert ranks.hear(0) is False
        ranks.say(2, "join")
        assert ranks.hear(2) == [9]
        ranks.wait_for_end(range(3))


def _wait_for_one_who_lives(seat: Seat) -> None:
    home, network = seat.connect()
    crew = network.subgroup("crew", range(3))
    crew.revoke_without(0)
    if seat.rank == 0:  # a rank hears of a loss where it has a link, or from the launcher
        network.send(2, Message(Kind.PULL))
    if seat.rank == 2:
        network.receive(0)
    seat.tell("met")
    if seat.rank == 2:
        try:
            crew.receive(1)
        except PeerLost as error:
            seat.tell(str(error))
    seat.wait_for_word()
    home.close()


def test_who_waits_for_another_hears_that_a_member_is_lost_whom_all_need() -> None:
    with RankProcesses(_wait_for_one_who_lives, 3) as ranks:
        assert [ranks.hear(rank) for rank in range(3)] == ["met"] * 3
        ranks.kill(0)
        assert ranks.hear(2) == "a collective broke, so a rank is gone: another rank has given it up"
        for rank in (1, 2):
            ranks.say(rank, "leave")
        ranks.wait_for_end([1, 2])
