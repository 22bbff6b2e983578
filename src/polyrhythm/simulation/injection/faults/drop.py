"""Drop: messages are lost on the way. A TCP link drops nothing, so this is what a wrong link would do."""

from __future__ import annotations

from random import Random

from polyrhythm.simulation.injection.fault import MessageFault, Passage


class Drop(MessageFault):
    """Chosen messages never arrive; their senders do not learn of it."""

    def happen(self, passage: Passage, random: Random) -> None:
        passage.copies = 0
