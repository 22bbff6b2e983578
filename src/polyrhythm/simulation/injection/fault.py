"""Faults, and the links that carry them out.

A fault happens at a time, after a step, or at random from the seed. Links may drop, delay, duplicate and corrupt
messages, and be cut for a time. A link keeps its order, as TCP does: what follows a delayed message waits behind it. A
cut link holds what it carries until it is back; then everything arrives one latency later; a cut that lasts too long
breaks the link. The notice of a rank's loss takes the same way. `LinkFault` and `MessageFault` hold what faults of
links and of single messages have in common: where and when they happen.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from math import inf
from random import Random
from typing import Annotated, Any, Protocol, cast

from pydantic import BeforeValidator, Field, model_validator

from polyrhythm.communication.transports.simulated.network import Action, Network
from polyrhythm.communication.transports.simulated.rank import Parcel, SimulatedRank
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime
from polyrhythm.errors import RequestError
from polyrhythm.specs import Config, build
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.strategies.worker_part import WorkerPart
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.quantities import Count, Fraction, NonNegative


@dataclass
class Passage:
    """One message on its way.

    Attributes:
        parcel: the message.
        copies: number of copies that arrive.
        delay_s: delay in seconds by which it is late.
        malformed: whether the receiver cannot read it.
        held: whether it waits for `FaultyLinks.release`.
    """

    parcel: Parcel
    copies: int = 1
    delay_s: float = 0.0
    malformed: bool = False
    held: bool = False


MessageRule = Callable[[Passage], None]
"""Changes what becomes of a message that is starting."""


@dataclass(frozen=True)
class CutLinks:
    """A time in which some links carry nothing.

    Attributes:
        concerns: whether the link between two ranks is cut.
        from_s: start of the cut.
        to_s: end of the cut.
    """

    concerns: Callable[[int, int], bool]
    from_s: float
    to_s: float


@dataclass
class FaultyLinks:
    """Links on which messages are changed by rules; implements `Courier`.

    Attributes:
        time: virtual time of the simulation.
        network: network that carries the messages.
        rules: rules for messages, in order.
        cuts: cuts of links.
        on_arrival: callback with every message that has arrived, before its receiver has it.
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
        """Whether something may happen to a message, or every message is to be reported."""
        return bool(self.rules or self.cuts or self.on_arrival)

    def carry(self, parcel: Parcel) -> None:
        """Start a message now; see `Courier`."""
        passage = Passage(parcel)
        for rule in self.rules:
            rule(passage)
        if not passage.held:
            self.start(passage)

    def start(self, passage: Passage) -> None:
        """Start a message as it is now."""
        parcel = passage.parcel
        source, to = parcel.source, parcel.to
        arrive = partial(self._arrive, passage)
        if self.rules or self.cuts:
            arrive = partial(self._keep_order, source, to, arrive, passage.delay_s)
        self.network.transfer(source.rank, to.rank, parcel.nbytes, parcel.sent, arrive)

    def report_loss(self, lost: SimulatedRank, to: SimulatedRank) -> None:
        """Report a loss one latency later, behind all that left before."""
        deliver = partial(self._keep_order, lost, to, partial(to.note_loss, lost), 0.0)
        self.time.at(self.time.now() + self.network.alpha_s(lost.rank, to.rank), deliver)

    def _keep_order(self, source: SimulatedRank, to: SimulatedRank, action: Action, delay_s: float) -> None:
        """Call `action`, an arrival, when the link lets it arrive."""
        link = source, to
        due_s = self._through_cuts(source.rank, to.rank, self.time.now() + delay_s)
        due_s = self._latest_s[link] = max(due_s, self._latest_s.get(link, -inf))
        if due_s > self.time.now() or self._late[link]:  # messages that are due now may still be queued
            self._late[link] += 1
            self.time.at(due_s, partial(self._deliver, link, action))
        else:
            action()

    def _deliver(self, link: tuple[SimulatedRank, SimulatedRank], action: Action) -> None:
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
            if self.on_arrival is not None and parcel.to.alive and parcel.to.accepts(parcel.source):
                self.on_arrival(parcel)
            parcel.arrive()


FAULTS = "polyrhythm.simulation.injection.faults"


class FaultTarget(Protocol):
    """The ranks of a run, where faults happen."""

    @property
    def roles(self) -> RoleAssignment:
        """Ranks by role."""

    @property
    def host_of(self) -> tuple[int, ...]:
        """The number of each rank's host."""


