"""`polyrhythm run`: a user's script as the ranks of a run, all on this host.

launcher                        worker 0 … N-1               server N … N+S-1
host the store
start the workers ────────────▶ script … join(strategy)
◀──── S, by way of the store ── (worker 0)
start the servers ──────────────────────────────────────────▶ script … join(strategy): serve, leave
wait for all; `supervisor.py` decides which losses the run survives

A process that runs a user's script finds the other ranks by whichever way it was started (`meet`):

    torchrun         WORLD_SIZE processes; as many of them as the strategy needs are its servers
    polyrhythm run   POLYRHYTHM_WORKERS processes, all of them workers; rank 0 asks the launcher for the servers
    neither          one worker alone

Under `polyrhythm run` the number of servers is not known before a script has named its strategy. So workers
are ranks 0 … N-1 of WORLD_SIZE = N, and servers are ranks N … N+S-1 of WORLD_SIZE = N+S.

The store carries the messages between ranks and launcher. A `FaultPolicy` defines the losses that the ranks
survive, depending on their strategy: rank 0 sends it to the launcher, which knows no strategy.
`WorkerStatuses` has the status of each worker, since the launcher is the first to know of a failed one:

launcher      HERE ─────▶ GONE, or COMING if it starts a replacement
replacement               COMING ─▶ WAITING, where others regroup ─▶ HERE, or BEHIND where it stays behind the
others

With each of several strategies (`stages`) a script is restarted. `polyrhythm run` restarts its ranks.
torchrun treats any process exit as the end of the job, so its ranks re-execute their own command in the same
process.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import secrets
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from polyrhythm.communication.transports.membership import Peer
from polyrhythm.communication.transports.torch_distributed.rendezvous import (
    LOOPBACK,
    PREFIX,
    Rendezvous,
    from_environment,
    host_store,
    newest_generations,
)
from polyrhythm.errors import RequestError
from polyrhythm.events import Event, Notice
from polyrhythm.launch import tethered
from polyrhythm.launch.patience import Patience
from polyrhythm.launch.process import allow_descriptors, check_loopback, leave_errors_to_python
from polyrhythm.launch.process_source import Launcher
from polyrhythm.launch.rank_server import ForkedRank, RankServer, threads_of_ranks
from polyrhythm.launch.signals import asked_to_stop
from polyrhythm.launch.supervisor import (
    BUG,
    PEER,
    Admits,
    Began,
    Blamed,
    Exited,
    Fact,
    Joined,
    Kill,
    Order,
    Over,
    PolicyKnown,
    Rules,
    Start,
    Supervisor,
    Vacate,
    Waiting,
)
from polyrhythm.launch.torchrun.gathering import gather
from polyrhythm.launch.torchrun.report_rank import started_by_torchrun
from polyrhythm.launch.torchrun.software import check_software
from polyrhythm.roles.world import LEADER
from polyrhythm.strategies.fault_policy import FaultPolicy, OnLoss
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.strategies.strategy import Strategy

WORKERS_VARIABLE = "POLYRHYTHM_WORKERS"
"""Set by `polyrhythm run` in every rank: the number of workers."""

GENERATION_VARIABLE = "POLYRHYTHM_GENERATION"
"""Set by `polyrhythm run`: how many processes have had a rank before this one."""

RETURNS_VARIABLE = "POLYRHYTHM_LEADER_RETURNS"
"""Set by `polyrhythm run` in every rank: 1 if worker 0 is started again when it is lost, as any other; else 0."""

POLICY_KEY = "script/policy"
"""Set in the store by rank 0: which losses the ranks survive; see `policy_of`."""

SERVERS_KEY = "script/servers"
"""Set in the store by rank 0, after that: how many servers the launcher must start."""

ADMITS_KEY = "script/admits"
"""Set in the store by rank 0 when its loop reports its position: empty, or the reason why no replacement can enter."""

OVER_KEY = "script/over"
"""Set in the store by rank 0 when all have reached the end: later processes are too late."""

WHOLE_KEY = "script/whole"
"""Set in the store, with a rank and generation behind, by rank 0 when the replacement of a server has its shards."""

DISMISSED_KEY = "script/let-go"
"""Set in the store, with its rank and generation behind, by a worker that servers have let go."""

FAILED_KEY = "script/failed"
"""Set in the store by the first rank that fails with an error of its own: the others' errors are consequences."""

