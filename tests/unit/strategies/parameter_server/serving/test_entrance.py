"""Who comes to a server and who goes, by hand."""

from __future__ import annotations

import pytest

from polyrhythm.communication.message import Kind, Message, RefusedMessage
from polyrhythm.strategies.parameter_server.consistency.asynchronous import Asynchronous
from polyrhythm.strategies.parameter_server.consistency.synchronous import Synchronous
from polyrhythm.strategies.parameter_server.serving.gate import Consistency
from polyrhythm.strategies.parameter_server.serving.pusher_state import Books
from polyrhythm.strategies.parameter_server.serving.shard import Handling
from polyrhythm.strategies.parameter_server.serving.shard_server import Entrance

PUSHERS = (3, 5)


def entrance(consistency: Consistency) -> tuple[Books, Entrance]:
    books = Books(PUSHERS, consistency, Handling())
    return books, Entrance(books)


def test_a_successor_out_of_step_is_let_in_without_a_word() -> None:
    books, made = entrance(Asynchronous())
    assert made.lose(5)
    assert not made.lose(5)
    assert made.shown_out(5) == [(5, Message(Kind.LEAVE))]
    assert made.let_in(5) == []
    assert books.presence.is_there(5)
    assert made.shown_out(5) == []


def test_a_successor_in_step_is_asked_for_its_round_until_it_has_said_so() -> None:
    _, made = entrance(Synchronous())
    assert made.let_in(5) == []  # no successor
    assert made.lose(5)
    made.leave(5)
    asked = [(5, Message(Kind.JOIN, step=0))]
    assert made.let_in(5) == asked
    assert made.invited(5) == asked
    assert made.come_in(5, Message(Kind.JOIN, step=0)).answer == (1,)
    assert made.invited(5) == []


def test_after_the_question_for_the_final_parameters_a_successor_is_told_to_leave() -> None:
    _, made = entrance(Asynchronous())
    assert made.lose(5)
    with pytest.raises(RefusedMessage, match="rank 5 asked for the final parameters"):
        made.ask_for_end(5)
    made.ask_for_end(3)
    assert made.let_in(5) == [(5, Message(Kind.LEAVE))]


def test_whoever_waits_is_named_once() -> None:
    _, made = entrance(Asynchronous())
    made.wait(5)
    made.wait(3)
    assert made.all_waiting() == [5, 3]
    assert made.all_waiting() == []


def test_without_rounds_nobody_names_one() -> None:
    _, made = entrance(Asynchronous())
    with pytest.raises(RefusedMessage, match="there are none"):
        made.come_in(5, Message(Kind.JOIN))
