"""A server's table of its pushers: a row for each, and the end of the run.

The end of several servers is one end: rank 0 asks all for the final parameters, and lets them go (a second LEAVE) once
it has all. From the first of its two requests on, a replacement is asked to leave.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from polyrhythm.communication.control_message import checked
from polyrhythm.errors import RunError
from polyrhythm.strategies.parameter_server.serving.rule import Contribution
from polyrhythm.strategies.state import State
from polyrhythm.training.flat_parameters import is_finite


class Pusher:
    """What a server knows of one pusher.

    Attributes:
        rank: rank in the run.
        number: from 0; gates and rules know the pusher by this one.
        steps: number of its gradients that need not be pushed again: applied, held for good, or over.
        held: gradients that wait for an update, oldest first.
        left_out: stretches of its `steps` without an applied gradient, `[first, one past the last]`, in order.
        read_version: version of the parameters that it has read last, and since then one more for each applied
            gradient of its own.
        seen: `(n,)`, the parameters that it has read last, where they are kept; never changed.
        not_finite: number of its latest gradients, in a row, that were not finite.
        left: whether it has left or failed, and has no replacement.
        lost: whether it has failed with gradients left to push, and has no replacement.
        dismissed: whether it was asked to leave, and has no replacement.
    """

    __slots__ = (
        "dismissed",
        "held",
        "left",
        "left_out",
        "lost",
        "not_finite",
        "number",
        "rank",
        "read_version",
        "seen",
        "steps",
    )

    def __init__(self, rank: int, number: int) -> None:
        self.rank, self.number = rank, number
        self.steps = self.read_version = self.not_finite = 0
        self.held: list[Contribution] = []
        self.left_out: list[list[int]] = []
        self.seen: Tensor | None = None
        self.left = self.lost = self.dismissed = False

    def count(self, step: int) -> None:
        """Count a step that must not be repeated, and all before it."""
        self.steps = max(self.steps, step + 1)

    def settle(self, step: int | None) -> None:
        """Count what is held as final, and all before `step` as over, since the pusher is answered."""
        for entry in self.held:
            self.count(entry.step)
        if step is not None:
            self.leave_out(self.steps, step)
            self.steps = max(self.steps, step)

    def leave_out(self, start: int, stop: int) -> None:
        """Note the steps `[start, stop)` as left out; they follow all that were noted before."""
        if start >= stop:
            return
        if self.left_out and self.left_out[-1][1] == start:
            self.left_out[-1][1] = stop
        else:
            self.left_out.append([start, stop])

    def forget_reads(self) -> None:
        """Forget what a failed pusher has read."""
        self.read_version, self.seen = 0, None


_MEMBERSHIP = ("left", "lost", "dismissed", "not_finite", "read_version")


class Pushers:
    """The rows of all pushers, in the order of their numbers.

    Args:
        spares: number of pushers that may be lost at once; 0: the run decides.
        spared_by: limiting rule, for an error's text.

    Attributes:
        rows: rows by number.
        of_rank: rows by rank.
        asking: pushers that wait for the first parameters.
        final: pusher that has asked for the final parameters, or None.
        done: whether that one has let the servers go.
        ejected: number of evictions.
        not_finite: number of gradients that were not finite.
    """

    def __init__(self, ranks: Sequence[int], spares: int = 0, spared_by: str = "") -> None:
        self.rows = [Pusher(rank, number) for number, rank in enumerate(ranks)]
        self.of_rank = {row.rank: row for row in self.rows}
        self.asking: list[Pusher] = []
        self.final: Pusher | None = None
        self.done = False
        self.ejected = self.not_finite = 0
        self._spares = spares
        self._spared_by = spared_by

    @property
    def present(self) -> int:
        """Number of present pushers."""
        return sum(not row.left for row in self.rows)

    @property
    def lost(self) -> list[int]:
        """Ranks that are lost and have no replacement yet."""
        return [row.rank for row in self.rows if row.lost]

    @property
    def ready_to_end(self) -> Pusher | None:
        """Pusher that can be given the final parameters now, since no pusher can change them any more; or None."""
        return self.final if self.final is not None and not self.present else None

    def enter(self, row: Pusher) -> bool:
        """Admit a pusher or its replacement; return False where the run is ending and it is too late."""
        if row.left:
            if self.final is not None:  # it might change one shard and not another
                return False
            row.left = row.lost = row.dismissed = False
        return True

    def leave(self, row: Pusher) -> bool:
        """Record that a pusher has left or failed; return whether it was present.

        The second leave of the pusher that has the final parameters ends the run.
        """
        self.stop_asking(row)
        if row.left:
            self.done |= self.final is row
            return False
        row.left = True
        return True

    def lose(self, row: Pusher) -> bool:
        """Take note that a pusher is lost, as in `leave`; its replacement has to ask for the final parameters again."""
        if self.final is row:
            self.final = None
        return self.leave(row)

    def miss(self, row: Pusher) -> None:
        """Count a present pusher as failed until a replacement enters; raise `RunError` if too many have failed."""
        row.lost |= not row.left
        if self._spares and len(lost := self.lost) > self._spares:
            raise RunError(
                f"{len(lost)} workers are lost (ranks {', '.join(map(str, sorted(lost)))}), and {self._spared_by} can "
                f"spare {self._spares}: continue with --resume, or start a new run with more spare ones"
            )

    def dismiss(self, row: Pusher) -> None:
        """Note that a pusher is asked to leave."""
        self.ejected += 1
        row.dismissed = True

    def passes(self, row: Pusher, gradient: Tensor) -> bool:
        """Count a pusher's gradient that weighs something; return whether it is finite."""
        if is_finite(gradient):
            row.not_finite = 0
            return True
        row.not_finite += 1
        self.not_finite += 1
        return False

    def take_asking(self) -> list[Pusher]:
        """Return the pushers that wait for the first parameters, which wait no more."""
        asking, self.asking = self.asking, []
        return asking

    def stop_asking(self, row: Pusher) -> None:
        """Note that a pusher waits for the first parameters no more."""
        if row in self.asking:
            self.asking.remove(row)

    def state(self, *, again: bool) -> State:
        """Return the counts, and the gradients that will not be repeated; `again`: all held ones are repeated."""
        return self._packed(() if again else (entry for entry in self._held() if self._is_counted(entry)))

    def exact_state(self) -> State:
        """Return all: also gradients that a resumed pusher would push again, what was read, and the membership."""
        tensors, facts = self._packed(self._held())
        tensors |= {f"read.{row.number}": row.seen for row in self.rows if row.seen is not None}
        members = {name: [getattr(row, name) for row in self.rows] for name in _MEMBERSHIP}
        final = None if self.final is None else self.final.number
        asking = [row.number for row in self.asking]
        return tensors, {
            **facts,
            **members,
            "final": final,
            "asking": asking,
            "done": self.done,
            "ejected": self.ejected,
            "screened": self.not_finite,
        }

    def load_state(self, state: State) -> None:
        """Restore what `state` returned.

        Raises:
            ValueError: the number of pushers differs.
        """
        tensors, facts = state
        if len(facts["steps"]) != len(self.rows):
            raise ValueError(f"it has {len(self.rows)} pushers, and the state {len(facts['steps'])}")
        left_out = checked(facts.get("left_out", {}), dict[int, list[list[int]]])
        for row, steps in zip(self.rows, facts["steps"], strict=True):
            row.steps, row.left_out = steps, left_out.get(row.number, [])
        for number, (pusher, read_version, step, weight, rate, *fresh) in enumerate(facts.get("held", ())):
            gradient, seen = tensors[f"held.{number}"], tensors.get(f"seen.{number}")
            count = fresh[0] if fresh else 1  # earlier versions held single gradients
            entry = Contribution(pusher, gradient, read_version, step, weight, rate, count, seen)
            self.rows[pusher].held.append(entry)

    def load_exact_state(self, state: State) -> None:
        """Restore what `exact_state` returned, in place of all that there was."""
        tensors, facts = state
        for row in self.rows:
            row.held = []
        self.load_state(state)
        for row in self.rows:
            for name in _MEMBERSHIP:
                setattr(row, name, facts[name][row.number])
            row.seen = tensors.get(f"read.{row.number}")
        self.final = None if facts["final"] is None else self.rows[facts["final"]]
        self.asking = [self.rows[number] for number in facts["asking"]]
        self.done, self.ejected, self.not_finite = facts["done"], facts["ejected"], facts["screened"]

    def _held(self) -> Iterator[Contribution]:
        return (entry for row in self.rows for entry in row.held)

    def _is_counted(self, entry: Contribution) -> bool:
        return entry.step < self.rows[entry.pusher].steps

    def _packed(self, held: Iterator[Contribution] | tuple[()]) -> State:
        kept = list(held)
        tensors = {f"held.{number}": entry.gradient for number, entry in enumerate(kept)}
        tensors |= {
            f"seen.{number}": entry.seen for number, entry in enumerate(kept) if entry.seen is not None
        }
        facts: dict[str, Any] = {
            "steps": [row.steps for row in self.rows],
            "held": [
                [entry.pusher, *entry[2:7]] for entry in kept
            ],  # version, step, weight, learning rate, fresh
            "left_out": {
                str(row.number): [list(each) for each in row.left_out] for row in self.rows if row.left_out
            },
        }
        return tensors, facts
