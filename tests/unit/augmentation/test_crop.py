import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.augmentation.draws import Draws
from polyrhythm.augmentation.tones import UNIT
from polyrhythm.augmentation.transforms.crop import Crop, crop
from polyrhythm.errors import RequestError


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def changed(transform, images, seed: int = 0):
    return transform(images, Draws(torch.arange(len(images)) + 1000 * seed), UNIT)


@pytest.mark.parametrize(("fill", "numpy_mode"), [("zero", "constant"), ("reflect", "reflect")])
@given(padding=st.integers(1, 3), seed=st.integers(0, 99))
def test_crop_equals_a_loop_over_samples_in_numpy(fill, numpy_mode, padding, seed):
    images = torch.randn(4, 2, 5, 6, generator=seeded(seed))
    top, left = torch.randint(0, 2 * padding + 1, (2, 4), generator=seeded(seed + 1))

    cropped = crop(images, top, left, padding, fill)

    for image, result, y, x in zip(images.numpy(), cropped.numpy(), top, left, strict=True):
        padded = np.pad(image, ((0, 0), (padding, padding), (padding, padding)), mode=numpy_mode)
        np.testing.assert_array_equal(result, padded[:, y : y + 5, x : x + 6])


def test_hand_computed_shift_by_one_pixel():
    image = torch.tensor([[1.0, 2.0], [3.0, 4.0]])[None, None]
    down_right = crop(image, torch.tensor([0]), torch.tensor([0]), padding=1)
    assert down_right[0, 0].tolist() == [[0, 0], [0, 1]]


def test_no_padding_is_the_identity():
    images = torch.randn(3, 1, 4, 4)
    assert torch.equal(changed(Crop(padding=0), images), images)


def test_same_seed_same_picture_and_another_seed_another():
    images = torch.randn(8, 3, 9, 9)
    first, again, other = (changed(Crop(), images, seed) for seed in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_every_offset_is_drawn_about_equally_often():
    # A lone 1 in the middle shows by its place which of the nine windows was taken.
    images = torch.zeros(9000, 1, 3, 3)
    images[:, :, 1, 1] = 1
    shares = changed(Crop(padding=1), images).mean(0).flatten()
    torch.testing.assert_close(shares, torch.full((9,), 1 / 9), atol=0.012, rtol=0)


def test_the_input_dtype_and_shape_stay():
    images = torch.randn(2, 1, 4, 7, dtype=torch.float64)
    before = images.clone()
    result = changed(Crop(padding=2, fill="reflect"), images)
    assert result.shape == images.shape
    assert result.dtype == torch.float64
    assert torch.equal(images, before)


def test_an_empty_batch_stays_empty():
    assert changed(Crop(fill="reflect"), torch.zeros(0, 1, 8, 8)).shape == (0, 1, 8, 8)


def test_reflecting_further_than_the_image_is_refused():
    with pytest.raises(RequestError, match=r"padding=4.*3 by 8.*fill=zero"):
        changed(Crop(fill="reflect"), torch.zeros(1, 1, 3, 8))
