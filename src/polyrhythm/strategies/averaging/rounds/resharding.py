"""Averaging in rounds with another number of workers: all go on from the mean of all models as they are.

round    begins at w ── step step ┃ mean of N ── step step, by K ┃ mean of K, outer rule
└ checkpoint: the round, and what the outer rule remembers, go on
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from polyrhythm.strategies.resharding import Held, Merged, Resharding
from polyrhythm.strategies.state import State
from polyrhythm.training.optimizing.mean_optimizer import mean_optimizer, weighted_mean

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
