"""An ensemble as one run, for the verbs `train` and `simulate`; what one asks for is in `config/ensemble.py`.

    runs/20250101-120000-ensemble-lenet5/
        config.yaml
        member-0/  member-1/  …      ordinary runs, each by its part of the workers
        student/                     with `distill`: the network that learns from the members, by all workers
        ensemble.json  report.html   results of all
        model.safetensors            with `distill`: the student's

    real         members at the same time, a process each, which starts its ranks               ─▶ the student
    torchrun     members at the same time, by the ranks that there are, shared out equally     ─▶ the student
    simulated    members one after the other, on hosts of their own, all from the same virtual time ─▶ the student

A member is bit for bit the run that `train` makes with its options alone. A resumed ensemble keeps members
that have ended, and continues the others, or the student, from their last checkpoints.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from polyrhythm.api.evaluate import evaluate
from polyrhythm.api.observed_run import Run, create_folder_for, discard_folder, finished_run
from polyrhythm.api.run_process import RunProcess
from polyrhythm.api.stages import Lasting
from polyrhythm.claim import UNCLAIMED
from polyrhythm.config.assemble import assemble, draws, strategy_from
from polyrhythm.config.ensemble import Ensemble
from polyrhythm.config.recipe import CONFIG_FILE, configure, plain_values, read_run
from polyrhythm.config.run_config import RunConfig
from polyrhythm.config.stages import Stages
from polyrhythm.config.trained import ENSEMBLE_FILE, MODEL_FILE, member_folder
from polyrhythm.errors import RequestError, RunError
from polyrhythm.escaping import json_text
from polyrhythm.events import Evaluated, Event, Notice
from polyrhythm.launch.devices import available_cores
from polyrhythm.launch.patience import Patience, speaking_up
from polyrhythm.launch.signals import Preempted, asked_to_stop
from polyrhythm.launch.torchrun.gathering import gather, starts_hosts_apart
from polyrhythm.launch.torchrun.started_rank import as_group, asked_threads, meet
from polyrhythm.reporting.event_log import Observer
from polyrhythm.reporting.pages.several_runs import render_ensemble
from polyrhythm.reporting.quantities import percent
from polyrhythm.roles.job import CheckpointConfig
from polyrhythm.run_files import read_json_in_run
from polyrhythm.simulation.cluster import Cluster
from polyrhythm.simulation.layout import shared_out
from polyrhythm.strategies.strategy import Strategy

STUDENT = "student"
_TRIES = 3
"""Attempts to train a member if its process dies."""
_ADDED_UP = (
    "servers",
    "images_per_s",
    "sustained_images_per_s",
    "workers_lost",
    "workers_joined",
    "servers_lost",
    "servers_joined",
    "workers_ejected",
    "restarts",
    "updates_lost",
    "images_not_seen",
    "gradients_dropped",
    "gradients_not_finite",
)
_AVERAGED = ("train_loss", "bytes_sent_per_step", "waiting_share", "nothing_left_share")
_OF_ONE = (
    "best",
    "per_class",
    "confusion",
    "confused",
    "test_top1_interval",
    "cache",
    "timings",
    "noise_scale",
)
_TESTED = ("test_loss", "test_top1", "test_top5")

Student = Callable[[Path, dict[str, Any]], Run | None]
"""Makes the run of the student, or the rest of it, in a folder with options."""
Simulated = Callable[[Cluster, RunConfig, Path, Sequence[Observer]], Run]
"""Makes one simulated run."""
RunOfRanks = Callable[[Path, dict[str, Any], Sequence[Observer]], Run | None]
"""Makes a run in a folder with options by ranks that there are; returns it in the one that leads."""


def train_ensemble(
    ensemble: Ensemble,
    config: RunConfig,
    folder: Path,
    observers: Sequence[Observer],
    student: Student,
) -> Run:
    """Train an ensemble, or the rest of one.

    Args:
        ensemble: the members.
        config: configuration of all of it.
        folder: folder of the run; what is in it is not done again.
        observers: receivers of the members' tests, and all events of the student.
        student: function that runs the student.

    Raises:
        RequestError: the request is wrong; nothing has been written.
        RunError: a member has failed.
    """
    _check_real(config)
    configs = ensemble.member_configs(_with_threads(config))
    _try_out(ensemble, config, configs)
    if (folder / CONFIG_FILE).is_file():
        _check_same(folder, config)
    existed = folder.exists()
    claim = create_folder_for(folder, config, config.device)
    try:
        stopped = _side_by_side(configs, folder, observers)
        if stopped is not None:
            return replace(stopped, preempted=stopped.preempted and config.notice_s is not None)
        runs = [_ended(member_folder(folder, number)) for number in range(ensemble.members)]
        taught = None
        if config.distill is not None:
            taught = student(folder / STUDENT, _student_options(ensemble, config, folder))
            assert taught is not None, "only ranks of torchrun have no run"
            if taught.outcome != "done":
                return replace(taught, folder=folder)
        return _over(config, folder, runs, taught)
    except RequestError:
        if not existed and not any(folder.glob("member-*/events.jsonl")):
            discard_folder(folder)
        raise
    finally:
        claim.release()


def simulate_ensemble(
    ensemble: Ensemble,
    where: Cluster,
    config: RunConfig,
    folder: Path,
    observers: Sequence[Observer],
    play: Simulated,
    *,
    learns: bool = True,
) -> Run:
    """Simulate an ensemble; its members have hosts of their own.

    Args:
        ensemble: the members.
        where: the whole cluster.
        config: configuration of all of it.
        folder: folder of the run, new.
        observers: receivers of every event, and one end.
        play: function that simulates a run.
        learns: whether there are gradients, and so something to test.

    Raises:
        RequestError: the request is wrong; nothing has been written.
    """
    configs = ensemble.member_configs(config)
    if learns:
        _try_out(ensemble, config, configs)
    strategies, workers = _strategies(ensemble, config), configs[0].workers
    needed = max((each.traits(workers) for each in strategies), key=lambda traits: traits.servers)
    parts = shared_out(
        where,
        ensemble.members,
        workers,
        needed.servers,
        needed.placement,
        draws=draws(config, strategies[0], workers),
    )
    claim = create_folder_for(folder, config, "none")
    runs, held = [], Counter[int]()
    try:
        for number, ((part, hosts), member) in enumerate(zip(parts, configs, strict=True)):
            last = number + 1 == len(configs) and config.distill is None
            watching = [each if last else Lasting(each) for each in observers]
            run = play(part, member, member_folder(folder, number), watching)
            if run.outcome != "done":
                return replace(run, folder=folder)
            runs.append(run)
            for host in hosts:
                held[host] = max(held[host], run.figures["seconds"])
        taught = None
        if config.distill is not None:
            options = _student_options(ensemble, config, folder)
            taught = play(where, configure(options), folder / STUDENT, observers)
            if taught.outcome != "done":
                return replace(taught, folder=folder)
        prices = [(where.machines[host].price_per_hour, seconds) for host, seconds in held.items()]
        known = None if any(price is None for price, _ in prices) else prices
        price = None if known is None else sum((each or 0.0) * seconds / 3600 for each, seconds in known)
        own = {"cluster": where.name, "hosts": len(held), "price": price}
        return _over(config, folder, runs, taught, simulated=own, learns=learns)
    except RequestError:
        if not runs:
            discard_folder(folder)
        raise
    finally:
        claim.release()


def shared_ranks(ensemble: Ensemble, config: RunConfig, asked: int | None) -> RunConfig:
    """Return the configuration of an ensemble that divides torchrun's ranks among its members.

    Args:
        ensemble: the members.
        config: configuration of all of it.
        asked: number of workers that were asked for; None: as many as there are ranks.

    Raises:
        RequestError: the ranks cannot be shared out equally, a member would have no worker, or workers are not these.
    """
    _check_real(config)
    size, members = int(os.environ["WORLD_SIZE"]), ensemble.members
    servers = [strategy.traits(1).servers for strategy in _strategies(ensemble, config)]
    each = size // members
    if size % members or each <= max(servers):
        raise RequestError(
            f"torchrun's {size} processes cannot be shared out equally among {members} members of {ensemble.each}: "
            f"start {members * max(each, max(servers) + 1)}"
        )
    workers = members * (each - servers[0])
    if asked not in (None, workers):
        raise RequestError(f"torchrun's processes leave {workers} workers, not {asked}: omit --workers")
    whole = config.model_copy(update={"workers": workers})
    _try_out(ensemble, whole, ensemble.member_configs(whole))
    return whole


def train_ensemble_of_ranks(
    ensemble: Ensemble,
    config: RunConfig,
    place: Callable[[], tuple[Path, Run | None]],
    observers: Sequence[Observer],
    make: RunOfRanks,
) -> Run | None:
    """Make the runs of an ensemble by the ranks that torchrun has started; all see the folder.

        ranks 0 … k-1     member 0 ─┐
              k … 2k-1    member 1 ─┼─▶ rank 0: all have ended ─▶ all ranks: the student ─▶ rank 0: the results
              …                    ─┘

    Where torchrun restarts failed ranks while others continue, such a rank finds the folder in the store, and
    its member admits it as any run does. Elsewhere all restart, under names of their own.

    Args:
        ensemble: the members.
        config: configuration of all of it, as `shared_ranks` returns it.
        place: function that returns the folder, and the run of it if it has ended; called in rank 0.
        observers: see `train_ensemble`; in rank 0.
        make: function that runs a member, or the rest of it, by the ranks of this process's group.

    Returns:
        The run; None in ranks other than 0.

    Raises:
        RequestError: the folder cannot be written, or this rank does not see it.
        RunError: a run has failed, or some ranks were missing at the start.
    """
    outside, patience = meet(), Patience(config.gather_s)
    name, store = "ensemble", outside.store
    if not starts_hosts_apart(outside):
        start = gather(outside, patience)
        name, store = start.name, start.rendezvous.store
    ended = [f"{_ENDED_KEY}/{each}" for each in range(ensemble.members)]
    claim = None
    if outside.rank == 0:
        before = _read(store, _FOLDER_KEY)
        folder, done = (Path(before), None) if before else place()
        if done is None:
            if (folder / CONFIG_FILE).is_file():
                _check_same(folder, config)
            claim = create_folder_for(folder, config, config.device)
            for key in (_NEXT_KEY, *(each for each in ended if _read(store, each) != "done")):
                store.delete_key(key)  # from an earlier start of this rank
        store.set(_FOLDER_KEY, str(folder.absolute()) if done is None else "")
        if done is not None:
            return done
    else:
        there = patience.key(store, _FOLDER_KEY, 0)
        if not there:
            return None
        folder = Path(there)
        if not _seen(lambda: (folder / CONFIG_FILE).is_file()):
            raise RequestError(
                f"rank {outside.rank} does not see {folder}, where the members of the ensemble are to leave their "
                "networks: give --out a folder that all hosts share"
            )
    try:
        size = outside.size // ensemble.members
        number, rank = divmod(outside.rank, size)
        threads = {"threads": _threads_of_rank(config)}
        options = plain_values(ensemble.member_configs(config)[number]) | threads
        with as_group(f"{name}/member-{number}", number * size, rank, size):
            hearing = [_Tests(folder, number, observers if outside.rank == 0 else ())]
            run = make(member_folder(folder, number), options, hearing)
        if run is not None:
            store.set(f"{_ENDED_KEY}/{number}", run.outcome)
        if outside.rank:
            if run is not None and run.preempted:
                raise Preempted("the run was interrupted, since one of its hosts is taken away")
            if _awaited(store, _NEXT_KEY) == STUDENT:
                with as_group(f"{name}/{STUDENT}", 0, outside.rank, outside.size):
                    make(folder / STUDENT, _student_options(ensemble, config, folder) | threads, ())
            return None
        assert run is not None, "rank 0 leads its member"
        if run.outcome != "done" or any(_awaited(store, key) != "done" for key in ended):
            store.set(_NEXT_KEY, "")
            return Run(folder, "interrupted", {}, preempted=run.preempted)
        store.set(_NEXT_KEY, "" if config.distill is None else STUDENT)
        taught = None
        if config.distill is not None:
            with as_group(f"{name}/{STUDENT}", 0, 0, outside.size):
                student = _student_options(ensemble, config, folder) | threads
                taught = make(folder / STUDENT, student, observers)
            assert taught is not None, "rank 0 leads"
            if taught.outcome != "done":
                return replace(taught, folder=folder)
        folders = [member_folder(folder, each) for each in range(ensemble.members)]
        _seen(lambda: all(finished_run(each) is not None for each in folders))
        return _over(config, folder, list(map(_ended, folders)), taught)
    finally:
        if claim is not None:
            claim.release()


def _threads_of_rank(config: RunConfig) -> int:
    """Return a rank's compute threads: its share of the cores, as if all of a host's were one network's."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return config.threads or asked_threads(os.environ) or max(1, available_cores() // here)


