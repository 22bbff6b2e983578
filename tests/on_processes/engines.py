"""Engines that run for real on this machine: an ssh server, a Slurm cluster of two nodes, a Ray cluster of two."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from on_processes.commands import wait_for
from processes.ports import free_port


def missing(*programs: str) -> list[str]:
    """Gives the programs that this machine lacks."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    return [program for program in programs if shutil.which(program, path=path) is None]


FORKED = b"polyrhythm.launch.rank_server"


def may_log_in() -> bool:
    """Whether this user has a login shell."""
    try:
        return Path(pwd.getpwuid(os.geteuid()).pw_shell).name not in ("nologin", "false")
    except KeyError:
        return False


def ranks_of(folder: Path) -> dict[int, int]:
    """Gives the process of every rank whose command names `folder`, by rank."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError, ValueError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if FORKED in words:
                name, rank = (entry / "comm").read_text().split()
                if name == "rank" and (entry / "cwd").readlink() == folder.parent:
                    found[int(rank)] = int(entry.name)
            if str(folder).encode() not in words or b"submit" in words or b"train" not in words:
                continue
            told = dict(each.partition(b"=")[::2] for each in (entry / "environ").read_bytes().split(b"\0"))
            rank = told.get(b"RANK", told.get(b"SLURM_PROCID"))
            if rank is not None and b"srun" not in words[0]:
                found[int(rank)] = int(entry.name)
    return found


@contextmanager
def ssh_server(folder: Path) -> Iterator[tuple[int, str]]:
    """Starts an ssh server on loopback for this user; gives its port and ssh's options for its key."""
    for name in ("key", "hostkey"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    port = free_port()
    (folder / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/hostkey\nAuthorizedKeysFile {folder}/key.pub\n"
        "StrictModes no\nUsePAM no\nPermitRootLogin yes\nPidFile none\nMaxStartups 50\n"
    )
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    server = subprocess.Popen(
        ["/usr/sbin/sshd", "-D", "-f", folder / "config", "-E", folder / "log"], stdin=subprocess.DEVNULL
    )
    try:
        wait_for(lambda: _listens(port), "the ssh server")
        yield (
            port,
            f"-i {folder}/key -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR",
        )
    finally:
        server.terminate()
        server.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[Callable[..., str]]:
    """Starts a controller and two nodes, n1 and n2, on this machine; gives what calls its commands."""
    host = socket.gethostname().partition(".")[0]
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    ports = [free_port() for _ in range(3)]
    nodes = "".join(
        f"NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[number]} CPUs=4 RealMemory=4000\n"
        for number in (1, 2)
    )
    (folder / "slurm.conf").write_text(
        f"""ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1,bf_resolution=1
KillWait=5
SlurmdParameters=config_overrides
{nodes}PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""
    )
    environment = {
        **os.environ,
        "SLURM_CONF": f"{folder}/slurm.conf",
        "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
    }

    def call(*words: str) -> str:
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=60)
        return done.stdout + done.stderr

    daemons = []

    def start(*words: str) -> None:
        daemons.append(
            subprocess.Popen(
                words,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )

    try:
        start(
            *("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.sock"),
            *(
                f"--pid-file={folder}/munge.pid",
                f"--log-file={folder}/munge.log",
                f"--seed-file={folder}/munge.seed",
            ),
        )
        wait_for((folder / "munge.sock").exists, "the key service")
        start("slurmctld", "-D", "-i")
        start("slurmd", "-D", "-N", "n1")
        start("slurmd", "-D", "-N", "n2")
        wait_for(lambda: "idle" in call("sinfo", "--noheader", "--nodes=n1", "--format=%T"), "the first node")
        wait_for(
            lambda: "idle" in call("sinfo", "--noheader", "--nodes=n2", "--format=%T"), "the second node"
        )
        yield call
    finally:
        call("scancel", "--user=root")
        ends = time.monotonic() + 20
        while call("squeue", "--noheader").strip() and time.monotonic() < ends:
            time.sleep(0.2)
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
