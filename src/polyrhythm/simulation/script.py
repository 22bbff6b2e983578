"""Following a recording: a rank that would hear anyone hears exactly whom it heard then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from polyrhythm.communication.around import Around
from polyrhythm.communication.arrivals import Arrivals, check
from polyrhythm.communication.communicator import Communicator, Handle
from polyrhythm.communication.message import Message
from polyrhythm.errors import RunError


class ScriptOver(RunError):
    """A rank wants to hear more than it heard then."""


@dataclass(frozen=True)
class Difference:
    """Where a replay is not what was recorded.

    Attributes:
        rank: which heard something else; -1 where no rank did.
        message: how many it had heard before.
        text: what is different.
        source: who sent the message; -1 where there is none.
        kind: of the message; empty where there is none.
        step: of the message's sender.
        version: updates applied to the parameters that the message was computed from.
    """

    rank: int
    message: int
    text: str
    source: int = -1
    kind: str = ""
    step: int = 0
    version: int = 0


class Script:
    """One rank's part of a recording, and how far it has been played.

    Args:
        rank: whose.
        arrivals: what was recorded.

    Attributes:
        played: messages heard so far.
        difference: the first message that was not the recorded one.
    """

    def __init__(self, rank: int, arrivals: Arrivals) -> None:
        self.rank = rank
        self.played = 0
        self.difference: Difference | None = None
        self._arrivals = arrivals

    @property
    def left(self) -> int:
        """How many recorded messages have not been played."""
        return len(self._arrivals) - self.played

    def next_source(self) -> int:
        """Gives who must be heard next.

        Raises:
            ScriptOver: nobody was.
        """
        if not self.left:
            raise ScriptOver(
                f"rank {self.rank} waits for more than the {self.played} messages of the recording"
            )
        return self._arrivals.sources[self.played]

    def heard(self, source: int, message: Message) -> Difference | None:
        """Compares a message with the recorded one; gives the difference if it is this rank's first."""
        number, self.played = self.played, self.played + 1
        if self.difference is not None or check(source, message) == self._arrivals.checks[number]:
            return None
        self.difference = Difference(
            self.rank,
            number,
            f"{message.kind.name} of step {message.step} from rank {source} is not the message that was recorded",
            source,
            message.kind.name,
            message.step,
            message.version,
        )
        return self.difference


class Performance:
    """What is noticed while a recording is played.

    Attributes:
        difference: the first of all ranks', in virtual time.
        summed_ranks: the most ranks whose vectors a collective added up.
    """

    def __init__(self) -> None:
        self.difference: Difference | None = None
        self.summed_ranks = 1

    def notice(self, difference: Difference | None) -> None:
        """Keeps a difference if it is the first."""
        self.difference = self.difference or difference


class WatchedCommunicator(Around):
    """Notices how many ranks add up.

    Args:
        inner: does the work.
        performance: is told.
    """

    def __init__(self, inner: Communicator, performance: Performance) -> None:
        super().__init__(inner)
        self._performance = performance

    def all_reduce(self, tensor: Tensor) -> None:
        """Adds up over all ranks."""
        self._performance.summed_ranks = max(self._performance.summed_ranks, self.size)
        super().all_reduce(tensor)

    def start_all_reduce(self, tensor: Tensor) -> Handle:
        """Starts to add up over all ranks."""
        self._performance.summed_ranks = max(self._performance.summed_ranks, self.size)
        return super().start_all_reduce(tensor)

    def subgroup(self, name: str, ranks: Sequence[int]) -> WatchedCommunicator:
        """Makes the communicator of some of these ranks."""
        return WatchedCommunicator(self._inner.subgroup(name, ranks), self._performance)


class ScriptedCommunicator(WatchedCommunicator):
    """Hears whom the script names where it would hear anyone.

    Args:
        inner: does the work.
        script: this rank's.
        performance: is told of differences.
    """

    def __init__(self, inner: Communicator, script: Script, performance: Performance) -> None:
        super().__init__(inner, performance)
        self._script = script

    def receive(self, source: int | None = None, tag: int = 0) -> tuple[int, Message]:
        """Waits for a message; from anyone: for the next one of the script.

        Raises:
            ScriptOver: the script has no next one.
        """
        if source is not None:
            return super().receive(source, tag)
        found, message = super().receive(self._script.next_source(), tag)
        self._performance.notice(self._script.heard(found, message))
        return found, message
