"""Vectors that the ranks of one host share: the same memory in all their processes.

A vector outlives the process that made it: each process that has it keeps a descriptor of it for later ones.

    first     makes the memory, fills it, offers it
    others    open it through a descriptor of any process that has it, and offer it as well

The memory is a file without a name, so it is gone with the last process that has it. It is not locked: writes
of one rank are visible to the others, number by number, and a rank that reads while another writes may see
some of both.

`share_vector` sets one up for members that start together: where one of them cannot have it, none has. Later
ranks find one by the store (`KeptVectors`):

    first member      has/0: offer ──▶ waits until all present members have confirmed that they have it
    other members     look at has/0, has/1, … until one leads to the memory ──▶ has/<rank>: offer, or why not
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from polyrhythm.communication.communicator import NoSharedMemory
from polyrhythm.communication.transports.shared_memory.exchange import memory_file
from polyrhythm.communication.transports.shared_memory.meeting import Introduction, Round
from polyrhythm.communication.transports.torch_distributed.rendezvous import Rendezvous
from polyrhythm.errors import PeerLost

_TOKEN_BYTES = 16


@dataclass(frozen=True)
class Offer:
    """Address of a vector's memory.

    Attributes:
        host: host of the process that has it.
        process: number of the process.
        descriptor: file descriptor of the memory, in that process.
        token: token at the end of the memory: no other has it.
    """

    host: str
    process: int
    descriptor: int
    token: str


class KeptVector:
    """One process's.

    Args:
        descriptor: file descriptor of the memory; closed by `close`.
        memory: the vector, and its token.
        like: tensor with the size and dtype.

    Attributes:
        vector: vector, of the length of `like`.
        offer: offer by which others find it: an `Offer` as JSON.
    """

    def __init__(self, descriptor: int, memory: mmap.mmap, like: Tensor, own: Introduction) -> None:
        self._descriptor = descriptor
        self.vector = torch.frombuffer(memory, dtype=like.dtype, count=like.numel())
        offer = Offer(own.host, own.process, descriptor, memory[like.nbytes :].hex())
        self.offer = json.dumps(asdict(offer))

    @classmethod
    def made_like(cls, like: Tensor, own: Introduction) -> KeptVector:
        """Make a vector of zeros.

        Args:
            like: tensor with the size and dtype.
            own: host and process of this member.

        Raises:
            NoSharedMemory: it cannot be allocated.
        """
        nbytes = like.nbytes + _TOKEN_BYTES
        try:
            descriptor = memory_file(nbytes)
        except OSError as error:
            raise NoSharedMemory(
                f"{nbytes >> 20} MiB cannot be allocated: {error.strerror or error}"
            ) from None
        os.pwrite(descriptor, secrets.token_bytes(_TOKEN_BYTES), like.nbytes)
        return cls(descriptor, mmap.mmap(descriptor, nbytes), like, own)

    @classmethod
    def found(cls, offer: str, like: Tensor, own: Introduction) -> KeptVector | None:
        """Find the vector; return None where the process that has offered it is gone.

        Args:
            offer: offer as JSON.
            like: tensor with the size and dtype.
            own: host and process of this member.

        Raises:
            NoSharedMemory: it is on another host, or may not be opened.
        """
        offered = Offer(**json.loads(offer))
        if offered.host != own.host:
            raise NoSharedMemory("they are on several hosts, or hidden from each other")
        try:
            descriptor = os.open(f"/proc/{offered.process}/fd/{offered.descriptor}", os.O_RDWR)
        except (FileNotFoundError, ProcessLookupError):
            return None
        except OSError as error:
            raise NoSharedMemory(str(error)) from None
        try:
            memory = mmap.mmap(descriptor, like.nbytes + _TOKEN_BYTES)
        except (OSError, ValueError):  # a file of another process, which has that one's number now
            os.close(descriptor)
            return None
        if memory[like.nbytes :].hex() != offered.token:
            os.close(descriptor)
            return None
        return cls(descriptor, memory, like, own)

    def close(self) -> None:
        """Stop offering it to other processes; the vector stays for as long as it is used."""
        os.close(self._descriptor)


def share_vector(member: int, introductions: Sequence[str], like: Tensor, exchange_texts: Round) -> Tensor:
    """Set up the memory of a vector; all members call it.

    Args:
        member: index of this member.
        introductions: introductions of all members, as JSON.
        like: tensor with the size and dtype; on the CPU.
        exchange_texts: a round of words.

    Returns:
        Zeros, as many as `like` has.

    Raises:
        NoSharedMemory: not available; raised on all members alike.
    """
    known = [Introduction(**json.loads(text)) for text in introductions]
    hosts = len({one.host for one in known})
    if hosts > 1:
        raise NoSharedMemory(f"they are on {hosts} hosts, or hidden from each other")
    kept, reason = _offered(like, known[0]) if member == 0 else (None, "")
    try:
        offer = exchange_texts("vector", "" if kept is None else kept.offer)[0]
        if kept is None and offer:
            kept, reason = _accepted(offer, like, known[member])
        reasons = exchange_texts("mapped vector", reason)
    finally:
        if kept is not None:
            kept.close()
    refused = [reason for reason in reasons if reason]
    if kept is None or refused:
        raise NoSharedMemory(refused[0])
    return kept.vector


def _offered(like: Tensor, own: Introduction) -> tuple[KeptVector | None, str]:
    """Return the vector, or None and the reason."""
    try:
        return KeptVector.made_like(like, own), ""
    except NoSharedMemory as error:
        return None, error.reason


def _accepted(offer: str, like: Tensor, own: Introduction) -> tuple[KeptVector | None, str]:
    """Return the vector, or None and the reason."""
    try:
        found = KeptVector.found(offer, like, own)
    except NoSharedMemory as error:
        return None, error.reason
    return found, "" if found is not None else "the first rank's memory is not found under its process number"


_FIRST_INTERVAL_S, _INTERVAL_S = 0.0005, 0.02
_REFUSAL = "refusal"


class KeptVectors:
    """One rank's.

    Args:
        is_lost: returns whether a rank is known to be gone, without a replacement.
        losses: returns the number of a rank's processes that are known to be gone.
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
        """Return a vector that some ranks share; see `Communicator.shared_vector`.

        Args:
            name: identifier among all vectors of the run.
            members: global ranks of the members.
            like: tensor with the size and dtype, and on the first member the numbers to begin with.
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
        store.set(_key(name, own), kept.offer)
        if own == members[0] and not later:
            self._wait_for_others(name, members[1:])
        return kept.vector

    def close(self) -> None:
        """Stop offering them to other processes."""
        while self._kept:
            self._kept.pop().close()

    def _find(self, name: str, members: Sequence[int], like: Tensor, *, later: bool) -> KeptVector:
        """Look for a member that has it, until the first one would be the only one to make it, and is lost."""
        own, first, pause_s = self._rendezvous.rank, members[0], _FIRST_INTERVAL_S
        while True:
            lost = self._is_lost(first)  # before the others are queried, which may have it from that one
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
        """Wait until all that have been there from the start have found it.

        Raises:
            NoSharedMemory: one of them cannot.
        """
        pause_s = _FIRST_INTERVAL_S
        for other in others:
            while (word := self._word(name, other)) is None and not self._losses(other):
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _INTERVAL_S)
            if word is not None and _REFUSAL in (answer := json.loads(word)):
                raise NoSharedMemory(answer[_REFUSAL])

    def _word(self, name: str, member: int) -> str | None:
        store, key = self._rendezvous.store, _key(name, member)
        return store.get(key).decode() if store.check([key]) else None

    def _introduction(self) -> Introduction:
        return Introduction.own(self._rendezvous.address, self._shares_memory)


def _key(name: str, member: int) -> str:
    return f"{name}/has/{member}"
