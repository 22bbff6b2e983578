"""Who goes in step now, and what workers say of how far they have come.

Whoever has met the others waits for all of them at the next meeting, which is every step or seldom. So what a meeting
came to is held by somebody, who hands it on, or by nobody, and they meet again.

A leader dies like any other. What it knew of earlier formations travels in each, so that whoever took part in the
latest can tell its successor.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from polyrhythm.communication.message import Kind, Message, pack_json, unpack_json

TAG = 2
"""Nothing else that the leader sends a worker can be taken for a formation."""


@dataclass(frozen=True, order=True)
class Done:
    """How far a worker has come.

    Attributes:
        over: whether it has done all that there was to do.
        meetings: of all workers that it has been at; see `WorkerPart.meetings`.
        steps: that it has done.
    """

    over: bool = field(default=False, kw_only=True)
    meetings: int
    steps: int


NOTHING_DONE = -1
"""Steps of a worker that holds no parameters yet, and meetings."""
NOTHING = Done(NOTHING_DONE, NOTHING_DONE)


@dataclass(frozen=True, kw_only=True)
class Formation:
    """The workers that go in step from now on.

    Attributes:
        round: how many formations there have been before.
        workers: their indices among all workers of the run, in order; worker 0 leads.
        incarnations: how many have had each one's number before it.
        step: steps that the newest has done.
        newest: the worker that has come furthest, and hands on what it holds.
        behind: those who have not met the others so often.
        over: whether nothing is left to do but to leave.
        absences: since which step which workers have taken no part, oldest first, this formation's last.
        missed: after how many steps of the others which workers were missed, be they replaced or not.
    """

    round: int
    workers: tuple[int, ...]
    incarnations: tuple[int, ...] = ()
    step: int = 0
    newest: int = 0
    behind: tuple[int, ...] = ()
    over: bool = False
    absences: tuple[tuple[int, tuple[int, ...]], ...] = ((0, ()),)
    missed: tuple[tuple[int, int], ...] = ()

    @property
    def leader(self) -> int:
        """How many have led before the one that made it."""
        return self.incarnations[0] if self.incarnations else 0

    @property
    def name(self) -> str:
        """Names the communicator of those workers; two leaders may make formations of the same round."""
        return f"workers {self.round} of {self.leader}"

    def message(self) -> Message:
        """Packs it to be sent."""
        return Message(Kind.REGROUP, pack_json(asdict(self)), tag=TAG)

    @classmethod
    def of(cls, message: Message) -> Formation:
        """Reads what `message` wrote."""
        assert message.tensor is not None, "a formation travels as text"
        return cls.from_json(unpack_json(message.tensor))

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Formation:
        """Reads what is left of `asdict` in JSON."""
        plain = {name: tuple(told[name]) for name in ("workers", "incarnations", "behind")}
        absences = tuple((step, tuple(absent)) for step, absent in told["absences"])
        return cls(**told | plain | {"absences": absences, "missed": tuple(map(tuple, told["missed"]))})


@dataclass(frozen=True, kw_only=True)
class Broken:
    """A worker's word that a step cannot be finished.

    Attributes:
        round: of the formation that broke.
        done: how far the worker has come.
        incarnation: how many have had its number before it.
        formation: that broke, for a leader who has not made it.
    """

    round: int
    done: Done
    incarnation: int = 0
    formation: Formation | None = None

    def message(self) -> Message:
        """Packs it to be sent."""
        return Message(Kind.BROKEN, pack_json(asdict(self)))

    @classmethod
    def of(cls, message: Message) -> Broken:
        """Reads what `message` wrote."""
        assert message.tensor is not None, "a worker says how far it has come"
        told = unpack_json(message.tensor)
        formation = None if told["formation"] is None else Formation.from_json(told["formation"])
        return cls(**told | {"done": Done(**told["done"]), "formation": formation})
