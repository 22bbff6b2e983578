"""Every collective over messages: right, counted, and as long as its formula says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import log2

import pytest
import torch
from torch import Tensor

from polyrhythm.communication.all_reduce import AllReduce
from polyrhythm.communication.collective import COLLECTIVES
from polyrhythm.communication.collectives.ring import Ring
from polyrhythm.communication.collectives.two_level import TwoLevel
from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.message import Kind, Message
from polyrhythm.cost.machine import Payload
from polyrhythm.errors import RunError
from polyrhythm.specs import choices
from unit.communication.collectives.groups import (
    MACHINE,
    SPECS,
    collective,
    contended,
    fractions,
    reduced,
    sizes,
    uncontended,
    whole_numbers,
)

UNCONTENDED = replace(MACHINE, shared_receiver=False)
WIRE_DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int64, torch.int32,
]  # fmt: skip


@pytest.mark.parametrize("ranks", range(1, 18))
@pytest.mark.parametrize("spec", SPECS)
def test_sums_counts_and_times_are_exact_for_all_sizes(spec: str, ranks: int) -> None:
    kind = collective(spec)
    for size in sizes(ranks):
        tensors, payload = whole_numbers(ranks, size), Payload(size, 4)
        group = uncontended(ranks)
        for result in reduced(group, kind, tensors):
            assert torch.equal(result, torch.stack(tensors).sum(0))
        if ranks == 1:
            assert not group.messages
            continue
        for rank in range(ranks):
            said = kind.sent(ranks, rank, payload)
            assert (group.messages[rank], group.payload_sent(rank)) == (said.messages, said.nbytes), rank
        estimated_s = kind.seconds(UNCONTENDED, ranks, payload)
        if isinstance(kind, TwoLevel):
            assert group.time.now() <= estimated_s * (1 + 1e-12)
        else:
            assert group.time.now() == pytest.approx(estimated_s, rel=1e-12)


MESSAGES: dict[
    str, Callable[[int, int, int], int]
] = {  # of n ranks, p in the largest power of two, r beyond it
    "flat": lambda n, p, r: 2 * (n - 1),
    "binomial_tree": lambda n, p, r: 2 * (n - 1),
    "recursive_doubling": lambda n, p, r: p * round(log2(p)) + 2 * r,
    "ring": lambda n, p, r: 2 * n * (n - 1),
    "rabenseifner": lambda n, p, r: 2 * p * round(log2(p)) + 2 * r,
    "direct": lambda n, p, r: 2 * n * (n - 1),
    "segmented_chain(segments=5)": lambda n, p, r: 2 * 5 * (n - 1),
}
"""Messages of all ranks together."""


@pytest.mark.parametrize("ranks", range(2, 18))
@pytest.mark.parametrize("spec", MESSAGES)
def test_messages_and_bytes_are_the_tables(spec: str, ranks: int) -> None:
    kind, payload = collective(spec), Payload(1009, 8)
    sent = [kind.sent(ranks, rank, payload) for rank in range(ranks)]
    core = 2 ** int(log2(ranks))
    messages = MESSAGES[spec](ranks, core, ranks - core)
    volume = messages if spec == "recursive_doubling" else 2 * (ranks - 1)  # in units of M
    assert sum(each.messages for each in sent) == messages
    assert sum(each.nbytes for each in sent) == volume * payload.nbytes


CROSSING_FREE = {
    "flat": range(2, 18),
    "binomial_tree": [2, 4, 8, 16],
    "recursive_doubling": [2, 4, 8, 16],
    "ring": range(2, 18),
    "rabenseifner": [2, 4, 8, 16],
    "direct": range(2, 18),
    "segmented_chain(segments=5)": range(2, 18),
}
"""Numbers of ranks for which no rank receives more at a time than the formula has counted."""


@pytest.mark.parametrize("spec", CROSSING_FREE)
def test_with_a_nic_a_rank_the_time_is_the_formulas(spec: str) -> None:
    for ranks in CROSSING_FREE[spec]:
        group = contended(ranks)
        size = 1200 * ranks  # `direct` fills all NICs all the time only if the slices are equal
        reduced(group, collective(spec), whole_numbers(ranks, size))
        estimated_s = collective(spec).seconds(MACHINE, ranks, Payload(size, 4))
        assert group.time.now() == pytest.approx(estimated_s, rel=1e-12), ranks


@pytest.mark.parametrize("ranks", [3, 5, 6, 7, 11, 13])
def test_with_a_nic_a_rank_a_tree_of_odd_size_is_between_its_formulas(ranks: int) -> None:
    group, payload = contended(ranks), Payload(50_000, 4)
    reduced(group, collective("binomial_tree"), whole_numbers(ranks, payload.elements))
    least_s, most_s = (
        collective("binomial_tree").seconds(machine, ranks, payload) for machine in (UNCONTENDED, MACHINE)
    )
    assert least_s <= group.time.now() * (1 + 1e-12)
    assert group.time.now() <= most_s * (1 + 1e-12)
    assert most_s - least_s == pytest.approx(MACHINE.port_s(payload.nbytes))


@pytest.mark.parametrize(("ranks", "group"), [(4, 2), (6, 3), (12, 4), (16, 8)])
@pytest.mark.parametrize("inside", ["ring", "direct"])
def test_two_level_takes_the_tables_time_on_equal_groups(ranks: int, group: int, inside: str) -> None:
    kind, payload = collective(f"two_level(group={group}, inside={inside})"), Payload(1200 * ranks, 4)
    simulated = uncontended(ranks)
    reduced(simulated, kind, whole_numbers(ranks, payload.elements))
    hosts, shard = ranks // group, payload.nbytes // group
    piece_s = MACHINE.port_s(shard)
    latencies = 2 * (group - 1) if inside == "ring" else 2
    inside_s = latencies * MACHINE.latency_s + 2 * (group - 1) * piece_s
    between_s = 2 * (hosts - 1) * MACHINE.message_s(shard // hosts)
    assert simulated.time.now() == pytest.approx(inside_s + between_s, rel=1e-12)
    assert kind.seconds(MACHINE, ranks, payload) == pytest.approx(inside_s + between_s, rel=1e-12)


@pytest.mark.parametrize("dtype", WIRE_DTYPES, ids=str)
@pytest.mark.parametrize("spec", SPECS)
def test_every_dtype_and_shape_is_kept(spec: str, dtype: torch.dtype) -> None:
    tensors = [torch.full((3, 5), rank + 1).to(dtype) for rank in range(5)]
    for result in reduced(uncontended(5), collective(spec), tensors):
        assert result.dtype is dtype
        assert torch.equal(result, torch.full((3, 5), 15).to(dtype))


@pytest.mark.parametrize("ranks", [2, 3, 6, 8, 13])
@pytest.mark.parametrize("spec", SPECS)
def test_all_ranks_get_the_same_bits_whenever_they_start(spec: str, ranks: int) -> None:
    tensors, kind = fractions(ranks, 1003), collective(spec)
    at_once = reduced(contended(ranks), kind, tensors)
    for result in at_once:
        assert torch.equal(result, at_once[0])
    torch.testing.assert_close(
        at_once[0].double(), torch.stack(tensors).double().sum(0), rtol=1e-4, atol=1e-2
    )
    skewed = [tensor.clone() for tensor in tensors]
    contended(ranks).run(
        lambda communicator: kind.all_reduce(communicator, skewed[communicator.rank]),
        starts_s=lambda rank: 1e-5 * (rank * 7 % 5),
    )
    assert all(torch.equal(result, at_once[0]) for result in skewed)


@pytest.mark.parametrize("ranks", [3, 8])
def test_all_algorithms_have_the_same_bits_on_numbers_whose_sums_are_exact(ranks: int) -> None:
    tensors = [tensor / 64 for tensor in whole_numbers(ranks, 997)]
    results = [reduced(uncontended(ranks), collective(spec), tensors)[0] for spec in SPECS]
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("spec", [*SPECS, "library", "auto"])
def test_several_may_be_under_way_at_once_beside_other_messages(spec: str) -> None:
    vectors = [whole_numbers(5, size) for size in (4000, 3, 0, 900)]

    def work(communicator: Communicator) -> Message:
        rank = communicator.rank
        mine = [vector[rank].clone() for vector in vectors]
        kind = collective(spec) if spec in SPECS else choices(COLLECTIVES)[spec]()
        sums = AllReduce(kind, communicator)  # type: ignore[arg-type]
        communicator.start_send((rank + 1) % 5, Message(Kind.PUSH, torch.ones(3), tag=1))
        handles = [sums.start(tensor) for tensor in mine]
        communicator.clock.sleep(1e-4 * rank)
        last = vectors[0][rank].clone()
        sums.run(last)
        for handle in reversed(handles):
            handle.wait()
        for tensor, vector in zip([*mine, last], [*vectors, vectors[0]], strict=True):
            assert torch.equal(tensor, torch.stack(vector).sum(0))
        return communicator.receive(tag=1)[1]

    assert [message.kind for message in contended(5).run(work)] == [Kind.PUSH] * 5


def test_two_all_reduces_of_one_communicator_keep_apart_by_name() -> None:
    def work(communicator: Communicator) -> list[float]:
        one, other = (AllReduce(Ring(), communicator, name) for name in ("one", "other"))
        first, second = torch.ones(4), torch.full((4,), 10.0)
        handles = [one.start(first), other.start(second)]
        for handle in handles:
            handle.wait()
        return [first[0].item(), second[0].item()]

    assert uncontended(3).run(work) == [[3.0, 30.0]] * 3


@pytest.mark.parametrize("spec", SPECS)
def test_tensors_that_do_not_fit_are_told(spec: str) -> None:
    def work(communicator: Communicator) -> None:
        collective(spec).all_reduce(communicator, torch.ones(8 if communicator.rank else 9))

    said = r"^rank \d of a collective sent \d numbers of torch.float32 where rank \d expects \d of torch.float32: all"
    with pytest.raises(RunError, match=said):
        uncontended(2).run(work)


def test_a_tensor_that_is_not_contiguous_is_refused_before_anything_is_sent() -> None:
    group = uncontended(2)
    with pytest.raises(RuntimeError, match="view"):
        group.run(lambda communicator: Ring().all_reduce(communicator, torch.ones(4, 4).t()[:3]))
    assert not group.messages


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("spec", ["ring", "direct"])
def test_the_halves_of_a_sliced_one_are_reduce_scatter_and_all_gather(spec: str, ranks: int) -> None:
    tensors = whole_numbers(ranks, 13)
    whole = torch.stack(tensors).sum(0)
    kind = choices(COLLECTIVES)[spec]()

    def work(communicator: Communicator) -> tuple[Tensor, Tensor]:
        tensor = tensors[communicator.rank].clone()
        slice_ = kind.reduce_scatter(communicator, tensor).clone()  # type: ignore[attr-defined]
        kind.all_gather(communicator, tensor)  # type: ignore[attr-defined]
        return slice_, tensor

    found = uncontended(ranks).run(work)
    for (slice_, tensor), expected in zip(found, whole.tensor_split(ranks), strict=True):
        assert torch.equal(slice_, expected)
        assert torch.equal(tensor, whole)


@pytest.mark.parametrize("ranks", range(1, 10))
def test_the_halves_of_a_tree_are_reduce_and_broadcast(ranks: int) -> None:
    tensors, tree = whole_numbers(ranks, 13), choices(COLLECTIVES)["binomial_tree"]()

    def work(communicator: Communicator) -> tuple[Tensor, Tensor]:
        tensor = tensors[communicator.rank].clone()
        tree.reduce(communicator, tensor)  # type: ignore[attr-defined]
        summed = tensor.clone()
        tensor = tensors[communicator.rank].clone()
        tree.broadcast(communicator, tensor)  # type: ignore[attr-defined]
        return summed, tensor

    group = uncontended(ranks)
    found = group.run(work)
    assert torch.equal(found[0][0], torch.stack(tensors).sum(0))
    assert all(torch.equal(tensor, tensors[0]) for _, tensor in found)
    assert sum(group.messages.values()) == 2 * (ranks - 1)
