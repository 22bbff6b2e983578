"""How accurate are networks of few bits, trained on several workers, and what does int8 gain in inference?

    python benchmarks/quantized/measure.py training [--seeds 3] [--out benchmarks/quantized]
    python benchmarks/quantized/measure.py int8 [--epochs 2] [--out benchmarks/quantized]

*Training*: weights and activations of a network are rounded to 1, 2 or 8 bits in every pass; gradients pass the
rounding unchanged to weights of 32 bits, which the workers exchange. The network is a module of the user's own, and the
library needs no option for it:

    Zhou et al., "DoReFa-Net", 2016, arXiv 1606.06160, equations 5, 7, 9 and 11

    round_k(x)     round((2^k - 1) x) / (2^k - 1)                  x in [0, 1]
    weights        k = 1: mean(|w|) sign(w);   else 2 round_k(tanh(w) / (2 max|tanh(w)|) + 1/2) - 1
    activations    round_k(clip(a, 0, 1))                          not of the images

The mean of |w| is of the whole layer. First and last layer are rounded as well, unlike there.

*int8*: `polyrhythm.export` writes a trained network, and onnxruntime rounds its weights and activations to 8 bits after
training, with ranges of 512 training images.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from onnxruntime import InferenceSession, SessionOptions
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process
from torch import Tensor, nn
from torch.nn import functional as F

import polyrhythm
from polyrhythm.data.sources.fashion_mnist import FashionMNIST

BITS = (32, 8, 2, 1)
BATCH = 64


def rounded(values: Tensor, bits: int) -> Tensor:
    """Return values of [0, 1] rounded to 2^bits levels; the gradient is that of the identity."""
    levels = 2**bits - 1
    return values + (torch.round(values * levels) / levels - values).detach()


def few_bits(weights: Tensor, bits: int) -> Tensor:
    """Return weights of so many bits."""
    if bits == 32:
        return weights
    if bits == 1:
        return weights + (torch.sign(weights) * weights.abs().mean() - weights).detach()
    scaled = torch.tanh(weights)
    return 2 * rounded(scaled / (2 * scaled.abs().max()) + 0.5, bits) - 1


class Activation(nn.Module):
    """Clips to [0, 1] and rounds."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits

    def forward(self, values: Tensor) -> Tensor:
        clipped = values.clamp(0, 1)
        return clipped if self.bits == 32 else rounded(clipped, self.bits)


class Convolution(nn.Conv2d):
    """A convolution with weights of few bits."""

    bits = 32

    def forward(self, images: Tensor) -> Tensor:
        return F.conv2d(images, few_bits(self.weight, self.bits), padding=1)


class Linear(nn.Linear):
    """A fully connected layer with weights of few bits."""

    bits = 32

    def forward(self, values: Tensor) -> Tensor:
        return F.linear(values, few_bits(self.weight, self.bits), self.bias)


def network(bits: int) -> nn.Module:
    """Return a network for images of 8 by 8 pixels and 10 classes."""
    made = nn.Sequential(
        *(Convolution(1, 32, 3, bias=False), nn.BatchNorm2d(32), Activation(bits), nn.MaxPool2d(2)),
        *(Convolution(32, 64, 3, bias=False), nn.BatchNorm2d(64), Activation(bits), nn.MaxPool2d(2)),
        *(nn.Flatten(), Linear(256, 10)),
    )
    for layer in made:
        if isinstance(layer, Convolution | Linear):
            layer.bits = bits
    return made


def top1(bits: int, seed: int) -> float:
    """Return the test accuracy in percent of a network trained by four synchronous workers in virtual time."""
    torch.manual_seed(seed)
    with TemporaryDirectory() as folder:
        run = polyrhythm.simulate(
            cluster="office",
            data="digits",
            model=network(bits),
            workers=4,
            optimizer="adam(lr=0.003)",
            batch_size=16,
            epochs=15,
            seed=seed,
            out=Path(folder) / "run",
        )
    return 100 * float(run.figures["test_top1"])


