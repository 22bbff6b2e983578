"""What the lost leader has left undone, and how its successor finishes it.

where all hold the same            the parameters of now are tested and saved
where each has a model of its own  what they handed in at an epoch's end (`Stock`), before anybody is mustered
"""

from __future__ import annotations

from dataclasses import replace

from polyrhythm.events import Notice
from polyrhythm.roles.job import Job
from polyrhythm.roles.leading.correspondence import Correspondence
from polyrhythm.roles.leading.curator import Curator
from polyrhythm.roles.leading.narrator import Narrator
from polyrhythm.roles.leading.taking_over import Unfinished, inherit_untrained, stock_of, unfinished
from polyrhythm.roles.ledger import Ledger
from polyrhythm.roles.replica import Replica
from polyrhythm.roles.world import LEADER


class Inheritance:
    """A new leader's.

    Args:
        job: what is learned, with what others did of it.
        replica: the leader's.
        others: who are under way.
        curator: tests and saves.
        narrator: says what is not as it would have been.
        ledger: of the run so far.
    """

    def __init__(
        self,
        job: Job,
        replica: Replica,
        others: Correspondence,
        curator: Curator,
        narrator: Narrator,
        ledger: Ledger,
    ) -> None:
        self._job = job
        self._replica = replica
        self._others = others
        self._curator = curator
        self._narrator = narrator
        self._ledger = ledger
        self._agree = job.strategy.agrees(job.workers)
        self._regroups = job.strategy.regroups(job.workers)

    def take_up(self) -> None:
        """Says who leads from now on, and takes what the others hold."""
        self._others.take_over()
        inherit_untrained(self._others, self._replica)
        if self._has_stock:
            self._others.await_introductions()
            self._finish_with_stock()

    def finish(self, step: int) -> None:
        """Tests and saves what the lost leader did not come to, with the parameters of now.

        Args:
            step: steps that the leader has done, as far as they count.
        """
        self._curator.inherit()
        if self._has_stock:
            self._finish_with_stock()
        missing = self._missing(step)
        if not (missing.test or missing.save):
            return
        presented = None if self._regroups else self._replica.part.present()
        if missing.is_last or (self._regroups and missing.at_its_end):
            self._others.wait_for_step(step)
        if missing.test:
            if not (missing.at_its_end and self._agree):
                self._narrator.say(Notice(time_s=0, text=missing.text))
            self._curator.evaluate(missing.epochs, presented)
        if missing.save and (missing.at_its_end or not self._regroups):
            # Otherwise they have states of several steps.
            self._curator.save(self._curator.snapshot(missing.epochs, step, presented), tested=missing.test)
        if not self._regroups:  # who go in step wait meanwhile
            self._replica.part.catch_up()

    @property
    def _has_stock(self) -> bool:
        """Whether the others have handed in models of their own."""
        return self._regroups and not self._agree and not self._curator.averages

    def _finish_with_stock(self) -> None:
        """Tests and saves what the others held when an epoch was over, if that is left undone: they have gone on."""
        reached = [
            state.account.step for worker, state in self._others.workers.states.items() if worker != LEADER
        ]
        step = max(reached, default=0)
        missing = self._missing(step)
        stock = stock_of(self._others.workers.states, self._replica.part, step)
        if stock is None or missing.is_last or not missing.at_its_end:
            return
        mean = stock.mean.to(self._replica.flat.vector.device)
        if missing.test:
            self._curator.evaluate(missing.epochs, mean)
            self._ledger.tested_epochs = missing.epochs
        if missing.save and (snapshot := self._curator.snapshot(missing.epochs, step, mean)) is not None:
            kept = replace(snapshot, parameters=stock.models[0], workers=stock.states)
            self._curator.save(kept, tested=missing.test)
            self._ledger.saved_epochs = missing.epochs

    def _missing(self, step: int) -> Unfinished:
        return unfinished(self._ledger, self._job, step, saves=self._curator.saves)
