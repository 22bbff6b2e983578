"""The base of all strategies whose workers average models in rounds, and its resharding.

With another number of workers all continue from the mean of all models as they are, weighted as each model
would have counted at the end of the round:

    round    starts at w ── step step ┃ mean of N ── step step, by K ┃ mean of K, outer rule
    └ checkpoint: the round, and the state of the outer rule, go on
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar

from torch import Tensor

from polyrhythm.communication.collective import COLLECTIVES, Collective
from polyrhythm.communication.collectives.library import Library
from polyrhythm.specs import chosen
from polyrhythm.strategies.state import Held, Merged, Resharding, State
from polyrhythm.strategies.strategy import Strategy
from polyrhythm.training.optimizer_state import mean_optimizer, weighted_mean

MEET_AGAIN = "the others finish the round, and the mean is theirs; a successor joins them there"
"""What happens when a worker dies."""


class Averaging(Strategy):
    """Workers train alone and meet at means of their models, from which nobody goes on before all have come.

    Attributes:
        sums_gradients: whether plain SGD's models are the sum of all gradients at the end of a round.
        collective: how models are added up.
    """

    sums_gradients: ClassVar[bool] = False

    collective: Annotated[Collective, chosen("collective", COLLECTIVES)] = Library()

    def in_step(self, workers: int) -> bool:
        """Always; who wants to stop is heard at a mean, and after an epoch."""
        return True

    def agrees(self, workers: int) -> bool:
        """Only if every step ends with a mean."""
        return self.round_steps(workers) == 1 or workers == 1

    def goes_on(self, workers: int) -> bool:
        """By regrouping."""
        return self.regroups(workers)

    def regroups(self, workers: int) -> bool:
        """If there is more than one worker."""
        return workers > 1

    def resharding(self, before: int, after: int) -> Resharding:
        """All go on from the mean of all models."""
        return OfRounds()

    def updates_per_step(self, workers: int) -> int:
        """One: each model gets its own worker's."""
        return 1

    def slices(self, workers: int) -> int:
        """One a worker."""
        return workers


_OPTIMIZER, _OUTER = "optimizer.", "outer."
_NEVER = -1


class OfRounds:
    """Of rounds of local steps; see `Resharding`."""

    def counted(self, held: Held) -> list[int]:
        """All go in step."""
        return [held.steps[0]] * len(held.steps)

    def merged(self, held: Held, workers: int, step: int) -> Merged:
        """Everybody gets the mean, by how much each model would have counted at the end of the round."""
        states = [held.workers[index] for index in sorted(held.workers)]
        weights = [float(facts["weight"]) for _, facts in states]
        tensors, facts = states[0]
        model = weighted_mean([own["vector"] for own, _ in states], weights, tensors["vector"])
        momenta, optimizer = mean_optimizer(
            [(below(_OPTIMIZER, own), facts["optimizer"]) for own, facts in states], weights
        )
        rest = {name: value for name, value in tensors.items() if not name.startswith(_OPTIMIZER)}
        common = rest | {"vector": model} | {_OPTIMIZER + name: value for name, value in momenta.items()}
        noted = facts | {"optimizer": optimizer, "weight": 1.0, "updated": _NEVER}
        every = {worker: (common, noted | {"worker": worker}) for worker in range(workers)}
        text = f"all go on from the mean of {len(states)} models and of their optimisers' momenta"
        if _OUTER in facts:
            text += ", in the same round, with what the outer rule remembers"
        return Merged(replace(held, parameters=model, workers=every), text)


class OfRoundsOverBase:
    """Of rounds of another strategy's steps; see `Resharding`.

    Args:
        base: of that one.
    """

    def __init__(self, base: Resharding) -> None:
        self._base = base

    def counted(self, held: Held) -> list[int]:
        """As the base."""
        return self._base.counted(held)

    def merged(self, held: Held, workers: int, step: int) -> Merged:
        """The base's, with what the outer rule remembers, which all have."""
        outer = {name: value for name, value in held.workers[0][0].items() if name.startswith(_OUTER)}
        bare = {index: self._without_outer(state) for index, state in held.workers.items()}
        found = self._base.merged(replace(held, workers=bare), workers, step)
        noted = {name: held.workers[0][1][name] for name in ("outer", "apart", "rate")}
        every = {
            worker: (tensors | outer, noted | {"base": facts})
            for worker, (tensors, facts) in found.held.workers.items()
        }
        return Merged(
            replace(found.held, workers=every),
            f"{found.text}, in the same round, with what the outer rule remembers",
        )

    @staticmethod
    def _without_outer(state: State) -> State:
        tensors, facts = state
        return {name: value for name, value in tensors.items() if not name.startswith(_OUTER)}, facts["base"]


def below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gives the tensors whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
