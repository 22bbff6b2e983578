"""What the last layer of a network reads."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from polyrhythm.errors import RequestError
from polyrhythm.models.create import create_model
from polyrhythm.models.features import feature_function, head_layer, lower_part, set_head

SHAPE = (3, 64, 64)


@pytest.mark.parametrize("name", ["timm.resnet10t", "mobilenet_v3_small", "timm.tf_efficientnet_lite0"])
def test_the_head_on_the_features_is_the_network(name: str) -> None:
    model = create_model(name, classes=5, image_shape=SHAPE).eval()
    images = torch.randn(3, *SHAPE)
    features = feature_function(model, SHAPE)
    with torch.no_grad():
        torch.testing.assert_close(head_layer(model)(features(images)), model(images))


def test_a_head_that_is_set_is_used() -> None:
    model = create_model("timm.resnet10t", classes=5, image_shape=SHAPE).eval()
    weight, bias = torch.randn(5, 512), torch.randn(5)
    set_head(model, weight, bias)
    features = feature_function(model, SHAPE)
    images = torch.randn(2, *SHAPE)
    with torch.no_grad():
        torch.testing.assert_close(model(images), features(images) @ weight.T + bias)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (create_model("squeezenet1_1", classes=5, image_shape=SHAPE), "not a fully connected layer"),
        (nn.Sequential(nn.Flatten(), nn.Linear(3 * 64 * 64, 5), nn.ReLU()), "not that of its last layer"),
    ],
)
def test_a_head_that_is_not_linear_is_refused(model: nn.Module, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        feature_function(model.eval(), SHAPE)


def test_the_lower_part_holds_at_most_its_share() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 2))
    assert lower_part(model, 0.3) == "0"
    assert lower_part(model, 0.6) == "0,1.0"
    assert lower_part(model, 0.1) == ""
