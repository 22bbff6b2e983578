"""The mapping of EfficientNet-Lite0's weights, held to the network written out under the package's own names."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.datasets import load_sample_image
from torch import Tensor
from torch.nn import functional

from polyrhythm.data.images import NORMALIZATIONS
from polyrhythm.models.create import create_model
from polyrhythm.models.fine_tuning import start_from
from polyrhythm.models.pretrained.efficientnet_lite0 import EfficientNetLite0, _in_package, as_timm
from polyrhythm.models.weights import read_tensors

EPSILON = 1e-3
STAGES = (
    (1, 1, 3, 16),
    (2, 2, 3, 24),
    (2, 2, 5, 40),
    (3, 2, 3, 80),
    (3, 1, 5, 112),
    (4, 2, 5, 192),
    (1, 1, 3, 320),
)
"""Blocks, stride of the first, kernel and channels of each stage (Tan and Le, table 1)."""


def _blocks() -> list[tuple[int, int, int, int]]:
    """Lists stride, kernel, input and output channels of every block."""
    found, inputs = [], 32
    for blocks, stride, kernel, outputs in STAGES:
        for number in range(blocks):
            found.append((stride if number == 0 else 1, kernel, inputs, outputs))
            inputs = outputs
    return found


def _random_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made: dict[str, Tensor] = {}

    def convolution(name: str, *shape: int) -> None:
        scale = (2 / (shape[1] * shape[2] * shape[3])) ** 0.5
        made[f"{name}.weight"] = torch.randn(*shape, generator=generator) * scale

    def norm(name: str, channels: int) -> None:
        made[f"{name}.weight"] = torch.rand(channels, generator=generator) + 0.5
        made[f"{name}.bias"] = torch.randn(channels, generator=generator) * 0.1
        made[f"{name}.running_mean"] = torch.randn(channels, generator=generator) * 0.1
        made[f"{name}.running_var"] = torch.rand(channels, generator=generator) + 0.5
        made[f"{name}.num_batches_tracked"] = torch.tensor(7)

    convolution("_conv_stem", 32, 3, 3, 3)
    norm("_bn0", 32)
    for number, (_, kernel, inputs, outputs) in enumerate(_blocks()):
        name, wide = f"_blocks.{number}", inputs * (6 if number else 1)
        if number:
            convolution(f"{name}._expand_conv", wide, inputs, 1, 1)
            norm(f"{name}._bn0", wide)
        convolution(f"{name}._depthwise_conv", wide, 1, kernel, kernel)
        norm(f"{name}._bn1", wide)
        convolution(f"{name}._project_conv", outputs, wide, 1, 1)
        norm(f"{name}._bn2", outputs)
    convolution("_conv_head", 1280, 320, 1, 1)
    norm("_bn1", 1280)
    made["_fc.weight"] = torch.randn(1000, 1280, generator=generator) * 0.05
    made["_fc.bias"] = torch.randn(1000, generator=generator)
    return made


def _reference(given: dict[str, Tensor], x: Tensor) -> Tensor:
    """Computes the network from the package's tensors with nothing but functions; TensorFlow's SAME padding."""

    def convolved(name: str, x: Tensor, stride: int = 1, groups: int = 1) -> Tensor:
        weight = given[f"{name}.weight"]
        kernel, side = weight.shape[-1], x.shape[-1]
        pad = max((-(-side // stride) - 1) * stride + kernel - side, 0)
        x = functional.pad(x, (pad // 2, pad - pad // 2, pad // 2, pad - pad // 2))
        return functional.conv2d(x, weight, stride=stride, groups=groups)

    def normed(name: str, x: Tensor) -> Tensor:
        mean, variance = given[f"{name}.running_mean"], given[f"{name}.running_var"]
        return functional.batch_norm(
            x, mean, variance, given[f"{name}.weight"], given[f"{name}.bias"], eps=EPSILON
        )

    x = functional.relu6(normed("_bn0", convolved("_conv_stem", x, 2)))
    for number, (stride, _, inputs, outputs) in enumerate(_blocks()):
        name, before = f"_blocks.{number}", x
        if number:
            x = functional.relu6(normed(f"{name}._bn0", convolved(f"{name}._expand_conv", x)))
        x = convolved(f"{name}._depthwise_conv", x, stride, groups=x.shape[1])
        x = functional.relu6(normed(f"{name}._bn1", x))
        x = normed(f"{name}._bn2", convolved(f"{name}._project_conv", x))
        if stride == 1 and inputs == outputs:
            x = x + before
    x = functional.relu6(normed("_bn1", convolved("_conv_head", x)))
    return functional.linear(x.mean((2, 3)), given["_fc.weight"], given["_fc.bias"])


def test_timms_network_with_the_renamed_weights_gives_the_same_outputs() -> None:
    given = _random_tensors()
    model = create_model("timm.tf_efficientnet_lite0", classes=1000, image_shape=(3, 64, 64)).eval()
    model.load_state_dict(as_timm(given))  # strict: every name once
    pictures = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(1)) * 2 - 1
    with torch.no_grad():
        expected = _reference(given, pictures)
        assert expected.std() > 0.1
        torch.testing.assert_close(model(pictures), expected, rtol=1e-3, atol=1e-3)


def test_the_packages_weights_give_the_outputs_of_the_network_written_out() -> None:
    given = read_tensors(_in_package())
    model = create_model("timm.tf_efficientnet_lite0", classes=1000, image_shape=(3, 160, 160)).eval()
    start_from(model, "efficientnet_lite0")
    photographs = np.stack(
        [load_sample_image(name)[100:260, 200:360] for name in ("china.jpg", "flower.jpg")]
    )
    pictures = NORMALIZATIONS[EfficientNetLite0.pixels](torch.from_numpy(photographs))
    with torch.no_grad():
        expected = _reference(given, pictures)
        torch.testing.assert_close(model(pictures), expected, rtol=1e-4, atol=1e-4)
    assert expected.softmax(1).max(1).values.min() > 0.2  # trained weights have a mind of their own
