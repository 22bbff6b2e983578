"""The real communicator.

Tensors of a GPU leave it through buffers of pinned host memory:

    GPU, computing   ──▓ gradients ──▓ rest of the backward pass …    neither the GPU nor this thread waits
    GPU, own stream        └▓ copy ▓┐
    background                      └▶ pinned buffer ─▶ link ─▶ server

A copy to pinned memory goes at the speed of the bus, next to the computation; one to ordinary memory goes
through a small pinned buffer of the driver's, in the stream that computes. Pinning takes long, so buffers are
used again, once what was in them has left. Messages leave in the order in which they were sent, so those without a
tensor of the GPU queue behind the copies.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from polyrhythm.communication.communicator import (
    Communicator,
    Handle,
    LentMemory,
    NoSharedMemory,
    Traffic,
)
from polyrhythm.communication.message import Kind, Message
from polyrhythm.communication.transports.inbox import Want
from polyrhythm.communication.transports.member_collectives import MemberCollectives, ranks_to_notify
from polyrhythm.communication.transports.membership import Peer
from polyrhythm.communication.transports.shared_memory.collectives import SharedMemoryCollectives
from polyrhythm.communication.transports.shared_memory.exchange import rows_memory_like, rows_of
from polyrhythm.communication.transports.torch_distributed.collectives import (
    CollectiveHandle,
    each_has_a_gpu,
)
from polyrhythm.communication.transports.torch_distributed.rank import FutureHandle, Rank
from polyrhythm.communication.transports.torch_distributed.rendezvous import Rendezvous, group_name
from polyrhythm.errors import PeerLost

Copy = Callable[[Tensor, Tensor], Callable[[], object]]
"""Starts to copy a tensor of a device, (n,), into one of the host; returns a function that waits for the copy."""


def own_stream_copy(device: torch.device) -> Copy:
    """Return a copy that runs concurrently with the GPU's computation."""
    stream: Any = torch.cuda.Stream(device)

    def copy(source: Tensor, target: Tensor) -> Callable[[], object]:
        # The stream that computes may not have made the source yet.
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        copied: Any = torch.cuda.Event(blocking=True)  # else waiting for it takes a core
        copied.record(stream)
        synchronize: Callable[[], object] = copied.synchronize
        return synchronize

    return copy


class _Departure(Handle):
    """A message that waits for its turn.

    Args:
        copied: function that waits until the tensor is copied.
        start: function that starts to send it.
        source: tensor to copy; referenced until it is copied, so that its memory is not reused.
    """

    def __init__(
        self, copied: Callable[[], object], start: Callable[[], Handle], source: Tensor | None = None
    ) -> None:
        self._work: tuple[Callable[[], object], Callable[[], Handle], Tensor | None] | None
        self._work = copied, start, source
        self._started = threading.Event()
        self._handle: Handle | None = None
        self._error: Exception | None = None

    def leave(self) -> None:
        """Start to send it; an error is kept for `wait`."""
        assert self._work is not None, "a message leaves once"
        copied, start, _ = self._work
        try:
            copied()
            self._handle = start()
        except Exception as error:
            self._error = error
        self._work = None
        self._started.set()

    def done(self) -> bool:
        return self._started.is_set() and (self._handle is None or self._handle.done())

    def wait(self) -> Any:
        self._started.wait()
        if self._error is not None:
            raise self._error
        assert self._handle is not None, "it has been started"
        return self._handle.wait()


@dataclass(eq=False)
class _Buffer:
    """Some bytes, and what must be over before they are used again."""

    memory: Tensor
    leaving: Handle | None = None
    taken: bool = True


