"""Test pictures and what networks say of them, as SVG with the pictures inside: Deep Image's figures 6 to 9."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageFilter

Probabilities = NDArray[np.float32]
"""(pictures, classes)."""
Tested = tuple[list[Path], NDArray[np.int64], list[str]]
"""Files, the number of each one's class, and the names of the classes."""

_MOST = 6
_SIDE, _BAR, _ROW = 120, 120, 22
_RIGHT, _WRONG, _OTHER, _TEXT = "#35a06a", "#d1504a", "#b9c0cc", "#2b2f36"


def write_cases(
    path: Path, tested: Tested, before: tuple[str, Probabilities], after: tuple[str, Probabilities]
) -> dict[str, int]:
    """Draw the surest mistakes that are none afterwards, with the five likeliest classes before and afterwards.

    Args:
        path: of the file.
        tested: the pictures.
        before: what is said to be tested, and what it says.
        after: likewise.

    Returns:
        `rescued` and `lost`: of how many pictures a mistake became right, and the other way round.
    """
    files, truth, classes = tested
    was, now = before[1].argmax(1) == truth, after[1].argmax(1) == truth
    rescued = np.flatnonzero(~was & now)
    worst = rescued[np.argsort(-before[1].max(1)[rescued], kind="stable")][:_MOST]
    width, height = 2 * (_SIDE + 2 * (_BAR + 85) + 30), (_SIDE + 44) * -(-len(worst) // 2) + 10
    parts = []
    for place, index in enumerate(worst):
        left, top = (place % 2) * width // 2 + 10, (place // 2) * (_SIDE + 44) + 26
        parts.append(_text(left, top - 10, f"{classes[truth[index]]}", bold=True))
        parts.append(_picture(files[index], left, top))
        for column, (name, said) in enumerate((before, after)):
            across = left + _SIDE + 12 + column * (_BAR + 80)
            parts.append(_text(across, top - 10, name))
            parts.append(_bars(across, top, said[index], int(truth[index]), classes))
    _write(path, width, height, parts)
    return {"rescued": len(rescued), "lost": int((was & ~now).sum())}


def write_comparison(path: Path, tested: Tested, small: Probabilities, large: Probabilities) -> None:
    """Draw the picture whose class large pictures raise most, with every class: small, large and both together."""
    files, truth, classes = tested
    rows = np.arange(len(truth))
    rescued = (small.argmax(1) != truth) & (large.argmax(1) == truth)
    index = int(np.argmax((large[rows, truth] - small[rows, truth]) * (rescued + 1e-6)))
    ways = {"small pictures": small[index], "large pictures": large[index]}
    ways["both"] = (ways["small pictures"] + ways["large pictures"]) / 2
    parts = [_text(10, 16, classes[truth[index]], bold=True), _picture(files[index], 10, 26)]
    for column, (name, said) in enumerate(ways.items()):
        across = _SIDE + 30 + column * (_BAR + 85)
        parts += [
            _text(across, 16, name),
            _bars(across, 26, said, int(truth[index]), classes, len(classes), step=18),
        ]
    _write(path, _SIDE + 30 + 3 * (_BAR + 85), 40 + 18 * len(classes), parts)


def conditions(files: Sequence[Path], folder: Path) -> dict[str, list[Path]]:
    """Write pictures as they would look under conditions that training did not show; return the files of each."""
    changes = {
        "as it is": lambda image: image,
        "in the dark": lambda image: ImageEnhance.Brightness(image).enhance(0.4),
        "evening light": _evening,
        "out of focus": lambda image: image.filter(ImageFilter.GaussianBlur(3)),
        "tilted by 25°": lambda image: image.rotate(25, Image.Resampling.BICUBIC),
        "through fog": lambda image: Image.blend(image, Image.new("RGB", image.size, (225, 228, 232)), 0.55),
    }
    found: dict[str, list[Path]] = {}
    for name, change in changes.items():
        place = folder / name.replace(" ", "-").replace("°", "")
        found[name] = [place / f"{file.parent.name}-{file.name}" for file in files]
        if place.is_dir():
            continue
        place.mkdir(parents=True)
        for file, into in zip(files, found[name], strict=True):
            with Image.open(file) as image:
                change(image.convert("RGB")).save(into, quality=95)
    return found


def _evening(image: Image.Image) -> Image.Image:
    red, green, blue = image.split()
    return Image.merge(
        "RGB",
        (
            red.point(lambda v: min(255, round(1.2 * v))),
            green.point(lambda v: round(0.9 * v)),
            blue.point(lambda v: round(0.55 * v)),
        ),
    )


def write_conditions(
    path: Path,
    shown: dict[str, tuple[list[Path], dict[str, Probabilities]]],
    named: tuple[NDArray[np.int64], list[str]],
) -> None:
    """Draw four pictures under every condition, each with what each way says of it.

    They are those, of four classes, that the last way has right under most conditions, and the first under fewest.
    """
    truth, classes = named
    wins = np.zeros(len(truth))
    for _, ways in shown.values():
        *_, last = ways.values()
        first = next(iter(ways.values()))
        wins += 1.0 * (last.argmax(1) == truth) - 0.5 * (first.argmax(1) == truth)
    chosen: list[int] = []
    for index in np.argsort(-wins, kind="stable"):
        if truth[index] not in truth[chosen] and len(chosen) < 4:
            chosen.append(int(index))
    ways_count = len(next(iter(shown.values()))[1])
    cell, row = _SIDE + 60, _SIDE + 20 + 17 * ways_count
    parts = []
    for down, index in enumerate(chosen):
        for across, (name, (files, ways)) in enumerate(shown.items()):
            left, top = 10 + across * cell, 28 + down * row
            if down == 0:
                parts.append(_text(left, 16, name, bold=True))
            parts.append(_picture(files[index], left, top))
            for line, (way, said) in enumerate(ways.items()):
                likeliest = int(said[index].argmax())
                color = _RIGHT if likeliest == truth[index] else _WRONG
                parts.append(
                    _text(left, top + _SIDE + 15 + 16 * line, f"{way}: {classes[likeliest]}", color=color)
                )
    _write(path, 10 + cell * len(shown), 28 + row * len(chosen), parts)


def _bars(
    left: float,
    top: float,
    said: Probabilities,
    truth: int,
    classes: list[str],
    most: int = 5,
    step: int = _ROW,
) -> str:
    parts = []
    for place, index in enumerate(np.argsort(-said, kind="stable")[:most].tolist()):
        color = _RIGHT if index == truth else _WRONG if place == 0 else _OTHER
        down = top + place * step
        parts.append(
            f'<rect x="{left}" y="{down}" width="{max(1.0, _BAR * float(said[index])):.1f}" height="{step - 5}" '
            f'fill="{color}" fill-opacity="0.55"/>'
        )
        parts.append(_text(left + 4, down + step - 9, f"{classes[index]} {said[index]:.2f}"))
    return "".join(parts)


def _text(x: float, y: float, text: str, *, bold: bool = False, color: str = _TEXT) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x}" y="{y}" fill="{color}"{weight}>{escape(text)}</text>'


def _picture(file: Path, left: float, top: float) -> str:
    with Image.open(file) as image:
        small = image.convert("RGB").resize((_SIDE, _SIDE), Image.Resampling.LANCZOS)
    packed = io.BytesIO()
    small.save(packed, "JPEG", quality=85)
    return (
        f'<image x="{left}" y="{top}" width="{_SIDE}" height="{_SIDE}" '
        f'href="data:image/jpeg;base64,{base64.b64encode(packed.getvalue()).decode("ascii")}"/>'
    )


def _write(path: Path, width: float, height: float, parts: Sequence[str]) -> None:
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">'
        f'<rect width="100%" height="100%" fill="#ffffff"/>{"".join(parts)}</svg>\n',
        encoding="utf-8",
    )
