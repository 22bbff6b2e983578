"""Rounds of loops that lose a worker, in plain torch: local steps, a mean of those who count, an outer rule's step."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from on_processes import mortal_loop_task as task
from on_processes.mortal_loops import is_dead, share

ROUND = 5
"""Local steps; the victim dies in the second round, when it has taken one of them."""


class Outer:
    """An outer rule, as its paper has it.

    Args:
        model: to begin with, `(size,)`.
    """

    def __init__(self, model: Tensor) -> None:
        self.model = model
        self.kept = torch.zeros_like(model)

    resets = False
    """Whether the workers' own momentum begins anew in every round."""

    def step(self, mean: Tensor, rate: float) -> None:
        raise NotImplementedError


class BlockMomentum(Outer):
    def step(self, mean: Tensor, rate: float) -> None:
        self.kept = (1 - 1 / task.WORKERS) * self.kept + (mean - self.model)
        self.model = self.model + self.kept


class SlowMomentum(Outer):
    resets = True

    def step(self, mean: Tensor, rate: float) -> None:
        self.kept = 0.5 * self.kept + (self.model - mean) / rate
        self.model = self.model - rate * self.kept


class OuterNesterov(Outer):
    def step(self, mean: Tensor, rate: float) -> None:
        change = self.model - mean
        self.kept = 0.9 * self.kept + change
        self.model = self.model - 0.7 * (change + 0.9 * self.kept)


OUTER_RULES = {"bmuf": BlockMomentum, "slowmo": SlowMomentum, "diloco": OuterNesterov}


@dataclass(frozen=True)
class Return:
    """The victim's successor begins as another worker is, and counts in no mean of the round under way.

    Attributes:
        after: which step of that one, from 0.
        newest: who that is.
    """

    after: int
    newest: int


def reference_of_rounds(
    present: list[int], outer: type[Outer], victim: int, returns: Return | None = None
) -> Tensor:
    """Trains in plain torch: rounds of local steps, then the outer rule's step to the mean of those who count.

    Args:
        present: how many workers have a share, by epoch.
        outer: the rule.
        victim: who dies.
        returns: how its successor comes, if it has one.
    """
    inputs, labels = task.points()
    replicas = [task.network() for _ in range(task.WORKERS)]
    optimizers = [task.optimizer_of(model) for model in replicas]
    rule, taken, is_back = outer(vector_of(replicas[0])), 0, False
    for epoch, workers in enumerate(present):
        shares = [share(place, workers) for place in range(workers)]
        for step in range(len(shares[0])):
            alive = [place for place in range(workers) if is_back or not is_dead(victim, place, epoch, step)]
            for place in alive:
                model, indices = replicas[place], torch.tensor(shares[place][step])
                for group in optimizers[place].param_groups:
                    group["lr"] = task.RATE * 0.9**epoch
                optimizers[place].zero_grad()
                nn.functional.cross_entropy(model(inputs[indices]), labels[indices]).backward()
                optimizers[place].step()
            if returns is not None and taken == returns.after:
                replicas[victim].load_state_dict(replicas[returns.newest].state_dict())
                state = copy.deepcopy(optimizers[returns.newest].state_dict())
                optimizers[victim].load_state_dict(state)
                is_back = True
            taken += 1
            last = (epoch, step) == (len(present) - 1, len(shares[0]) - 1)
            if taken % ROUND == 0 or last:
                in_this = returns is not None and returns.after // ROUND == (taken - 1) // ROUND
                counting = [place for place in alive if not (in_this and place == victim)]
                rule.step(
                    torch.stack([vector_of(replicas[place]) for place in counting]).mean(0),
                    task.RATE * 0.9**epoch,
                )
                for place in range(task.WORKERS):
                    nn.utils.vector_to_parameters(rule.model.clone(), replicas[place].parameters())
                    if outer.resets:
                        optimizers[place].state.clear()
    return rule.model


def vector_of(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()
