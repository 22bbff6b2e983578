"""What a supervisor orders when ranks are lost, come and go: with literal facts, without processes."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from polyrhythm.communication.transports.membership import Peer
from polyrhythm.config.assemble import strategy_from
from polyrhythm.errors import RequestError, RunError
from polyrhythm.launch.script import policy_of
from polyrhythm.launch.supervisor import (
    BUG,
    PEER,
    PERIOD_S,
    REQUEST,
    RUN,
    Admits,
    Announce,
    Began,
    Blamed,
    Called,
    CloseJoinServer,
    End,
    Ended,
    Exited,
    Fact,
    Failed,
    GuestAsked,
    GuestLeft,
    GuestRefused,
    Joined,
    Kill,
    Lost,
    Missed,
    Order,
    Over,
    PolicyKnown,
    PrintMessage,
    Quiet,
    RankLost,
    Refuse,
    Rules,
    Seat,
    Start,
    Stop,
    StopAsked,
    Supervisor,
    Vacate,
    Waiting,
)
from polyrhythm.strategies.fault_policy import FaultPolicy
from polyrhythm.strategies.role_assignment import RoleAssignment

KILLED = -signal.SIGKILL
RESUME = "continue with --resume runs/a"
THREE_AND_A_SERVER = RoleAssignment((0, 1, 2), (3,))
THREE_AND_TWO = RoleAssignment((0, 1, 2), (3, 4))
LEADER, FIRST, SECOND, SERVER, OTHER_SERVER = (Peer(rank, 0) for rank in range(5))


def too_few(left: int) -> RunError:
    return RunError(f"{left} workers remain")


def of_train(
    roles: RoleAssignment = THREE_AND_A_SERVER,
    spec: str = "parameter_server",
    *,
    vacant: tuple[int, ...] = (),
    began: bool = True,
    **rules: Any,
) -> Supervisor:
    """Return the supervisor of a run of `train` that is under way."""
    policy = strategy_from(spec).faults(len(roles.workers))
    started = [rank for rank in range(roles.size) if rank not in vacant]
    given = {"restarts": 2, "too_few": too_few, "resume": RESUME} | rules
    made = Supervisor(roles, started, Rules(**given), policy, admits="")
    if began:
        made.on(Began(), 0.0)
    return made


def of_script(workers: int = 3, **rules: Any) -> Supervisor:
    """Return the supervisor of a script of which nothing is known yet."""
    made = Supervisor(
        RoleAssignment(tuple(range(workers))), range(workers), Rules(**({"restarts": 3} | rules))
    )
    assert made.on(Quiet(), 0.0) == []
    return made


def known(spec: str, workers: int = 3) -> PolicyKnown:
    strategy = strategy_from(spec)
    told = policy_of(strategy, workers)
    return PolicyKnown(
        FaultPolicy.from_json(told["policy"]), strategy.traits(workers).servers, told["why_not"]
    )


def said(orders: list[Order]) -> list[str]:
    return [order.text for order in orders if isinstance(order, PrintMessage)]


def announced(orders: list[Order]) -> set[tuple[Peer, Peer]]:
    return {(order.lost, order.to) for order in orders if isinstance(order, Announce)}


def starts(orders: list[Order]) -> list[Start]:
    return [order for order in orders if isinstance(order, Start)]


def ended(orders: list[Order]) -> Exception | None:
    (end,) = [order for order in orders if isinstance(order, End)]
    return end.error


def goes_on(orders: list[Order]) -> bool:
    return not any(isinstance(order, End) for order in orders)


class TestLosses:
    def test_the_others_are_told_and_a_successor_comes_after_a_pause(self) -> None:
        run = of_train()
        orders = run.on(Exited(FIRST, KILLED), 10.0)
        assert orders == [
            Announce(FIRST, LEADER),
            Announce(FIRST, SECOND),
            Announce(FIRST, SERVER),
            Vacate(1, coming=True),
            PrintMessage(
                "worker 1 (rank 1) was killed by SIGKILL; the others continue, and it is started again in 0.5 s "
                "(restart 1 of 2)"
            ),
        ]
        assert run.next_s == 10.5
        assert run.on(Quiet(), 10.4) == []
        assert run.on(Quiet(), 10.5) == [Start(Peer(1, 1), {0: 0, 2: 0, 3: 0})]
        assert run.next_s is None

    def test_a_newcomer_is_told_of_all_who_are_gone_but_its_own_predecessor(self) -> None:
        run = of_train(restarts=1)
        run.on(Exited(FIRST, KILLED), 10.0)
        run.on(Exited(SECOND, KILLED), 10.1)
        assert run.on(Quiet(), 10.5) == [Announce(SECOND, Peer(1, 1)), Start(Peer(1, 1), {0: 0, 3: 0})]

    def test_restarts_count_by_rank_and_for_an_hour(self) -> None:
        run = of_train(restarts=2)
        at_s = 10.0
        for generation in range(2):
            for rank in (1, 2):
                orders = run.on(Exited(Peer(rank, generation), KILLED), at_s)
                assert f"(restart {generation + 1} of 2)" in said(orders)[0]
                at_s += 100.0
                assert len(starts(run.on(Quiet(), at_s))) == 1
        assert said(run.on(Exited(Peer(1, 2), KILLED), at_s)) == [
            "worker 1 (rank 1) was killed by SIGKILL; the others continue"
        ]
        assert "(restart 1 of 2)" in said(run.on(Exited(Peer(2, 2), KILLED), at_s + PERIOD_S))[0]

    def test_without_a_restart_left_the_others_go_on_alone(self) -> None:
        run = of_train(restarts=0)
        orders = run.on(Exited(FIRST, 3, cause="had been silent for 9 s, and was evicted"), 1.0)
        assert said(orders) == [
            "worker 1 (rank 1) had been silent for 9 s, and was evicted; the others continue"
        ]
        assert Vacate(1, coming=False) in orders
        assert run.next_s is None

    def test_a_loss_that_the_strategy_does_not_tolerate_ends_the_run_after_last_words(self) -> None:
        run = of_train(spec="hybrid")
        assert run.on(Exited(FIRST, KILLED), 10.0) == []
        assert run.next_s == 12.0
        assert run.on(Failed(SECOND, PEER, "rank 1 is gone"), 10.1) == []
        assert run.on(Quiet(), 11.9) == []
        error = ended(run.on(Quiet(), 12.0))
        assert isinstance(error, RankLost)
        assert str(error) == f"worker 1 (rank 1) was killed by SIGKILL; {RESUME}"
        assert error.what == "worker 1 (rank 1) was killed by SIGKILL"

    def test_last_words_are_over_when_all_have_left(self) -> None:
        run = of_train(RoleAssignment((0, 1)), "hybrid")
        run.on(Exited(FIRST, KILLED), 10.0)
        assert isinstance(ended(run.on(Exited(LEADER, KILLED), 10.1)), RankLost)

    def test_as_long_as_something_is_heard_nobody_is_cut_short(self) -> None:
        run = of_train(spec="hybrid")
        run.on(Exited(FIRST, KILLED), 10.0)
        assert run.on(Joined(2), 50.0) == []
        assert not goes_on(run.on(Quiet(), 50.0))

    def test_an_error_of_a_ranks_own_is_no_loss(self) -> None:
        run = of_train()
        run.on(Failed(FIRST, BUG, "Traceback…"), 10.0)
        run.on(Exited(FIRST, 1), 10.1)
        assert str(ended(run.on(Quiet(), 12.0))) == "worker 1 (rank 1): Traceback…"

    def test_one_that_lost_its_peers_is_a_loss_itself(self) -> None:
        run = of_train()
        assert run.on(Failed(FIRST, PEER, "rank 3 is gone"), 10.0) == []
        orders = run.on(Exited(FIRST, 1), 10.1)
        assert said(orders)[0].startswith("worker 1 (rank 1) failed: rank 3 is gone; the others continue")

    def test_two_servers_that_hold_the_same_shard_cannot_both_be_lost(self) -> None:
        run = of_train(THREE_AND_TWO, "parameter_server(servers=2, replicas=2)", restarts=5)
        orders = run.on(Exited(SERVER, KILLED), 10.0)
        assert said(orders) == [
            "server 0 (rank 3) was killed by SIGKILL; another server with its shards continues with them, and it is "
            "started again in 0.5 s (restart 1 of 5)"
        ]
        assert run.on(Exited(OTHER_SERVER, KILLED), 10.1) == []
        assert isinstance(ended(run.on(Quiet(), 12.1)), RankLost)

    def test_once_its_successor_has_its_shards_the_other_server_may_be_lost(self) -> None:
        run = of_train(THREE_AND_TWO, "parameter_server(servers=2, replicas=2)", restarts=5)
        run.on(Exited(SERVER, KILLED), 10.0)
        assert starts(run.on(Quiet(), 10.5)) == [Start(Peer(3, 1), {0: 0, 1: 0, 2: 0, 4: 0})]
        run.on(Joined(3), 11.0)
        assert goes_on(run.on(Exited(OTHER_SERVER, KILLED), 11.1))
        assert starts(run.on(Quiet(), 11.6)) == [Start(Peer(4, 1), {0: 0, 1: 0, 2: 0, 3: 1})]

    def test_a_server_counts_as_absent_until_it_has_its_shards(self) -> None:
        run = of_train(THREE_AND_TWO, "parameter_server(servers=2, replicas=2)", restarts=5)
        run.on(Exited(SERVER, KILLED), 10.0)
        run.on(Quiet(), 10.5)
        run.on(Exited(FIRST, KILLED), 10.6)
        assert Announce(SERVER, Peer(1, 1)) in run.on(Quiet(), 11.1)

    def test_a_server_without_a_replica_ends_the_run(self) -> None:
        run = of_train()
        assert run.on(Exited(SERVER, KILLED), 1.0) == []
        assert str(ended(run.on(Quiet(), 3.0))) == f"server 0 (rank 3) was killed by SIGKILL; {RESUME}"


class TestLeader:
    def test_its_successor_comes_at_once_where_the_others_wait_for_it(self) -> None:
        run = of_train(RoleAssignment((0, 1, 2)), "synchronous")
        orders = run.on(Exited(LEADER, KILLED), 10.0)
        assert said(orders) == [
            "worker 0 (rank 0) was killed by SIGKILL; the others wait for its replacement, and it is started again "
            "at once (restart 1 of 2)"
        ]
        assert starts(orders) == [Start(Peer(0, 1), {1: 0, 2: 0})]

    @pytest.mark.parametrize(
        ("before", "why"),
        [
            ([StopAsked()], "the run is being stopped"),
            ([Exited(FIRST, 0)], "a worker has been let go, and a successor would wait for it"),
            ([Failed(LEADER, RUN, "the disk is full")], "its successor would find the same"),
        ],
    )
    def test_it_has_no_successor_when(self, before: list[Fact], why: str) -> None:
        run = of_train(RoleAssignment((0, 1, 2)), "synchronous")
        for fact in before:
            run.on(fact, 9.0)
        run.on(Exited(LEADER, KILLED), 10.0)
        error = ended(run.on(Quiet(), 12.0))
        assert isinstance(error, RunError), why
        assert isinstance(error, RankLost) is (
            before == [Exited(FIRST, 0)]
        )  # else nobody wants another start

    def test_before_training_has_begun_the_run_is_over_and_may_be_started_again(self) -> None:
        run = of_train(RoleAssignment((0, 1, 2)), "synchronous", began=False)
        run.on(Exited(LEADER, KILLED), 10.0)
        assert isinstance(ended(run.on(Quiet(), 12.0)), RankLost)

    def test_it_may_die_once_it_has_reported_the_end(self) -> None:
        run = of_train(RoleAssignment((0, 1)), "synchronous")
        assert run.on(Ended(), 1.0) == []
        orders = run.on(Exited(LEADER, KILLED), 1.1)
        assert said(orders) == []
        assert Kill(FIRST) in orders  # which worker 0 may have had no time to release
        assert ended(orders) is None

    def test_a_successor_that_comes_too_late_is_ended(self) -> None:
        run = of_train(restarts=5)
        run.on(Exited(FIRST, KILLED), 1.0)
        run.on(Exited(SECOND, KILLED), 1.0)
        run.on(Quiet(), 1.5)
        run.on(Joined(2), 1.6)
        assert run.on(Ended(), 2.0) == []
        assert run.on(Exited(LEADER, 0), 2.1) == [Kill(Peer(1, 1))]
        assert run.on(Exited(Peer(1, 1), KILLED), 2.2) == []  # which is no news
        assert goes_on(run.on(Exited(SERVER, 0), 2.3))
        assert ended(run.on(Exited(Peer(2, 1), 0), 2.4)) is None


class TestStopping:
    def test_while_ranks_start_none_that_is_lost_comes_back(self) -> None:
        run = of_train(began=False)
        assert run.on(StopAsked(), 0.1) == []
        assert said(run.on(Exited(FIRST, KILLED), 0.2)) == [
            "worker 1 (rank 1) was killed by SIGKILL; the others continue"
        ]
        assert run.next_s is None

    def test_only_the_leader_that_the_others_wait_for_is_still_started(self) -> None:
        run = of_train(restarts=5)
        run.on(Exited(LEADER, KILLED), 10.0)
        run.on(Exited(FIRST, KILLED), 10.0)
        run.on(StopAsked(), 10.1)
        assert [start.peer for start in starts(run.on(Quiet(), 11.0))] == [Peer(0, 1)]
        assert run.next_s is None

    def test_too_few_workers_stop_the_run_which_then_has_failed(self) -> None:
        run = of_train(restarts=0, min_workers=3)
        orders = run.on(Exited(SECOND, KILLED), 1.0)
        assert orders[-1] == Stop()
        assert run.failure is None  # worker 0 has yet to stop
        run.on(Ended("interrupted"), 2.0)
        assert str(run.failure) == "2 workers remain"
        for peer in (LEADER, FIRST):
            run.on(Exited(peer, 0), 2.1)
        assert ended(run.on(Exited(SERVER, 0), 2.2)) is run.failure

    def test_the_error_counts_those_who_are_left_in_the_end(self) -> None:
        run = of_train(restarts=0, min_workers=3)
        run.on(Exited(FIRST, KILLED), 1.0)
        run.on(Exited(SECOND, KILLED), 1.1)
        run.on(Ended("interrupted"), 2.0)
        assert str(run.failure) == "1 workers remain"

    def test_one_that_has_left_in_good_order_is_not_missed(self) -> None:
        run = of_train(restarts=0, min_workers=2)
        run.on(Exited(FIRST, 0), 0.5)
        assert Stop() not in run.on(Exited(SECOND, KILLED), 1.0)

    def test_a_run_that_people_stop_is_interrupted_however_few_are_left(self) -> None:
        run = of_train(restarts=0, min_workers=3)
        run.on(StopAsked(), 0.5)
        run.on(Exited(SECOND, KILLED), 1.0)
        run.on(Ended("interrupted"), 2.0)
        assert run.failure is None


class TestGuests:
    def test_vacant_places_are_announced_and_given_from_the_lowest(self) -> None:
        run = of_train(vacant=(1, 2), has_join_server=True)
        assert run.open() == [
            Announce(FIRST, LEADER),
            Announce(FIRST, SERVER),
            Announce(SECOND, LEADER),
            Announce(SECOND, SERVER),
        ]
        assert run.on(GuestAsked(7, "10.0.0.5:1"), 1.0) == [
            Announce(SECOND, Peer(1, 1)),
            Seat(7, Peer(1, 1)),
            PrintMessage("10.0.0.5:1 takes the place of worker 1 (rank 1)"),
        ]
        assert run.on(GuestAsked(8, "10.0.0.6:1"), 1.0)[0] == Seat(8, Peer(2, 1))
        assert run.on(GuestAsked(9, "10.0.0.7:1"), 1.0) == [Refuse(9)]
        assert run.guests == [Peer(1, 1), Peer(2, 1)]

    def test_the_place_of_one_that_leaves_is_vacant_again(self) -> None:
        run = of_train(vacant=(1,), has_join_server=True)
        run.open()
        run.on(GuestAsked(1, "10.0.0.5:1"), 1.0)
        orders = run.on(GuestLeft(Peer(1, 1), "10.0.0.5:1", "is gone"), 2.0)
        assert announced(orders) == {(Peer(1, 1), peer) for peer in (LEADER, SECOND, SERVER)}
        assert said(orders) == [
            "worker 1 (rank 1), which joined from 10.0.0.5:1, is gone; its place is vacant"
        ]
        assert Seat(2, Peer(1, 2)) in run.on(GuestAsked(2, "10.0.0.6:1"), 3.0)

    def test_one_that_has_taken_all_its_steps_needs_no_successor(self) -> None:
        run = of_train(vacant=(1,), has_join_server=True)
        run.open()
        run.on(GuestAsked(1, "10.0.0.5:1"), 1.0)
        assert run.on(GuestLeft(Peer(1, 1), "10.0.0.5:1", done=True), 2.0) == []
        assert run.guests == []
        assert run.on(GuestAsked(2, "10.0.0.6:1"), 3.0) == [Refuse(2)]

    def test_a_lost_worker_without_a_successor_leaves_its_place_to_guests(self) -> None:
        run = of_train(restarts=0, has_join_server=True)
        assert said(run.on(Exited(FIRST, KILLED), 1.0)) == [
            "worker 1 (rank 1) was killed by SIGKILL; the others continue, and its place is vacant for a joining worker"
        ]
        assert Seat(1, Peer(1, 1)) in run.on(GuestAsked(1, "10.0.0.5:1"), 2.0)

    def test_a_guest_and_a_successor_that_come_at_once_know_of_each_other(self) -> None:
        """The guest learns from the store of one that is started before it has its place; else that one knows it."""
        run = of_train(vacant=(1,), has_join_server=True)
        run.open()
        run.on(Exited(SECOND, KILLED), 1.0)
        run.on(GuestAsked(1, "10.0.0.5:1"), 1.4)
        assert starts(run.on(Quiet(), 1.5)) == [Start(Peer(2, 1), {0: 0, 1: 1, 3: 0})]

    def test_guests_are_told_of_losses_and_count_as_workers(self) -> None:
        run = of_train(vacant=(1,), restarts=0, has_join_server=True, min_workers=2)
        run.open()
        run.on(GuestAsked(1, "10.0.0.5:1"), 1.0)
        orders = run.on(Exited(SECOND, KILLED), 2.0)
        assert (SECOND, Peer(1, 1)) in announced(orders)
        assert Stop() not in orders

    def test_a_run_does_not_go_on_for_guests_alone(self) -> None:
        run = of_train(vacant=(1,), has_join_server=True)
        run.open()
        run.on(GuestAsked(1, "10.0.0.5:1"), 1.0)
        run.on(Ended(), 2.0)
        for peer in (LEADER, SECOND):
            assert goes_on(run.on(Exited(peer, 0), 3.0))
        assert ended(run.on(Exited(SERVER, 0), 3.0)) is None
        assert run.guests == [Peer(1, 1)]
        run.on(GuestLeft(Peer(1, 1), "10.0.0.5:1", done=True), 3.1)
        assert run.guests == []

    def test_refusals_are_said_once_a_reason_and_counted_at_the_end(self) -> None:
        run = of_train(has_join_server=True)
        facts = [
            GuestRefused(f"10.0.0.{number}:1", "token", "it does not know the token") for number in (1, 2)
        ]
        assert said(run.on(facts[0], 1.0)) == [
            "the join server refused 10.0.0.1:1 (token): it does not know the token"
        ]
        assert run.on(facts[1], 1.1) == []
        run.on(GuestRefused("10.0.0.3:1", "silent", "it said nothing"), 1.2)
        assert run.on(Ended(), 2.0) == [
            PrintMessage("the join server refused 3 visitors: 2 token, 1 silent"),
            CloseJoinServer(),
        ]


class TestTorchrun:
    """Ranks that only torchrun starts: they call for their places."""

    def run(self) -> Supervisor:
        made = Supervisor(RoleAssignment((0, 1, 3), (2,)), range(4), Rules())
        made.on(Began(), 0.0)
        return made

    def test_one_that_calls_waits_until_the_last_process_is_known_to_be_lost(self) -> None:
        run = self.run()
        assert run.on(Called(1), 1.0) == []
        orders = run.on(Lost(1), 2.0)
        assert announced(orders) == {(FIRST, Peer(rank, 0)) for rank in (0, 2, 3)}
        assert [start.peer for start in starts(orders)] == [Peer(1, 1)]

    def test_one_without_a_pulse_is_lost_though_nobody_has_noticed(self) -> None:
        run = self.run()
        run.on(Called(1), 1.0)
        assert [start.peer for start in starts(run.on(Missed(1), 2.0))] == [Peer(1, 1)]
        assert run.on(Missed(1), 3.0) == []  # nobody calls for it any more

    def test_one_that_died_before_it_took_part_is_followed_by_the_next(self) -> None:
        run = self.run()
        run.on(Lost(1), 1.0)
        peers = [start.peer for _ in range(3) for start in starts(run.on(Called(1), 2.0))]
        assert peers == [Peer(1, 1), Peer(1, 2), Peer(1, 3)]
        run.on(Joined(1), 3.0)
        assert run.on(Called(1), 4.0) == []

    def test_late_news_of_a_loss_loses_nobody_else(self) -> None:
        run = self.run()
        run.on(Lost(1), 1.0)
        run.on(Called(1), 2.0)
        assert run.on(Lost(1), 2.1) == []  # of the one before

    def test_a_rank_that_the_run_does_not_have_gets_no_place(self) -> None:
        assert self.run().on(Called(17), 1.0) == []


class TestScripts:
    def test_servers_are_started_when_the_policy_is_known(self) -> None:
        run = of_script()
        assert run.on(known("parameter_server(servers=2)"), 1.0) == [Start(Peer(3, 0)), Start(Peer(4, 0))]

    def test_before_it_is_known_no_loss_is_survived(self) -> None:
        run = of_script(last_words_s=3.0)
        assert run.on(Exited(FIRST, KILLED), 1.0) == []
        assert run.next_s == 4.0
        assert str(ended(run.on(Quiet(), 4.0))) == "worker 1 (rank 1) was killed by SIGKILL"

    def test_it_may_become_known_while_others_say_their_last_words(self) -> None:
        """The decision stands, but why a worker's death ends the run can now be said."""
        run = of_script()
        run.on(Exited(FIRST, KILLED), 1.0)
        assert run.on(known("parameter_server"), 1.2) == []  # no server is started any more
        run.on(known("hybrid"), 1.3)
        assert str(ended(run.on(Quiet(), 3.0))) == (
            "worker 1 (rank 1) was killed by SIGKILL; hybrid does not survive the loss of a worker"
        )

    def test_a_successor_needs_a_loop_that_says_where_it_is(self) -> None:
        run = of_script()
        run.on(known("parameter_server"), 1.0)
        assert said(run.on(Exited(FIRST, KILLED), 2.0)) == [
            "worker 1 (rank 1) was killed by SIGKILL; the others continue; its place stays empty, since the loop does "
            "not report its position: write `for epoch in group.epochs(n)`"
        ]
        run.on(Admits("its place stays empty for a reason"), 3.0)
        assert said(run.on(Exited(SECOND, KILLED), 4.0))[0].endswith(
            "continue; its place stays empty for a reason"
        )

    def test_one_that_can_come_in_is_started_again(self) -> None:
        run = of_script()
        run.on(known("parameter_server"), 1.0)
        run.on(Admits(), 1.5)
        orders = run.on(Exited(FIRST, KILLED), 2.0)
        assert Vacate(1, coming=True) in orders
        assert said(orders)[0].endswith(
            "the others continue, and it is started again in 0.5 s (restart 1 of 3)"
        )
        assert [start.peer for start in starts(run.on(Quiet(), 2.5))] == [Peer(1, 1)]

    def test_a_worker_that_the_servers_let_go_is_a_loss_and_one_with_an_error_is_none(self) -> None:
        run = of_script()
        run.on(known("parameter_server"), 1.0)
        assert goes_on(run.on(Exited(FIRST, 1, kind=PEER), 2.0))
        assert run.on(Exited(SECOND, 1, kind=BUG), 3.0) == []
        assert str(ended(run.on(Quiet(), 5.0))) == "worker 2 (rank 2) left with status 1"

    def test_after_an_error_of_a_ranks_own_no_loss_is_survived(self) -> None:
        run = of_script()
        run.on(known("parameter_server"), 1.0)
        run.on(Blamed(2), 2.0)
        assert run.on(Exited(FIRST, KILLED), 2.0) == []
        assert str(ended(run.on(Quiet(), 5.0))) == "worker 2 (rank 2) raised an error and did not leave"

    def test_those_who_wait_for_worker_0_are_started_over_when_it_is_lost(self) -> None:
        run = of_script()
        for fact in (known("synchronous"), Admits(), Began()):
            run.on(fact, 1.0)
        run.on(Exited(FIRST, KILLED), 2.0)
        run.on(Quiet(), 2.5)
        run.on(Waiting(1), 3.0)
        orders = run.on(Exited(LEADER, KILLED), 4.0)
        assert orders[0] == Kill(Peer(1, 1))
        assert said(orders) == [
            "worker 1 (rank 1) was killed by SIGKILL; the others continue, and it is started again in 1 s "
            "(restart 1 of 3)",
            "worker 0 (rank 0) was killed by SIGKILL; the others wait for its replacement, and it is started again "
            "at once (restart 1 of 3)",
        ]
        assert [start.peer for start in starts(orders)] == [Peer(0, 1)]
        assert [start.peer for start in starts(run.on(Quiet(), 5.0))] == [Peer(1, 2)]

    def test_those_who_wait_for_worker_0_have_nothing_to_say_of_its_end(self) -> None:
        run = of_script()
        run.on(known("synchronous"), 1.0)
        run.on(Exited(LEADER, KILLED), 2.0)
        assert str(ended(run.on(Quiet(), 2.0))) == "worker 0 (rank 0) was killed by SIGKILL"

    def test_who_comes_when_it_is_over_comes_too_late(self) -> None:
        run = of_script()
        for fact in (known("synchronous"), Admits(), Began()):
            run.on(fact, 1.0)
        run.on(Exited(FIRST, KILLED), 2.0)
        run.on(Exited(SECOND, KILLED), 2.0)
        run.on(Quiet(), 2.5)
        run.on(Joined(1), 3.0)
        assert run.on(Over(), 4.0) == [Kill(Peer(2, 1))]
        assert goes_on(run.on(Exited(LEADER, 0), 5.0))
        assert ended(run.on(Exited(Peer(1, 1), 0), 5.0)) is None


