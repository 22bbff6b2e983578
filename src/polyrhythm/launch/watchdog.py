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
loss. `LivedClock` counts the seconds in which this process could run.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist

from polyrhythm.communication.activity import COMPUTING, Activity
from polyrhythm.communication.transports.membership import Peer
from polyrhythm.communication.transports.torch_distributed.rendezvous import Rendezvous, tell_of_loss
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
        process: process ID on its host.
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
    def of(cls, activity: Activity, own: Peer, role: str, host: str, beat: int) -> Pulse:
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
        )


def publish(store: Any, pulse: Pulse) -> None:
    """Set a rank's pulse in the store."""
    store.set(_pulse_key(pulse.rank), json.dumps(asdict(pulse)))


def read(store: Any, ranks: list[int]) -> dict[int, Pulse]:
    """Return the latest pulses of those of some ranks that have had one."""
    there = [rank for rank in ranks if store.check([_pulse_key(rank)])]
    if not there:
        return {}
    values = store.multi_get([_pulse_key(rank) for rank in there])
    return {
        rank: Pulse(**json.loads(bytes(value).decode())) for rank, value in zip(there, values, strict=True)
    }


def _pulse_key(rank: int) -> str:
    return f"pulse/{rank}"


GAPS = 6
"""Longest silence of a rank, as a multiple of its recent gaps between pulses."""

STEPS = 20
"""Longest wait, in median steps of the waiting rank."""

FLOOR_S = 3.0
LOST_AFTER = 4
"""Number of limits after which a silent rank is declared lost."""

