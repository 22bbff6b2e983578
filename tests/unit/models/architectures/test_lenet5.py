import pytest
import torch
from torch.nn import functional

from polyrhythm.errors import RequestError
from polyrhythm.models.architectures.lenet5 import ChannelsLast, LeNet5


def _numbers(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("image_shape", "flat"),
    [
        ((1, 28, 28), 64 * 4 * 4),
        ((3, 32, 32), 64 * 5 * 5),
        ((3, 64, 64), 64 * 13 * 13),
        ((1, 16, 40), 64 * 1 * 7),
        ((1, 8, 8), 64 * 2 * 2),  # padded
        ((1, 4, 4), 64 * 1 * 1),  # padded
    ],
)
def test_it_takes_every_size_of_picture(image_shape, flat):
    model = LeNet5().create(10, image_shape)

    convolutions = (image_shape[0] * 25 + 1) * 32 + (32 * 25 + 1) * 64
    assert _numbers(model) == convolutions + (flat + 1) * 128 + 129 * 10
    assert model(torch.zeros(2, *image_shape)).shape == (2, 10)


@pytest.mark.parametrize(("side", "padding"), [(28, 0), (8, 2)])
def test_it_computes_the_rule_of_its_page(side, padding):
    model = LeNet5(widths=(3, 4), hidden=6).create(5, (2, side, side)).double()
    k1, a1, k2, a2, w1, b1, w2, b2 = model.parameters()
    images = torch.randn(3, 2, side, side, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    maps = functional.max_pool2d(functional.conv2d(images, k1, a1, padding=padding).relu(), 2)
    maps = functional.max_pool2d(functional.conv2d(maps, k2, a2, padding=padding).relu(), 2)
    logits = (maps.reshape(3, -1) @ w1.T + b1).relu() @ w2.T + b2

    torch.testing.assert_close(model(images), logits)


def test_pictures_below_four_pixels_are_refused():
    with pytest.raises(RequestError, match="28x3: both sides need 4 pixels"):
        LeNet5().create(10, (1, 28, 3))


@pytest.mark.parametrize("channels", [1, 3])
def test_channels_last_changes_the_layout_and_no_value(channels):
    images = torch.arange(2.0 * channels * 4 * 5).reshape(2, channels, 4, 5).requires_grad_()

    changed = ChannelsLast()(images)
    changed.square().sum().backward()

    assert changed.stride() == (channels * 20, 1, 5 * channels, channels)
    assert torch.equal(changed, images)
    assert torch.equal(images.grad, 2 * images)