class TestVerdict:
    """Which of several failures explains the others."""

    def judged(self, *facts: Fact) -> Exception | None:
        run = of_train(RoleAssignment((0, 1), (2,)), "hybrid")
        orders: list[Order] = []
        for fact in facts:
            orders += run.on(fact, 1.0)
        return ended(orders + run.on(Quiet(), 9.0))

    def test_a_wrong_request_explains_all(self) -> None:
        found = self.judged(Failed(LEADER, RUN, "broke"), Failed(FIRST, REQUEST, "the loss is nan"))
        assert isinstance(found, RequestError)
        assert str(found) == "the loss is nan"

    @pytest.mark.parametrize("echo", [RUN, PEER, BUG])
    def test_a_killed_rank_explains_what_the_others_saw(self, echo: str) -> None:
        found = self.judged(Failed(LEADER, echo, "a collective broke"), Exited(SECOND, KILLED))
        assert isinstance(found, RunError)
        assert str(found) == f"server 0 (rank 2) was killed by SIGKILL; {RESUME}"

    def test_a_failure_explains_a_lost_peer(self) -> None:
        found = self.judged(Failed(LEADER, PEER, "rank 1 is gone"), Failed(FIRST, BUG, "Traceback…"))
        assert str(found) == "worker 1 (rank 1): Traceback…"

    def test_a_lost_peer_is_better_than_nothing(self) -> None:
        found = self.judged(Failed(LEADER, PEER, "rank 1 is gone"), Exited(LEADER, 1), Exited(FIRST, 0))
        assert not isinstance(found, RankLost)
        assert str(found) == "worker 0 (rank 0): rank 1 is gone"

    def test_where_others_were_lost_before_they_may_have_been_too_many(self) -> None:
        run = of_train(restarts=0)
        run.on(Exited(FIRST, KILLED), 1.0)
        run.on(Failed(LEADER, PEER, "rank 2 is gone"), 2.0)
        assert isinstance(ended(run.on(Quiet(), 4.0)), RankLost)


@pytest.mark.parametrize("make", [of_train, of_script])
def test_nothing_is_ordered_once_the_run_has_ended(make: Callable[[], Supervisor]) -> None:
    run = make()
    orders = [order for rank in range(4) for order in run.on(Exited(Peer(rank, 0), 0), 1.0)]
    assert orders == [End(None)]
    assert run.on(Quiet(), 99.0) == []
