"""What parts of a communicator, its background and its revocation do: checks that each of three ranks runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from conformance.three_ranks import SIZE, Check
from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.message import Kind, Message
from polyrhythm.communication.transports.member_collectives import CollectiveBroken


def a_subgroup_is_renumbered_and_apart(communicator: Communicator) -> None:
    """Ranks 2 and 0 become 0 and 1, with messages and collectives of their own."""
    if communicator.rank == 1:
        return
    group = communicator.subgroup("pair", [2, 0])
    assert (group.rank, group.size) == ({2: 0, 0: 1}[communicator.rank], 2)
    other_here, other_there = {2: 0, 0: 2}[communicator.rank], 1 - group.rank
    communicator.send(other_here, Message(Kind.VECTOR, version=1))
    group.send(other_there, Message(Kind.VECTOR, version=2))
    source, message = group.receive()
    assert (source, message.version) == (other_there, 2)
    assert group.poll() is None
    source, message = communicator.receive()
    assert (source, message.version) == (other_here, 1)
    total = torch.tensor([float(communicator.rank), 1.0])
    group.all_reduce(total)
    assert total.tolist() == [2.0, 2.0]
    chosen = torch.tensor([communicator.rank])
    group.broadcast(chosen, root=0)
    assert chosen.item() == 2


def a_group_of_one_needs_nobody(communicator: Communicator) -> None:
    """Collectives of one rank change nothing."""
    alone = communicator.subgroup("alone", [communicator.rank])
    tensor = torch.tensor([1.5, 2.5])
    alone.all_reduce(tensor)
    alone.start_all_reduce(tensor).wait()
    alone.broadcast(tensor)
    alone.barrier()
    assert (alone.rank, alone.size, tensor.tolist()) == (0, 1, [1.5, 2.5])


def background_work_gives_its_result_or_error(communicator: Communicator) -> None:
    """It communicates while the foreground does."""
    before, after = (communicator.rank - 1) % SIZE, (communicator.rank + 1) % SIZE
    handle = communicator.start(lambda: communicator.receive(before, tag=1)[1].version)
    failing = communicator.start(lambda: 1 // 0)
    assert not handle.done()
    communicator.barrier()
    communicator.send(after, Message(Kind.PUSH, version=2, tag=1))
    assert handle.wait() == 2
    assert handle.done()
    assert handle.wait() == 2
    with pytest.raises(ZeroDivisionError):
        failing.wait()


def background_works_do_not_wait_for_each_other(communicator: Communicator) -> None:
    """Forty receivers in the background are served in the reverse order of their start."""
    count = 40
    if communicator.rank == 0:
        works = [communicator.start(lambda tag=tag: communicator.receive(1, tag)) for tag in range(count)]
        for tag in reversed(range(count)):
            communicator.send(1, Message(Kind.PULL, tag=tag))
            assert works[tag].wait()[1].version == tag
    if communicator.rank == 1:
        for tag in reversed(range(count)):
            communicator.receive(0, tag)
            communicator.send(0, Message(Kind.PARAMETERS, version=tag, tag=tag))


def nobody_waits_on_what_is_revoked(communicator: Communicator) -> None:
    """Rank 1 gives up; the others wait for it or for each other, in collectives and for messages, and stop."""
    crew = communicator.subgroup("first crew", range(SIZE))
    part = crew.subgroup("part", range(SIZE))
    part.barrier()
    communicator.barrier()  # all have passed the first one
    if communicator.rank == 1:
        crew.revoke()
        waits: list[Callable[[], object]] = [part.barrier]
    else:
        waits = [
            lambda: part.start_all_reduce(torch.ones(9)).wait(),
            lambda: part.receive(2 - communicator.rank),
            lambda: crew.receive(1, tag=3),
        ]
    for wait in waits:
        with pytest.raises(CollectiveBroken):
            wait()
        crew.revoke()  # rank 0 tells rank 2
    total = torch.ones(9)
    communicator.subgroup("second crew", range(SIZE)).all_reduce(total)
    assert total.tolist() == [SIZE] * 9


CHECKS: tuple[Check, ...] = (
    a_subgroup_is_renumbered_and_apart,
    a_group_of_one_needs_nobody,
    background_work_gives_its_result_or_error,
    background_works_do_not_wait_for_each_other,
    nobody_waits_on_what_is_revoked,
)
