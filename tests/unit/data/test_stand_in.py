"""Images of workers that are not there: those who are there see them, each once."""

from __future__ import annotations

import pytest
import torch

from polyrhythm.data.dealing import StandIn
from polyrhythm.data.loader import Share


@pytest.mark.parametrize("images", [24, 22, 19])
def test_those_of_a_group_share_out_the_images_of_its_lost_members(images: int) -> None:
    """Workers 2 to 4 of 6 are a group, of which 3 is lost: 2 and 4 see what all three would have."""
    order = torch.randperm(images, generator=torch.Generator().manual_seed(0))
    for step in range(2):
        whole = {int(image) for worker in (2, 3, 4) for image in Share(worker, 6, 2, 0).dealt(order, step)}
        seen = [
            Share(worker, 6, 2, 0, stand_in=StandIn((3,), place, 2)).dealt(order, step).tolist()
            for place, worker in enumerate((2, 4))
        ]
        assert sorted(seen[0] + seen[1]) == sorted(whole)
        assert (
            seen[0][: len(Share(2, 6, 2, 0).dealt(order, step))]
            == Share(2, 6, 2, 0).dealt(order, step).tolist()
        )


def test_two_lost_members_are_dealt_out_like_one_pack() -> None:
    order = torch.arange(12)
    assert StandIn((1, 2), 0, 2).dealt(order, 0, 3, 12).tolist() == [1, 7, 2, 8]
    assert StandIn((1, 2), 1, 2).dealt(order, 0, 3, 12).tolist() == [4, 10, 5, 11]
    assert StandIn((), 0, 1).dealt(order, 0, 3, 12).tolist() == []
