"""Checks of this machine and its network before a run fails on them.

Every check tries the thing itself where that is quick: a connection on loopback, a key in a store, a block of shared
memory, a file in the folder of the runs.
"""

from __future__ import annotations

import fcntl
import os
import platform
import resource
import shutil
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from polyrhythm.communication.transports.shared_memory.barrier import is_tso
from polyrhythm.communication.transports.torch_distributed.rendezvous import host_store
from polyrhythm.errors import RequestError, RunError
from polyrhythm.launch.devices import available_cores
from polyrhythm.launch.process import ask_names_briefly, check_loopback, descriptors_needed
from polyrhythm.user_files import check_new_folder

State = Literal["ok", "limited", "fails"]
_GIB, _MIB = 1 << 30, 1 << 20
_SLOW_NAMES_S = 1.0
_LEAST_DISK, _LEAST_SHARED, _LEAST_MEMORY = _GIB, 64 * _MIB, _GIB
_SIOCGIFADDR = 0x8915
_NETWORK_DISKS = ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p")


@dataclass(frozen=True)
class Finding:
    """Result of a check.

    Attributes:
        check: name of the check.
        state: `ok`; `limited`: a run may be slow, small or fail later; `fails`: a run of this size would not start.
        found: result in words.
        advice: recommended action; empty if none.
        values: the figures behind the words.
    """

    check: str
    state: State
    found: str
    advice: str = ""
    values: dict[str, Any] = field(default_factory=dict)


def examine(folder: Path, ranks: int) -> list[Finding]:
    """Return the findings of all checks.

    Args:
        folder: folder where runs are to be written; it need not exist.
        ranks: number of workers and servers on one host.
    """
    ask_names_briefly()
    checks: dict[str, Callable[[], Finding]] = {
        "open files": lambda: open_files(ranks),
        "processes": lambda: processes(ranks),
        "cores": lambda: cores(ranks),
        "memory": memory,
        "shared memory": shared_memory,
        "loopback": loopback,
        "store": store,
        "interfaces": interfaces,
        "name service": name_service,
        "ports": ports,
        "disk": lambda: disk(folder),
        "GPU": gpus,
        "NCCL": nccl,
    }
    found = []
    for name, check in checks.items():
        try:
            found.append(check())
        except (OSError, ValueError, RuntimeError) as error:
            found.append(Finding(name, "limited", f"could not be looked at: {str(error).splitlines()[0]}"))
    return found


def open_files(ranks: int) -> Finding:
    """Compare the limit on open files with the number that a launcher of `ranks` ranks needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = descriptors_needed(ranks)
    values = {"soft": soft, "hard": hard, "needed": needed}
    text = f"{_limit(soft)}, raised to {_limit(hard)} when needed; {ranks} ranks need {needed}"
    if hard != resource.RLIM_INFINITY and hard < needed:
        return Finding(
            "open files", "fails", text, "raise the hard limit (ulimit -Hn), or ask for fewer ranks", values
        )
    return Finding("open files", "ok", text, values=values)


def processes(ranks: int) -> Finding:
    """Compare the limits on processes and threads with the numbers that `ranks` ranks start."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    group = _group_limit("pids.max")
    most = min((each for each in (soft, group) if each not in (None, resource.RLIM_INFINITY)), default=None)
    needed = 20 * (ranks + 1)  # threads: a rank's own, its watchdog's, its links' and its library's
    values = {"limit": most, "needed": needed}
    text = f"{'no limit' if most is None else f'at most {most:,}'}; {ranks} ranks need about {needed} threads"
    if most is not None and most < needed:
        return Finding(
            "processes", "fails", text, "raise it (ulimit -u, or the container's pids limit)", values
        )
    return Finding("processes", "ok", text, values=values)


