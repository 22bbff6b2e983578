"""Everything that Polyrhythm does on a GPU, checked by one command.

    python benchmarks/gpu/check.py [--only NAME …] [--out FILE] [--device cuda|cpu]

Each check is a function whose docstring says what must hold; it returns figures, raises `Failed` with what did not
hold, or `LeftOut` with why it cannot be tried here. Exit status: 0 all held, 1 something did not, 2 no GPU is here.
With `--device cpu` the same code is tried without a GPU, as a test of these checks; it says nothing about GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyrhythm.communication.transports.torch_distributed.communicator import Staging
from polyrhythm.reporting.event_log import read_events
from polyrhythm.training.forward_pass import Precision

HERE = Path(__file__).parent
PATIENCE_S = 240.0
_READY_S = 60.0


class Failed(Exception):
    """A check did not hold."""


class LeftOut(Exception):
    """A check cannot be tried here."""


def hold(holds: bool, what: str) -> None:
    """Raise `Failed` unless something holds."""
    if not holds:
        raise Failed(what)


class Place:
    """Where the checks run.

    Args:
        device: `cuda`, or `cpu` to try the checks themselves.
        folder: for runs.
        quick: whether sizes are small.

    Attributes:
        device: as given.
        gpus: how many there are.
    """

    def __init__(self, device: str, folder: Path, *, quick: bool) -> None:
        self.device = torch.device(device)
        self.gpus = torch.cuda.device_count() if device == "cuda" else 0
        self.quick = quick
        self._folder = folder

    @property
    def is_gpu(self) -> bool:
        """Whether what is seen says something about GPUs."""
        return self.device.type == "cuda"

    def finish(self) -> None:
        """Wait for whatever the GPU computes."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def command(self, *words: str) -> list[str]:
        """Return a verb of the command line."""
        return [sys.executable, "-m", "polyrhythm", *words]

    def run(self, name: str, *words: str) -> Path:
        """Return the folder of a run that is to be made with these options."""
        return self._folder / name

    def train(self, name: str, *words: str, device: str | None = None) -> dict[str, Any]:
        """Train to the end in processes of its own; return the figures."""
        out = self.run(name)
        options = ["--out", str(out), "--json", "--device", device or self.device.type]
        done = subprocess.run(
            self.command("train", *JOB, *options, *words),
            capture_output=True, text=True, timeout=PATIENCE_S, env=self.environment, check=False,
        )  # fmt: skip
        if done.returncode:
            raise Failed(f"train {' '.join(words)}: status {done.returncode}: {done.stderr[-600:]}")
        found: dict[str, Any] = json.loads(done.stdout)
        return found | {"said": done.stderr}

    @property
    def environment(self) -> dict[str, str]:
        """The environment of runs."""
        return os.environ | {"OMP_NUM_THREADS": "1"}


JOB = ("--data", "digits", "--model", "mlp", "--batch-size", "32", "--epochs", "3", "--seed", "3")


def device_ranks(place: Place) -> dict[str, Any]:
    """Two workers, on a GPU each or on one together, hold equal parameters and learn what a CPU's learn."""
    plain = ("--precision", "float32", "--workers", "2", "--strategy", "synchronous")
    ours = place.train("ranks", *plain)
    cpu = place.train("ranks-cpu", *plain, device="cpu")
    difference = _difference(place.run("ranks"), place.run("ranks-cpu"))
    hold(difference < 1e-2, f"parameters differ from a CPU's by {difference:.2g} of their norm")
    hold(
        abs(ours["test_top1"] - cpu["test_top1"]) < 0.03, f"top-1 {ours['test_top1']} and {cpu['test_top1']}"
    )
    return {"difference": difference, "test_top1": ours["test_top1"], "gpus": place.gpus}