NEXT_STAGE_KEY = "script/next-stage"
"""Set in the store by rank 0 at the end of a stage: the number of the stage with which all restart."""

STAGE_VARIABLE = "POLYRHYTHM_STAGE"
"""Current stage of a script's strategies, and a folder to pass its state on in. Set by `polyrhythm run`; a
rank of torchrun sets it for itself, and rank 0 has the folder.
"""

_STRATEGY_KEY = "script/strategy"
_THIS_PROCESS = secrets.token_hex(8)
"""Drawn again in a process that torchrun starts again, while the store stays, and in a fork."""


def _begin_fork() -> None:
    global _THIS_PROCESS
    _THIS_PROCESS = secrets.token_hex(8)


os.register_at_fork(after_in_child=_begin_fork)


def started_by_run() -> bool:
    """Whether `polyrhythm run` has started this process."""
    return WORKERS_VARIABLE in os.environ


def leader_returns() -> bool:
    """Whether worker 0 gets a replacement when it is lost."""
    return os.environ.get(RETURNS_VARIABLE) == "1"


def stage_under_way() -> tuple[int, Path | None] | None:
    """Return the current stage of a script's strategies and the folder of its state; None: there are no stages."""
    number, _, folder = os.environ.get(STAGE_VARIABLE, "").partition(":")
    if not number:
        return (0, None) if begins_again() else None
    return int(number), Path(folder) if folder else None


def begins_again() -> bool:
    """Whether this process begins its script again by itself when a stage is over: a rank that torchrun has started."""
    return started_by_torchrun() and not started_by_run()


def check_stage(strategy: Strategy) -> None:
    """Reject a sequence of strategies that these processes cannot run.

    Raises:
        RequestError: the strategy is not supported; the message has the reason.
    """
    if not begins_again():
        strategy.check(int(os.environ[WORKERS_VARIABLE]))
        return
    from polyrhythm.launch.torchrun.started_rank import workers_of  # the launcher needs no rank's imports

    strategy.check(workers_of(strategy))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise RequestError(
            "stages restart the script in each process, and the store in which ranks meet would end with that of "
            "rank 0: start with torchrun, which keeps one itself, or with polyrhythm run"
        )
    if multiprocessing.parent_process() is not None:
        raise RequestError(
            "stages restart the script, and this process is a function that multiprocessing has started: give "
            "torchrun the script"
        )


def _folder() -> str:
    with suppress(OSError):
        return os.getcwd()
    return os.curdir


_FOLDER = _folder()


def begin_again(stage: str) -> NoReturn:
    """Execute this process's command again, at once, for another stage; it stays the rank that it is.

    Args:
        stage: the text of `STAGE_VARIABLE`.
    """
    os.environ[STAGE_VARIABLE] = stage
    sys.stdout.flush()
    sys.stderr.flush()
    with suppress(OSError):
        os.chdir(_FOLDER)
    for name in os.listdir("/dev/fd"):  # libraries leave theirs open for whatever is executed
        with suppress(OSError):
            mode = os.fstat(int(name)).st_mode
            if int(name) > 2 and (stat.S_ISSOCK(mode) or stat.S_ISCHR(mode)):
                os.set_inheritable(int(name), False)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def begin_again_at_exit(stage: str) -> None:
    """Execute this process's command again for another stage, once the script has ended without an error.

    Args:
        stage: the text of `STAGE_VARIABLE`.
    """

    def anew() -> None:
        if hasattr(sys, "last_value"):  # the script has failed on its way out
            return
        atexit.unregister(anew)
        atexit._run_exitfuncs()  # other handlers, which would run after this one
        begin_again(stage)

    atexit.register(anew)


def begun_key(worker: int) -> str:
    """Return the key of the epoch that a worker of a script has begun."""
    return f"script/begun/{worker}"


def meet(strategy: Strategy) -> tuple[Rendezvous, RoleAssignment]:
    """Find the other ranks, and return the way to them and the role of each.

    Raises:
        RequestError: too few processes for the strategy, another strategy than rank 0's, or a second meeting.
        RunError: the others cannot be reached.
    """
    if started_by_run():
        return _at_launcher(strategy)
    if started_by_torchrun():
        return _at_torchrun(strategy)
    return _alone(strategy)


