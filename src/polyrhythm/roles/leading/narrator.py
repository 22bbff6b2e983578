"""The leader's own words, and the time of the run that they carry."""

from __future__ import annotations

from dataclasses import replace

from polyrhythm.events import Event
from polyrhythm.roles.ledger import Ledger
from polyrhythm.roles.world import World


class Narrator:
    """Says what happens in a run, and when: in seconds since training started.

    Args:
        world: where the leader is.
        ledger: of the run so far.

    Attributes:
        earlier_s: seconds of training before this session.
        paused_s: for how long the leader was away from training to test and save.
    """

    def __init__(self, world: World, ledger: Ledger) -> None:
        self._world = world
        self._started_at = world.clock.now()
        self.earlier_s = ledger.earlier_s
        self.paused_s = ledger.paused_s

    @property
    def elapsed_s(self) -> float:
        """Seconds of this session since training started."""
        return self._world.clock.now() - self._started_at

    @property
    def total_s(self) -> float:
        """The same, with those of the runs that it resumes."""
        return self._world.clock.now() - self._started_at + self.earlier_s

    @property
    def trained_s(self) -> float:
        """Seconds of this session without those in which the leader was away."""
        return self._world.clock.now() - self._started_at - self.paused_s

    def begin(self) -> None:
        """Training starts now."""
        self._started_at = self._world.clock.now()

    def take_up(self, began_at_s: float) -> None:
        """Training started then, on this rank's clock."""
        self._started_at = began_at_s

    def say(self, event: Event) -> None:
        """Stamps and emits an event of the leader's own."""
        self._world.emit(replace(event, time_s=self.elapsed_s))
