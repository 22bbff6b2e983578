"""Where the checks run, and what they share: training runs, loops, pictures, times and earlier rows."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

HERE = Path(__file__).parents[1]
ROOT = HERE.parents[1]
PATIENCE_S = 240.0
"""Longest time of one command."""
Figures = dict[str, Any]


class Unsettled(Exception):
    """A check has no good end.

    Args:
        reason: why.
        figures: what was measured nevertheless.
    """

    def __init__(self, reason: str, figures: Mapping[str, Any] | None = None) -> None:
        super().__init__(reason)
        self.figures = dict(figures or {})


class Failed(Unsettled):
    """A check did not hold."""


class Skipped(Unsettled):
    """A check cannot be made here."""


class NotInstalled(Exception):
    """A check needs a package that is missing; its text is the package's name."""


def hold(holds: bool, reason: str, figures: Mapping[str, Any] | None = None) -> None:
    """Raise `Failed` unless something holds."""
    if not holds:
        raise Failed(reason, figures)


@dataclass
class Problems:
    """What did not hold of a check that measures several things and reports all of them."""

    reasons: list[str] = field(default_factory=list)

    def expect(self, holds: bool, reason: str) -> None:
        """Note a reason unless something holds."""
        if not holds:
            self.reasons.append(reason)

    def conclude(self, figures: Figures) -> Figures:
        """Return the figures, or raise `Failed` with all reasons and the figures."""
        hold(not self.reasons, "; ".join(self.reasons), figures)
        return figures


@dataclass(frozen=True)
class Network:
    """A network and how it is trained.

    Attributes:
        model: its name.
        side: pixels a side of a picture.
        batch: images of a worker's step.
        channels: of a picture.
        precision: `float32`, `bfloat16` or `float16`.
        channels_last: whether channels lie innermost.
        compiled: whether it is compiled.
    """

    model: str
    side: int
    batch: int
    channels: int = 3
    precision: str = "bfloat16"
    channels_last: bool = True
    compiled: bool = False

    @property
    def words(self) -> tuple[str, ...]:
        """The same as options of the command line."""
        chosen = ["--model", self.model, "--batch-size", str(self.batch), "--image-size", str(self.side)]
        chosen += ["--precision", self.precision]
        chosen += ["--channels-last"] * self.channels_last + ["--compile"] * self.compiled
        return tuple(chosen)


CLASSES = 10


