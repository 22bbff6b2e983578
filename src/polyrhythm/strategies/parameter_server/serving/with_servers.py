"""What all strategies have in common whose parameters are on servers."""

from __future__ import annotations

from typing import Annotated

from polyrhythm.specs import chosen
from polyrhythm.strategies.placement import PLACEMENTS, Placement
from polyrhythm.strategies.placements.shared import Shared
from polyrhythm.strategies.strategy import Strategy
from polyrhythm.training.quantities import Count


class WithServers(Strategy):
    """A strategy with servers.

    Attributes:
        servers: how many, each with an equal shard.
        placement: where servers run.
    """

    servers: Count = 1
    placement: Annotated[Placement, chosen("placement", PLACEMENTS)] = Shared()

    @property
    def server_count(self) -> int:
        """As asked."""
        return self.servers

    @property
    def server_placement(self) -> Placement:
        """As asked."""
        return self.placement
