import pytest
import torch

from polyrhythm.augmentation.chain import Chain, build_chain
from polyrhythm.augmentation.transforms.crop import Crop
from polyrhythm.augmentation.transforms.flip import Flip
from polyrhythm.errors import RequestError


@pytest.mark.parametrize("text", ["", "  ", "none"])
def test_nothing_chosen_is_no_chain(text):
    assert build_chain(text) is None


def test_specs_become_transforms_in_order():
    assert build_chain("crop(padding=2); flip") == Chain((Crop(padding=2), Flip()))


def test_the_text_of_a_chain_builds_it_again():
    chain = build_chain("flip(probability=0.25); crop(fill=reflect)")
    assert build_chain(str(chain)) == chain


def test_a_chain_applies_one_after_the_other_from_one_generator():
    images = torch.randn(16, 1, 6, 6)
    chained = build_chain("crop; flip")(images, torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(1)
    assert torch.equal(chained, Flip()(Crop()(images, generator), generator))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("crpo", "unknown augmentation 'crpo': did you mean crop"),
        ("crop(pading=2)", "unknown key of augmentation crop 'pading'"),
        ("crop(padding=-1)", "padding should be greater than or equal to 0"),
        ("flip(probability=2)", "probability should be less than or equal to 1"),
        ("crop(fill=mirror)", "fill should be 'zero' or 'reflect'"),
        ("crop;; flip", "cannot read ''"),
    ],
)
def test_wrong_requests_are_one_line(text, message):
    with pytest.raises(RequestError) as caught:
        build_chain(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
