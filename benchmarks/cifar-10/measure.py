"""How long an epoch of recipes/cifar10.yaml takes on this machine.

CIFAR-10 itself is not needed: a folder in its binary format is made, with 50,000 + 10,000 drawn pictures of its size,
of ten classes that are easily told apart. A step costs the same whatever the pictures show; accuracies mean nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

RECIPE = Path(__file__).parents[2] / "recipes/cifar10.yaml"
PICTURES, FILES = 10_000, ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5")


def write(folder: Path) -> None:
    """Write CIFAR-10's six files: records of a label byte and 3 x 32 x 32 bytes, a class's pattern below noise."""
    draw = np.random.default_rng(0)
    patterns = draw.integers(64, 192, (10, 3, 32, 32))
    for name in (*FILES, "test_batch"):
        labels = draw.integers(0, 10, PICTURES)
        pixels = patterns[labels] + draw.integers(-64, 64, (PICTURES, 3, 32, 32))
        records = np.concatenate([labels[:, None], pixels.reshape(PICTURES, -1)], 1).astype(np.uint8)
        (folder / f"{name}.bin").write_bytes(records.tobytes())


def main() -> None:
    """Print a JSON object: seconds an epoch by the rate of training, and what it was measured by."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="cifar_resnet(depth=20)")
    parser.add_argument("--updates", type=int, help="of 128 pictures each, in place of a whole epoch (391)")
    arguments = parser.parse_args()
    length = f"updates: {arguments.updates}" if arguments.updates else "epochs: 1"
    with TemporaryDirectory() as scratch:
        write(Path(scratch))
        recipe = Path(scratch, "recipe.yaml")
        kept = [line for line in RECIPE.read_text().splitlines() if not line.startswith("epochs:")]
        recipe.write_text("\n".join([*kept, length]) + "\n")
        command = [sys.executable, "-m", "polyrhythm", "train", str(recipe), "--data", f"cifar10={scratch}"]
        more = ["--model", arguments.model, "--keep-checkpoints", "0", "--out", f"{scratch}/run", "--json"]
        said = subprocess.run([*command, *more], check=True, stdout=subprocess.PIPE, text=True)
    figures = json.loads(said.stdout)
    rate = float(figures["images_per_s"])
    found = {
        "model": arguments.model,
        "images": figures["steps"] * 128,
        "images_per_s": round(rate, 1),
        "seconds_per_epoch": round(len(FILES) * PICTURES / rate),
        "seconds_with_start_and_test": round(float(figures["seconds"])),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
