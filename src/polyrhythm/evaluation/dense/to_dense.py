"""Dense evaluation: a network trained on small pictures is applied at every place of a larger one.

P. Sermanet and others, "OverFeat", ICLR 2014, arXiv:1312.6229; K. Simonyan, A. Zisserman, "Very deep convolutional
networks for large-scale image recognition", ICLR 2015, arXiv:1409.1556, section 3.2.

    flatten (C, h, w) then Linear (F, C h w)   becomes   a convolution (F, C, h, w)     weights in the order C, h, w
    later Linear (F, D)                        becomes   a convolution (F, D, 1, 1)
    mean over the whole map (h, w)             becomes   a mean over every window (h, w), one place apart

h and w are the sides of the map at training size, so on such a picture nothing changes; on a larger one there is a
score a place, and they are averaged. What the papers do not have: networks that end in global pooling, whose pooling
keeps the size that it had in training. Squeeze-and-excitation and the padding of convolutions see the whole picture,
not the window: there dense scores and those of windows that are cut out differ.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from polyrhythm.evaluation.dense.conversion import Conversion
from polyrhythm.evaluation.dense.graph import traced
from polyrhythm.evaluation.dense.network import DenseNetwork, NotConvertible

_TOLERANCE = 1e-4


def to_dense(model: nn.Module, image_shape: tuple[int, int, int]) -> DenseNetwork:
    """Makes a network fully convolutional; the two share their weights' values, not their memory.

    Args:
        model: maps pictures (B, C, H, W) of its training size to logits (B, classes); not changed.
        image_shape: (C, H, W) of the pictures that it was trained on.

    Raises:
        NotConvertible: it cannot be, or what came out gives other scores at training size.
    """
    training = [module.training for module in model.modules()]
    model.eval()
    try:
        probe = _probe(model, image_shape)
        with torch.no_grad():
            dense = DenseNetwork(Conversion(traced(model, probe)).converted()).eval()
            _check(model, dense, probe)
    except NotConvertible:
        raise
    except Exception as error:  # a network can be built, and fail to be traced, in any way
        raise NotConvertible(f"it cannot be traced ({' '.join(str(error).split())[:120]})") from error
    finally:
        for module, flag in zip(model.modules(), training, strict=True):
            module.training = flag
    return dense


def _probe(model: nn.Module, image_shape: tuple[int, int, int]) -> Tensor:
    weight = next(model.parameters())
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, *image_shape, generator=generator).to(weight.device, weight.dtype)


def _check(model: nn.Module, dense: DenseNetwork, probe: Tensor) -> None:
    expected, found = model(probe), dense(probe)
    if found.shape != expected.shape:
        raise NotConvertible(f"it gives {tuple(found.shape)} where the network gives {tuple(expected.shape)}")
    scale = float(expected.abs().max()) + 1.0
    if float((found - expected).abs().max()) > _TOLERANCE * scale:
        raise NotConvertible("what came out gives other scores at training size")
    try:
        dense(nn.functional.pad(probe, (0, 64, 0, 64)))
    except Exception:  # as above
        raise NotConvertible("its layers take pictures of one size only") from None
