"""Views of an image for a test: center, corners, the whole image; at several scales, mirrored as well.

A. Krizhevsky, I. Sutskever, G. Hinton, NIPS 2012 (ten crops); K. Simonyan, A. Zisserman, ICLR 2015, arXiv:1409.1556
(dense, scales, flips); R. Wu and others, "Deep Image", 2015, arXiv:1501.02876 (scales, models).

    p = mean over scales, mirrorings and crops of softmax(z),      dense: z = mean over positions of the scores

Scores are averaged within an image and probabilities between images.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from copy import copy
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from polyrhythm.data.images import CENTRAL_SHARE
from polyrhythm.data.resized import whole_pictures
from polyrhythm.errors import RequestError
from polyrhythm.evaluation.dense import DenseNetwork, NotConvertible, SlidingWindows, to_dense

if TYPE_CHECKING:
    from polyrhythm.data.dataset import Split

Scorer = Callable[[Tensor], Tensor]
"""Maps images (B, C, H, W) to logits (B, classes)."""


@dataclass(frozen=True, kw_only=True)
class Views:
    """The views of each image that are averaged.

    Attributes:
        dense: the network is applied at every position of the whole image.
        ten_crop: the four corners and the center, and their mirror images.
        flip: the image and its mirror image.
        scales: lengths of the shorter side, in pixels; empty: 256/224 of the training size for `dense` and
            `ten_crop`, the original image otherwise.

    Raises:
        RequestError: `dense` and `ten_crop` together, or a scale below one.
    """

    dense: bool = False
    ten_crop: bool = False
    flip: bool = False
    scales: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.dense and self.ten_crop:
            raise RequestError("--dense looks at every place, --ten-crop at ten: give one of them")
        if any(scale < 1 for scale in self.scales):
            raise RequestError(f"scale {min(self.scales)} is too small: give the pixels of the shorter side")

    @classmethod
    def taken_from(cls, asked: dict[str, Any]) -> Views:
        """Return the views that options ask for, which are removed from them."""
        given = {each.name: asked.pop(each.name) for each in fields(cls) if each.name in asked}
        return cls(**given | {"scales": tuple(given.get("scales") or ())})

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON-able dict."""
        return asdict(self) | {"scales": list(self.scales)}

    @property
    def plain(self) -> bool:
        """Whether the only view is the image itself."""
        return not (self.dense or self.ten_crop or self.flip or self.scales)

    def at_scale_of(self, image_shape: tuple[int, int, int], shown: float) -> Views:
        """Return the same; where a scale is needed and none was given, the one that the network was trained at.

        Args:
            image_shape: (C, H, W) of training images.
            shown: side of the views, as a share of an image's shorter side.
        """
        if self.scales or not (self.dense or self.ten_crop):
            return self
        return replace(self, scales=(round(min(image_shape[1:]) / shown),))


class ViewedClassifier:
    """A network with its views of a split's images.

    Args:
        model: maps (B, C, H, W) to logits (B, classes), on `device`.
        split: the images.
        views: views to be averaged.
        image_shape: (C, H, W) of the network's training images.
        device: device where the model is.

    Attributes:
        split: the argument of that name.
        views: the argument of that name.
        method: computation of dense scores: `convolutional`, `sliding windows (reason)`, or empty.

    Raises:
        RequestError: a scale is below the size of the training images.
    """

    def __init__(
        self,
        model: nn.Module,
        split: Split,
        views: Views,
        image_shape: tuple[int, int, int],
        device: torch.device | str = "cpu",
    ) -> None:
        self.split = split
        self.views = views
        self._shape = image_shape
        self._device = device
        self.method = ""
        side = min(image_shape[1:])
        larger = round(side / CENTRAL_SHARE) if views.dense or views.ten_crop else None
        self._scales: tuple[int | None, ...] = views.scales or (larger,)
        if views.scales and min(views.scales) < side:
            raise RequestError(
                f"scale {min(views.scales)} is below the {side} pixels that the network was trained on: "
                f"give {side} or more"
            )
        self._scorer: Scorer = self._dense(model) if views.dense else model

    def over(self, split: Split) -> ViewedClassifier:
        """Return the same network with the same views of another split's images."""
        other = copy(self)
        other.split = split
        return other

    def _dense(self, model: nn.Module) -> Scorer:
        dense: DenseNetwork | SlidingWindows
        try:
            dense = to_dense(model, self._shape)
            self.method = "convolutional"
        except NotConvertible as error:
            dense = SlidingWindows(model, self._shape[1:])
            self.method = f"sliding windows ({error})"
        return dense

    def probabilities(self, indices: Tensor) -> Tensor:
        """Return the class probabilities (B, classes), float32, of the images with numbers `indices`, (B,) int64."""
        return torch.stack([self._at(scale, indices) for scale in self._scales]).mean(0)

    def _at(self, scale: int | None, indices: Tensor) -> Tensor:
        if scale is None:
            return self._mirrored(self.split.images(indices))
        images = whole_pictures(self.split, indices, scale)
        crop = (lambda images: images) if self.views.dense else self._crops
        found: list[Tensor] = [torch.empty(0)] * len(images)
        for members in _by_shape(images).values():  # one shape a batch: photographs differ in length
            seen = self._mirrored(crop(torch.stack([images[index] for index in members])))
            for row, index in enumerate(members):
                found[index] = seen.view(-1, len(members), seen.shape[1])[:, row].mean(0)
        return torch.stack(found)

    def _crops(self, images: Tensor) -> Tensor:
        """Cut pieces of training size out of images of one shape, position by position: (positions B, C, h, w)."""
        height, width = self._shape[1:]
        bottom, right = images.shape[2] - height, images.shape[3] - width
        places = [(bottom // 2, right // 2)]
        if self.views.ten_crop:
            places += [(0, 0), (0, right), (bottom, 0), (bottom, right)]
        return torch.cat([images[:, :, top : top + height, left : left + width] for top, left in places])

    def _mirrored(self, images: Tensor) -> Tensor:
        own = self._softmax(images)
        if not (self.views.flip or self.views.ten_crop):
            return own
        return (own + self._softmax(images.flip(3))) / 2

    def _softmax(self, images: Tensor) -> Tensor:
        return self._scorer(images.to(self._device)).float().softmax(1)


def _by_shape(images: list[Tensor]) -> dict[torch.Size, list[int]]:
    found: dict[torch.Size, list[int]] = defaultdict(list)
    for index, picture in enumerate(images):
        found[picture.shape].append(index)
    return found
