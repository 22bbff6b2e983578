"""Sites (Gaia): in the end worker 0's site holds all updates of all sites, each once; none was ever too far ahead.

w = 0 - sum over sites and rounds of the mean of a site's gradients      steps of rate 1, exact numbers
"""

from __future__ import annotations

from collections import Counter, defaultdict

import torch
from torch import Tensor

from polyrhythm.communication.message import Kind
from polyrhythm.strategies.parameter_server.gaia import SiteMap
from polyrhythm.training.flat_parameters import shards
from polyrhythm.verification.invariant import Conditions, Ended, Handled, Invariant, Violation


class Sites(Invariant):
    """What was sent and what was kept add up.

    Args:
        conditions: of the run.
        sites: which workers and servers are at which.
        lag: rounds by which the slowest site may be behind.
    """

    def __init__(self, conditions: Conditions, sites: SiteMap, lag: int) -> None:
        self._gradient = conditions.gradient
        self._workers = conditions.roles.workers
        self._sites = sites
        self._lag = lag
        cuts = shards(conditions.numbers, len(sites.servers[0]))
        self._place = {
            rank: (site, cut)
            for site, ranks in enumerate(sites.servers)
            for rank, cut in zip(ranks, cuts, strict=True)
        }
        self._clocks: Counter[int] = Counter()
        self._present = {rank: set(sites.members[site]) for rank, (site, _) in self._place.items()}
        self._asleep: set[int] = set()
        self._unawaited: set[tuple[int, int]] = set()
        """Which server has heard that all workers of which other are lost, and nothing since."""
        self._let_on: Counter[int] = Counter()
        """Up to which round a server's workers did not have to wait for another, all of whose workers were lost."""
        self._come: Counter[tuple[int, int]] = Counter()
        self._held: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        """For every server, whose gradients of which steps it has not applied yet."""
        self._sum = torch.zeros(conditions.numbers)
        self._shown: dict[int, Tensor] = {}

    def handled(self, event: Handled) -> None:
        """Follow which workers are there and what they push, book a round, and note what is answered."""
        server = event.server
        if event.source not in self._workers:
            self._hear(event)
        else:
            self._follow(event)
            if event.version != event.version_before:
                self._book(server)
        told = [
            reply.version
            for to, reply in event.replies
            if to in self._place and reply.kind is Kind.DIFFERENCE
        ]
        if told and event.source in self._workers:
            self._tick(event, told[0])
        if not self._present[server]:
            self._asleep.add(server)  # after a round that the loss of its last worker has ended
        for to, reply in event.replies:
            if reply.kind is Kind.PARAMETERS and reply.tensor is not None and to in self._workers:
                self._shown[server] = reply.tensor
                self._present[server].add(to)

    def _follow(self, event: Handled) -> None:
        server, source, message = event.server, event.source, event.message
        if message is None or (message.kind is Kind.LEAVE and not message.stop):
            self._present[server].discard(source)
        elif message.kind is Kind.PUSH and message.step >= self._come[server, source]:
            self._come[server, source] = message.step + 1
            if message.weight > 0:
                self._held[server].append((source, message.step))

    def _hear(self, event: Handled) -> None:
        message, pair = event.message, (event.server, event.source)
        if message is not None and message.kind is Kind.ANNOUNCE and message.stop:
            self._unawaited.add(pair)
        elif message is not None and message.kind is Kind.DIFFERENCE and pair in self._unawaited:
            self._unawaited.discard(pair)
            # Its workers may be under way already.
            self._let_on[event.server] = self._clocks[event.server] + 1

    def _book(self, server: int) -> None:
        held = self._held.pop(server, [])
        if self._gradient is not None and held:
            cut = self._place[server][1]
            gradients = [self._gradient(self._workers.index(rank), step)[cut] for rank, step in held]
            self._sum[cut] -= torch.stack(gradients).sum(0) / len(gradients)

    def _tick(self, event: Handled, clock: int) -> None:
        """Check a round of a site; one without workers may skip some, since none was waiting for them."""
        server = event.server
        site, cut = self._place[server]
        left_out = clock - self._clocks[server] - 1
        if left_out < 0 or (left_out and server not in self._asleep):
            raise Violation(
                f"the round of site {site}",
                server,
                event.time_s,
                expected=self._clocks[server] + 1,
                found=clock,
            )
        self._clocks[server] = clock
        self._asleep.discard(server)
        same = [rank for rank, (_, where) in self._place.items() if where == cut and self._trains(rank)]
        others = [rank for rank in same if (server, rank) not in self._unawaited]
        slowest = min((self._clocks[rank] for rank in others), default=clock)
        if clock - slowest > self._lag + 1 and clock > self._let_on[server]:
            raise Violation(
                f"rounds of site {site}",
                server,
                event.time_s,
                expected=f"at most {self._lag + 1} more than the slowest site's {slowest}",
                found=clock,
            )

    def _trains(self, server: int) -> bool:
        return bool(self._present[server])

    def ended(self, event: Ended) -> None:
        """Worker 0's site has the sum of everything."""
        if self._gradient is None:
            return
        for server in self._sites.servers[0]:
            expected = self._sum[self._place[server][1]]
            wrong = int((expected != self._shown[server].to(expected.dtype)).sum())
            if wrong:
                raise Violation(
                    "the final parameters",
                    server,
                    event.time_s,
                    expected="the sum of all sites' updates",
                    found=f"{wrong} of {len(expected)} numbers wrong",
                )
