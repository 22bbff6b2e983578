"""What every communicator does: checks that each of three ranks runs, over whatever transport.

A check gets a communicator of its own, so that no message of one check can reach another.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.message import Kind, Message
from polyrhythm.communication.no_shared_memory import NoSharedMemory
from polyrhythm.communication.transports.collective_broken import CollectiveBroken

SIZE = 3
WIRE_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int64,
    torch.int32,
)


def run(check: Callable[[Communicator], None], communicator: Communicator) -> None:
    """Runs a check in a message space of its own."""
    check(communicator.subgroup(check.__name__, range(communicator.size)))


def _others(communicator: Communicator) -> list[int]:
    return [rank for rank in range(communicator.size) if rank != communicator.rank]


def _payload(message: Message) -> Tensor:
    assert message.tensor is not None
    return message.tensor


def _poll_until_there(communicator: Communicator, source: int | None, tag: int = 0) -> tuple[int, Message]:
    while (found := communicator.poll(source, tag)) is None:
        communicator.clock.sleep(1e-3)  # in virtual time nothing moves while nobody waits
    return found


def numbered(communicator: Communicator) -> None:
    """Three ranks know who they are."""
    assert communicator.size == SIZE
    assert communicator.rank in range(SIZE)


def every_field_arrives_both_ways(communicator: Communicator) -> None:
    """What arrives is what was sent, between every two ranks."""
    rank = communicator.rank
    for to in _others(communicator):
        communicator.send(
            to,
            Message(
                Kind.PUSH,
                torch.arange(5, dtype=torch.float32) * 10 + rank,
                version=2**40 + rank,
                step=7 * rank - 1,
                weight=0.1 + rank,
                learning_rate=1e-3 / (rank + 1),
                stop=rank == 1,
                tag=2**32 - 1,
            ),
        )
    for source in reversed(_others(communicator)):
        sender, message = communicator.receive(source, tag=2**32 - 1)
        assert sender == source
        assert message.kind is Kind.PUSH
        assert _payload(message).tolist() == [source, 10 + source, 20 + source, 30 + source, 40 + source]
        assert (message.version, message.step) == (2**40 + source, 7 * source - 1)
        assert (message.weight, message.learning_rate) == (0.1 + source, 1e-3 / (source + 1))
        assert message.stop is (source == 1)
        assert message.tag == 2**32 - 1


def any_source_gives_everyone_once(communicator: Communicator) -> None:
    """A server takes whoever comes, and answers."""
    if communicator.rank == 0:
        seen = {}
        for _ in range(SIZE - 1):
            source, message = communicator.receive()
            seen[source] = message.version
            communicator.send(source, Message(Kind.PARAMETERS, version=100 + source))
        assert seen == {1: 1, 2: 2}
    else:
        communicator.send(0, Message(Kind.PULL, version=communicator.rank))
        source, answer = communicator.receive()
        assert (source, answer.version) == (0, 100 + communicator.rank)


def messages_of_one_source_keep_their_order(communicator: Communicator) -> None:
    """Fifty messages of mixed sizes, none waited for."""
    if communicator.rank == 1:
        handles = [
            communicator.start_send(0, Message(Kind.PUSH, torch.full((size % 7 * 100,), size), version=size))
            for size in range(50)
        ]
        for handle in handles:
            handle.wait()
    if communicator.rank == 0:
        received = [communicator.receive(1)[1] for _ in range(50)]
        assert [message.version for message in received] == list(range(50))
        assert all(torch.equal(_payload(m), torch.full((m.version % 7 * 100,), m.version)) for m in received)


def a_sent_tensor_may_change(communicator: Communicator) -> None:
    """After `send`, and after a handle is done, the buffer is the sender's again."""
    if communicator.rank == 0:
        buffer = torch.arange(200_000, dtype=torch.float64)
        communicator.send(1, Message(Kind.VECTOR, buffer))
        buffer.fill_(-1)
        handle = communicator.start_send(1, Message(Kind.VECTOR, buffer))
        handle.wait()
        buffer.fill_(-2)
    if communicator.rank == 1:
        assert torch.equal(_payload(communicator.receive(0)[1]), torch.arange(200_000, dtype=torch.float64))
        assert torch.equal(_payload(communicator.receive(0)[1]), torch.full((200_000,), -1.0).double())


