"""Mixup and CutMix: pictures, shares and labels, whatever the batch and the workers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from polyrhythm.augmentation.chain import build_chain
from polyrhythm.augmentation.draws import Draws
from polyrhythm.augmentation.mixing import Mixer, Mixing
from polyrhythm.augmentation.transforms.cutmix import CutMix
from polyrhythm.augmentation.transforms.mixup import MixUp
from polyrhythm.data.dataset import TensorSplit
from polyrhythm.data.dealing import epoch_order
from polyrhythm.data.loader import Batch, Loader, Share
from polyrhythm.data.seeding import sample_keys
from polyrhythm.models.create import define_missing_operators
from polyrhythm.training.loss import Targets
from polyrhythm.training.losses.bootstrapping import Bootstrapping
from polyrhythm.training.losses.cross_entropy import CrossEntropy
from polyrhythm.training.objective import Objective

define_missing_operators()
from torchvision.transforms import v2  # noqa: E402

CLASSES = 4


def pictures(count: int, seed: int = 0) -> Tensor:
    return torch.rand(count, 3, 12, 16, generator=torch.Generator().manual_seed(seed))


def test_mixup_is_the_mean_by_its_share() -> None:
    images, others = pictures(5), pictures(5, 1)
    shares = torch.tensor([1.0, 0.75, 0.5, 0.1, 0.0], dtype=torch.float64)
    mixed, kept = MixUp().mixed(images, others, shares, Draws(torch.arange(5)))
    expected = torch.stack(
        [s * a + (1 - s) * b for s, a, b in zip(shares.tolist(), images, others, strict=True)]
    )
    torch.testing.assert_close(mixed, expected)
    assert torch.equal(mixed[0], images[0])
    assert torch.equal(kept, shares)


def test_cutmix_shows_a_rectangle_of_the_other_and_counts_its_pixels() -> None:
    images, others = torch.zeros(400, 1, 12, 16), torch.ones(400, 1, 12, 16)
    draws = Draws(torch.arange(400))
    shares = CutMix().shares(draws)
    mixed, kept = CutMix().mixed(images, others, shares, draws)
    for picture, share, asked in zip(mixed[:, 0], kept.tolist(), shares.tolist(), strict=True):
        assert float(picture.mean()) == pytest.approx(1 - share, abs=1e-6)
        rows, columns = picture.any(1).nonzero(), picture.any(0).nonzero()
        if len(rows):
            inside = picture[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
            assert bool(inside.all())  # one rectangle
            assert 1 - share <= 1 - asked + 1e-9  # cut off at the edges, never more
    assert 0.55 < float(kept.mean()) < 0.75  # uniform shares, and what sticks out


@pytest.mark.parametrize("kind", [MixUp(), MixUp(alpha=1.0), CutMix(), CutMix(alpha=4.0)])
def test_shares_are_of_the_beta_distribution(kind: Mixing) -> None:
    shares = kind.shares(Draws(torch.arange(20_000)))
    drawn = torch.distributions.Beta(kind.alpha, kind.alpha)
    assert float(shares.mean()) == pytest.approx(0.5, abs=0.01)
    assert float(shares.var()) == pytest.approx(float(drawn.variance), rel=0.03)


def test_probability_leaves_pictures_and_labels_alone() -> None:
    mixer = Mixer((MixUp(alpha=8.0, probability=0.25),), CLASSES)
    images, others, keys = pictures(2000), pictures(2000, 1), torch.arange(2000)
    labels = torch.arange(2000) % CLASSES
    mixed, targets = mixer(images, others, labels, (labels + 1) % CLASSES, keys)
    whole = targets.max(1).values == 1
    assert float(whole.double().mean()) == pytest.approx(0.75, abs=0.03)
    assert torch.equal(mixed[whole], images[whole])
    assert torch.equal(targets.argmax(1)[whole], labels[whole])
    torch.testing.assert_close(targets.sum(1), torch.ones(2000))


def test_of_several_each_picture_draws_one() -> None:
    mixer = Mixer((MixUp(alpha=1.0), CutMix()), CLASSES)
    images, others = torch.zeros(1000, 1, 8, 8), torch.ones(1000, 1, 8, 8)
    labels = torch.zeros(1000, dtype=torch.int64)
    mixed, targets = mixer(images, others, labels, labels + 1, torch.arange(1000))
    blended = ((mixed > 0) & (mixed < 1)).flatten(1).any(1)
    assert 0.4 < float(blended.double().mean()) < 0.6
    # Either way, the share of the other picture is that of its label.
    torch.testing.assert_close(mixed.mean((1, 2, 3)), targets[:, 1], atol=1e-5, rtol=0)


def test_the_loss_is_that_of_both_labels_by_their_shares() -> None:
    logits = torch.randn(6, CLASSES, generator=torch.Generator().manual_seed(0))
    first, second = torch.tensor([0, 1, 2, 3, 0, 1]), torch.tensor([3, 3, 1, 1, 0, 2])
    shares = torch.linspace(0, 1, 6)
    one_hot = torch.nn.functional.one_hot
    soft = shares[:, None] * one_hot(first, CLASSES) + (1 - shares[:, None]) * one_hot(second, CLASSES)
    images = pictures(6)
    weights = torch.tensor([0.5, 1.0, 2.0, 0.5])
    for loss in (CrossEntropy(), Bootstrapping(beta=0.6)):
        for targets in (Targets(), Targets(0.1)):
            each = [loss.of(logits, labels, targets) for labels in (first, second)]
            if isinstance(
                loss, Bootstrapping
            ):  # whose own opinion counts once, not by shares: it is in both alike
                torch.testing.assert_close(each[0] - loss.of(logits, first, targets), torch.zeros(6))
            expected = (shares * each[0] + (1 - shares) * each[1]).mean()
            torch.testing.assert_close(Objective(loss, targets)(logits, soft, images), expected)
    by_class = Targets(class_weights=weights)
    by_hand = (cross_entropy(logits, soft, reduction="none") * (soft @ weights)).mean()
    torch.testing.assert_close(Objective(targets=by_class)(logits, soft, images), by_hand)
    branches = torch.stack([logits, logits.flip(0)], 1)
    apart = sum(Objective()(each, soft, images) for each in branches.unbind(1))
    torch.testing.assert_close(Objective()(branches, soft, images), apart)
    assert Objective()(logits.double(), soft, images).dtype == torch.float64


def _epoch(worker: int, workers: int, batch_size: int, specs: str) -> dict[float, Batch]:
    """Batches of single pictures of an epoch, by a mark that no augmentation here changes."""
    chain = build_chain(specs)
    assert chain is not None
    split = TensorSplit(pictures(23), torch.arange(23) % CLASSES)
    loader = Loader(split, Share(worker, workers, batch_size, 3), chain, mixer=Mixer(chain.mixings, CLASSES))
    found = {}
    for batch in loader.epoch(2):
        order = epoch_order(len(split), 2, loader.share.seed)
        for row, number in enumerate(loader.share.dealt(order, batch.step).tolist()):
            found[number] = Batch(2, 0, batch.images[row], batch.labels[row])
    return found


@pytest.mark.parametrize("specs", ["flip; mixup", "cutmix(probability=0.7); mixup"])
def test_a_mixture_does_not_depend_on_batches_and_workers(specs: str) -> None:
    alone = _epoch(0, 1, 23, specs)
    several = {}
    for worker in range(3):
        several |= _epoch(worker, 3, 2, specs)
    assert alone.keys() == several.keys() == set(range(23))
    for number, batch in alone.items():
        torch.testing.assert_close(several[number].images, batch.images)
        torch.testing.assert_close(several[number].labels, batch.labels)
    partners = Mixer((MixUp(),), CLASSES).partners(sample_keys("mixing", 3, 2, torch.arange(23)), 23)
    split = torch.arange(23) % CLASSES
    for number, batch in alone.items():
        shown = {split[number].item(), split[partners[number]].item()}
        assert set(batch.labels.nonzero().flatten().tolist()) <= shown


def test_mixtures_change_from_epoch_to_epoch() -> None:
    mixer = Mixer((MixUp(),), CLASSES)
    first, second = (mixer.partners(sample_keys("mixing", 0, e, torch.arange(500)), 500) for e in (0, 1))
    assert (first == second).sum() < 10
    assert len(first.unique()) > 250


def test_mixup_beside_torchvision() -> None:
    """The same share and the same partners give the same batch and the same targets."""
    images, labels = pictures(6), torch.arange(6) % CLASSES
    torch.manual_seed(0)
    theirs, their_targets = v2.MixUp(alpha=1.0, num_classes=CLASSES)(images, labels)
    share = (
        float(their_targets[0].max())
        if their_targets[0].argmax() == labels[0]
        else float(their_targets[0].min())
    )
    share = float(their_targets[0, labels[0]])
    shares = torch.full((6,), share, dtype=torch.float64)
    mixed, _ = MixUp().mixed(images, images.roll(1, 0), shares, Draws(torch.arange(6)))
    torch.testing.assert_close(mixed, theirs)
