"""The deal under losses: what comes late, whose loss is told late, and who counts its steps otherwise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, cast

from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.message import Kind, Message
from polyrhythm.data.dealer import Dealer, Deck, Grant
from polyrhythm.events import BatchesDrawn
from polyrhythm.roles.deal import Deal, Draw

Came = tuple[int, Message] | Callable[[], None]


class Scripted:
    """Gives messages in their order, and does something between them."""

    def __init__(self, came: list[Came]) -> None:
        self.came = came
        self.answered: list[int] = []
        self.answers: list[Message] = []

    def start(self, work: Callable[[], Any]) -> Any:
        work()

    def receive(self, *_: Any) -> tuple[int, Message]:
        found = self.came.pop(0)
        while callable(found):
            found()
            found = self.came.pop(0)
        return found

    def start_send(self, to: int, message: Message) -> Any:
        self.answered.append(to)
        self.answers.append(message)
        return self

    def wait(self) -> None:
        pass


def test_a_draw_that_comes_after_its_workers_loss_is_not_granted() -> None:
    dealer = Dealer(Deck((40,), (10,)), [1, 1])
    undealt: list[int] = []

    def lost() -> None:
        deal.lose(1, 0, 1)
        undealt.append(deal.undealt)

    def note() -> None:
        undealt.append(deal.undealt)

    network = Scripted(
        [
            (1, Draw(0, 0).message()),
            lost,
            (1, Draw(0, 1).message()),  # of the one that was killed
            note,
            (1, Draw(1, 0).message()),  # of its successor
            note,
            (0, Message(Kind.LEAVE)),
        ]
    )
    deal = Deal(dealer, ((0,), (1,)), cast(Communicator, network), lambda: 0.0, None)
    deal.open()
    assert undealt[0] == undealt[1] == 40
    assert undealt[2] < 40
    assert network.answered == [1, 1]


def events_of(came: list[Came], dealer: Dealer) -> tuple[Deal, list[BatchesDrawn], Scripted]:
    """Returns a deal of one worker beside worker 0 that has answered what came, and what it has told."""
    told: list[BatchesDrawn] = []
    network = Scripted([*came, (0, Message(Kind.LEAVE))])
    deal = Deal(dealer, ((0,), (1,)), cast(Communicator, network), lambda: 0.0, told.append)
    deal.begin()
    return deal, told, network


def held(told: list[BatchesDrawn]) -> Counter[tuple[int, int]]:
    """Counts places of orders that were granted and not given back."""
    places: Counter[tuple[int, int]] = Counter()
    for event in told:
        change = 1 if event.batches else -1
        for place in range(event.start, event.stop):
            places[event.epoch, place] += change
    return +places


def noted(told: list[BatchesDrawn], dealer: Dealer) -> Dealer:
    """Returns the deal as a new worker 0 finds it in the ledger."""
    for event in told:
        values = asdict(event)
        unit = values.pop("unit")
        dealer.note(unit, Grant(**{name: values[name] for name in Grant.__dataclass_fields__}))
    return dealer


def drawing(generation: int, steps: range) -> list[Came]:
    return [(1, Draw(generation, step).message()) for step in steps]


def test_what_a_lost_worker_did_is_not_given_back_by_the_steps_of_its_successor() -> None:
    """It took all there was, from step 13 on; its successor counts from 12, finds nothing left, and is lost as well."""
    dealers = [Dealer(Deck((40,), (10,)), [1, 1], steps=[0, 13]) for _ in range(2)]
    came: list[Came] = [
        *drawing(0, range(13, 17)),
        lambda: deal.lose(1, 17, 1),
        *drawing(1, range(12, 13)),
        lambda: deal.lose(1, 17, 2, reported=False),
    ]
    deal, told, network = events_of(came, dealers[0])
    deal.open()
    assert not network.came
    everything = dict.fromkeys(((0, place) for place in range(40)), 1)
    assert deal.undealt == 0
    assert held(told) == everything
    assert noted(told, dealers[1]).undealt == 0


def test_a_successor_that_is_lost_before_it_has_said_anything_has_done_nothing() -> None:
    """Its predecessor had said that it had done 17 steps, and it has drawn the 12th to the 16th of its own."""
    dealers = [Dealer(Deck((120,), (10,)), [1, 1], steps=[0, 13]) for _ in range(2)]
    came: list[Came] = [
        *drawing(0, range(13, 17)),
        lambda: deal.lose(1, 17, 1),
        *drawing(1, range(12, 17)),
        lambda: deal.lose(1, 17, 2, reported=False),
    ]
    deal, told, _ = events_of(came, dealers[0])
    deal.open()
    assert sum(held(told).values()) == 4 * 10
    assert deal.undealt == noted(told, dealers[1]).undealt == 120 - 4 * 10


def test_a_successor_with_its_predecessors_count_that_is_lost_unheard_gives_back_nothing_that_was_done() -> (
    None
):
    """Its predecessor had said that it had done ten steps; it asks for one of these again, and is lost."""
    dealers = [Dealer(Deck((200,), (10,)), [1, 1]) for _ in range(2)]
    left: list[int] = []
    came: list[Came] = [
        *drawing(0, range(10)),
        lambda: deal.lose(1, 10, 1),
        lambda: left.append(deal.undealt),
        *drawing(1, range(8, 10)),
        lambda: deal.lose(1, 10, 2, reported=False),
    ]
    deal, told, _ = events_of(came, dealers[0])
    deal.open()
    assert deal.undealt == left[0] == 200 - 10 * 10
    assert sum(held(told).values()) == 10 * 10
    assert noted(told, dealers[1]).undealt == deal.undealt


def test_a_loss_that_is_told_after_the_successor_has_drawn_gives_back_what_nobody_has_done() -> None:
    dealers = [Dealer(Deck((200,), (10,)), [1, 1], steps=[0, 13]) for _ in range(2)]
    came: list[Came] = [
        *drawing(0, range(13, 17)),
        *drawing(1, range(12, 13)),
        lambda: deal.lose(1, 14, 1),
    ]
    deal, told, _ = events_of(came, dealers[0])
    deal.open()
    own = deal.grants[1][0]
    assert own.step == 12
    assert deal.undealt == noted(told, dealers[1]).undealt == 200 - 10 - own.images
    assert held(told).keys() >= {(0, place) for place in range(own.start, own.stop)}
    assert sum(held(told).values()) == 10 + own.images


def epochs_begun(came: list[Came], begun_in: int, epochs: int = 4) -> list[tuple[int, int]]:
    """Returns the epoch of each answer's first batch, and that in which its worker begins."""
    network = Scripted([*came, (0, Message(Kind.LEAVE))])
    dealer = Dealer(Deck((10,) * epochs, (10,) * epochs), [1, 1])
    Deal(dealer, ((0,), (1,)), cast(Communicator, network), lambda: 0.0, None, begun_in).open()
    found = []
    for answer in network.answers:
        assert answer.tensor is not None
        found.append((Grant(*answer.tensor.tolist()).epoch, answer.version))
    return found


def test_a_worker_begins_with_the_session_though_others_have_drawn_whole_epochs_before_its_first_batch() -> (
    None
):
    """Else worker 0 would neither test nor save after these epochs; a replacement leaves them out."""
    others = drawing(0, range(2))
    late: list[Came] = [(0, Draw(0, 0).message())]
    assert epochs_begun([*others, *late], 0) == [(0, 0), (1, 1), (2, 0)]
    assert epochs_begun([*others, *late], 1)[-1] == (2, 1)
    assert epochs_begun([*others, (0, Draw(1, 0).message())], 0)[-1] == (2, 2)
    assert epochs_begun([*drawing(0, range(4)), *late], 0)[-1] == (4, 0)  # nothing is left for it
