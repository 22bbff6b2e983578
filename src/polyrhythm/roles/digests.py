"""Digests of the state that workers must hold bit for bit alike: a flipped bit is found, named and repaired.

    worker, every K steps            coordinator
      digests of its state, and      the digests of all members, of one step
      of the workers below it ─────▶
                                       all equal           nothing; with two members it has kept a copy of that state
      ◀─── the next view ──────────    a minority differs  the next view gives these members the state of another
                                       no majority         it returns to its latest copy that agreed, and the next view
                                                           gives that state to all others

Digests travel along a tree (`tree_of_members`). No worker waits for them: one that has taken its own looks after every
step for those of the workers below it. They are taken where members have equal bits: after a step, or after the mean of
a round, of the parameters and of the fields with the word `COMMON`. On hosts that may round differently (another
processor, another number of threads) members need not be equal: then nothing is compared.

    columns = the sums over the columns of a table of all 64-bit words, mod 2^64
    digest  = the columns, as one long number, mod 2^64 - 59, a prime;   of short states their CRC

A flipped bit changes one column by 2^k, mod 2^64, which is no multiple of that prime; neither is its product with the
weight 2^64c of the column. So each single flip changes the digest, and several do but for an accident: two opposite
flips of one bit, a multiple of 257 words apart, cancel out, as does an exchange of two values so far apart. A bit that
is flipped before a sum reaches all members alike, and changes no digest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyrhythm.roles.checkpointing.recording import processor
from polyrhythm.roles.control_messages import StateDigests
from polyrhythm.roles.tree_of_members import below, parent_of
from polyrhythm.roles.world import LEADER
from polyrhythm.strategies.state import COMMON, MEAN
from polyrhythm.strategies.worker_part import Logged
from polyrhythm.training.flat_optimizer import FlatOptimizer
from polyrhythm.training.flat_parameters import FlatParameters

if TYPE_CHECKING:
    from polyrhythm.roles.regroup import Regroup

_SHORT_BYTES = 1 << 16
_COLUMNS = 257  # an odd number: values that were moved by whole pages are in other columns
_ROW_BYTES = 8 * _COLUMNS
_PRIME = 2**64 - 59


def digest_of(tensors: Sequence[Tensor]) -> int:
    """Return a digest, below 2^64, of the bits of some tensors, in order; equal on all kinds of devices."""
    if sum([tensor.nbytes for tensor in tensors]) <= _SHORT_BYTES:
        checksum = 0
        for tensor in tensors:
            checksum = crc32(_bytes_of(tensor).data, checksum)
        return checksum
    columns = b"".join(part for tensor in tensors for part in _columns(tensor))
    return int.from_bytes(columns, "little") % _PRIME


def _columns(tensor: Tensor) -> Iterator[bytes]:
    """Return the sums of the columns of a tensor's words, computed on its device, and the words beyond the table."""
    whole = tensor.nbytes // _ROW_BYTES * _ROW_BYTES
    if tensor.is_cpu:
        raw = _bytes_of(tensor)
        yield np.add.reduce(raw[:whole].view(np.uint64).reshape(-1, _COLUMNS)).tobytes()
        last = raw[whole:].tobytes()
    else:
        there = tensor.detach().reshape(-1).view(torch.uint8)
        there = there if there.data_ptr() % 8 == 0 else there.clone()
        yield _bytes_of(there[:whole].view(torch.int64).view(-1, _COLUMNS).sum(0)).tobytes()
        last = _bytes_of(there[whole:]).tobytes()
    yield last.ljust(-(-len(last) // 8) * 8, b"\0")


def _bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """Return the bytes of a tensor, in memory of the host."""
    plain = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
    return plain.numpy(force=True).ravel().view(np.uint8)


def rounding(device: torch.device) -> int:
    """Return a hash of what the rounding of an update depends on: device, processor, threads, and version of torch."""
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    facts = f"{kind}, {processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    return crc32(facts.encode())


class DigestSender:
    """Sends the coordinator digests of a worker's state.

    Args:
        worker: index of the worker.
        part: worker part of the strategy.
        flat: parameters of the worker.
        every: number of steps between two digests.
        identical: whether the members are equal after every step; else after each mean of their models.
        regroup: regrouping of the worker, which keeps copies of the state where two members remain.
        report: function that sends a digest towards the coordinator.
    """

    def __init__(
        self,
        worker: int,
        part: Logged,
        flat: FlatParameters,
        every: int,
        *,
        identical: bool,
        regroup: Regroup,
        report: Callable[[StateDigests], None],
    ) -> None:
        self._worker = worker
        self._part, self._flat, self._every, self._identical = part, flat, every, identical
        self._regroup, self._report = regroup, report
        self._fields = [
            (field, attrgetter(field.attribute)) for field in part.fields if field.conversion == COMMON
        ]
        self._next = 0
        self._rounding = rounding(flat.vector.device)

    @staticmethod
    def applies(part: Logged, *, identical: bool) -> bool:
        """Return whether the members of a view hold equal bits at times."""
        averages = any(field.at == "_flat.vector" and field.conversion == MEAN for field in part.fields)
        return not part.exchanger.mixes and (identical or averages)

    def after_step(self, done: int) -> None:
        """Send a digest if one is due.

        Args:
            done: steps done by this worker.
        """
        if done < self._next:
            return
        if self._identical:
            self._part.settle()
        elif self._part.exchanger.since != done:
            return
        self._next = self._every * (done // self._every + 1)
        digest = digest_of([self._flat.vector, *self._common()])
        self._regroup.note_state(done)
        own = (digest, self._rounding, (self._worker,))
        self._report(StateDigests(self._regroup.number, done, (own,)))

    def _common(self) -> Iterator[Tensor]:
        """Return the tensors that all members hold alike, without the parameters."""
        for field, value_of in self._fields:
            value = value_of(self._part)
            state = (
                value.tensors() if isinstance(value, FlatOptimizer) else self._part.save_fields([field])[0]
            )
            for name in sorted(state):
                yield state[name]


@dataclass(frozen=True)
class Verdict:
    """Comparison of the digests of all members.

    Attributes:
        step: number of steps after which they were taken.
        since: number of steps after which the members were last equal; None: never before.
        differing: members with another digest than the majority; all members where there is none.
        majority: whether more than half of the members have the same digest.
    """

    step: int
    since: int | None
    differing: tuple[int, ...]
    majority: bool


class Gathering:
    """Gathers the digests of a member and of all below it in the tree of the members of a view.

    With another view all begin again, so what a failed member held is not missed.

    Args:
        worker: index of the member.

    Attributes:
        parent: member to which this one sends the digests that it has gathered; its own index for the first.
    """

    def __init__(self, worker: int) -> None:
        self.parent = worker
        self._worker = worker
        self._number = -1
        self._members: tuple[int, ...] = ()
        self._below: set[int] = set()
        self._after = -1
        self._digests: dict[int, dict[int, tuple[int, int]]] = {}

    @property
    def open(self) -> bool:
        """Whether this member has a digest of its own that the others' are missing for."""
        return any(self._worker in digests for digests in self._digests.values())

    def add(self, digests: StateDigests, number: int, members: tuple[int, ...]) -> StateDigests | None:
        """Record digests; return those of this member and all below it once the last has arrived, else None.

        Args:
            digests: the digests; those of another view are ignored.
            number: number of the current view.
            members: workers of the current view.
        """
        if (number, members) != (self._number, self._members):
            self._number, self._members, self._after, self._digests = number, members, -1, {}
            place = members.index(self._worker)
            self.parent = members[parent_of(place)]
            self._below = {members[each] for each in below(place, len(members))}
        if digests.number != number or digests.step <= self._after:
            return None
        gathered = self._digests.setdefault(digests.step, {})
        for digest, rounding, workers in digests.digests:
            gathered.update(dict.fromkeys(self._below.intersection(workers), (digest, rounding)))
        if len(gathered) < len(self._below):
            return None
        self._after = digests.step
        self._digests = {step: each for step, each in self._digests.items() if step > digests.step}
        return _grouped(number, digests.step, gathered)

    def incomplete(self) -> list[StateDigests]:
        """Return the digests of the steps for which some are missing."""
        return [_grouped(self._number, step, each) for step, each in sorted(self._digests.items())]


def _grouped(number: int, step: int, gathered: dict[int, tuple[int, int]]) -> StateDigests:
    workers: dict[tuple[int, int], list[int]] = {}
    for worker, found in sorted(gathered.items()):
        workers.setdefault(found, []).append(worker)
    return StateDigests(number, step, tuple((*found, tuple(those)) for found, those in workers.items()))


class DigestComparison:
    """Compares the digests of the members of a view, on the coordinator."""

    def __init__(self) -> None:
        self._agreed: int | None = None
        self._gathering = Gathering(LEADER)

    def add(self, digests: StateDigests, number: int, members: tuple[int, ...]) -> Verdict | None:
        """Record digests; return the verdict once those of all members are there, else None.

        Members that round differently need not be equal, and are not compared.

        Args:
            digests: the digests; those of another view are ignored.
            number: number of the current view.
            members: workers of the current view.
        """
        found = self._gathering.add(digests, number, members)
        if found is None or len({rounding for _, rounding, _ in found.digests}) > 1:
            return None
        usual = max(found.digests, key=lambda each: len(each[2]))
        majority = 2 * len(usual[2]) > len(members)
        differing = [
            worker for each in found.digests if not majority or each is not usual for worker in each[2]
        ]
        verdict = Verdict(found.step, self._agreed, tuple(sorted(differing)), majority)
        if not differing:
            self._agreed = found.step
        return verdict