def handles_of_sends_get_done(communicator: Communicator) -> None:
    """Sends to all others are under way at once; a handle may be waited for twice, or asked without waiting."""
    handles = [
        communicator.start_send(to, Message(Kind.VECTOR, torch.ones(1000))) for to in _others(communicator)
    ]
    for source in _others(communicator):
        assert communicator.receive(source)[0] == source
    while not handles[0].done():
        communicator.clock.sleep(1e-3)
    for handle in handles:
        handle.wait()
        assert handle.done()
        handle.wait()


def poll_gives_what_is_there(communicator: Communicator) -> None:
    """Nothing, as long as nothing was sent; then the message, once."""
    if communicator.rank == 0:
        assert communicator.poll() is None
        assert communicator.poll(1) is None
        for to in (1, 2):
            communicator.send(to, Message(Kind.PULL))
        sources = {_poll_until_there(communicator, None)[0] for _ in range(2)}
        assert sources == {1, 2}
        assert communicator.poll() is None
    else:
        _poll_until_there(communicator, 0)
        communicator.send(0, Message(Kind.PARAMETERS))


def tags_are_apart(communicator: Communicator) -> None:
    """A receiver with a tag leaves messages of other tags where they are."""
    if communicator.rank == 2:
        for tag in (5, 6, 5):
            communicator.send(0, Message(Kind.PUSH, torch.tensor([tag]), tag=tag))
        communicator.send(0, Message(Kind.PUSH, version=1))
    if communicator.rank == 0:
        assert communicator.receive(2)[1].version == 1  # the last one sent; so the others have arrived
        assert _payload(communicator.receive(2, tag=6)[1]).item() == 6
        assert communicator.poll(2, tag=6) is None
        assert _payload(communicator.receive(None, tag=5)[1]).item() == 5
        assert communicator.poll(1, tag=5) is None
        assert _payload(communicator.receive(2, tag=5)[1]).item() == 5
        assert communicator.poll(None, tag=5) is None


def five_megabytes_go_around(communicator: Communicator) -> None:
    """All send at once, nobody receives before all have started."""
    generator = torch.Generator().manual_seed(communicator.rank)
    mine = torch.randn(1_310_720, generator=generator)
    handle = communicator.start_send((communicator.rank + 1) % SIZE, Message(Kind.VECTOR, mine))
    before = (communicator.rank - 1) % SIZE
    _, message = communicator.receive(before)
    handle.wait()
    expected = torch.randn(1_310_720, generator=torch.Generator().manual_seed(before))
    assert torch.equal(_payload(message), expected)


def a_rank_may_send_to_itself(communicator: Communicator) -> None:
    """Its background work hears its foreground among the others, and answers."""
    own = communicator.rank

    def serve() -> int:
        heard = 0
        while (message := communicator.receive()[1]).kind is not Kind.LEAVE:
            heard += int(_payload(message).sum())
            communicator.send(own, Message(Kind.PARAMETERS, version=heard, tag=1))
        return heard

    serving = communicator.start(serve)
    for number in (3, 5):
        communicator.send(own, Message(Kind.PUSH, torch.full((30_000,), number)))
        source, answer = communicator.receive(own, tag=1)
        assert source == own
    assert answer.version == 8 * 30_000
    communicator.send(own, Message(Kind.LEAVE))
    assert serving.wait() == 8 * 30_000


