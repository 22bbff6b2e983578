"""Agreement of a communicator's members on shared memory, and its discovery.

    each      introduction: host and process ──▶ all on one host?
    leader    offer: descriptor and token of the memory, or the reason why there is none
    each      answer: mapped, or the reason why not ──▶ all mapped: shared memory; else the library

The memory is opened through the leader's descriptor (`/proc/<process>/fd`), so it never has a name, and only
processes of the same user can open it. `host_key` identifies a rank's host, as far as shared memory and
networks can distinguish hosts.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from polyrhythm.communication.transports.shared_memory.barrier import Lifelines, is_tso
from polyrhythm.communication.transports.shared_memory.collectives import SharedMemoryCollectives
from polyrhythm.communication.transports.shared_memory.exchange import Layout, SharedBuffer, memory_file

_UNKNOWN = "-"


def host_key(address: str = "") -> str:
    """Return a text that is equal for two ranks if they share a host.

    Network namespaces of one machine are different hosts: they have addresses, links and abstract sockets of
    their own. The address distinguishes virtual machines that were cloned while they ran, which are equal in
    all the rest.

    Args:
        address: address of this host, as the other hosts reach it.
    """
    return " ".join([socket.gethostname(), _boot_id(), _network_namespace(), address])


def machine_key() -> str:
    """Return a text that is equal for two processes that run on the same cores, in whatever containers they are."""
    boot = _boot_id()
    return boot if boot != _UNKNOWN else socket.gethostname()


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # no Linux
        return _UNKNOWN


def _network_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/net")
    except OSError:
        return _UNKNOWN


_log = logging.getLogger(__name__)

Round = Callable[[str, str], Sequence[str]]
"""Exchanges texts under a name: takes this member's, and returns all, in their order, once all have arrived."""


@dataclass(frozen=True)
class Introduction:
    """Host and process of a member.

    Attributes:
        host: equal for members of one host, which can see each other's processes.
        process: number of the process.
    """

    host: str
    process: int

    @classmethod
    def own(cls, address: str, shares: bool) -> Introduction:
        """Introduce this process, with the `address` of its host; alone on it if it does not share."""
        process = os.getpid()
        return cls(f"{host_key(address)} {_process_namespace() if shares else f'process {process}'}", process)

    def to_json(self) -> str:
        """Return it as text."""
        return json.dumps(asdict(self))


def host_of(introduction: str) -> str:
    """Return the host of a member, by its introduction as JSON."""
    return Introduction(**json.loads(introduction)).host


def share_memory(
    member: int, members: tuple[int, ...], introductions: Sequence[str], exchange_texts: Round
) -> SharedMemoryCollectives | None:
    """Set up shared memory; return None on all members alike where they have to do without."""
    known = [Introduction(**json.loads(text)) for text in introductions]
    if len({one.host for one in known}) > 1:
        return None
    descriptor, offer = _offer(len(members)) if member == 0 else (-1, {})
    try:
        offers = exchange_texts("memory", json.dumps(offer))
        made, answer = _accept(known, json.loads(offers[0]), member, members)
        answers = exchange_texts("mapped", answer)
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    if not any(answers):
        return made
    if made is not None:
        made.close()
    if member == 0:
        rank, reason = next((members[at], answer) for at, answer in enumerate(answers) if answer)
        _log.warning(
            "no shared memory between the ranks of this host, TCP instead (rank %d: %s)", rank, reason
        )
    return None


def _offer(members: int) -> tuple[int, dict[str, str]]:
    layout = Layout(members)
    try:
        descriptor = memory_file(layout.nbytes)
    except OSError as error:
        return -1, {"reason": f"{layout.nbytes >> 20} MiB cannot be allocated: {error.strerror or error}"}
    arena = SharedBuffer(descriptor, layout)
    arena.mark()
    return descriptor, {"descriptor": str(descriptor), "token": arena.token}


def _accept(
    known: Sequence[Introduction], offer: dict[str, str], member: int, members: tuple[int, ...]
) -> tuple[SharedMemoryCollectives | None, str]:
    """Return the collectives, or None and the reason."""
    if not is_tso():
        return None, "this machine does not keep the order of stores"
    if "reason" in offer:
        return None, offer["reason"]
    try:
        arena = _open(known[0].process, offer, len(members))
        lifelines = Lifelines([one.process for one in known])
    except OSError as error:
        return None, error.strerror or str(error)
    return SharedMemoryCollectives(arena, member, members, lifelines), ""


def _open(process: int, offer: dict[str, str], members: int) -> SharedBuffer:
    descriptor = os.open(f"/proc/{process}/fd/{offer['descriptor']}", os.O_RDWR)
    try:
        arena = SharedBuffer(descriptor, Layout(members))
    except ValueError as error:  # a file of another size
        raise OSError(str(error)) from None
    finally:
        os.close(descriptor)
    if arena.token != offer["token"]:
        raise OSError("the leader's memory is not found under its process number")
    return arena


def _process_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:  # no Linux: no ranks are known to share a host
        return f"process {os.getpid()}"
