"""From a folder of photographs to a classifier, and to what it says of a picture that it has not seen.

    python examples/photographs.py
    python examples/photographs.py --strategy "parameter_server(servers=1)"

A folder with a folder a class is all that is needed; pass yours by --folder. Without it, pieces of the two photographs
that scikit-learn ships are cut out and written as one: of a temple, and of a flower.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import polyrhythm


def pieces_of_two_photographs(folder: Path, side: int = 48) -> Path:
    """Write squares of both photographs as JPEG files, a folder a class; return the folder of all."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    for name, picture in zip(("temple", "flower"), load_sample_images().images, strict=True):
        (folder / name).mkdir(parents=True)
        whole = Image.fromarray(picture)
        for top in range(0, whole.height - side, side):
            for left in range(0, whole.width - side, side):
                piece = whole.crop((left, top, left + side, top + side))
                piece.save(folder / name / f"{top:03}-{left:03}.jpg", quality=90)
    return folder


def main() -> None:
    """Train on the folder, and ask for one of its pictures."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--folder", help="a folder of pictures, a folder a class")
    options.add_argument("--strategy", default="synchronous")
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--epochs", type=int, default=6)
    options.add_argument("--out", default=None, help="the run folder")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(chosen.folder or pieces_of_two_photographs(Path(scratch) / "photographs"))
        run = polyrhythm.train(
            data=str(folder),
            model="lenet5",
            image_size=28,
            optimizer="adam(lr=0.002)",
            batch_size=16,
            strategy=chosen.strategy,
            workers=chosen.workers,
            epochs=chosen.epochs,
            out=chosen.out,
        )
        if run is None:  # not worker 0 of a run under torchrun
            return
        print(f"test top-1 {100 * run.figures['test_top1']:.1f} %")
        picture = sorted(folder.glob("*/*"))[-1]
        (answer,) = polyrhythm.predict(picture, run.folder)["images"]
        for found in answer["classes"]:
            print(
                f"{picture.parent.name}/{picture.name}: {found['class']} {100 * found['probability']:.1f} %"
            )


if __name__ == "__main__":
    main()
