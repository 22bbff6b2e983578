"""Part 1: what a GPU computes is right."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from checks.setting import (
    PATIENCE_S,
    Figures,
    Network,
    Part,
    Problems,
    Row,
    Setting,
    background,
    descendants,
    hold,
)
from polyrhythm.communication.transports.torch_distributed.communicator import Staging
from polyrhythm.reporting.event_log import read_events
from polyrhythm.training.forward_pass import Precision

JOB = ("--data", "digits", "--model", "mlp", "--batch-size", "32", "--epochs", "3", "--seed", "3")
EXACT = ("--precision", "float32")
TWO = ("--workers", "2")
_READY_S = 90.0
_FREED_S, _FEW_BYTES = 10.0, 64 << 20
_SAME = 1e-2
"""Largest relative difference of parameters that a GPU and a CPU learn in float32."""


def two_ranks(setting: Setting) -> Figures:
    """Two ranks on one GPU learn in float32 what two on a CPU learn."""
    words = (*JOB, *EXACT, *TWO, "--strategy", "synchronous")
    figures = setting.train_all(gpu=(setting.device.type, *words), cpu=("cpu", *words))
    difference = _difference(setting.run_folder("gpu"), setting.run_folder("cpu"))
    found = {"difference": difference, "test_top1": figures["gpu"]["test_top1"]}
    problems = Problems()
    problems.expect(difference < _SAME, f"parameters differ from a CPU's by {difference:.2g} of their norm")
    apart = abs(figures["gpu"]["test_top1"] - figures["cpu"]["test_top1"])
    problems.expect(apart < 0.03, f"top-1 differs from a CPU's by {apart:.3f}")
    return problems.conclude(found)


class _Sent:
    """A message that has left at once."""

    def wait(self) -> None:
        """Return at once."""

    def done(self) -> bool:
        """Return that it has left."""
        return True


def _staging(setting: Setting) -> Staging:
    if setting.is_gpu:
        return Staging.of(setting.device, _in_background)
    return Staging(_copy_at_once, _in_background, pinned=False)


def _in_background(act: Callable[[], None]) -> None:
    threading.Thread(target=act).start()


def _copy_at_once(source: Tensor, target: Tensor) -> Callable[[], None]:
    target.copy_(source)
    return lambda: None


def pinned_copies(setting: Setting) -> Figures:
    """A message holds what was computed when it was sent, buffers are used again, and pinned memory is no slower."""
    numbers, side = (1 << 16, 512) if setting.quick else (1 << 24, 4096)
    staging = _staging(setting)
    made = torch.zeros(numbers, device=setting.device)
    busy = torch.randn(side, side, device=setting.device)
    got: list[Tensor] = []

    def start(staged: Tensor) -> Any:
        got.append(staged.clone())
        return _Sent()

    for value in range(10):
        for _ in range(3):  # the number is not there yet when the copy is asked for
            busy = torch.tanh(busy @ busy)
        made.fill_(float(value))
        staging.send(made, start).wait()
        made.fill_(-1.0)  # a copy that is still under way would be torn
    lowest, highest = [float(each.min()) for each in got], [float(each.max()) for each in got]
    hold(lowest == highest, f"a copy is torn: {lowest} to {highest}")
    hold(lowest == list(range(10)), f"copies hold {lowest}")
    hold(staging.nbytes <= 2 * made.nbytes, f"{staging.nbytes} bytes of buffers for {made.nbytes}")
    ordinary = torch.empty(numbers)
    taken = {
        "pinned": setting.seconds(lambda: staging.send(made, lambda staged: _Sent()).wait()),
        "ordinary": setting.seconds(lambda: ordinary.copy_(made)),
    }
    figures: Figures = {f"{name}_GB_per_s": made.nbytes / each / 1e9 for name, each in taken.items()}
    if setting.is_gpu:
        hold(staging._buffers[0].memory.is_pinned(), "buffers are not pinned", figures)
        hold(taken["pinned"] < 1.2 * taken["ordinary"], "pinned copies are slower", figures)
    return figures


def overlap(setting: Setting) -> Figures:
    """Copies that start while gradients become final hide behind the rest of the backward pass, by half at least.

    A chain of products, each of which is sent when its gradient is final; three times are compared: the backward pass
    alone, the copies alone, and both.
    """
    side, layers = (128, 4) if setting.quick else (8192, 12)
    staging, sending = _staging(setting), False
    network = nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(layers))).to(setting.device)
    images = torch.randn(side // 2, side, device=setting.device)
    # As the product's gradients: views that autograd adds into, so that nothing is allocated.
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    sent: list[Any] = []

    def ready(parameter: Tensor) -> None:
        if sending:
            assert parameter.grad is not None
            sent.append(staging.send(parameter.grad, lambda staged: _Sent()))

    for parameter in network.parameters():
        parameter.register_post_accumulate_grad_hook(ready)

    def both() -> None:
        network(images).sum().backward()
        for handle in sent:
            handle.wait()
        sent.clear()

    def copies() -> None:
        for parameter in network.parameters():
            ready(parameter)
        for handle in sent:
            handle.wait()
        sent.clear()

    computing_s = setting.seconds(both)
    sending = True
    copying_s, together_s = setting.seconds(copies), setting.seconds(both)
    hidden = (computing_s + copying_s - together_s) / min(computing_s, copying_s)
    figures = {
        "computing_s": computing_s,
        "copying_s": copying_s,
        "together_s": together_s,
        "hidden": hidden,
    }
    hold(not setting.is_gpu or hidden > 0.5, f"only {hidden:.0%} of the shorter is hidden", figures)
    return figures


def two_bytes(setting: Setting) -> Figures:
    """Bfloat16 and float16 learn what float32 does; an overflow of float16 is left out and lowers the scale."""
    names = ("float32", "bfloat16", *(("float16",) if setting.is_gpu else ()))
    runs = {name: (setting.device.type, *JOB, *TWO, "--precision", name) for name in names}
    trained = setting.train_all(**runs)
    top1 = {name: figures["test_top1"] for name, figures in trained.items()}
    hashes = {figures["parameters_sha256"] for figures in trained.values()}
    problems, found = Problems(), dict[str, Any](top1)
    problems.expect(len(hashes) == len(names), "two precisions have the same bits: one of them was not used")
    for name, value in top1.items():
        problems.expect(
            abs(value - top1["float32"]) < 0.05, f"{name}: top-1 {value}, {top1['float32']} in float32"
        )
    precision = Precision(torch.float16, setting.device)  # which `choose` refuses on a CPU
    weights = torch.ones(4, device=setting.device, requires_grad=True)
    found["scale_before"] = _scale(precision)
    precision.scale((weights * 1e36).sum()).backward()  # 65,536 times as much is beyond float32
    assert weights.grad is not None
    problems.expect(not precision.unscale(weights.grad), "an overflow counts as a step")
    found["scale_after"] = _scale(precision)
    problems.expect(found["scale_after"] < found["scale_before"], "an overflow does not lower the scale")
    weights.grad = None
    precision.scale((weights * 2).sum()).backward()
    assert weights.grad is not None
    problems.expect(precision.unscale(weights.grad), "a good step is left out")
    problems.expect(bool((weights.grad == 2.0).all()), f"gradients stay scaled: {weights.grad.tolist()}")
    return problems.conclude(found)


def device_cache(setting: Setting) -> Figures:
    """Pictures are kept in the GPU's memory, within the limit, and change no bit of the result."""
    data = _few_pictures(setting)
    words = (
        setting.device.type,
        "--data",
        str(data),
        "--model",
        "lenet5",
        "--image-size",
        "28",
    )
    words += ("--batch-size", "32", "--epochs", "3", "--workers", "1", *EXACT, "--cache")
    kinds = {"none": "none", "again": "none", "auto": "auto", "small": "100kB"}
    runs = setting.train_all(**{name: (*words, limit) for name, limit in kinds.items()})
    hashes = {name: figures["parameters_sha256"][:12] for name, figures in runs.items()}
    hold(hashes["none"] == hashes["again"], f"without a cache, a second run has other bits: {hashes}")
    hold(len(set(hashes.values())) == 1, f"the cache changes bits: {hashes}")
    whole, small = (
        [
            event
            for event in read_events(setting.run_folder(name) / "events.jsonl")
            if hasattr(event, "kept_bytes")
        ]
        for name in ("auto", "small")
    )
    hits = sum(event.hits for event in whole)
    hold(hits > 0, "no picture was taken from the cache")
    most = max((event.kept_bytes for event in small), default=0)
    hold(0 < most <= 100_000, f"{most} bytes are kept, and 100,000 may be")
    return {"kept_bytes": whole[-1].kept_bytes, "hits": hits, "kept_of_100kB": most}


