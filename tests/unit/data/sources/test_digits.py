import numpy as np
import torch
from sklearn.datasets import load_digits

from polyrhythm.data.sources.digits import Digits


def test_every_digit_is_in_exactly_one_part():
    dataset = Digits().load()
    images = torch.cat([split.images(torch.arange(len(split))) for split in (dataset.train, dataset.test)])
    restored = (images + 0.305).mul(16).round().numpy()[:, 0]
    labels = torch.cat([dataset.train.labels, dataset.test.labels]).numpy()
    raw = load_digits()
    mine = sorted((label, *image.ravel()) for label, image in zip(labels, restored, strict=True))
    assert np.array_equal(
        mine, sorted((label, *image.ravel()) for label, image in zip(raw.target, raw.images, strict=True))
    )


def test_scale_shape_and_shares():
    dataset = Digits().load()
    images = dataset.train.images(torch.arange(len(dataset.train)))
    assert dataset.image_shape == (1, 8, 8)
    assert dataset.default_epochs == 30
    assert dataset.classes == tuple("0123456789")
    assert images.dtype == torch.float32
    assert abs(images.mean().item()) < 0.01
    assert (images.max() - images.min()).item() == 1
    shares = dataset.test.labels.bincount() / (
        dataset.train.labels.bincount() + dataset.test.labels.bincount()
    )
    assert ((shares - 0.2).abs() < 0.005).all()
