"""Part 7: the energy of an image, by NVML, next to images a second."""

from __future__ import annotations

from checks import one_gpu
from checks.setting import Figures, Part, Row, Setting, Skipped, hold

MOST = 1.05
"""Of the bare loop's joules an image."""


def energy(setting: Setting, name: str = "resnet50") -> Figures:
    """An image of `polyrhythm train` takes no more energy than one of a loop of torch alone."""
    rows = {"bare": one_gpu.bare_row(name), "train": f"{name}: train", "join": f"{name}: join"}
    found = Figures()
    for kind, row in rows.items():
        try:
            joules, rate = setting.earlier(row, "joules_per_image"), setting.earlier(row, "images_per_s")
        except Skipped as error:
            if kind == "bare" or (kind == "join" and "train" not in found):
                raise Skipped(f"no counter of NVML was read: {error}") from None
            continue
        found[kind] = {"joules_per_image": joules, "images_per_s": rate, "watts": joules * rate}
    for kind in ("train", "join"):
        if kind in found:
            found[kind]["share"] = share = found[kind]["joules_per_image"] / found["bare"]["joules_per_image"]
            hold(share <= MOST, f"{kind}: {share:.2f} of the bare loop's joules an image", found)
    return found


PART = Part(7, "Energy", (Row("energy of an image", energy, 2),))