def mixed_devices(setting: Setting) -> Figures:
    """GPU and CPU ranks train in one run, by servers and by rounds, and see every image; synchronous is refused."""
    kinds = f"{setting.device.type},cpu"
    runs = {
        "servers": ("--strategy", "parameter_server"),
        "local": ("--strategy", "local_sgd(steps=4)"),
    }
    found = setting.train_all(**{name: (kinds, *JOB, *EXACT, *TWO, *words) for name, words in runs.items()})
    problems = Problems()
    for name, figures in found.items():
        problems.expect(
            figures["images_not_seen"] == 0, f"{name}: {figures['images_not_seen']} images not seen"
        )
        problems.expect(figures["test_top1"] > 0.6, f"{name}: top-1 {figures['test_top1']}")
    if setting.is_gpu:
        out = setting.run_folder("refused")
        refused = subprocess.run(
            setting.command("train", *JOB, *TWO, "--device", kinds, "--strategy", "synchronous", "--out", str(out)),
            capture_output=True, text=True, timeout=PATIENCE_S, env=setting.environment, check=False,
        )  # fmt: skip
        said = " ".join(refused.stderr.split())
        problems.expect(
            refused.returncode != 0 and "one kind of device" in said and "Traceback" not in said,
            f"synchronous is not refused in a line: status {refused.returncode}, {said[-300:]}",
        )
    return problems.conclude({name: round(figures["test_top1"], 3) for name, figures in found.items()})


