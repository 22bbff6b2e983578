"""The vectors that a rank shares with others of its host, and how those who come later find them.

first member      has/0: offer ──▶ waits until all who are there have said that they have it
other members     look at has/0, has/1, … until one leads to the memory ──▶ has/<rank>: offer, or why not
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from polyrhythm.communication.no_shared_memory import NoSharedMemory
from polyrhythm.communication.transports.shared_memory.kept_vector import KeptVector
from polyrhythm.communication.transports.shared_memory.meeting import Introduction
from polyrhythm.communication.transports.torch_distributed.rendezvous import Rendezvous
from polyrhythm.errors import PeerLost

_FIRST_INTERVAL_S, _INTERVAL_S = 0.0005, 0.02
_REFUSAL = "refusal"


class KeptVectors:
    """One rank's.

    Args:
        rendezvous: how to meet the others.
        shared_memory: whether to use it.
        is_lost: whether a rank is known to be gone, and no successor has come.
        losses: how many that had a rank's number are known to be gone.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        shared_memory: bool,
        is_lost: Callable[[int], bool],
        losses: Callable[[int], int],
    ) -> None:
        self._rendezvous = rendezvous
        self._shares_memory = shared_memory
        self._is_lost = is_lost
        self._losses = losses
        self._kept: list[KeptVector] = []

    def get(self, name: str, members: Sequence[int], like: Tensor, *, later: bool) -> Tensor:
        """Gives a vector that some ranks share; see `Communicator.shared_vector`.

        Args:
            name: tells it apart from all other vectors of the run.
            members: their global ranks.
            like: gives size and dtype, and on the first member the numbers to begin with.
            later: whether the others have it already.
        """
        own, store = self._rendezvous.rank, self._rendezvous.store
        try:
            if own == members[0] and not later:
                kept = KeptVector.made_like(like, self._introduction())
                kept.vector.copy_(like.detach())
            else:
                kept = self._find(name, members, like, later=later)
        except NoSharedMemory as error:
            store.set(_key(name, own), json.dumps({_REFUSAL: error.reason}))
            raise
        self._kept.append(kept)
        store.set(_key(name, own), kept.offer.to_json())
        if own == members[0] and not later:
            self._wait_for_others(name, members[1:])
        return kept.vector

    def close(self) -> None:
        """Lets nobody find them through this rank any more."""
        while self._kept:
            self._kept.pop().close()

    def _find(self, name: str, members: Sequence[int], like: Tensor, *, later: bool) -> KeptVector:
        """Looks for a member that has it, until the first one would be the only one to make it, and is lost."""
        own, first, pause_s = self._rendezvous.rank, members[0], _FIRST_INTERVAL_S
        while True:
            lost = self._is_lost(first)  # before the others are asked, who may have it from that one
            for member in members:
                word = self._word(name, member)
                if word is None or _REFUSAL in json.loads(word):
                    continue
                if (kept := KeptVector.found(word, like, self._introduction())) is not None:
                    return kept
            if lost or own == first:
                raise PeerLost(first, "looking for the vector that all workers share")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _INTERVAL_S)

    def _wait_for_others(self, name: str, others: Sequence[int]) -> None:
        """Waits until all who have been there all along have found it.

        Raises:
            NoSharedMemory: one of them cannot.
        """
        pause_s = _FIRST_INTERVAL_S
        for other in others:
            while (word := self._word(name, other)) is None and not self._losses(other):
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _INTERVAL_S)
            if word is not None and _REFUSAL in (told := json.loads(word)):
                raise NoSharedMemory(told[_REFUSAL])

    def _word(self, name: str, member: int) -> str | None:
        store, key = self._rendezvous.store, _key(name, member)
        return store.get(key).decode() if store.check([key]) else None

    def _introduction(self) -> Introduction:
        return Introduction.own(self._rendezvous.address, self._shares_memory)


def _key(name: str, member: int) -> str:
    return f"{name}/has/{member}"