def several_on_one(place: Place) -> dict[str, Any]:
    """More workers than GPUs share them, with servers and without."""
    many = str(max(3, 2 * place.gpus + 1)) if place.gpus < 4 else str(place.gpus + 1)
    found = {}
    for strategy in ("synchronous", "parameter_server", "local_sgd(steps=4)", "ad_psgd"):
        figures = place.train(f"several-{strategy.split('(')[0]}", "--workers", many, "--strategy", strategy)
        hold(figures["images_not_seen"] == 0, f"{strategy}: {figures['images_not_seen']} images not seen")
        hold(figures["test_top1"] > 0.6, f"{strategy}: top-1 {figures['test_top1']}")
        found[strategy] = round(figures["test_top1"], 3)
    return {"workers": int(many), "test_top1": found}


class _Sent:
    """A message that has left at once."""

    def wait(self) -> None:
        """Return at once."""

    def done(self) -> bool:
        """Return that it has left."""
        return True


def pinned_copies(place: Place) -> dict[str, Any]:
    """What leaves a GPU through pinned memory is what was computed when it was sent, and goes faster so."""
    numbers = 1 << (16 if place.quick else 24)
    staging = (
        Staging.of(place.device)
        if place.is_gpu
        else Staging(lambda source, target: target.copy_(source), pinned=False)
    )
    made = torch.zeros(numbers, device=place.device)
    busy = torch.randn(512 if place.quick else 4096, 512 if place.quick else 4096, device=place.device)
    got: list[Tensor] = []

    def start(staged: Tensor) -> Any:
        got.append(staged.clone())
        return _Sent()

    for value in range(10):
        for _ in range(3):  # so that the number is not there yet when the copy is asked for
            busy = torch.tanh(busy @ busy)
        made.fill_(float(value))
        staging.send(made, start)
        made.fill_(-1.0)  # what comes later must not be sent
    hold([float(each.min()) for each in got] == [float(each.max()) for each in got], "a copy is torn")
    hold(
        [float(each[0]) for each in got] == list(range(10)), f"copies hold {[float(each[0]) for each in got]}"
    )
    hold(staging.nbytes <= 2 * made.nbytes, f"{staging.nbytes} bytes of buffers for {made.nbytes}")
    pinned_s = _seconds(place, lambda: staging.send(made, lambda staged: _Sent()))
    ordinary = torch.empty(numbers)
    ordinary_s = _seconds(place, lambda: ordinary.copy_(made))
    figures = {"pinned": _rate(made.nbytes, pinned_s), "ordinary": _rate(made.nbytes, ordinary_s)}
    if place.is_gpu:
        hold(pinned_s < 1.2 * ordinary_s, f"pinned copies are slower: {figures}")
        hold(staging._buffers[0].memory.is_pinned(), "buffers are not pinned")
    return figures


def overlap(place: Place) -> dict[str, Any]:
    """A copy to the host goes on beside what the GPU computes: both together take less than one after the other."""
    if not place.is_gpu:
        raise LeftOut("there are no streams on a CPU")
    staging, size = Staging.of(place.device), 8192
    left, right = (torch.randn(size, size, device=place.device) for _ in range(2))
    sent = torch.randn(1 << 26, device=place.device)
    staging.send(sent, lambda staged: _Sent())

    def compute() -> None:
        for _ in range(6):
            torch.mm(left, right)

    def both() -> None:
        # The copy waits for what was asked for before it; so it is asked for first, on a thread as a link does.
        stream: Any = torch.cuda.Stream(place.device)
        with torch.cuda.stream(stream):
            compute()
        staging.send(sent, lambda staged: _Sent())

    computing_s, copying_s = (
        _seconds(place, compute),
        _seconds(place, lambda: staging.send(sent, lambda staged: _Sent())),
    )
    together_s = _seconds(place, both)
    hidden = (computing_s + copying_s - together_s) / min(computing_s, copying_s)
    hold(
        hidden > 0.5,
        f"only {hidden:.0%} of the shorter is hidden ({computing_s:.4f}, {copying_s:.4f}, {together_s:.4f} s)",
    )
    return {"computing_s": computing_s, "copying_s": copying_s, "together_s": together_s, "hidden": hidden}


