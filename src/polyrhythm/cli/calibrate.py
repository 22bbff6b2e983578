"""`polyrhythm calibrate`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from polyrhythm.cli.options import Json, names_in
from polyrhythm.cli.output import print_json, print_labeled, print_table


def calibrate(
    cluster: Annotated[str, typer.Option(help="A cluster file or a ready cluster, where the fit begins.")],
    throughput: Annotated[
        list[str],
        typer.Option(
            help="Measured throughput, as '8 workers: 378 images/s' or 'easgd, 8 workers: 378'; repeatable."
        ),
    ],
    fit: Annotated[
        str,
        typer.Option(
            help="Values to fit, separated by commas: step_time, spread, nic_bandwidth, nic_latency, "
            "inside_bandwidth, server_bandwidth, server_update."
        ),
    ] = "step_time",
    model: Annotated[str, typer.Option(help="The network that was trained.")] = "lenet5",
    data: Annotated[
        str, typer.Option(help=("Data set that defines classes and image size."))
    ] = "fashion-mnist",
    batch_size: Annotated[int, typer.Option(metavar="N", min=1, help="Images in a worker's batch.")] = 64,
    strategy: Annotated[str, typer.Option(help="Strategy of measurements that name none.")] = "synchronous",
    classes: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Number of classes (default: the data's).")
    ] = None,
    image_size: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help=("Image height and width in pixels; with --classes, no data are read.")
        ),
    ] = None,
    out: Annotated[str | None, typer.Option(help="The cluster file to write; it must not exist.")] = None,
    json: Json = False,
) -> None:
    """Fit values of a cluster file to measured throughputs."""
    from polyrhythm.api.calibrate import calibrate as calibrated
    from polyrhythm.launch.devices import available_cores

    found = calibrated(
        cluster=cluster,
        throughput=throughput,
        unknowns=names_in(fit),
        model=model,
        data=data,
        batch_size=batch_size,
        strategy=strategy,
        classes=classes,
        image_size=image_size,
        out=out,
        processes=available_cores(),
    )
    if json:
        print_json(found)
    else:
        _print_result(found)


_UNITS = {"step_time": "factor", "spread": "sigma", "nic_latency": "s"}
"""Units of fitted values; of the others bytes/s."""


def _print_result(found: dict[str, Any]) -> None:
    rows = [
        [
            f"{each['name']} ({_UNITS.get(each['name'], 'bytes/s')})",
            f"{each['before']:.4g}",
            f"{each['value']:.4g}",
            _interval(each["low"], each["high"]),
        ]
        for each in found["unknowns"]
    ]
    print_table("", ["value", "before", "fitted", "80 % interval"], rows)
    print()
    rows = [
        [
            each["what"],
            f"{each['images_per_s']:,.1f}",
            _against(each["predicted"], each["images_per_s"]),
            *([] if each["left_out"] is None else [_against(each["left_out"], each["images_per_s"])]),
        ]
        for each in found["measurements"]
    ]
    heads = ["strategy", "measured", "fitted", "fitted without it"]
    print_table("images/s", heads[: max(map(len, rows))], rows)
    open_ones = ", ".join(each["name"] for each in found["unknowns"] if not each["told"])
    if open_ones and found["next"]:
        print_labeled("measure", f"{found['next']}, to determine {open_ones}")
    elif open_ones:
        print_labeled("open", f"{open_ones}: no usual set-up of this network on this cluster depends on it")
    if found["file"]:
        print_labeled("written", f"{found['file']}")


def _interval(low: float | None, high: float | None) -> str:
    if low is None and high is None:
        return "not determined"
    if high is None:
        return f"at least {low:.3g}"
    return f"at most {high:.3g}" if low is None else f"{low:.3g} to {high:.3g}"


def _against(predicted: float, measured: float) -> str:
    return f"{predicted:,.1f} ({100 * (predicted / measured - 1):+z.1f} %)"
