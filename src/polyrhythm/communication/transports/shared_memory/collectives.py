"""Collectives of one communicator on one host, executed in the order of their start.

The thread that waits for one does it, and those before it: inside a host, adding up is itself a computation,
and a thread that did it at once would only take the core, and Python's lock, from what the rank computes
in the meantime. But the others may need this rank's part while it computes for long, or waits for something else.
So what has not been done after a few milliseconds is done by a helper thread.

    this rank   start ─ computes ─ wait: does it              start ─ computes for long ───────── wait
    helper                                                      ········ after 5 ms: does it
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor

from polyrhythm.communication.communicator import Handle
from polyrhythm.communication.transports.member_collectives import CollectiveBroken, MemberCollectives
from polyrhythm.communication.transports.shared_memory.barrier import Barrier, Lifelines
from polyrhythm.communication.transports.shared_memory.exchange import Exchange, SharedBuffer
from polyrhythm.errors import RequestError

_HELP_AFTER_S = 5e-3
_AWAKE_S = 1.0
"""So long after the last start the helper goes to sleep; waking it costs more than its looking around."""


class OrderedWork(Handle):
    """A collective that has been started."""

    def __init__(self, order: InOrder, run: Callable[[], None]) -> None:
        self._order = order
        self._run: Callable[[], None] | None = run
        self._error: BaseException | None = None
        self.started_at = time.monotonic()

    def done(self) -> bool:
        return self._run is None

    def wait(self) -> None:
        while self._run is not None:
            # It may be another's: works started before this one are first, whichever thread waits for them.
            self._order.do_next()
        if self._error is not None:
            raise self._error.with_traceback(None)

    def do(self) -> None:
        """Do the work; what it raises is kept for `wait`."""
        assert self._run is not None, "a work is done once"
        try:
            self._run()
        except BaseException as error:
            self._error = error
        self._run = None


class InOrder:
    """The works of one rank, done one at a time in the order of their start.

    A `with` block is a work too: it begins when all that were started before it are over, and no other is done
    in the meantime.

    Args:
        in_background: callback with whether the helper does the work, called whenever that changes.
    """

    def __init__(self, in_background: Callable[[bool], None]) -> None:
        self._in_background = in_background
        self._works: deque[OrderedWork] = deque()
        self._doing = threading.Lock()
        self._wake = threading.Event()
        self._awake = True
        self._closed = False
        self._last_start = 0.0
        self._helper: threading.Thread | None = None

    def start(self, run: Callable[[], None]) -> OrderedWork:
        """Add a work."""
        work = OrderedWork(self, run)
        self._last_start = work.started_at
        self._works.append(work)
        if self._helper is None:
            self._helper = threading.Thread(target=self._help, name="collectives", daemon=True)
            self._helper.start()
        elif not self._awake:
            self._wake.set()
        return work

    def __enter__(self) -> None:
        # Nearly always the queue is empty, and no thread works.
        if not self._doing.acquire(blocking=False):
            self._in_background(False)
            self._doing.acquire()
        if self._works:
            self._in_background(False)
            while self._works:
                self._works.popleft().do()

    def __exit__(self, *_: object) -> None:
        self._doing.release()

    def do_next(self) -> None:
        """Do the oldest work, or wait while another thread does one."""
        self._in_background(False)
        with self._doing:
            if self._works:
                self._works.popleft().do()

    def close(self) -> None:
        """End the helper; the remaining works are done by the threads that wait for them."""
        self._closed = True
        self._wake.set()
        if self._helper is not None:
            self._helper.join()

    def _help(self) -> None:
        while not self._closed:
            if not self._works and time.monotonic() - self._last_start > _AWAKE_S:
                self._sleep()
                continue
            # It looks by itself: to wake it at every start would cost the thread that computes.
            time.sleep(_HELP_AFTER_S)
            while self._is_late():
                self._help_out()

    def _is_late(self) -> bool:
        """Return whether the oldest work has waited for long; others may do it at any moment."""
        try:
            return time.monotonic() - self._works[0].started_at > _HELP_AFTER_S
        except IndexError:
            return False

    def _sleep(self) -> None:
        self._wake.clear()
        self._awake = False
        if (
            not self._works and not self._closed
        ):  # a thread that adds one from here on sees that it must wake us
            self._wake.wait()
        self._awake = True

    def _help_out(self) -> None:
        with self._doing:
            if self._works:
                self._in_background(True)
                try:
                    self._works.popleft().do()
                finally:
                    self._in_background(False)


class SharedMemoryCollectives(MemberCollectives):
    """One member's side. Tensors live on the CPU; collectives are done in the order of their start.

    Args:
        arena: memory shared by all members.
        member: index of this member.
        members: the ranks of all members, among all ranks of the run.
        lifelines: lifelines of the members' processes, in the same order.

    Errors, by the call or by the handle's `wait`: `RequestError` on all members if they disagree about the
    operation, after which they may continue; `CollectiveBroken` if one of them is gone, from then on.
    """

    def __init__(
        self, arena: SharedBuffer, member: int, members: tuple[int, ...], lifelines: Lifelines
    ) -> None:
        self._barrier = Barrier(arena.words, member, members, lifelines)
        self._exchange = Exchange(arena, self._barrier, member, members)
        self._rank = members[member]
        self._lifelines = lifelines
        self._order = InOrder(self._be_patient)
        self._broken: CollectiveBroken | None = None

    def all_reduce(self, tensor: Tensor) -> None:
        # Written out, for this is the way of every synchronous step: the same as `_do` with `_on_vector`.
        with self._order:
            if self._broken is not None:
                raise self._again()
            try:
                if tensor.dim() == 1 and tensor.is_contiguous() and not tensor.requires_grad:
                    self._exchange.all_reduce(tensor)
                else:
                    self._on_vector(tensor, self._exchange.all_reduce)
            except BaseException as error:
                self._on_failure(error)
                raise

    def start_all_reduce(self, tensor: Tensor, finish: Callable[[], None] | None = None) -> OrderedWork:
        def run() -> None:
            self._on_vector(tensor, self._exchange.all_reduce)
            if finish is not None:
                finish()

        return self._order.start(lambda: self._guarded(run))

    def sums_in_place(self, like: Tensor) -> bool:
        """Return whether vectors of this size are worth `add_rows`; smaller ones are added up whole by everyone."""
        return like.nbytes > self._exchange.small_bytes

    def add_rows(self, rows: Sequence[Tensor]) -> Tensor:
        """Register vectors of all members, seen by all, that are added up where they lie; return this member's."""
        return self._exchange.in_place.add(rows)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        self._do(lambda: self._on_vector(tensor, lambda vector: self._exchange.broadcast(vector, root)))

    def barrier(self) -> None:
        self._do(self._exchange.barrier)

    def together(self, run: Callable[[Exchange], None]) -> None:
        """Do several exchanges as one work, on a thread next to one that computes; a failure in it is all members'."""
        self._barrier.patient = True
        self._do(lambda: run(self._exchange))

    def give_up(self, reason: CollectiveBroken) -> None:
        if self._broken is None:
            self._barrier.broken = reason
            self._give_up(reason)

    def close(self) -> None:
        self._order.close()
        self._barrier.leave()
        self._lifelines.close()

    def _do(self, run: Callable[[], None]) -> None:
        with self._order:
            self._guarded(run)

    def _guarded(self, run: Callable[[], None]) -> None:
        if self._broken is not None:
            raise self._again()
        try:
            run()
        except BaseException as error:
            self._on_failure(error)
            raise

    def _again(self) -> CollectiveBroken:
        assert self._broken is not None
        return CollectiveBroken(self._broken.reason, self._broken.rank)

    def _on_failure(self, error: BaseException) -> None:
        """Notify the other members that this one cannot continue."""
        if isinstance(error, CollectiveBroken):
            self._give_up(error)
        elif not isinstance(error, RequestError):  # that one all members have raised, at the same barrier
            self._give_up(
                CollectiveBroken(f"rank {self._rank} was stopped by {type(error).__name__}", self._rank)
            )

    def _give_up(self, reason: CollectiveBroken) -> None:
        self._broken = CollectiveBroken(reason.reason, reason.rank)
        self._barrier.give_up(reason.rank)

    def _be_patient(self, patient: bool) -> None:
        self._barrier.patient = patient

    @staticmethod
    def _on_vector(tensor: Tensor, run: Callable[[Tensor], None]) -> None:
        vector = tensor.detach().contiguous().view(-1)
        run(vector)
        if not tensor.is_contiguous():
            tensor.detach().copy_(vector.view_as(tensor))
