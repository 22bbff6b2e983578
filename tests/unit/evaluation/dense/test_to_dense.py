"""Fully convolutional networks, held to the networks that they were made of."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from polyrhythm.evaluation.dense import NotConvertible, SlidingWindows, to_dense
from polyrhythm.models.create import create_model

SMALL = (3, 64, 64)


def _network(spec: str, image_shape: tuple[int, int, int], classes: int = 7) -> nn.Module:
    torch.manual_seed(3)
    model = create_model(spec, classes=classes, image_shape=image_shape)
    for module in model.modules():  # statistics of nothing would hide a batch norm left out
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.uniform_(-0.1, 0.1)
            module.running_var.uniform_(0.8, 1.2)
    return model.eval()


def _pictures(image_shape: tuple[int, int, int], images: int = 3) -> Tensor:
    return torch.randn(images, *image_shape, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize(
    ("spec", "image_shape"),
    [
        ("mlp", (1, 8, 8)),
        ("lenet5", (1, 28, 28)),
        ("deep_image(width=16, hidden=24)", (3, 28, 28)),
        ("deep_image(width=16, hidden=24, batch_norm=True)", (1, 48, 48)),
        ("resnet18", SMALL),
        ("squeezenet1_1", SMALL),
        ("timm.tf_efficientnet_lite0", SMALL),
        ("timm.convnext_atto", SMALL),
    ],
)
def test_at_training_size_it_is_the_network_to_rounding(spec: str, image_shape: tuple[int, int, int]) -> None:
    model, pictures = _network(spec, image_shape), _pictures(image_shape)
    with torch.no_grad():
        expected, found = model(pictures), to_dense(model, image_shape)(pictures)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("side", [32, 36, 44])
def test_on_larger_pictures_it_is_the_mean_over_explicit_windows(side: int) -> None:
    model = _network("lenet5", (1, 28, 28))  # nothing padded, two poolings: a place every 4 pixels
    pictures = _pictures((1, side, side + 4))
    with torch.no_grad():
        dense = to_dense(model, (1, 28, 28))
        windows = [
            model(pictures[:, :, top : top + 28, left : left + 28])
            for top in range(0, side - 27, 4)
            for left in range(0, side - 23, 4)
        ]
        places = dense.score_map(pictures)
        assert places.shape[2] * places.shape[3] == len(windows)
        torch.testing.assert_close(dense(pictures), torch.stack(windows).mean(0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            SlidingWindows(model, (28, 28), stride=4)(pictures), dense(pictures), rtol=1e-4, atol=1e-5
        )


def test_global_pooling_keeps_the_window_that_it_had_in_training() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 2, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
        nn.Tanh(),
    )
    pictures = _pictures((1, 12, 12))
    with torch.no_grad():
        found = to_dense(model, (1, 8, 8))(pictures)
        expected = SlidingWindows(model, (8, 8), stride=2)(pictures)
    torch.testing.assert_close(found, expected)  # tanh: averaging over all places first would differ


def test_the_flattening_order_is_channels_rows_columns() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(2 * 3 * 4, 1, bias=False))
    model[1].weight.data = torch.arange(24.0)[None]
    picture = torch.zeros(1, 2, 3, 4)
    picture[0, 1, 2, 0] = 1
    with torch.no_grad():
        assert to_dense(model, (2, 3, 4)).score_map(picture).flatten().tolist() == [1 * 12 + 2 * 4 + 0]


def test_a_constant_picture_gives_a_constant_map_inside() -> None:
    model = _network("deep_image(width=16, hidden=24)", (1, 28, 28))
    with torch.no_grad():
        places = to_dense(model, (1, 28, 28)).score_map(torch.full((1, 1, 160, 160), 0.7))
    inside = places[:, :, 5:-5, 5:-5]  # the padding of the convolutions reaches so far
    assert inside.shape[-1] > 3
    torch.testing.assert_close(inside, inside[:, :, :1, :1].expand_as(inside))


def test_batch_norm_and_functions_in_the_head() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.hidden = nn.Conv2d(1, 2, 3), nn.Linear(2 * 4 * 4, 5)
            self.norm, self.out = nn.BatchNorm1d(5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x)
            x = self.norm(self.hidden(x.view(x.size(0), -1)))
            return self.out(nn.functional.relu(x))

    torch.manual_seed(1)
    model = Head().eval()
    model.norm.running_mean.uniform_(-1, 1)
    model.norm.running_var.uniform_(0.5, 2)
    pictures = _pictures((1, 9, 9))
    with torch.no_grad():
        expected = SlidingWindows(model, (6, 6), stride=1)(pictures)
        torch.testing.assert_close(to_dense(model, (1, 6, 6))(pictures), expected)


def test_what_cannot_be_converted_says_why() -> None:
    with pytest.raises(NotConvertible, match="pools to 7 places a side"):
        to_dense(create_model("vgg11", classes=2, image_shape=SMALL), SMALL)
    joined = nn.Sequential(nn.Flatten(), nn.Softmax(1), nn.Linear(4, 2))
    with pytest.raises(NotConvertible, match="its head has Softmax"):
        to_dense(joined, (1, 2, 2))
    attention = create_model("timm.vit_tiny_patch16_224(img_size=32)", classes=2, image_shape=(3, 32, 32))
    with pytest.raises(NotConvertible):
        to_dense(attention, (3, 32, 32))


def test_the_network_stays_as_it_was() -> None:
    model = _network("lenet5", (1, 28, 28)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    dense = to_dense(model, (1, 28, 28))
    for parameter in dense.parameters():
        parameter.data.zero_()
    assert all(module.training for module in model.modules())
    linear = [name for name in before if before[name].ndim == 2]
    assert linear
    for name in linear:
        assert torch.equal(model.state_dict()[name], before[name])
