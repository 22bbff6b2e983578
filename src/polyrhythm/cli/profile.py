"""`polyrhythm profile`."""

from __future__ import annotations

import shlex
from typing import Annotated, Any

import typer

from polyrhythm.cli.options import Json
from polyrhythm.cli.output import print_command, print_json, print_labeled, print_table
from polyrhythm.errors import RequestError

_SHOWN_LAYERS = 12


def profile(
    context: typer.Context,
    script: Annotated[
        str | None,
        typer.Argument(
            help="A Python script that calls polyrhythm.join: measure its steps in place of a model's.",
            show_default=False,
        ),
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the script.", show_default=False)
    ] = None,
    module: Annotated[
        bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module, as for python -m.")
    ] = False,
    model: Annotated[str, typer.Option(help="Model of the measured step.")] = "lenet5",
    data: Annotated[str, typer.Option(help="Training data: a name or a folder.")] = "fashion-mnist",
    batch_size: Annotated[int, typer.Option(metavar="N", min=1, help="Images in a worker's batch.")] = 64,
    threads: Annotated[int, typer.Option(metavar="N", min=1, help="Compute threads of a worker.")] = 1,
    steps: Annotated[int, typer.Option(metavar="N", help="Number of measured steps.")] = 30,
    out: Annotated[str, typer.Option(help="The cluster file to write; it must not exist.")] = "profile.yaml",
    json: Json = False,
) -> None:
    """Measure this host, its links and the step time of a model or script; under torchrun those of several hosts."""
    from polyrhythm.api.profile import profile as measured
    from polyrhythm.api.profile import profile_script
    from polyrhythm.api.train import prepare_process

    prepare_process()
    if script is not None:
        for name in ("model", "data", "batch_size"):
            if str(getattr(context.get_parameter_source(name), "name", "")) != "DEFAULT":
                raise RequestError(
                    f"--{name.replace('_', '-')} is of a measured model, and {script} has its own: leave it out, or "
                    "write arguments of the script after it"
                )
        of_script = profile_script(
            script, arguments or [], steps=steps, threads=threads, module=module, out=out, start_method="fork"
        )
        _print(of_script, ["--model", of_script["step_of"]["model"]], json=json)
        return
    found = measured(
        model=model,
        data=data,
        batch_size=batch_size,
        threads=threads,
        steps=steps,
        out=out,
        start_method="fork",
    )
    if found is None:
        return
    _print(found, ["--model", model, "--data", data, "--batch-size", str(batch_size)], json=json)


def _print(found: dict[str, Any], of: list[str], *, json: bool) -> None:
    """Print the measurements, and the command of a dry run with them; `of` has its options of the network."""
    if json:
        print_json(found)
        return
    _print_result(found)
    step = found.get("step_of") or {}
    if step.get("layers"):
        of = [*of, "--batch-size", str(step.get("batch_size", 1)), "--steps", "100"]
    print_labeled("written", f"{found['file']}")
    print_command(
        "try", f"polyrhythm simulate --cluster {shlex.join([found['file'], *of, '--gradients', 'none'])}"
    )


def _print_result(found: dict[str, Any]) -> None:
    from polyrhythm.reporting.quantities import counted

    for host in found["hosts"]:
        chips = f", {', '.join(host['accelerators'])}" if host["accelerators"] else ""
        print(
            f"host        {host['name']}: {host['cores']} cores{chips}, {host['memory_bytes'] / 2**30:.0f} GiB, "
            f"copies {host['memory_bandwidth_bytes_per_s'] / 1e9:.1f} GB/s, speed {host['speed']:.2f}"
        )
    print_labeled("inside", f"{_link(found['inside'])}")
    between = found["between"]
    print(
        f"between     {_link(between) if between else 'not measured: start this with torchrun on every host'}"
    )
    print(
        f"step        {found['step_s'] * 1e3:.2f} ms: {found['model']}, {counted(found['threads'], 'thread')} (forward "
        f"{found['forward_s'] * 1e3:.2f}, backward {found['backward_s'] * 1e3:.2f}, update "
        f"{found['update_s'] * 1e3:.2f}; data {found['data_s'] * 1e3:.2f})"
    )
    if (update := found["server_update"]) is not None:
        parameters = sum(layer["parameters"] for layer in found["layers"])
        seconds = update["seconds"] + 4 * parameters / update["bandwidth_bytes_per_s"]
        print(
            f"server      {seconds * 1e3:.2f} ms for an update of {parameters:,} numbers and its answer, 1 thread "
            f"({update['bandwidth_bytes_per_s'] / 1e9:.2f} GB/s)"
        )
    _print_layers(found["layers"])


def _print_layers(layers: list[dict[str, Any]]) -> None:
    """Print the slowest layers, in the model's order."""
    by_time = sorted(layers, key=_seconds, reverse=True)
    shown = [layer for layer in layers if layer in by_time[:_SHOWN_LAYERS]]
    rows = [
        [
            layer["name"] or "(the model)",
            layer["kind"],
            f"{layer['parameters']:,}",
            f"{layer['forward_s'] * 1e3:.3f}",
            f"{layer['backward_s'] * 1e3:.3f}",
        ]
        for layer in shown
    ]
    rest = len(layers) - len(shown)
    title = f"the {len(shown)} slowest layers of {len(layers)}" if rest else "layers"
    print_table(title, ["layer", "kind", "parameters", "forward ms", "backward ms"], rows)


def _seconds(layer: dict[str, Any]) -> float:
    return float(layer["forward_s"] + layer["backward_s"])


def _link(link: dict[str, float]) -> str:
    return f"latency {link['latency_s'] * 1e6:.0f} us, {link['bandwidth_bytes_per_s'] / 1e9:.2f} GB/s"
