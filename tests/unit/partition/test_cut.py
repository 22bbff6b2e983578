"""Where networks are cut, and which are not."""

import pytest
import torch
from torch import nn

from polyrhythm.errors import RequestError
from polyrhythm.models.create import create_model
from polyrhythm.partition.cut import cut


class Doubled(nn.Module):
    """Ends in a fully connected layer, and goes on after it."""

    def __init__(self):
        super().__init__()
        self.body = nn.Flatten()
        self.last = nn.Linear(4, 3)

    def forward(self, images):
        return 2 * self.last(self.body(images))


@pytest.mark.parametrize(
    ("spec", "shape", "widths"),
    [
        ("mlp(hidden=[7, 6], dropout=0.2)", (1, 8, 8), [(64, 7), (7, 6), (6, 10)]),
        ("lenet5(widths=[2, 3], hidden=9, dropout=0.3)", (1, 28, 28), [(48, 9), (9, 10)]),
        ("deep_image(width=8, hidden=12)", (3, 32, 32), [(64, 12), (12, 12), (12, 10)]),
        ("alexnet", (3, 64, 64), [(9216, 4096), (4096, 4096), (4096, 10)]),
        ("resnet18", (3, 32, 32), [(512, 10)]),
    ],
)
def test_the_two_parts_are_the_network(spec, shape, widths):
    torch.manual_seed(0)
    model = create_model(spec, classes=10, image_shape=shape).train()
    images = torch.randn(2, *shape)
    found = cut(model, images[:1])
    assert [(layer.linear.in_features, layer.linear.out_features) for layer in found.layers] == widths
    assert all(module.training for module in model.modules())
    model.eval()
    found.trunk.eval()
    assert found.trunk(images).shape == (2, found.features)
    assert torch.equal(found.whole(images), model(images))
    head = {id(parameter) for layer in found.layers for parameter in layer.linear.parameters()}
    trunk = {id(parameter) for parameter in found.trunk.parameters()}
    assert head.isdisjoint(trunk)
    assert head | trunk == {id(parameter) for parameter in model.parameters()}


def test_what_is_done_before_the_first_layer_belongs_to_the_trunk():
    model = create_model("alexnet", classes=10, image_shape=(3, 64, 64))
    found = cut(model, torch.zeros(1, 3, 64, 64))
    assert any(isinstance(module, nn.Dropout) for module in found.trunk.modules())
    assert [type(module) for module in found.layers[0].after] == [nn.ReLU, nn.Dropout]
    assert found.trains_trunk
    assert isinstance(model.classifier[1], nn.Linear)  # the network itself is whole


def test_a_trunk_without_parameters_learns_nothing():
    assert not cut(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), torch.zeros(1, 1, 2, 2)).trains_trunk


def shared():
    layer = nn.Linear(4, 4)
    return nn.Sequential(nn.Flatten(), layer, nn.LayerNorm(4), layer)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.LayerNorm(3)),
            "does not end in fully connected layers",
        ),
        (nn.Flatten(), "Flatten does not end in fully connected layers"),
        (Doubled(), "Doubled does more than its layers one after the other"),
        (shared(), "shares its weights with others"),
    ],
    ids=["norm last", "no layers", "more than its layers", "shared weights"],
)
def test_other_networks_are_refused_with_the_reason(model, words):
    with pytest.raises(RequestError, match=words) as caught:
        cut(model, torch.zeros(1, 1, 2, 2))
    assert "use a network that ends in nn.Linear layers, such as lenet5" in str(caught.value)
    assert "\n" not in str(caught.value)