def two_bytes(place: Place) -> dict[str, Any]:
    """Steps in two bytes learn what those in four do; an overflow of float16 is left out, and lowers the scale."""
    found: dict[str, Any] = {}
    exact = place.train("float32", "--precision", "float32", "--workers", "2")["test_top1"]
    for name in ("bfloat16", "float16"):
        if name == "float16" and not place.is_gpu:
            continue  # refused on a CPU
        figures = place.train(name, "--precision", name, "--workers", "2")
        found[name] = round(figures["test_top1"], 3)
        hold(
            abs(figures["test_top1"] - exact) < 0.05,
            f"{name}: top-1 {figures['test_top1']}, {exact} in float32",
        )
    if place.is_gpu:
        precision = Precision.choose("float16", place.device)
        weights = torch.ones(4, device=place.device, requires_grad=True)
        first = _scale(precision)
        precision.scale((weights * 1e30).sum()).backward()
        hold(not precision.unscale(weights.grad), "an overflow counts as a step")
        hold(_scale(precision) < first, "an overflow does not lower the scale")
        weights.grad = None
        precision.scale((weights * 2).sum()).backward()
        hold(precision.unscale(weights.grad), "a good step is left out")
        hold(
            torch.equal(weights.grad, torch.full_like(weights, 2.0)), f"gradients are scaled: {weights.grad}"
        )
        found["scale"] = [first, _scale(precision)]
    return found | {"float32": round(exact, 3)}


def nccl(place: Place) -> dict[str, Any]:
    """Where every worker has a GPU of its own, NCCL adds up: to rounding, what sums by way of the CPU give."""
    if place.gpus < 2:
        raise LeftOut(f"{place.gpus} GPUs: NCCL wants one for each of two ranks")
    words = ("--precision", "float32", "--workers", str(place.gpus))
    place.train("nccl", *words)
    # One worker more shares a GPU: then sums go by way of the CPU; direct sums are those of the order of ranks.
    place.train("by-cpu", *words, "--strategy", "synchronous(collective=direct)")
    difference = _difference(place.run("nccl"), place.run("by-cpu"))
    hold(difference < 1e-3, f"parameters differ by {difference:.2g} of their norm")
    return {"workers": place.gpus, "difference": difference}


def mixed_devices(place: Place) -> dict[str, Any]:
    """A worker on a CPU joins those on a GPU, and all images are seen, with servers and in lockstep."""
    found = {}
    for strategy in ("parameter_server", "synchronous"):
        found[strategy] = _with_guest(place, strategy)
    return found


def _with_guest(place: Place, strategy: str) -> dict[str, Any]:
    out = place.run(f"mixed-{strategy}")
    options = ["--strategy", strategy, "--workers", "2", "--vacant", "1", "--listen", "0", "--deal", "fixed"]
    options += ["--device", place.device.type, "--precision", "float32", "--out", str(out), "--json"]
    command = place.command("train", *JOB, "--epochs", "20", *options)
    with (out.with_suffix(".err")).open("w+") as said, (out.with_suffix(".out")).open("w+") as told:
        run = subprocess.Popen(
            command, stdout=told, stderr=said, env=place.environment, start_new_session=True
        )
        guest: subprocess.Popen[str] | None = None
        try:
            deadline_s = time.monotonic() + _READY_S
            while not (out / "join.json").exists():
                hold(run.poll() is None and time.monotonic() < deadline_s, f"no door: {said.name}")
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
            guest = subprocess.Popen(
                place.command(*words), stderr=subprocess.PIPE, text=True, env=place.environment
            )
            left = guest.communicate(timeout=PATIENCE_S)[1]
            hold(
                run.wait(PATIENCE_S) == 0, f"the run ended with status {run.returncode}: {_tail(out, '.err')}"
            )
        finally:
            for process in (run, guest):
                if process is not None and process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL) if process is run else process.kill()
    figures = json.loads(out.with_suffix(".out").read_text())
    hold(figures["workers_joined"] == 1, f"nobody joined: {left[-300:]}")
    hold(figures["images_not_seen"] == 0, f"{figures['images_not_seen']} images not seen")
    return {"test_top1": round(figures["test_top1"], 3), "joined": figures["workers_joined"]}


