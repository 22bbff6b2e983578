"""Joining a run of `train`: what the run offers, and `polyrhythm join`.

The run listens at an address, admits workers that know its token, and publishes how to join
(`join.json` in the run folder). A guest is a worker that was not started by the run's launcher: it connects
with address and token, receives the job, checks that its data are the run's, and takes a place among the
workers.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from polyrhythm.claim import Superseded
from polyrhythm.communication.transports.torch_distributed.rendezvous import (
    LOOPBACK,
    Rendezvous,
    newest_generations,
    own_address,
)
from polyrhythm.config.assemble import assemble, checkpoints_of
from polyrhythm.config.recipe import CONFIG_FILE, configure, read_recipe
from polyrhythm.config.run_config import RunConfig
from polyrhythm.data.dataset import Dataset
from polyrhythm.errors import RequestError, RunError
from polyrhythm.events import Event, Notice
from polyrhythm.launch.devices import available_cores, check_kinds_of_devices
from polyrhythm.launch.joining.connections import (
    TOKEN_FILE,
    TOKEN_VARIABLE,
    Address,
    door_key,
    draw_token,
    link_key,
    parse_address,
    read_token,
)
from polyrhythm.launch.joining.join_client import Assignment, JoinClient
from polyrhythm.launch.joining.join_server import Admission, Entrance
from polyrhythm.launch.process import ask_names_briefly
from polyrhythm.launch.rank import RankContext, run_rank
from polyrhythm.launch.signals import ASKING, INTERRUPTED, PREEMPTED
from polyrhythm.launch.torchrun.software import software
from polyrhythm.roles.job import Job
from polyrhythm.roles.world import RankExited, StopRequest

JOIN_FILE = "join.json"
"""In the run folder while the run can be joined: address, token file, and the command."""


@contextmanager
def entrance_of(job: Job, config: RunConfig) -> Iterator[Entrance | None]:
    """Open the entrance that a run's configuration asks for; None if it asks for none.

    Args:
        job: job with an existing folder.
        config: configuration of the run.

    Raises:
        RequestError: the address or the token cannot be used.
    """
    folder = job.checkpointing.folder
    if config.listen is None or folder is None:
        yield None
        return
    address, given = parse_address(config.listen), read_token(config.token_file)
    drawn = None
    if given is None:
        given, drawn = draw_token(folder, job.checkpointing.claim)
    entrance = Entrance(address, given)
    entrance.offer = {
        "version": software(),
        "folder": str(folder),
        "config": read_recipe(folder / CONFIG_FILE)
        | {"restarts": job.fault_tolerance.restarts},  # under torchrun none
        "data": facts_of(job.dataset),
        "device": job.device.type,
    }
    file = drawn or config.token_file
    command = f"polyrhythm join {entrance.address}" + (f" --token-file {file}" if file else "")
    knowing = "" if file else ", with POLYRHYTHM_TOKEN in the environment"
    entrance.how = f"others may join at {entrance.address}: {command}{knowing}"
    description = {
        "address": str(entrance.address),
        "token_file": str(file) if file else None,
        "command": command,
    }
    job.checkpointing.claim.write(folder / JOIN_FILE, json.dumps(description, indent=2) + "\n")
    try:
        yield entrance
    finally:
        entrance.close()
        with suppress(Superseded):
            for name in (JOIN_FILE, TOKEN_FILE):
                job.checkpointing.claim.remove(folder / name)


def admission_of(job: Job, config: RunConfig, entrance: Entrance | None = None) -> Admission | None:
    """Return the facts about the admission of guests for a rank started by torchrun; None if none are admitted.

    Args:
        job: job; its folder may hold the token that rank 0 has drawn if none was given.
        config: configuration of the run.
        entrance: rank 0's.

    Raises:
        RequestError: the address or the token cannot be used.
    """
    folder = job.checkpointing.folder
    if config.listen is None or folder is None:
        return None
    given = read_token(config.token_file)

    def token() -> str | None:
        drawn = folder / TOKEN_FILE
        return read_token(drawn) if given is None and drawn.is_file() else given

    return Admission(parse_address(config.listen), token, entrance)


def facts_of(dataset: Dataset) -> dict[str, Any]:
    """Return the facts in which equal data must agree: number, shape and names of images, and the classes."""
    classes = json.dumps([str(name) for name in dataset.classes])
    return {
        "images": len(dataset.train),
        "shape": list(dataset.image_shape),
        "classes": len(dataset.classes),
        "names": hashlib.sha256(classes.encode(errors="backslashreplace")).hexdigest(),
        "listing": dataset.listing_sha256,
    }


LEAVING_PATIENCE_S = 5.0
"""A worker that is asked to leave does so after its step, or at once after this time: the others handle both."""

_STORE_PATIENCE = dist.default_pg_timeout


class Guest:
    """A worker in another user's run.

    Args:
        visit: connection to the run.
        job: job that the run trains.
        place: place in the run.
        address: address where the run listens.
        key: key of the links.

    Attributes:
        name: name of its place, to display.
        folder: folder of the run, on the launcher's machine.
    """

    def __init__(self, visit: JoinClient, job: Job, place: Assignment, address: Address, key: bytes) -> None:
        rank = place.peer.rank
        self.name = f"worker {place.roles.workers.index(rank)} (rank {rank})"
        self.folder = job.checkpointing.folder
        self._visit = visit
        self._job = job
        self._place = place
        self._address = address
        self._key = key
        self._stop = StopRequest()
        self._asked: int | None = None

    def work(self, notify: Callable[[str], None], threads: int | None = None) -> int:
        """Train until the run is over, or this worker is asked to leave.

        Args:
            notify: function that prints a message for the user.
            threads: compute threads; None: all cores.

        Returns:
            The exit status for the process: 0, 75 after SIGTERM, 130 after SIGINT. Unless it is 0, the process must
            exit at once (`os._exit`): a worker that leaves before the end still has links.

        Raises:
            RequestError: this host cannot reach a rank of the run.
            RunError: the run failed, or is gone.
        """
        for number in ASKING:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)
        self._visit.listen(self._stop.request, lambda why: self._end_soon(why, notify))

        def emit(event: Event) -> None:
            if isinstance(event, Notice):
                notify(event.text)

        try:
            around = RankContext(self._stop, emit, guest=True)
            run_rank(self._job, self._place.roles, self._rendezvous(), threads or available_cores(), around)
        except RankExited:
            self._visit.leave("its host asked it to")
            return self._status()
        except BaseException as error:
            kind = "" if isinstance(error, RequestError) else f"{type(error).__name__}: "
            self._visit.leave(f"{kind}{str(error).partition(chr(10))[0]}")
            raise
        self._visit.leave(None)
        self._visit.close()
        return 0

    @property
    def end_message(self) -> str:
        """A sentence on how its work ended, if it has left in good order."""
        if self._stop.requested:
            return (
                "the run was asked to stop, and this worker has stopped with it: join again when it continues"
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
        size = self._place.roles.size
        return Rendezvous(
            found,
            self._place.peer.rank,
            size,
            own_address(*self._address),
            generation=self._place.peer.generation,
            key=self._key,
            met=newest_generations(found, size),
        )

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._asked is None:
            self._asked = number
            self._stop.request_leave()
            self._after(LEAVING_PATIENCE_S, self._leave_at_once)

    def _leave_at_once(self) -> None:
        self._visit.leave("its host asked it to, in the middle of a step")
        os._exit(self._status())

    def _status(self) -> int:
        return PREEMPTED if self._asked == signal.SIGTERM else INTERRUPTED

    def _end_soon(self, why: str, notify: Callable[[str], None]) -> None:
        """Exit soon after the run is over or gone: a worker that does not finish within a moment never will."""

        def end() -> None:
            notify(f"{why}: this worker leaves")
            os._exit(1)

        self._after(LEAVING_PATIENCE_S, end)

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, act)
        timer.daemon = True
        timer.start()


def enter_run(address: str, *, token_file: str | Path | None = None, **own: Any) -> Guest:
    """Connect to a run and take a place in it.

    Args:
        address: address where the run listens, HOST:PORT.
        token_file: file with the run token; None: the token is in the environment.
        **own: options of `RunConfig` in which this worker differs from the others: the path of its `data`, its
            `device`.

    Raises:
        RequestError: the address, the token or the data are not the run's, or there is no vacant place.
    """
    at, token = parse_address(address), read_token(token_file)
    if token is None:
        raise RequestError(
            f"joining needs the run's token: name its file with --token-file, or set {TOKEN_VARIABLE}"
        )
    ask_names_briefly()
    visit = JoinClient(at, door_key(token))
    try:
        offer = visit.job(software())
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
    job = assemble(config, checkpoints_of(config, folder))
    here = facts_of(job.dataset)
    for fact, value in offer["data"].items():
        if here[fact] != value:
            hidden = {"names": "other classes", "listing": "other images, or others held out"}
            what = hidden.get(fact, f"{fact} {here[fact]}, the run's {value}")
            raise RequestError(f"the data here have {what}: name the same data with --data")
    if job.device.type != offer["device"]:
        kinds = f"this worker would compute on {job.device.type}, and worker 0 on {offer['device']}: "
        check_kinds_of_devices(job.strategy, job.workers, kinds)
    return job


def complain(text: str) -> None:
    """Print a notice to the user of a guest."""
    print(f"notice: {text}", file=sys.stderr, flush=True)
