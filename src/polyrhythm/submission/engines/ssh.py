"""ssh: a few machines that one person can log in to, with nothing to install but Polyrhythm itself.

    this process: the store, `placed_run.py`
       ├─ ssh host ─▶ local_ranks ─▶ rank 0, rank 1       one connection a host; when it ends, the ranks there end
       └─ ssh host ─▶ local_ranks ─▶ rank 2

Before any rank starts, all hosts are asked for versions, clocks, the data, and whether they reach each other. With
`environment=copy` the packages of this process are copied to hosts that lack them. The run folder, which rank 0
writes on the first host, is fetched at the end if it is not on this machine.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import json
import platform
import queue
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from importlib.metadata import distributions, version
from pathlib import Path, PurePosixPath
from typing import IO, Annotated, Any, Literal

from pydantic import Field

from polyrhythm.claim import UNCLAIMED, open_new
from polyrhythm.communication.transports.torch_distributed.rendezvous import LOOPBACK, host_store, own_address
from polyrhythm.errors import RequestError, RunError, printable
from polyrhythm.escaping import shell
from polyrhythm.launch.signals import asked_to_stop
from polyrhythm.run_files import open_in_run
from polyrhythm.submission.engine import Engine, Outcome, Submission, needed
from polyrhythm.submission.placed_run import PlacedRun, print_line
from polyrhythm.user_files import read_text

PLAN = "ssh-plan.txt"
_ANSWER_S = 60.0
_SKEW_S = 2.0
_KEYS = ("slots", "port", "python", "directory", "data")
_OPTIONS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=5", "ServerAliveCountMax=3")


@dataclass(frozen=True)
class Host:
    """A line of the hosts file.

    Attributes:
        address: address for ssh, perhaps with a user.
        slots: ranks.
        port: TCP port of its ssh server; 0: ssh's own choice.
        python: the command that has Polyrhythm there.
        directory: directory where paths of the command begin; empty: the same folder as here.
        data: path of the data on that host, where it differs; empty: the same as in the command.
    """

    address: str
    slots: int = 1
    port: int = 0
    python: str = ""
    directory: str = ""
    data: str = ""

    @property
    def name(self) -> str:
        """Name of the host alone."""
        return self.address.rpartition("@")[2]


def read_hosts(text: str, where: str) -> tuple[Host, ...]:
    """Read a hosts file: `anna@desktop slots=2 data=/photos` a line; `#` begins a remark.

    Raises:
        RequestError: a line cannot be read, or there is none.
    """
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        words = shlex.split(line, comments=True)
        if not words:
            continue
        pairs = dict(word.partition("=")[::2] for word in words[1:])
        for key, value in pairs.items():
            if key not in _KEYS or not value:
                raise RequestError(
                    f"{where}, line {number}: {key!r} is not {', '.join(_KEYS)}: write HOST slots=N port=N python=PATH"
                )
            if key in ("slots", "port") and not (value.isascii() and value.isdecimal() and int(value)):
                raise RequestError(
                    f"{where}, line {number}: {key} must be a whole number, 1 or more (given {value})"
                )
        if words[0].startswith("-"):
            raise RequestError(f"{where}, line {number}: {words[0]!r} is not a host")
        hosts.append(
            Host(
                words[0],
                int(pairs.get("slots", 1)),
                int(pairs.get("port", 0)),
                pairs.get("python", ""),
                pairs.get("directory", ""),
                pairs.get("data", ""),
            )
        )
    if not hosts:
        raise RequestError(f"{where} names no host: write one a line, as in `anna@desktop slots=2`")
    return tuple(hosts)


class SSH(Engine):
    """A few machines, reached by ssh with keys.

    Attributes:
        hosts: a file with a host a line, `anna@desktop slots=2 data=/photos`; the first one gets worker 0.
        environment: `present`: Polyrhythm is there; `copy`: this process's packages are copied to hosts that lack them,
            which need the same Python.
        restarts: number of times that a failed rank is restarted.
        options: further options of ssh, as one types them.
    """

    hosts: str
    environment: Literal["present", "copy"] = "present"
    restarts: Annotated[int, Field(ge=0)] = 3
    options: str = ""

    def texts(self, submission: Submission) -> Mapping[str, str]:
        hosts = self._hosts(submission)
        lines, rank = [], 0
        for host in hosts:
            ranks = range(rank, rank + host.slots)
            rank += host.slots
            lines.append(f"{host.address}: ranks {', '.join(map(str, ranks))}")
            lines.append(f"    {shlex.join(self._ssh(host, '…'))}")
            lines.append(f"    polyrhythm {shlex.join(_words(submission, host))}")
        return {PLAN: "\n".join(lines) + "\n"}

    def _hosts(self, submission: Submission) -> tuple[Host, ...]:
        hosts = read_hosts(read_text(Path(self.hosts), "the hosts file"), self.hosts)
        slots = sum(host.slots for host in hosts)
        if slots != submission.ranks:
            raise RequestError(
                f"{self.hosts} has {slots} slots, and the command asks for {submission.workers} workers and "
                f"{submission.servers} servers: make them {submission.ranks}, or give --workers "
                f"{max(1, slots - submission.servers)}"
            )
        return hosts

    def _ssh(self, host: Host, *command: str) -> list[str]:
        settings = [word for option in _OPTIONS for word in ("-o", option)]
        port = ["-p", str(host.port)] if host.port else []
        return ["ssh", *settings, *port, *shlex.split(self.options), host.address, *command]

    def submit(self, submission: Submission, notify: Callable[[str], None], wait: bool) -> Outcome:
        hosts = self._hosts(submission)
        needed("ssh", "install it (Debian: openssh-client)")
        messages: queue.Queue[tuple[int, Mapping[str, Any]]] = queue.Queue()
        with ExitStack() as open_hosts:
            pythons = [self._python(host, notify) for host in hosts]
            places = [
                _Connection(index, host.name, self._ssh(host, python), messages)
                for index, (host, python) in enumerate(zip(hosts, pythons, strict=True))
            ]
            for place in places:
                open_hosts.callback(place.close)
            placed = [index for index, host in enumerate(hosts) for _ in range(host.slots)]
            address = _own_address(hosts)
            store = host_store(0, address)
            hosts = _examined(places, hosts, submission, (address, store.port), notify)
            run = PlacedRun(
                places,
                placed,
                messages,
                [_words(submission, hosts[place]) for place in placed],
                (address, store.port),
                self.restarts,
                print_line,
                notify,
            )
            with asked_to_stop(lambda: run.stop(signal.SIGINT), lambda: run.stop(signal.SIGTERM)):
                status = run.carry_out()
        remark = f"the run is in {submission.folder} on {hosts[0].name}"
        if submission.folder is not None:
            fetched = (submission.directory / submission.folder).exists()
            if not fetched:
                fetched = self._fetch(hosts[0], submission, notify)
            if fetched:
                remark = f"the run is in {submission.folder}"
        return Outcome(submission.name, status, remark)

    def _python(self, host: Host, notify: Callable[[str], None]) -> str:
        """Return the shell command that starts Python on a host, with Polyrhythm in it."""
        if self.environment == "present":
            return f"{host.python or shell(sys.executable)} -m polyrhythm.submission.local_ranks"
        python = (
            host.python or f"python{platform.python_version_tuple()[0]}.{platform.python_version_tuple()[1]}"
        )
        folder = f".cache/polyrhythm/environments/{environment_key()}"
        there = subprocess.run(
            self._ssh(host, f"test -e {folder}/.whole && echo there; {python} -c 'print(1)'"),
            capture_output=True,
            text=True,
            check=False,
        )
        if "1" not in there.stdout.split():
            raise RequestError(
                f"{host.name}: {python} does not start there ({_last(there.stderr)}): install it"
            )
        if "there" not in there.stdout.split():
            notify(f"{host.name}: copying the environment, once")
            command = f"mkdir -p {folder} && tar -xzf - -C {folder} && touch {folder}/.whole"
            with subprocess.Popen(self._ssh(host, command), stdin=subprocess.PIPE) as process:
                assert process.stdin is not None
                with suppress(BrokenPipeError):
                    pack_environment(process.stdin)
                    process.stdin.close()
            if process.returncode:
                raise RequestError(
                    f"{host.name}: the environment could not be copied (status {process.returncode})"
                )
        return f'PYTHONPATH="$HOME/{folder}" PYTHONSAFEPATH=1 {python} -m polyrhythm.submission.local_ranks'

    def _fetch(self, host: Host, submission: Submission, notify: Callable[[str], None]) -> bool:
        """Copy the run folder from a host; return whether all of it is here."""
        assert submission.folder is not None
        beside = shell(host.directory or str(submission.directory))
        with subprocess.Popen(
            self._ssh(host, f"cd {beside} && tar -chf - {shell(submission.folder)}"),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as process:
            assert process.stdout is not None
            try:
                unpack_run(process.stdout, submission.directory, submission.folder)
            except (RequestError, tarfile.TarError, OSError, EOFError) as error:
                notify(
                    f"{host.name}: {submission.folder} cannot be copied from there: {printable(str(error))}"
                )
                return False
            finally:
                process.stdout.close()
                process.kill()  # else it may continue to send unread output
        return True


def unpack_run(packed: IO[bytes], directory: Path, folder: Path) -> None:
    """Unpack what a host sends of a run folder: regular files and folders inside of it, and nothing else.

    Args:
        packed: the tar archive.
        directory: directory where paths begin.
        folder: the run folder; its names in the archive begin with it.

    Raises:
        tarfile.TarError: the archive is damaged, or holds another entry, which is named; earlier entries
            stay.
        OSError: a file cannot be written.
    """
    parts = [part for part in folder.parts if part not in ("/", ".")]
    while ".." in parts:  # tar omits everything before
        parts = parts[parts.index("..") + 1 :]
    own, root = PurePosixPath(*parts), Path(directory, folder)

    def inside(name: str) -> Path:
        """Return where a name of the archive lies, which is in the run folder."""
        path = PurePosixPath(name.lstrip("/"))
        if ".." in path.parts or not path.is_relative_to(own):
            raise tarfile.TarError(f"the host has sent {name!r:.200}, which is not in the run folder")
        place = root / path.relative_to(own)
        for parent in [*reversed(place.relative_to(root).parents)][1:]:
            if (root / parent).is_symlink():
                raise tarfile.TarError(f"{root / parent} is a symbolic link")
        return place

    with tarfile.open(fileobj=packed, mode="r|") as archive:
        for member in archive:
            place = inside(member.name)
            if member.isdir():
                place.mkdir(parents=True, exist_ok=True)
                continue
            if member.isfile():
                content = archive.extractfile(member)
            elif member.islnk():  # a checkpoint may have two names
                content = open_in_run(inside(member.linkname), most_bytes=0)
            else:
                raise tarfile.TarError(f"the host has sent {member.name!r:.200}, which is no regular file")
            assert content is not None, "it is a file"
            place.parent.mkdir(parents=True, exist_ok=True)
            draft = UNCLAIMED.draft(place)
            try:
                with content, open_new(draft) as file:
                    shutil.copyfileobj(content, file)
                UNCLAIMED.publish(place)
            finally:
                draft.unlink(missing_ok=True)


def _words(submission: Submission, host: Host) -> list[str]:
    words = list(submission.words)
    return [*words, "--data", host.data] if host.data else words


def _last(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[-1]


def _own_address(hosts: Sequence[Host]) -> str:
    """Return this machine's address as the hosts reach it: loopback only if all of them are this machine."""
    found = LOOPBACK
    for host in hosts:
        with suppress(OSError):
            address = own_address(_resolved(host), host.port or 22)
            if not address.startswith("127."):
                return address
    return found


