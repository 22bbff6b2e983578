"""Which workers and servers make a site."""

from __future__ import annotations

from dataclasses import dataclass

from polyrhythm.strategies.cast import Cast
from polyrhythm.training.flat_parameters import shards


@dataclass(frozen=True)
class SiteMap:
    """The ranks of all sites.

    Attributes:
        members: ranks of every site's workers, neighbours; a site may have none.
        servers: ranks of every site's servers, in the order of their shards.
    """

    members: tuple[tuple[int, ...], ...]
    servers: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, cast: Cast, sites: int) -> SiteMap:
        """Shares out the workers and the servers."""
        cuts = shards(len(cast.workers), min(sites, len(cast.workers)))
        members = [cast.workers[cut] for cut in cuts] + [()] * (sites - len(cuts))
        each = len(cast.servers) // sites
        servers = tuple(cast.servers[site * each : (site + 1) * each] for site in range(sites))
        return cls(tuple(members), servers)

    @property
    def busy(self) -> tuple[int, ...]:
        """Numbers of the sites that have workers."""
        return tuple(site for site, members in enumerate(self.members) if members)

    def site_of(self, worker: int) -> int:
        """Gives the number of a worker's site."""
        return next(site for site, members in enumerate(self.members) if worker in members)
