"""Duplicate: messages arrive twice, one right behind the other. No TCP link does so."""

from __future__ import annotations

from random import Random

from polyrhythm.simulation.injection.fault import MessageFault, Passage


class Duplicate(MessageFault):
    """Chosen messages arrive twice."""

    def happen(self, passage: Passage, random: Random) -> None:
        passage.copies *= 2
