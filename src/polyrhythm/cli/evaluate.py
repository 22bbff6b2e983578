"""`polyrhythm evaluate`, also with `--robustness`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from polyrhythm.cli.options import (
    Dense,
    Device,
    Flip,
    Json,
    Network,
    Scales,
    TenCrop,
    TestData,
    names_in,
    numbers,
)
from polyrhythm.cli.output import print_json, print_table
from polyrhythm.errors import RequestError
from polyrhythm.reporting.quantities import percent


def evaluate(
    weights: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN_OR_WEIGHTS", help="A run folder or a file of weights; several form an ensemble."
        ),
    ],
    data: TestData = None,
    model: Network = None,
    batch_size: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Images at a time (default: 500).")
    ] = None,
    device: Device = "auto",
    image_size: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Pixels a side (default: as in the run).")
    ] = None,
    skip_unreadable: Annotated[
        bool, typer.Option("--skip-unreadable", help="Leave out broken images.")
    ] = False,
    dense: Dense = False,
    ten_crop: TenCrop = False,
    flip: Flip = False,
    scales: Scales = None,
    best: Annotated[
        bool, typer.Option("--best", help="Test the runs' best checkpoints (train with --keep-best).")
    ] = False,
    greedy: Annotated[
        bool, typer.Option("--greedy", help="Choose the members on every second image; test on the others.")
    ] = False,
    calibrate: Annotated[
        bool,
        typer.Option("--calibrate", help="Calibrate the probabilities of predict on every second image."),
    ] = False,
    robustness: Annotated[
        bool,
        typer.Option("--robustness", help="Test under increasingly strong augmentations and corruptions."),
    ] = False,
    images: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Test images for --robustness (default: 1000).")
    ] = None,
    kinds: Annotated[
        str | None, typer.Option(metavar="rotation,…", help="Changes for --robustness (default: all).")
    ] = None,
    plot: Annotated[str | None, typer.Option(help="An HTML file for the curves of --robustness.")] = None,
    json: Json = False,
) -> None:
    """Test one or several trained models: top-1, top-5, and every class."""
    request: dict[str, Any] = {"data": data, "model": model, "device": device, "image_size": image_size}
    request["skip_unreadable"] = skip_unreadable
    how: dict[str, Any] = {"batch_size": batch_size, "dense": dense, "ten_crop": ten_crop, "flip": flip}
    how |= {"scales": numbers("--scales", scales, int, "224,256"), "best": best, "greedy": greedy}
    how["calibrate"] = calibrate
    changes = {"images": images, "kinds": names_in(kinds), "plot": plot}
    if robustness:
        _refuse(how, "is not for --robustness, which shows images as in training: leave one of them out")
        show_robustness(weights, request | _given(changes), as_json=json)
    else:
        _refuse(changes, "is about what --robustness finds: give that too")
        _test(weights, request | _given(how), as_json=json)


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that have a value; the others get their defaults where they are used."""
    return {name: value for name, value in options.items() if value}


def _refuse(options: dict[str, Any], why: str) -> None:
    for name in _given(options):
        raise RequestError(f"--{name.replace('_', '-')} {why}")


def _test(weights: list[str], request: dict[str, Any], *, as_json: bool) -> None:
    from polyrhythm.api.evaluate import evaluate as evaluate_weights

    found = evaluate_weights(weights, **request)
    if as_json:
        print_json(found)
    else:
        _print_result(found)


def _print_result(found: dict[str, Any]) -> None:
    print(f"{found['model']} on {found['images']:,} test images of {found['data']}")
    for method in sorted(set(found.get("dense", ()))):
        print(f"dense by {method}")
    if "region" in found:
        print(f"seen are {found['region']}")
    low, high = found["test_top1_interval"]
    print(
        f"top-1 {percent(found['test_top1'])} (95 %: {100 * low:.1f} to {100 * high:.1f})"
        f"    top-5 {percent(found['test_top5'])}    loss {found['test_loss']:.4f}"
        f"    mean of classes {percent(found['test_balanced_accuracy'])}"
    )
    if "members" in found:
        rows = [
            [each["weights"], each["model"], percent(each["test_top1"]), str(found["selected"].count(number))]
            for number, each in enumerate(found["members"])
        ]
        print_table("", ["member", "model", "top-1", "votes"], rows)
    rows = [
        [entry["name"], f"{entry['images']:,}", percent(entry["recall"]), percent(entry["precision"])]
        for entry in found["per_class"]
    ]
    print_table("", ["class", "images", "recall", "precision"], rows)
    pairs = [[pair["class"], pair["taken_for"], f"{pair['images']:,}"] for pair in found["confused"]]
    if pairs:
        print_table("", ["most confused", "taken for", "images"], pairs)
    if "calibration" in found:
        _print_calibration(found["calibration"])


def _print_calibration(found: dict[str, Any]) -> None:
    (loss, warm_loss), (error, warm_error) = found["loss"], found["error"]
    print(
        f"\ntemperature {found['temperature']:.3f}, found on every second image; on the other {found['images']:,}: "
        f"loss {loss:.4f} to {warm_loss:.4f}, calibration error {percent(error)} to {percent(warm_error)}"
    )
    rows = [
        [
            percent(each["threshold"]),
            percent(each["answered"]),
            "" if each["right"] is None else percent(each["right"]),
        ]
        for each in found["answered"]
    ]
    print_table("", ["likeliest class has at least", "share of images", "right of these"], rows)
    if found["file"]:
        print(f"kept in {found['file']}, where predict finds it")
    else:
        print("of several networks it is not kept: give it to predict as --temperature")


def show_robustness(weights: list[str], request: dict[str, Any], *, as_json: bool) -> None:
    """Test networks on increasingly distorted images, and print how their accuracy declines."""
    from polyrhythm.api.robustness import robustness

    found = robustness(weights, **request)
    if as_json:
        print_json(found)
        return
    together = [found["together"]] if found["together"] else []
    for model in [*found["models"], *together]:
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
        if model["corrupted_top1"] is not None:
            title += f"; {percent(model['corrupted_top1'])} on average over corruptions"
        print_table(title, ["top-1 in %", "strength", "1", "2", "3", "4", "5"], rows)
    if found["plot"]:
        print(f"curves: {found['plot']}")