class Setting:
    """Where the checks run.

    Args:
        device: `cuda`, or `cpu` to try the checks themselves.
        folder: for runs and pictures; kept from call to call.
        quick: whether sizes are small and nothing is claimed of speed.
        earlier: the figures of rows that have been made before, by name.

    Attributes:
        device: as given.
        quick: as given.
        folder: as given.
    """

    def __init__(
        self, device: str, folder: Path, *, quick: bool, earlier: Mapping[str, Figures] | None = None
    ) -> None:
        self.device = torch.device(device)
        self.quick = quick
        self.folder = folder
        self._earlier = earlier or {}
        self._runs = 0

    @property
    def is_gpu(self) -> bool:
        """Whether figures say something about GPUs."""
        return self.device.type == "cuda"

    @property
    def cores(self) -> int:
        """Cores that this process may use."""
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def earlier(self, row: str, figure: str, measured: Mapping[str, Any] | None = None) -> float:
        """Return a figure of an earlier row; raise `Skipped`, with what was measured so far, where there is none."""
        found = self._earlier.get(row, {}).get(figure)
        if found is None:
            raise Skipped(f"needs {figure} of the row {row!r}, which has none", measured)
        return float(found)

    def finish(self) -> None:
        """Wait for all work of the GPU."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def seconds(self, act: Callable[[], object], times: int = 5) -> float:
        """Return the median seconds of an act, with all work of the GPU; the first is not counted."""
        taken = []
        for _ in range(times + 1):
            self.finish()
            began_s = time.perf_counter()
            act()
            self.finish()
            taken.append(time.perf_counter() - began_s)
        return statistics.median(taken[1:])

    def memory_bytes(self) -> int:
        """Return the bytes in use on the GPU by all processes; without one, of this process and its descendants."""
        if self.is_gpu:
            free, whole = torch.cuda.mem_get_info()
            return whole - free
        page = os.sysconf("SC_PAGE_SIZE")
        resident = 0
        for pid in (os.getpid(), *descendants(os.getpid())):
            with suppress(OSError):
                shared = Path(f"/proc/{pid}/statm").read_text().split()
                resident += (int(shared[1]) - int(shared[2])) * page
        return resident

    @property
    def environment(self) -> dict[str, str]:
        """The environment of commands: the package of this checkout, one thread a library, nothing from the network."""
        path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
        return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

    def command(self, *words: str) -> list[str]:
        """Return a verb of the command line, as a command."""
        return [sys.executable, "-m", "polyrhythm", *words]

    def run_folder(self, name: str) -> Path:
        """Return the folder of a run of this row."""
        return self.folder / "runs" / f"{os.getpid()}-{name}"

    def call(self, *words: str, patience_s: float = PATIENCE_S) -> Figures:
        """Run a verb to its end; return its JSON object.

        Raises:
            Failed: it ended with another status than 0.
        """
        done = subprocess.run(
            self.command(*words, "--json"),
            capture_output=True, text=True, timeout=patience_s, env=self.environment, check=False,
        )  # fmt: skip
        hold(done.returncode == 0, f"{' '.join(words)[:300]}: status {done.returncode}: {done.stderr[-600:]}")
        found: Figures = json.loads(done.stdout)
        return found

    def train(self, name: str, *words: str, device: str | None = None) -> Figures:
        """Train to the end in processes of its own; return the figures."""
        out = self.run_folder(name)
        out.parent.mkdir(parents=True, exist_ok=True)
        return self.call("train", *words, "--out", str(out), "--device", device or self.device.type)

    def train_all(self, **jobs: tuple[str, ...]) -> dict[str, Figures]:
        """Train several runs by name, some at a time; each is given by the device and the options."""
        runs = [partial(self.train, name, *words, device=device) for name, (device, *words) in jobs.items()]
        return dict(zip(jobs, self.at_once(runs), strict=True))

    def at_once(self, acts: Sequence[Callable[[], Any]]) -> list[Any]:
        """Return the results of acts that wait for processes, at most one for two cores at a time."""
        with ThreadPoolExecutor(max(1, min(6, self.cores // 2))) as threads:
            return [run.result() for run in [threads.submit(act) for act in acts]]

    def loop(self, kind: str, network: Network, **more: Any) -> Figures:
        """Run `loop.py` in a process of its own; return its figures, `images_per_s` among them."""
        options = {**vars(network), **more, "kind": kind, "device": self.device.type, "quick": self.quick}
        # As torchrun starts one process, whose own start takes seconds.
        one = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        one |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        done = subprocess.run(
            [sys.executable, str(HERE / "loop.py"), json.dumps(options)],
            capture_output=True, text=True, timeout=PATIENCE_S, check=False,
            env=self.environment | (one if kind == "join" else {}),
        )  # fmt: skip
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        hold(bool(lines), f"{kind} of {network.model}: status {done.returncode}: {done.stderr[-900:]}")
        found: Figures = json.loads(lines[-1])
        return found

    def measured(self, name: str, *words: str, device: str | None = None, **window: float) -> Measured:
        """Train until a steady stretch has been seen, then stop the run; return what was measured.

        Args:
            name: of the run.
            *words: options; the number of epochs is set here.
            device: of the workers; None: that of the checks.
            **window: `from_epoch` (the first that counts, from 0), `skip_s` and `seconds`; see `Window`.
        """
        out = self.run_folder(name)
        out.parent.mkdir(parents=True, exist_ok=True)
        options = ["--out", str(out), "--device", device or self.device.type, "--epochs", "1000"]
        options += ["--optimizer", "sgd(lr=0.01)", "--keep-checkpoints", "0", "--json"]
        seen = Window(self.quick, **window)
        with background(
            self.command("train", *words, *options), out.with_suffix(".err"), self.environment
        ) as run:
            return _measured(run, out, seen)

    def pictures(self, side: int, *, photographs: bool = False) -> Path:
        """Return a folder of pictures of `CLASSES` classes, made at its first use.

        More than 20,000 of them, of which a run reads only the headers when it starts. Few are different: they are
        links to the same files, which decoders do not know.

        Args:
            side: pixels a side of small ones.
            photographs: whether they are JPEG files of 500 by 400 pixels, as photographs are on average.
        """
        name = "photographs" if photographs else f"pictures-{side}"
        folder, count = self.folder / name, 64 if self.quick else 20_480
        if not (folder / "whole").exists():
            _write_pictures(folder, count, side, photographs=photographs, quick=self.quick)
            (folder / "whole").touch()
        return folder / "data"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _write_pictures(folder: Path, count: int, side: int, *, photographs: bool, quick: bool) -> None:
    """Write pictures whose colors change softly, with a tint of each class."""
    from PIL import Image

    draws, different, tests = random.Random(1), 20 if quick else 200, 20 if quick else 40
    shape, ending = ((500, 400), "jpg") if photographs else ((side, side), "png")
    whole = []
    for number in range(different):
        tint = 16 * (number % CLASSES)
        coarse = bytes(min(255, draws.randrange(96) + tint) for _ in range(8 * 8 * 3))
        path = folder / "different" / f"{number}.{ending}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.frombytes("RGB", (8, 8), coarse).resize(shape, Image.Resampling.BICUBIC).save(path, quality=90)
        whole.append(path)
    for part, size in (("train", count), ("test", tests)):
        for number in range(size):
            home = folder / "data" / part / f"class-{number % CLASSES}"
            home.mkdir(parents=True, exist_ok=True)
            link = home / f"{number}.{ending}"
            with suppress(FileExistsError):
                os.link(whole[number % different], link)


@dataclass(frozen=True)
class Window:
    """Which stretch of a run counts.

    Attributes:
        quick: whether any two reports do.
        from_epoch: the first epoch that counts, from 0: earlier ones fill caches and choose algorithms.
        skip_s: seconds after the first report that do not count.
        seconds: that count, at least.
    """

    quick: bool
    from_epoch: float = 1
    skip_s: float = 0.0
    seconds: float = 5.0

    @property
    def wanted_s(self) -> float:
        """Seconds that must be seen."""
        return 0.2 if self.quick else self.seconds


@dataclass(frozen=True)
class Measured:
    """What was measured of a run.

    Attributes:
        images_per_s: of all workers, by their reports in the window.
        seconds: of the window.
        bottleneck: what held the run back, by its own figures; None where they do not tell.
        joules_per_image: of all GPUs in the window; None where no counter can be read.
    """

    images_per_s: float
    seconds: float
    bottleneck: str | None
    joules_per_image: float | None


def _measured(run: subprocess.Popen[str], out: Path, window: Window) -> Measured:
    """Follow a run's reports until the window is seen; then ask it to stop."""
    from polyrhythm.launch.energy import EnergyCounter

    counter, reports, deadline_s = EnergyCounter(), Reports(window), time.monotonic() + PATIENCE_S
    joules: list[tuple[float, float | None]] = []
    path = out / "events.jsonl"
    while time.monotonic() < deadline_s:
        ended = run.poll() is not None
        reports.read(path)
        if reports.seconds > 0:
            joules.append((reports.images, counter.gpu_joules))
        if ended or reports.seconds >= window.wanted_s:
            break
        time.sleep(0.05)
    if run.poll() is None:
        run.send_signal(signal.SIGTERM)  # the launcher asks all ranks to stop, and reports
        with suppress(subprocess.TimeoutExpired):
            run.wait(15.0)
    said = out.with_suffix(".err").read_text(encoding="utf-8")[-600:]
    hold(
        reports.seconds >= window.wanted_s,
        f"no steady stretch of {window.wanted_s:g} s, status {run.poll()}: {said}",
    )
    reports.read(path)
    images, energy = (0.0, None) if len(joules) < 2 else (joules[-1][0] - joules[0][0], _spent(joules))
    return Measured(
        reports.rate,
        reports.seconds,
        _bottleneck(path),
        energy / images if energy and images > 0 else None,
    )


