"""All that a server knows of its pushers."""

from __future__ import annotations

from polyrhythm.strategies.parameter_server.serving.exact_facts import exact_facts, take_exact_facts
from polyrhythm.strategies.parameter_server.serving.gate import Consistency, RoundGate
from polyrhythm.strategies.parameter_server.serving.held import Held
from polyrhythm.strategies.parameter_server.serving.losses import Losses
from polyrhythm.strategies.parameter_server.serving.not_finite import NotFinite
from polyrhythm.strategies.parameter_server.serving.presence import Presence
from polyrhythm.strategies.parameter_server.serving.readings import Readings
from polyrhythm.strategies.parameter_server.serving.shard import Handling
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
