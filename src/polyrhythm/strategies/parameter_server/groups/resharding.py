"""Rounds inside groups, with another number of workers: all begin with what the servers have, in a round of theirs.

    servers     have the rounds that are over ─▶ stay, and count everybody's rounds anew
    members     what they did in a round under way is left out, and computed again; momenta become the mean of all

Everybody begins as if it had been in the middle of a round and had come no further than it had begun, since the step
that all begin with need not be the first of one.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from polyrhythm.strategies.parameter_server.serving.resharding import OfServers
from polyrhythm.strategies.resharding import Held, Merged, Resharding
from polyrhythm.strategies.state import State

_PART = "part."


class OfGroupsOfRounds:
    """See `Resharding`.

    Args:
        servers: of the servers, which count rounds.
        inside: of the strategy inside.
        steps: of a round.
    """

    def __init__(self, servers: OfServers, inside: Resharding, steps: int) -> None:
        self._servers = servers
        self._inside = inside
        self._steps = steps

    def counted(self, held: Held) -> list[int]:
        """Those of the rounds that servers have."""
        return [rounds * self._steps for rounds in self._servers.counted(held)]

    def merged(self, held: Held, workers: int, step: int) -> Merged:
        """Everybody gets the servers' parameters."""
        found = self._servers.merged(held, workers, step // self._steps)
        whole = torch.cat([tensors["values"] for tensors, _ in held.servers])
        bare = {index: _inner(state) for index, state in held.workers.items()}
        inside = self._inside.merged(replace(held, workers=bare), workers, step).held.workers
        begun = {"vector": whole, "read": whole}
        every = {
            worker: (
                {_PART + name: value for name, value in (tensors | {"vector": whole}).items()} | begun,
                {"part": facts | {"apart": False}, "apart": True},
            )
            for worker, (tensors, facts) in inside.items()
        }
        text = (
            f"{found.text}; momenta inside groups become the mean of all, and rounds under way are left out"
        )
        return Merged(replace(found.held, workers=every), text)


def _inner(state: State) -> State:
    tensors, facts = state
    named = {name.removeprefix(_PART): value for name, value in tensors.items() if name.startswith(_PART)}
    return named, facts["part"]
