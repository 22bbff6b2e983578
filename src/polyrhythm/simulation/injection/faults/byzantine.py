"""Byzantine: workers push something else than their gradients.

Workers that attack together (allies) see each other's gradients before any of them pushes. A push of one of them to a
server waits until all others have pushed to it as often; then all send the same. Workers that have left or are lost
are not waited for, and none is for longer than `PATIENCE_S`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from random import Random
from typing import Annotated

from pydantic import Field, model_validator

from polyrhythm.communication.message import Kind
from polyrhythm.errors import RequestError
from polyrhythm.simulation.injection.adversaries.sign_flip import SignFlip
from polyrhythm.simulation.injection.adversary import ADVERSARIES, Adversary, Attack
from polyrhythm.simulation.injection.fault import Fault, FaultTarget, FaultyRun, Passage, check_rank
from polyrhythm.specs import chosen
from polyrhythm.training.quantities import NonNegative


class Byzantine(Fault):
    """Gradients that workers push to servers are changed on their way; the workers' own state stays right.

    Attributes:
        rank: a worker's.
        allies: ranks of others that attack in the same way; where the attack colludes, they see each other's gradients
            before any of them pushes.
        attack: attack on the gradient.
        from_s: virtual seconds.
        to_s: virtual seconds; default: to the end.
    """

    rank: int
    allies: tuple[int, ...] = ()
    attack: Annotated[Adversary, chosen("attack", ADVERSARIES)] = SignFlip()
    from_s: NonNegative = 0.0
    to_s: float = Field(default=inf, gt=0)

    @model_validator(mode="after")
    def _check(self) -> Byzantine:
        if self.to_s <= self.from_s:
            raise RequestError(
                f"fault byzantine: to_s {self.to_s:g} must be later than from_s {self.from_s:g}"
            )
        if len(set(self._ranks)) < len(self._ranks):
            raise RequestError(f"fault {self}: a rank is named twice, and a rank cannot be its own ally")
        return self

    @property
    def _ranks(self) -> tuple[int, ...]:
        return (self.rank, *self.allies)

    def check(self, ground: FaultTarget) -> None:
        """Check that the ranks are workers, and that they push."""
        for rank in self._ranks:
            check_rank(self, ground, rank)
            if rank not in ground.roles.workers:
                raise RequestError(f"fault {self}: rank {rank} is a server, which pushes no gradients")
        if not ground.roles.servers:
            raise RequestError(
                f"fault {self}: there is no server to push to, and collectives bear no adversary: choose a "
                "strategy with servers, such as parameter_server"
            )

    def begin(self, run: FaultyRun, random: Random) -> None:
        if self.allies and self.attack.colludes:
            run.links.rules.append(Collusion(run, self._ranks, self.attack, self._concerns))
            return
        attacks: defaultdict[tuple[int, int], Attack] = defaultdict(self.attack.attack)

        def rule(passage: Passage) -> None:
            parcel = passage.parcel
            message = parcel.message
            if self._concerns(passage, run.time.now()) and message.tensor is not None:
                changed = attacks[parcel.source.rank, parcel.to.rank](message.tensor, random)
                parcel.message = message._replace(tensor=changed)

        run.links.rules.append(rule)

    def _concerns(self, passage: Passage, now_s: float) -> bool:
        message = passage.parcel.message
        pushes = passage.parcel.source.rank in self._ranks and message.kind is Kind.PUSH
        return pushes and message.weight > 0 and self.from_s <= now_s < self.to_s


PATIENCE_S = 60.0
"""Virtual seconds after which a push leaves, with what is known by then."""


class Collusion:
    """A rule of the links; see `MessageRule`.

    Args:
        run: the run.
        ranks: ranks of the workers that collude.
        attack: attack on the gradients.
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
        """Hold a push, and let all go once all are there."""
        parcel = passage.parcel
        source, server = parcel.source.rank, parcel.to.rank
        if source in self._there and parcel.message.kind is Kind.LEAVE:
            self._there.discard(source)
            for other in list(self._waiting):
                self._release_if_all(other)
        if not self._concerns(passage, self._run.time.now()):
            return
        passage.held = True
        self._waiting[server][source] = passage
        self._run.time.at(self._run.time.now() + PATIENCE_S, partial(self._lose_patience, server, passage))
        self._release_if_all(server)

    def _lose_patience(self, server: int, passage: Passage) -> None:
        if passage in self._waiting[server].values():
            self._release(server)

    def _release_if_all(self, server: int) -> None:
        if self._there.intersection(self._run.living(sorted(self._there))) <= self._waiting[server].keys():
            self._release(server)

    def _release(self, server: int) -> None:
        waiting = [passage for _, passage in sorted(self._waiting.pop(server, {}).items())]
        seen = [passage.parcel.message.tensor for passage in waiting]
        gradients = [gradient for gradient in seen if gradient is not None]
        if not gradients:
            return
        agreed = self._attack.agree(gradients)
        for passage in waiting:
            passage.parcel.message = passage.parcel.message._replace(tensor=agreed.clone())
            self._run.links.start(passage)