class FaultyRun(FaultTarget, Protocol):
    """A run, as far as faults reach into it.

    Attributes:
        time: time of all ranks.
        links: links between the ranks.
        states: worker part and parameters of every worker, by rank.
    """

    time: VirtualTime
    links: FaultyLinks
    states: dict[int, tuple[WorkerPart, FlatParameters]]

    @property
    def ranks(self) -> list[SimulatedRank]:
        """The latest rank of every number."""

    def kill(self, rank: int) -> None:
        """Kill a rank, unless it has ended already."""

    def restart(self, rank: int) -> None:
        """Start a replacement, unless the rank is alive or the run is over."""

    def living(self, ranks: Sequence[int]) -> list[int]:
        """Return those of some ranks that have not ended."""

    def when_done(self, rank: int, steps: int, action: Callable[[], None]) -> None:
        """Call `action` when a worker has done `steps` steps and is about to begin another."""

    def slow(self, rank: int, factor: Callable[[], float]) -> None:
        """Multiply a worker's step times by what `factor` returns when each step begins."""

    def repeat(self, gap_s: Callable[[], float], action: Callable[[], None]) -> None:
        """Call `action` repeatedly after `gap_s()` seconds, while the run continues."""


class Fault(Config):
    """One fault of a run."""

    @abstractmethod
    def check(self, ground: FaultTarget) -> None:
        """Check that all that it names is part of this run.

        Raises:
            RequestError: it names a rank or a host that is not there.
        """

    @abstractmethod
    def begin(self, run: FaultyRun, random: Random) -> None:
        """Prepare what is to happen; called before the run begins.

        Args:
            run: run to inject the fault into.
            random: random generator of this fault alone.
        """

    def kills(self, rank: int, ground: FaultTarget) -> bool:
        """Return whether this may kill a rank."""
        return False

    def returns_rank(self, rank: int, ground: FaultTarget) -> bool:
        """Return whether a rank has a replacement whenever this kills it."""
        return True

    def holds_up_s(self, step_s: float) -> float:
        """Return about how long it may hold a run up at once, in which a step takes `step_s`."""
        return 0.0


def check_rank(fault: Fault, ground: FaultTarget, rank: int) -> None:
    """Check that a rank is one of the run's.

    Raises:
        RequestError: it is not.
    """
    if not 0 <= rank < ground.roles.size:
        raise RequestError(f"fault {fault}: there is no rank {rank}; ranks are 0 to {ground.roles.size - 1}")


def parse_faults(given: Any) -> tuple[Fault, ...]:
    """Return faults from text or a list.

    Args:
        given: text such as `kill(rank=1, at_s=2); drop(probability=0.01)`, or a list of such texts and faults.

    Raises:
        RequestError: an unknown fault or key, or a value out of its range.
    """
    if isinstance(given, str):
        parts = [part.strip() for part in given.split(";") if part.strip()]
        return tuple(cast(Fault, build("fault", part, FAULTS)) for part in parts)
    if not isinstance(given, Iterable):
        raise RequestError(f"faults: write them as kill(rank=1, at_s=2); … (given {given!r})")
    found: list[Fault] = []
    for entry in given:
        found += [entry] if isinstance(entry, Fault) else parse_faults(str(entry))
    return tuple(found)


Faults = Annotated[tuple[Fault, ...], BeforeValidator(parse_faults)]
"""A field that holds faults, given as text or as a list."""


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

    def check(self, ground: FaultTarget) -> None:
        for rank in (self.source, self.to):
            if rank is not None:
                check_rank(self, ground, rank)

    def holds_up_s(self, step_s: float) -> float:
        return self.to_s - self.from_s if self.to_s < inf else 0.0

    def concerns(self, source: int, to: int) -> bool:
        """Return whether it happens on the way from one rank to another."""
        return self.source in (None, source) and self.to in (None, to)


class MessageFault(LinkFault):
    """A fault of single messages, chosen when they start.

    Attributes:
        probability: probability with which a message is chosen.
        count: largest number of chosen messages; default: no limit.
    """

    probability: Fraction = 1.0
    count: Count | None = None

    def begin(self, run: FaultyRun, random: Random) -> None:
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
        """Change what becomes of a message."""


def cut_links(
    run: FaultyRun, concerns: Callable[[int, int], bool], from_s: float, to_s: float, broken_after_s: float
) -> None:
    """Cut links.

    Args:
        run: run of the links.
        concerns: whether the link between two ranks is cut; the same both ways.
        from_s: beginning in virtual seconds.
        to_s: end in virtual seconds.
        broken_after_s: seconds after which the connections are lost.
    """
    run.links.cuts.append(CutLinks(concerns, from_s, to_s))
    run.links.cuts.sort(key=lambda cut: cut.to_s)
    if from_s + broken_after_s < to_s:
        run.time.at(from_s + broken_after_s, partial(_break_links, run, concerns))


def _break_links(run: FaultyRun, concerns: Callable[[int, int], bool]) -> None:
    living = [rank for rank in run.ranks if rank.alive]
    for one, other in combinations(living, 2):
        if concerns(one.rank, other.rank):
            one.break_link(other)
            other.break_link(one)
