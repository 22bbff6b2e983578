"""What `auto` measures, and what it chooses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from polyrhythm.communication.all_reduce import AllReduce
from polyrhythm.communication.collectives.auto import Auto, measure_links
from polyrhythm.communication.communicator import Communicator
from polyrhythm.communication.message import HEADER_BYTES
from polyrhythm.cost.machine import Machine, Payload
from polyrhythm.errors import RequestError
from unit.communication.collectives.groups import (
    ALPHA,
    BETA,
    MACHINE,
    SPECS,
    Group,
    collective,
    contended,
    uncontended,
    whole_numbers,
)


@pytest.mark.parametrize("network", [uncontended, contended])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_the_figures_are_those_of_the_links_the_same_on_all_ranks(
    ranks: int, network: Callable[[int], Group]
) -> None:
    found = network(ranks).run(measure_links, starts_s=lambda rank: 0.003 * rank)
    assert found == [found[0]] * ranks
    assert found[0].latency_s == pytest.approx(ALPHA, rel=1e-9)
    assert found[0].seconds_per_byte == pytest.approx(BETA, rel=1e-9)
    assert found[0].overhead_s == pytest.approx(0.0, abs=1e-15)
    assert found[0].header_bytes == HEADER_BYTES


def test_the_slowest_link_counts() -> None:
    group = uncontended(3)

    def work(communicator: Communicator) -> Machine:
        if communicator.rank > 0:  # the pair of 1 and 2 is slow in both directions
            send = communicator.start_send

            def late(to, message):  # type: ignore[no-untyped-def]
                communicator.clock.sleep(1e-3)  # as if every message cost this rank a millisecond
                return send(to, message)

            communicator.start_send = late  # type: ignore[method-assign]
        return measure_links(communicator)

    found = group.run(work)
    assert found == [found[0]] * 3
    assert found[0].overhead_s == pytest.approx(1e-3, rel=0.01)
    assert found[0].latency_s == pytest.approx(ALPHA, rel=0.01)


@pytest.mark.parametrize("ranks", [2, 3, 8, 13])
@pytest.mark.parametrize("size", [0, 1, 100, 10_000, 1_000_000])
def test_the_choice_is_the_quickest_of_all_in_simulation(ranks: int, size: int) -> None:
    auto = Auto(latency_s=ALPHA, bandwidth_bytes_per_s=1 / BETA)
    choice = auto.choice(ranks, Payload(size, 4))
    others = [collective(spec) for spec in SPECS if not spec.startswith("two_level")]
    payload = Payload(size, 4)
    least_s = min(other.seconds(MACHINE, ranks, payload) for other in others)
    assert choice.seconds(MACHINE, ranks, payload) <= 1.01 * least_s


@pytest.mark.parametrize(
    ("overhead_s", "ranks", "nbytes", "chosen"),
    [
        (1e-4, 2, 64, "recursive_doubling"),
        (1e-4, 16, 64, "recursive_doubling"),  # few bytes: the fewest rounds
        (1e-4, 16, 4 << 20, "rabenseifner"),  # many: the fewest bytes
        (1e-4, 15, 64 << 20, "ring"),  # without folding
        (1e-4, 9, 256, "recursive_doubling"),  # 5 messages in a row, against 8 of the tree
    ],
)
def test_the_choice_where_every_message_costs_alpha(
    overhead_s: float, ranks: int, nbytes: int, chosen: str
) -> None:
    auto = Auto(latency_s=0, overhead_s=overhead_s, bandwidth_bytes_per_s=1e9)
    assert auto.choice(ranks, Payload(nbytes // 4, 4)).name == chosen


def test_it_is_prepared_once_for_all_calls_and_its_figures_can_be_read() -> None:
    group = contended(4)
    vectors = [whole_numbers(4, size) for size in (8, 50_000)]

    def work(communicator: Communicator) -> tuple[str, int]:
        sums = AllReduce(Auto(), communicator)
        ready = sums.prepare()
        measured = group.messages[communicator.rank]
        assert sums.prepare() is ready
        for vector in vectors:
            tensor = vector[communicator.rank].clone()
            sums.run(tensor)
            assert torch.equal(tensor, torch.stack(vector).sum(0))
        assert isinstance(ready, Auto)
        assert group.messages[communicator.rank] == measured + sum(
            ready.choice(4, Payload(vector[0].numel(), 4))
            .sent(4, communicator.rank, Payload(vector[0].numel(), 4))
            .messages
            for vector in vectors
        )
        return str(ready), group.messages[communicator.rank]

    found = group.run(work)
    assert len({text for text, _ in found}) == 1
    assert found[0][0].startswith("auto(latency_s=")


@pytest.mark.parametrize("knowing", [{0, 1, 2, 3}, {0, 2}, {3}])
def test_those_who_regroup_take_over_what_any_of_them_knows(knowing: set[int]) -> None:
    """Whoever is new has what it was asked for, which is nothing; two small messages a rank suffice."""
    group = contended(4)
    measured = contended(4).run(lambda communicator: Auto().prepared(communicator))[0]

    def work(communicator: Communicator) -> Auto:
        own = measured if communicator.rank in knowing else Auto()
        return own.passed_on().prepared(communicator)

    found = group.run(work)
    assert found == [found[0]] * 4
    assert (found[0].latency_s, found[0].overhead_s) == (measured.latency_s, measured.overhead_s)
    assert found[0].bandwidth_bytes_per_s == pytest.approx(measured.bandwidth_bytes_per_s, rel=1e-15)
    assert group.messages.total() == 2 * 3
    again = contended(2).run(
        lambda communicator: (found[0] if communicator.rank else Auto()).passed_on().prepared(communicator)
    )
    assert again == [found[0]] * 2


def test_where_nobody_has_lived_to_know_a_network_of_1_gbit_per_s_is_assumed() -> None:
    group = contended(3)
    found = group.run(lambda communicator: Auto().passed_on().prepared(communicator))
    assert found == [found[0]] * 3
    assert (found[0].latency_s, found[0].overhead_s) == (1e-4, 0)
    assert found[0].bandwidth_bytes_per_s == pytest.approx(125e6)


def test_figures_that_were_given_need_no_word() -> None:
    given = Auto(latency_s=1e-3, bandwidth_bytes_per_s=1e6)
    group = contended(3)
    assert group.run(lambda communicator: given.passed_on().prepared(communicator)) == [given] * 3
    assert group.messages.total() == 0


def test_without_figures_there_is_no_choice() -> None:
    with pytest.raises(RequestError, match=r"^auto has not measured the links"):
        Auto().choice(4, Payload(10, 4))


def test_one_rank_has_no_links_to_measure() -> None:
    tensor = torch.ones(3)
    assert uncontended(1).run(lambda communicator: Auto().prepared(communicator)) == [Auto()]
    uncontended(1).run(lambda communicator: Auto().all_reduce(communicator, tensor))
    assert tensor.tolist() == [1, 1, 1]
