"""Real runs of every strategy under drawn faults, several at once: does each keep what it promises?

    python benchmarks/soak/soak.py [--minutes 60] [--at-once 3] [--seed 0] [--out FILE]
    python benchmarks/soak/soak.py --case SEED            one case again

A case is drawn from its seed alone: a strategy, its number of workers, and faults of one kind at drawn times (`KINDS`).
Links are those of network namespaces and disks small file systems in memory, so this needs root; without it those two
kinds are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from polyrhythm.config.assemble import strategy_from

PACED = Path(__file__).with_name("paced.py")
STRATEGIES = (
    *("synchronous", "lazy_synchronous", "hybrid", "bmuf", "diloco", "hierarchical_averaging", "local_sgd"),
    *("ng_sgd", "parallel_sgd", "post_local_sgd", "slowmo", "ad_psgd", "d_psgd", "sgp", "backup_workers"),
    *("dc_asgd", "downpour", "eamsgd", "easgd", "gaia", "hierarchical", "hogwild", "mixed"),
    *(
        "parameter_server",
        "parameter_server(consistency=synchronous)",
        "parameter_server(servers=2, replicas=2)",
    ),
    *("periodic_averaging", "sandblaster", "softsync", "ssp", "staleness_aware"),
)
KINDS = {
    "kill": "one to three ranks killed (`kill -9`), 0.3 to 4 s apart",
    "stop": "a rank stopped (SIGSTOP) for 0.3 to 8 s, then continued",
    "long stop": "a rank stopped for longer than the watchdog's limit of 13.5 s",
    "storm": "two to five of them within a second each: a rank killed, or stopped for up to 3 s",
    "suspend": "all processes stopped for 2 to 16 s, then continued",
    "signal": "TERM, INT or HUP to the launcher, from its start on; then `--resume auto`",
    "launcher": "the launcher killed; then `--resume auto`",
    "disk": "a disk of 6 MB filled for 1 to 4 s, once or twice",
    "link": "torchrun on two hosts, one of them cut off for 1 to 11 s, once or twice",
}
WEIGHTS = {
    "kill": 3,
    "stop": 2,
    "long stop": 1,
    "storm": 2,
    "suspend": 1,
    "signal": 3,
    "launcher": 2,
    "disk": 2,
    "link": 2,
}
NEEDS_ROOT = ("disk", "link")
KNOWN_FILES = {
    *("arrivals.json", "checkpoints", "config.yaml", "data.json", "environment.json", "events.jsonl"),
    "model.safetensors",
    *("report.html", "stacks", "ledger.json", "pictures.json", "predictions.csv", "summary.json"),
}
BATCH, PAUSE_S, EPOCHS = 16, 0.01, 24
MOST_STEPS_LOST = 60
"""Of workers in lockstep: a death costs a step, or a round of several, of some of them. Where each goes at its own pace
nobody takes a lost one's part, so what it had not done when the others were through is not seen, and is said."""
MOST_NEW_FILES = 40
"""Of a process that has met a fault: links to successors, checkpoints being written, the report's libraries."""
BEGIN_S, END_S, GOES_ON_S = 120.0, 300.0, 60.0
PREEMPTED, INTERRUPTED = 75, 130


class Broken(Exception):
    """A promise was not kept."""


@dataclass
class Case:
    """What is drawn from a seed, and what came of it.

    Attributes:
        seed: draws all the others.
        kind: of its faults.
        workers: how many, servers aside.
        did: what was done to it, with seconds since its start.
        goes_on_s: for each fault, seconds until something new was reported.
        failure: which promise was not kept.
    """

    seed: int
    strategy: str = ""
    kind: str = ""
    workers: int = 0
    did: list[str] = field(default_factory=list)
    goes_on_s: list[float] = field(default_factory=list)
    images_not_seen: int = 0
    workers_lost: int = 0
    restarts: int = 0
    hash_checked: bool = False
    seconds: float = 0.0
    failure: str = ""