def guest(setting: Setting) -> Figures:
    """A worker on a CPU joins a run on the GPU by its address, and every image is seen."""
    out = setting.run_folder("host")
    out.parent.mkdir(parents=True, exist_ok=True)
    options = [
        "--strategy",
        "parameter_server",
        "--workers",
        "2",
        "--vacant",
        "1",
        "--listen",
        "0",
        "--batches",
        "static",
    ]
    options += ["--device", setting.device.type, *EXACT, "--out", str(out), "--json"]
    # Long enough for the other one to start meanwhile.
    command = setting.command("train", *JOB, "--epochs", "20" if setting.quick else "100", *options)
    errors = out.with_suffix(".err")
    with background(command, errors, setting.environment) as run:
        deadline_s = time.monotonic() + _READY_S
        while not (out / "join.json").exists():
            hold(run.poll() is None and time.monotonic() < deadline_s, f"no door: {_end(errors)}")
            time.sleep(0.1)
        address = json.loads((out / "join.json").read_text())["address"]
        words = [
            "join",
            address,
            "--token-file",
            str(out / "join-token"),
            "--device",
            "cpu",
            "--threads",
            "1",
        ]
        joining = out.with_name(f"{out.name}-guest.err")
        with background(setting.command(*words), joining, setting.environment) as joined:
            joined.wait(PATIENCE_S)
        hold(run.wait(PATIENCE_S) == 0, f"the run ended with status {run.returncode}: {_end(errors)}")
    figures = json.loads(errors.with_suffix(".out").read_text())
    hold(figures["workers_joined"] == 1, f"nobody joined: {_end(joining)}")
    hold(figures["images_not_seen"] == 0, f"{figures['images_not_seen']} images not seen")
    return {"joined": figures["workers_joined"], "test_top1": round(figures["test_top1"], 3)}


def same_bits(setting: Setting) -> Figures:
    """A lockstep run has the same bits twice, also resumed; a recorded asynchronous one is replayed to its bits.

    So has a network of convolutions, whose kernels add up in another order each time where nothing prevents it.
    """
    device, words = setting.device.type, (*JOB, *TWO, *EXACT)
    constant = ("--schedule", "constant")
    convolutions = (
        device,
        "--data",
        str(_few_pictures(setting)),
        "--model",
        "cifar_resnet",
        "--image-size",
        "32",
    )
    convolutions += ("--batch-size", "16", "--epochs", "2", *TWO, *EXACT)
    runs = setting.train_all(
        one=(device, *words, *constant),
        two=(device, *words, *constant),
        part=(device, *words, *constant, "--epochs", "2"),
        recorded=(device, *words, "--strategy", "parameter_server"),
        convolutions=convolutions,
        convolutions_again=convolutions,
    )
    problems, sha = Problems(), "parameters_sha256"
    problems.expect(runs["one"][sha] == runs["two"][sha], "a second run has other bits")
    difference = _difference(setting.run_folder("convolutions"), setting.run_folder("convolutions_again"))
    problems.expect(
        runs["convolutions"][sha] == runs["convolutions_again"][sha],
        f"a second run of convolutions has other bits: parameters differ by {difference:.2g} of their norm",
    )
    part, recorded = (str(setting.run_folder(name)) for name in ("part", "recorded"))
    resumed, replayed = setting.at_once(
        [
            partial(setting.call, "train", "--resume", part, "--epochs", "3"),
            partial(setting.call, "replay", recorded),
        ]
    )
    problems.expect(resumed[sha] == runs["one"][sha], "a resumed run has other bits")
    problems.expect(bool(replayed["same"]), "the replay has other bits")
    return problems.conclude({"sha256": runs["one"][sha][:12], "replayed": replayed["same"]})


