import numpy as np
import pytest
import torch
from PIL import Image

from polyrhythm.data.dataset import Dataset, TensorSplit
from polyrhythm.data.resized import resized
from polyrhythm.errors import RequestError


@pytest.fixture
def dataset():
    split = TensorSplit(torch.randn(3, 2, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(3))
    return Dataset("d", split, split, ("a", "b", "c"), (2, 8, 8), 1)


@pytest.mark.parametrize("size", [5, 12])
def test_equals_pillows_bilinear_scaling(dataset, size):
    wanted = resized(dataset, size)
    assert wanted.image_shape == (2, size, size)
    images = wanted.train.images(torch.tensor([2, 0]))
    plane = Image.fromarray(dataset.train.images(torch.tensor([2]))[0, 1].numpy())
    reference = np.asarray(plane.resize((size, size), Image.Resampling.BILINEAR))
    np.testing.assert_allclose(images[0, 1].numpy(), reference, atol=1e-5)
    assert wanted.test.labels.tolist() == [0, 1, 2]
    assert len(wanted.test) == 3


def test_an_empty_batch_has_the_new_size(dataset):
    assert resized(dataset, 12).train.images(torch.tensor([], dtype=torch.int64)).shape == (0, 2, 12, 12)


def test_the_size_it_has_changes_nothing(dataset):
    assert resized(dataset, 8) is dataset


def test_a_size_of_nothing_is_refused(dataset):
    with pytest.raises(RequestError, match="image size 0"):
        resized(dataset, 0)