def draw(seed: int, kinds: dict[str, int]) -> tuple[Case, random.Random]:
    """Return a case, and what draws the rest of it."""
    dice = random.Random(seed)
    strategy = dice.choice(STRATEGIES)
    workers = dice.choice([2, 3, 4, 4])
    kind = dice.choices(list(KINDS), [WEIGHTS[each] for each in KINDS])[0]
    if kind not in kinds or (kind == "link" and strategy_from(strategy).traits(4).one_host):
        kind = "kill"
    return Case(seed, strategy, kind, workers), dice


class Run:
    """A run as a user starts it, in a session of its own.

    Args:
        folder: of the case: the run, its words, and its temporary files.
        case: that it is a part of.
        pause_s: that each step takes at least.
    """

    def __init__(self, folder: Path, case: Case, pause_s: float = PAUSE_S) -> None:
        self.folder, self.case = folder, case
        self.run = folder / "run"
        self._pause_s = pause_s
        self._began_s = time.monotonic()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._files: dict[int, int] = {}
        (folder / "tmp").mkdir(parents=True, exist_ok=True)

    def options(self) -> list[str]:
        """Return the verb and its options."""
        return [
            *("train", "--data", "digits", "--model", "mlp", "--batch-size", str(BATCH), "--threads", "1"),
            *("--epochs", str(EPOCHS), "--strategy", self.case.strategy, "--restarts", "6"),
            *(
                "--balance",
                "off",
            ),  # else a rank that is stopped gets smaller batches, and the numbers are others
            *("--out", str(self.run), "--resume", "auto", "--json"),
        ]

    def start(self, commands: list[list[str]] | None = None) -> None:
        """Start the run, or what goes on with it."""
        commands = commands or [
            [sys.executable, str(PACED), *self.options(), "--workers", str(self.case.workers)]
        ]
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.folder / "tmp"),
            "SOAK_PAUSE_S": str(self._pause_s),
        }
        self._processes = []
        for number, command in enumerate(commands):
            with (
                (self.folder / f"words-{number}").open("ab") as words,
                (self.folder / f"out-{number}").open("wb") as out,
            ):
                self._processes.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=words,
                        env=environment,
                        start_new_session=True,
                    )
                )

    @property
    def launcher(self) -> int:
        """The process that was started first."""
        return self._processes[0].pid

    @property
    def over(self) -> bool:
        """Whether all that was started has ended."""
        return all(process.poll() is not None for process in self._processes)

    def ranks(self) -> list[int]:
        """Return the launcher's children, oldest first."""
        with suppress(OSError):
            return [
                int(each)
                for each in Path(f"/proc/{self.launcher}/task/{self.launcher}/children").read_text().split()
            ]
        return []

    def left(self) -> list[int]:
        """Return the living processes of its sessions."""
        sessions = {process.pid for process in self._processes}
        found = []
        for path in Path("/proc").iterdir():
            with suppress(OSError, ValueError, IndexError):
                facts = (path / "stat").read_text().rpartition(")")[2].split()
                if int(facts[3]) in sessions and facts[0] != "Z":
                    found.append(int(path.name))
        return found

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to all its processes."""
        for pid in self.left():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def reported(self) -> int:
        """Return how much it has reported."""
        with suppress(OSError):
            return (self.run / "events.jsonl").stat().st_size
        return 0

    def note(self, what: str) -> None:
        """Note what is done to it."""
        self.case.did.append(f"{time.monotonic() - self._began_s:.1f} s: {what}")

    def await_tests(self, count: int = 1) -> None:
        """Wait until it has tested the model so often, or is over."""
        deadline_s = time.monotonic() + BEGIN_S
        while not self.over and _count(self.run / "events.jsonl", b'"Evaluated"') < count:
            if time.monotonic() > deadline_s:
                raise Broken(f"it has not trained an epoch within {BEGIN_S:g} s")
            time.sleep(0.05)
        self._files = {pid: _open_files(pid) for pid in self.left()}

    def await_news(self) -> None:
        """Wait until it reports something, or is over; note how long that took."""
        began_s, before = time.monotonic(), self.reported()
        while not self.over and self.reported() == before:
            if time.monotonic() - began_s > GOES_ON_S:
                raise Broken(f"it reports nothing for {GOES_ON_S:g} s")
            time.sleep(0.02)
        self.case.goes_on_s.append(round(time.monotonic() - began_s, 2))
        for pid, count in self._files.items():
            if (now := _open_files(pid)) > count + MOST_NEW_FILES:
                raise Broken(f"process {pid} had {count} files open, and has {now}")

    def wait(self, patience_s: float = END_S) -> list[int]:
        """Return the statuses, when all that was started has ended."""
        deadline_s = time.monotonic() + patience_s
        while not self.over:
            if time.monotonic() > deadline_s:
                doing = [f"{pid} {_state(pid)}" for pid in self.left()]
                raise Broken(f"it hangs: no end within {patience_s:g} s ({', '.join(doing)})")
            time.sleep(0.05)
        return [process.returncode for process in self._processes]

    def result(self) -> dict[str, Any]:
        """Return what it has printed at its end."""
        text = (self.folder / "out-0").read_text()
        try:
            found: dict[str, Any] = json.loads(text)
        except ValueError:
            raise Broken(f"it has printed no result, but {text[:200]!r}") from None
        return found

    def end(self) -> None:
        """Leave nothing of it, whatever became of it."""
        for number in (signal.SIGCONT, signal.SIGKILL):
            self.signal_all(number)
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)


def _count(path: Path, word: bytes) -> int:
    try:
        return path.read_bytes().count(word)
    except OSError:
        return 0


def _open_files(pid: int) -> int:
    with suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/fd"))
    return 0


def _state(pid: int) -> str:
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "gone"


def _words(folder: Path, most: int = 600) -> str:
    texts = [path.read_text(errors="replace")[-most:] for path in sorted(folder.glob("words-*"))]
    return " | ".join(text.strip().replace("\n", " / ") for text in texts)


def play_kill(run: Run, dice: random.Random) -> None:
    run.start()
    run.await_tests()
    for _ in range(dice.choice([1, 1, 2, 3])):
        time.sleep(dice.uniform(0.3, 4.0))
        at = dice.random()
        if ranks := run.ranks():
            place = int(at * len(ranks))
            with suppress(ProcessLookupError):
                os.kill(ranks[place], signal.SIGKILL)
                run.note(f"rank process {place} of {len(ranks)} killed")
                run.await_news()


def play_stop(run: Run, dice: random.Random, shortest_s: float = 0.3, longest_s: float = 8.0) -> None:
    run.start()
    run.await_tests()
    time.sleep(dice.uniform(0.0, 2.0))
    at, seconds = dice.random(), dice.uniform(shortest_s, longest_s)
    if ranks := run.ranks():
        place = int(at * len(ranks))
        with suppress(ProcessLookupError):
            os.kill(ranks[place], signal.SIGSTOP)
            run.note(f"rank process {place} of {len(ranks)} stopped for {seconds:.1f} s")
            time.sleep(seconds)
            with suppress(ProcessLookupError):
                os.kill(ranks[place], signal.SIGCONT)
            run.await_news()


def play_long_stop(run: Run, dice: random.Random) -> None:
    play_stop(run, dice, 15.0, 20.0)


def play_storm(run: Run, dice: random.Random) -> None:
    """Kill and stop ranks while others are still stopped, or have not come back."""
    run.start()
    run.await_tests()
    stopped: list[tuple[float, int]] = []
    for _ in range(dice.choice([2, 3, 4, 5])):
        time.sleep(dice.uniform(0.0, 1.0))
        at, kills, seconds = dice.random(), dice.random() < 0.5, dice.uniform(0.2, 3.0)
        if ranks := run.ranks():
            place = int(at * len(ranks))
            with suppress(ProcessLookupError):
                os.kill(ranks[place], signal.SIGKILL if kills else signal.SIGSTOP)
                run.note(f"rank process {place} of {len(ranks)} {'killed' if kills else 'stopped'}")
                if not kills:
                    stopped.append((time.monotonic() + seconds, ranks[place]))
    for until_s, pid in sorted(stopped):
        time.sleep(max(0.0, until_s - time.monotonic()))
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    run.await_news()


def play_suspend(run: Run, dice: random.Random) -> None:
    run.start()
    run.await_tests()
    time.sleep(dice.uniform(0.0, 2.0))
    seconds = dice.uniform(2.0, 16.0)
    run.note(f"all stopped for {seconds:.1f} s")
    run.signal_all(signal.SIGSTOP)
    time.sleep(seconds)
    run.signal_all(signal.SIGCONT)
    run.await_news()


def play_signal(run: Run, dice: random.Random) -> None:
    number = dice.choice([signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
    run.start()
    if dice.random() < 0.3:
        time.sleep(dice.uniform(0.1, 5.0))
    else:
        run.await_tests()
        time.sleep(dice.uniform(0.0, 3.0))
    with suppress(ProcessLookupError):
        os.kill(run.launcher, number)
    run.note(number.name)
    (status,) = run.wait(60.0)
    run.note(f"ended with status {status}")
    # Before Python handles signals it ends as any program does; then nothing was begun.
    if status not in (0, PREEMPTED, INTERRUPTED, 128 + signal.SIGHUP, -number):
        raise Broken(f"{number.name} ended it with status {status}")
    _await_nobody(run)
    if status:
        run.start()


def play_launcher(run: Run, dice: random.Random) -> None:
    run.start()
    run.await_tests()
    time.sleep(dice.uniform(0.0, 3.0))
    with suppress(ProcessLookupError):
        os.kill(run.launcher, signal.SIGKILL)
    run.note("launcher killed")
    run.wait(30.0)
    _await_nobody(run)
    run.start()


def play_disk(run: Run, dice: random.Random) -> None:
    disk = run.folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(disk)], check=True)
    run.run = disk / "run"
    run.start()
    run.await_tests()
    for _ in range(dice.choice([1, 1, 2])):
        time.sleep(dice.uniform(0.0, 2.0))
        seconds = dice.uniform(1.0, 4.0)
        filler = disk / "filler"
        run.note(f"disk full for {seconds:.1f} s")
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 12))
        time.sleep(seconds)
        filler.unlink()
        run.await_news()
    (status,) = run.wait()
    if status:  # the disk was full when the weights were written: there is room again
        if b"No space left on device" not in (run.folder / "words-0").read_bytes():
            raise Broken(f"status {status}: {_words(run.folder)}")
        run.note(f"ended with status {status}")
        run.start()


@contextmanager
def _hosts(count: int) -> Iterator[tuple[list[str], Callable[[bool], None]]]:
    """Make hosts behind a switch; gives their names, and what plugs the last one in or not."""
    own = secrets.token_hex(4)
    switch, names = f"soak-{own}-s", [f"soak-{own}-{number}" for number in range(count)]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=60)

    def plug(there: bool) -> None:
        # A port that leaves the bridge: packets vanish, and neither end sees a broken cable.
        ip("-n", switch, "link", "set", f"port{count}", *(("master", "bridge") if there else ("nomaster",)))

    try:
        for name in (switch, *names):
            ip("netns", "add", name)
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for number, name in enumerate(names, start=1):
            port = f"port{number}"
            ip("link", "add", "cable", "netns", name, "type", "veth", "peer", "name", port, "netns", switch)
            ip("-n", name, "address", "add", f"10.80.0.{number}/24", "dev", "cable")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", switch, "link", "set", port, "up")
            ip("-n", switch, "link", "set", port, "master", "bridge")
        yield names, plug
    finally:
        for name in (switch, *names):
            with suppress(subprocess.CalledProcessError):
                ip("netns", "delete", name)


@contextmanager
def _on_hosts(run: Run) -> Iterator[Callable[[bool], None]]:
    """Start a run with torchrun on two hosts; gives what plugs the second one in or not."""
    ranks = run.case.workers + strategy_from(run.case.strategy).traits(run.case.workers).servers
    far = ranks // 2
    with _hosts(2) as (hosts, plug):
        commands = [
            [
                *("ip", "netns", "exec", host, sys.executable, "-m", "torch.distributed.run"),
                *("--nnodes=2", f"--node-rank={number}", f"--nproc-per-node={count}"),
                *("--master-addr=10.80.0.1", "--master-port=29400", str(PACED), *run.options()),
            ]
            for number, (host, count) in enumerate(zip(hosts, (ranks - far, far), strict=True))
        ]
        run.start(commands)
        yield plug
        run.wait()


def play_link(run: Run, dice: random.Random) -> None:
    with _on_hosts(run) as plug:
        run.await_tests()
        for _ in range(dice.choice([1, 1, 2])):
            time.sleep(dice.uniform(0.0, 2.0))
            seconds = dice.uniform(1.0, 11.0)
            run.note(f"host 1 cut off for {seconds:.1f} s")
            plug(False)
            time.sleep(seconds)
            plug(True)
            run.await_news()


PLAYS = {
    "kill": play_kill,
    "stop": play_stop,
    "long stop": play_long_stop,
    "storm": play_storm,
    "suspend": play_suspend,
    "signal": play_signal,
    "launcher": play_launcher,
    "disk": play_disk,
    "link": play_link,
}


def _await_nobody(run: Run, patience_s: float = 40.0) -> None:
    """Wait until the last process of the run's sessions has ended."""
    deadline_s = time.monotonic() + patience_s
    while left := run.left():
        if time.monotonic() > deadline_s:
            raise Broken(f"{len(left)} processes are left after {patience_s:g} s: {left}")
        time.sleep(0.05)


