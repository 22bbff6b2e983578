"""`polyrhythm evaluate --robustness`."""

from __future__ import annotations

from typing import Any

from polyrhythm.cli.output import percent, print_json, print_table


def show_robustness(weights: list[str], request: dict[str, Any], *, as_json: bool) -> None:
    """Tests networks under ever worse pictures, and prints how they bear them.

    Args:
        weights: run folders or files of weights.
        request: what `polyrhythm.api.robustness.robustness` takes.
        as_json: whether standard output gets one JSON object.
    """
    from polyrhythm.api.robustness import robustness

    found = robustness(weights, **request)
    if as_json:
        print_json(found)
        return
    for model in found["models"]:
        clean = percent(model["clean_top1"])
        title = f"{model['weights']}: top-1 {clean} on {found['images']:,} images of {found['data']}"
        rows = [
            [
                each["name"],
                f"{each['strengths'][0]:.3g} to {each['strengths'][-1]:.3g}",
                *(f"{100 * top1:.1f}" for top1 in each["top1"]),
            ]
            for each in model["declines"]
        ]
        print_table(title, ["top-1 in %", "strength", "1", "2", "3", "4", "5"], rows)
    if found["plot"]:
        print(f"curves: {found['plot']}")