def compiled(setting: Setting) -> Figures:
    """`--compile` learns what the same network does without it, to rounding."""
    data = _few_pictures(setting)
    words = (setting.device.type, "--data", str(data), "--model", "lenet5", "--image-size", "28")
    words += ("--batch-size", "32", "--epochs", "3", "--workers", "1", *EXACT)
    runs = setting.train_all(plain=words, compiled=(*words, "--compile"))
    difference = _difference(setting.run_folder("compiled"), setting.run_folder("plain"))
    apart = abs(runs["compiled"]["test_loss"] - runs["plain"]["test_loss"])
    found = {"difference": difference, "test_loss": apart}
    hold(difference < _SAME, f"parameters differ by {difference:.2g} of their norm", found)
    return found


def resume_elsewhere(setting: Setting) -> Figures:
    """A run continues on the CPU what the GPU began, and the other way around, to what one device learns throughout."""
    here, words = setting.device.type, (*JOB, *TWO, *EXACT, "--schedule", "constant")
    setting.train_all(
        gpu=(here, *words, "--epochs", "2"), cpu=("cpu", *words, "--epochs", "2"), whole=("cpu", *words)
    )
    problems, found = Problems(), dict[str, Any]()
    setting.at_once(
        [
            partial(
                setting.call,
                "train",
                "--resume",
                str(setting.run_folder(began)),
                "--device",
                other,
                "--epochs",
                "3",
            )
            for began, other in (("gpu", "cpu"), ("cpu", here))
        ]
    )
    for began in ("gpu", "cpu"):
        difference = _difference(setting.run_folder(began), setting.run_folder("whole"))
        found[f"begun on {began}"] = difference
        problems.expect(difference < _SAME, f"begun on {began}: differs by {difference:.2g} of the norm")
    return problems.conclude(found)


def killed(setting: Setting) -> Figures:
    """A rank is killed while its kernels run: the others continue, see every image, and the GPU's memory is free."""
    before = setting.memory_bytes() if setting.is_gpu else 0
    network = Network(
        "cifar_resnet", 32, 8 if setting.quick else 512, precision="float32", channels_last=False
    )
    out = setting.run_folder("killed")
    out.parent.mkdir(parents=True, exist_ok=True)
    options = ["--data", str(setting.pictures(32)), *network.words, *TWO, "--strategy", "synchronous"]
    options += ["--epochs", "5" if setting.quick else "40"]
    options += ["--optimizer", "sgd(lr=0.01)", "--device", setting.device.type, "--out", str(out), "--json"]
    errors, events = out.with_suffix(".err"), out / "events.jsonl"
    with background(setting.command("train", *options), errors, setting.environment) as run:
        deadline_s = time.monotonic() + _READY_S
        while not (events.exists() and b"WorkerProgress" in events.read_bytes()):
            hold(run.poll() is None and time.monotonic() < deadline_s, f"no first step: {_end(errors)}")
            time.sleep(0.02)
        ranks = _ranks(run.pid)
        hold(len(ranks) == 2, f"{len(ranks)} ranks are found, and 2 are meant to be")
        os.kill(ranks[-1], signal.SIGKILL)
        hold(run.wait(PATIENCE_S) == 0, f"the run ended with status {run.returncode}: {_end(errors)}")
    figures = json.loads(errors.with_suffix(".out").read_text())
    problems = Problems()
    problems.expect(figures["workers_lost"] == 1, f"{figures['workers_lost']} workers were lost")
    problems.expect(figures["images_not_seen"] == 0, f"{figures['images_not_seen']} images not seen")
    found = {"lost": figures["workers_lost"], "joined": figures["workers_joined"]}
    if setting.is_gpu:
        deadline_s = time.monotonic() + _FREED_S
        while (kept := setting.memory_bytes() - before) >= _FEW_BYTES and time.monotonic() < deadline_s:
            time.sleep(0.1)  # the driver frees it after the process has ended
        found["kept_bytes"] = kept
        problems.expect(kept < _FEW_BYTES, f"{kept} bytes of the GPU are still in use")
    return problems.conclude(found)


def _ranks(launcher: int) -> list[int]:
    """Return the processes of a launcher's ranks in their order: its children but for Python's resource tracker."""
    found = []
    with suppress(OSError):
        for pid in sorted(descendants(launcher)):
            status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
            if int(status[1]) == launcher and b"resource_tracker" not in line:
                found.append(pid)
    return found