class References:
    """The hashes of undisturbed runs, each made once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._locks: defaultdict[tuple[str, int, bool], threading.Lock] = defaultdict(threading.Lock)
        self._known: dict[tuple[str, int, bool], str] = {}

    def sha256(self, case: Case) -> str:
        """Return that of a case's parameters, had nothing happened."""
        # Sums inside hosts first have other last bits than sums in the order of ranks.
        two_hosts = case.kind == "link"
        key = case.strategy, case.workers, two_hosts
        with self._locks[key]:
            if key not in self._known:
                folder = self._folder / f"reference-{len(self._known)}-{secrets.token_hex(2)}"
                run = Run(folder, Case(0, case.strategy, "", case.workers), pause_s=0.0)
                try:
                    if two_hosts:
                        with _on_hosts(run):
                            pass
                    else:
                        run.start()
                    if any(run.wait()):
                        raise Broken(f"the undisturbed run failed: {_words(folder)}")
                    self._known[key] = run.result()["parameters_sha256"]
                finally:
                    run.end()
                shutil.rmtree(folder, ignore_errors=True)
            return self._known[key]


def check(run: Run, references: References) -> None:
    """Compare what a run has left with what it promises."""
    case = run.case
    statuses = run.wait()
    if any(statuses):
        raise Broken(f"status {statuses}: {_words(run.folder)}")
    _await_nobody(run)
    result = run.result()
    case.images_not_seen, case.restarts = result["images_not_seen"], result["restarts"]
    case.workers_lost = result["workers_lost"] + result["servers_lost"]
    if result["epochs"] != EPOCHS:
        raise Broken(f"it has done {result['epochs']} epochs of {EPOCHS}")
    unknown = [
        path.name
        for path in run.run.iterdir()
        if path.name not in KNOWN_FILES and not path.name.startswith("trace")
    ]
    unknown += [path.name for path in (run.run / "checkpoints").iterdir() if path.suffix != ".safetensors"]
    temporary = [path.name for path in (run.folder / "tmp").iterdir()]
    unknown += [
        f"tmp/{name}" for name in temporary if not name.startswith("torchelastic_")
    ]  # torchrun's logs
    if unknown:
        raise Broken(f"it leaves files behind: {unknown[:5]}")
    traits = strategy_from(case.strategy).traits(case.workers)
    lockstep, one_round = traits.lockstep, traits.exchange_every == 0
    if case.kind in ("stop", "suspend", "disk", "link", "signal", "launcher"):
        if case.workers_lost or case.restarts:
            raise Broken(f"{case.workers_lost} ranks lost and {case.restarts} restarts, where none had to be")
        if lockstep and case.images_not_seen:
            raise Broken(f"{case.images_not_seen} images not seen, though nobody was lost")
        if lockstep:
            case.hash_checked = True
            if result["parameters_sha256"] != references.sha256(case):
                raise Broken("its parameters are not those of the undisturbed run")
    # Where workers meet in the end only, what a lost one has learned by then is gone.
    if lockstep and not one_round and case.images_not_seen > MOST_STEPS_LOST * case.workers * BATCH:
        raise Broken(f"{case.images_not_seen} images not seen")