def device_cache(place: Place) -> dict[str, Any]:
    """Pictures are kept in the GPU's memory, at most so many bytes, and change no bit of the result."""
    with tempfile.TemporaryDirectory() as folder:
        data = _pictures(Path(folder), 120)
        common = (
            "--data",
            str(data),
            "--model",
            "lenet5",
            "--workers",
            "1",
            "--precision",
            "float32",
            "--image-size",
            "28",
        )
        without = place.train("cache-none", *common, "--cache", "none")
        kept = place.train("cache-auto", *common, "--cache", "auto")
        half = place.train("cache-small", *common, "--cache", "100kB")
    hashes = {figures["parameters_sha256"] for figures in (without, kept, half)}
    hold(len(hashes) == 1, "the cache changes bits")
    used = [
        event
        for event in read_events(place.run("cache-auto") / "events.jsonl")
        if hasattr(event, "kept_bytes")
    ]
    hold(sum(event.hits for event in used) > 0, f"nothing was taken from the cache: {used}")
    small = [
        event
        for event in read_events(place.run("cache-small") / "events.jsonl")
        if hasattr(event, "kept_bytes")
    ]
    hold(max(event.kept_bytes for event in small) <= 100_000, "more is kept than may be")
    return {"kept_bytes": used[-1].kept_bytes, "hits": sum(event.hits for event in used)}


def the_same_bits(place: Place) -> dict[str, Any]:
    """A run in lockstep has the same bits each time, also resumed; a recorded one is replayed to its bits."""
    words = ("--workers", "2", "--precision", "float32")
    hashes = [place.train(f"same-{number}", *words)["parameters_sha256"] for number in range(2)]
    hold(len(set(hashes)) == 1, "a second run has other bits")
    place.train("part", *words, "--epochs", "2", "--schedule", "constant")
    whole = place.train("whole", *words, "--schedule", "constant")["parameters_sha256"]
    resumed = subprocess.run(
        place.command("train", "--resume", str(place.run("part")), "--epochs", "3", "--json"),
        capture_output=True, text=True, timeout=PATIENCE_S, env=place.environment, check=False,
    )  # fmt: skip
    hold(resumed.returncode == 0, f"it is not resumed: {resumed.stderr[-300:]}")
    hold(json.loads(resumed.stdout)["parameters_sha256"] == whole, "a resumed run has other bits")
    place.train("recorded", *words, "--strategy", "parameter_server")
    played = subprocess.run(
        place.command("replay", str(place.run("recorded")), "--json"),
        capture_output=True, text=True, timeout=PATIENCE_S, env=place.environment, check=False,
    )  # fmt: skip
    hold(played.returncode == 0, f"the replay differs: {played.stdout[-300:]}{played.stderr[-300:]}")
    return {"sha256": hashes[0][:12], "replayed": json.loads(played.stdout)["same"]}


def speed(place: Place) -> dict[str, Any]:
    """Images a second of `synchronous` and of PyTorch's DDP: one network, batches in the device's memory, in turns."""
    ranks, rounds = max(1, place.gpus), 1 if place.quick else 3
    pairs = []
    for _ in range(rounds):
        ours, ddp = (_race(place, who, ranks) for who in ("polyrhythm", "ddp"))
        pairs.append((ours, ddp))
    ratio = statistics.median(ours / ddp for ours, ddp in pairs)
    if not place.quick:
        hold(ratio > 0.8, f"{ratio:.2f} of DDP's images a second")
    return {
        "ranks": ranks,
        "ratio": round(ratio, 3),
        "images_per_s": [[round(each) for each in pair] for pair in pairs],
    }


