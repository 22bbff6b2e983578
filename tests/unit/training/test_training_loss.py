"""The losses against numpy and against rules written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from polyrhythm.errors import RequestError
from polyrhythm.specs import build, choices
from polyrhythm.training.loss import Targets
from polyrhythm.training.losses.bootstrapping import Bootstrapping
from polyrhythm.training.losses.cross_entropy import CrossEntropy
from polyrhythm.training.losses.ensemble import Ensemble
from polyrhythm.training.losses.oracle import Oracle
from polyrhythm.training.losses.small_loss import SmallLoss
from polyrhythm.training.objective import Objective

PLAIN = Targets()


def _batch(branches: int = 0, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (6, branches, 4) if branches else (6, 4)
    logits = torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()
    return logits, torch.tensor([0, 3, 1, 1, 2, 0])


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_cross_entropy_equals_the_written_rule(smoothing: float) -> None:
    logits = np.random.default_rng(0).normal(size=(5, 4))
    labels = np.array([0, 3, 1, 1, 2])
    per_class = np.log(np.exp(logits).sum(1, keepdims=True)) - logits
    expected = (1 - smoothing) * per_class[np.arange(5), labels].mean() + smoothing * per_class.mean()
    loss = CrossEntropy()(torch.tensor(logits), torch.tensor(labels), Targets(smoothing))
    assert loss.shape == ()
    assert loss.item() == pytest.approx(expected, rel=1e-12)


def test_cross_entropy_has_the_bits_of_torchs() -> None:
    logits, labels = _batch()
    reference = torch.nn.CrossEntropyLoss(label_smoothing=0.1)(logits.float(), labels)
    assert torch.equal(CrossEntropy()(logits.float(), labels, Targets(0.1)), reference)


@pytest.mark.parametrize("smoothing", [-0.1, 1.0, float("nan")])
def test_what_is_no_share_is_refused(smoothing: float) -> None:
    with pytest.raises(RequestError, match="label smoothing"):
        Targets(smoothing)


@pytest.mark.parametrize("name", sorted(choices("polyrhythm.training.losses")))
def test_class_weights_count_a_sample_as_often(name: str) -> None:
    loss = build("loss", name, "polyrhythm.training.losses")
    logits, labels = _batch()
    weights = torch.tensor([2.0, 1.0, 0.0, 3.0], dtype=torch.float64)
    each = loss.of(logits, labels, PLAIN)
    found = loss(logits, labels, Targets(class_weights=weights))
    assert found.item() == pytest.approx(sum((weights[labels] * each).tolist()) / 6)


@pytest.mark.parametrize("name", sorted(choices("polyrhythm.training.losses")))
def test_one_branch_is_a_network_without_branches(name: str) -> None:
    loss = build("loss", name, "polyrhythm.training.losses")
    logits, labels = _batch()
    torch.testing.assert_close(loss(logits[:, None], labels, PLAIN), loss(logits, labels, PLAIN))


def test_every_branch_gets_the_gradient_that_it_would_get_alone() -> None:
    logits, labels = _batch(branches=3)
    CrossEntropy()(logits, labels, PLAIN).backward()
    for branch in range(3):
        alone = logits.detach()[:, branch].clone().requires_grad_()
        functional.cross_entropy(alone, labels).backward()
        torch.testing.assert_close(logits.grad[:, branch], alone.grad)


def test_the_ensembles_loss_is_that_of_the_mean_probabilities() -> None:
    logits, labels = _batch(branches=3)
    mean = logits.softmax(2).mean(1)
    expected = -mean[torch.arange(6), labels].log().mean()
    torch.testing.assert_close(Ensemble()(logits, labels, PLAIN), expected)


def test_only_the_best_branch_learns_from_a_sample() -> None:
    logits, labels = _batch(branches=3)
    Oracle()(logits, labels, PLAIN).backward()
    each = torch.stack(
        [functional.cross_entropy(logits[:, r], labels, reduction="none") for r in range(3)], 1
    )
    best = each.argmin(1)
    assert len(set(best.tolist())) > 1
    for sample in range(6):
        for branch in range(3):
            learns = bool((logits.grad[sample, branch] != 0).any())
            assert learns == (branch == best[sample])


def test_of_equal_branches_one_learns() -> None:
    logits = torch.zeros(2, 2, 3, requires_grad=True)
    Oracle()(logits, torch.tensor([0, 1]), PLAIN).backward()
    assert (logits.grad[:, 0] != 0).all()
    assert (logits.grad[:, 1] == 0).all()


@pytest.mark.parametrize("opinion", ["soft", "hard"])
def test_bootstrapping_mixes_label_and_opinion(opinion: str) -> None:
    logits, labels = _batch()
    p = logits.detach().softmax(1)
    own = p if opinion == "soft" else functional.one_hot(p.argmax(1), 4).double()
    target = 0.8 * functional.one_hot(labels, 4).double() + 0.2 * own
    expected = -(target * logits.log_softmax(1)).sum(1).mean()
    found = Bootstrapping(beta=0.8, opinion=opinion)(logits, labels, PLAIN)
    torch.testing.assert_close(found, expected)
    (gradient,) = torch.autograd.grad(found, logits)
    torch.testing.assert_close(gradient, (p - target) / 6)  # softmax minus target, as for any fixed target
    certain = Bootstrapping(beta=1, opinion=opinion)(logits, labels, PLAIN)
    torch.testing.assert_close(certain, functional.cross_entropy(logits, labels))


def test_large_losses_are_left_out() -> None:
    logits, labels = _batch()
    each = functional.cross_entropy(logits, labels, reduction="none")
    expected = each.sort().values[:4].mean()
    torch.testing.assert_close(SmallLoss(forget=1 / 3)(logits, labels, PLAIN), expected)
    torch.testing.assert_close(SmallLoss(forget=0)(logits, labels, PLAIN), each.mean())
    alone = SmallLoss(forget=0.9)(logits[:1], labels[:1], PLAIN)
    torch.testing.assert_close(alone, each[0])  # somebody is always left


def test_two_branches_teach_each_other() -> None:
    logits, labels = _batch(branches=2)
    losses = [functional.cross_entropy(logits[:, r], labels, reduction="none") for r in range(2)]
    easy = [each.topk(3, largest=False).indices for each in losses]
    assert set(easy[0].tolist()) != set(easy[1].tolist())
    expected = losses[0][easy[1]].mean() + losses[1][easy[0]].mean()
    torch.testing.assert_close(SmallLoss(forget=0.5)(logits, labels, PLAIN), expected)


def test_what_is_forgotten_rises_over_the_first_epochs() -> None:
    """The paper's schedule: 0 in the first epoch, all of it from the end of the ramp on."""
    loss = SmallLoss(forget=0.4, ramp=0.4)
    forgotten = [loss.at(epoch, 10).forget for epoch in range(7)]
    assert forgotten == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.4, 0.4])
    assert SmallLoss(forget=0.4, ramp=0).at(0, 10).forget == 0.4
    logits, labels = _batch()
    everything = Objective(loss).at(0, 10)(logits, labels, torch.empty(0))
    torch.testing.assert_close(everything, functional.cross_entropy(logits, labels))
    later = Objective(loss).at(5, 10)(logits, labels, torch.empty(0))
    torch.testing.assert_close(later, SmallLoss(forget=0.4)(logits, labels, PLAIN))


def test_other_losses_are_the_same_in_every_epoch() -> None:
    objective = Objective(CrossEntropy())
    assert objective.at(7, 10) is objective
