"""A leaf's workers: who is there, what they have handed in, and what was taken without whom."""

from __future__ import annotations

from collections.abc import Collection

from polyrhythm.communication.message import Message, Reason, RefusedMessage


class LeafGroup:
    """The workers of one leaf, and their gradients until the group is complete.

    Args:
        members: ranks of its workers.

    Attributes:
        members: ranks of its workers.
        there: those that are there.
        asking: who asks for parameters, in the order of their coming.
        entering: successors that wait to be let in.
        steps: with which step each was last let go on; of a lost one, how many are taken.
        absent: for each rank, the stretches of steps, `[first, one past the last]`, taken without it until a successor
            came.
    """

    def __init__(self, members: tuple[int, ...]) -> None:
        self.members = members
        self.there = set(members)
        self.asking: list[int] = []
        self.entering: list[int] = []
        self.steps = dict.fromkeys(members, 0)
        self.absent: dict[int, list[list[int]]] = {}
        self._held: dict[int, Message] = {}
        self._lost: set[int] = set()

    def has_pushed(self, rank: int) -> bool:
        """Whether a gradient is held of a rank, be it there or not."""
        return rank in self._held

    @property
    def all_have_pushed(self) -> bool:
        """Whether there are gradients, one of everybody who is there among them."""
        return bool(self._held) and self.there <= self._held.keys()

    @property
    def all_have_come(self) -> bool:
        """Whether somebody asks, and whoever is there asks or has pushed already."""
        return bool(self.asking) and self.there <= self._held.keys() | set(self.asking)

    def check_turn(self, rank: int) -> None:
        """Makes sure that a rank may push now.

        Raises:
            RefusedMessage: it has, or is not there.
        """
        if rank in self._held or rank not in self.there:
            raise RefusedMessage(Reason.ORDER, f"rank {rank} pushed a second time, or after it had left")

    def hold(self, rank: int, message: Message) -> None:
        """Holds a gradient until all are there."""
        self._held[rank] = message

    def take_held(self) -> tuple[list[Message], list[int]]:
        """Gives all gradients that are held, in the members' order, and who is there to be answered."""
        pushed = [rank for rank in self.members if rank in self._held]
        held, self._held = [self._held[rank] for rank in pushed], {}
        for rank in pushed:
            if rank not in self.there:
                self.steps[rank] += 1
        return held, [rank for rank in pushed if rank in self.there]

    def take_asking(self) -> list[int]:
        """Gives who asks."""
        asking, self.asking = self.asking, []
        return asking

    def take_entering(self) -> list[int]:
        """Gives who waits to be let in."""
        entering, self.entering = self.entering, []
        return entering

    def lose(self, rank: int, *, pushed_on: bool) -> bool:
        """Strikes a rank off; gives whether it was there.

        Args:
            rank: the lost one.
            pushed_on: whether its gradient is on its way to the roots, so that its step is taken.
        """
        if rank in self.entering:
            self.entering.remove(rank)
        if rank not in self.there:
            return False
        self.there.remove(rank)
        self._lost.add(rank)
        self.steps[rank] += pushed_on
        self.asking = [asking for asking in self.asking if asking != rank]
        return True

    def let_in(self, ranks: Collection[int], step: int) -> None:
        """Successors begin at a step; what was taken since the lost ones' last is taken without them."""
        for rank in ranks:
            self.there.add(rank)
            if rank in self._lost and self.steps[rank] < step:
                self.absent.setdefault(rank, []).append([self.steps[rank], step])
            self._lost.discard(rank)
            self.steps[rank] = step