def cores(ranks: int) -> Finding:
    """Compare the cores that this process may use with the ranks, and with the container's share of them."""
    usable, quota = available_cores(), _quota_of_cores()
    values = {"usable": usable, "quota": quota, "ordered": is_tso()}
    text = f"{usable} usable" + (f", {quota:.1f} of them for the container" if quota else "")
    text += f"; {platform.machine()}"
    if quota is not None and quota < usable:
        return Finding(
            "cores",
            "limited",
            text,
            f"start with --threads 1 and at most {max(1, int(quota))} workers",
            values,
        )
    if ranks > usable:
        return Finding(
            "cores", "limited", text, f"{ranks} ranks share {usable} cores: they take turns", values
        )
    return Finding("cores", "ok", text, values=values)


def memory() -> Finding:
    """Return the free memory of this machine."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    left = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    group = _group_limit("memory.max")
    values = {"available_bytes": left, "limit_bytes": group}
    text = f"{left / _GIB:.1f} GiB available" + (
        f", the container's limit is {group / _GIB:.1f} GiB" if group else ""
    )
    short = min(left, group or left) < _LEAST_MEMORY
    advice = "a rank takes 0.3 GiB before its data: fewer workers, smaller batches" if short else ""
    return Finding("memory", "limited" if short else "ok", text, advice, values)


def shared_memory() -> Finding:
    """Try the memory through which ranks of one host pass tensors, and see how much of it there is."""
    number = os.memfd_create("polyrhythm")
    try:
        os.posix_fallocate(number, 0, _MIB)
    finally:
        os.close(number)
    free = None
    with suppress(OSError):
        free = shutil.disk_usage("/dev/shm").free
    values = {"dev_shm_free_bytes": free}
    text = "available" + (
        f"; /dev/shm has {free / _MIB:,.0f} MiB free" if free is not None else "; no /dev/shm"
    )
    if free is None or free < _LEAST_SHARED:
        advice = "torch's data loaders need /dev/shm: start the container with --shm-size=1g"
        return Finding("shared memory", "limited", text, advice, values)
    return Finding("shared memory", "ok", text, values=values)


def loopback() -> Finding:
    """Connect to a port of this host."""
    try:
        check_loopback()
    except RequestError as error:
        return Finding("loopback", "fails", "does not answer", str(error))
    return Finding("loopback", "ok", "answers")


def store() -> Finding:
    """Host a store as a launcher does, and set a key in it."""
    if loopback().state == "fails":
        return Finding("store", "fails", "ranks cannot meet without loopback")
    start_s = time.monotonic()
    try:
        hosted = host_store()
        hosted.set("key", "value")
        assert hosted.get("key") == b"value"
    except (RequestError, RunError, RuntimeError) as error:
        return Finding("store", "fails", str(error).splitlines()[0], "see loopback and name service")
    took_s = time.monotonic() - start_s
    slow = took_s > _SLOW_NAMES_S
    advice = "torch looks up the name of every address: see name service" if slow else ""
    return Finding(
        "store", "limited" if slow else "ok", f"opened in {1e3 * took_s:.0f} ms", advice, {"seconds": took_s}
    )


def interfaces() -> Finding:
    """List the addresses under which other hosts may reach this one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no IPv4 address
                packed = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(packed[20:24])
    others = {name: address for name, address in found.items() if not address.startswith("127.")}
    text = ", ".join(f"{name} {address}" for name, address in found.items()) or "none"
    if not others:
        return Finding(
            "interfaces", "limited", text, "only this host can take part in a run", {"addresses": found}
        )
    return Finding("interfaces", "ok", text, values={"addresses": found})


def name_service() -> Finding:
    """Time the look-ups that torch does for every connection: this host's name, and the name of an address."""
    took: dict[str, float] = {}
    own = socket.gethostname()
    for what, ask in (
        ("localhost", lambda: socket.getaddrinfo("localhost", None)),
        (own, lambda: socket.getaddrinfo(own, None)),
        ("127.0.0.1", lambda: socket.gethostbyaddr("127.0.0.1")),
    ):
        start_s = time.monotonic()
        failed = False
        try:
            ask()
        except OSError:
            failed = True
        took[f"{what}{' (unknown)' if failed else ''}"] = time.monotonic() - start_s
    text = ", ".join(f"{what} in {1e3 * seconds:.0f} ms" for what, seconds in took.items())
    if max(took.values()) > _SLOW_NAMES_S:
        advice = "a name server does not answer: put this host's name into /etc/hosts"
        return Finding("name service", "limited", text, advice, {"seconds": took})
    unknown = any(what.endswith("(unknown)") for what in took)
    advice = "under torchrun give --master-addr as a number, not as a name" if unknown else ""
    return Finding("name service", "limited" if unknown else "ok", text, advice, {"seconds": took})


