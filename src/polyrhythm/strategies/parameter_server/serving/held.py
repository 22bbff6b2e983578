"""Gradients that a server holds until its gate has decided about them, and of which steps they need not come again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from polyrhythm.communication.message import Kind, Message
from polyrhythm.strategies.parameter_server.serving.admission import payload
from polyrhythm.strategies.parameter_server.serving.left_out import LeftOut
from polyrhythm.strategies.parameter_server.serving.shard import Pushed


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
