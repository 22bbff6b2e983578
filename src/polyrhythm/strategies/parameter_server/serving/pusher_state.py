"""What a server knows of each pusher: gradients that are held, steps that are over, and what it has read.

`HeldGradients` has the gradients that wait for the gate's decision, and up to which step they need not come again.
`LeftOut` has the steps of which no gradient was applied: late ones that were dropped, and those that were left out to
catch up. `Readings` has the version that each pusher has read last.

A checkpoint's state leaves out what a resumed run finds out anew: who is there, who waits, what has been read. A copy
on another server, made in the middle of a run, must have that as well: the exact state. `exact_facts` are all the
numbers that an object counts and lists, JSON-able, for a copy that must go on as the object itself would.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from polyrhythm.strategies.parameter_server.serving.rule import Contribution


class HeldGradients:
    """The gradients that one server holds. Pushers are numbered from 0.

    Args:
        pushers: how many there are.

    Attributes:
        steps: for each pusher, how many of its gradients need not be pushed again: applied, held for good, or over.
        left_out: which of these were not applied.
    """

    def __init__(self, pushers: int) -> None:
        self.steps = [0] * pushers
        self.left_out = LeftOut()
        self._entries: dict[int, list[Contribution]] = {}

    def hold(self, entry: Contribution) -> None:
        """Hold a gradient, which may still have to come again."""
        self._entries.setdefault(entry.pusher, []).append(entry)

    def take(self, pusher: int) -> Contribution:
        """Return the oldest gradient that is held of a pusher, and hold it no more."""
        return self._entries[pusher].pop(0)

    def discard(self, pusher: int) -> None:
        """Hold nothing of a pusher any more."""
        self._entries.pop(pusher, None)

    def of(self, pusher: int) -> Sequence[Contribution]:
        """Return all that is held of a pusher."""
        return self._entries.get(pusher, ())

    def count(self, entries: Iterable[Contribution]) -> None:
        """Count steps that must not come again."""
        for entry in entries:
            self.steps[entry.pusher] = max(self.steps[entry.pusher], entry.step + 1)

    def settle(self, pusher: int, step: int | None) -> None:
        """Take note that a pusher is answered: neither what is held of it comes again, nor a step before `step`."""
        self.count(self.of(pusher))
        self.left_out.add(pusher, self.steps[pusher], step or 0)
        self.steps[pusher] = max(self.steps[pusher], step or 0)

    def state(self, *, comes_again: bool = False) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return what a resumed server needs: the gradients that will not come again, and what each was made from.

        Args:
            comes_again: whether everything comes again that is held.
        """
        everything = [] if comes_again else self._everything()
        return self._packed([entry for entry in everything if entry.step < self.steps[entry.pusher]])

    def _everything(self) -> list[Contribution]:
        return [entry for pusher in sorted(self._entries) for entry in self._entries[pusher]]

    def _packed(self, kept: Sequence[Contribution]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {f"held.{number}": entry.gradient for number, entry in enumerate(kept)}
        tensors |= {
            f"seen.{number}": entry.seen for number, entry in enumerate(kept) if entry.seen is not None
        }
        held = [[entry.pusher, *entry[2:6]] for entry in kept]  # version, step, weight, learning rate
        return tensors, {"steps": list(self.steps), "held": held, "left_out": self.left_out.state()}

    def exact_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return all, also the gradients that a resumed pusher would push again."""
        return self._packed(self._everything())

    def load_state(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Restore what `state` or `exact_state` returned."""
        self.steps = list(facts["steps"])
        self.left_out.load_state(facts.get("left_out", {}))
        for number, (pusher, read_version, step, weight, rate) in enumerate(facts.get("held", ())):
            gradient, seen = tensors[f"held.{number}"], tensors.get(f"seen.{number}")
            self.hold(Contribution(pusher, gradient, read_version, step, weight, rate, seen=seen))


Stretch = list[int]
"""A first step, and the one after the last."""


class LeftOut:
    """The steps of which one server has applied no gradient.

    Attributes:
        by_pusher: for each pusher's number that left any out, stretches of steps, in order and apart.
    """

    def __init__(self) -> None:
        self.by_pusher: dict[int, list[Stretch]] = {}

    def add(self, pusher: int, start: int, stop: int) -> None:
        """Add the steps `[start, stop)` of a pusher, which come after all that were added before."""
        if start >= stop:
            return
        stretches = self.by_pusher.setdefault(pusher, [])
        if stretches and stretches[-1][1] == start:
            stretches[-1][1] = stop
        else:
            stretches.append([start, stop])

    def state(self) -> dict[str, Any]:
        """Return what a resumed server needs, JSON-able."""
        return {str(pusher): [list(stretch) for stretch in found] for pusher, found in self.by_pusher.items()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self.by_pusher = {
            int(pusher): [list(stretch) for stretch in found] for pusher, found in state.items()
        }


class Readings:
    """The version that each pusher of one server has read last. Pushers are numbered from 0.

    Args:
        pushers: how many there are.
        remembers: whether what was read is kept, and not its version alone.

    Attributes:
        versions: that pushers have read, and since then one more for each gradient of their own that was applied.
        values: each `(n,)`, where they are kept.
    """

    def __init__(self, pushers: int, *, remembers: bool) -> None:
        self.versions = [0] * pushers
        self.values: list[Tensor | None] = [None] * pushers
        self._remembers = remembers

    def note(self, pusher: int, version: int, values: Tensor) -> None:
        """Take note that a pusher is answered with these parameters, which must not change."""
        self.versions[pusher] = version
        if self._remembers:
            self.values[pusher] = values

    def count(self, applied: Sequence[Contribution]) -> None:
        """Count an update that was made of these gradients."""
        for entry in applied:
            self.versions[entry.pusher] += entry.weight > 0

    def exact_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return all that has been read; a checkpoint does without, since resumed pushers read anew."""
        read = {f"read.{pusher}": values for pusher, values in enumerate(self.values) if values is not None}
        return read, {"versions": list(self.versions)}

    def load_exact_state(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Restore what `exact_state` returned."""
        self.versions = list(facts["versions"])
        self.values = [tensors.get(f"read.{pusher}") for pusher in range(len(self.versions))]

    def forget(self, pusher: int) -> None:
        """Forget a pusher that is gone."""
        self.versions[pusher] = 0
        self.values[pusher] = None


def exact_facts(thing: object) -> dict[str, Any]:
    """Return all attributes of an object that are numbers, None, or lists and sets of numbers; others never change."""
    return {
        name: sorted(value) if isinstance(value, set) else _copied(value)
        for name, value in vars(thing).items()
        if value is None or isinstance(value, int | float | list | set)
    }


def take_exact_facts(thing: object, facts: dict[str, Any]) -> None:
    """Restore what `exact_facts` returned of an equal object."""
    for name, value in facts.items():
        setattr(thing, name, set(value) if isinstance(getattr(thing, name), set) else _copied(value))


def _copied(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value
