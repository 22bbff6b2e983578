import pytest
import torch
from torch import nn

from polyrhythm.errors import RequestError
from polyrhythm.models.create import create_model


def weights(model: nn.Module) -> int:
    return sum(layer.weight.numel() for layer in model.modules() if isinstance(layer, nn.Conv2d | nn.Linear))


def test_the_papers_network_has_the_papers_layers_and_weights():
    with torch.device("meta"):
        model = create_model("deep_image", classes=1000, image_shape=(3, 224, 224))
    layers = [layer for layer in model if isinstance(layer, nn.Conv2d | nn.Linear)]
    assert [layer.weight.shape[0] for layer in layers] == [
        *(64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512, 6144, 6144, 1000)
    ]
    assert weights(model) == 14_710_464 + 198_033_408 == 212_743_872


def test_the_papers_larger_options():
    with torch.device("meta"):
        model = create_model("deep_image(width=1024, hidden=8192)", classes=10, image_shape=(3, 224, 224))
        assert model(torch.empty(2, 3, 224, 224, device="meta")).shape == (2, 10)
    assert model[-1].weight.shape == (10, 8192)


@pytest.mark.parametrize(
    ("side", "convolutions"), [(6, 2), (28, 7), (32, 7), (48, 10), (64, 10), (96, 13), (224, 13)]
)
def test_small_pictures_pass_fewer_stages(side, convolutions):
    model = create_model("deep_image(width=16, hidden=8)", classes=3, image_shape=(1, side, side + 1))
    assert sum(isinstance(layer, nn.Conv2d) for layer in model) == convolutions
    assert model.eval()(torch.zeros(2, 1, side, side + 1)).shape == (2, 3)


@pytest.mark.parametrize(
    ("spec", "side", "message"),
    [
        ("deep_image", 5, "needs 6 pixels or more"),
        ("deep_image(width=20)", 28, "multiple of 8"),
    ],
)
def test_what_cannot_be_is_refused(spec, side, message):
    with pytest.raises(RequestError, match=message):
        create_model(spec, classes=3, image_shape=(1, side, side))


def test_signals_keep_their_size_through_all_layers():
    """Without the right beginning, those of a deep network of rectifiers vanish."""
    torch.manual_seed(0)
    model = create_model("deep_image(width=64, hidden=128, dropout=0)", classes=10, image_shape=(3, 96, 96))
    logits = model(torch.randn(8, 3, 96, 96))
    assert 0.2 < logits.std().item() < 10
