"""`polyrhythm analyze`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from polyrhythm.cli.options import Json
from polyrhythm.cli.output import print_json, print_labeled, print_table

_SHOWN_LAYERS = 30


def analyze(
    model: Annotated[str, typer.Option(help="The network.")] = "lenet5",
    data: Annotated[
        str, typer.Option(help="Data set that defines the number of classes and the image size.")
    ] = "fashion-mnist",
    batch_size: Annotated[int, typer.Option(metavar="N", help="Images in a worker's batch.")] = 64,
    workers: Annotated[
        int, typer.Option(metavar="N", help="Number of workers, for bytes per step and model parallelism.")
    ] = 4,
    classes: Annotated[
        int | None, typer.Option(metavar="N", help="Number of classes (default: the data's).")
    ] = None,
    image_size: Annotated[
        int | None,
        typer.Option(metavar="N", help="Image height and width in pixels; with --classes, no data are read."),
    ] = None,
    channels: Annotated[
        int | None, typer.Option(metavar="N", help="Image channels (default: the data's, or 3 without data).")
    ] = None,
    all_layers: Annotated[bool, typer.Option("--all-layers", help="Show every layer, however many.")] = False,
    json: Json = False,
) -> None:
    """Compute the cost of a network: operations, memory, and bytes sent by every strategy."""
    from polyrhythm.api.analyze import analyze as analyzed

    found = analyzed(
        model=model,
        data=data,
        batch_size=batch_size,
        workers=workers,
        classes=classes,
        image_size=image_size,
        channels=channels,
    )
    if json:
        print_json(found)
    else:
        _print_layers(found["layers"], all_layers)
        _print_methods(found["layers"], all_layers)
        _print_strategies(found)
        _print_totals(found)


def _print(label: str, text: str) -> None:
    print_labeled(label, text, 14)


def _print_totals(found: dict[str, Any]) -> None:
    memory, batch = found["memory"], found["batch_size"]
    training = ", ".join(f"{_bytes(held)} with {name}" for name, held in memory["training"].items())
    height, width = found["image_shape"][1:]
    _print("model", f"{found['model']}, {found['classes']} classes, images of {height}x{width}")
    _print("parameters", f"{found['parameters']:,} ({_bytes(memory['parameters'])})")
    _print("multiply-adds", f"{_count(found['multiply_adds'])} in the forward pass of one image")
    _print(
        "a step",
        f"{_count(found['step_multiply_adds'])} multiply-adds at batch {batch}; depth "
        f"{found['step_depth']:,}, average parallelism {_count(found['average_parallelism'])}",
    )
    _print("activations", f"{_bytes(memory['activations'])} kept for the backward pass at batch {batch}")
    _print("training", training)
    _print_model_parallelism(found)


def _print_model_parallelism(found: dict[str, Any]) -> None:
    parallelism = found["model_parallelism"]
    if parallelism is None:
        _print("cut layers", "none: the network does not end in fully connected layers, or has one worker")
        return
    verdict = "pays" if parallelism["pays"] else "does not pay"
    _print(
        "cut layers",
        f"hybrid {verdict}: a worker of {found['workers']} receives "
        f"{_bytes(parallelism['cut_bytes'])} a step for its fully connected layers, data parallel "
        f"{_bytes(parallelism['data_parallel_bytes'])} (equal at a batch of {parallelism['pays_below_batch_size']:,})",
    )
    for how, trunk in parallelism["trunk"].items():
        if "refused" not in trunk:
            _print(
                f"by {how}",
                f"hybrid(trunk={how}) receives {_bytes(trunk['cut_bytes'])} for the layers up to "
                f"{trunk['last']}, and {_bytes(trunk['gradient_bytes'])} of their gradients; data parallel "
                f"{_bytes(trunk['data_parallel_bytes'])}",
            )


def _print_layers(layers: list[dict[str, Any]], every: bool) -> None:
    shown = _largest(layers, every, lambda layer: layer["work"])
    rows = [
        [
            layer["name"] or "(the network itself)",
            layer["kind"],
            "x".join(map(str, layer["output"][1:])),
            f"{layer['parameters']:,}",
            _count(layer["multiply_adds"]),
            str(layer["depth"]),
            _count(layer["work"] / max(1, layer["depth"])),
            _bytes(layer["saved_bytes"]),
        ]
        for layer in shown
    ]
    heads = ["layer", "kind", "output", "parameters", "multiply-adds", "depth", "parallelism", "kept"]
    print_table(_title("layers", shown, layers), heads, rows)
    print()


def _print_methods(layers: list[dict[str, Any]], every: bool) -> None:
    convolutions = [layer for layer in layers if "methods" in layer]
    if not convolutions:
        return
    shown = _largest(convolutions, every, lambda layer: layer["multiply_adds"])
    rows = []
    for layer in shown:
        by_kind = {method["name"].split(" ")[0]: method for method in layer["methods"]}
        least = min(layer["methods"], key=lambda method: method["multiply_adds"])
        rows.append(
            [
                layer["name"],
                *(_method(by_kind.get(kind)) for kind in ("direct", "im2col", "fft", "winograd")),
                least["name"],
            ]
        )
    title = _title("convolutions: multiply-adds a batch (depth, extra elements held)", shown, convolutions)
    print_table(title, ["layer", "direct", "im2col", "FFT", "Winograd", "least"], rows)
    print()


def _method(method: dict[str, Any] | None) -> str:
    if method is None:
        return "–"
    extra = f", {_count(method['extra_elements'])}" if method["extra_elements"] else ""
    return f"{_count(method['multiply_adds'])} ({method['depth']}{extra})"


def _print_strategies(found: dict[str, Any]) -> None:
    rows = []
    for each in found["strategies"]:
        if "refused" in each:
            rows.append([each["name"], "–", each["refused"].split(":")[0]])
        elif "by_value" in each:
            rows.append([each["name"], "–", "depends on the gradients' values"])
        else:
            rows.append([each["name"], _bytes(each["bytes_sent_per_step"]), each["remark"]])
    title = f"bytes that all ranks together send for a step of one of {found['workers']} workers"
    print_table(title, ["strategy", "bytes", ""], rows)
    print()


def _largest(layers: list[dict[str, Any]], every: bool, by: Any) -> list[dict[str, Any]]:
    if every or len(layers) <= _SHOWN_LAYERS:
        return layers
    largest = sorted(layers, key=by, reverse=True)[:_SHOWN_LAYERS]
    return [layer for layer in layers if layer in largest]


def _title(what: str, shown: list[Any], every: list[Any]) -> str:
    return (
        what
        if len(shown) == len(every)
        else f"{what}, the {len(shown)} largest of {len(every)} (--all-layers)"
    )


def _count(number: float) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"


def _bytes(number: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f} B"
