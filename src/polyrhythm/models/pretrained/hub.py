"""Weights from a repository of the Hugging Face hub, where timm publishes those of its networks.

They are taken from the cache of other programs (`HF_HOME`), otherwise downloaded once into torch's folder for weights
(`TORCH_HOME`), as safetensors. The pixel normalization follows from `mean` in the repository's config.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from polyrhythm.errors import RequestError
from polyrhythm.fetched_file import fetched
from polyrhythm.models.weights import read_tensors
from polyrhythm.specs import Config

if TYPE_CHECKING:
    from torch import Tensor, nn

_CONFIG = "config.json"
_NORMALIZED = {(0.485, 0.456, 0.406): "imagenet", (0.5, 0.5, 0.5): "centered"}
"""(x / 255 - 0.5) / 0.5 equals `centered` up to half a gray level."""


class Hub(Config):
    """Weights of the hub.

    Attributes:
        repository: repository as `owner/name`, such as `timm/resnet18.a1_in1k`.
        file: name of the file in it.
        revision: a branch, a tag or a commit.
        address: URL of the hub.
    """

    repository: str
    file: str = "model.safetensors"
    revision: str = "main"
    address: str = "https://huggingface.co"

    @property
    def pixels(self) -> str:
        """The normalization of the images that they were trained on; see `Pretrained`.

        Raises:
            RequestError: the repository is not available, or its normalization is not supported.
        """
        config = self._hub_config()
        mean = tuple(config.get("pretrained_cfg", config).get("mean", (0.485, 0.456, 0.406)))
        if mean not in _NORMALIZED:
            raise RequestError(
                f"{self.repository} was trained on pixels of mean {mean}, which images here cannot have: take other "
                "weights, or name --pixels yourself"
            )
        return _NORMALIZED[mean]

    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the weights; see `Pretrained.tensors`.

        Raises:
            RequestError: the repository or the file is not available.
        """
        return read_tensors(self._fetched(self.file))

    def _hub_config(self) -> dict[str, Any]:
        try:
            found = json.loads(self._fetched(_CONFIG).read_text(encoding="utf-8"))
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise RequestError(
                f"{_CONFIG} of {self.repository} is not the description of a network: choose other weights"
            )
        return found

    def _fetched(self, name: str) -> Path:
        # imported here, as it takes a while
        from huggingface_hub import try_to_load_from_cache

        there = try_to_load_from_cache(self.repository, name, revision=self.revision)
        if isinstance(there, str):
            return Path(there)
        parts = (*self.repository.split("/"), self.revision, name)
        kept = Path(torch.hub.get_dir()) / "checkpoints" / "--".join(part.replace("/", "-") for part in parts)
        return fetched(f"{self.address}/{self.repository}/resolve/{self.revision}/{name}", kept)
