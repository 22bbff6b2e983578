"""Sites: in the end, worker 0's site holds all updates of all sites, each once; and none was ever too far ahead.

w = 0 - sum over sites and rounds of the mean of a site's gradients      steps of rate 1, exact numbers
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from polyrhythm.communication.message import Kind
from polyrhythm.strategies.invariant import Conditions, Ended, Handled, Invariant, Violation
from polyrhythm.strategies.parameter_server.sites.site_map import SiteMap
from polyrhythm.training.flat_parameters import shards


class Sites(Invariant):
    """What was sent and what was kept add up.

    Args:
        conditions: with or without known gradients.
        sites: who belongs where.
        lag: rounds by which the slowest site may be behind.
    """

    def __init__(self, conditions: Conditions, sites: SiteMap, lag: int) -> None:
        self._gradient = conditions.gradient
        self._workers = conditions.cast.workers
        self._sites = sites
        self._lag = lag
        cuts = shards(conditions.numbers, len(sites.servers[0]))
        self._place = {
            rank: (site, cut)
            for site, ranks in enumerate(sites.servers)
            for rank, cut in zip(ranks, cuts, strict=True)
        }
        self._rounds: Counter[int] = Counter()
        self._left: Counter[int] = Counter()
        self._sum = torch.zeros(conditions.numbers)
        self._shown: dict[int, Tensor] = {}

    def handled(self, event: Handled) -> None:
        """Books a round, and keeps what is answered."""
        message = event.message
        if message is not None and message.kind is Kind.LEAVE and not message.stop:
            self._left[event.server] += event.source in self._workers
        if message is not None and message.kind is Kind.PUSH and event.version != event.version_before:
            self._book(event, message.step)
        for _, reply in event.replies:
            if reply.kind is Kind.PARAMETERS and reply.tensor is not None:
                self._shown[event.server] = reply.tensor

    def _book(self, event: Handled, step: int) -> None:
        site, cut = self._place[event.server]
        self._rounds[event.server] += 1
        if self._gradient is not None:
            members = self._sites.members[site]
            gradients = [self._gradient(self._workers.index(rank), step)[cut] for rank in members]
            self._sum[cut] -= torch.stack(gradients).sum(0) / len(members)
        others = [rank for rank, (_, where) in self._place.items() if where == cut and self._trains(rank)]
        slowest = min((self._rounds[rank] for rank in others), default=self._rounds[event.server])
        if self._rounds[event.server] - slowest > self._lag + 1:
            raise Violation(
                f"rounds of site {site}",
                rank=event.server,
                time_s=event.time_s,
                expected=f"at most {self._lag + 1} more than the slowest site's {slowest}",
                found=self._rounds[event.server],
            )

    def _trains(self, server: int) -> bool:
        members = self._sites.members[self._place[server][0]]
        return self._left[server] < len(members)

    def ended(self, event: Ended) -> None:
        """Worker 0 was given the sum of everything."""
        if self._gradient is None:
            return
        for server in self._sites.servers[0]:
            expected = self._sum[self._place[server][1]]
            wrong = int((expected != self._shown[server].to(expected.dtype)).sum())
            if wrong:
                raise Violation(
                    "the final parameters",
                    rank=server,
                    time_s=event.time_s,
                    expected="the sum of all sites' updates",
                    found=f"{wrong} of {len(expected)} numbers wrong",
                )
