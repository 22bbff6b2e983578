"""What `evaluate` refuses of its options."""

from __future__ import annotations

from collections.abc import Callable

import pytest


def test_scales_are_whole_numbers(refused: Callable[..., str]) -> None:
    assert refused("evaluate", "x", "--scales", "224;256") == (
        "--scales '224;256' is not a list of whole numbers: write 224,256"
    )


def test_dense_and_ten_crop_exclude_each_other(refused: Callable[..., str]) -> None:
    assert "give one of them" in refused("evaluate", "x", "--dense", "--ten-crop")


def test_a_choice_needs_several(refused: Callable[..., str]) -> None:
    assert "name more than one" in refused("evaluate", "x", "--greedy")


@pytest.mark.parametrize(
    "option",
    [
        ["--dense"],
        ["--flip"],
        ["--ten-crop"],
        ["--best"],
        ["--greedy"],
        ["--scales", "28"],
        ["--batch-size", "8"],
    ],
)
def test_robustness_looks_at_pictures_in_one_way(option: list[str], refused: Callable[..., str]) -> None:
    assert refused("evaluate", "x", "--robustness", *option).startswith(
        f"{option[0]} is not for --robustness"
    )


@pytest.mark.parametrize("option", [["--images", "9"], ["--kinds", "rotation"], ["--plot", "x.html"]])
def test_what_robustness_takes_is_for_nothing_else(option: list[str], refused: Callable[..., str]) -> None:
    assert refused("evaluate", "x", *option) == f"{option[0]} is about what --robustness finds: give that too"
