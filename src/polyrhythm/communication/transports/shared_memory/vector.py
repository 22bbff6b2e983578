"""A vector that the ranks of one host share: the same memory in all their processes, of which all learn together.

Where one of them cannot have it, none has. `kept_vector.py` has the memory.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from torch import Tensor

from polyrhythm.communication.no_shared_memory import NoSharedMemory
from polyrhythm.communication.transports.shared_memory.kept_vector import KeptVector
from polyrhythm.communication.transports.shared_memory.meeting import Introduction, Round


def share_vector(member: int, introductions: Sequence[str], like: Tensor, tell_all: Round) -> Tensor:
    """Sets up the memory of a vector; all members call it.

    Args:
        member: this one.
        introductions: of all members, as JSON.
        like: gives size and dtype; on the CPU.
        tell_all: a round of words.

    Returns:
        Zeros, as many as `like` has.

    Raises:
        NoSharedMemory: on all members alike.
    """
    known = [Introduction(**json.loads(text)) for text in introductions]
    hosts = len({one.host for one in known})
    if hosts > 1:
        raise NoSharedMemory(f"they are on {hosts} hosts, or hidden from each other")
    kept, reason = _offered(like, known[0]) if member == 0 else (None, "")
    try:
        offer = tell_all("vector", "" if kept is None else kept.offer.to_json())[0]
        if kept is None and offer:
            kept, reason = _accepted(offer, like, known[member])
        reasons = tell_all("mapped vector", reason)
    finally:
        if kept is not None:
            kept.close()
    refused = [reason for reason in reasons if reason]
    if kept is None or refused:
        raise NoSharedMemory(refused[0])
    return kept.vector


def _offered(like: Tensor, own: Introduction) -> tuple[KeptVector | None, str]:
    """Gives the vector, or None and the reason."""
    try:
        return KeptVector.made_like(like, own), ""
    except NoSharedMemory as error:
        return None, error.reason


def _accepted(offer: str, like: Tensor, own: Introduction) -> tuple[KeptVector | None, str]:
    """Gives the vector, or None and the reason."""
    try:
        found = KeptVector.found(offer, like, own)
    except NoSharedMemory as error:
        return None, error.reason
    return found, "" if found is not None else "the first rank's memory is not found under its process number"
