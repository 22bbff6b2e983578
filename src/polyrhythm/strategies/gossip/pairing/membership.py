"""How workers that go at their own pace begin together, come back, and end together: worker 0 sees to it.

    worker                     worker 0                    its partners
    JOIN ───────────────────▶  (waits for all who live)
      ◀──────── PARAMETERS ──
    …                                                                     a successor's JOIN goes to its partners, too,
    JOIN ───────────────────▶ ───▶ PARAMETERS   JOIN ──────────────────▶  and it begins with the mean of their
      ◀─────────────────────────────────────────────────── PARAMETERS ──  parameters, at the step they last heard of
    LEAVE ──────────────────▶  (waits for all who live)
      ◀───────────── LEAVE ──
    PARAMETERS ─────────────▶  the mean of all: the run's final model

Until worker 0 says `LEAVE`, everybody goes on answering. Then all have taken their last step, so nobody asks any more,
and a successor that comes now is told to leave.

Where worker 0 has a successor when it is lost (`heir.py`), others keep what they would say to it:

    worker                     worker 0                    its successor
    JOIN, EVENT, LEAVE ─────▶   ✝
    keeps it                                               (its loop begins)
      ◀────────────────────────────────────────── LEAD ──  to all
    LEAD(the step last heard of) ─────────────────────────▶  (waits for all who live)
    what it kept ─────────────────────────────────────────▶
      ◀────────────────────────────────────────── JOIN ──  to its partners: it begins with their mean, and lets
    PARAMETERS ───────────────────────────────────────────▶  others in and out from then on

A worker that has given its model away therefore goes on answering until its process may end.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol

from polyrhythm.communication.message import Kind, Message
from polyrhythm.strategies.gossip.pairing.keeper import Reply

KINDS = (Kind.JOIN, Kind.PARAMETERS, Kind.LEAVE, Kind.EVENT, Kind.LEAD)
"""What these messages are; all others are about parameters. `EVENT` passes on a request to stop."""


class Standing(IntEnum):
    """What a worker says of itself to a new worker 0."""

    OUTSIDE = 0  # it has not asked to be let in
    ENTERING = 1  # a successor that is about to begin
    WAITING = 2  # as from the run's beginning, for the first parameters
    RESUMED = 3  # the same, with parameters from a checkpoint
    INSIDE = 4  # it has parameters, and has begun

    @property
    def first(self) -> bool:
        """Whether it waits as from the run's beginning."""
        return self in (Standing.WAITING, Standing.RESUMED)

    @property
    def has_parameters(self) -> bool:
        """Whether it can give parameters to who begins."""
        return self in (Standing.RESUMED, Standing.INSIDE)


class Membership(Protocol):
    """Handles one worker's messages about who takes part: beginning, successors, the end."""

    @property
    def over(self) -> bool:
        """Whether all is over, so that no message is left to handle."""

    def on_message(self, source: int, message: Message) -> list[Reply]:
        """Takes a message and gives what is to be sent."""

    def on_loss(self, rank: int) -> list[Reply]:
        """Notes that a worker is lost; gives what is to be sent."""
