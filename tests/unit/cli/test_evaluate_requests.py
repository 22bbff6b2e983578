"""What `evaluate` refuses of its options."""

from __future__ import annotations

from collections.abc import Callable


def test_scales_are_whole_numbers(refused: Callable[..., str]) -> None:
    assert refused("evaluate", "x", "--scales", "224;256") == (
        "--scales '224;256' is no list of whole numbers: write 224,256"
    )


def test_dense_and_ten_crop_exclude_each_other(refused: Callable[..., str]) -> None:
    assert "give one of them" in refused("evaluate", "x", "--dense", "--ten-crop")


def test_a_choice_needs_several(refused: Callable[..., str]) -> None:
    assert "name more than one" in refused("evaluate", "x", "--greedy")
