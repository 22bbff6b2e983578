"""What a server knows of its pushers: the gate, who is there, gradients that are held, and what each has read.

`Held` has the gradients that wait for the gate's decision, and up to which step they need not come again.
`LeftOut` has the steps of which no gradient was applied: late ones that were dropped, and those that were
left out to catch up. `Readings` has the version that each pusher has read last.

A checkpoint's state leaves out what a resumed run finds out anew: who is there, who waits, what has been
read. A copy on another server, made in the middle of a run, must have that as well: the exact state.
`exact_facts` are all the numbers that an object counts and lists, JSON-able, for a copy that must go on as
the object itself would.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from polyrhythm.communication.message import Kind, Message
from polyrhythm.strategies.parameter_server.serving.admission import NotFinite, payload
from polyrhythm.strategies.parameter_server.serving.gate import Consistency, RoundGate
from polyrhythm.strategies.parameter_server.serving.membership import Losses, Presence
from polyrhythm.strategies.parameter_server.serving.shard import Handling, Pushed
from polyrhythm.strategies.state import State


class Books:
    """The gate of one server, with what it and the server know of each pusher.

    Args:
        pushers: ranks that push gradients, in the order in which gates number them.
        consistency: makes the gate.
        handling: of gradients.

    Attributes:
        gate: decides what to apply and whom to answer.
        presence: who is there.
        losses: who is lost, or was let go.
        not_finite: whose gradients were not finite.
        held: gradients that wait for the gate.
        readings: what each has read last.
    """

    def __init__(self, pushers: tuple[int, ...], consistency: Consistency, handling: Handling) -> None:
        count = len(pushers)
        self.gate = consistency.gate(count)
        self.presence = Presence(pushers)
        self.losses = Losses(*_spared(count, consistency, handling))
        self.not_finite = NotFinite(count, handling.eject_after, looks=not handling.finite)
        self.held = Held(count)
        self.readings = Readings(count, remembers=handling.merge.remembers)

    def exact_state(self) -> State:
        """Gives all that another server needs to go on with the books as this one would."""
        held, held_facts = self.held.exact_state()
        read, read_facts = self.readings.exact_state()
        counted = {name: exact_facts(book) for name, book in self._counting.items()}
        return held | read, counted | {"held": held_facts, "readings": read_facts}

    def load_exact_state(self, state: State) -> None:
        """Takes back what `exact_state` gave."""
        tensors, facts = state
        self.held.load_state(tensors, facts["held"])
        self.readings.load_exact_state(tensors, facts["readings"])
        for name, book in self._counting.items():
            take_exact_facts(book, facts[name])

    @property
    def _counting(self) -> dict[str, object]:
        rounds = {"rounds": self.gate.rounds} if isinstance(self.gate, RoundGate) else {}
        return rounds | {
            "gate": self.gate,
            "presence": self.presence,
            "losses": self.losses,
            "not_finite": self.not_finite,
        }


def _spared(pushers: int, consistency: Consistency, handling: Handling) -> tuple[int, str]:
    """Gives how many pushers may be lost at once, and what limits that."""
    spares, robust = consistency.spares(pushers), handling.aggregator.spares(pushers)
    in_step = consistency.in_step()
    return (robust, str(handling.aggregator)) if in_step and robust < spares else (spares, str(consistency))


class Held:
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
        self._entries: dict[int, list[Pushed]] = {}

    def hold(self, entry: Pushed) -> None:
        """Holds a gradient, which may still have to come again."""
        self._entries.setdefault(entry.pusher, []).append(entry)

    def take(self, pusher: int) -> Pushed:
        """Gives the oldest gradient that is held of a pusher, and holds it no more."""
        return self._entries[pusher].pop(0)

    def of(self, pusher: int) -> Sequence[Pushed]:
        """Gives all that is held of a pusher."""
        return self._entries.get(pusher, ())

    def count(self, entries: Iterable[Pushed]) -> None:
        """Counts steps that must not come again."""
        for entry in entries:
            self.steps[entry.pusher] = max(self.steps[entry.pusher], entry.message.step + 1)

    def settle(self, pusher: int, step: int | None) -> None:
        """A pusher is answered: what is held of it will not come again, nor steps before the one it goes on with."""
        self.count(self.of(pusher))
        self.left_out.add(pusher, self.steps[pusher], step or 0)
        self.steps[pusher] = max(self.steps[pusher], step or 0)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Gives what a resumed server needs: the gradients that will not come again, and what each was made from."""
        everything = self._everything()
        return self._packed([entry for entry in everything if entry.message.step < self.steps[entry.pusher]])

    def _everything(self) -> list[Pushed]:
        return [entry for pusher in sorted(self._entries) for entry in self._entries[pusher]]

    def _packed(self, kept: Sequence[Pushed]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {f"held.{number}": payload(entry.message) for number, entry in enumerate(kept)}
        tensors |= {
            f"seen.{number}": entry.seen for number, entry in enumerate(kept) if entry.seen is not None
        }
        held = [[entry.pusher, *entry.message[2:6]] for entry in kept]  # version, step, weight, learning rate
        return tensors, {"steps": list(self.steps), "held": held, "left_out": self.left_out.state()}

    def exact_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Gives all: also the gradients that a resumed pusher would push again."""
        return self._packed(self._everything())

    def load_state(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Takes back what `state` or `exact_state` gave."""
        self.steps = list(facts["steps"])
        self.left_out.load_state(facts.get("left_out", {}))
        for number, (pusher, *numbers) in enumerate(facts["held"]):
            message = Message(Kind.PUSH, tensors[f"held.{number}"], *numbers)
            self.hold(Pushed(pusher, message, tensors.get(f"seen.{number}")))


Stretch = list[int]
"""A first step, and the one after the last."""


class LeftOut:
    """One server's note.

    Attributes:
        by_pusher: for each pusher's number that left any out, stretches of steps, in order and apart.
    """

    def __init__(self) -> None:
        self.by_pusher: dict[int, list[Stretch]] = {}

    def add(self, pusher: int, start: int, stop: int) -> None:
        """Notes the steps `[start, stop)` of a pusher, which come after all that were noted before."""
        if start >= stop:
            return
        stretches = self.by_pusher.setdefault(pusher, [])
        if stretches and stretches[-1][1] == start:
            stretches[-1][1] = stop
        else:
            stretches.append([start, stop])

    def state(self) -> dict[str, Any]:
        """Gives what a resumed server needs, JSON-able."""
        return {str(pusher): [list(stretch) for stretch in found] for pusher, found in self.by_pusher.items()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes back what `state` gave."""
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
        """A pusher is answered with these parameters, which must not change."""
        self.versions[pusher] = version
        if self._remembers:
            self.values[pusher] = values

    def count(self, applied: Sequence[Pushed]) -> None:
        """An update has been made of these gradients."""
        for entry in applied:
            self.versions[entry.pusher] += entry.message.weight > 0

    def exact_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Gives all that has been read; a checkpoint does without, since resumed pushers read anew."""
        read = {f"read.{pusher}": values for pusher, values in enumerate(self.values) if values is not None}
        return read, {"versions": list(self.versions)}

    def load_exact_state(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Takes back what `exact_state` gave."""
        self.versions = list(facts["versions"])
        self.values = [tensors.get(f"read.{pusher}") for pusher in range(len(self.versions))]

    def forget(self, pusher: int) -> None:
        """A pusher is gone."""
        self.versions[pusher] = 0
        self.values[pusher] = None


def exact_facts(thing: object) -> dict[str, Any]:
    """Gives all attributes of an object that are numbers, None, or lists and sets of numbers; others never change."""
    return {
        name: sorted(value) if isinstance(value, set) else _copied(value)
        for name, value in vars(thing).items()
        if value is None or isinstance(value, int | float | list | set)
    }


def take_exact_facts(thing: object, facts: dict[str, Any]) -> None:
    """Puts back what `exact_facts` gave of an equal object."""
    for name, value in facts.items():
        setattr(thing, name, set(value) if isinstance(getattr(thing, name), set) else _copied(value))


def _copied(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value
