"""Warps of windows sample the larger picture around the window, so that no frames appear."""

from __future__ import annotations

import pytest
import torch

from polyrhythm.augmentation.chain import Chain, build_chain
from polyrhythm.augmentation.draws import Draws
from polyrhythm.augmentation.transforms.rotation import Rotation
from polyrhythm.augmentation.transforms.window import Window
from polyrhythm.augmentation.warp import Movement, warp

SIDE, SIZE, AROUND = 60, 20, 12
WARPS = "rotation(strength=40); stretching; lens_distortion"


def windowed(specs: str, size: int = SIZE) -> Chain:
    chain = build_chain(specs)
    assert chain is not None
    return Chain((Window(size=size), *chain.transforms))


@pytest.mark.parametrize("specs", ["rotation(strength=40)", "flip; rotation; stretching"])
def test_a_window_sees_what_a_warp_of_all_around_it_shows(specs: str) -> None:
    images, keys = torch.rand(40, 3, SIDE, SIDE, dtype=torch.float64), torch.arange(40)
    places = Window(size=SIZE).drawn(images, Draws(keys))
    within = ((places >= AROUND) & (places <= SIDE - SIZE - AROUND)).all(1)
    assert int(within.sum()) > 5
    found = windowed(specs)(images, keys)[within]
    # These warps are linear about the center, so that a larger piece with the same center is warped alike.
    pieces = torch.stack(
        [
            image[:, top - AROUND : top + SIZE + AROUND, left - AROUND : left + SIZE + AROUND]
            for image, (top, left) in zip(images[within], places[within].tolist(), strict=True)
        ]
    )
    draws = Draws(keys)
    Window(size=SIZE).drawn(images, draws)
    chain = build_chain(specs)
    assert chain is not None
    steps = [(kind, kind.drawn(draws)[within]) for kind in chain.transforms if isinstance(kind, Movement)]
    expected = warp(pieces, steps)[..., AROUND:-AROUND, AROUND:-AROUND]
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)
    assert bool((found > 0).all())


def test_frames_appear_only_where_the_picture_ends() -> None:
    bright = torch.ones(64, 1, SIDE, SIDE)
    keys = torch.arange(64)
    frames = build_chain("rotation(strength=40, fill=frame)")
    assert frames is not None
    framed = Chain((Window(size=SIZE), *frames.transforms))(bright, keys)
    assert float((framed == 0).double().mean()) > 0.03
    filled = windowed("rotation(strength=40)")(bright, keys)
    places = Window(size=SIZE).drawn(bright, Draws(keys))
    inner = ((places >= AROUND) & (places <= SIDE - SIZE - AROUND)).all(1)
    assert bool((filled[inner] > 0.9999).all())
    assert bool((filled == 0).any())  # at the edges of the picture itself


def test_what_is_not_moved_keeps_its_bits() -> None:
    images, keys = torch.rand(32, 3, SIDE, SIDE), torch.arange(32)
    places = Window(size=SIZE).drawn(images, Draws(keys))
    cut = Window(size=SIZE).cut(images, places)
    assert torch.equal(windowed("rotation(strength=0); stretching(strength=0)")(images, keys), cut)
    half = windowed("rotation(probability=0.5)")(images, keys)
    same = (half == cut).flatten(1).all(1)
    assert 8 < int(same.sum()) < 24


def test_a_window_as_large_as_the_picture_is_warped_as_the_picture() -> None:
    images, keys = torch.rand(6, 3, SIZE, SIZE, dtype=torch.float64), torch.arange(6)
    alone = build_chain(WARPS)
    assert alone is not None
    draws = Draws(keys)
    Window(size=SIZE).drawn(images, draws)
    steps = [(kind, kind.drawn(draws)) for kind in alone.transforms if isinstance(kind, Movement)]
    torch.testing.assert_close(windowed(WARPS)(images, keys), warp(images, steps), atol=1e-12, rtol=0)


def test_a_quarter_turn_of_a_window_is_the_turned_window() -> None:
    images, places = torch.rand(1, 3, SIDE, SIDE, dtype=torch.float64), torch.tensor([[8, 14]])
    cut = Window(size=SIZE).cut(images, places)
    turned = warp(cut, [(Rotation(), torch.full((1, 1), torch.pi / 2))], "zero", (images, places))
    torch.testing.assert_close(turned, cut.rot90(1, (2, 3)), atol=1e-6, rtol=0)
