"""Draw the README's chart: time to an accuracy with one slow worker (measured) and on a slow network (simulated).

python benchmarks/uneven/chart.py       writes docs/images/time-to-accuracy.svg
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from pathlib import Path
from statistics import mean

HERE = Path(__file__).parent
OUT = HERE.parent.parent / "docs" / "images" / "time-to-accuracy.svg"
SLOW_WORKER = (
    ("DDP", "ddp", "off"),
    ("synchronous, equal shares", "synchronous", "off"),
    ("synchronous, measured shares", "synchronous", "measured"),
    ("ad_psgd", "ad_psgd", "off"),
)
SLOW_NETWORK = (
    "synchronous(collective=auto)",
    "sgp",
    "local_sgd(steps=32, collective=auto)",
    "local_sgd(steps=8, collective=auto)",
)
LEFT, WIDTH, ROW, HEAD = 250, 720, 24, 58
FONT = 'font-family="sans-serif" font-size="13"'


def main() -> None:
    """Write the chart."""
    real = json.loads((HERE / "in_step.json").read_text())["real"]
    slow_worker = {
        label: next(
            row["median_seconds_to_0.89"]
            for row in real
            if (row["strategy"], row["balance"], row["batch_size"]) == (strategy, balance, 64)
        )
        for label, strategy, balance in SLOW_WORKER
    }
    trials = json.loads((HERE.parent / "time-to-accuracy" / "results.json").read_text())
    slow_network = {
        name.replace(", collective=auto", "").replace("(collective=auto)", ""): mean(
            trial["seconds"]
            for trial in trials
            if (trial["strategy"], trial["network"], trial["straggler"]) == (name, "100 Mb/s", False)
        )
        for name in SLOW_NETWORK
    }
    height = 2 * HEAD + ROW * (len(slow_worker) + len(slow_network)) + 12
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {FONT}>',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        *panel(0, "Mixed hardware: seconds to 89 % top-1", "two real workers, one at a third of its core", slow_worker),
        *panel(
            HEAD + ROW * len(slow_worker), "Slow network: seconds to 82 % top-1",
            "eight simulated hosts at 100 Mb/s, real gradients, virtual time", slow_network,
        ),
        "</svg>",
    ]  # fmt: skip
    OUT.write_text("\n".join(parts) + "\n")
    print(OUT.relative_to(HERE.parent.parent))


def panel(top: int, title: str, conditions: str, seconds: dict[str, float]) -> Iterator[str]:
    """Yield a title and one bar per row; the fastest is blue."""
    scale = (WIDTH - LEFT - 70) / max(seconds.values())
    yield f'<text x="12" y="{top + 22}" font-size="15" font-weight="bold">{title}</text>'
    yield f'<text x="12" y="{top + 42}" fill="#555">{conditions}</text>'
    for number, (name, value) in enumerate(seconds.items()):
        y = top + HEAD + ROW * number
        color = "#2563eb" if value <= 1.02 * min(seconds.values()) else "#c9ced6"
        yield f'<text x="{LEFT - 10}" y="{y + 13}" text-anchor="end">{escape(name)}</text>'
        yield f'<rect x="{LEFT}" y="{y}" width="{value * scale:.1f}" height="17" fill="{color}"/>'
        yield f'<text x="{LEFT + value * scale + 6:.1f}" y="{y + 13}">{value:.3g}</text>'


if __name__ == "__main__":
    main()