def play(seed: int, folder: Path, references: References, kinds: dict[str, int]) -> Case:
    """Play a case to its end."""
    case, dice = draw(seed, kinds)
    began_s = time.monotonic()
    run = Run(folder / f"case-{seed}", case)
    try:
        PLAYS[case.kind](run, dice)
        check(run, references)
    except Broken as broken:
        case.failure = str(broken)
    except Exception as error:
        case.failure = f"{type(error).__name__}: {error}"
    finally:
        run.end()
        if case.kind == "disk":
            subprocess.run(["umount", "-l", str(run.folder / "disk")], check=False, capture_output=True)
    case.seconds = round(time.monotonic() - began_s, 1)
    if not case.failure:
        shutil.rmtree(run.folder, ignore_errors=True)
    return case


def table(cases: list[Case]) -> str:
    """Return what was found, by kind of fault, as Markdown."""
    lines = [
        "| faults | cases | of strategies | ranks lost | hashes compared | images not seen "
        "| goes on: median | longest | failures |",
        "|" + "---|" * 9,
    ]
    for kind in KINDS:
        of_kind = [case for case in cases if case.kind == kind]
        if of_kind:
            waits = [wait for case in of_kind for wait in case.goes_on_s] or [0.0]
            lines.append(
                f"| {kind} | {len(of_kind)} | {len({case.strategy for case in of_kind})} "
                f"| {sum(case.workers_lost for case in of_kind)} "
                f"| {sum(case.hash_checked for case in of_kind)} "
                f"| {sum(case.images_not_seen for case in of_kind)} "
                f"| {statistics.median(waits):.1f} s | {max(waits):.1f} s "
                f"| {sum(bool(case.failure) for case in of_kind)} |"
            )
    return "\n".join(lines)


