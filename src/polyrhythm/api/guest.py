"""A worker that was not started by a run's launcher: `polyrhythm join`."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from polyrhythm.api.entering import facts_of
from polyrhythm.communication.transports.torch_distributed.link_words import newest_incarnations
from polyrhythm.communication.transports.torch_distributed.rendezvous import LOOPBACK, Rendezvous, own_address
from polyrhythm.config.assemble import assemble
from polyrhythm.config.recipe import configure
from polyrhythm.errors import RequestError, RunError
from polyrhythm.events import Event, Notice
from polyrhythm.launch.cores import available_cores
from polyrhythm.launch.joining.address import Address, parse_address
from polyrhythm.launch.joining.token import TOKEN_VARIABLE, door_key, link_key, read_token
from polyrhythm.launch.joining.visit import Place, Visit
from polyrhythm.launch.name_service import ask_names_briefly
from polyrhythm.launch.preemption import PREEMPTED
from polyrhythm.launch.rank import Circumstances, run_rank
from polyrhythm.roles.job import Job, Keeping
from polyrhythm.roles.world import Departed, StopRequest

INTERRUPTED = 130
LEAVING_PATIENCE_S = 5.0
"""A worker that is asked to leave does so after its step; if that takes longer, at once: the others bear both."""

_STORE_PATIENCE = dist.default_pg_timeout


class Guest:
    """A worker that has a place in somebody's run.

    Args:
        visit: its way in.
        job: what the run learns.
        place: that it has there.
        address: of the door.
        key: of the links.

    Attributes:
        name: of its place, for people.
        folder: of the run, where its launcher is.
    """

    def __init__(self, visit: Visit, job: Job, place: Place, address: Address, key: bytes) -> None:
        rank = place.peer.rank
        self.name = f"worker {place.cast.workers.index(rank)} (rank {rank})"
        self.folder = job.keeping.folder
        self._visit = visit
        self._job = job
        self._place = place
        self._address = address
        self._key = key
        self._stop = StopRequest()
        self._asked: int | None = None

    def work(self, say: Callable[[str], None], threads: int | None = None) -> int:
        """Trains until the run is over, or this worker is asked to leave.

        Args:
            say: tells people.
            threads: compute threads; None takes all cores.

        Returns:
            The status with which the process should leave: 0, 75 after SIGTERM, 130 after SIGINT. It must leave
            at once (`os._exit`) unless it is 0: a worker that leaves in the middle still has links.

        Raises:
            RunError: the run failed, or is gone.
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._hear)
        self._visit.listen(self._stop.request, lambda why: self._end_soon(why, say))

        def emit(event: Event) -> None:
            if isinstance(event, Notice):
                say(event.text)

        try:
            around = Circumstances(self._stop, emit)
            run_rank(self._job, self._place.cast, self._rendezvous(), threads or available_cores(), around)
        except Departed:
            self._visit.leave("its host asked it to")
            return self._status()
        except BaseException as error:
            self._visit.leave(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
            raise
        self._visit.leave(None)
        self._visit.close()
        return 0

    @property
    def last_words(self) -> str:
        """What became of it, for people, where it has left in good order."""
        if self._stop.requested:
            return (
                "the run was asked to stop, and this worker has stopped with it: join again when it goes on"
            )
        return "done: all its steps are taken"

    def _rendezvous(self) -> Rendezvous:
        try:
            store = dist.TCPStore(
                LOOPBACK,
                self._visit.store_port,
                None,
                is_master=False,
                timeout=_STORE_PATIENCE,
                wait_for_workers=False,
            )
        except (RuntimeError, dist.DistError) as error:
            raise RunError(f"the run's store cannot be reached: {str(error).splitlines()[0]}") from None
        found = dist.PrefixStore(self._place.prefix, store) if self._place.prefix else store
        size = self._place.cast.size
        return Rendezvous(
            found,
            self._place.peer.rank,
            size,
            own_address(*self._address),
            incarnation=self._place.peer.incarnation,
            key=self._key,
            met=newest_incarnations(found, size),
        )

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self._asked is None:
            self._asked = number
            self._stop.request_leave()
            self._after(LEAVING_PATIENCE_S, self._leave_at_once)

    def _leave_at_once(self) -> None:
        self._visit.leave("its host asked it to, in the middle of a step")
        os._exit(self._status())

    def _status(self) -> int:
        return PREEMPTED if self._asked == signal.SIGTERM else INTERRUPTED

    def _end_soon(self, why: str, say: Callable[[str], None]) -> None:
        """The run is over, or gone: what is not through in a moment never will be."""

        def end() -> None:
            say(f"{why}: this worker leaves")
            os._exit(1)

        self._after(LEAVING_PATIENCE_S, end)

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, act)
        timer.daemon = True
        timer.start()


def enter_run(address: str, *, token_file: str | Path | None = None, **own: Any) -> Guest:
    """Goes through the door of a run and takes a place in it.

    Args:
        address: of the door, HOST:PORT.
        token_file: of the run token; None takes the environment's.
        **own: options of `RunConfig` in which this worker differs from the others: where it has the `data`, its
            `device`.

    Raises:
        RequestError: the address, the token or the data are others than the run's, or there is no place.
    """
    at, token = parse_address(address), read_token(token_file)
    if token is None:
        raise RequestError(
            f"who joins must know the run's token: name its file with --token-file, or set {TOKEN_VARIABLE}"
        )
    ask_names_briefly()
    visit = Visit(at, door_key(token))
    try:
        offer = visit.job(version("polyrhythm"))
        job = _job(offer, {key: value for key, value in own.items() if value is not None})
        place = visit.take_place()
        found = sum(each.numel() for each in job.make_model().parameters() if each.requires_grad)
        if found != place.parameters:
            visit.leave("its model is another")
            raise RequestError(
                f"the model has {found:,} parameters here, and {place.parameters:,} in the run"
            )
    except BaseException:
        visit.close()
        raise
    return Guest(visit, job, place, at, link_key(token))


def _job(offer: dict[str, Any], own: dict[str, Any]) -> Job:
    config = configure(offer["config"], {"weights": None}, own)  # the others give it their parameters
    folder = Path(offer["folder"])
    job = assemble(config, Keeping(folder=folder, checkpoints=config.keep_checkpoints))
    here = facts_of(job.dataset)
    for fact, value in offer["data"].items():
        if here[fact] != value:
            what = "other classes" if fact == "names" else f"{fact} {here[fact]}, the run's {value}"
            raise RequestError(f"the data here have {what}: name the same data with --data")
    return job


def complain(text: str) -> None:
    """Says something to people who watch a guest."""
    print(f"notice: {text}", file=sys.stderr, flush=True)