class Staging:
    """Buffers that are made when they are needed, and the queue of the messages that leave through them.

    Args:
        copy: copies to the host.
        submit: runs a function in the background.
        pinned: whether buffers are page-locked; only where there is a GPU.
    """

    def __init__(self, copy: Copy, submit: Callable[[Callable[[], None]], object], *, pinned: bool) -> None:
        self._copy = copy
        self._submit = submit
        self._pinned = pinned
        self._buffers: list[_Buffer] = []
        self._waiting: deque[_Departure] = deque()
        self._lock = threading.Lock()

    @classmethod
    def of(cls, device: torch.device, submit: Callable[[Callable[[], None]], object]) -> Staging:
        """Make the buffers of a GPU."""
        return cls(own_stream_copy(device), submit, pinned=True)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.memory.nbytes for buffer in self._buffers)

    def send(self, tensor: Tensor, start: Callable[[Tensor], Handle]) -> Handle:
        """Start to copy a contiguous tensor, and to send the copy once it is complete.

        Args:
            tensor: tensor on the device; must not change until the handle is done.
            start: function that starts to send a tensor in host memory; the tensor is needed until the returned
                handle is done. Called in the background.
        """
        buffer = self._take(tensor.nbytes)
        try:
            staged = buffer.memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copied = self._copy(tensor, staged)
            buffer.leaving = self._queued(_Departure(copied, lambda: start(staged), tensor))
        finally:
            buffer.taken = False
        return buffer.leaving

    def send_after(self, start: Callable[[], Handle]) -> Handle:
        """Start to send what needs no copy, after all that was sent before it."""
        if not self._waiting:  # others of this thread have started
            return start()
        return self._queued(_Departure(lambda: None, start))

    def _queued(self, departure: _Departure) -> _Departure:
        with self._lock:
            self._waiting.append(departure)
            is_first = len(self._waiting) == 1
        if is_first:
            self._submit(self._leave)
        return departure

    def _leave(self) -> None:
        """Start to send what waits, until nothing does."""
        while True:
            self._waiting[0].leave()
            with self._lock:
                self._waiting.popleft()
                if not self._waiting:
                    return

    def _take(self, nbytes: int) -> _Buffer:
        with self._lock:
            free = [
                each
                for each in self._buffers
                if not each.taken and (each.leaving is None or each.leaving.done())
            ]
            fitting = [each for each in free if each.memory.nbytes >= nbytes]
            if fitting:
                found = min(fitting, key=lambda each: each.memory.nbytes)
                found.taken, found.leaving = True, None
                return found
            made = _Buffer(torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned))
            self._buffers = [each for each in self._buffers if each not in free]  # they were too small
            self._buffers.append(made)
            return made


