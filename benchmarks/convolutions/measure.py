"""How long do the methods of a convolution take, next to the counts of `polyrhythm analyze`?

    python benchmarks/convolutions/measure.py [--rounds 5] [--out benchmarks/convolutions]

Layers of VGG at 224 pixels, 3x3 filters, 4 images, forward pass in one thread. `direct` is PyTorch's convolution; the
others are made of PyTorch's products of matrices and transforms. Processor seconds, least of the rounds, in turns.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from polyrhythm.cost.convolution import Convolution, methods

LAYERS = ((64, 64, 112), (128, 128, 56), (256, 256, 28), (512, 512, 14))
"""Channels, filters and side."""
IMAGES = 4
TO_DATA = torch.tensor([[1.0, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]], dtype=torch.float32)
TO_FILTER = torch.tensor([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]], dtype=torch.float32)
TO_OUTPUT = torch.tensor([[1.0, 1, 1, 0], [0, 1, -1, -1]], dtype=torch.float32)
"""The matrices of F(2,3): Lavin, Gray, CVPR 2016."""


def direct(images: Tensor, filters: Tensor) -> Tensor:
    """PyTorch's own."""
    return functional.conv2d(images, filters, padding=1)


def im2col(images: Tensor, filters: Tensor) -> Tensor:
    """One product of matrices."""
    patches = functional.unfold(images, 3, padding=1)
    return (filters.flatten(1) @ patches).view(len(images), len(filters), *images.shape[2:])


def fft(images: Tensor, filters: Tensor) -> Tensor:
    """A product of spectra, summed over channels."""
    side = images.shape[-1] + 2
    spectra = torch.fft.rfft2(functional.pad(images, (1, 1, 1, 1)))
    kernels = torch.fft.rfft2(filters, (side, side)).conj()
    summed = torch.einsum("bchw,fchw->bfhw", spectra, kernels)
    return torch.fft.irfft2(summed, (side, side))[..., : side - 2, : side - 2]


def winograd(images: Tensor, filters: Tensor) -> Tensor:
    """F(2,3)."""
    side = images.shape[-1]
    tiles = functional.pad(images, (1, 1, 1, 1)).unfold(2, 4, 2).unfold(3, 4, 2)
    data = TO_DATA @ tiles @ TO_DATA.T
    weights = TO_FILTER @ filters @ TO_FILTER.T
    products = torch.einsum("bctuij,fcij->bftuij", data, weights)
    outputs = TO_OUTPUT @ products @ TO_OUTPUT.T
    return outputs.permute(0, 1, 2, 4, 3, 5).reshape(len(images), len(filters), side, side)


METHODS = {"direct": direct, "im2col": im2col, "fft": fft, "winograd": winograd}


def main() -> None:
    """Measure all layers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for channels, outputs, side in LAYERS:
        draw = torch.Generator().manual_seed(0)
        images = torch.randn(IMAGES, channels, side, side, generator=draw)
        filters = torch.randn(outputs, channels, 3, 3, generator=draw) / 30
        shape = Convolution(
            images=IMAGES,
            channels=channels,
            filters=outputs,
            input_size=(side, side),
            output_size=(side, side),
            kernel=(3, 3),
            padding=(1, 1),
        )
        counted = {method.name.partition(" ")[0]: method for method in methods(shape)}
        expected, seconds = direct(images, filters), dict.fromkeys(METHODS, float("inf"))
        for _ in range(chosen.rounds):
            for name, method in METHODS.items():
                began = time.process_time()
                found = method(images, filters)
                seconds[name] = min(seconds[name], time.process_time() - began)
                assert torch.allclose(found, expected, atol=1e-3), name
        row = {
            name: {
                "multiply_adds": counted[name].multiply_adds,
                "depth": counted[name].depth,
                "ms": round(1000 * seconds[name], 1),
            }
            for name in METHODS
        }
        rows.append({"channels": channels, "side": side, **row})
        shown = [
            f"{each['multiply_adds'] / 1e9:.2f} G, {each['depth']}, {each['ms']:.0f} ms"
            for each in row.values()
        ]
        print(f"| {channels} at {side} | {' | '.join(shown)} |", flush=True)
    if chosen.out is not None:
        (chosen.out / "results.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
