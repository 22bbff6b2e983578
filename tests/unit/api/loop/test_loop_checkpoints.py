"""A loop of a user's own that writes checkpoints at an interval, and resumes from the newest inside an epoch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from polyrhythm.api.join import Group
from polyrhythm.api.loop.loop_storage import INDEX, saved_in
from polyrhythm.errors import RequestError
from unit.api.loop.test_run_state import BATCH_SIZE, EXACT, Points, Run
from unit.api.loop.threads import run_in_threads

EPOCHS = 3
STEPS = 12
"""Of three epochs of 29 images, eight a step."""


def train(group: Group, run: Run, folder: Path, every: str, keep: int, awaited: dict[int, int]) -> Run:
    """Trains; after some of its steps it waits until the checkpoint of a step is there.

    The disk may be slower than these steps, and then checkpoints are left out.
    """
    with group:
        model, optimizer = group.distribute(run.model, run.optimizer)
        generator = torch.Generator().manual_seed(9 + group.rank)
        shard = group.shard(DataLoader(Points(), BATCH_SIZE, shuffle=True, generator=generator))
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
        group.resume(folder, scheduler)
        for epoch in group.epochs(EPOCHS):
            for indices, x, y in shard:
                run.seen += [(epoch, int(each)) for each in indices]
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                run.rates.append(optimizer.param_groups[0]["lr"])
                group.checkpoint(folder, every, scheduler, keep=keep)
                step = awaited.get(len(run.rates))
                while step is not None and not (folder / f"step-{step:08d}").exists():
                    group.checkpoint(folder, every, scheduler, keep=keep)
            group.checkpoint(folder, every, scheduler, keep=keep)
    return run


def trained(
    strategy: str, folder: Path, every: str, awaited: Sequence[dict[int, int]] = ({}, {}), keep: int = 99
) -> list[Run]:
    runs = [Run(), Run()]
    return run_in_threads(
        strategy, 2, lambda group: train(group, runs[group.rank], folder, every, keep, awaited[group.rank])
    )


@pytest.mark.parametrize("strategy", EXACT)
def test_who_goes_in_step_resumes_from_any_checkpoint_with_the_same_bits(strategy, tmp_path):
    whole = trained(strategy, tmp_path, "3steps", [{3: 3, 6: 6, 9: 9, 12: 12}] * 2)
    assert saved_in(tmp_path) == [f"step-{step:08d}" for step in (12, 9, 6, 3)]
    for name in saved_in(tmp_path)[1:]:
        for newer in saved_in(tmp_path):
            if newer > name:
                shutil.rmtree(tmp_path / newer)
        for before, after in zip(whole, trained(strategy, tmp_path, "100steps"), strict=True):
            assert after.rates == before.rates[-len(after.rates) :]
            assert after.seen == before.seen[-len(after.seen) :]
            assert 0 < len(after.rates) < STEPS
            assert torch.equal(before.vector(), after.vector()), name


@pytest.mark.parametrize("strategy", ["parameter_server", "ad_psgd", "easgd(servers=2)"])
def test_out_of_step_a_checkpoint_holds_all_workers_and_a_loop_resumes_from_it(strategy, tmp_path):
    trained(strategy, tmp_path, "2steps", [{2: 2}, {3: 2}])
    for name in saved_in(tmp_path):
        state = json.loads((tmp_path / name / INDEX).read_text())["state"]
        assert set(state["states"]) == {"0", "1"}
        if name > "step-00000002":
            shutil.rmtree(tmp_path / name)
    for run in trained(strategy, tmp_path, "100steps"):
        assert len(run.rates) < STEPS


def test_epochs_and_times_are_intervals_too(tmp_path):
    trained("synchronous", tmp_path / "epochs", "2epochs")
    assert saved_in(tmp_path / "epochs") == ["step-00000008"]
    trained("synchronous", tmp_path / "times", "0.000001s")
    assert saved_in(tmp_path / "times")


def test_the_newest_stay_and_a_damaged_one_is_left_out(tmp_path, capfd):
    whole = trained("synchronous", tmp_path, "3steps", [{3: 3, 6: 6, 9: 9, 12: 12}] * 2, keep=2)
    assert saved_in(tmp_path) == ["step-00000012", "step-00000009"]
    (tmp_path / "step-00000012" / INDEX).write_text("{")
    again = trained("synchronous", tmp_path, "3steps", keep=2)
    assert torch.equal(whole[0].vector(), again[0].vector())
    assert len(again[0].rates) == STEPS - 9
    assert "step-00000012 is damaged" in capfd.readouterr().err


def test_what_a_killed_run_has_half_written_is_left_out_and_removed(tmp_path):
    half = tmp_path / ".step-00000099.partial"
    half.mkdir()
    (half / INDEX).write_text("{")
    runs = trained("synchronous", tmp_path, "3steps")
    assert len(runs[0].rates) == STEPS
    assert not half.exists()


def test_a_disk_that_cannot_be_written_is_one_line_and_no_step(tmp_path, capfd):
    (tmp_path / "file").touch()
    runs = trained("synchronous", tmp_path / "file", "1step")
    assert len(runs[0].rates) == STEPS
    assert capfd.readouterr().err.count("cannot write") == 1


def test_another_interval_than_before_is_one_line(tmp_path):
    def loop(group: Group) -> None:
        with group:
            model, optimizer = group.distribute(*(lambda run: (run.model, run.optimizer))(Run()))
            for x, y in group.shard([(torch.ones(2, 5).double(), torch.tensor([0, 1]))] * 4):
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                group.checkpoint(tmp_path, "3steps")
                with pytest.raises(RequestError, match="one folder and interval"):
                    group.checkpoint(tmp_path, "2steps")

    run_in_threads("synchronous", 1, loop)