def _at_launcher(strategy: Strategy) -> tuple[Rendezvous, RoleAssignment]:
    workers = int(os.environ[WORKERS_VARIABLE])
    strategy.check(workers)
    servers = strategy.traits(workers).servers
    size = workers + servers
    generation = int(os.environ.get(GENERATION_VARIABLE, "0"))
    rendezvous = replace(from_environment(), size=size, generation=generation)
    if generation:
        rendezvous = replace(rendezvous, met=newest_generations(rendezvous.store, size))
    _join_once(rendezvous)
    _agree(rendezvous, strategy)
    if rendezvous.rank == 0:
        rendezvous.store.set(POLICY_KEY, json.dumps(policy_of(strategy, workers)))
        rendezvous.store.set(SERVERS_KEY, str(servers))
    return rendezvous, RoleAssignment(tuple(range(workers)), tuple(range(workers, size)))


def _at_torchrun(strategy: Strategy) -> tuple[Rendezvous, RoleAssignment]:
    from polyrhythm.launch.torchrun.started_rank import roles_of  # the launcher needs no rank's imports

    rendezvous = from_environment()
    _join_once(rendezvous)
    rendezvous = gather(rendezvous).rendezvous
    check_software(rendezvous, range(rendezvous.size))
    _agree(rendezvous, strategy)
    roles = roles_of(strategy, rendezvous)
    strategy.check(len(roles.workers))
    return rendezvous, roles


def _alone(strategy: Strategy) -> tuple[Rendezvous, RoleAssignment]:
    strategy.check(1)
    servers = strategy.traits(1).servers
    if servers:
        script = Path(sys.argv[0]).name or "script.py"
        raise RequestError(
            f"{strategy} needs {servers} {'server' if servers == 1 else 'servers'} in addition to its workers: "
            "start with "
            f"`polyrhythm run --workers 2 {script}` or `torchrun --nproc-per-node {servers + 2} {script}`"
        )
    return Rendezvous(dist.HashStore(), 0, 1, LOOPBACK), RoleAssignment((0,))


def _join_once(rendezvous: Rendezvous) -> None:
    if rendezvous.store.add(f"script/joined/{rendezvous.rank}/{_THIS_PROCESS}", 1) > 1:
        raise RequestError(
            "this process has joined before, and its run is over: train within one `with polyrhythm.join(…)`, and "
            "start the script once for each model, such as `for fold in 0 1 2; do polyrhythm run train.py $fold; done`"
        )


def _agree(rendezvous: Rendezvous, strategy: Strategy) -> None:
    store, rank = rendezvous.store, rendezvous.rank
    if rank == 0:
        store.set(_STRATEGY_KEY, str(strategy))
        return
    leaders = Patience().key(store, _STRATEGY_KEY, 0)
    if leaders != str(strategy):
        raise RequestError(f"rank {rank} joins with {strategy}, rank 0 with {leaders}: give all the same")


def policy_of(strategy: Strategy, workers: int) -> dict[str, Any]:
    """Return rank 0's message about losses to the launcher, for JSON.

    `policy` has the values of the strategy's `FaultPolicy`, as far as it applies to a user's own loop: the
    steps of groups that regroup apart cannot be repeated around it. `why_not` is the reason why the death of
    a worker ends the run, for users; it is empty if it does not.
    """
    policy, why_not = strategy.faults(workers), ""
    if policy.regroups_apart:
        why_not = (
            f"{strategy} survives the loss of a worker under polyrhythm train only, not in a loop of your own"
        )
    elif not policy.continues and workers > 1:
        why_not = f"{strategy} does not survive the loss of a worker"
    if policy.regroups_apart or not policy.continues:
        policy = replace(policy, worker=OnLoss.STOP, leader=False)
    return {"policy": policy.to_json(), "why_not": why_not}


class WorkerStatus(StrEnum):
    """Status of a worker."""

    HERE = "here"
    GONE = "gone"
    COMING = "coming"  # a replacement is started
    WAITING = "waiting"  # a replacement waits for the next epoch
    BEHIND = "behind"  # a replacement takes part, steps behind the others, which must not wait for it