def _bottleneck(events: Path) -> str | None:
    from polyrhythm.reporting.event_log import read_events
    from polyrhythm.reporting.figures import RunFigures
    from polyrhythm.reporting.held_back import held_back

    found = held_back(RunFigures.of(read_events(events)))
    return None if found is None else found.cause


def _spent(joules: Sequence[tuple[float, float | None]]) -> float | None:
    first, last = joules[0][1], joules[-1][1]
    return None if first is None or last is None else last - first


class Reports:
    """Adds up the workers' reports of a run that lie in a window.

    A report counts from the one before it in the same epoch, so that tests and checkpoints between epochs do not. In
    epochs with one report each, it counts from that of the epoch before.

    Args:
        window: what counts.
    """

    def __init__(self, window: Window) -> None:
        self._window = window
        self._read = 0
        self._last: dict[int, tuple[int, float]] = {}
        self._first_s = math.inf
        self._inside: dict[int, list[float]] = {}
        self._across: dict[int, list[float]] = {}

    def read(self, path: Path) -> None:
        """Read what has been added to the events since the last call; a line that is not whole waits."""
        with suppress(FileNotFoundError), path.open("rb") as file:
            file.seek(self._read)
            *lines, _ = file.read().split(b"\n")
            for line in lines:
                self._read += len(line) + 1
                self._take(json.loads(line))

    def _take(self, event: Figures) -> None:
        if event["event"] != "WorkerProgress":
            return
        worker, epoch, at_s = event["worker"], event["epoch"], event["time_s"]
        self._first_s = min(self._first_s, at_s)
        before = self._last.get(worker)
        self._last[worker] = epoch, at_s
        if before is None or before[1] < self._first_s + self._window.skip_s:
            return
        if before[0] < self._window.from_epoch:
            return
        kind = self._inside if before[0] == epoch else self._across
        seconds, images = kind.setdefault(worker, [0.0, 0.0])
        kind[worker] = [seconds + at_s - before[1], images + event["images"]]

    @property
    def _kept(self) -> dict[int, list[float]]:
        inside, across = (sum(worker[0] for worker in kind.values()) for kind in (self._inside, self._across))
        return self._inside if inside >= across / 2 else self._across

    @property
    def seconds(self) -> float:
        """Seconds that count, of the worker with the fewest; 0 until a report of each counts."""
        kept = self._kept
        return min(seconds for seconds, _ in kept.values()) if kept and len(kept) == len(self._last) else 0.0

    @property
    def images(self) -> float:
        """Images in all reports that count."""
        return sum(images for _, images in self._kept.values())

    @property
    def rate(self) -> float:
        """Images a second: the sum of the workers' own rates."""
        return sum(images / seconds for seconds, images in self._kept.values() if seconds > 0)


