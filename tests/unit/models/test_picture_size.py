import pytest
import torch
from torch import nn

from polyrhythm.errors import RequestError
from polyrhythm.models.create import check_image_size, create_model


class NotOnShapes(nn.Module):
    """Looks at values, so that it cannot be run on shapes alone; and needs at least `side` pixels."""

    def __init__(self, side):
        super().__init__()
        self.side = side
        self.linear = nn.Linear(1, 3)

    def forward(self, images):
        if images.mean().item() != 0 or images.shape[-1] < self.side:
            raise ValueError("too\n small")
        return self.linear(torch.dropout(images, 0.5, train=True).mean((1, 2, 3))[:, None])


def test_the_size_that_is_offered_works_and_the_pictures_given_do_not():
    with pytest.raises(RequestError, match=r"alexnet does not support images of 28x28.*give --image-size 64"):
        create_model("alexnet", classes=10, image_shape=(1, 28, 28))
    assert create_model("alexnet", classes=10, image_shape=(1, 64, 64))(torch.zeros(2, 1, 64, 64)).shape == (
        2,
        10,
    )


def test_a_network_that_cannot_be_run_on_shapes_is_run_on_numbers():
    model = NotOnShapes(8)
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)

    check_image_size(model, "odd", 3, (1, 8, 8))

    assert torch.equal(torch.rand(2), expected)  # its dropout drew nothing from the caller's generator


def test_its_own_reason_is_told_where_no_size_is_known():
    with pytest.raises(
        RequestError, match=r"odd does not support images of 7x7 \(too small\): give another --image-size"
    ):
        check_image_size(NotOnShapes(8), "odd", 3, (1, 7, 7))


def test_what_gives_no_logits_is_no_classifier():
    with pytest.raises(
        RequestError, match=r"encoder is not a classifier: its output is \(2, 4, 6, 6\), not \(2, 10\)"
    ):
        check_image_size(nn.Conv2d(1, 4, 3), "encoder", 10, (1, 8, 8))


def test_the_network_is_left_as_it_was():
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16), nn.Linear(16, 3))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    check_image_size(model, "norm", 3, (1, 4, 4))

    assert model.training
    for name, tensor in model.state_dict().items():
        assert tensor.device.type == "cpu"
        assert torch.equal(tensor, before[name])
