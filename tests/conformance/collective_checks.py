"""What every communicator's collectives and shared vectors do: checks that each of three ranks runs."""

from __future__ import annotations

import torch
from torch import nn

from conformance.three_ranks import SIZE, Check, others, payload
from polyrhythm.communication.communicator import Communicator, NoSharedMemory
from polyrhythm.communication.message import Kind, Message


def all_reduce_adds_whole_numbers_exactly(communicator: Communicator) -> None:
    """Against the closed form, for sizes around the number of ranks and for more than one dimension."""
    for dtype in (torch.float32, torch.float64):
        for shape in ((0,), (1,), (2,), (3,), (4,), (1000,), (3, 5)):
            ramp = torch.arange(torch.Size(shape).numel(), dtype=dtype).view(shape)
            tensor = ramp * (communicator.rank + 1) - communicator.rank
            communicator.all_reduce(tensor)
            assert torch.equal(tensor, ramp * 6 - 3)
            assert tensor.dtype is dtype


def all_reduce_gives_the_same_bits_everywhere(communicator: Communicator) -> None:
    """Random floats, whose sum depends on the order of adding."""
    generator = torch.Generator().manual_seed(100 + communicator.rank)
    tensor = torch.randn(10_007, generator=generator) * 10 ** torch.randn(10_007, generator=generator)
    communicator.all_reduce(tensor)
    for to in others(communicator):
        communicator.send(to, Message(Kind.VECTOR, tensor))
    for source in others(communicator):
        assert torch.equal(payload(communicator.receive(source)[1]), tensor)


def all_reduces_overlap(communicator: Communicator) -> None:
    """Two are under way at once, with messages in between, and are waited for in the other order."""
    first, second = torch.full((50_000,), float(communicator.rank)), torch.ones(7, dtype=torch.float64)
    handles = [communicator.start_all_reduce(first), communicator.start_all_reduce(second)]
    communicator.send((communicator.rank + 1) % SIZE, Message(Kind.PUSH, version=9))
    assert communicator.receive()[1].version == 9
    for handle in reversed(handles):
        handle.wait()
        assert handle.done()
    assert torch.equal(first, torch.full((50_000,), 3.0))
    assert second.tolist() == [3.0] * 7


def collectives_leave_messages_alone(communicator: Communicator) -> None:
    """Whatever tag a message has, only `receive` takes it."""
    after, before = (communicator.rank + 1) % SIZE, (communicator.rank - 1) % SIZE
    for tag in range(1, 6):
        communicator.send(after, Message(Kind.PUSH, torch.full((1,), -1.0), version=tag, tag=tag))
    total = torch.ones(3)
    communicator.all_reduce(total)
    communicator.broadcast(total, root=1)
    communicator.barrier()
    assert total.tolist() == [3.0] * 3
    assert [communicator.receive(before, tag)[1].version for tag in range(1, 6)] == [1, 2, 3, 4, 5]


def broadcast_takes_the_roots(communicator: Communicator) -> None:
    """From each root: a matrix, a single whole number, and a parameter that is being trained."""
    for root in range(SIZE):
        matrix = torch.arange(6.0).view(2, 3) + 10 * communicator.rank
        communicator.broadcast(matrix, root)
        assert torch.equal(matrix, torch.arange(6.0).view(2, 3) + 10 * root)
        count = torch.tensor(communicator.rank)
        communicator.broadcast(count, root)
        assert count.item() == root
        parameter = nn.Parameter(torch.full((4,), float(communicator.rank)))
        communicator.broadcast(parameter, root)
        assert parameter.tolist() == [root] * 4
        assert parameter.requires_grad


def nobody_passes_a_barrier_alone(communicator: Communicator) -> None:
    """Rank 1 says when it has passed; rank 0 has not heard of it before it comes itself."""
    if communicator.rank == 0:
        for _ in range(20):  # long enough for a barrier that does not wait to give itself away
            assert communicator.poll(1) is None
            communicator.clock.sleep(1e-3)
    communicator.barrier()
    if communicator.rank == 1:
        communicator.send(0, Message(Kind.PUSH))
    if communicator.rank == 0:
        assert communicator.receive(1)[0] == 1


def a_shared_vector_is_the_same_memory(communicator: Communicator) -> None:
    """What one rank writes all others read, of every dtype, and a second vector is another; or rank 0 refuses."""
    refused = torch.zeros(SIZE)
    try:
        communicator.shared_vector("vector", torch.ones(3))
    except NoSharedMemory:
        refused[communicator.rank] = 1
    communicator.all_reduce(refused)
    if refused.any():
        assert refused[0] == 1
        return
    for number, dtype in enumerate((torch.float32, torch.float64, torch.bfloat16, torch.int64)):
        like = torch.full((2 * SIZE,), communicator.rank + 7, dtype=dtype)
        vector = communicator.shared_vector(f"vector {number}", like)
        other = communicator.shared_vector(f"other {number}", like[:1])
        assert (vector.shape, vector.dtype, other.shape) == (like.shape, dtype, (1,))
        communicator.barrier()
        vector[2 * communicator.rank] = communicator.rank + 1
        communicator.barrier()
        assert vector.tolist() == [1, 7, 2, 7, 3, 7]
        assert other.tolist() == [7]


def a_vector_to_sum_is_like_any_other(communicator: Communicator) -> None:
    """Sums of it, and of slices of it, have the bits of those of a vector that lies anywhere; or no rank has one."""
    generator = torch.Generator().manual_seed(communicator.rank)
    for number, dtype in enumerate((torch.float32, torch.float64)):
        values = torch.randn(700_001, generator=generator, dtype=dtype)
        vector = communicator.vector_to_sum(f"vector {number}", values)
        missing = torch.tensor([0.0 if vector is not None else 1.0])
        communicator.all_reduce(missing)
        assert missing.item() in (0, SIZE)
        if vector is None:
            continue
        assert (vector.shape, vector.dtype) == (values.shape, dtype)
        assert not vector.any()
        vector.copy_(values)
        handle = communicator.start_all_reduce(vector[400_001:])
        communicator.all_reduce(vector[:400_001])
        handle.wait()
        communicator.all_reduce(values)
        assert torch.equal(vector, values)


CHECKS: tuple[Check, ...] = (
    all_reduce_adds_whole_numbers_exactly,
    all_reduce_gives_the_same_bits_everywhere,
    all_reduces_overlap,
    collectives_leave_messages_alone,
    broadcast_takes_the_roots,
    nobody_passes_a_barrier_alone,
    a_shared_vector_is_the_same_memory,
    a_vector_to_sum_is_like_any_other,
)
