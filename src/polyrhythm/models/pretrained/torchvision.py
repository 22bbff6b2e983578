"""Weights that torchvision publishes for its networks, by their name there, as in `ResNet18_Weights.IMAGENET1K_V1`.

They are downloaded once, into the folder where torchvision itself keeps them (`TORCH_HOME`), and read without executing
anything in them. Auxiliary heads are omitted, as in the networks here. GoogLeNet and Inception were trained
on pixels from -1 to 1; torchvision hides that inside the networks, here `pixels` returns it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlparse

import torch

from polyrhythm.errors import RequestError
from polyrhythm.fetched_file import fetched
from polyrhythm.models.create import published_address
from polyrhythm.models.weights import read_tensors
from polyrhythm.specs import Config

if TYPE_CHECKING:
    from torch import Tensor, nn

_FROM_MINUS_ONE = ("GoogLeNet_", "Inception_")
_AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")


class Torchvision(Config):
    """Weights of torchvision.

    Attributes:
        weights: torchvision's name, such as `ResNet18_Weights.DEFAULT`.
    """

    weights: str

    @property
    def pixels(self) -> str:
        """The normalization of the images that they were trained on; see `Pretrained`."""
        return "centered" if self.weights.startswith(_FROM_MINUS_ONE) else "imagenet"

    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the weights; see `Pretrained.tensors`.

        Raises:
            RequestError: there are no such weights, or they cannot be downloaded.
        """
        address = published_address(self.weights)
        name = Path(urlparse(address).path).name
        checksum = re.search(r"-([0-9a-f]{8,})\.", name)
        if checksum is None:
            raise RequestError(
                f"{address} does not contain its checksum: fetch it, and name the file as weights"
            )
        path = fetched(address, Path(torch.hub.get_dir()) / "checkpoints" / name, checksum[1])
        found = read_tensors(path)
        return {name: tensor for name, tensor in found.items() if not name.startswith(_AUXILIARY)}