def empty_is_not_none(communicator: Communicator) -> None:
    """A tensor without elements arrives with its dtype; no tensor arrives as None."""
    for to in _others(communicator):
        communicator.send(to, Message(Kind.VECTOR, torch.empty(0, dtype=torch.float64)))
        communicator.send(to, Message(Kind.VECTOR))
    for source in _others(communicator):
        tensor = _payload(communicator.receive(source)[1])
        assert (tensor.shape, tensor.dtype) == ((0,), torch.float64)
        assert communicator.receive(source)[1].tensor is None


def every_dtype_arrives(communicator: Communicator) -> None:
    """Each dtype of the wire, bit for bit."""
    if communicator.rank == 0:
        for dtype in WIRE_DTYPES:
            communicator.send(2, Message(Kind.VECTOR, torch.tensor([0, 1, 3, 127], dtype=dtype)))
    if communicator.rank == 2:
        for dtype in WIRE_DTYPES:
            tensor = _payload(communicator.receive(0)[1])
            assert tensor.dtype is dtype
            assert torch.equal(tensor, torch.tensor([0, 1, 3, 127], dtype=dtype))


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
    for to in _others(communicator):
        communicator.send(to, Message(Kind.VECTOR, tensor))
    for source in _others(communicator):
        assert torch.equal(_payload(communicator.receive(source)[1]), tensor)


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


def sent_bytes_are_counted(communicator: Communicator) -> None:
    """Header and payload of each message, in one count for all communicators of a rank."""
    if communicator.rank == 0:
        before = communicator.bytes_sent
        communicator.send(1, Message(Kind.VECTOR, torch.zeros(10, dtype=torch.float64)))
        communicator.subgroup("pair", [0, 1]).send(1, Message(Kind.PULL))
        assert communicator.bytes_sent - before == (64 + 80) + 64
    if communicator.rank == 1:
        communicator.receive(0)
        communicator.subgroup("pair", [0, 1]).receive(0)


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


def a_shared_vector_is_the_same_memory(communicator: Communicator) -> None:
    """What one rank writes all others read, of every dtype, and a second vector is another; or no rank has one."""
    refused = torch.zeros(1)
    try:
        communicator.shared_vector("vector", torch.ones(3))
    except NoSharedMemory:
        refused += 1
    communicator.all_reduce(refused)
    assert refused.item() in (0, SIZE)
    if refused.item():
        return
    for number, dtype in enumerate((torch.float32, torch.float64, torch.bfloat16, torch.int64)):
        like = torch.ones(2 * SIZE, dtype=dtype)
        vector = communicator.shared_vector(f"vector {number}", like)
        other = communicator.shared_vector(f"other {number}", like[:1])
        assert (vector.shape, vector.dtype, other.shape) == (like.shape, dtype, (1,))
        communicator.barrier()
        vector[2 * communicator.rank] = communicator.rank + 1
        communicator.barrier()
        assert vector.tolist() == [1, 0, 2, 0, 3, 0]
        assert other.tolist() == [0]


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


CHECKS: tuple[Callable[[Communicator], None], ...] = (
    numbered,
    every_field_arrives_both_ways,
    any_source_gives_everyone_once,
    messages_of_one_source_keep_their_order,
    a_sent_tensor_may_change,
    handles_of_sends_get_done,
    poll_gives_what_is_there,
    tags_are_apart,
    five_megabytes_go_around,
    a_rank_may_send_to_itself,
    empty_is_not_none,
    every_dtype_arrives,
    a_subgroup_is_renumbered_and_apart,
    a_group_of_one_needs_nobody,
    all_reduce_adds_whole_numbers_exactly,
    all_reduce_gives_the_same_bits_everywhere,
    all_reduces_overlap,
    collectives_leave_messages_alone,
    broadcast_takes_the_roots,
    nobody_passes_a_barrier_alone,
    background_work_gives_its_result_or_error,
    background_works_do_not_wait_for_each_other,
    sent_bytes_are_counted,
    nobody_waits_on_what_is_revoked,
    a_shared_vector_is_the_same_memory,
    a_vector_to_sum_is_like_any_other,
)
