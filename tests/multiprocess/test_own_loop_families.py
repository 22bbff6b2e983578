"""Loops of one's own that lose a worker and its place, with strategies of other families."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from multiprocess import mortal_loop_task as task
from multiprocess.mortal_loops import diaries, is_dead, models, run, share

VICTIM = 2
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

    def step(self, mean: Tensor, rate: float) -> None:
        raise NotImplementedError


class BlockMomentum(Outer):
    def step(self, mean: Tensor, rate: float) -> None:
        self.kept = (1 - 1 / task.WORKERS) * self.kept + (mean - self.model)
        self.model = self.model + self.kept


class SlowMomentum(Outer):
    def step(self, mean: Tensor, rate: float) -> None:
        self.kept = 0.5 * self.kept + (self.model - mean) / rate
        self.model = self.model - rate * self.kept


class OuterNesterov(Outer):
    def step(self, mean: Tensor, rate: float) -> None:
        change = self.model - mean
        self.kept = 0.9 * self.kept + change
        self.model = self.model - 0.7 * (change + 0.9 * self.kept)


OUTER_RULES = {"bmuf": BlockMomentum, "slowmo": SlowMomentum, "diloco": OuterNesterov}


@pytest.mark.parametrize("strategy", OUTER_RULES)
def test_rounds_are_those_of_whoever_is_left(strategy: str, tmp_path: Path) -> None:
    run(tmp_path, f"{strategy}(steps={ROUND})", 4, VICTIM, restarts=0)
    found = diaries(tmp_path)
    present = [entry["workers"] for entry in found[0]]
    assert present == [3, 3, 2, 2]
    assert {worker: [entry["seen"] for entry in diary] for worker, diary in found.items()} == {
        worker: [share(worker, workers) for workers in present] for worker in (0, 1)
    }
    expected = reference_of_rounds(present, OUTER_RULES[strategy])
    for model in models(tmp_path):
        vector = nn.utils.parameters_to_vector(model.values())
        torch.testing.assert_close(vector, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("strategy", ["ssp", "downpour", "easgd"])
def test_those_who_are_left_go_on_at_their_own_pace(strategy: str, tmp_path: Path) -> None:
    run(tmp_path, strategy, 6, VICTIM, restarts=0)
    found = diaries(tmp_path)
    assert {worker: [entry["seen"] for entry in diary] for worker, diary in found.items()} == {
        worker: [share(worker, entry["workers"]) for entry in diary] for worker, diary in found.items()
    }
    assert list(found) == [0, 1]
    present = [entry["workers"] for entry in found[0]]
    assert present == [3, 3, 2, 2, 2, 2]
    assert [entry["mean"] for entry in found[0]] == [1.0, *[0.5] * 5]
    first, other = models(tmp_path)
    assert all(torch.equal(other[name], value) for name, value in first.items())
    assert loss_of(first) < 0.75 * loss_of(task.network().state_dict())


def reference_of_rounds(present: list[int], outer: type[Outer]) -> Tensor:
    """Trains in plain torch: rounds of local steps, then the outer rule's step to the mean of those who are there."""
    inputs, labels = task.points()
    replicas = [task.network() for _ in range(task.WORKERS)]
    optimizers = [task.optimizer_of(model) for model in replicas]
    rule, taken = outer(vector_of(replicas[0])), 0
    for epoch, workers in enumerate(present):
        shares = [share(place, workers) for place in range(workers)]
        for step in range(len(shares[0])):
            alive = [place for place in range(workers) if not is_dead(VICTIM, place, epoch, step)]
            for place in alive:
                model, indices = replicas[place], torch.tensor(shares[place][step])
                for group in optimizers[place].param_groups:
                    group["lr"] = task.RATE * 0.9**epoch
                optimizers[place].zero_grad()
                nn.functional.cross_entropy(model(inputs[indices]), labels[indices]).backward()
                optimizers[place].step()
            taken += 1
            last = (epoch, step) == (len(present) - 1, len(shares[0]) - 1)
            if taken % ROUND == 0 or last:
                mean = torch.stack([vector_of(replicas[place]) for place in alive]).mean(0)
                rule.step(mean, task.RATE * 0.9**epoch)
                for place in alive:
                    nn.utils.vector_to_parameters(rule.model.clone(), replicas[place].parameters())
    return rule.model


def vector_of(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def loss_of(state: dict[str, Tensor]) -> float:
    """Gives the loss over all points."""
    model = task.network()
    model.load_state_dict(state)
    inputs, labels = task.points()
    return nn.functional.cross_entropy(model(inputs), labels).item()
