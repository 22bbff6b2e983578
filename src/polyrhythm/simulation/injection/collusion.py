"""Collusion: workers that attack together look at each other's gradients before any of them pushes.

A push of one of them to a server waits until all others have pushed to it as often; then all send the same. Who has
left or is gone is not waited for, and nobody is for longer than `PATIENCE_S`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

from polyrhythm.communication.message import Kind
from polyrhythm.simulation.injection.adversary import Adversary
from polyrhythm.simulation.injection.fault import FaultyRun
from polyrhythm.simulation.injection.faulty_links import Passage

PATIENCE_S = 60.0
"""Virtual seconds after which a push leaves, with what is known by then."""


class Collusion:
    """A rule of the links; see `MessageRule`.

    Args:
        run: the run.
        ranks: of the workers that collude.
        attack: what they send.
        concerns: whether a message, at a time, is one that they change.
    """

    def __init__(
        self,
        run: FaultyRun,
        ranks: Sequence[int],
        attack: Adversary,
        concerns: Callable[[Passage, float], bool],
    ) -> None:
        self._run = run
        self._there = set(ranks)
        self._attack = attack
        self._concerns = concerns
        self._waiting: defaultdict[int, dict[int, Passage]] = defaultdict(dict)
        """By server: the pushes that wait, by the rank that they are from."""

    def __call__(self, passage: Passage) -> None:
        """Holds a push, and lets all go once all are there."""
        parcel = passage.parcel
        source, server = parcel.source.rank, parcel.to.rank
        if source in self._there and parcel.message.kind is Kind.LEAVE:
            self._there.discard(source)
            for other in list(self._waiting):
                self._let_go_if_all(other)
        if not self._concerns(passage, self._run.time.now()):
            return
        passage.held = True
        self._waiting[server][source] = passage
        self._run.time.at(self._run.time.now() + PATIENCE_S, partial(self._lose_patience, server, passage))
        self._let_go_if_all(server)

    def _lose_patience(self, server: int, passage: Passage) -> None:
        if passage in self._waiting[server].values():
            self._let_go(server)

    def _let_go_if_all(self, server: int) -> None:
        if self._there.intersection(self._run.living(sorted(self._there))) <= self._waiting[server].keys():
            self._let_go(server)

    def _let_go(self, server: int) -> None:
        waiting = [passage for _, passage in sorted(self._waiting.pop(server, {}).items())]
        seen = [passage.parcel.message.tensor for passage in waiting]
        gradients = [gradient for gradient in seen if gradient is not None]
        if not gradients:
            return
        agreed = self._attack.agree(gradients)
        for passage in waiting:
            passage.parcel.message = passage.parcel.message._replace(tensor=agreed.clone())
            self._run.links.let_go(passage)
