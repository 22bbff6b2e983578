"""Evaluation of a run's model while steps continue.

    coordinator  copy of step k ─▶ begin ── step ── step ── look ─▶ result of step k
    fork                             └─ evaluate ─ result ┘

At most one snapshot is evaluated, and at most one waits for it, so that memory is bounded by two copies of the model.
Where a third is due, either the waiting one is skipped, or steps wait, as the run was started. A process that dies is
started again once; then the snapshot, and all later ones, are evaluated in place.

In virtual time a test takes the cluster's `evaluation_s`, in which it occupies processors of the coordinator's host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from polyrhythm.errors import PolyrhythmError, RequestError, RunError
from polyrhythm.evaluation.forked_call import ForkedCall, ForkLost
from polyrhythm.events import Notice
from polyrhythm.roles.checkpointing.model_snapshot import ModelSnapshot
from polyrhythm.roles.world import DrawnPace, World

_LOOK_S = 1.0
_TRIES = 2


Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class ModelTest(Generic[Result]):
    """Test of a snapshot.

    Attributes:
        snapshot: model that does not change any more.
        evaluate: function that evaluates it; called in a fork, or in place between two steps.
        done: receiver of the result, in the order of the tests; called on the thread of the caller.
    """

    snapshot: ModelSnapshot
    evaluate: Callable[[ModelSnapshot], Result]
    done: Callable[[ModelSnapshot, Result], None]


@dataclass
class _Running:
    test: ModelTest[Any]
    call: ForkedCall[Any]
    tries: int


class Evaluator:
    """Evaluates snapshots in their order.

    Args:
        world: context of this rank.
        emit: receiver of notices, which sets their times.
        skips: whether a snapshot is skipped where two are there already; else the caller waits.
        skips_failures: whether a test that fails is reported and skipped; else its error is raised.
    """

    def __init__(
        self, world: World, emit: Callable[[Notice], None], *, skips: bool, skips_failures: bool = False
    ) -> None:
        self._world, self._emit = world, emit
        self._skips, self._skips_failures = skips, skips_failures
        self._running: _Running | None = None
        self._simulated: tuple[ModelTest[Any], float] | None = None
        self._waiting: ModelTest[Any] | None = None
        self._forks, self._reported, self._over = True, False, False

    @property
    def pending(self) -> list[ModelSnapshot]:
        """Snapshots without a result, in their order."""
        first = None
        if self._running is not None:
            first = self._running.test
        elif self._simulated is not None:
            first = self._simulated[0]
        return [each.snapshot for each in (first, self._waiting) if each is not None]

    def begin(self, test: ModelTest[Any]) -> None:
        """Evaluate a snapshot.

        Raises:
            RequestError, RunError: an earlier test has failed; the message has its step.
        """
        self.look()
        if self._waiting is not None:
            self._report_delay(self._waiting.snapshot)
            while self._waiting is not None and not self._skips:  # more than once where a test is repeated
                self.finish_one()
        if self._over:
            return
        if self.pending:
            self._waiting = test
        else:
            self._start(test)

    def _report_delay(self, waiting: ModelSnapshot) -> None:
        if self._reported:
            return
        self._reported = True
        rule = (
            f"that of {waiting.name} is skipped, and so is each that still waits when a newer one is due"
            if self._skips
            else "steps wait for them, since all are needed"
        )
        self._emit(Notice(time_s=0, text=f"tests take longer than the steps between them: {rule}"))

    def look(self) -> None:
        """Report a finished evaluation, and begin the next; never waits."""
        if self._running is not None and self._running.call.poll():
            self._end_call(self._running)
        elif self._simulated is not None and self._world.clock.now() >= self._simulated[-1]:
            self._end_simulated()

    def wait(self) -> None:
        """Wait until all snapshots are evaluated."""
        while self.pending:
            self.finish_one()

    def drop(self) -> None:
        """End the running evaluation, forget all snapshots, and ignore later ones."""
        self._over = True
        if self._running is not None:
            self._running.call.end()
        self._running = self._simulated = self._waiting = None

    def finish_one(self) -> None:
        """Wait for the result of the first snapshot."""
        with self._world.activity.doing("waiting for the test of the model", takes_long=True):
            if self._running is not None:
                while not self._running.call.poll(_LOOK_S):
                    pass
            elif self._simulated is not None:
                self._world.clock.sleep(max(0.0, self._simulated[-1] - self._world.clock.now()))
        self.look()

    def _start(self, test: ModelTest[Any], tries: int = 1) -> None:
        pace = self._world.pace
        if pace is not None:
            self._simulated = test, _busy_until(pace)
            self.look()
            return
        if self._forks:
            try:
                self._running = _Running(test, ForkedCall(partial(test.evaluate, test.snapshot)), tries)
                return
            except OSError as error:
                self._forks = False
                text = f"the model is tested in place from here on: {error.strerror or error}"
                self._emit(Notice(time_s=0, text=text))
        self._end(test, partial(test.evaluate, test.snapshot))

    def _end_call(self, running: _Running) -> None:
        self._running = None
        try:
            self._end(running.test, running.call.result)
        except ForkLost as lost:
            self._forks = running.tries < _TRIES
            how = "is repeated" if self._forks else "is repeated in place, as are all from here on"
            text = f"the test of {running.test.snapshot.name} {how}, since {lost}"
            self._emit(Notice(time_s=0, text=text))
            self._start(running.test, running.tries + 1)
        finally:
            running.call.end()

    def _end_simulated(self) -> None:
        assert self._simulated is not None, "it has ended"
        (test, _), self._simulated = self._simulated, None
        self._end(test, partial(test.evaluate, test.snapshot))

    def _end(self, test: ModelTest[Any], result: Callable[[], Any]) -> None:
        """Pass a result on, or report the failure, and begin the next test."""
        try:
            found = result()
        except ForkLost:
            raise
        except PolyrhythmError as error:
            text = f"the test of {test.snapshot.name} failed: {error}"
            if not self._skips_failures:
                raise RequestError(text) if isinstance(error, RequestError) else RunError(text) from None
            self._emit(Notice(time_s=0, text=f"{text}; it is skipped"))
        else:
            test.done(test.snapshot, found)
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._start(waiting)


def _busy_until(pace: DrawnPace) -> float:
    """Return the end of an evaluation that begins now, and occupies its processors until then."""
    pace.evaluates(pace.evaluation_s)
    return pace.clock.now() + pace.evaluation_s
