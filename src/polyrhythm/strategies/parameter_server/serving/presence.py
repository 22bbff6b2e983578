"""Which pushers a server has, who of them waits for the first parameters, and how the run ends.

The end of several servers is one end: worker 0 asks all for the final parameters, and lets them go (a second LEAVE)
once it has all. From the first of its two on, a successor is told to leave.
"""

from __future__ import annotations

from polyrhythm.communication.message import Kind, Reason, RefusedMessage


class Presence:
    """A server's list of its pushers.

    Args:
        pushers: their ranks.

    Attributes:
        pushers: their ranks.
        numbers: of the pushers, from 0, by rank.
        asking: ranks that wait for parameters.
        final: who has asked for the final parameters, or None.
        done: whether that one has let the servers go.
    """

    def __init__(self, pushers: tuple[int, ...]) -> None:
        self.pushers = pushers
        self.numbers = {rank: number for number, rank in enumerate(pushers)}
        self.asking: list[int] = []
        self.final: int | None = None
        self.done = False
        self._left: set[int] = set()

    def number(self, rank: int, kind: Kind) -> int:
        """Gives a pusher's number.

        Raises:
            RefusedMessage: the rank is none of the pushers; `kind` is what it sent.
        """
        if rank not in self.numbers:
            raise RefusedMessage(
                Reason.SENDER, f"a server heard {kind.name} from rank {rank}, which pushes nothing here"
            )
        return self.numbers[rank]

    @property
    def there(self) -> int:
        """How many pushers are there."""
        return len(self.pushers) - len(self._left)

    def is_there(self, rank: int) -> bool:
        """Whether a pusher has not left."""
        return rank not in self._left

    def enter(self, rank: int) -> bool:
        """A pusher asks for parameters to begin with; gives whether it may, which a late successor may not."""
        if rank in self._left:
            if self.final is not None:  # it might change one shard and not another
                return False
            self._left.remove(rank)
        return True

    def leave(self, rank: int) -> bool:
        """A pusher leaves or is lost; gives whether it was there. Who has the final parameters ends the run."""
        if rank in self.asking:
            self.asking.remove(rank)
        if rank in self._left:
            self.done |= self.final == rank
            return False
        self._left.add(rank)
        return True

    def lose(self, rank: int) -> bool:
        """A pusher is lost, as in `leave`; if it had asked for the final parameters, its successor will ask again."""
        if self.final == rank:
            self.final = None
        return self.leave(rank)

    @property
    def ready_to_end(self) -> int | None:
        """Who can be given the final parameters now, since nobody can change them any more; or None."""
        return self.final if not self.there else None