@contextmanager
def background(
    command: Sequence[str], said: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[str]]:
    """Run a command in a session of its own; whatever is left of it is killed at the end.

    Args:
        command: its words.
        said: file of its standard error; standard output goes to the same name with `.out`.
        environment: of the command.
    """
    with said.open("w") as errors, said.with_suffix(".out").open("w") as output:
        streams: dict[str, IO[str]] = {"stdout": output, "stderr": errors}
        run = subprocess.Popen(command, text=True, env=dict(environment), start_new_session=True, **streams)
        try:
            yield run
        finally:
            below = descendants(run.pid) if run.poll() is None else []
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
            for pid in below:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            run.wait()


def descendants(pid: int) -> list[int]:
    """Return the processes below a process, parents first.

    By the parent that each process names: some sandboxes have no list of children.
    """
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):  # it may have ended
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(status.parent.name))
    found, level = [], [pid]
    while level:
        level = [child for each in level for child in sorted(children.get(each, []))]
        found += level
    return found


@dataclass(frozen=True)
class Row:
    """A check.

    Attributes:
        name: of the row.
        check: makes it; its docstring says what must hold.
        seconds: that it takes on a GPU, about; it is stopped after three times as long.
    """

    name: str
    check: Callable[[Setting], Figures]
    seconds: float


@dataclass(frozen=True)
class Part:
    """Rows that belong together.

    Attributes:
        number: in the README.
        title: of the part.
        rows: its checks, in their order.
    """

    number: int
    title: str
    rows: tuple[Row, ...]