def _race(place: Place, who: str, ranks: int) -> float:
    """Return images a second of one program."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [
        str(Path(__file__).with_name("racer.py")),
        who,
        place.device.type,
        *(["quick"] if place.quick else []),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, env=place.environment, check=False
    )
    found = re.search(r"images_per_s ([\d.]+)", done.stdout)
    if found is None:
        raise Failed(f"{who}: status {done.returncode}: {done.stderr[-600:]}")
    return float(found[1])


CHECKS: dict[str, Callable[[Place], dict[str, Any]]] = {
    "device ranks": device_ranks,
    "several ranks a GPU": several_on_one,
    "pinned copies": pinned_copies,
    "overlap": overlap,
    "two-byte precision": two_bytes,
    "NCCL": nccl,
    "CPU and GPU in one run": mixed_devices,
    "device cache": device_cache,
    "the same bits": the_same_bits,
    "speed against DDP": speed,
}


def _difference(one: Path, other: Path) -> float:
    """Return how far two runs' parameters are apart, of their norm."""
    from safetensors.torch import load_file

    first, second = (load_file(path / "model.safetensors") for path in (one, other))
    apart = sum(float((first[name].double() - second[name].double()).square().sum()) for name in first)
    whole = sum(float(second[name].double().square().sum()) for name in second)
    return float((apart / whole) ** 0.5)


def _pictures(folder: Path, count: int) -> Path:
    """Write pictures of two classes."""
    from PIL import Image

    generator = torch.Generator().manual_seed(1)
    for number in range(count):
        name = folder / "train" / f"class-{number % 2}"
        name.mkdir(parents=True, exist_ok=True)
        pixels = (torch.rand(32, 32, 3, generator=generator) * 255 * (1 - 0.5 * (number % 2))).byte()
        Image.fromarray(pixels.numpy()).save(name / f"{number}.png")
    return folder / "train"


def _tail(out: Path, suffix: str) -> str:
    return out.with_suffix(suffix).read_text()[-400:]


def _scale(precision: Precision) -> float:
    return float(precision.state_dict()["scale"])


def _rate(nbytes: int, seconds: float) -> str:
    return f"{nbytes / seconds / 1e9:.1f} GB/s"


def _seconds(place: Place, act: Callable[[], object], times: int = 5) -> float:
    """Return the median of some times, what the device computes included."""
    taken = []
    for _ in range(times + 1):
        place.finish()
        began_s = time.perf_counter()
        act()
        place.finish()
        taken.append(time.perf_counter() - began_s)
    return statistics.median(taken[1:])


def machine(place: Place) -> str:
    """Return what it is, in a line."""
    gpu = (
        f"{place.gpus} × {torch.cuda.get_device_name()}"
        if place.is_gpu
        else "no GPU: the checks themselves are tried"
    )
    return f"{gpu}; {os.cpu_count()} cores ({platform.machine()}); PyTorch {torch.__version__}"


def main() -> int:
    """Make all checks; print a table of them, and return the exit status."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--only", nargs="*", choices=list(CHECKS), default=list(CHECKS))
    options.add_argument("--out", type=Path, default=None, help="a file for the results, as JSON")
    options.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options.add_argument("--quick", action="store_true", help="small sizes, no claim about speed")
    chosen = options.parse_args()
    if chosen.device == "cuda" and not torch.cuda.is_available():
        print("no GPU is here (torch.cuda.is_available() is false): nothing was checked", file=sys.stderr)
        return 2
    rows = []
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        place = Place(chosen.device, Path(folder), quick=chosen.quick)
        print(f"{machine(place)}\n\n| check | outcome | seconds | found |\n|---|---|---|---|", flush=True)
        for name in chosen.only:
            began_s = time.monotonic()
            outcome, found = "ok", dict[str, Any]()
            try:
                found = CHECKS[name](place)
            except LeftOut as why:
                outcome, found = "left out", {"why": str(why)}
            except Failed as why:
                outcome, found = "FAILED", {"why": str(why)}
            except Exception as error:
                traceback.print_exc()
                outcome, found = "FAILED", {"why": f"{type(error).__name__}: {error}"}
            seconds = round(time.monotonic() - began_s, 1)
            rows.append({"check": name, "outcome": outcome, "seconds": seconds, "found": found})
            told = ", ".join(f"{key} {_short(value)}" for key, value in found.items()).replace("\n", " ")
            print(f"| {name} | {outcome} | {seconds} | {told} |", flush=True)
        if chosen.out is not None:
            text = json.dumps({"machine": machine(place), "checks": rows}, indent=1)
            chosen.out.write_text(f"{text}\n", encoding="utf-8")
    return int(any(row["outcome"] == "FAILED" for row in rows))


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