class WorkerStatuses:
    """Status of each worker, in the store.

    Args:
        store: store where the ranks meet.
        workers: number of workers.
        is_lost: returns whether this rank knows that a worker has failed; used where there is no launcher.
    """

    def __init__(
        self, store: Any, workers: int, is_lost: Callable[[int], bool] = lambda worker: False
    ) -> None:
        self._store = store
        self._keys = [f"script/place/{worker}" for worker in range(workers)]
        self._is_lost = is_lost

    def begin(self) -> None:
        """Set that all are there, or about to be; only a launcher does."""
        for worker in range(len(self._keys)):
            self.set(worker, WorkerStatus.HERE)

    def set(self, worker: int, status: WorkerStatus) -> None:
        """Set what has become of a worker."""
        self._store.set(self._keys[worker], status.value)

    def of(self, worker: int) -> WorkerStatus:
        """Return the status of a worker."""
        return self.read()[worker]

    def read(self) -> list[WorkerStatus]:
        """Return the status of each worker."""
        if not self._store.check(self._keys):  # torchrun's
            return [
                WorkerStatus.GONE if self._is_lost(worker) else WorkerStatus.HERE
                for worker in range(len(self._keys))
            ]
        return [WorkerStatus(bytes(value).decode()) for value in self._store.multi_get(self._keys)]


LAST_WORDS_S = 3.0
"""Seconds for ranks to report their observations after another has failed."""

GRACE_S = 3.0
"""Seconds for them to leave when asked."""

_LOOK_EVERY_S = 0.02


@dataclass(frozen=True)
class ScriptRank:
    """A rank's process."""

    peer: Peer
    process: subprocess.Popen[bytes] | ForkedRank


