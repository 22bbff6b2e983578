"""What one shard's servers of all sites tell each other, and what they know of each other's clocks.

    site ── ANNOUNCE(round) ─▶                                  all other sites, before a large packet
         ── DIFFERENCE(packet or nothing, round, the newest round of yours that I have) ─▶       every round
         ── LEAVE(packet, round, …) ─▶                                                    after its last
         ── ANNOUNCE(round, stop) ─▶                          that round will not come for now: all workers are lost

A packet is kept until all others have said that they have it, so that a checkpoint holds what is on its way. Rounds
that a resumed site makes again are not heard a second time.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from polyrhythm.communication.message import Kind, Message
from polyrhythm.strategies.state import State

_PACKET = "packet."


class Post:
    """One server's end.

    Args:
        peers: ranks of the same shard's servers at all other sites that have workers.

    Attributes:
        clock: rounds of this site so far.
    """

    def __init__(self, peers: tuple[int, ...]) -> None:
        self.clock = 0
        self._heard = dict.fromkeys(peers, 0)
        self._acknowledged = dict.fromkeys(peers, 0)
        self._gone: set[int] = set()
        self._asleep: set[int] = set()
        self._sleeps = False
        self._announced: dict[int, int] = {}
        self._kept: dict[int, Tensor] = {}

    @property
    def peers(self) -> tuple[int, ...]:
        """Ranks of the other sites' servers."""
        return tuple(self._heard)

    @property
    def slowest(self) -> int:
        """The least clock of the sites that are still training, as far as is known; this site's own if it is alone."""
        away = self._gone | self._asleep
        return min((clock for peer, clock in self._heard.items() if peer not in away), default=self.clock)

    @property
    def asleep(self) -> tuple[int, ...]:
        """Ranks of other sites' servers whose workers are lost, all of them, until they make another round."""
        return tuple(sorted(self._asleep - self._gone))

    def sleep(self) -> list[tuple[int, Message]]:
        """All workers of this site are lost; gives what tells the other sites not to wait for it."""
        if self._sleeps:
            return []
        self._sleeps = True
        return [(peer, Message(Kind.ANNOUNCE, version=self.clock + 1, stop=True)) for peer in self._heard]

    @property
    def awaits(self) -> bool:
        """Whether a packet has been announced that is still on its way."""
        return bool(self._announced)

    @property
    def all_gone(self) -> bool:
        """Whether all other sites have sent their last."""
        return len(self._gone) == len(self._heard)

    def tell(
        self, packet: Tensor | None, *, stop: bool, large: bool = False, last: bool = False
    ) -> list[tuple[int, Message]]:
        """Begins the next round with what is significant of it; gives the messages to all other sites.

        Args:
            packet: what to send, if anything is.
            stop: whether someone wants to stop.
            large: whether the packet is to be announced.
            last: whether this site's workers have left.
        """
        if self._sleeps:  # nobody waits for the rounds that it has not made
            self._sleeps = False
            self.clock = max(self.clock, self.slowest)
        self.clock += 1
        if packet is not None and self._heard:
            self._kept[self.clock] = packet
        kind = Kind.LEAVE if last else Kind.DIFFERENCE
        announcements = [(peer, Message(Kind.ANNOUNCE, version=self.clock)) for peer in self._heard if large]
        return announcements + [
            (peer, Message(kind, packet, version=self.clock, step=heard, stop=stop and not last))
            for peer, heard in self._heard.items()
        ]

    def tell_again(self) -> list[tuple[int, Message]]:
        """Gives what others may not have got before a checkpoint was made."""
        return [
            (peer, Message(Kind.DIFFERENCE, packet, version=number, step=heard))
            for peer, heard in self._heard.items()
            for number, packet in self._kept.items()
        ]

    def expect(self, peer: int, message: Message) -> None:
        """Takes another site's announcement."""
        if message.stop:
            self._asleep.add(peer)
        elif message.version > self._heard[peer]:
            self._announced[peer] = message.version

    def hear(self, peer: int, message: Message) -> Tensor | None:
        """Takes another site's message; gives its packet, if it has one that is new."""
        self._acknowledged[peer] = max(self._acknowledged[peer], message.step)
        known = min(self._acknowledged.values())
        self._kept = {number: packet for number, packet in self._kept.items() if number > known}
        if message.version >= self._announced.get(peer, 0):
            self._announced.pop(peer, None)
        if message.kind is Kind.LEAVE:
            self._gone.add(peer)
        if message.version <= self._heard[peer]:
            return None
        self._heard[peer] = message.version
        self._asleep.discard(peer)
        return message.tensor

    def state(self) -> State:
        """Gives clocks, and what is on its way."""
        facts = {"clock": self.clock, "heard": list(self._heard.values()), "kept": list(self._kept)}
        return {f"{_PACKET}{number}": packet for number, packet in self._kept.items()}, facts

    def load_state(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Takes back what `state` gave."""
        self.clock = facts["clock"]
        self._heard = dict(zip(self._heard, facts["heard"], strict=True))
        self._kept = {number: tensors[f"{_PACKET}{number}"] for number in facts["kept"]}
