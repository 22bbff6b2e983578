"""Servers that go on with another number of pushers: what they count of each begins anew, and all else stays.

applied ─▶ counts         held, or dropped with who was to push it ─▶ its images are dealt out again
optimiser, version, staleness ─▶ stay        clocks ─▶ all at the step that everybody begins with
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from polyrhythm.strategies.parameter_server.serving.gate import Consistency
from polyrhythm.strategies.resharding import Held, Merged
from polyrhythm.strategies.state import State

_HELD, _MERGER = ("held.", "seen."), "merge."


class OfServers:
    """See `Resharding`.

    Args:
        consistency: of the servers' gates.
        before: the indices of the workers whose mean each pusher pushed.
        after: how many pushers there are.
    """

    def __init__(self, consistency: Consistency, before: Sequence[tuple[int, ...]], after: int) -> None:
        self._consistency = consistency
        self._before = before
        self._after = after

    def counted(self, held: Held) -> list[int]:
        """Those whose gradients a server has applied, or that are over; on whichever server most are."""
        found = [0] * len(held.steps)
        for pusher, members in enumerate(self._before):
            applied = max(_applied(facts)[pusher] for _, facts in _serving(held))
            for worker in members:
                found[worker] = applied
        return found

    def merged(self, held: Held, workers: int, step: int) -> Merged:
        """Who was there keeps what servers know of it beside its steps; who is new begins with their parameters."""
        servers = [self._server(state, step) for state in held.servers]
        own = {index: state for index, state in held.workers.items() if index < workers}
        return Merged(replace(held, workers=own, servers=servers), self._text(held))

    def _server(self, state: State, step: int) -> State:
        tensors, facts = state
        if not facts:  # it holds nothing between steps
            return state
        kept = {name: value for name, value in tensors.items() if not self._is_gone(name)}
        return kept, facts | {
            "steps": [step] * self._after,
            "held": [],
            "left_out": {},
            "gate": self._consistency.all_at(self._after, step),
        }

    def _is_gone(self, name: str) -> bool:
        number = name.removeprefix(_MERGER)
        return name.startswith(_HELD) or (name != number and number.isdigit() and int(number) >= self._after)

    def _text(self, held: Held) -> str:
        serving = _serving(held)
        again = round(sum(len(facts["held"]) for _, facts in serving) / len(serving))
        columns = zip(*(_applied(facts) for _, facts in serving), strict=True)
        apart = sum(max(steps) - min(steps) for steps in columns)
        text = "the servers go on with their parameters and optimisers, and count everybody's steps anew"
        if again:
            text += f"; {again} gradients that they held, of no update yet, are left out and computed again"
        return text + (f"; {apart} gradients that not all servers had yet count as applied" if apart else "")


def _serving(held: Held) -> list[State]:
    return [state for state in held.servers if state[1]]


def _applied(facts: dict[str, Any]) -> list[int]:
    """Gives how many steps of each pusher are applied or over; what is held of one are its last."""
    found = list(facts["steps"])
    for pusher, *_ in facts["held"]:
        found[pusher] -= 1
    return found
