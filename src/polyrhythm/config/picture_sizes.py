"""The sizes of pictures that a run sees, and how they come about."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from polyrhythm.augmentation.chain import Chain
from polyrhythm.augmentation.tones import Tones
from polyrhythm.augmentation.transforms.window import Window
from polyrhythm.config.run_config import RunConfig
from polyrhythm.data.dataset import Dataset
from polyrhythm.errors import RequestError
from polyrhythm.models.picture_size import check_picture_size
from polyrhythm.specs import build
from polyrhythm.training.size_schedule import SizeSchedule

SIZE_SCHEDULES = "polyrhythm.training.size_schedules"


def chain_from(config: RunConfig, chain: Chain | None, dataset: Dataset) -> Chain | None:
    """Gives what changes the training pictures of a data set: first a window, where pictures are larger than that."""
    if config.scale is not None:
        window = Window(size=dataset.image_shape[1])
        chain = Chain((window, *(chain.transforms if chain else ())))
    return None if chain is None else chain.on(Tones(dataset.black, dataset.white))


def size_schedule_from(
    config: RunConfig, dataset: Dataset, make_model: Callable[[], nn.Module]
) -> SizeSchedule:
    """Makes the schedule of picture sizes, and tries the network on all of them.

    Raises:
        RequestError: an unknown schedule, a size beyond that of the pictures, or one that the network cannot take.
    """
    schedule = build("size schedule", str(config.size_schedule), SIZE_SCHEDULES)
    assert isinstance(schedule, SizeSchedule)
    channels, *shape = dataset.image_shape
    epochs = config.epochs or dataset.default_epochs
    sides = {schedule.side(epoch, epochs, min(shape)) for epoch in range(epochs)} - set(shape)
    if not sides:
        return schedule
    if shape[0] != shape[1]:
        raise RequestError(f"size schedule {schedule} needs square pictures: give an --image-size")
    with torch.random.fork_rng(devices=[]):
        model = make_model()
    for side in sorted(sides):
        try:
            check_picture_size(model, "", len(dataset.classes), (channels, side, side))
        except RequestError:
            raise RequestError(
                f"size schedule {schedule} shows pictures of {side} pixels, which the model cannot take: give other "
                "sizes, or a network that ends in a global pooling, such as resnet18"
            ) from None
    return schedule