class ScriptRanks:
    """The ranks of a script, as a source of processes.

    Args:
        command: command of every rank.
        workers: number of workers.
        threads: compute threads of a worker; None leaves OMP_NUM_THREADS as it is, or shares the cores out.
        port: TCP port of the store.
        store: store where they meet.
        leader_returns: whether worker 0 is started again when it is lost.
        stage: the text of `STAGE_VARIABLE`.
        server: server from which the ranks are forked; None: each starts Python.
    """

    look_every_s = _LOOK_EVERY_S
    waitables: tuple[()] = ()

    def __init__(
        self,
        command: list[str],
        workers: int,
        threads: int | None,
        port: int,
        store: Any,
        *,
        leader_returns: bool = False,
        stage: str = "",
        server: RankServer | None = None,
    ) -> None:
        self._stage = stage
        self._server = server
        self._command = command
        self._workers = workers
        self._servers = 0
        self._port = port
        self._store = store
        self._leader_returns = leader_returns
        self._threads = threads_of_ranks(workers, threads)
        self._running: list[ScriptRank] = []
        self._statuses = WorkerStatuses(store, workers)
        self._statuses.begin()
        self._policy_known = self._end_sent = False
        self._whole: set[Peer] = set()

    def start(self, peer: Peer) -> None:
        """Start a process."""
        works = peer.rank < self._workers
        size = self._workers if works else self._workers + self._servers
        local = {"RANK": peer.rank, "WORLD_SIZE": size, "LOCAL_RANK": peer.rank, "LOCAL_WORLD_SIZE": size}
        group = {"GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1}
        store = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": self._port}
        agent = {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
        ours = {
            WORKERS_VARIABLE: self._workers,
            GENERATION_VARIABLE: peer.generation,
            RETURNS_VARIABLE: int(self._leader_returns),
            STAGE_VARIABLE: self._stage,
        }
        threads = {"OMP_NUM_THREADS": self._threads if works else "1"}
        variables = local | group | store | agent | ours | threads
        environment = os.environ | {key: str(value) for key, value in variables.items()}
        forked = None if self._server is None else self._server.start(self._command, environment)
        # In groups of their own: the terminal's SIGINT reaches this process alone, which then ends them in order.
        process = forked or subprocess.Popen(
            [sys.executable, "-I", "-S", tethered.__file__, str(os.getpid()), sys.executable, *self._command],
            env=environment,
            stdin=subprocess.DEVNULL,
            process_group=0,
        )
        self._running.append(ScriptRank(peer, process))

    def poll(self, ready: Sequence[Any] = ()) -> list[Fact]:
        """Return the ranks' entries in the store, and the ranks that have left."""
        facts = [] if self._policy_known else self._policy()
        left = [rank for rank in self._running if rank.process.poll() is not None]
        over = not self._end_sent and self._store.check([OVER_KEY])
        if left or over:
            facts += self._news()
        facts += self._whole_servers()
        if over:
            self._end_sent = True
            facts.append(Over())
        self._running = [rank for rank in self._running if rank not in left]
        return facts + [self._exit(rank) for rank in left]

    def carry_out(self, order: Order) -> None:
        """Start or kill a rank, or store a member's place."""
        match order:
            case Start(peer=peer):
                self.start(peer)
            case Kill(peer=peer):
                for rank in [rank for rank in self._running if rank.peer == peer]:
                    rank.process.kill()
                    rank.process.wait()
                    self._running.remove(rank)
            case Vacate(rank=worker, coming=coming):
                self._statuses.set(worker, WorkerStatus.COMING if coming else WorkerStatus.GONE)

    def end(self) -> None:
        """End the remaining ranks: by a request, then by killing."""
        try:
            self._signal(signal.SIGTERM)
            self._wait(GRACE_S)
        finally:  # a second SIGINT cuts the asking short
            self._signal(signal.SIGKILL)
            self._wait(None)

    def _policy(self) -> list[Fact]:
        if not self._store.check([SERVERS_KEY]):
            return []
        self._policy_known, self._servers = True, int(self._read(SERVERS_KEY))
        policy = json.loads(self._read(POLICY_KEY))
        return [PolicyKnown(FaultPolicy.from_json(policy["policy"]), self._servers, policy["why_not"])]

    def _news(self) -> list[Fact]:
        """Return the facts in the store; read when a rank has left, since they then matter."""
        facts: list[Fact] = []
        if self._store.check([begun_key(LEADER)]):
            facts.append(Began())
        if self._store.check([ADMITS_KEY]):
            facts.append(Admits(self._read(ADMITS_KEY)))
        if self._store.check([FAILED_KEY]):
            facts.append(Blamed(int(self._read(FAILED_KEY))))
        statuses = self._statuses.read()
        for rank in [rank.peer.rank for rank in self._running if rank.peer.generation]:
            if rank >= self._workers:
                continue
            if statuses[rank] in (WorkerStatus.HERE, WorkerStatus.BEHIND):
                facts.append(Joined(rank))
            elif statuses[rank] is WorkerStatus.WAITING:
                facts.append(Waiting(rank))
        return facts

    def _whole_servers(self) -> list[Fact]:
        """Return the replacements of servers that have got their shards: later ones may rely on them."""
        waiting = [
            rank.peer for rank in self._running if rank.peer.generation and rank.peer.rank >= self._workers
        ]
        whole = [peer for peer in waiting if peer not in self._whole and self._is_set(WHOLE_KEY, peer)]
        self._whole |= set(whole)
        return [Joined(peer.rank) for peer in whole]

    def _exit(self, rank: ScriptRank) -> Exited:
        """Return how a rank has left; one that was killed, or let go by the servers, has no error of its own."""
        status = rank.process.returncode or 0
        dismissed = status > 0 and self._is_set(DISMISSED_KEY, rank.peer)
        return Exited(rank.peer, status, kind="" if status <= 0 else PEER if dismissed else BUG)

    def _is_set(self, key: str, peer: Peer) -> bool:
        return bool(self._store.check([f"{key}/{peer.rank}/{peer.generation}"]))

    def _read(self, key: str) -> str:
        return bytes(self._store.get(key)).decode()

    def _wait(self, patience_s: float | None) -> None:
        deadline = None if patience_s is None else time.monotonic() + patience_s
        for rank in self._running:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                rank.process.wait(left)
            except subprocess.TimeoutExpired:
                return

    def _signal(self, number: signal.Signals) -> None:
        for rank in self._running:
            if rank.process.poll() is None:
                rank.process.send_signal(number)


_OWN_OPTIONS = ("--workers", "--threads", "--restarts")
RESTARTS = 3
"""Default for the largest number of replacements of failed ranks."""


def run_script(
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    workers: int,
    threads: int | None = None,
    restarts: int = RESTARTS,
    module: bool = False,
    server: RankServer | None = None,
) -> None:
    """Run a script that calls `polyrhythm.join`: once a worker, and once a server that its strategy asks for.

    Ranks have torchrun's variables in their environment, and the output streams of this process. When a rank
    is killed that its strategy can do without, the others continue, and it is restarted where the loop
    reports its position (`group.epochs`). When one fails otherwise, the others are ended; they also end with
    this process, however it ends (Linux). Where the script joins with `stages`, all ranks restart with each
    of them.

    Args:
        script: a Python file.
        arguments: arguments for the script.
        workers: number of workers.
        threads: compute threads of each worker; None leaves OMP_NUM_THREADS as it is, or shares the cores out.
        restarts: the most replacements that lost ranks may have.
        module: whether `script` is the name of a module, as for `python -m`.
        server: server from which the ranks are forked; None: each starts Python.

    Raises:
        RequestError: there is no such script, or no worker.
        RunError: a rank failed that the others cannot do without.
        KeyboardInterrupt: SIGINT or SIGTERM was received.
    """
    _check(script, workers, threads, restarts, module=module)
    if arguments and arguments[0].partition("=")[0] in _OWN_OPTIONS:
        raise RequestError(
            f"{arguments[0]} after {script} would be the script's: put it before it, or write -- in between"
        )
    arguments = arguments[1:] if arguments[:1] == ["--"] else arguments
    allow_descriptors(workers)
    check_loopback()
    leave_errors_to_python()
    command = [*(["-m"] if module else []), str(script), *arguments]
    stage: str | None = "0"
    with tempfile.TemporaryDirectory(prefix="polyrhythm-stages-") as folder:
        while stage is not None:
            stage = _run_ranks(command, workers, threads, restarts, f"{stage}:{folder}", server)


def _run_ranks(
    command: list[str],
    workers: int,
    threads: int | None,
    restarts: int,
    stage: str,
    server: RankServer | None,
) -> str | None:
    """Run a script's ranks to their end; return the number of the stage that follows, if one does."""
    hosted = host_store()
    store = dist.PrefixStore(PREFIX, hosted)
    ranks = ScriptRanks(
        command, workers, threads, hosted.port, store, leader_returns=restarts > 0, stage=stage, server=server
    )
    rules = Rules(restarts, last_words_s=LAST_WORDS_S)
    supervisor = Supervisor(RoleAssignment(tuple(range(workers))), range(workers), rules)
    launcher = Launcher(supervisor, store, ranks, _print)
    try:
        with asked_to_stop(_interrupt):
            for rank in range(workers):
                ranks.start(Peer(rank, 0))
            launcher.run()
        if launcher.error is not None:
            raise launcher.error
        if not store.check([SERVERS_KEY]):
            _print_line(_NEVER_JOINED.format(workers=workers))
        return bytes(store.get(NEXT_STAGE_KEY)).decode() if store.check([NEXT_STAGE_KEY]) else None
    finally:
        ranks.end()


def _check(
    script: str | Path, workers: int, threads: int | None, restarts: int, *, module: bool = False
) -> None:
    if module and not _is_module(str(script)):
        raise RequestError(
            f"there is no module {script}: give its name, such as package.train, in the folder that holds the package"
        )
    if not module and not Path(script).is_file():
        raise RequestError(f"there is no script {script}: give the path of a Python file")
    for what, number in (("workers", workers), ("threads", 1 if threads is None else threads)):
        if number < 1:
            raise RequestError(f"{what} must be at least 1 (given {number})")
    if restarts < 0:
        raise RequestError(f"restarts must be at least 0 (given {restarts})")


def _is_module(name: str) -> bool:
    """Return whether `python -m` would find a module in this folder, or among what is installed; imports nothing."""
    places: Sequence[str] | None = [os.getcwd(), *sys.path]
    for part in name.split("."):
        found = PathFinder.find_spec(part, places) if places is not None and part else None
        if found is None:
            return False
        places = found.submodule_search_locations
    return places is None or PathFinder.find_spec("__main__", places) is not None


def _interrupt() -> None:
    raise KeyboardInterrupt


_NEVER_JOINED = (
    "the script has ended without calling polyrhythm.join: unless it shares its work out otherwise, each of its "
    "{workers} processes did all of it; see `with polyrhythm.join(strategy) as group`"
)


def _print(event: Event) -> None:
    if isinstance(event, Notice):
        _print_line(event.text)


def _print_line(text: str) -> None:
    print(f"polyrhythm: {text}", file=sys.stderr, flush=True)
