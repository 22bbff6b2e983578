import pytest
import torch

from polyrhythm.augmentation.chain import Chain, build_chain
from polyrhythm.augmentation.draws import Draws
from polyrhythm.augmentation.tones import BYTES, UNIT
from polyrhythm.augmentation.transforms.crop import Crop
from polyrhythm.augmentation.transforms.flip import Flip
from polyrhythm.augmentation.transforms.rotation import Rotation
from polyrhythm.augmentation.warp import warp
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
    images, keys = torch.randn(16, 1, 6, 6), torch.arange(16)
    draws = Draws(keys)
    once = Flip()(Crop()(images, draws, UNIT), draws, UNIT)
    assert torch.equal(build_chain("crop; flip")(images, keys), once)


EVERYTHING = (
    "crop(padding=2); color_casting; vignetting; flip; rotation; stretching; lens_distortion(fill=border)"
)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_a_picture_changes_alike_in_any_batch(dtype):
    images = torch.randint(0, 256, (12, 3, 17, 15), dtype=torch.uint8).to(dtype)
    keys, chain = torch.arange(12) * 7919, build_chain(EVERYTHING).on(BYTES)
    together = chain(images, keys)
    assert together.dtype == dtype
    assert not torch.equal(together, images)
    order = torch.randperm(12)
    assert torch.equal(chain(images[order], keys[order]), together[order])
    for number in range(12):
        alone = chain(images[number : number + 1], keys[number : number + 1])
        assert torch.equal(alone[0], together[number])


def test_another_key_is_another_picture():
    images, chain = torch.rand(1, 3, 9, 9), build_chain(EVERYTHING)
    pictures = [chain(images, torch.tensor([key])) for key in range(20)]
    assert len({picture.numpy().tobytes() for picture in pictures}) == 20


def test_the_input_stays_as_it_was():
    images = torch.rand(8, 3, 9, 9)
    before = images.clone()
    build_chain(EVERYTHING)(images, torch.arange(8))
    assert torch.equal(images, before)


NOTHING = (
    "crop(padding=0); color_casting(strength=0); vignetting(strength=0); rotation(strength=0); stretching(strength=0);"
    "lens_distortion(strength=0); flip(probability=0)"
)


@pytest.mark.parametrize("specs", [NOTHING, NOTHING.replace("strength=0", "probability=0")])
def test_no_strength_and_no_probability_are_the_identity_bit_for_bit(specs):
    images = torch.randn(16, 3, 9, 8)
    assert torch.equal(build_chain(specs)(images, torch.arange(16)), images)


def test_neighboring_warps_sample_the_image_once():
    """Turning by 30 degrees and back leaves the middle as it was; sampled twice it would be blurred."""
    there, back = Rotation(strength=30), Rotation(strength=30)
    images = torch.rand(1, 1, 31, 31)
    angle = torch.tensor([[0.5]])
    together = warp(images, [(there, angle), (back, -angle)])
    torch.testing.assert_close(together[..., 8:-8, 8:-8], images[..., 8:-8, 8:-8], atol=1e-4, rtol=0)
    apart = warp(warp(images, [(there, angle)]), [(back, -angle)])
    assert (apart - images)[..., 8:-8, 8:-8].abs().max() > 0.1


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
