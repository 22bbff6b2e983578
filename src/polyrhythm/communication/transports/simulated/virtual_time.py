"""Virtual time: a clock, a queue of future actions, and tasks that switch instead of blocking.

A task is a greenlet. Whatever would block (sleeping, receiving) parks the task and switches to the hub, which
takes the next action from the queue, sets the clock to its time and runs it. Actions of equal time run in the order in
which they were queued, so that the same program always gives the same trace.

    later      a heap, by time and then by order of queueing
    present    a queue for the current time, since most actions follow at once; those of this time in the heap run first
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

import greenlet

from polyrhythm.errors import RunError

Action = Callable[[], object]

_MOST_NAMED = 16
_ONLY_TASKS_WAIT = "only a task can wait in virtual time"


class Deadlock(RunError):
    """Every task waits for something that cannot happen any more."""


class Task(greenlet.greenlet):  # type: ignore[misc]
    """Something that runs in virtual time.

    Its `switch` resumes it where it is parked, and may pass it the awaited value. Only actions may call it;
    it is itself an action that may be queued. Where the task has ended it does nothing.

    Attributes:
        name: name for messages.
        waiting_for: reason of its last wait, in words.
        result: return value.
        error: exception raised.
        awaited: whether its error is raised by `join`; else it ends the simulation.
        owner: rank or other object that the task is killed with.
    """

    __slots__ = ("_time", "_work", "awaited", "error", "name", "owner", "result", "waiting_for")

    def __init__(
        self, name: str, work: Callable[[], Any], time: VirtualTime, awaited: bool, owner: object
    ) -> None:
        super().__init__(parent=time.hub)
        self.name = name
        self.awaited = awaited
        self.owner = owner
        self.waiting_for = ""
        self.result: Any = None
        self.error: BaseException | None = None
        self._time = time
        self._work = work

    def run(self) -> None:
        """Run; an error that is not awaited is passed to the hub."""
        try:
            self.result = self._work()
        except Exception as error:
            self.error = error
        self._time.end(self)

    @property
    def ended(self) -> bool:
        """Whether it has returned or raised."""
        return bool(self.dead)


running: Callable[[], Task] = greenlet.getcurrent
"""Returns the task that calls it."""


class VirtualTime:
    """The hub of a simulation; its `now` is the clock of all ranks.

    Attributes:
        hub: greenlet that waiting tasks switch to.
        now_s: value of `now`, for frequent reads.
        soon: queues an action for the present time, after what is already queued for it.
    """

    def __init__(self) -> None:
        self.hub = greenlet.getcurrent()
        self.now_s = 0.0
        self._later: list[tuple[float, int, Action]] = []
        self._present: deque[Action] = deque()
        self.soon: Callable[[Action], None] = self._present.append
        self._to_hub = self.hub.switch
        self._queued = 0
        self._tasks: dict[Task, None] = {}  # in the order of their making
        self._waiters: dict[Task, list[Task]] = {}
        self._unheard: list[Task] = []

    def now(self) -> float:
        """Virtual seconds since the simulation began."""
        return self.now_s

    def sleep(self, seconds: float, what: str = "") -> None:
        """Park the running task for `seconds` virtual seconds."""
        task, to_hub = running(), self._to_hub
        assert isinstance(task, Task), _ONLY_TASKS_WAIT
        task.waiting_for = "time to pass"
        now_s, queued = self.now_s, self._queued
        wakes_at_s = now_s + seconds
        # Not `seconds > 0`: a time may be too short to move the clock at all.
        if wakes_at_s > now_s:  # as `at` does
            heappush(self._later, (wakes_at_s, queued, task.switch))
            self._queued = queued + 1
        else:
            self._present.append(task.switch)
        to_hub()

    def at(self, time_s: float, action: Action) -> None:
        """Queue an action; it must not block. What should have been done before is done at the present time."""
        if time_s > self.now_s:
            queued = self._queued
            heappush(self._later, (time_s, queued, action))
            self._queued = queued + 1
        else:
            self._present.append(action)

    def last_place(self) -> int | None:
        """Take a place for `finish` in the queue; None if an action remains at the present time.

        If none does, an action may execute at once, as its last step, what it would queue for this time.
        """
        later = self._later
        if self._present or (later and later[0][0] <= self.now_s):
            return None
        place = self._queued
        self._queued = place + 1
        return place

    def finish(self, time_s: float, place: int, action: Action) -> None:
        """Execute an action at a later time: at once if nothing precedes it, which saves the queue.

        Args:
            time_s: later than the present time.
            place: position among the actions queued for the same time.
            action: action, which must not block. An action may call this only as its last statement.
        """
        later = self._later
        if self._present or (later and later[0][0] <= time_s):
            heappush(later, (time_s, place, action))
            return
        self.now_s = time_s
        action()

    def pass_to(self, time_s: float) -> bool:
        """Let time pass, if nothing else is to be done until then; return whether it has.

        Args:
            time_s: later than the present time. What the caller still does is done then.
        """
        later = self._later
        if self._present or (later and later[0][0] <= time_s):
            return False
        self.now_s = time_s
        return True

    def spawn(
        self, name: str, work: Callable[[], Any], *, awaited: bool = False, owner: object = None
    ) -> Task:
        """Make a task; it starts at the present time, after what is already queued for it.

        Args:
            name: name for messages.
            work: function to run.
            awaited: whether an error waits for `join`, as a thread's would; else it ends the simulation.
            owner: object that `kill` names to end it.
        """
        task = Task(name, work, self, awaited, owner)
        self._tasks[task] = None
        self.wake_soon(task)
        return task

    def kill(self, owner: object) -> None:
        """End all tasks of an owner where they are; called by queued actions, never by tasks."""
        for task in [task for task in self._tasks if task.owner is owner]:
            self._kill(task)
        self._unheard = [task for task in self._unheard if task.owner is not owner]

    def close(self) -> None:
        """End all remaining tasks, once no action will follow; called by the hub.

        A parked task and what it holds would stay for ever: no garbage collector looks into its frames.
        """
        for task in list(self._tasks):
            self._kill(task)
        self._unheard.clear()
        self._later.clear()
        self._present.clear()

    @property
    def queued(self) -> int:
        """Number of future actions."""
        return len(self._later) + len(self._present)

    def park(self, reason: str, task: Task | None = None) -> Any:
        """Block the running task until it is woken; return the value passed then, `()` if nothing.

        Args:
            reason: reason of the wait, in words.
            task: the running task, if the caller knows it.
        """
        if task is None:
            task = running()
            assert isinstance(task, Task), _ONLY_TASKS_WAIT
        task.waiting_for = reason
        to_hub = self._to_hub
        return to_hub()

    def wake(self, task: Task) -> None:
        """Resume a parked task at once, unless it has ended; called by queued actions, never by tasks."""
        task.switch()

    def wake_soon(self, task: Task) -> None:
        """Queue a parked task for the present time; may be called by tasks."""
        self.soon(task.switch)

    def join(self, task: Task) -> Any:
        """Wait for another task; return its result or raise its error."""
        while not task.ended:
            self._waiters.setdefault(task, []).append(running())
            self.park(f"the end of {task.name}")
        if task in self._unheard:
            self._unheard.remove(task)
        if task.error is not None:
            raise task.error
        return task.result

    def run(self) -> None:
        """Run until all tasks have ended.

        Raises:
            Deadlock: tasks remain but nothing is queued.
            Exception: the first error that a task raised and that was not joined; of an awaited task only if
                the others cannot continue.
        """
        later, present = self._later, self._present
        while True:
            while present:
                present.popleft()()
            if not later:
                break
            now, _, action = heappop(later)
            self.now_s = now
            action()
            # Before anything that these put into `present`: what the heap has for this time was queued earlier.
            while later and later[0][0] == now:
                heappop(later)[2]()
        stuck = list(self._tasks)
        if stuck and self._unheard:  # the likely cause of the standstill
            self.join(self._unheard[0])
        if stuck:
            raise Deadlock(_standstill(stuck))

    def _kill(self, task: Task) -> None:
        self._tasks.pop(task, None)
        self._waiters.pop(task, None)
        while not task.ended:  # a `finally` may have parked it once more
            task.throw()

    def end(self, task: Task) -> None:
        """Note that a task has done its work; called by itself, at its very end.

        Raises:
            Exception: error of the task, if no other process receives it.
        """
        if task not in self._tasks:  # killed
            return
        del self._tasks[task]
        waiters = self._waiters.pop(task, [])
        for waiter in waiters:
            self.wake_soon(waiter)
        if task.error is not None and not waiters:
            if not task.awaited:
                raise task.error
            self._unheard.append(task)


def _standstill(stuck: list[Task]) -> str:
    """Return the awaited event of each task, or of the first of many."""
    named = [f"{task.name} waits for {task.waiting_for}" for task in stuck[:_MOST_NAMED]]
    if len(stuck) > len(named):
        named.append(f"and {len(stuck) - len(named):,} more wait")
    return f"deadlock: {'; '.join(named)}"
