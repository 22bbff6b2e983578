"""`polyrhythm analyze`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from polyrhythm.cli.options import Json
from polyrhythm.cli.output import print_json, print_table

_SHOWN_LAYERS = 30


def analyze(
    model: Annotated[str, typer.Option(help="The network.")] = "lenet5",
    data: Annotated[
        str, typer.Option(help="Data set that defines the number of classes and the image size.")
    ] = "fashion-mnist",
    batch_size: Annotated[int, typer.Option(metavar="N", help="Images in a worker's batch.")] = 64,
    workers: Annotated[int, typer.Option(metavar="N", help="For bytes a step and model parallelism.")] = 4,
    classes: Annotated[int | None, typer.Option(metavar="N", help="Instead of the data's.")] = None,
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
    from polyrhythm.api.analyze import analyze as analysed

    found = analysed(
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
        _say_layers(found["layers"], all_layers)
        _say_methods(found["layers"], all_layers)
        _say_strategies(found)
        _say_whole(found)


def _say_whole(found: dict[str, Any]) -> None:
    memory, batch = found["memory"], found["batch_size"]
    training = ", ".join(f"{_bytes(held)} with {name}" for name, held in memory["training"].items())
    height, width = found["image_shape"][1:]
    print(f"model         {found['model']}, {found['classes']} classes, images of {height}x{width}")
    print(f"parameters    {found['parameters']:,} ({_bytes(memory['parameters'])})")
    print(f"multiply-adds {_count(found['multiply_adds'])} forward an image")
    print(
        f"a step        {_count(found['step_multiply_adds'])} multiply-adds at batch {batch}; depth "
        f"{found['step_depth']:,}, average parallelism {_count(found['average_parallelism'])}"
    )
    print(f"activations   {_bytes(memory['activations'])} kept for the backward pass at batch {batch}")
    print(f"training      {training}")
    _say_model_parallelism(found)


def _say_model_parallelism(found: dict[str, Any]) -> None:
    told = found["model_parallelism"]
    if told is None:
        print(
            "cut layers    nothing to cut: the network does not end in fully connected layers, or one works alone"
        )
        return
    verdict = "pays" if told["pays"] else "does not pay"
    print(
        f"cut layers    hybrid {verdict}: a worker of {found['workers']} receives {_bytes(told['cut_bytes'])} a step "
        f"for its fully connected layers, data parallel {_bytes(told['data_parallel_bytes'])} "
        f"(even at a batch of {told['pays_below_batch_size']:,})"
    )
    for how, trunk in told["trunk"].items():
        if "refused" not in trunk:
            print(
                f"by {how:8}   hybrid(trunk={how}) receives {_bytes(trunk['cut_bytes'])} for the layers up to "
                f"{trunk['last']}, and {_bytes(trunk['gradient_bytes'])} of their gradients; data parallel "
                f"{_bytes(trunk['data_parallel_bytes'])}"
            )


def _say_layers(layers: list[dict[str, Any]], every: bool) -> None:
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


def _say_methods(layers: list[dict[str, Any]], every: bool) -> None:
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
    title = _title("convolutions: multiply-adds a batch (extra elements held)", shown, convolutions)
    print_table(title, ["layer", "direct", "im2col", "FFT", "Winograd", "least"], rows)
    print()


def _method(method: dict[str, Any] | None) -> str:
    if method is None:
        return "–"
    extra = f" ({_count(method['extra_elements'])})" if method["extra_elements"] else ""
    return f"{_count(method['multiply_adds'])}{extra}"


def _say_strategies(found: dict[str, Any]) -> None:
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
