"""How a request to stop travels where no round joins all: as the number of the last step.

    step         4        5        6        7
    worker 0   asked: "stop after 6" ─▶ neighbours
    worker 1              knows ─▶ neighbours
    worker 2                       knows      all stop after step 6, when three turns have told everybody

A worker that is asked to stop names a step so late that all will know of it by then. Of several requests the earliest
step counts; that number, too, has reached everybody before the step is over.
"""

from __future__ import annotations

from collections.abc import Callable

from polyrhythm.communication.message import Message


class Ending:
    """The last step that one worker knows of.

    Args:
        turns_to_all: gives in how many steps a word is everywhere.
        last: the step after which all stop, if that is known already.

    Attributes:
        last: the step after which all stop, as far as this worker knows.
    """

    def __init__(self, turns_to_all: Callable[[], int], last: int | None = None) -> None:
        self._turns_to_all = turns_to_all
        self.last = last

    def request_stop(self, step: int) -> None:
        """This worker was asked to stop before its message of a step left."""
        self._agree(step + max(1, self._turns_to_all()) - 1)

    def tell(self, message: Message) -> Message:
        """Gives a message with what is known of the end: `stop`, and the last step as `version`."""
        return message if self.last is None else message._replace(stop=True, version=self.last)

    def hear(self, message: Message) -> None:
        """Takes what a neighbour knows of the end."""
        if message.stop:
            self._agree(message.version)

    def after(self, step: int) -> bool:
        """Whether the run stops after a step, whose messages have been heard."""
        return self.last is not None and step >= self.last

    def _agree(self, last: int) -> None:
        self.last = last if self.last is None else min(last, self.last)
