"""A vector that the ranks of one host share: the same memory in all their processes.

The memory is a file without a name, opened by the others through the first member's descriptor. Nobody locks it: what
one rank writes the others see, number by number, and who reads while another writes may see some of both.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
from collections.abc import Sequence

import torch
from torch import Tensor

from polyrhythm.communication.no_shared_memory import NoSharedMemory
from polyrhythm.communication.transports.shared_memory.arena import memory_file
from polyrhythm.communication.transports.shared_memory.meeting import Introduction, Round

_TOKEN_BYTES = 16


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
    descriptor, offer = _offer(like.nbytes) if member == 0 else (-1, {})
    try:
        offers = tell_all("vector", json.dumps(offer))
        mapped, reason = _accept(known[0].process, json.loads(offers[0]), like)
        reasons = tell_all("mapped vector", reason)
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    refused = [reason for reason in reasons if reason]
    if mapped is None or refused:
        raise NoSharedMemory(refused[0])
    return mapped


def _offer(nbytes: int) -> tuple[int, dict[str, str]]:
    try:
        descriptor = memory_file(nbytes + _TOKEN_BYTES)
    except OSError as error:
        return -1, {"reason": f"{nbytes >> 20} MiB cannot be had: {error.strerror or error}"}
    token = secrets.token_bytes(_TOKEN_BYTES)
    os.pwrite(descriptor, token, nbytes)
    return descriptor, {"descriptor": str(descriptor), "token": token.hex()}


def _accept(process: int, offer: dict[str, str], like: Tensor) -> tuple[Tensor | None, str]:
    """Gives the vector, or None and the reason."""
    if "reason" in offer:
        return None, offer["reason"]
    try:
        descriptor = os.open(f"/proc/{process}/fd/{offer['descriptor']}", os.O_RDWR)
        try:
            memory = mmap.mmap(descriptor, like.nbytes + _TOKEN_BYTES)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        return None, str(error)
    if memory[like.nbytes :].hex() != offer["token"]:
        return None, "the first rank's memory is not found under its process number"
    return torch.frombuffer(memory, dtype=like.dtype, count=like.numel()), ""
