"""Draw the README's chart from the results of `in_step.py` and `drawn.py`: what one slow worker of four costs.

python benchmarks/uneven/chart.py       writes docs/images/uneven.svg
"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
OUT = HERE.parent.parent / "docs" / "images" / "uneven.svg"
STRATEGIES = (
    "synchronous",
    "local_sgd(steps=5)",
    "parameter_server",
    "ad_psgd",
    "easgd",
    "mixed(replicas=2)",
)
IDEAL_S = 12.5
LEFT, WIDTH, ROW, TOP = 190, 720, 44, 64


def main() -> None:
    """Write the chart."""
    in_step = {row["strategy"]: (row["off"], row["measured"]) for row in _read("in_step.json")["one_slow_s"]}
    drawn = {
        name: (row["fixed"], row.get("drawn, parts measured", row["drawn"]))
        for name, row in _read("drawn.json")["one slow, seconds"].items()
    }
    rows = [(name, *{**drawn, **in_step}[name]) for name in STRATEGIES]
    scale = (WIDTH - LEFT - 60) / max(before for _, before, _ in rows)
    height = TOP + ROW * len(rows) + 34
    font = 'font-family="sans-serif" font-size="13"'
    grey, blue = (
        f'<rect x="{{}}" y="34" width="12" height="12" fill="{each}"/>' for each in ("#c9ced6", "#2563eb")
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {font}>',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        '<text x="12" y="22" font-size="15" font-weight="bold">',
        "Four workers, one of them five times slow: seconds for the same work</text>",
        f'{grey.format(LEFT)}<text x="{LEFT + 18}" y="45">equal shares</text>',
        f'{blue.format(LEFT + 130)}<text x="{LEFT + 148}" y="45">shares by speed, or batches drawn</text>',
    ]
    for number, (name, before, after) in enumerate(rows):
        y = TOP + ROW * number
        parts.append(f'<text x="{LEFT - 10}" y="{y + 21}" text-anchor="end">{escape(name)}</text>')
        for place, seconds, colour in ((0, before, "#c9ced6"), (17, after, "#2563eb")):
            parts.append(
                f'<rect x="{LEFT}" y="{y + place}" width="{seconds * scale:.1f}" height="15" fill="{colour}"/>'
                f'<text x="{LEFT + seconds * scale + 6:.1f}" y="{y + place + 12}">{seconds:.1f}</text>'
            )
    x = LEFT + IDEAL_S * scale
    bottom = TOP + ROW * len(rows)
    parts.append(f'<path d="M{x:.1f} {TOP - 6}V{bottom}" stroke="#b91c1c" stroke-dasharray="4 3"/>')
    parts.append(
        f'<text x="{x:.1f}" y="{bottom + 18}" fill="#b91c1c">{IDEAL_S} s if all speeds add up</text></svg>'
    )
    OUT.write_text("\n".join(parts) + "\n")
    print(OUT.relative_to(HERE.parent.parent))


def _read(name: str) -> dict:
    return json.loads((HERE / name).read_text())


if __name__ == "__main__":
    main()
