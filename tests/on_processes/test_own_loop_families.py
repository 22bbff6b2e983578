"""Loops of one's own that lose a worker and its place, with strategies of other families."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from on_processes import mortal_loop_task as task
from on_processes.mortal_loops import diaries, models, run, share
from on_processes.mortal_rounds import OUTER_RULES, ROUND, Return, reference_of_rounds
from tolerances import REORDERED

VICTIM = 2


@pytest.mark.parametrize("strategy", OUTER_RULES)
def test_rounds_are_those_of_whoever_is_left(strategy: str, tmp_path: Path) -> None:
    run(tmp_path, f"{strategy}(steps={ROUND})", 4, VICTIM, restarts=0)
    found = diaries(tmp_path)
    present = [entry["workers"] for entry in found[0]]
    assert present == [3, 3, 2, 2]
    assert {worker: [entry["seen"] for entry in diary] for worker, diary in found.items()} == {
        worker: [share(worker, workers) for workers in present] for worker in (0, 1)
    }
    expected = reference_of_rounds(present, OUTER_RULES[strategy], VICTIM)
    for model in models(tmp_path):
        vector = nn.utils.parameters_to_vector(model.values())
        torch.testing.assert_close(vector, expected, **REORDERED)


@pytest.mark.parametrize("strategy", OUTER_RULES)
def test_rounds_wait_for_the_successor_of_worker_0_and_are_then_those_of_all(
    strategy: str, tmp_path: Path
) -> None:
    run(tmp_path, f"{strategy}(steps={ROUND})", 4, victim=0, restarts=1)
    found = diaries(tmp_path)
    for worker in (1, 2):
        assert [entry["seen"] for entry in found[worker]] == [share(worker, 3)] * 4
    first, *later = [entry["seen"] for entry in found[0]]
    if first == []:  # it was called for in the mean behind epoch 1: all had taken step 7
        ways = [Return(7, newest=1)]
        assert later == [share(0, 3)] * 2
    else:  # it was missed at the end of the round: one at least had taken step 9
        ways = [Return(9, newest=1), Return(9, newest=2)]
        assert [first, *later] == [share(0, 3)[1:], share(0, 3)]
    expected = [reference_of_rounds([3] * 4, OUTER_RULES[strategy], 0, way) for way in ways]
    vectors = [nn.utils.parameters_to_vector(model.values()) for model in models(tmp_path)]
    assert all(torch.equal(vector, vectors[0]) for vector in vectors[1:])
    assert any(torch.allclose(vectors[0], each, **REORDERED) for each in expected)


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


def loss_of(state: dict[str, Tensor]) -> float:
    """Gives the loss over all points."""
    model = task.network()
    model.load_state_dict(state)
    inputs, labels = task.points()
    return nn.functional.cross_entropy(model(inputs), labels).item()
