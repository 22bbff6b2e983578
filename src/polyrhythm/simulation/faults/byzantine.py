"""Byzantine: a worker pushes something else than its gradient."""

from __future__ import annotations

from collections import defaultdict
from math import inf
from random import Random
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, model_validator

from polyrhythm.communication.message import Kind
from polyrhythm.errors import RequestError
from polyrhythm.simulation.adversaries.sign_flip import SignFlip
from polyrhythm.simulation.adversary import ADVERSARIES, Adversary, Attack
from polyrhythm.simulation.fault import Fault, Ground, check_rank
from polyrhythm.simulation.faulty_links import Passage
from polyrhythm.specs import chosen
from polyrhythm.training.quantities import NonNegative

if TYPE_CHECKING:
    from polyrhythm.simulation.scene import Scene


class Byzantine(Fault):
    """The gradients that a worker pushes to servers are changed on their way; what it holds itself stays right.

    Attributes:
        rank: a worker's.
        attack: what is pushed instead.
        from_s: virtual seconds.
        to_s: virtual seconds; default: to the end.
    """

    rank: int
    attack: Annotated[Adversary, chosen("attack", ADVERSARIES)] = SignFlip()
    from_s: NonNegative = 0.0
    to_s: float = Field(default=inf, gt=0)

    @model_validator(mode="after")
    def _check(self) -> Byzantine:
        if self.to_s <= self.from_s:
            raise RequestError(
                f"fault byzantine: to_s {self.to_s:g} must be later than from_s {self.from_s:g}"
            )
        return self

    def check(self, ground: Ground) -> None:
        """Checks that the rank is a worker's, and that it pushes."""
        check_rank(self, ground, self.rank)
        if self.rank not in ground.cast.workers:
            raise RequestError(f"fault {self}: rank {self.rank} is a server, which pushes no gradients")
        if not ground.cast.servers:
            raise RequestError(
                f"fault {self}: there is no server to push to, and collectives bear no adversary: choose a "
                "strategy with servers, such as parameter_server"
            )

    def begin(self, scene: Scene, random: Random) -> None:
        """Adds its rule to the links."""
        attacks: defaultdict[int, Attack] = defaultdict(self.attack.attack)

        def rule(passage: Passage) -> None:
            parcel = passage.parcel
            message = parcel.message
            if parcel.source.rank != self.rank or message.kind is not Kind.PUSH or message.tensor is None:
                return
            if message.weight > 0 and self.from_s <= scene.time.now() < self.to_s:
                changed = attacks[parcel.to.rank](message.tensor, random)
                parcel.message = message._replace(tensor=changed)

        scene.links.rules.append(rule)
