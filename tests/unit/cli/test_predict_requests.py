"""What `predict` refuses of its options."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.parametrize("option", [["a.png"], ["--out", "x.csv"], ["--json"], ["--skip-unreadable"]])
def test_what_a_page_does_not_take(option: list[str], refused: Callable[..., str]) -> None:
    name = "IMAGE" if option == ["a.png"] else option[0]
    assert refused("predict", "--weights", "x", "--serve", *option) == (
        f"{name} is not for --serve, which receives images: leave it out"
    )


def test_a_port_is_of_the_page(refused: Callable[..., str]) -> None:
    assert refused("predict", "a.png", "--weights", "x", "--port", "80") == "--port needs --serve"


def test_scales_are_whole_numbers(refused: Callable[..., str]) -> None:
    assert "not a list of whole numbers" in refused("predict", "a.png", "--weights", "x", "--scales", "a")
