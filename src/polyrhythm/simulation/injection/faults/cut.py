"""Cut: links carry nothing for a time, and then all that they held.

TCP repeats what is not acknowledged, so a cut that ends loses nothing; one that lasts too long breaks the connection,
and both ends are notified of the other's loss. Acknowledgements go the other way, so a cut of one way stops both.
"""

from __future__ import annotations

from random import Random

from polyrhythm.simulation.injection.fault import FaultyRun, LinkFault, cut_links
from polyrhythm.training.quantities import Positive


class Cut(LinkFault):
    """The links between two ranks, or all of one rank, are cut, both ways.

    Attributes:
        broken_after_s: seconds after which the connections are lost; default: about the timeout of Linux.
    """

    broken_after_s: Positive = 900.0

    def begin(self, run: FaultyRun, random: Random) -> None:
        cut_links(run, self._between, self.from_s, self.to_s, self.broken_after_s)

    def _between(self, one: int, other: int) -> bool:
        return self.concerns(one, other) or self.concerns(other, one)