def ports() -> Finding:
    """Return the range from which free ports are taken."""
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="utf-8").split())
    values = {"first": low, "last": high}
    text = f"free ones are taken from {low} to {high}"
    if high - low < 1000:
        return Finding("ports", "limited", text, "widen net.ipv4.ip_local_port_range", values)
    return Finding("ports", "ok", text, values=values)


def disk(folder: Path) -> Finding:
    """Write into the folder of the runs, and return its free space."""
    try:
        check_new_folder(folder)
    except RequestError as error:
        return Finding("disk", "fails", f"{folder} cannot be written", str(error))
    there = next(each for each in (folder.resolve(), *folder.resolve().parents) if each.exists())
    usage, kind = shutil.disk_usage(there), _kind_of_disk(there)
    values = {"free_bytes": usage.free, "kind": kind}
    text = f"{usage.free / _GIB:.1f} GiB free in {there} ({kind})"
    if kind in _NETWORK_DISKS:
        return Finding("disk", "limited", text, "keep decoded images and data on a disk of this host", values)
    if usage.total and usage.free < _LEAST_DISK:
        return Finding(
            "disk", "limited", text, "checkpoints need room: two of the model's and optimizer's size", values
        )
    return Finding("disk", "ok", text, values=values)


def gpus() -> Finding:
    """List the GPUs that workers may use."""
    if not torch.cuda.is_available():
        built = torch.version.cuda
        advice = (
            ""
            if built is None
            else f"torch {torch.__version__} knows CUDA {built}, but finds no driver or no GPU"
        )
        return Finding("GPU", "ok" if built is None else "limited", "none: workers compute on cores", advice)
    kinds = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    text = ", ".join(f"{kind.name} with {kind.total_memory / _GIB:.0f} GiB" for kind in kinds)
    half = torch.cuda.is_bf16_supported()
    values = {"names": [kind.name for kind in kinds], "bfloat16": half}
    return Finding("GPU", "ok", text + ("" if half else "; no bfloat16"), values=values)


def nccl() -> Finding:
    """Return whether GPUs of this host can add up among each other."""
    there = dist.is_nccl_available()
    if not (there and torch.cuda.is_available()):
        return Finding("NCCL", "ok", "not needed: there are no GPUs" if there else "not in this torch")
    version = ".".join(map(str, torch.cuda.nccl.version()))
    few = torch.cuda.device_count() < 2
    return Finding("NCCL", "ok", f"{version}" + ("; it needs two GPUs, and there is one" if few else ""))


def _limit(number: int) -> str:
    return "no limit" if number == resource.RLIM_INFINITY else f"{number:,}"


def _group_limit(name: str) -> int | None:
    """Return a limit of this process's control group (version 2); None if there is none."""
    with suppress(OSError, ValueError, StopIteration):
        line = next(line for line in _lines("/proc/self/cgroup") if line.startswith("0::"))
        folder = Path("/sys/fs/cgroup") / line.removeprefix("0::").lstrip("/")
        for each in (folder, Path("/sys/fs/cgroup")):
            if (each / name).exists():
                return int((each / name).read_text(encoding="utf-8"))
    return None


def _quota_of_cores() -> float | None:
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()
        return int(quota) / int(period)
    return None


def _kind_of_disk(path: Path) -> str:
    best, kind = "", "unknown"
    for line in _lines("/proc/mounts"):
        _, place, found, *_ = line.split()
        if path.is_relative_to(place) and len(place) >= len(best):
            best, kind = place, found
    return kind


def _lines(path: str) -> Iterator[str]:
    yield from Path(path).read_text(encoding="utf-8").splitlines()