def memory_of_a_loop(setting: Setting) -> Figures:
    """A loop of one's own holds as much device memory after 1,000 steps as after 100."""
    network, steps = Network("lenet5", 28, 64, 1, "bfloat16", False), 20 if setting.quick else 1000
    found = setting.loop("join", network, steps=steps)["memory_bytes"]
    (early, early_reserved), (late, late_reserved) = found
    figures = {"allocated": [early, late], "reserved": [early_reserved, late_reserved]}
    late, late_reserved = (size - (0 if setting.is_gpu else 64 << 20) for size in (late, late_reserved))
    hold(late <= early, f"{late - early} more bytes are allocated", figures)
    hold(
        late_reserved <= early_reserved, f"{late_reserved - early_reserved} more bytes are reserved", figures
    )
    return figures


def memory_of_a_run(setting: Setting) -> Figures:
    """A run of two ranks takes as much memory at its end as early on, over 1,000 steps."""
    # Two ranks of 32 digits: 23 steps an epoch.
    epochs = "6" if setting.quick else "45"
    out = setting.run_folder("memory")
    out.parent.mkdir(parents=True, exist_ok=True)
    words = [*JOB, "--epochs", epochs, *TWO, "--strategy", "parameter_server", "--keep-checkpoints", "0"]
    words += ["--device", setting.device.type, "--out", str(out), "--json"]
    errors, seen = out.with_suffix(".err"), list[tuple[int, int]]()
    with background(setting.command("train", *words), errors, setting.environment) as run:
        deadline_s = time.monotonic() + PATIENCE_S
        while run.poll() is None:
            hold(time.monotonic() < deadline_s, f"no end: {_end(errors)}")
            with suppress(FileNotFoundError):
                done = (out / "events.jsonl").read_bytes().count(b'"event": "Evaluated"')
                seen.append((done, setting.memory_bytes()))
            time.sleep(0.1)
        hold(run.returncode == 0, f"the run ended with status {run.returncode}: {_end(errors)}")
    last = int(epochs)
    early = max((size for done, size in seen if last / 10 <= done <= last / 2), default=0)
    late = max((size for done, size in seen if last / 2 < done < last), default=0)
    figures = {"early_bytes": early, "late_bytes": late, "readings": len(seen)}
    hold(early > 0 and late > 0, "the run was too short to be watched", figures)
    # A CPU's processes also grow by libraries that are loaded at first use.
    room = (32 if setting.is_gpu else 256) << 20
    hold(late <= early + room, f"{(late - early) / 2**20:.0f} MiB more at the end", figures)
    return figures


def _few_pictures(setting: Setting) -> Path:
    """Return a folder of 120 pictures of two classes, made at its first use."""
    from PIL import Image

    folder = setting.folder / "few-pictures"
    if (folder / "whole").exists():
        return folder / "train"
    generator = torch.Generator().manual_seed(1)
    for number in range(120):
        home = folder / "train" / f"class-{number % 2}"
        home.mkdir(parents=True, exist_ok=True)
        pixels = (torch.rand(32, 32, 3, generator=generator) * 255 * (1 - 0.5 * (number % 2))).byte()
        Image.fromarray(pixels.numpy()).save(home / f"{number}.png")
    (folder / "whole").touch()
    return folder / "train"


def _difference(one: Path, other: Path) -> float:
    """Return how far two runs' parameters are apart, of their norm."""
    from safetensors.torch import load_file

    first, second = (load_file(path / "model.safetensors") for path in (one, other))
    apart = sum(float((first[name].double() - second[name].double()).square().sum()) for name in first)
    whole = sum(float(second[name].double().square().sum()) for name in second)
    return float((apart / whole) ** 0.5)


def _end(path: Path) -> str:
    """Return the end of a text file."""
    return path.read_text(encoding="utf-8", errors="replace")[-500:] if path.exists() else ""


def _scale(precision: Precision) -> float:
    return float(precision.state_dict()["scale"])


PART = Part(
    1,
    "Correct",
    (
        Row("two ranks on one GPU", two_ranks, 15),
        Row("pinned copies", pinned_copies, 5),
        Row("overlap with the backward pass", overlap, 6),
        Row("bfloat16 and float16", two_bytes, 15),
        Row("device cache", device_cache, 15),
        Row("CPU and GPU ranks in one run", mixed_devices, 20),
        Row("a CPU rank joins", guest, 20),
        Row("the same bits twice", same_bits, 25),
        Row("compile", compiled, 30),
        Row("resume across CPU and GPU", resume_elsewhere, 25),
        Row("a rank killed while its kernels run", killed, 20),
        Row("memory of a loop over 1,000 steps", memory_of_a_loop, 12),
        Row("memory of a run over 1,000 steps", memory_of_a_run, 20),
    ),
)
