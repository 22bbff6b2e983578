"""The watchdog: a thread of every real rank that reports which rank hangs, where and why, and acts on it.

    0 s            limit                              4 x limit
    last pulse ───▶ diagnosis: rank, role, step,  ───▶ declared lost: ended if it is on this host; all others are
                    activity, the others'              notified of the loss; then the run continues without it, or
                    activities; stacks of all ranks    stops with this cause
                    a pulse again: all continue

Limits follow from measurements. A rank is silent for too long after GAPS times the median gap between its
pulses, a wait lasts too long after STEPS times the waiting rank's median step, both never sooner than a
floor. A rank that cannot reach the store for as long as others take to declare it lost exits, so that an
evicted rank cannot keep running.

Every rank repeatedly publishes pulses (heartbeats) in the store where all meet. TCP retransmits lost packets
after 0.2, 0.6, 1.4, 3, 6.2 and 12.6 s: after an outage of 7 s nothing would move for 5 s more. So a
connection to the store that does not answer is replaced as soon as the store can be reached again:

    fence     ·· no answer for 1.5 s ── tries ── tries ── tries: reached ──▶ another connection, another thread
    watchdog  ── asks ─ ─ ─ ─ ─ ─ ─ ─ (cut) ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─▶ ends when its answer arrives

The rank that declares a loss first writes its cause to the same store, before any other rank can learn of the
loss.

With more processes than cores, pulses are late although no rank hangs. So limits count chances to run, not seconds:
`LivedClock` adds at most one and a half beats a look, a rank of this host is not silent while its threads wait for a
core (`core_use`), and a rank for which the store takes long asks it less often. Ranks of one host do not wait for the
store to see each other's beats: a thread of each rank has the number of its last beat as its name, which others read
in /proc. A rank cannot be cut off from others over loopback: it leaves only if the store refuses connections.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist

from polyrhythm.communication.activity import COMPUTING, Activity
from polyrhythm.communication.transports.membership import Peer
from polyrhythm.communication.transports.torch_distributed.rendezvous import (
    LOOPBACK,
    Rendezvous,
    record_loss,
)
from polyrhythm.errors import RequestError
from polyrhythm.run_files import check_folder_in_run


@dataclass(frozen=True)
class Pulse:
    """One rank at one moment.

    Attributes:
        rank: number of the rank.
        generation: number of its previous processes.
        role: role, such as `worker 1`.
        beat: counter that shows others that it is alive, independent of their clocks.
        step: steps that it has done.
        doing: activity in words.
        doing_s: seconds of this activity so far.
        takes_long: whether that may well take long.
        host: equal for ranks of one host.
        process: process ID, on the host of the rank.
        thread: ID of its thread that shows its beats on that host; 0: none does.
        left: whether it has left in good order.
    """

    rank: int
    generation: int
    role: str
    beat: int = 0
    step: int = 0
    doing: str = ""
    doing_s: float = 0.0
    takes_long: bool = False
    host: str = ""
    process: int = 0
    thread: int = 0
    left: bool = False

    @property
    def peer(self) -> Peer:
        """The process."""
        return Peer(self.rank, self.generation)

    @property
    def text(self) -> str:
        """In words."""
        where = f"step {self.step}, " if self.role.startswith("worker") else ""
        return f"{self.role} (rank {self.rank}): {where}{self.doing} for {self.doing_s:.1f} s"

    @classmethod
    def of(cls, activity: Activity, own: Peer, role: str, host: str, beat: int = 0, thread: int = 0) -> Pulse:
        """Return the pulse of this process."""
        doing = activity.now()
        return cls(
            *own,
            role=role,
            beat=beat,
            step=activity.step,
            doing=doing.what,
            doing_s=time.monotonic() - doing.since_s,
            takes_long=doing.takes_long,
            host=host,
            process=os.getpid(),
            thread=thread,
        )


def publish(store: Any, pulse: Pulse) -> None:
    """Set a rank's pulse in the store."""
    store.set(_pulse_key(pulse.rank), json.dumps(asdict(pulse)))


def read(store: Any, ranks: list[int]) -> dict[int, Pulse]:
    """Return the latest pulses of those of some ranks that have had one."""
    keys = {rank: _pulse_key(rank) for rank in ranks}
    if keys and not store.check([*keys.values()]):
        keys = {rank: key for rank, key in keys.items() if store.check([key])}
    values = store.multi_get([*keys.values()]) if keys else []
    return {rank: _pulse(value) for rank, value in zip(keys, values, strict=True)}


