"""Schedules of a pipeline: in which order each rank computes forward and backward passes of microbatches.

    K ranks k = 0 …, M microbatches, and v chunks (stages) a rank; chunk c of rank k is stage c K + k of the network

    unit    computes                                       waits for
    F       a chunk's forward pass                         F of the stage before
    B       its backward pass, or that for its inputs      B of the stage behind; F of its own in the last stage
    W       where that is split off, that for its weights  B of its own

A schedule with a flush ends with every batch: parameters are updated between two batches, and the result is that of
one rank. One without goes on: units of the next batch follow at once, and are computed with parameters that some
updates are missing in.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal, NamedTuple

from polyrhythm.errors import RequestError
from polyrhythm.specs import Config

SCHEDULES = "polyrhythm.partition.schedules"
"""The folder of choices."""


class Unit(NamedTuple):
    """What a rank computes without waiting in between.

    Attributes:
        kind: F, B or W.
        microbatch: its number.
        chunk: of the rank's.
    """

    kind: Literal["F", "B", "W"]
    microbatch: int
    chunk: int = 0


class Schedule(Config):
    """An order of units.

    Attributes:
        flushes: whether a batch is over before parameters are updated; else see `updates_every` and `version`.
        splits_backward: whether there are units W.
        forward_first: whether all forward passes of a batch come before its backward passes.
        deals_out: whether stages may have different numbers of copies, among which microbatches are dealt out.
    """

    flushes: ClassVar[bool] = True
    splits_backward: ClassVar[bool] = False
    forward_first: ClassVar[bool] = False
    deals_out: ClassVar[bool] = False

    @property
    def chunks(self) -> int:
        """Stages of each rank: v."""
        return 1

    def check(self, ranks: int, microbatches: int) -> None:
        """Refuse numbers that the schedule does not work with.

        Raises:
            RequestError: so it is.
        """

    @abstractmethod
    def units(self, rank: int, ranks: int, microbatches: int) -> Iterator[Unit]:
        """Yield the units of a rank in their order.

        Args:
            rank: k, from 0.
            ranks: K.
            microbatches: M; without a flush, of all batches together.
        """

    def units_of_copy(self, copies: Sequence[int], rank: int, copy: int, microbatches: int) -> Iterator[Unit]:
        """Yield the units of one of a stage's copies, of which each takes every r-th microbatch (`deals_out`).

        Narayanan and others, "PipeDream", 2019, section 3.2 (1F1B-RR).

        Args:
            copies: r of every rank's stage.
            rank: k.
            copy: its number.
            microbatches: M.
        """
        own = range(copy, microbatches, copies[rank])
        # A stage of one copy is in the place of as many ranks as there are copies behind it.
        behind = sum(copies) - 1 - sum(copies[:rank])
        first = behind // copies[rank]
        for unit in self.units(0, first + 1, len(own)):
            yield unit._replace(microbatch=own[unit.microbatch])

    def updates_every(self, microbatches: int) -> int:
        """Return after how many microbatches parameters are updated, where there is no flush."""
        return microbatches

    def version(self, microbatch: int, rank: int, ranks: int, microbatches: int) -> int:
        """Return with how many updates a microbatch is computed, where there is no flush.

        Args:
            microbatch: its number since the pipeline was empty.
            rank: k.
            ranks: K.
            microbatches: M, of a batch.
        """
        raise NotImplementedError


def warm_up(rank: int, ranks: int) -> int:
    """Return how many forward passes a rank does before its first backward pass, where each has one stage."""
    return ranks - 1 - rank


def alternating(first: int, count: int) -> Iterator[Unit]:
    """Yield `first` units F, then F and B in turn, then the rest of B, ascending; `count` of both."""
    first = min(first, count)
    yield from (Unit("F", number) for number in range(first))
    for number in range(count - first):
        yield Unit("F", first + number)
        yield Unit("B", number)
    yield from (Unit("B", number) for number in range(count - first, count))


def whole_rounds(ranks: int, microbatches: int, name: str) -> int:
    """Return how many microbatches a round has: M / max(1, M div K).

    Raises:
        RequestError: that is not whole.
    """
    rounds = max(1, microbatches // ranks)
    if microbatches % rounds:
        raise RequestError(
            f"{name} deals {microbatches} microbatches out in {rounds} rounds, which does not divide: ask for a "
            f"multiple of {ranks} microbatches, or for another schedule"
        )
    return microbatches // rounds