_FOLDER_KEY, _ENDED_KEY, _NEXT_KEY = "ensemble/folder", "ensemble/ended", "ensemble/next"
_SEEN_S, _LOOK_EVERY_S = 15.0, 0.1
"""For what another host has written to appear on a network file system, at most; how often one looks."""


def _read(store: Any, key: str) -> str:
    return bytes(store.get(key)).decode() if store.check([key]) else ""


def _awaited(store: Any, key: str) -> str:
    """Return another rank's result once it is ready; nothing if that rank has left, and the store with it."""
    try:
        with speaking_up(lambda: "still waiting for the other members of the ensemble"):
            while not store.check([key]):
                time.sleep(_LOOK_EVERY_S)
            return _read(store, key)
    except (RuntimeError, dist.DistError):
        return ""


def _seen(is_there: Callable[[], bool]) -> bool:
    until_s = time.monotonic() + _SEEN_S
    while not is_there():
        if time.monotonic() > until_s:
            return False
        time.sleep(_LOOK_EVERY_S)
    return True


class _Tests:
    """Reports a member's tests, in the process of its coordinator.

    Args:
        folder: folder of the ensemble.
        number: number of the member.
        observers: observers that receive the tests; none: a line is printed.
    """

    def __init__(self, folder: Path, number: int, observers: Sequence[Observer]) -> None:
        self._folder, self._number, self._observers = folder, number, observers

    def on_event(self, event: Event) -> None:
        """Report a test."""
        if not isinstance(event, Evaluated):
            return
        text = _tested(self._folder, self._number, event.epoch, event.test_top1)
        for observer in self._observers:
            observer.on_event(Notice(time_s=event.time_s, text=text))
        if not self._observers:
            print(f"notice: {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing is open: the observers are the ensemble's."""


def _tested(folder: Path, number: int, epoch: int, top1: float) -> str:
    return f"member {number}: top-1 {percent(top1)} after {epoch} of {_epochs(folder, number)} epochs"


def _strategies(ensemble: Ensemble, config: RunConfig) -> list[Strategy]:
    """Return the strategies of each member; stages have several."""
    stages = Stages.parse(ensemble.each)
    named = [ensemble.each] if stages is None else [stage.strategy for stage in stages.stages]
    return [strategy_from(each, config.compress) for each in named]


def _try_out(ensemble: Ensemble, config: RunConfig, configs: Sequence[RunConfig]) -> None:
    """Refuse what is impossible before anything is trained."""
    for strategy in _strategies(ensemble, config):
        update = {"strategy": str(strategy), "compress": None}
        assemble(configs[0].model_copy(update=update), CheckpointConfig())
        if config.distill is not None:
            asked = {**update, "model": config.distill, "distill": None, "weights": None}
            assemble(config.model_copy(update=asked), CheckpointConfig())


def _check_real(config: RunConfig) -> None:
    for given, option in (
        (config.listen is not None, "--listen"),
        (config.port != 0, "--port"),
        (config.freeze_epochs is not None, "--freeze-epochs"),
    ):
        if given:
            raise RequestError(f"{option} is of one network's run, and an ensemble has several: leave it out")
    if not isinstance(config.data, str | Path) or not isinstance(config.model, str):
        raise RequestError("members of an ensemble find data and model by their names: give names")


def _with_threads(config: RunConfig) -> RunConfig:
    """Give every worker its share of the cores, as if all of them were one network's."""
    return config.model_copy(
        update={"threads": config.threads or max(1, available_cores() // config.workers)}
    )


def _check_same(folder: Path, config: RunConfig) -> None:
    before = configure(read_run(folder / CONFIG_FILE))
    for key, value in plain_values(config).items():
        if plain_values(before)[key] != value:
            raise RequestError(
                f"an ensemble continues as it was begun, with {key} {plain_values(before)[key]}: leave "
                f"--{key.replace('_', '-')} out"
            )


def _student_options(ensemble: Ensemble, config: RunConfig, folder: Path) -> dict[str, Any]:
    """Return the options of the run that learns from the members."""
    members = [member_folder(folder, number) for number in range(ensemble.members)]
    if ";" in str(folder):
        raise RequestError(
            f"teachers are named with ; between, and {folder} has one in its name: name another"
        )
    changed = {
        "strategy": ensemble.each,
        "model": config.distill,
        "distill": None,
        "weights": None,
        "teacher": "; ".join(map(str, members)),
    }
    return plain_values(config) | changed


def _side_by_side(configs: Sequence[RunConfig], folder: Path, observers: Sequence[Observer]) -> Run | None:
    """Make the runs of all members that have not ended; return how they were interrupted, if they were.

    Raises:
        RequestError: the runs are impossible.
        RunError: one has failed.
    """
    left = {
        number: config
        for number, config in enumerate(configs)
        if not _has_ended(member_folder(folder, number), config)
    }
    if not left:
        return None
    processes = {number: RunProcess(apart=True) for number in left}
    stopping, preempted = threading.Event(), threading.Event()
    telling, began_s = threading.Lock(), time.monotonic()

    def stop() -> None:
        stopping.set()
        for process in processes.values():
            process.interrupt()

    def made(number: int) -> dict[str, Any]:
        def observe(epoch: int, tested: Mapping[str, float]) -> bool:
            text = _tested(folder, number, epoch, tested["top1"])
            with telling:
                for observer in observers:
                    observer.on_event(Notice(time_s=time.monotonic() - began_s, text=text))
            return True

        task = {
            "folder": str(member_folder(folder, number)),
            "options": plain_values(left[number]),
            "simulation": {},
        }
        for _ in range(_TRIES):
            answer = processes[number].make(task, observe)
            if not answer.get("died") or stopping.is_set():
                break
        return answer

    try:
        with asked_to_stop(stop, preempted.set), ThreadPoolExecutor(len(left)) as pool:
            futures = {number: pool.submit(made, number) for number in left}
            try:
                answers = {number: future.result() for number, future in futures.items()}
            except KeyboardInterrupt:
                stop()
                raise
    finally:
        for process in processes.values():
            process.close()
    if stopping.is_set() or any(answer["outcome"] == "interrupted" for answer in answers.values()):
        return Run(folder, "interrupted", {}, preempted=preempted.is_set())
    for number, answer in answers.items():
        if answer["outcome"] == "refused":
            raise RequestError(f"member {number}: {answer['error']}")
        if answer["outcome"] == "failed":
            raise RunError(
                f"member {number} failed ({answer['error']}); the others' results are kept: continue with "
                f"--resume {folder}"
            )
    return None


def _has_ended(folder: Path, config: RunConfig) -> bool:
    run = finished_run(folder) if (folder / CONFIG_FILE).is_file() else None
    return run is not None and (
        run.figures["epochs"] >= (config.epochs or 0) or bool(run.figures.get("reached"))
    )


def _epochs(folder: Path, number: int) -> Any:
    """Return for how many epochs a member trains, as its run has settled it."""
    with suppress(OSError, RequestError):
        return read_run(member_folder(folder, number) / CONFIG_FILE)["epochs"]
    return "its"


def _ended(folder: Path) -> Run:
    run = finished_run(folder)
    assert run is not None, "a member that has answered has ended"
    return run


def _over(
    config: RunConfig,
    folder: Path,
    runs: Sequence[Run],
    taught: Run | None,
    *,
    simulated: Mapping[str, Any] | None = None,
    learns: bool = True,
) -> Run:
    """Test the members together, write all results, and return them."""
    paths = [run.folder for run in runs]
    device = config.device if "," not in config.device else "auto"
    tested = evaluate(paths, device=device, data=None, model=None) if learns else {}
    figures = _of_all(config, folder, [run.figures for run in runs], tested) | dict(simulated or {})
    if taught is not None:
        seconds = figures["seconds"] + taught.figures["seconds"]
        prices = [each.get("price") for each in (figures, taught.figures)]
        price = None if None in prices else sum(prices)  # type: ignore[arg-type]
        kept = {key: figures[key] for key in ("run", "strategy", "members", "ensemble")}
        figures = taught.figures | kept | {"seconds": seconds, "price": price}
        shutil.copy2(taught.folder / MODEL_FILE, UNCLAIMED.draft(folder / MODEL_FILE))
        UNCLAIMED.publish(folder / MODEL_FILE)
    UNCLAIMED.write(folder / "report.html", render_ensemble(figures, student=taught is not None))
    UNCLAIMED.write(folder / ENSEMBLE_FILE, json_text(figures, indent=2) + "\n")
    return Run(folder, "done", figures)


def _of_all(
    config: RunConfig, folder: Path, members: Sequence[Mapping[str, Any]], tested: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the figures of members that were trained at the same time, and of their mean probabilities."""
    longest = max(members, key=lambda each: each["seconds"])
    found = {key: value for key, value in longest.items() if key not in _OF_ONE}
    for keys, divisor in ((_ADDED_UP, 1), (_AVERAGED, len(members))):
        for key in keys:
            values = [each[key] for each in members if each.get(key) is not None]
            if len(values) == len(members):
                found[key] = sum(values) / divisor if divisor > 1 else sum(values)
    histogram, refused = Counter[str](), Counter[str]()
    stragglers: dict[str, float] = {}
    for number, each in enumerate(members):
        histogram.update(each["staleness"]["histogram"])
        refused.update(each.get("messages_refused", {}))
        first = number * config.workers // len(members)
        stragglers |= {str(first + int(worker)): times for worker, times in each["stragglers"].items()}
    count = sum(histogram.values())
    mean = sum(int(age) * times for age, times in histogram.items()) / count if count else 0.0
    digests = [str(each.get("parameters_sha256", "")) for each in members]
    return found | {
        "run": str(folder),
        "strategy": str(config.strategy),
        "workers": config.workers,
        "staleness": {
            "mean": mean,
            "max": max((each["staleness"]["max"] for each in members), default=0),
            "histogram": dict(sorted(histogram.items(), key=lambda pair: int(pair[0]))),
        },
        "messages_refused": dict(refused),
        "stragglers": stragglers,
        "parameters_sha256": hashlib.sha256("".join(digests).encode()).hexdigest(),
        "members": [
            {"run": str(member_folder(folder, number))}
            | {key: each[key] for key in (*_TESTED, "seconds", "parameters_sha256") if key in each}
            for number, each in enumerate(members)
        ],
        "ensemble": {key: tested[key] for key in _TESTED if key in tested},
        **{key: tested[key] for key in (*_TESTED, "test_top1_interval") if key in tested},
    }


def finished_ensemble(folder: Path) -> Run | None:
    """Return the ensemble of a folder if it has ended, with its figures; None if it has not."""
    path = folder / ENSEMBLE_FILE
    if not path.is_file():
        return None
    return Run(folder, "done", read_json_in_run(path), before=True)