def _pulse_key(rank: int) -> str:
    return f"pulse/{rank}"


def _pulse(value: Any) -> Pulse:
    return Pulse(**json.loads(bytes(value).decode()))


def activities(pulses: Iterable[Pulse]) -> str:
    """Return in words what ranks do: each of a few, of many the number that do the same."""
    present = [pulse for pulse in pulses if not pulse.left]
    if len(present) <= _NAMED:
        return "; ".join(pulse.text for pulse in present)
    steps = [pulse.step for pulse in present if pulse.role.startswith("worker")]
    alike = Counter(re.sub(r"\d+(, \d+)*", "…", pulse.doing) for pulse in present)
    counted = ", ".join(f"{count} {doing}" for doing, count in alike.most_common(_NAMED))
    return f"{len(present)} ranks at steps {min(steps, default=0)} to {max(steps, default=0)}: {counted}"


_SHOWN = "beat "


def show_beat(beat: int, thread: int) -> None:
    """Show a beat to other processes of this host, as the name of a thread of this one."""
    with suppress(OSError):  # no Linux
        Path(f"/proc/self/task/{thread}/comm").write_text(f"{_SHOWN}{beat}")


def shown_beat(pulse: Pulse) -> int | None:
    """Return the beat that a process of this host shows now; None: it shows none, or is gone."""
    try:
        name = Path(f"/proc/{pulse.process}/task/{pulse.thread}/comm").read_text()
        return int(name.removeprefix(_SHOWN))
    except (OSError, ValueError):
        return None


@dataclass(frozen=True)
class CoreUse:
    """Use of cores by all threads of a process.

    Attributes:
        ran_s: seconds on a core, added up.
        waited_s: seconds of waiting for one, added up; a wait counts once it is over.
        runnable: whether a thread runs or waits for a core now.
    """

    ran_s: float = 0.0
    waited_s: float = 0.0
    runnable: bool = False

    def starved_s(self, since: CoreUse, passed_s: float) -> float:
        """Return for how many of the `passed_s` seconds after an earlier state the process has waited for a core."""
        if self.runnable and self.ran_s == since.ran_s:
            return passed_s
        return min(max(0.0, self.waited_s - since.waited_s), passed_s)


def core_use(process: int) -> CoreUse:
    """Return the use of cores by a process of this host; nothing if unknown."""
    ran_ns, waited_ns, runnable = 0, 0, False
    for folder in Path(f"/proc/{process}/task").glob("*"):
        with suppress(OSError, ValueError, IndexError):  # a thread that ends, or a system that does not count
            ran, waited, _ = map(int, (folder / "schedstat").read_text().split())
            runnable |= (folder / "stat").read_text().rpartition(")")[2].split()[0] == "R"
            ran_ns, waited_ns = ran_ns + ran, waited_ns + waited
    return CoreUse(ran_ns / 1e9, waited_ns / 1e9, runnable)


GAPS = 6
"""Longest silence of a rank, as a multiple of its recent gaps between pulses."""

STEPS = 20
"""Longest wait, in median steps of the waiting rank."""

FLOOR_S = 3.0
LOST_AFTER = 4
"""Number of limits after which a silent rank is declared lost."""

_BEATS_A_FLOOR, _FASTEST_BEAT_S, SLOWEST_BEAT_S = 6, 0.05, 0.5
_WATCHED, _NAMED = 4, 8
_LOOKS_A_PAUSE, _GROWTH = 5, 2
"""A rank pauses for five times as long as its last look took, but for at most twice its last pause."""

_MOST_BEATS = 1.5
MARGIN_BEATS = 3
"""Beyond the last limit: after a cut that was shorter, pulses need some time to be set and read again."""
_UNANSWERED_BEATS, _TRIES_A_BEAT = 3, 10
_GAPS_KEPT = 32
_ALARM = "watchdog/alarm"


