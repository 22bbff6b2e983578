"""One epoch of a user's own loop that loses a worker: the others and its replacement see each image of it once."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from on_processes import divided_loop_task as task
from on_processes.forked_script import run_forked
from on_processes.mortal_loop_task import network, optimizer_of
from tolerances import REORDERED

STEPS = -(-task.POINTS // (task.WORKERS * task.BATCH_SIZE))


def run(folder: Path, strategy: str, *victims: int, restarts: int = 3, ahead: bool = False) -> str:
    arguments = [strategy, str(folder), *(["ahead"] if ahead else []), *map(str, victims)]
    return run_forked(task.__file__, arguments, folder, workers=task.WORKERS, restarts=restarts)


def notes(folder: Path) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """Return the steps of each process, by rank and number of its predecessors."""
    found = {}
    for path in sorted(folder.glob("steps-*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        _, rank, generation = path.stem.split("-")
        found[int(rank), int(generation)] = [line for line in lines if "step" in line]
        ends = [line for line in lines if "step" not in line]
        assert ends in ([], [{"mean": 1.0, "length": STEPS}], [{"mean": 0.5, "length": STEPS}])
    return found


def counted(found: dict[tuple[int, int], list[dict[str, Any]]]) -> list[list[int]]:
    """Return the images that count, a step each."""
    steps: list[list[int]] = [[] for _ in range(STEPS)]
    for taken in found.values():
        for note in taken:
            steps[note["step"]] += note["seen"] if note["weight"] else []
    return steps


def reference(steps: list[list[int]]) -> torch.Tensor:
    inputs, labels = task.points()
    model = network()
    optimizer = optimizer_of(model)
    scheduler = task.schedule_of(optimizer, STEPS)
    for images in steps:
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs[images]), labels[images]).backward()
        optimizer.step()
        scheduler.step()
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def check_model(folder: Path, workers: int, steps: list[list[int]]) -> None:
    paths = sorted(folder.glob("model-*.pt"))
    assert len(paths) == workers
    for path in paths:
        vector = torch.nn.utils.parameters_to_vector(torch.load(path, weights_only=True).values())
        torch.testing.assert_close(vector, reference(steps), **REORDERED)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_replacement_enters_in_the_middle_and_each_image_is_seen_once(victim: int, tmp_path: Path) -> None:
    noticed = run(tmp_path, "synchronous", victim)
    found = notes(tmp_path)
    replacement = found[victim, 1]
    assert replacement[-1]["step"] == STEPS - 1
    assert sum(note["weight"] > 0 for note in replacement) > 1
    steps = counted(found)
    assert Counter(image for images in steps for image in images) == Counter(range(task.POINTS))
    check_model(tmp_path, task.WORKERS, steps)
    assert "not seen" not in noticed


def test_without_a_replacement_the_others_see_all_images_in_as_many_steps(tmp_path: Path) -> None:
    noticed = run(tmp_path, "synchronous", 2, restarts=0)
    steps = counted(notes(tmp_path))
    assert Counter(image for images in steps for image in images) == Counter(range(task.POINTS))
    check_model(tmp_path, 2, steps)
    assert "not seen" not in noticed


def test_two_workers_fail_in_one_step(tmp_path: Path) -> None:
    run(tmp_path, "synchronous", 0, 2)
    found = notes(tmp_path)
    assert found[0, 1][-1]["step"] == found[2, 1][-1]["step"] == STEPS - 1
    steps = counted(found)
    assert Counter(image for images in steps for image in images) == Counter(range(task.POINTS))
    check_model(tmp_path, task.WORKERS, steps)


@pytest.mark.parametrize(
    ("strategy", "exact"), [("lazy_synchronous", True), ("local_sgd(steps=4)", True), ("sgp", False)]
)
def test_images_of_lost_updates_are_dealt_again_where_workers_exchange_otherwise(
    strategy: str, exact: bool, tmp_path: Path
) -> None:
    noticed = run(tmp_path, strategy, 2)
    found = notes(tmp_path)
    assert found[2, 1][-1]["step"] == STEPS - 1
    seen = {image for images in counted(found) for image in images}
    assert len(seen) >= task.POINTS - (0 if exact else task.BATCH_SIZE)
    assert "not seen" not in noticed


@pytest.mark.parametrize("restarts", [0, 3])
def test_in_a_loop_that_fetches_ahead_the_others_see_all_images(restarts: int, tmp_path: Path) -> None:
    noticed = run(tmp_path, "synchronous", 2, restarts=restarts, ahead=True)
    found = notes(tmp_path)
    assert not found.get((2, 1))  # a replacement waits for the next epoch
    steps = counted(found)
    assert Counter(image for images in steps for image in images) == Counter(range(task.POINTS))
    assert "not seen" not in noticed
