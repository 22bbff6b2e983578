"""What a killed worker has asked for may come after its loss: nobody is granted it, and its successor is answered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.message import Kind, Message
from polyrhythm.data.dealer import Dealer, Deck
from polyrhythm.roles.deal import Deal, Draw

Came = tuple[int, Message] | Callable[[], None]


class Scripted:
    """Gives messages in their order, and does something between them."""

    def __init__(self, came: list[Came]) -> None:
        self.came = came
        self.answered: list[int] = []

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
