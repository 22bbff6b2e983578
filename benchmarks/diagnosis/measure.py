"""Whether `why` names a planted cause of slowness, and predicts what its absence and its remedy then gain.

    python benchmarks/diagnosis/measure.py [--only "one bad NIC"] [--out FILE]

Every case is a cluster with one fault. `why` sees the run on it alone; the truth is a run on the same cluster without
the fault, and a run with the remedy. All are dry runs in virtual time but those under REAL, which are runs on this
machine. Cases that the file has already are not measured again unless they are named.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from polyrhythm.api.simulate import simulate
from polyrhythm.api.train import train
from polyrhythm.api.why import Cause, Why, why
from polyrhythm.communication.message import Kind
from polyrhythm.communication.transports.torch_distributed.communicator import TorchDistributedCommunicator
from polyrhythm.data.image_files import ImageFileSplit
from polyrhythm.launch.devices import available_cores
from polyrhythm.reporting.event_log import LOG_FILE, read_events
from polyrhythm.reporting.figures import RunFigures
from polyrhythm.reporting.held_back import (
    CROWD,
    DECODING,
    NETWORK,
    OTHERS,
    READING,
    SERVERS,
    SLOWER,
    TESTS,
    UNEVEN,
)
from polyrhythm.roles.leading import training_duties
from polyrhythm.roles.model_workload import ModelWorkload
from polyrhythm.simulation.cluster import Cluster, Link
from polyrhythm.strategies.parameter_server.serving import session

QUICK = {"latency_s": 1e-5, "bandwidth_bytes_per_s": 1.25e9}
THIN = {"latency_s": 1e-4, "bandwidth_bytes_per_s": 2e6}
SERVED = "parameter_server(consistency=synchronous, servers=1, placement=dedicated)"
ASYNCHRONOUS = "parameter_server(servers=1, placement=dedicated)"
GROUPS = "mixed(replicas=2, servers=1, placement=dedicated)"
WORKERS = [{"name": "worker", "count": 4}]
WITH_SERVER = [{"name": "worker", "count": 4}, {"name": "server", "count": 1}]


def described(**changed: Any) -> dict[str, Any]:
    """Return a cluster of four even hosts on quick links, whose steps take 50 ms."""
    values = {
        "name": "planted",
        "hosts": WORKERS,
        "nic": QUICK,
        "inside": QUICK,
        "step_time": "constant(seconds=0.05)",
    }
    return {**values, **changed}


@dataclass(frozen=True)
class Case:
    """One planted cause.

    Attributes:
        cause: as `why` should name it.
        ill: what is described otherwise than in `well`.
        well: what of the healthy cluster is described otherwise than by `described`.
        job: options of the run.
    """

    cause: str
    ill: Mapping[str, Any]
    well: Mapping[str, Any] = field(default_factory=dict)
    job: Mapping[str, Any] = field(default_factory=dict)


def hosts(*changed: dict[str, Any], server: bool = False) -> list[dict[str, Any]]:
    """Return four hosts of a worker each, the last ones changed so, and perhaps one for a server."""
    even = [{"name": f"worker{number}", "count": 1} for number in range(4 - len(changed))]
    others = [{"name": f"other{number}", "count": 1, **each} for number, each in enumerate(changed)]
    return [*even, *others, *([{"name": "server", "count": 1}] if server else [])]


CASES: dict[str, Case] = {
    "one worker at a third of the speed": Case(SLOWER, {"slow": {2: 3.0}}),
    "one host of an older kind": Case(SLOWER, {"hosts": hosts({"speed": 0.6})}),
    "two hosts of an older kind, of eight": Case(
        SLOWER,
        {"hosts": [{"name": "new", "count": 6}, {"name": "old", "count": 2, "speed": 0.5}]},
        {"hosts": [{"name": "new", "count": 8}]},
        {"workers": 8},
    ),
    "a noisy neighbor on one host": Case(
        SLOWER, {"passing_slowness": [{"rank": 1, "from_s": 0, "to_s": 1e6, "factor": 2.5}]}
    ),
    "one slow worker before a server": Case(
        SLOWER, {"hosts": WITH_SERVER, "slow": {1: 2.5}}, {"hosts": WITH_SERVER}, {"strategy": SERVED}
    ),
    "one slow worker in a group of mixed": Case(
        SLOWER, {"hosts": WITH_SERVER, "slow": {2: 3.0}}, {"hosts": WITH_SERVER}, {"strategy": GROUPS}
    ),
    "one slow worker, groups in lockstep": Case(
        SLOWER,
        {"hosts": WITH_SERVER, "slow": {2: 3.0}},
        {"hosts": WITH_SERVER},
        {"strategy": GROUPS.replace(")", ", consistency=synchronous)")},
    ),
    "one slow worker, a run of 60 steps": Case(SLOWER, {"slow": {2: 3.0}}, {}, {"steps": 60}),
    "steps with a long tail": Case(UNEVEN, {"step_time": "shifted_exponential(shift=0.02, mean=0.03)"}),
    "hosts with good and bad times": Case(UNEVEN, {"shared_slowness": {"sigma": 0.5, "lasts_s": 2.0}}),
    "thin links": Case(NETWORK, {"nic": THIN}),
    "one bad NIC": Case(NETWORK, {"hosts": hosts({"nic": THIN})}),
    "oversubscribed racks": Case(
        NETWORK, {"racks": {"hosts": 2, "uplink_bandwidth_bytes_per_s": 4e6, "latency_s": 1e-4}}
    ),
    "links of high latency": Case(NETWORK, {"nic": {"latency_s": 2e-2, "bandwidth_bytes_per_s": 1.25e9}}),
    "a batch too small for the links": Case(
        NETWORK,
        {"nic": {"latency_s": 2e-3, "bandwidth_bytes_per_s": 1.25e8}, "step_time": "constant(seconds=0.005)"},
        {"step_time": "constant(seconds=0.005)"},
        {"batch_size": 8},
    ),
    "a far server": Case(
        NETWORK,
        {"hosts": [*WORKERS, {"name": "far", "count": 1, "nic": {**QUICK, "latency_s": 5e-2}}]},
        {"hosts": WITH_SERVER},
        {"strategy": SERVED},
    ),
    "a server behind a thin link": Case(
        NETWORK,
        {"hosts": [*WORKERS, {"name": "thin", "count": 1, "nic": {**QUICK, "bandwidth_bytes_per_s": 5e6}}]},
        {"hosts": WITH_SERVER},
        {"strategy": ASYNCHRONOUS},
    ),
    "a hot server, asynchronous": Case(
        SERVERS,
        {"hosts": WITH_SERVER, "server_update": {"seconds": 3e-2, "bandwidth_bytes_per_s": 1e9}},
        {"hosts": WITH_SERVER},
        {"strategy": ASYNCHRONOUS},
    ),
    "a server that copies slowly": Case(
        SERVERS,
        {"hosts": WITH_SERVER, "server_bandwidth_bytes_per_s": 5e6},
        {"hosts": WITH_SERVER},
        {"strategy": SERVED},
    ),
    "a server on the core of a worker": Case(
        SERVERS,
        {"hosts": [{"name": "worker", "count": 4, "cores": 1, "workers": 1, "server_takes": 0.5}]},
        {"hosts": [{"name": "worker", "count": 4, "cores": 1, "workers": 1, "server_takes": 0.0}]},
        {"strategy": "parameter_server(consistency=synchronous, servers=1)"},
    ),
}
JOB: dict[str, Any] = {
    "data": "digits",
    "model": "mlp(hidden=256)",
    "strategy": "synchronous",
    "workers": 4,
    "batch_size": 32,
    "balance": "off",
}
REAL_JOB: dict[str, Any] = {
    "data": "fashion-mnist",
    "model": "mlp(hidden=512)",
    "strategy": "synchronous",
    "workers": 2,
    "batch_size": 128,
    "epochs": 2,
    "threads": 1,
    "balance": "off",
}
DISK_S, TEST_S, IMAGE_S, SERVED_S = 1e-2, 3.0, 2e-3, 0.1
"""Planted: seconds to read an image, for a test, for an image of worker 1, and for a message of a server."""
DEVICE_S = 4e-4
"""What an image takes on an emulated device: a sleep, so that other programs on the cores change little."""
LINK = Link(latency_s=2e-3, bandwidth_bytes_per_s=1e7)
"""Planted: what a message takes beyond its own time."""


@contextmanager
def patched(
    owner: Any, name: str, made: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Replace a function in this process, and in those that it forks, by one made of it."""
    before = getattr(owner, name)
    setattr(owner, name, made(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


def slow_disk() -> AbstractContextManager[None]:
    """Have every image take longer to be read."""

    def made(before: Callable[..., Any]) -> Callable[..., Any]:
        def decoded(self: ImageFileSplit, indices: Any) -> Any:
            time.sleep(DISK_S * len(indices))
            return before(self, indices)

        return decoded

    return patched(ImageFileSplit, "decoded", made)


def long_tests() -> AbstractContextManager[None]:
    """Have every test take longer."""

    def made(before: Callable[..., Any]) -> Callable[..., Any]:
        def evaluated(*given: Any, **options: Any) -> Any:
            time.sleep(TEST_S)
            return before(*given, **options)

        return evaluated

    return patched(training_duties, "evaluate", made)


def device(seconds: float = DEVICE_S, only: int | None = None) -> AbstractContextManager[None]:
    """Have every image take longer, as on an emulated device.

    Args:
        seconds: how much longer.
        only: the only worker with such a device; None: all have one.
    """

    def made(before: Callable[..., Any]) -> Callable[..., Any]:
        def compute(self: ModelWorkload, step: Any, batch: Any) -> Any:
            if only in (None, self.worker):
                time.sleep(seconds * batch.size)
            return before(self, step, batch)

        return compute

    return patched(ModelWorkload, "compute", made)


@contextmanager
def slow_link() -> Iterator[None]:
    """Have every message and every sum over ranks take longer, as over a slow link."""

    def messages(before: Callable[..., Any]) -> Callable[..., Any]:
        def start_send(self: Any, to: int, message: Any) -> Any:
            nbytes = 0 if message.tensor is None else message.tensor.nbytes
            time.sleep(LINK.latency_s + nbytes / LINK.bandwidth_bytes_per_s)
            return before(self, to, message)

        return start_send

    def sums(before: Callable[..., Any]) -> Callable[..., Any]:
        def all_reduce(self: Any, tensor: Any) -> Any:
            moved = 2 * (self.size - 1) / self.size * tensor.nbytes
            time.sleep(2 * (self.size - 1) * LINK.latency_s + moved / LINK.bandwidth_bytes_per_s)
            return before(self, tensor)

        return all_reduce

    network = TorchDistributedCommunicator
    with (
        patched(network, "start_send", messages),
        patched(network, "all_reduce", sums),
        patched(network, "start_all_reduce", sums),
    ):
        yield


def slow_server() -> AbstractContextManager[None]:
    """Have every gradient take a server longer."""

    def made(before: Callable[..., Any]) -> Callable[..., Any]:
        def on_message(self: Any, source: int, message: Any) -> Any:
            if message.kind is Kind.PUSH:
                time.sleep(SERVED_S)
            return before(self, source, message)

        return on_message

    return patched(session.ServerSession, "on_message", made)


@contextmanager
def busy_cores() -> Iterator[None]:
    """Keep all cores busy with other processes."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(available_cores())]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def pictures(folder: Path, side: int, count: int) -> str:
    """Write a folder of photographs of noise in four classes, a tenth of them for tests; return its path."""
    root = folder / f"pictures{side}"
    generator = np.random.default_rng(0)
    for number in range(count):
        part = root / ("test" if number % 10 == 0 else "train") / f"class{number % 4}"
        part.mkdir(parents=True, exist_ok=True)
        small = generator.integers(0, 256, (side // 8, side // 8, 3), dtype=np.uint8)
        Image.fromarray(small).resize((side, side)).save(part / f"{number}.jpg", quality=90)
    return str(root)


@dataclass(frozen=True)
class Real:
    """A cause planted into real processes.

    Attributes:
        cause: as `why` should name it.
        job: options of the run, with those of REAL_JOB.
        plant: plants it; None: the options do.
        well: options of a run without it, where nothing is planted; None: it cannot be had.
        pictures: side and number of pictures to train with; none: the data of REAL_JOB.
        emulated: whether steps are those of an emulated device.
    """

    cause: str
    job: Mapping[str, Any] = field(default_factory=dict)
    plant: Callable[[], AbstractContextManager[None]] | None = None
    well: Mapping[str, Any] | None = None
    pictures: tuple[int, int] | None = None
    emulated: bool = True


UPDATES: dict[str, Any] = {"epochs": None, "updates": 100}
REAL: dict[str, Real] = {
    "one worker with 2 ms more for an image": Real(
        SLOWER, UPDATES, plant=lambda: device(IMAGE_S, only=1), well={}
    ),
    "a link of 10 MB/s and 2 ms": Real(NETWORK, UPDATES, plant=slow_link, well={}),
    "batches of 4 images over such a link": Real(
        NETWORK, {**UPDATES, "batch_size": 4, "model": "mlp(hidden=64)"}, plant=slow_link, well={}
    ),
    "a server that takes 0.1 s for a gradient": Real(
        SERVERS,
        {**UPDATES, "strategy": "parameter_server(servers=1)"},
        plant=slow_server,
        well={},
    ),
    "a disk of 100 images/s": Real(
        READING,
        {"model": "lenet5", "image_size": 32, "batch_size": 32, "epochs": 6, "cache": "none"},
        plant=slow_disk,
        well={},
        pictures=(64, 600),
    ),
    "tests of 3 s": Real(
        TESTS,
        {"data": "digits", "epochs": 4, "batch_size": 16},
        plant=long_tests,
        well={},
    ),
    "photographs of 3 megapixels": Real(
        DECODING,
        {"model": "lenet5", "image_size": 32, "batch_size": 16, "epochs": 4, "cache": "none"},
        well={"decoded": "decoded"},
        pictures=(1760, 200),
        emulated=False,
    ),
    "six workers on two cores": Real(CROWD, {"workers": 6}, emulated=False),
    "other programs on the cores": Real(OTHERS, plant=busy_cores, well={}, emulated=False),
}


@dataclass(frozen=True)
class Row:
    """A line of the table; gains in images/s as shares, None where there is nothing to compare with."""

    case: str
    planted: str
    named: str
    predicted: float
    truth: float | None
    remedy: str
    remedy_predicted: float
    remedy_truth: float | None


def rate(where: dict[str, Any], options: Mapping[str, Any], folder: Path) -> float:
    """Return images/s of a dry run, of 400 steps unless the case has another number."""
    run = simulate(cluster=Cluster(**where), gradients="none", out=folder, **{"steps": 400, **options})
    return float(run.figures["images_per_s"])


def simulated(name: str, case: Case, folder: Path) -> Row:
    """Plant a cause, ask `why`, and find out what its absence and its remedy gain."""
    options = {**JOB, **case.job}
    well = described(**case.well)
    ill = {**well, **case.ill}
    before = rate(ill, options, folder / "ill")
    found = why(folder / "ill")
    first = found.causes[0]
    changed = remedy_of(found, first)
    after = rate(ill, {**options, **changed}, folder / "remedy") if first.remedy else None
    return Row(
        case=name,
        planted=case.cause,
        named=first.what,
        predicted=first.gain,
        truth=rate(well, options, folder / "well") / before - 1,
        remedy=first.remedy,
        remedy_predicted=first.remedy_gain,
        remedy_truth=None if after is None else after / before - 1,
    )


def remedy_of(found: Why, cause: Cause) -> dict[str, Any]:
    """Return the options of a cause's remedy."""
    return next((dict(each.options) for each in found.changes if each.what == cause.remedy), {})


def real(name: str, folder: Path) -> Row:
    """Train for real with a planted cause, without it where that can be had, and with its remedy."""
    case = REAL[name]
    options = {**REAL_JOB, **case.job}
    if case.pictures is not None:
        options["data"] = pictures(folder, *case.pictures)

    def trained(what: str, changed: Mapping[str, Any], *, planted: bool) -> float:
        plant = case.plant if planted else None
        with plant() if plant is not None else nullcontext(), device() if case.emulated else nullcontext():
            run = train(out=folder / what, start_method="fork", **{**options, **changed})
        assert run is not None
        return images_per_s(folder / what)

    before = trained("ill", {}, planted=True)
    found = why(folder / "ill")
    first = found.causes[0]
    truth = None
    if case.well is not None:
        well = {key: str(folder / value) if key == "decoded" else value for key, value in case.well.items()}
        if "decoded" in well:
            trained("fills", {**well, "epochs": 1}, planted=False)
        truth = trained("well", well, planted=False) / before - 1
    after, changed = None, remedy_of(found, first)
    if first.remedy.startswith("--decoded"):
        changed = {"decoded": str(folder / "decoded")}
    if changed:
        after = trained("remedy", changed, planted=True) / before - 1
    print(
        name, [(each.what, each.gain) for each in found.causes], found.time, os.getloadavg(), file=sys.stderr
    )
    return Row(name, case.cause, first.what, first.gain, truth, first.remedy, first.remedy_gain, after)


def images_per_s(folder: Path) -> float:
    """Return a run's images a second from its first step to its last, tests in between included."""
    figures = RunFigures.of(read_events(folder / LOG_FILE))
    assert figures.together is not None
    return figures.together.total.images / max(series.last.end_s for series in figures.workers.values())


def table(rows: list[Row]) -> str:
    """Return the table of the page."""
    lines = [
        "| planted | named | its absence: predicted | is | remedy | predicted | is |",
        "|---|---|---|---|---|---|---|",
    ]

    def said(gain: float | None) -> str:
        return "" if gain is None else f"{100 * gain:+.0f} %"

    for row in rows:
        named = row.named if row.named == row.planted else f"**{row.named}** ({row.planted})"
        remedy = said(row.remedy_predicted) if row.remedy else ""
        lines.append(
            f"| {row.case} | {named} | {said(row.predicted)} | {said(row.truth)} | {row.remedy} | {remedy} "
            f"| {said(row.remedy_truth)} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure the cases that are not in the file yet, or those that are named."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", action="append", choices=[*CASES, *REAL], help="a case to measure again")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results.json"))
    given = parser.parse_args()
    rows = (
        {row["case"]: Row(**row) for row in json.loads(given.out.read_text())} if given.out.exists() else {}
    )
    for name in given.only or [name for name in (*CASES, *REAL) if name not in rows]:
        with tempfile.TemporaryDirectory() as folder:
            rows[name] = (
                simulated(name, CASES[name], Path(folder)) if name in CASES else real(name, Path(folder))
            )
        every = [rows[each] for each in (*CASES, *REAL) if each in rows]
        given.out.write_text(json.dumps([asdict(row) for row in every], indent=1) + "\n")
    print(table([rows[each] for each in (*CASES, *REAL) if each in rows]))


if __name__ == "__main__":
    main()