def _resolved(host: Host) -> str:
    """Return the name or address that ssh connects to, aliases of its configuration included."""
    done = subprocess.run(["ssh", "-G", host.address], capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        key, _, value = line.partition(" ")
        if key == "hostname":
            return value
    return host.name


class _Connection:
    """One host: the other end of ssh is `local_ranks`."""

    def __init__(
        self, index: int, name: str, command: list[str], messages: queue.Queue[tuple[int, Mapping[str, Any]]]
    ) -> None:
        self.name = name
        self._index, self._command, self._messages = index, command, messages
        self._answers: queue.Queue[Mapping[str, Any]] = queue.Queue()
        self._looked: dict[str, Any] = {}
        self._closing = False
        self._process = self._opened()

    def _opened(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # Ctrl-C is passed on as a signal to the ranks, not to ssh
        )
        threading.Thread(target=self._read, args=(process,), daemon=True).start()
        return process

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        complaints: list[str] = []
        beside = threading.Thread(target=lambda: complaints.extend(process.stderr or ()), daemon=True)
        beside.start()
        for line in process.stdout:
            try:
                what = json.loads(line)
            except (ValueError, RecursionError):  # a greeting of the host's shell
                continue
            if not isinstance(what, dict):
                continue
            if "found" in what or "reached" in what:
                self._answers.put(what)
            else:
                self._messages.put((self._index, what))
        process.wait()
        beside.join(1.0)
        why = _last("".join(complaints)) if complaints else f"ssh ended with status {process.returncode}"
        self._answers.put({"gone": why})
        if not self._closing:
            self._messages.put((self._index, {"gone": why}))

    def _order(self, what: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()

    def ask(self, what: Mapping[str, Any]) -> Any:
        """Return the answer to a question.

        Raises:
            RequestError: the host cannot be reached, or has no Polyrhythm.
        """
        try:
            with suppress(OSError):
                self._order(what)
            answer = self._answers.get(timeout=_ANSWER_S)
        except queue.Empty:
            raise RequestError(
                f"{self.name} has not answered for {_ANSWER_S:.0f} s: look whether ssh works there"
            ) from None
        if "gone" in answer:
            why = answer["gone"]
            if "No module named" in why or "not found" in why or "No such file" in why:
                raise RequestError(
                    f"{self.name}: {why}: install Polyrhythm there, name its Python (python=PATH), or use "
                    "environment=copy"
                )
            raise RequestError(f"{self.name} cannot be reached: {why}")
        if "look" in what:
            self._looked = dict(what)
        return next(iter(answer.values()))

    def start(self, rank: int, environment: Mapping[str, str], words: Sequence[str]) -> None:
        if self._process.poll() is not None:
            self._process, self._answers = self._opened(), queue.Queue()
            try:
                self.ask(self._looked)
            except RequestError as error:
                raise OSError(str(error)) from None
        self._order({"start": rank, "environment": environment, "words": list(words)})

    def signal(self, number: int) -> None:
        with suppress(OSError, ValueError):
            self._order({"signal": int(number)})

    def close(self) -> None:
        self._closing = True
        with suppress(OSError, ValueError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(15.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _examined(
    places: Sequence[_Connection],
    hosts: Sequence[Host],
    submission: Submission,
    meeting: tuple[str, int],
    notify: Callable[[str], None],
) -> tuple[Host, ...]:
    """Ask all hosts what a run would fail on later; return them with the folders in which they work.

    Raises:
        RequestError: one of them cannot take part; it is named.
    """
    files = {}
    for word in submission.words[1:]:
        path = submission.directory / word
        if path.suffix in (".yaml", ".yml") and path.is_file():
            files[word] = read_text(path, "the recipe")
    found = []
    for place, host in zip(places, hosts, strict=True):
        data = host.data or submission.data
        before = time.time()
        answer = place.ask(
            {"look": {"directory": host.directory or str(submission.directory), "data": data, "files": files}}
        )
        off_s = answer["time"] - (before + time.time()) / 2
        own = {name: version(name) for name in answer["versions"]}
        for name, its in answer["versions"].items():
            if its != own[name]:
                raise RequestError(
                    f"{host.name} has {name} {its}, and this host has {own[name]}: install the same"
                )
        if data is not None and not answer["data"]:
            raise RequestError(
                f"{host.name} has no {data} in {answer['directory']}: copy it there, or write data=PATH behind the host"
            )
        if abs(off_s) > _SKEW_S:
            notify(
                f"notice: the clock of {host.name} is {abs(off_s):.0f} s {'ahead' if off_s > 0 else 'behind'}"
            )
        if answer["cores"] < host.slots:
            notify(f"notice: {host.name} has {answer['cores']} cores for {host.slots} ranks")
        found.append(answer)
    for place, host in zip(places, hosts, strict=True):
        others = [
            (_resolved(other), answer["port"], other.name)
            for other, answer in zip(hosts, found, strict=True)
            if other is not host
        ]
        for address, port, name in [(*meeting, "this host"), *others]:
            why = place.ask({"reach": [address, port]})
            if why:
                raise RequestError(
                    f"{host.name} cannot open a connection to {name} ({address}, port {port}): {why}; ranks need all "
                    "ports above 1023 between the hosts"
                )
    return tuple(
        replace(host, directory=answer["directory"]) for host, answer in zip(hosts, found, strict=True)
    )


def environment_key() -> str:
    """Return a key of this process's packages: a hash of their names, versions, and Polyrhythm's own files."""
    parts = sorted(f"{each.name} {each.version}" for each in distributions())
    parts += [f"{path.name} {path.stat().st_mtime_ns}" for path in sorted(_own_package().rglob("*.py"))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _own_package() -> Path:
    return Path(__file__).parents[2]


def pack_environment(out: IO[bytes]) -> None:
    """Write this process's packages as a tar.gz: what is next to torch, and Polyrhythm, without compiled Python."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise RunError("this process has no torch to copy")
    beside, own = Path(found.origin).parents[1], _own_package()

    def wanted(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if info.name.endswith(("__pycache__", ".pth", ".pyc")) else info

    with (
        gzip.GzipFile(fileobj=out, mode="wb", compresslevel=1) as packed,
        tarfile.open(fileobj=packed, mode="w|") as archive,
    ):
        for path in sorted(beside.iterdir()):
            if path.name != own.name:
                archive.add(path, path.name, filter=wanted)
        archive.add(own, own.name, filter=wanted)
        _add_metadata(archive)


def _add_metadata(archive: tarfile.TarFile) -> None:
    """Add Polyrhythm's version metadata, which may be located outside its package."""
    text = f"Metadata-Version: 2.1\nName: polyrhythm\nVersion: {version('polyrhythm')}\n".encode()
    info = tarfile.TarInfo(f"polyrhythm-{version('polyrhythm')}.dist-info/METADATA")
    info.size, info.mtime, info.mode = len(text), int(time.time()), 0o644
    archive.addfile(info, io.BytesIO(text))