@dataclass(frozen=True)
class WatchdogSetting:
    """Settings of a watchdog.

    Attributes:
        rendezvous: rendezvous of the rank.
        names: role of every rank, such as `worker 1`.
        host: equal for ranks of one host, so that their processes can see each other.
        activity: activity of the rank.
        is_lost: returns whether a rank is known to have failed.
        notify: function that prints messages for users.
        what_then: returns the consequences for the run without a rank, in words.
        folder: folder of the run; stacks go there.
        floor_s: the least limit.
    """

    rendezvous: Rendezvous
    names: list[str]
    host: str
    activity: Activity
    is_lost: Callable[[int], bool]
    notify: Callable[[str], None]
    what_then: Callable[[int], str]
    folder: Path | None = None
    floor_s: float = FLOOR_S


@dataclass
class _PeerStatus:
    """Observations of another rank, and the actions taken.

    Attributes:
        pulse: latest pulse of the rank.
        seen_s: time of its last new beat.
        shown: last beat that it has shown on this host; None: it shows none, so its pulses count.
        starved_s: seconds since then in which its threads waited for a core.
        used: what `core_use` returned last; None: not asked since then.
        gaps_s: gaps between its pulses.
        diagnosed: whether its silence has been reported by any rank.
        declared_lost: whether this rank has declared it lost, and ended it if it could.
        given_up: whether all have been notified, or are being notified by another.
    """

    pulse: Pulse
    seen_s: float
    shown: int | None = None
    starved_s: float = 0.0
    used: CoreUse | None = None
    gaps_s: deque[float] = field(default_factory=lambda: deque(maxlen=_GAPS_KEPT))
    diagnosed: bool = False
    declared_lost: bool = False
    given_up: bool = False


