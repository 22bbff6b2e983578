"""Links that may drop, delay, duplicate and corrupt messages, and be cut for a time.

A link keeps its order, as TCP does: what follows a delayed message waits behind it. A cut link holds what it carries
until it is back; then everything arrives one latency later. The news of a rank's loss takes the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Protocol

from polyrhythm.communication.transports.simulated.courier import Parcel
from polyrhythm.communication.transports.simulated.network import Action, Network
from polyrhythm.communication.transports.simulated.rank import SimulatedRank
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime


@dataclass
class Passage:
    """What becomes of one message.

    Attributes:
        parcel: the message.
        copies: how many of it arrive.
        delay_s: by which it is late.
        malformed: whether the receiver cannot read it.
        held: whether it waits to be let go, with `FaultyLinks.let_go`.
    """

    parcel: Parcel
    copies: int = 1
    delay_s: float = 0.0
    malformed: bool = False
    held: bool = False


class MessageRule(Protocol):
    """Something that happens to messages."""

    def __call__(self, passage: Passage, /) -> None:
        """Changes what becomes of a message that is starting."""


@dataclass(frozen=True)
class CutLinks:
    """A time in which some links carry nothing.

    Attributes:
        concerns: whether the link between two ranks is cut.
        from_s: when it begins.
        to_s: when the link is back.
    """

    concerns: Callable[[int, int], bool]
    from_s: float
    to_s: float


@dataclass
class FaultyLinks:
    """Carries messages, and lets happen what rules say; implements `Courier`.

    Attributes:
        time: the simulation's.
        network: moves the bytes.
        rules: what happens to messages, in order.
        cuts: of links.
        on_arrival: is told of every message that is there, before its receiver.
    """

    time: VirtualTime
    network: Network
    rules: list[MessageRule] = field(default_factory=list)
    cuts: list[CutLinks] = field(default_factory=list)
    on_arrival: Callable[[Parcel], None] | None = None
    _latest_s: dict[tuple[SimulatedRank, SimulatedRank], float] = field(default_factory=dict)
    _late: Counter[tuple[SimulatedRank, SimulatedRank]] = field(default_factory=Counter)

    @property
    def disturbed(self) -> bool:
        """Whether something may happen to a message, or somebody wants to know of it."""
        return bool(self.rules or self.cuts or self.on_arrival)

    def carry(self, parcel: Parcel) -> None:
        """Starts now; see `Courier`."""
        passage = Passage(parcel)
        for rule in self.rules:
            rule(passage)
        if not passage.held:
            self.let_go(passage)

    def let_go(self, passage: Passage) -> None:
        """Lets a message start on its way, as it is now."""
        parcel = passage.parcel
        source, to = parcel.source, parcel.to
        arrive = partial(self._arrive, passage)
        if self.rules or self.cuts:
            arrive = partial(self._keep_order, source, to, arrive, passage.delay_s)
        self.network.transfer(source.rank, to.rank, parcel.nbytes, parcel.sent, arrive)

    def tell_loss(self, gone: SimulatedRank, to: SimulatedRank) -> None:
        """Tells it one latency later, behind all that left before."""
        heard = partial(self._keep_order, gone, to, partial(to.hear_of_loss, gone), 0.0)
        self.time.at(self.time.now() + self.network.alpha_s(gone.rank, to.rank), heard)

    def _keep_order(self, source: SimulatedRank, to: SimulatedRank, action: Action, delay_s: float) -> None:
        """Does what an arrival does, when the link lets it arrive."""
        link = source, to
        due_s = self._through_cuts(source.rank, to.rank, self.time.now() + delay_s)
        due_s = self._latest_s[link] = max(due_s, self._latest_s.get(link, -inf))
        if due_s > self.time.now() or self._late[link]:  # what is due now may still be waiting for its turn
            self._late[link] += 1
            self.time.at(due_s, partial(self._let_arrive, link, action))
        else:
            action()

    def _let_arrive(self, link: tuple[SimulatedRank, SimulatedRank], action: Action) -> None:
        self._late[link] -= 1
        action()

    def _through_cuts(self, source: int, to: int, due_s: float) -> float:
        for cut in self.cuts:  # in the order of their ends
            if cut.from_s <= due_s < cut.to_s and cut.concerns(source, to):
                due_s = cut.to_s + self.network.alpha_s(source, to)
        return due_s

    def _arrive(self, passage: Passage) -> None:
        parcel = passage.parcel
        if not parcel.done():
            return
        if passage.malformed:  # as a reader does that cannot make sense of its stream
            parcel.to.break_link(parcel.source)
            parcel.source.break_link(parcel.to)
            return
        for _ in range(passage.copies):
            if self.on_arrival is not None and parcel.to.alive and parcel.to.hears(parcel.source):
                self.on_arrival(parcel)
            parcel.arrive()
