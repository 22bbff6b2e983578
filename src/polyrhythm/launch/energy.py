"""The energy that this host's processors take, where the kernel tells it (RAPL, `/sys/class/powercap`).

    intel-rapl:0/     name: package-0      energy_uj: 1234567      max_energy_range_uj: 262143328850
    intel-rapl:0:0/   name: core           in the package's
    intel-rapl:0:1/   name: dram           not in it

Counters are microjoules since some moment, and begin again at 0 beyond their range: at 100 W after some 40 minutes, so
they must be looked at more often. AMD's processors have the same files. Mostly only root may read them.
"""

from __future__ import annotations

from pathlib import Path

POWERCAP = Path("/sys/class/powercap")


class EnergyCounter:
    """Adds up what all packages and their memory take.

    Args:
        root: where the kernel shows them.
    """

    def __init__(self, root: Path = POWERCAP) -> None:
        self._domains: dict[Path, tuple[int, int]] = {}  # the latest reading, and the range, in microjoules
        self._sum_uj = 0
        for folder in sorted(root.glob("*rapl:*")):
            try:
                name = (folder / "name").read_text(encoding="ascii").strip()
                if name.startswith("package") or name == "dram":
                    counted = int((folder / "max_energy_range_uj").read_text(encoding="ascii"))
                    self._domains[folder] = _reading(folder), counted
            except (OSError, ValueError):
                continue

    @property
    def joules(self) -> float | None:
        """What was taken since this object was made, up to the latest `look`; None where nobody tells."""
        return self._sum_uj / 1e6 if self._domains else None

    def look(self) -> None:
        """Read the counters; a domain that cannot be read any more is left out from here on."""
        for folder, (before, counted) in list(self._domains.items()):
            try:
                now = _reading(folder)
            except (OSError, ValueError):
                continue
            self._sum_uj += now - before if now >= before else now + counted - before
            self._domains[folder] = now, counted


def _reading(folder: Path) -> int:
    return int((folder / "energy_uj").read_text(encoding="ascii"))
