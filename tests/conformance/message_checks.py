"""What every communicator does with messages: checks that each of three ranks runs."""

from __future__ import annotations

import torch

from conformance.three_ranks import SIZE, Check, others, payload
from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.message import Kind, Message

WIRE_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int64,
    torch.int32,
)


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
    for to in others(communicator):
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
    for source in reversed(others(communicator)):
        sender, message = communicator.receive(source, tag=2**32 - 1)
        assert sender == source
        assert message.kind is Kind.PUSH
        assert payload(message).tolist() == [source, 10 + source, 20 + source, 30 + source, 40 + source]
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
        assert all(torch.equal(payload(m), torch.full((m.version % 7 * 100,), m.version)) for m in received)


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
        assert torch.equal(payload(communicator.receive(0)[1]), torch.arange(200_000, dtype=torch.float64))
        assert torch.equal(payload(communicator.receive(0)[1]), torch.full((200_000,), -1.0).double())


def handles_of_sends_get_done(communicator: Communicator) -> None:
    """Sends to all others are under way at once; a handle may be waited for twice, or asked without waiting."""
    handles = [
        communicator.start_send(to, Message(Kind.VECTOR, torch.ones(1000))) for to in others(communicator)
    ]
    for source in others(communicator):
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
        assert payload(communicator.receive(2, tag=6)[1]).item() == 6
        assert communicator.poll(2, tag=6) is None
        assert payload(communicator.receive(None, tag=5)[1]).item() == 5
        assert communicator.poll(1, tag=5) is None
        assert payload(communicator.receive(2, tag=5)[1]).item() == 5
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
    assert torch.equal(payload(message), expected)


def a_rank_may_send_to_itself(communicator: Communicator) -> None:
    """Its background work hears its foreground among the others, and answers."""
    own = communicator.rank

    def serve() -> int:
        heard = 0
        while (message := communicator.receive()[1]).kind is not Kind.LEAVE:
            heard += int(payload(message).sum())
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
    for to in others(communicator):
        communicator.send(to, Message(Kind.VECTOR, torch.empty(0, dtype=torch.float64)))
        communicator.send(to, Message(Kind.VECTOR))
    for source in others(communicator):
        tensor = payload(communicator.receive(source)[1])
        assert (tensor.shape, tensor.dtype) == ((0,), torch.float64)
        assert communicator.receive(source)[1].tensor is None


def every_dtype_arrives(communicator: Communicator) -> None:
    """Each dtype of the wire, bit for bit."""
    if communicator.rank == 0:
        for dtype in WIRE_DTYPES:
            communicator.send(2, Message(Kind.VECTOR, torch.tensor([0, 1, 3, 127], dtype=dtype)))
    if communicator.rank == 2:
        for dtype in WIRE_DTYPES:
            tensor = payload(communicator.receive(0)[1])
            assert tensor.dtype is dtype
            assert torch.equal(tensor, torch.tensor([0, 1, 3, 127], dtype=dtype))


def sent_bytes_are_counted(communicator: Communicator) -> None:
    """Header and payload of each message, in one count for all communicators of a rank."""
    if communicator.rank == 0:
        before = communicator.traffic.bytes_sent
        communicator.send(1, Message(Kind.VECTOR, torch.zeros(10, dtype=torch.float64)))
        communicator.subgroup("pair", [0, 1]).send(1, Message(Kind.PULL))
        assert communicator.traffic.bytes_sent - before == (64 + 80) + 64
    if communicator.rank == 1:
        communicator.receive(0)
        communicator.subgroup("pair", [0, 1]).receive(0)


def a_request_does_not_overtake_a_push(communicator: Communicator) -> None:
    """A small message that is sent while a large one is on its way arrives after it."""
    if communicator.rank == 0:
        push = communicator.start_send(2, Message(Kind.PUSH, torch.zeros(100_000)))
        communicator.start_send(1, Message(Kind.PUSH, torch.zeros(1_000))).wait()
        communicator.start_send(2, Message(Kind.FETCH)).wait()
        push.wait()
    if communicator.rank == 1:
        assert communicator.receive(0)[1].kind is Kind.PUSH
    if communicator.rank == 2:
        assert [communicator.receive(0)[1].kind for _ in range(2)] == [Kind.PUSH, Kind.FETCH]


def a_payload_may_be_received_into_memory(communicator: Communicator) -> None:
    """The memory is that of the message, or has kept its content."""
    for length in (10, 50_000):
        for number in range(3):
            for to in others(communicator):
                values = torch.full((length,), 10.0 * number + communicator.rank)
                communicator.send(to, Message(Kind.PARAMETERS, values, step=number))
            for source in others(communicator):
                memory = torch.full((50_000,), -1.0)
                message = communicator.receive_into(memory, source)
                assert message.step == number
                assert payload(message).shape == (length,)
                assert payload(message).unique().tolist() == [10.0 * number + source]
                assert message.tensor is memory or memory.unique().tolist() == [-1.0]


CHECKS: tuple[Check, ...] = (
    numbered,
    every_field_arrives_both_ways,
    any_source_gives_everyone_once,
    messages_of_one_source_keep_their_order,
    a_request_does_not_overtake_a_push,
    a_sent_tensor_may_change,
    handles_of_sends_get_done,
    poll_gives_what_is_there,
    tags_are_apart,
    five_megabytes_go_around,
    a_payload_may_be_received_into_memory,
    a_rank_may_send_to_itself,
    empty_is_not_none,
    every_dtype_arrives,
    sent_bytes_are_counted,
)
