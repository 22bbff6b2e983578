"""A tree whose branches belong to workers learns as the whole tree does with one large batch (`hybrid` on trees)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from conformance.jobs import (
    CLASSES,
    cosine,
    epoch_order,
    make_job,
    shared_out,
    simulated,
    uneven,
    vector_of,
)
from polyrhythm.errors import RequestError
from polyrhythm.models.architectures.treenet import Tree
from polyrhythm.roles.job import Job
from polyrhythm.simulation.run import ConstantCluster
from polyrhythm.training.losses.ensemble import Ensemble
from polyrhythm.training.losses.oracle import Oracle
from polyrhythm.training.objective import Objective
from tolerances import REORDERED

UNEVEN = ConstantCluster(step_s=uneven)


def _branch() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, CLASSES)
    )


def _tree(branches: int = 3) -> nn.Module:
    """Makes a tree whose branches begin with a convolution, behind one that all share."""
    return Tree(nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh()), [_branch() for _ in range(branches)])


def _forest() -> nn.Module:
    """Makes networks that share nothing."""
    return Tree(nn.Sequential(), [nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), _branch()) for _ in range(2)])


def _normed() -> nn.Module:
    return Tree(nn.Sequential(), [nn.Sequential(nn.BatchNorm2d(1), nn.Conv2d(1, 3, 3), _branch())])


def _each_alone(scores: Tensor, labels: Tensor) -> Tensor:
    losses = [functional.cross_entropy(branch, labels) for branch in scores.unbind(1)]
    return torch.stack(losses).sum()


def _together(scores: Tensor, labels: Tensor) -> Tensor:
    return functional.nll_loss(scores.softmax(2).mean(1).log(), labels)


def _best_alone(scores: Tensor, labels: Tensor) -> Tensor:
    each = [functional.cross_entropy(branch, labels, reduction="none") for branch in scores.unbind(1)]
    return torch.stack(each).min(0).values.mean()


LOSSES = {
    "each": (Objective(), _each_alone),
    "ensemble": (Objective(Ensemble()), _together),
    "oracle": (Objective(Oracle()), _best_alone),
}


def _plain(job: Job, loss_of: str, together: tuple[int, ...] = ()) -> Tensor:
    """Trains the whole tree on the batches of all workers together, in plain torch.

    With `together`, how many these are in each epoch, the rate stays as it is.
    """
    learning, train = job.learning, job.dataset.train
    torch.manual_seed(learning.seed)
    tree = job.make_model()
    optimizer = learning.optimizer.create(tree.parameters())
    step = 0
    for epoch in range(learning.epochs):
        batches = shared_out(
            epoch_order(len(train), epoch, learning.seed),
            learning.batch_size * (together[epoch] if together else job.workers),
        )
        for indices in batches:
            for group in [] if together else optimizer.param_groups:
                group["lr"] = cosine(job, step, len(batches) * learning.epochs)
            optimizer.zero_grad()
            LOSSES[loss_of][1](tree(train.images(indices).double()), train.labels[indices]).backward()
            optimizer.step()
            step += 1
    return vector_of(tree)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    ("scheme", "workers"), [("a", 3), ("a", 2), ("b", 2), ("c", 3), ("a", 5)], ids=lambda each: str(each)
)
def test_the_tree_learns_as_one_with_all_batches(scheme: str, workers: int, loss: str) -> None:
    """Three branches on two workers are one and two of them; on five, two workers have none."""
    objective = LOSSES[loss][0]
    job = make_job(f"hybrid(scheme={scheme})", workers, model=_tree, dtype=torch.float64, objective=objective)
    expected = _plain(job, loss)
    torch.testing.assert_close(vector_of(simulated(job, UNEVEN).models[0]), expected, **REORDERED)


def test_networks_that_share_nothing_learn_as_each_alone() -> None:
    job = make_job("hybrid", 2, model=_forest, dtype=torch.float64, optimizer="adam(lr=0.01)")
    found = simulated(job, UNEVEN).models[0]
    torch.testing.assert_close(vector_of(found), _plain(job, "each"), **REORDERED)
    assert isinstance(found, Tree)
    for number, branch in enumerate(found.branches):
        torch.manual_seed(job.learning.seed)
        made = _forest().double()
        assert isinstance(made, Tree)
        own = replace(
            job, make_model=lambda made=made, number=number: Tree(nn.Sequential(), [made.branches[number]])
        )
        alone = _plain(own, "each")
        torch.testing.assert_close(vector_of(branch), alone, **REORDERED)


def test_one_worker_is_the_plain_tree_bit_for_bit() -> None:
    job = make_job("hybrid", model=_tree, dtype=torch.float64)
    assert torch.equal(vector_of(simulated(job).models[0]), _plain(job, "each"))


def test_it_resumes_with_the_bits_of_a_run_without_a_break_and_with_other_workers(tmp_path: Path) -> None:
    job = make_job("hybrid", 2, model=_tree, optimizer="adam")
    whole = simulated(job, UNEVEN)
    kept = replace(job, checkpointing=replace(job.checkpointing, folder=tmp_path))
    first = simulated(kept, replace(UNEVEN, stop_at_s=0.06))
    assert 0 < first.checkpoint_steps[-1] < whole.result["steps"]
    continued = replace(kept, checkpointing=replace(kept.checkpointing, resume=True))
    assert simulated(continued, UNEVEN).sha256 == whole.sha256


def test_states_of_optimizers_follow_the_branches_to_other_workers(tmp_path: Path) -> None:
    """One epoch by three workers, the other by two: as the plain tree with batches of as many."""
    job = make_job(
        "hybrid", 3, model=_tree, dtype=torch.float64, optimizer="adam", schedule="constant", epochs=1
    )
    kept = replace(job, checkpointing=replace(job.checkpointing, folder=tmp_path))
    simulated(kept)
    learning = replace(kept.learning, epochs=2)
    fewer = replace(
        kept, workers=2, learning=learning, checkpointing=replace(kept.checkpointing, resume=True)
    )
    found = vector_of(simulated(fewer).models[0])
    torch.testing.assert_close(found, _plain(fewer, "each", together=(3, 2)), **REORDERED)


def test_what_cannot_be_shared_out_is_refused_with_the_reason() -> None:
    refused = [
        (make_job("hybrid", 2, model=_normed), "branches without batch normalization"),
        (
            make_job("hybrid(trunk=channels)", 2, model=_tree),
            "by its branches alone: leave trunk=channels out",
        ),
    ]
    for job, words in refused:
        with pytest.raises(RequestError, match=words) as caught:
            simulated(job)
        assert "\n" not in str(caught.value)
