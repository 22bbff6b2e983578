"""Every invariant by hand-made events: what is right passes, and each wrong thing is named."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from polyrhythm.communication.message import Kind, Message
from polyrhythm.strategies.parameter_server.replication.messages import KEPT
from polyrhythm.strategies.role_assignment import roles_in_order
from polyrhythm.verification.families import Replicas
from polyrhythm.verification.general import Progress, Versions
from polyrhythm.verification.invariant import Conditions, Delivered, Ended, Handled, Stepped, Violation
from polyrhythm.verification.servers import Answers, Ledger, OfShards, ShardsTogether, Staleness

WORKERS, SERVER = 2, 2
CAST = roles_in_order(WORKERS, 1)
GRADIENTS = {
    (worker, step): torch.tensor([1.0, 2.0]) * (1 + worker + 2 * step) * 2
    for worker in range(2)
    for step in range(3)
}


def _conditions() -> Conditions:
    return Conditions(roles=CAST, numbers=2, gradient=lambda worker, step: GRADIENTS[worker, step])


def _push(
    source: int, step: int, versions: tuple[int, int], answer: list[float] | None = None, **counted: int
) -> Handled:
    """A push that is handled; `answer` goes to its sender."""
    message = Message(Kind.PUSH, GRADIENTS[source, step], step=step)
    replies = [] if answer is None else [(source, Message(Kind.PARAMETERS, torch.tensor(answer)))]
    applied = Counter({int(key.removeprefix("s")): count for key, count in counted.items()})
    return Handled(1.0, SERVER, source, message, replies, *versions, applied)


def _delivered(
    source: int, to: int, kind: Kind, *, version: int = 0, generation: int = 0, at_s: float = 1.0
) -> Delivered:
    to_server = to == SERVER
    return Delivered(
        at_s,
        source,
        generation if to_server else 0,
        to,
        0 if to_server else generation,
        Message(kind, version=version),
    )


def test_a_ledger_adds_up_what_was_taken() -> None:
    ledger = Ledger(_conditions(), lambda _server, rank, _step: (rank,))
    ledger.handled(_push(0, 0, (0, 1), [-2.0, -4.0]))
    ledger.handled(_push(1, 0, (1, 2), [-6.0, -12.0]))
    ledger.handled(_push(1, 0, (2, 2), [-6.0, -12.0]))  # it comes again, and is answered only
    ledger.ended(Ended(2.0, 1, (0, 1)))
    with pytest.raises(Violation, match="steps of rank 0 at the end: expected 2, found 1"):
        ledger.ended(Ended(2.0, 2, (0, 1)))


def test_a_ledger_takes_the_mean_of_an_update() -> None:
    ledger = Ledger(_conditions(), lambda _server, rank, _step: (rank,))
    ledger.handled(_push(0, 0, (0, 0)))
    ledger.handled(_push(1, 0, (0, 1), [-3.0, -6.0]))
    ledger.handled(_push(0, 1, (1, 1)))
    with pytest.raises(Violation, match=r"number 0 of 2 \(2 are wrong\): expected -10.0, found -17.0"):
        ledger.handled(_push(1, 1, (1, 2), [-17.0, -34.0]))  # their sum


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (
            [-2.0, 0.0],
            r"number 1 of 2 \(1 are wrong\): expected -4.0, found 0.0",
        ),  # lost at the end of a shard
        ([-4.0, -8.0], r"number 0 of 2 \(2 are wrong\): expected -2.0, found -4.0"),  # applied twice
        ([-2.0], "expected 2 numbers, found 1"),
    ],
)
def test_a_ledger_finds_what_is_lost_or_doubled(answer: list[float], complaint: str) -> None:
    ledger = Ledger(_conditions(), lambda _server, rank, _step: (rank,))
    with pytest.raises(Violation, match=complaint):
        ledger.handled(_push(0, 0, (0, 1), answer))


def test_a_step_that_comes_before_the_one_ahead_of_it_is_found() -> None:
    ledger = Ledger(_conditions(), lambda _server, rank, _step: (rank,))
    with pytest.raises(Violation, match="a gradient of rank 0: expected step 0, found step 1"):
        ledger.handled(_push(0, 1, (0, 1)))


def test_staleness_is_counted_from_the_last_read() -> None:
    staleness = Staleness()
    staleness.handled(_push(0, 0, (0, 1), s0=1))
    staleness.handled(_push(1, 0, (1, 2), s1=1))
    staleness.delivered(_delivered(SERVER, 0, Kind.PARAMETERS, version=1))
    staleness.handled(_push(0, 1, (2, 3), s1=1))
    with pytest.raises(Violation, match=r"expected \{3: 1\}, found \{2: 1\}"):
        staleness.handled(_push(1, 1, (3, 4), s2=1))


def test_staleness_of_an_update_of_several_gradients() -> None:
    staleness = Staleness()
    staleness.handled(_push(0, 0, (0, 0)))
    staleness.handled(_push(1, 0, (0, 1), s0=2))
    with pytest.raises(Violation, match=r"expected \{\}, found \{0: 1\}"):  # counted, and nothing applied
        staleness.handled(_push(0, 1, (1, 1), s0=1))


def test_versions_rise_one_by_one_and_are_never_taken_back() -> None:
    versions = Versions()
    versions.handled(_push(0, 0, (0, 1)))
    versions.delivered(_delivered(SERVER, 0, Kind.PARAMETERS, version=1))
    versions.delivered(
        _delivered(SERVER, 0, Kind.PARAMETERS, version=0, generation=1)
    )  # a successor has seen none
    with pytest.raises(Violation, match="expected at least 1, found 0"):
        versions.delivered(_delivered(SERVER, 0, Kind.PARAMETERS, version=0))
    for pair in ((0, 1), (1, 3), (1, 0)):
        with pytest.raises(Violation, match="a server's version"):
            versions.handled(_push(0, 1, pair))


def test_answers_belong_to_who_asked() -> None:
    answers = Answers(CAST)
    answers.delivered(_delivered(0, SERVER, Kind.PUSH))
    answers.delivered(_delivered(SERVER, 0, Kind.PARAMETERS))
    answers.delivered(_delivered(0, SERVER, Kind.PUSH))
    with pytest.raises(Violation, match="none for generation 1, which has no open question"):
        answers.delivered(_delivered(SERVER, 0, Kind.PARAMETERS, generation=1))


def test_replicas_hold_the_same_bits_and_the_right_ones() -> None:
    replicas = Replicas(_conditions(), [(0, 1)], alone=True)
    right = torch.tensor([-3.0, -6.0])
    replicas.stepped(Stepped(1.0, 0, 0, right))
    replicas.stepped(Stepped(1.0, 1, 0, right.clone()))
    with pytest.raises(
        Violation, match=r"rank 1: a replica that differs from the others of its group: .* 1 numbers differ"
    ):
        replicas.stepped(Stepped(1.0, 1, 0, torch.tensor([-3.0, -6.5])))
    with pytest.raises(Violation, match=r"parameters after step 1: .* 2 of 2 numbers wrong"):
        replicas.stepped(Stepped(2.0, 0, 1, right))


def test_replicas_of_two_groups_may_differ_and_a_laggard_may_not() -> None:
    replicas = Replicas(_conditions(), [(0,), (1,)], alone=False)
    replicas.stepped(Stepped(1.0, 0, 0, torch.tensor([1.0, 2.0])))
    replicas.stepped(Stepped(1.0, 1, 0, torch.tensor([3.0, 4.0])))
    replicas.stepped(Stepped(1.0, 1, 1, torch.tensor([3.0, 4.0])))
    with pytest.raises(Violation, match="expected step 1 and the same bits, found step 0"):
        replicas.stepped(Stepped(1.0, 1, 0, torch.tensor([3.0, 4.0])))


def test_shards_are_together_when_a_step_is_over() -> None:
    shards = ShardsTogether()
    shards.handled(_push(0, 0, (0, 1)))
    shards.stepped(Stepped(1.0, 0, 0, torch.zeros(2)))
    with pytest.raises(Violation, match="version of server 2 after step 1: expected 2, found 1"):
        shards.stepped(Stepped(1.0, 0, 1, torch.zeros(2)))


def test_messages_alone_are_no_progress() -> None:
    progress = Progress(2.0)
    progress.delivered(_delivered(0, SERVER, Kind.PULL, at_s=2.0))
    progress.handled(_push(0, 0, (0, 1)))  # at 1 s
    progress.delivered(_delivered(0, SERVER, Kind.PULL, at_s=3.0))
    progress.stepped(Stepped(2.5, 0, 0, torch.zeros(2)))
    progress.delivered(_delivered(0, SERVER, Kind.PULL, at_s=4.5))
    with pytest.raises(Violation, match=r"expected one within 2 s, found none for 2\.1 s"):
        progress.delivered(_delivered(0, SERVER, Kind.PULL, at_s=4.6))


def test_a_relayed_question_is_for_the_lost_servers_shard_whatever_another_communicator_brings_meanwhile() -> (
    None
):
    """Server 3 keeps the shard of server 2; a new leader announces itself between RELAY and the question."""
    roles = roles_in_order(WORKERS, 2)
    shards = OfShards(roles, [Answers(roles)])
    to_server = [
        (Message(Kind.RELAY, version=0), 7),
        (Message(Kind.LEAD), 8),
        (Message(Kind.PULL), 7),
        (Message(Kind.PULL), 7),
    ]
    for message, context in to_server:
        shards.delivered(Delivered(1.0, 0, 1, 3, 0, message, context))
    answers = [Message(Kind.PARAMETERS), Message(Kind.PARAMETERS, tag=KEPT)]
    for answer in answers:
        shards.delivered(Delivered(1.0, 3, 0, 0, 1, answer, 7))
    with pytest.raises(Violation, match="an answer of rank 2 to a question of another"):
        shards.delivered(Delivered(1.0, 3, 0, 0, 1, answers[1], 7))
