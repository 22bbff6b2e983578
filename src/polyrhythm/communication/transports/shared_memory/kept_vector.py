"""A vector of one host that outlives whoever made it: each process that has it keeps a way to it for who comes later.

    first     makes the memory, fills it, offers it
    others    open it through a descriptor of any process that has it, and offer it as well

The memory is a file without a name, so it is gone when the last process is that has it. Nobody locks it: what one rank
writes the others see, number by number, and who reads while another writes may see some of both.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from polyrhythm.communication.no_shared_memory import NoSharedMemory
from polyrhythm.communication.transports.shared_memory.arena import memory_file
from polyrhythm.communication.transports.shared_memory.meeting import Introduction

_TOKEN_BYTES = 16


@dataclass(frozen=True)
class Offer:
    """Where a vector's memory is found.

    Attributes:
        host: of the process that has it.
        process: its number.
        descriptor: of the memory, in that process.
        token: at the end of the memory: no other has it.
    """

    host: str
    process: int
    descriptor: int
    token: str

    def to_json(self) -> str:
        """Gives it as text."""
        return json.dumps(asdict(self))


class KeptVector:
    """One process's.

    Args:
        descriptor: of the memory; closed by `close`.
        memory: the vector, and its token.
        like: gives size and dtype.
        own: where this process is.

    Attributes:
        vector: as many numbers as `like` has.
        offer: by which others find it.
    """

    def __init__(self, descriptor: int, memory: mmap.mmap, like: Tensor, own: Introduction) -> None:
        self._descriptor = descriptor
        self.vector = torch.frombuffer(memory, dtype=like.dtype, count=like.numel())
        self.offer = Offer(own.host, own.process, descriptor, memory[like.nbytes :].hex())

    @classmethod
    def made_like(cls, like: Tensor, own: Introduction) -> KeptVector:
        """Makes a vector of zeros.

        Args:
            like: gives size and dtype.
            own: where this process is.

        Raises:
            NoSharedMemory: it cannot be had.
        """
        nbytes = like.nbytes + _TOKEN_BYTES
        try:
            descriptor = memory_file(nbytes)
        except OSError as error:
            raise NoSharedMemory(f"{nbytes >> 20} MiB cannot be had: {error.strerror or error}") from None
        os.pwrite(descriptor, secrets.token_bytes(_TOKEN_BYTES), like.nbytes)
        return cls(descriptor, mmap.mmap(descriptor, nbytes), like, own)

    @classmethod
    def found(cls, offer: str, like: Tensor, own: Introduction) -> KeptVector | None:
        """Finds the vector; gives None where the process that has offered it is gone.

        Args:
            offer: as JSON.
            like: gives size and dtype.
            own: where this process is.

        Raises:
            NoSharedMemory: it is on another host, or may not be opened.
        """
        told = Offer(**json.loads(offer))
        if told.host != own.host:
            raise NoSharedMemory("they are on several hosts, or hidden from each other")
        try:
            descriptor = os.open(f"/proc/{told.process}/fd/{told.descriptor}", os.O_RDWR)
        except (FileNotFoundError, ProcessLookupError):
            return None
        except OSError as error:
            raise NoSharedMemory(str(error)) from None
        try:
            memory = mmap.mmap(descriptor, like.nbytes + _TOKEN_BYTES)
        except (OSError, ValueError):  # a file of another process, which has that one's number now
            os.close(descriptor)
            return None
        if memory[like.nbytes :].hex() != told.token:
            os.close(descriptor)
            return None
        return cls(descriptor, memory, like, own)

    def close(self) -> None:
        """Lets nobody find it through this process any more; the vector stays for as long as it is used."""
        os.close(self._descriptor)
