"""What a fault is: something that goes wrong at a time, after a step, or at random from the seed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Annotated, Any, Protocol, cast

from pydantic import BeforeValidator

from polyrhythm.communication.transports.simulated.rank import SimulatedRank
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime
from polyrhythm.errors import RequestError
from polyrhythm.simulation.injection.faulty_links import FaultyLinks
from polyrhythm.specs import Config, build
from polyrhythm.strategies.cast import Cast

FAULTS = "polyrhythm.simulation.injection.faults"


class Ground(Protocol):
    """Where faults happen: the ranks of a run."""

    @property
    def cast(self) -> Cast:
        """Which of them do what."""

    @property
    def host_of(self) -> tuple[int, ...]:
        """The number of each rank's host."""


class FaultyRun(Ground, Protocol):
    """A run, as far as faults reach into it.

    Attributes:
        time: of all ranks.
        links: between them.
    """

    time: VirtualTime
    links: FaultyLinks

    @property
    def ranks(self) -> list[SimulatedRank]:
        """The latest under every number."""

    def kill(self, rank: int) -> None:
        """Kills a rank; one that has ended already stays as it is."""

    def restart(self, rank: int) -> None:
        """Starts a successor, unless the rank lives, or the run is over."""

    def living(self, ranks: Sequence[int]) -> list[int]:
        """Gives those of some ranks that have not ended."""

    def when_done(self, rank: int, steps: int, action: Callable[[], None]) -> None:
        """Does something when a worker has done so many steps, and is about to begin another."""

    def slow(self, rank: int, factor: Callable[[], float]) -> None:
        """Lets a worker's steps take longer by a factor, asked when each begins."""

    def repeat(self, gap_s: Callable[[], float], action: Callable[[], None]) -> None:
        """Does something again and again, while the run goes on."""


class Fault(Config):
    """One fault of a run."""

    @abstractmethod
    def check(self, ground: Ground) -> None:
        """Refuses what names nothing of this run.

        Raises:
            RequestError: it names a rank or a host that is not there.
        """

    @abstractmethod
    def begin(self, run: FaultyRun, random: Random) -> None:
        """Prepares what is to happen; called before the run begins.

        Args:
            run: what it happens to.
            random: this fault's own stream.
        """

    def kills(self, rank: int, ground: Ground) -> bool:
        """Whether this may kill a rank."""
        return False

    def gives_back(self, rank: int, ground: Ground) -> bool:
        """Whether a rank has a successor whenever this kills it."""
        return True

    def holds_up_s(self, step_s: float) -> float:
        """Gives about how long it may hold a run up at once, in which a step takes `step_s`."""
        return 0.0


def check_rank(fault: Fault, ground: Ground, rank: int) -> None:
    """Checks that a rank is one of the run's.

    Raises:
        RequestError: it is not.
    """
    if not 0 <= rank < ground.cast.size:
        raise RequestError(f"fault {fault}: there is no rank {rank}; ranks are 0 to {ground.cast.size - 1}")


def parse_faults(given: Any) -> tuple[Fault, ...]:
    """Reads faults.

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