_BEATS_A_FLOOR, _FASTEST_BEAT_S, SLOWEST_BEAT_S = 6, 0.05, 0.5
_WATCHED = 4
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
        say: function that prints messages for users.
        what_then: returns the consequences for the run without a rank, in words.
        folder: folder of the run; stacks go there.
        floor_s: the least limit.
    """

    rendezvous: Rendezvous
    names: list[str]
    host: str
    activity: Activity
    is_lost: Callable[[int], bool]
    say: Callable[[str], None]
    what_then: Callable[[int], str]
    folder: Path | None = None
    floor_s: float = FLOOR_S


@dataclass
class _PeerStatus:
    """Observations of another rank, and the actions taken.

    Attributes:
        pulse: latest pulse of the rank.
        seen_s: time at which that was new.
        gaps_s: gaps between its pulses.
        diagnosed: whether its silence has been reported by any rank.
        declared_lost: whether this rank has declared it lost, and ended it if it could.
        given_up: whether all have been notified, or are being notified by another.
    """

    pulse: Pulse
    seen_s: float
    gaps_s: deque[float] = field(default_factory=lambda: deque(maxlen=_GAPS_KEPT))
    diagnosed: bool = False
    declared_lost: bool = False
    given_up: bool = False


class Watchdog:
    """Publishes one rank's pulse, and watches the ranks after it.

    Args:
        setting: settings.
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
        self._reached = False
        self._clock = LivedClock(self._beat_s)
        self._over = threading.Event()
        self._connections = 0
        self._store = self._connect()
        # Making a connection takes seconds where no name server answers. One on which nothing is in progress when the
        # network fails can be used as soon as it is back.
        self._spares: deque[_Connection] = deque()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._fence = threading.Thread(target=self._leave_if_cut_off, name="watchdog's fence", daemon=True)

    def __enter__(self) -> Watchdog:
        with suppress(RuntimeError):  # a rank that is cut off before its first pulse is missed, too
            self._publish()
        self._thread.start()
        self._fence.start()
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
                pause_s = self._beat_s
                self._clock.tick()
                with suppress(RuntimeError):  # the store does not answer; the fence sees how long
                    self._look_around()
                    self._reached = True

    def _look_around(self) -> None:
        self._beat += 1
        self._publish()
        if cause_of_loss(self._store, self._own):
            self._leave("was taken for lost by the others while it was stopped, or cut off")
        alarms = self._store.add(_ALARM, 0)
        if alarms > self._alarms:
            self._alarms = alarms
            self._write_stacks()
        for rank, pulse in read(self._store, self._watched).items():
            self._see(rank, pulse)
        for peer in self._peers.values():
            self._judge(peer)
        self._judge_own_wait()

    def _publish(self) -> None:
        setting = self._setting
        role = setting.names[self._own.rank]
        publish(self._store, Pulse.of(setting.activity, self._own, role, setting.host, self._beat))

    def _see(self, rank: int, pulse: Pulse) -> None:
        now_s = self._clock.now_s
        peer = self._peers.get(rank)
        if peer is None or peer.pulse.generation != pulse.generation:
            self._peers[rank] = _PeerStatus(pulse, now_s)
        elif (peer.pulse.beat, peer.pulse.left) != (pulse.beat, pulse.left):
            if peer.diagnosed:
                self._setting.say(
                    f"{pulse.role} (rank {rank}) is back after {now_s - peer.seen_s:.1f} s; the run continues"
                )
            else:
                peer.gaps_s.append(now_s - peer.seen_s)
            peer.pulse, peer.seen_s, peer.diagnosed = pulse, now_s, False

    def _judge(self, peer: _PeerStatus) -> None:
        pulse, silent_s = peer.pulse, self._clock.now_s - peer.seen_s
        lost = (
            self._setting.is_lost(pulse.rank) and not peer.declared_lost
        )  # else some may not have heard it from this rank
        if pulse.left or peer.given_up or lost:
            return
        limit_s = self.limit_s(list(peer.gaps_s))
        if silent_s > limit_s and not peer.diagnosed:
            if self._is_first("diagnosis", pulse):
                self._diagnose(pulse, silent_s, limit_s)
            peer.diagnosed = True
        if silent_s > LOST_AFTER * limit_s + MARGIN_BEATS * self._beat_s:
            if self._is_first("end", pulse):
                self._give_up(peer, silent_s)
            peer.given_up = True

    def _diagnose(self, pulse: Pulse, silent_s: float, limit_s: float) -> None:
        others = [rank for rank in range(self._setting.rendezvous.size) if rank != pulse.rank]
        doing = "; ".join(other.text for other in read(self._store, others).values() if not other.left)
        self._store.add(_ALARM, 1)  # messages are last: if the store does not answer, all this is done again
        self._setting.say(
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
            self._setting.say(
                f"{pulse.role} (rank {pulse.rank}) is taken for lost after {silent_s:.1f} s of silence"
            )
            if pulse.process and pulse.host == self._setting.host:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pulse.process, signal.SIGKILL)
        others = [rank for rank in range(self._setting.rendezvous.size) if rank != pulse.rank]
        for other in read(self._store, others).values():
            tell_of_loss(self._store, pulse.peer, other.peer)

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
        own = Pulse.of(activity, self._own, self._setting.names[self._own.rank], "", 0)
        doing_elsewhere = "; ".join(pulse.text for pulse in pulses)
        self._setting.say(
            f"{own.text}, where a step takes {step_s:.3g} s. Others: {doing_elsewhere}. It continues to wait, since "
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
                file.write(Pulse.of(self._setting.activity, self._own, role, "", 0).text + "\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)

    def _leave_if_cut_off(self) -> None:
        """End this process when it has not reached the store for so long that others have given it up."""
        preparing = threading.Thread()
        clock, reached_s, connected_s = LivedClock(self._beat_s), 0.0, 0.0
        unanswered_s, margin_s = _UNANSWERED_BEATS * self._beat_s, MARGIN_BEATS * self._beat_s
        waits = False
        while not self._over.wait(self._beat_s / _TRIES_A_BEAT if waits else self._beat_s):
            clock.tick()
            if self._reached:
                self._reached, reached_s = False, clock.now_s
            silent_s = clock.now_s - reached_s
            if not (silent_s or self._spares or preparing.is_alive()):
                preparing = threading.Thread(target=self._prepare, name="watchdog's spare", daemon=True)
                preparing.start()
            waits = min(silent_s, clock.now_s - connected_s) > unanswered_s
            if waits and answers(self._setting.rendezvous.store, self._beat_s):
                connected_s = clock.now_s
                self._connections += 1
                self._store.replaced = True
                self._thread = threading.Thread(
                    target=self._watch, args=(self._connections,), name="watchdog", daemon=True
                )
                self._thread.start()
            if silent_s > LOST_AFTER * self.limit_s([self._beat_s]) + margin_s:
                self._leave(f"has not reached the others for {silent_s:.0f} s, which evict it")

    def _leave(self, why: str) -> None:
        self._setting.say(f"{self._setting.names[self._own.rank]} (rank {self._own.rank}) {why}: it leaves")
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
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return True
    try:
        socket.create_connection((store.host, store.port), patience_s).close()
    except OSError:
        return False
    return True


class LivedClock:
    """Counts the seconds in which this process could run: a whole run that is stopped for a while has missed nothing.

    Args:
        beat_s: expected interval of ticks; a process that takes much longer was stopped.

    Attributes:
        now_s: counted so far.
    """

    def __init__(self, beat_s: float) -> None:
        self.now_s = 0.0
        self._longest_s = 3 * beat_s
        self._ticked_s = time.monotonic()

    def tick(self) -> None:
        """Count what has passed since the last call."""
        now_s = time.monotonic()
        self.now_s += min(now_s - self._ticked_s, self._longest_s)
        self._ticked_s = now_s


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