class Watchdog:
    """Publishes one rank's pulse, and watches the ranks after it.

    Args:
        setting: settings of the watchdog.
    """

    def __init__(self, setting: WatchdogSetting) -> None:
        self._setting = setting
        self._own = setting.rendezvous.own
        size = setting.rendezvous.size
        self._watched = [(self._own.rank + ahead) % size for ahead in range(1, min(size - 1, _WATCHED) + 1)]
        self._beat_s = min(SLOWEST_BEAT_S, max(_FASTEST_BEAT_S, setting.floor_s / _BEATS_A_FLOOR))
        self._peers: dict[int, _PeerStatus] = {}
        self._complained_of: float | None = None
        self._alarms = 0
        self._beat = 0
        self._asks = self._prepared = False  # `_asks`: a look has had no answer yet
        self._clock = LivedClock()
        self._passed_s = 0.0  # from the look before the present one
        self._over = threading.Event()
        self._connections = 0
        self._store = self._connect()
        # Making a connection takes seconds where no name server answers. One on which nothing is in progress when the
        # network fails can be used as soon as it is back.
        self._spares: deque[_Connection] = deque()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._fence = threading.Thread(target=self._leave_if_cut_off, name="watchdog's fence", daemon=True)

    def __enter__(self) -> Watchdog:
        self._fence.start()  # first: a pulse names it
        with suppress(RuntimeError):  # a rank that is cut off before its first pulse is missed, too
            self._publish()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._over.set()
        self._thread.join(self._setting.floor_s)
        if kind is None:
            with suppress(RuntimeError):  # the store may be gone before its last guest
                publish(
                    self._store.inner, Pulse(*self._own, role=self._setting.names[self._own.rank], left=True)
                )

    def limit_s(self, gaps_s: list[float]) -> float:
        """Return the longest silence allowed to a rank, given the gaps between its pulses."""
        return max(self._setting.floor_s, GAPS * median(gaps_s)) if gaps_s else self._setting.floor_s

    def _connect(self) -> _Connection:
        store = self._setting.rendezvous.store.clone()
        store.set_timeout(timedelta(seconds=self._setting.floor_s))
        return _Connection(store)

    def _prepare(self) -> None:
        with suppress(RuntimeError):
            self._spares.append(self._connect())

    def _watch(self, connection: int = 0) -> None:
        with suppress(RuntimeError):  # it was to be another connection, and there is none yet
            if connection:
                made = self._spares.pop() if self._spares else self._connect()
                if self._connections == connection:  # else that took so long that there is yet another
                    self._store = made
            self._store.thread = threading.get_ident()
            # A way that has been found again may be gone a second later.
            pause_s = 0.0 if connection else self._beat_s
            while self._connections == connection and not self._over.wait(pause_s):
                pause_s = max(pause_s, self._beat_s)
                self._passed_s = self._clock.tick(pause_s)
                looked_s, self._asks = time.monotonic(), True
                with suppress(RuntimeError):  # the store does not answer; the fence sees how long
                    self._look_around()
                    self._asks = False
                look_s = time.monotonic() - looked_s
                pause_s = max(self._beat_s, min(_LOOKS_A_PAUSE * look_s, _GROWTH * pause_s))

    def _look_around(self) -> None:
        self._beat += 1
        self._publish()
        if not self._prepared:  # a key that is missing would be waited for
            self._store.compare_set(_cause_key(self._own), "", "")
            self._store.add(_ALARM, 0)
            self._prepared = True
        for peer in self._peers.values():
            self._look_at(peer)
        for rank, pulse in read(
            self._store, [rank for rank in self._watched if rank not in self._peers]
        ).items():
            self._see(rank, pulse)
        known = [rank for rank, peer in self._peers.items() if not self._shows_life(peer)]
        keys = [_cause_key(self._own), _ALARM, *map(_pulse_key, known)]
        cause, alarms, *pulses = self._store.multi_get(keys)
        if bytes(cause):
            self._leave("was taken for lost by the others while it was stopped, or cut off")
        if int(alarms) > self._alarms:
            self._alarms = int(alarms)
            self._write_stacks()
        for rank, value in zip(known, pulses, strict=True):
            self._see(rank, _pulse(value))
        for peer in self._peers.values():
            self._judge(peer)
        self._judge_own_wait()

    def _publish(self) -> None:
        setting, shows = self._setting, self._fence.native_id or 0
        role = setting.names[self._own.rank]
        publish(self._store, Pulse.of(setting.activity, self._own, role, setting.host, self._beat, shows))

    def _look_at(self, peer: _PeerStatus) -> None:
        """Look at the beat that a rank of this host shows."""
        pulse, before = peer.pulse, peer.shown
        if pulse.thread and pulse.host == self._setting.host and not pulse.left:
            peer.shown = shown_beat(pulse)
            if peer.shown not in (None, before):
                self._note_beat(peer)

    def _shows_life(self, peer: _PeerStatus) -> bool:
        """Return whether a rank of this host has just shown a beat, so that its pulse need not be read."""
        return peer.shown is not None and self._clock.now_s - peer.seen_s < _UNANSWERED_BEATS * self._beat_s

    def _see(self, rank: int, pulse: Pulse) -> None:
        peer = self._peers.get(rank)
        if peer is None or peer.pulse.generation != pulse.generation:
            self._peers[rank] = _PeerStatus(pulse, self._clock.now_s)
        elif (peer.pulse.beat, peer.pulse.left) != (pulse.beat, pulse.left):
            peer.pulse = pulse
            if peer.shown is None:
                self._note_beat(peer)

    def _note_beat(self, peer: _PeerStatus) -> None:
        """Note that a rank has beaten again."""
        pulse, now_s = peer.pulse, self._clock.now_s
        if peer.diagnosed:
            self._setting.notify(
                f"{pulse.role} (rank {pulse.rank}) is back after {now_s - peer.seen_s:.1f} s; the run continues"
            )
        else:
            peer.gaps_s.append(now_s - peer.seen_s)
        peer.seen_s, peer.diagnosed = now_s, False
        peer.starved_s, peer.used = 0.0, None

    def _judge(self, peer: _PeerStatus) -> None:
        pulse, silent_s = peer.pulse, self._clock.now_s - peer.seen_s
        lost = (
            self._setting.is_lost(pulse.rank) and not peer.declared_lost
        )  # else some may not have heard it from this rank
        if pulse.left or peer.given_up or lost:
            return
        limit_s = self.limit_s(list(peer.gaps_s))
        if silent_s > limit_s / 2:
            self._excuse(peer)
            silent_s -= peer.starved_s
        if silent_s > limit_s and not peer.diagnosed:
            if self._is_first("diagnosis", pulse):
                self._diagnose(pulse, silent_s, limit_s)
            peer.diagnosed = True
        if silent_s > LOST_AFTER * limit_s + MARGIN_BEATS * self._beat_s:
            if self._is_first("end", pulse):
                self._give_up(peer, silent_s)
            peer.given_up = True

    def _excuse(self, peer: _PeerStatus) -> None:
        """Note for how long a silent rank of this host waited for a core since the last look."""
        if peer.pulse.host != self._setting.host or not peer.pulse.process:
            return
        used = core_use(peer.pulse.process)
        if peer.used is not None:
            peer.starved_s += used.starved_s(peer.used, self._passed_s)
        peer.used = used

    def _diagnose(self, pulse: Pulse, silent_s: float, limit_s: float) -> None:
        others = [rank for rank in range(self._setting.rendezvous.size) if rank != pulse.rank]
        doing = activities(read(self._store, others).values())
        self._store.add(_ALARM, 1)  # messages are last: if the store does not answer, all this is done again
        self._setting.notify(
            f"{pulse.role} (rank {pulse.rank}) has been silent for {silent_s:.1f} s: it is stopped, or cut off; last, "
            f"at step {pulse.step}, it was {pulse.doing}. Others: {doing}. After {LOST_AFTER * limit_s:.0f} s it is "
            f"taken for lost, and {self._setting.what_then(pulse.rank)}"
        )

    def _give_up(self, peer: _PeerStatus, silent_s: float) -> None:
        """Declare a rank lost; called again at the next beat if the store stops answering on the way."""
        pulse = peer.pulse
        if not peer.declared_lost:
            leave_cause(self._store, pulse.peer, f"had been silent for {silent_s:.0f} s, and was evicted")
            peer.declared_lost = True
            self._setting.notify(
                f"{pulse.role} (rank {pulse.rank}) is taken for lost after {silent_s:.1f} s of silence"
            )
            if pulse.process and pulse.host == self._setting.host:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pulse.process, signal.SIGKILL)
        others = [rank for rank in range(self._setting.rendezvous.size) if rank != pulse.rank]
        for other in read(self._store, others).values():
            record_loss(self._store, pulse.peer, other.peer)

    def _judge_own_wait(self) -> None:
        """Report where this rank waits if that takes much longer than its steps do; nothing is done about it."""
        activity = self._setting.activity
        doing, step_s = activity.now(), activity.median_step_s()
        waited_s = time.monotonic() - doing.since_s
        if (
            step_s is None
            or doing.takes_long
            or doing.what == COMPUTING
            or doing.since_s == self._complained_of
        ):
            return
        silence_s = max((self.limit_s(list(peer.gaps_s)) for peer in self._peers.values()), default=0.0)
        if (
            waited_s < max(self._setting.floor_s, STEPS * step_s) + 2 * silence_s
        ):  # a silent rank is diagnosed before
            return
        others = [rank for rank in range(self._setting.rendezvous.size) if rank != self._own.rank]
        pulses = [pulse for pulse in read(self._store, others).values() if not pulse.left]
        explained = any(pulse.takes_long for pulse in pulses)
        if explained or any(peer.diagnosed for peer in self._peers.values()):
            return
        self._complained_of = doing.since_s
        if self._store.add(f"watchdog/wait/{activity.step}", 1) > 1:
            return
        own = Pulse.of(activity, self._own, self._setting.names[self._own.rank], "")
        self._setting.notify(
            f"{own.text}, where a step takes {step_s:.3g} s. Others: {activities(pulses)}. It continues to wait, since "
            "all of them live"
        )
        self._store.add(_ALARM, 1)

    def _is_first(self, what: str, pulse: Pulse) -> bool:
        """Return whether no other rank has done this before; this one may ask again, if it had no answer."""
        own = f"{self._own.rank}/{self._own.generation}"
        key = f"watchdog/{what}/{pulse.rank}/{pulse.generation}/{pulse.beat}"
        return bool(self._store.compare_set(key, "", own) == own.encode())

    def _write_stacks(self) -> None:
        if self._setting.folder is None:
            return
        folder = self._setting.folder / "stacks"
        with suppress(OSError, RequestError):
            folder.mkdir(exist_ok=True)
            check_folder_in_run(folder)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
            with os.fdopen(os.open(folder / f"rank-{self._own.rank}.txt", flags, 0o666), "a") as file:
                role = self._setting.names[self._own.rank]
                file.write(Pulse.of(self._setting.activity, self._own, role, "").text + "\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)

    def _leave_if_cut_off(self) -> None:
        """Show beats; end this process when it has not reached the store for so long that others have given it up.

        A store that accepts connections and does not answer has many ranks and few cores.
        """
        cuttable, shown, own = self._setting.rendezvous.address != LOOPBACK, 0, threading.get_native_id()
        preparing = threading.Thread()
        clock, reached_s, connected_s = LivedClock(), 0.0, 0.0
        least_s, unanswered_s, waits = (
            _UNANSWERED_BEATS * self._beat_s,
            _UNANSWERED_BEATS * self._beat_s,
            False,
        )
        longest_s = LOST_AFTER * self.limit_s([self._beat_s]) + MARGIN_BEATS * self._beat_s
        while not self._over.wait(self._beat_s / _TRIES_A_BEAT if waits else self._beat_s):
            clock.tick(self._beat_s)
            shown += 1
            show_beat(shown, own)
            if not self._asks:
                reached_s, unanswered_s = clock.now_s, least_s
            silent_s = clock.now_s - reached_s
            if cuttable and not (silent_s or self._spares or preparing.is_alive()):
                preparing = threading.Thread(target=self._prepare, name="watchdog's spare", daemon=True)
                preparing.start()
            cut_off_s = min(silent_s, clock.now_s - connected_s)
            waits = cuttable and cut_off_s > unanswered_s
            if waits and answers(self._setting.rendezvous.store, self._beat_s):
                connected_s = clock.now_s
                unanswered_s = min(
                    _GROWTH * unanswered_s, longest_s / 2
                )  # a busy store gets little more work
                self._connections += 1
                self._store.replaced = True
                self._thread = threading.Thread(
                    target=self._watch, args=(self._connections,), name="watchdog", daemon=True
                )
                self._thread.start()
            elif cut_off_s > longest_s and not cuttable and not refuses(self._setting.rendezvous.store):
                connected_s = clock.now_s
            elif cut_off_s > longest_s:
                self._leave(f"has not reached the others for {silent_s:.0f} s, which evict it")

    def _leave(self, why: str) -> None:
        self._setting.notify(
            f"{self._setting.names[self._own.rank]} (rank {self._own.rank}) {why}: it leaves"
        )
        os._exit(1)


class _Connection:
    """A connection to the store. Once another has taken its place, what it answers late is of the past.

    Attributes:
        inner: the store.
        thread: thread that alone may ask; None: any.
        replaced: whether another connection has taken its place.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.thread: int | None = None
        self.replaced = False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def ask(*arguments: Any) -> Any:
            if self.thread in (None, threading.get_ident()):
                answer = getattr(self.inner, name)(*arguments)
                if not self.replaced:
                    return answer
            raise RuntimeError("another connection to the store has taken the place of this one")

        return ask


def answers(store: Any, patience_s: float) -> bool:
    """Return whether the host of a store accepts connections now."""
    try:
        _connect_to(store, patience_s)
    except OSError:
        return False
    return True


def refuses(store: Any) -> bool:
    """Return whether a store on this host refuses connections, so that its process has ended; a busy one does not."""
    try:
        _connect_to(store, 1.0)
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def _connect_to(store: Any, patience_s: float) -> None:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):
        socket.create_connection((store.host, store.port), patience_s).close()


class LivedClock:
    """Counts the seconds in which this process could run: a whole run that is stopped for a while has missed nothing.

    Attributes:
        now_s: seconds counted so far.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._ticked_s = time.monotonic()

    def tick(self, beat_s: float) -> float:
        """Count the time since the last call, and return it in seconds.

        Args:
            beat_s: expected seconds between two calls; a process that took much longer was stopped, or had no core.
        """
        now_s = time.monotonic()
        passed_s = min(now_s - self._ticked_s, _MOST_BEATS * beat_s)
        self.now_s += passed_s
        self._ticked_s = now_s
        return passed_s


def leave_cause(store: Any, peer: Peer, cause: str) -> None:
    """Set the cause of a process's loss, as it follows "worker 1" in a message; readable once this returns."""
    key = _cause_key(peer)
    store.set(key, cause)
    store.check([key])


def cause_of_loss(store: Any, peer: Peer) -> str:
    """Return why a process was declared lost, in words; empty if it was not."""
    key = _cause_key(peer)
    return bytes(store.get(key)).decode() if store.check([key]) else ""


def _cause_key(peer: Peer) -> str:
    return f"watchdog/cause/{peer.rank}/{peer.generation}"