class TorchDistributedCommunicator(Communicator):
    """One rank's end of a group of real ranks; see `Communicator`.

    Attributes:
        rank: own rank.
        size: number of ranks.
        clock: real time since this rank started.
        traffic: bytes sent by this rank.
    """

    def __init__(
        self,
        home: Rank,
        name: str,
        members: tuple[int, ...],
        inside: tuple[int, ...] | None = None,
        generations: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self._home = home
        self._name = name
        self._members = members
        self._context = crc32(f"{name}{members}".encode())
        home.make(self._context)
        self._lineage = () if inside is None else (*inside, self._context)  # all ranks' own cannot be revoked
        self._has_revoked = False
        self._generations = generations
        if generations:
            home.know_losses(self._context, generations)
        self._numbers = {member: number for number, member in enumerate(members)}
        self.rank = self._numbers[home.rendezvous.rank]
        self.size = len(members)
        self.clock = home.clock
        self.traffic: Traffic = home
        self._names = f"ranks {', '.join(map(str, members[:8]))}{' …' if len(members) > 8 else ''}"
        self._adding_up = f"adding up over {self._names}"
        self._making = threading.Lock()
        self._on_cpu: MemberCollectives | None = None
        self._nccl: Any = None
        self._on_gpus: bool | None = None
        self._staging: Staging | None = None

    def send(self, to: int, message: Message) -> None:
        self.start_send(to, message).wait()

    def start_send(self, to: int, message: Message) -> Handle:
        home, member = self._home, self._members[to]
        what = f"sending to rank {member}"
        with home.activity.doing(what):
            home.check(self._lineage)
            handle: Handle
            if message.tensor is None or not message.tensor.is_cuda:
                staging = self._staging
                if staging is None:
                    handle = home.start_send(member, message, self._context)
                else:
                    handle = staging.send_after(lambda: home.start_send(member, message, self._context))
            else:

                def start(staged: Tensor) -> Handle:
                    return home.start_send(member, message._replace(tensor=staged), self._context)

                handle = self._staging_of(message.tensor.device).send(message.tensor, start)
        return handle if handle.done() else home.activity.noted(handle, what)

    def receive(self, source: int | None = None, tag: int = 0) -> tuple[int, Message]:
        sender = "anyone" if source is None else f"rank {self._members[source]}"
        global_source, message = self._home.take(
            self._want(source, tag), f"waiting for a message from {sender}"
        )
        return self._numbers[global_source], message

    def receive_into(self, target: Tensor, source: int, tag: int = 0) -> Message:
        fits = target.dim() == 1 and target.is_contiguous() and target.device.type == "cpu"
        reason = f"waiting for a message from rank {self._members[source]}"
        return self._home.take(self._want(source, tag), reason, target if fits else None)[1]

    def poll(self, source: int | None = None, tag: int = 0) -> tuple[int, Message] | None:
        found = self._home.take_now(self._want(source, tag))
        return None if found is None else (self._numbers[found[0]], found[1])

    def start(self, work: Callable[[], Any]) -> Handle:
        """Run `work` on a thread of its own."""
        handle = FutureHandle(self._home.background.submit(work))
        return self._home.activity.noted(handle, "waiting for its own work in the background")

    def all_reduce(self, tensor: Tensor) -> None:
        if self.size == 1 or tensor.is_cuda:
            self.start_all_reduce(tensor).wait()
        else:
            self._home.bytes_sent += self._share_of(tensor)
            collectives = self._on_cpu or self.collectives()
            with self._home.activity.doing(self._adding_up):
                collectives.all_reduce(tensor)

    def start_all_reduce(self, tensor: Tensor) -> Handle:
        """Start to add up over all ranks: NCCL where every rank has a GPU, else by way of the CPU."""
        if self.size == 1:
            return CollectiveHandle(None)
        self._home.bytes_sent += self._share_of(tensor)
        handle: Handle
        if not tensor.is_cuda:
            handle = self.collectives().start_all_reduce(tensor)
        elif self._adds_up_on_gpus(tensor.device):
            handle = CollectiveHandle(self._nccl_group().allreduce([tensor]))
        else:
            copy = tensor.cpu()

            def bring_back() -> None:
                tensor.copy_(copy)

            handle = self.collectives().start_all_reduce(copy, bring_back)
        return self._home.activity.noted(handle, self._adding_up)

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        if self.size == 1:
            return
        if self.rank == root:
            self._home.bytes_sent += tensor.nbytes * (self.size - 1)
        copy = tensor.detach().cpu()
        with self._home.activity.doing(f"receiving what rank {self._members[root]} broadcasts"):
            self.collectives().broadcast(copy, root)
        if tensor.is_cuda:
            tensor.detach().copy_(copy)

    def barrier(self) -> None:
        if self.size > 1:
            with self._home.activity.doing(f"waiting for all of {self._names}"):
                self.collectives().barrier()

    def regrouped(
        self, name: str, ranks: Sequence[int], generations: Sequence[int]
    ) -> TorchDistributedCommunicator:
        known = {self._members[rank]: number for rank, number in zip(ranks, generations, strict=True)}
        for peer in known.items():
            if peer[0] != self._home.rendezvous.rank:
                self._home.greet(Peer(*peer))
        return self._subgroup(name, ranks, known)

    def revoke(self) -> None:
        if not self._has_revoked:
            self._has_revoked = True
            for to in ranks_to_notify(self.rank, self.size):
                with suppress(PeerLost):
                    self._home.start_send(self._members[to], Message(Kind.REVOKE), self._context)
        self.revoke_here()

    def revoke_here(self) -> None:
        self._home.revoke(self._context)

    def revoke_without(self, rank: int) -> None:
        member = self._members[rank]
        self._home.need(self._context, Peer(member, self._generations.get(member, 0)))

    def shared_vector(self, name: str, like: Tensor, *, later: bool = False) -> Tensor:
        if like.is_cuda:
            raise NoSharedMemory("their parameters are on a GPU")
        with self._home.activity.doing(f"waiting for memory that {self._names} share"):
            return self._home.vectors.get(self._vector_name(name), self._members, like, later=later)

    def vector_to_sum(self, name: str, like: Tensor) -> Tensor | None:
        """Make a vector that is added up where it lies, if all ranks share a host, and it is not small."""
        if self.size == 1 or like.is_cuda:
            return None
        collectives = self.collectives()
        if not isinstance(collectives, SharedMemoryCollectives) or not collectives.sums_in_place(like):
            return None
        try:
            whole = self._vector_name(f"to sum {name}")
            memory = self._home.collectives.vector_to_sum(
                whole, self._members, rows_memory_like(self.size, like)
            )
        except NoSharedMemory:
            return None
        return collectives.add_rows(rows_of(memory, self.size, like))

    def lent_memory(self) -> LentMemory | None:
        return self._home.lent

    def _vector_name(self, name: str) -> str:
        return group_name(f"{self._name}/vector {name}", self._members)

    def subgroup(self, name: str, ranks: Sequence[int]) -> TorchDistributedCommunicator:
        return self._subgroup(name, ranks, self._generations)

    def _subgroup(
        self, name: str, ranks: Sequence[int], generations: Mapping[int, int]
    ) -> TorchDistributedCommunicator:
        members = tuple(self._members[rank] for rank in ranks)
        return TorchDistributedCommunicator(
            self._home, f"{self._name}/{name}", members, self._lineage, generations
        )

    def _want(self, source: int | None, tag: int) -> Want:
        global_source = None if source is None else self._members[source]
        return Want(self._context, global_source, tag, self._members, self._lineage)

    def _share_of(self, tensor: Tensor) -> int:
        """Return the bytes that a rank sends in an all-reduce, by the formula of a ring."""
        return 2 * tensor.nbytes * (self.size - 1) // self.size

    def _staging_of(self, device: torch.device) -> Staging:
        with self._making:
            if self._staging is None:
                self._staging = Staging.of(device, self._home.background.submit)
            return self._staging

    def collectives(self) -> MemberCollectives:
        """Return the collectives on CPU memory, which all members create together at the first use."""
        if self._on_cpu is not None:
            return self._on_cpu
        # Once: a work in the background may ask at the same time.
        with self._home.activity.doing(f"meeting all of {self._names}"), self._making:
            if self._on_cpu is None:
                name = group_name(self._name, self._members)
                self._on_cpu = self._home.collectives.make(name, self._members, self._lineage)
            return self._on_cpu

    def _adds_up_on_gpus(self, device: torch.device) -> bool:
        """Return whether NCCL can be used; the others that have a GPU get the same answer, and CPUs do not ask."""
        if self._on_gpus is None:
            peers = [
                Peer(member, self._generations.get(member, self._home.generation(member)))
                for member in self._members
            ]
            self._home.computes_on(device)
            self._on_gpus = each_has_a_gpu(self._home.collectives.seats(peers, self._lineage))
        return self._on_gpus

    def _nccl_group(self) -> Any:
        if self._nccl is None:
            name = group_name(self._name, self._members)
            self._nccl = self._home.groups.nccl(name, self.rank, self.size)
        return self._nccl


def connect(rendezvous: Rendezvous, shared_memory: bool = True) -> tuple[Rank, TorchDistributedCommunicator]:
    """Join a run: return this rank, to be closed at the end, and its communicator over all ranks.

    Args:
        rendezvous: rendezvous with the others.
        shared_memory: whether ranks of one host may use it; see `Rank`.
    """
    home = Rank(rendezvous, shared_memory)
    return home, TorchDistributedCommunicator(home, "all", tuple(range(rendezvous.size)))
