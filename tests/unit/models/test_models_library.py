import pytest
import torch
from torch import nn

from polyrhythm.models.create import create_timm, create_torchvision


@pytest.mark.parametrize("channels", [1, 4])
def test_the_first_convolution_of_torchvision_takes_the_channels(channels):
    torch.manual_seed(0)
    rgb = create_torchvision("squeezenet1_1", 5, 3, {})
    model = create_torchvision("squeezenet1_1", 5, channels, {})

    first, expected = model.features[0], rgb.features[0]
    assert first.weight.shape == (64, channels, 3, 3)
    assert (first.stride, first.padding, first.dilation) == (
        expected.stride,
        expected.padding,
        expected.dilation,
    )
    # 576 or more normal numbers: their spread is within a few per cent of the library's
    assert first.weight.std().item() == pytest.approx(expected.weight.std().item(), rel=0.15)
    assert torch.equal(first.bias, torch.zeros(64))
    assert model(torch.zeros(2, channels, 32, 32)).shape == (2, 5)


def test_a_first_convolution_without_bias_stays_so():
    assert create_torchvision("resnet18", 5, 1, {}).conv1.bias is None


def test_three_channels_are_the_librarys_own():
    torch.manual_seed(0)
    model = create_torchvision("squeezenet1_1", 5, 3, {"dropout": 0.25})
    torch.manual_seed(0)
    from torchvision.models import squeezenet1_1

    expected = squeezenet1_1(num_classes=5, dropout=0.25)
    assert torch.equal(*(nn.utils.parameters_to_vector(each.parameters()) for each in (model, expected)))
    assert model.classifier[0].p == 0.25


@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_inceptions_give_plain_logits_in_training_too(name):
    model = create_torchvision(name, 5, 3, {})
    model = model.to("meta")
    assert model.training
    assert model(torch.empty(2, 3, 96, 96, device="meta")).shape == (2, 5)


def test_keys_reach_timm():
    model = create_timm("test_vit", 5, 1, {"img_size": 32, "drop_rate": 0.25})
    assert model(torch.zeros(2, 1, 32, 32)).shape == (2, 5)
    assert model.head_drop.p == 0.25
