import pytest
import torch

from polyrhythm.augmentation.chain import build_chain
from polyrhythm.augmentation.draws import Draws
from polyrhythm.augmentation.tones import UNIT
from polyrhythm.augmentation.transforms.window import Window
from polyrhythm.errors import RequestError


def test_windows_equal_a_loop_over_samples():
    images, draws = torch.rand(6, 3, 9, 12), Draws(torch.arange(6))
    cut = Window(size=5)(images, Draws(torch.arange(6)), UNIT)
    top, left = draws.integers(0, 4), draws.integers(0, 7)
    for number in range(6):
        y, x = int(top[number]), int(left[number])
        assert torch.equal(cut[number], images[number, :, y : y + 5, x : x + 5])


def test_every_place_is_drawn_about_equally_often():
    images = torch.arange(9.0).view(1, 1, 3, 3).expand(5_000, 1, 3, 3)
    cut = Window(size=2)(images, Draws(torch.arange(5_000)), UNIT)[:, 0, 0, 0]
    shares = torch.bincount(cut.long(), minlength=9)[[0, 1, 3, 4]] / len(cut)
    torch.testing.assert_close(shares, torch.full((4,), 0.25), atol=0.025, rtol=0)


def test_the_papers_count_of_crops():
    assert Window(size=224).combinations(3, 512) == 82944


def test_a_window_of_the_whole_picture_is_the_picture():
    images = torch.rand(3, 1, 7, 7)
    assert torch.equal(Window(size=7)(images, Draws(torch.arange(3)), UNIT), images)


def test_a_window_that_does_not_fit_is_refused():
    with pytest.raises(RequestError, match="a window of 8 pixels does not fit into images of 9 by 7"):
        Window(size=8)(torch.zeros(1, 3, 9, 7), Draws(torch.arange(1)), UNIT)


def test_a_chain_of_many_pictures_goes_on_with_the_window():
    """More pixels than are changed at once."""
    images, keys = torch.rand(24, 1, 120, 120), torch.arange(24)
    chain = build_chain("window(size=32); rotation")
    together = chain(images, keys)
    assert together.shape == (24, 1, 32, 32)
    assert torch.equal(together[20:], chain(images[20:], keys[20:]))