def main() -> int:
    """Play cases until the time is over; return how many failed."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--minutes", type=float, default=60.0)
    options.add_argument("--at-once", type=int, default=3)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--case", type=int, default=None)
    options.add_argument("--kinds", nargs="*", choices=list(KINDS), default=list(KINDS))
    options.add_argument("--out", type=Path, default=None)
    options.add_argument("--folder", type=Path, default=None)
    chosen = options.parse_args()
    kinds = {kind: WEIGHTS[kind] for kind in chosen.kinds if os.geteuid() == 0 or kind not in NEEDS_ROOT}
    folder = chosen.folder or Path(tempfile.mkdtemp(prefix="soak-"))
    references, cases, lock = References(folder), [], threading.Lock()
    until_s = time.monotonic() + 60 * chosen.minutes
    seeds = iter([chosen.case]) if chosen.case is not None else iter(range(1000 * chosen.seed, 10**9))
    shared_before = set(os.listdir("/dev/shm"))

    def work() -> None:
        while time.monotonic() < until_s:
            with lock:
                seed = next(seeds, None)
            if seed is None:
                return
            case = play(seed, folder, references, kinds)
            with lock:
                cases.append(case)
                what = f"{case.kind}, {case.strategy}, {case.workers} workers, {case.seconds:.0f} s"
                print(f"{'FAILED' if case.failure else 'ok'}  {seed}: {what}", flush=True)
                if case.failure:
                    print(
                        f"    {case.failure}\n    did: {'; '.join(case.did)}\n    files: {folder}/case-{seed}"
                    )
                    print(f"    again: python benchmarks/soak/soak.py --case {seed}", flush=True)
                if chosen.out is not None:
                    facts = {"command": " ".join(sys.argv), "cases": [asdict(each) for each in cases]}
                    chosen.out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")

    threads = [threading.Thread(target=work) for _ in range(1 if chosen.case is not None else chosen.at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(table(cases))
    left = sorted(set(os.listdir("/dev/shm")) - shared_before)
    if left:
        print(f"left in /dev/shm since the start: {left}")
    failed = sum(bool(case.failure) for case in cases)
    if not failed:
        shutil.rmtree(folder, ignore_errors=True)
    return min(failed, 100)


if __name__ == "__main__":
    sys.exit(main())