def training(seeds: int, out: Path) -> None:
    """Write the accuracies of all numbers of bits."""
    rows = []
    for bits in BITS:
        found = [top1(bits, seed) for seed in range(seeds)]
        rows.append({"bits": bits, "top1": [round(each, 1) for each in found]})
        print(bits, f"{statistics.mean(found):.1f} ± {statistics.stdev(found):.1f}", flush=True)
        (out / "training.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


class Batches(CalibrationDataReader):  # type: ignore[misc]
    """Batches of images for the ranges of activations."""

    def __init__(self, images: NDArray[np.uint8]) -> None:
        self._batches: Iterator[NDArray[np.uint8]] = iter(np.split(images, -(-len(images) // BATCH)))

    def get_next(self) -> dict[str, Any] | None:
        batch = next(self._batches, None)
        return None if batch is None else {"pictures": batch}


def to_int8(written: Path, images: NDArray[np.uint8]) -> Path:
    """Write an ONNX file with weights and activations of 8 bits next to another; return its path."""
    prepared, made = written.with_suffix(".prepared.onnx"), written.with_suffix(".int8.onnx")
    quant_pre_process(str(written), str(prepared), skip_symbolic_shape=True)
    quantize_static(  # with activations of int8 instead of uint8, an Xeon takes as long as for float32
        str(prepared), str(made), Batches(images), per_channel=True, activation_type=QuantType.QUInt8
    )
    return made


def session(path: Path) -> InferenceSession:
    """Return a session of one thread."""
    options = SessionOptions()
    options.intra_op_num_threads = 1
    return InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def compared(files: dict[str, Path], images: NDArray[np.uint8], rounds: int) -> dict[str, float]:
    """Return the processor milliseconds of a batch of each file, the least of all rounds, by turns."""
    sessions = {name: session(path) for name, path in files.items()}
    least = dict.fromkeys(files, float("inf"))
    for _ in range(rounds):
        for name, each in sessions.items():
            began = time.process_time()
            each.run(None, {"pictures": images})
            least[name] = min(least[name], 1000 * (time.process_time() - began))
    return {name: round(value, 2) for name, value in least.items()}


def accuracy(path: Path, images: NDArray[np.uint8], labels: NDArray[np.int64]) -> float:
    """Return the accuracy of a file in percent."""
    each = session(path)
    found = [
        each.run(None, {"pictures": images[at : at + 500]})[0].argmax(1) for at in range(0, len(images), 500)
    ]
    return 100 * float((np.concatenate(found) == labels).mean())


def int8(epochs: int, out: Path) -> None:
    """Write accuracy, time and bytes of a trained `lenet5`, and time and bytes of a ResNet-18, both as int8 and not."""
    rows = []
    with TemporaryDirectory() as folder:
        at = Path(folder)
        polyrhythm.train(
            model="lenet5", epochs=epochs, workers=2, seed=0, out=at / "lenet5", start_method="fork"
        )
        draw = np.random.default_rng(0)
        data = FashionMNIST().load()
        known = pixels(data.train.images(torch.arange(512)))
        tests = pixels(data.test.images(torch.arange(len(data.test))))
        torch.manual_seed(0)
        polyrhythm.train(
            model="resnet18",
            data="synthetic(classes=10, size=224, train=20, test=10)",
            updates=1,
            batch_size=2,
            workers=1,
            seed=0,
            out=at / "resnet18",
            start_method="fork",
        )
        noise = draw.integers(0, 256, (16, 3, 224, 224), dtype=np.uint8)
        for name, calibration, timed in (
            ("lenet5", known, known[:BATCH]),
            ("resnet18", noise, noise[:8]),
        ):
            written = at / f"{name}.onnx"
            polyrhythm.export(at / name, written)
            files = {"float32": written, "int8": to_int8(written, calibration)}
            milliseconds = compared(files, timed, 20 if name == "resnet18" else 200)
            for kind, path in files.items():
                row: dict[str, Any] = {
                    "network": name,
                    "numbers": kind,
                    "images": len(timed),
                    "milliseconds": milliseconds[kind],
                    "bytes": path.stat().st_size,
                }
                if name == "lenet5":
                    row["top1"] = round(accuracy(path, tests, data.test.labels.numpy()), 2)
                rows.append(row)
                print(row, flush=True)
    found = {"load": round(os.getloadavg()[0]), "rows": rows}
    (out / "int8.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def pixels(images: Tensor) -> NDArray[np.uint8]:
    """Return images of a data set as bytes."""
    low, high = images.min(), images.max()
    return ((images - low) / (high - low) * 255).round().byte().numpy()


def main() -> None:
    """Measure one of the two."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("training", "int8"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/quantized"))
    chosen = parser.parse_args()
    if chosen.what == "training":
        training(chosen.seeds, chosen.out)
    else:
        int8(chosen.epochs, chosen.out)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
