"""What faults of links and of single messages have in common: where and when they happen."""

from __future__ import annotations

from abc import abstractmethod
from math import inf
from random import Random

from pydantic import Field, model_validator

from polyrhythm.errors import RequestError
from polyrhythm.simulation.injection.fault import Fault, FaultyRun, Ground, check_rank
from polyrhythm.simulation.injection.faulty_links import Passage
from polyrhythm.training.quantities import Count, Fraction, NonNegative


class LinkFault(Fault):
    """A fault of some links for some time.

    Attributes:
        source: rank of the sender; default: any.
        to: rank of the receiver; default: any.
        from_s: virtual seconds.
        to_s: virtual seconds; default: to the end.
    """

    source: int | None = None
    to: int | None = None
    from_s: NonNegative = 0.0
    to_s: float = Field(default=inf, gt=0)

    @model_validator(mode="after")
    def _check_times(self) -> LinkFault:
        if self.to_s <= self.from_s:
            raise RequestError(
                f"fault {self.name}: to_s {self.to_s:g} must be later than from_s {self.from_s:g}"
            )
        if self.source is not None and self.source == self.to:
            raise RequestError(f"fault {self.name}: source and to are the same rank {self.to}")
        return self

    def check(self, ground: Ground) -> None:
        """Checks that the ranks exist."""
        for rank in (self.source, self.to):
            if rank is not None:
                check_rank(self, ground, rank)

    def holds_up_s(self, step_s: float) -> float:
        """All that it lasts."""
        return self.to_s - self.from_s if self.to_s < inf else 0.0

    def concerns(self, source: int, to: int) -> bool:
        """Whether it is about this way between two ranks."""
        return self.source in (None, source) and self.to in (None, to)


class MessageFault(LinkFault):
    """A fault of single messages, chosen when they start.

    Attributes:
        probability: with which a message is chosen.
        count: how many are chosen at most; default: no limit.
    """

    probability: Fraction = 1.0
    count: Count | None = None

    def begin(self, run: FaultyRun, random: Random) -> None:
        """Adds its rule to the links."""
        chosen = 0

        def rule(passage: Passage) -> None:
            nonlocal chosen
            parcel = passage.parcel
            if not self.from_s <= run.time.now() < self.to_s:
                return
            if not self.concerns(parcel.source.rank, parcel.to.rank):
                return
            if (self.count is None or chosen < self.count) and random.random() < self.probability:
                chosen += 1
                self.happen(passage, random)

        run.links.rules.append(rule)

    @abstractmethod
    def happen(self, passage: Passage, random: Random) -> None:
        """Changes what becomes of a message."""
