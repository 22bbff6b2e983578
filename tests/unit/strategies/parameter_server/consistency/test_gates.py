"""The gates' decisions, one by one."""

import itertools
from random import Random

import pytest

from conformance.jobs import strategy
from polyrhythm.errors import RequestError
from polyrhythm.strategies.parameter_server.consistency.asynchronous import Asynchronous
from polyrhythm.strategies.parameter_server.consistency.backup import Backup
from polyrhythm.strategies.parameter_server.consistency.bounded_staleness import BoundedStaleness
from polyrhythm.strategies.parameter_server.consistency.softsync import Softsync
from polyrhythm.strategies.parameter_server.consistency.synchronous import Synchronous
from polyrhythm.strategies.parameter_server.serving.gate import Decision

NOTHING = Decision()


class TestSynchronous:
    def test_holds_all_until_the_last_and_starts_anew(self):
        gate = Synchronous().gate(3)
        everyone = Decision(apply=(0, 1, 2), answer=(0, 1, 2))
        assert [gate.arrive(pusher, 0) for pusher in (2, 0, 1)] == [NOTHING, NOTHING, everyone]
        assert [gate.arrive(pusher, 1) for pusher in (0, 1, 2)] == [NOTHING, NOTHING, everyone]

    def test_goes_on_without_those_who_left(self):
        gate = Synchronous().gate(3)
        assert gate.arrive(2, 0) == NOTHING
        assert gate.leave(0) == NOTHING
        assert gate.leave(1) == Decision(apply=(2,), answer=(2,))
        assert gate.leave(2) == NOTHING

    def test_what_a_lost_one_had_pushed_goes_with_the_others_and_is_not_answered(self):
        gate = Synchronous().gate(3)
        assert gate.arrive(2, 4) == NOTHING
        assert gate.leave(2) == NOTHING
        assert gate.arrive(0, 4) == NOTHING
        assert gate.arrive(1, 4) == Decision(apply=(0, 1, 2), answer=(0, 1))
        gate.join(2)
        assert gate.rounds.invitation(2) == 1
        assert [gate.arrive(pusher, 5) for pusher in (0, 1)] == [NOTHING, NOTHING]  # it may be for it, too
        assert gate.enter(2, 1) == Decision(answer=(2,))
        assert gate.arrive(2, 5) == Decision(apply=(0, 1, 2), answer=(0, 1, 2))

    def test_a_successor_comes_in_after_what_the_lost_one_had_pushed(self):
        gate = Synchronous().gate(2)
        gate.arrive(1, 4)
        gate.leave(1)
        gate.join(1)
        assert gate.rounds.invitation(1) == 1
        assert gate.enter(1, 1) == NOTHING
        assert gate.arrive(0, 4) == Decision(apply=(0, 1), answer=(0, 1))
        assert gate.arrive(1, 5) == NOTHING
        assert gate.arrive(0, 5) == Decision(apply=(0, 1), answer=(0, 1))

    def test_a_successor_lets_the_others_go_on_until_its_round(self):
        gate = Synchronous().gate(3)
        gate.leave(1)
        gate.join(1)
        assert [gate.arrive(0, 0), gate.arrive(2, 0)] == [NOTHING, NOTHING]
        assert gate.enter(1, 1) == Decision(apply=(0, 2), answer=(0, 1, 2))

    def test_a_successor_that_dies_before_it_has_come_in_holds_nobody_up(self):
        gate = Synchronous().gate(3)
        gate.leave(1)
        gate.join(1)
        assert [gate.arrive(0, 0), gate.arrive(2, 0)] == [NOTHING, NOTHING]
        assert gate.leave(1) == Decision(apply=(0, 2), answer=(0, 2))

    def test_an_older_checkpoint_holds_what_a_lost_one_had_pushed(self):
        gate = Synchronous().gate(2)
        gate.load_state(({}, {"orphans": [1]}))
        assert gate.arrive(1, 5) == NOTHING
        assert gate.arrive(0, 4) == Decision(apply=(0, 1, 1), answer=(0, 1))

    def test_of_one(self):
        assert Synchronous().gate(1).arrive(0, 5) == Decision(apply=(0,), answer=(0,))


def test_asynchronous_lets_everything_through():
    gate = Asynchronous().gate(3)
    for pusher in (1, 1, 0, 2):
        assert gate.arrive(pusher, 0) == Decision(apply=(pusher,), answer=(pusher,))
    assert gate.ask(2, 7) == Decision(answer=(2,))
    assert gate.leave(1) == NOTHING


class TestBackup:
    def test_the_first_n_make_the_update_and_the_late_one_is_dropped(self):
        gate = Backup(spare=1).gate(3)
        assert gate.arrive(2, 0) == NOTHING
        assert gate.arrive(0, 0) == Decision(apply=(0, 2), answer=(0, 2), step=1)
        assert gate.arrive(2, 1) == NOTHING
        assert gate.arrive(1, 0) == Decision(drop=(1,), answer=(1,), step=1)
        assert gate.arrive(1, 1) == Decision(apply=(1, 2), answer=(1, 2), step=2)

    def test_who_asks_goes_on_with_the_current_step(self):
        gate = Backup(spare=1).gate(2)
        for step in range(4):
            gate.arrive(0, step)
        assert gate.ask(1, 0) == Decision(answer=(1,), step=4)

    def test_what_a_lost_one_had_pushed_is_dropped_and_its_successor_counts_again(self):
        gate = Backup(spare=1).gate(3)
        assert gate.arrive(2, 0) == NOTHING
        assert gate.leave(2) == Decision(drop=(2,))
        assert gate.arrive(1, 0) == NOTHING
        gate.join(2)
        assert gate.arrive(2, 0) == Decision(apply=(1, 2), answer=(1, 2), step=1)

    def test_the_last_ones_wait_for_no_more_than_there_are(self):
        gate = Backup(spare=1).gate(4)
        assert gate.arrive(0, 0) == NOTHING
        assert gate.leave(1) == NOTHING
        assert gate.leave(2) == NOTHING
        assert gate.arrive(3, 0) == Decision(apply=(0, 3), answer=(0, 3), step=1)

    def test_nobody_spared_is_the_synchronous_gate(self):
        for order in itertools.permutations(range(3)):
            ours, theirs = Backup(spare=0).gate(3), Synchronous().gate(3)
            assert [ours.arrive(p, 0) for p in order] == [theirs.arrive(p, 0) for p in order]

    def test_the_order_of_arrival_does_not_change_the_order_of_the_sum(self):
        for order in itertools.permutations((0, 2, 3)):
            gate = Backup(spare=2).gate(5)
            assert [gate.arrive(p, 0) for p in order][-1].apply == (0, 2, 3)

    def test_state_is_the_step(self):
        gate, resumed = Backup(spare=1).gate(2), Backup(spare=1).gate(2)
        gate.arrive(0, 0)
        assert gate.state() == ({}, {"step": 1})
        resumed.load_state(gate.state())
        assert resumed.arrive(1, 0) == Decision(drop=(1,), answer=(1,), step=1)


class TestSoftsync:
    @pytest.mark.parametrize(("n", "gathers"), [(1, 5), (2, 2), (3, 1), (5, 1)])
    def test_c_is_the_pushers_divided_by_n(self, n, gathers):
        gate = Softsync(n=n).gate(5)
        applied = [gate.arrive(number % 5, number // 5).apply for number in range(10)]
        assert [len(apply) for apply in applied] == ([0] * (gathers - 1) + [gathers]) * (10 // gathers)

    def test_a_quick_one_may_give_two_and_is_answered_at_once(self):
        gate = Softsync(n=1).gate(3)
        assert gate.arrive(1, 0) == Decision(answer=(1,))
        assert gate.arrive(0, 0) == Decision(answer=(0,))
        assert gate.arrive(1, 1) == Decision(apply=(0, 1, 1), answer=(1,))

    def test_what_is_left_over_is_applied_when_all_have_left(self):
        gate = Softsync(n=1).gate(2)
        gate.arrive(1, 0)
        assert gate.leave(1) == NOTHING
        assert gate.leave(0) == Decision(apply=(1,))

    def test_state_is_whose_gradients_are_held(self):
        gate, resumed = Softsync(n=1).gate(3), Softsync(n=1).gate(3)
        gate.arrive(2, 0)
        resumed.load_state(gate.state())
        assert resumed.arrive(0, 0) == Decision(answer=(0,))
        assert resumed.arrive(1, 0) == Decision(apply=(0, 1, 2), answer=(1,))


class TestBoundedStaleness:
    def test_a_two_worker_trace_by_hand(self):
        """s = 1. A and B complete steps; who is more than one ahead waits."""
        gate = BoundedStaleness(s=1).gate(2)
        a, b = 0, 1
        assert gate.arrive(a, 0) == Decision(apply=(a,), answer=(a,))  # A 1, B 0: in progress 1 and 0
        assert gate.arrive(a, 1) == Decision(apply=(a,))  # A 2, B 0: A must wait
        assert gate.arrive(b, 0) == Decision(apply=(b,), answer=(a, b))  # A 2, B 1: both may go on
        assert gate.arrive(b, 1) == Decision(apply=(b,), answer=(b,))  # A 2, B 2
        assert gate.arrive(b, 2) == Decision(apply=(b,), answer=(b,))  # A 2, B 3: B is in step 3, A in step 2
        assert gate.arrive(b, 3) == Decision(apply=(b,))  # completed counts differ by s + 1, and B waits
        assert gate.leave(a) == Decision(answer=(b,))

    @pytest.mark.parametrize("s", [1, 2, 5])
    @pytest.mark.parametrize("workers", [2, 3, 6])
    def test_steps_in_progress_differ_by_at_most_s_and_nobody_waits_without_need(self, s, workers):
        for seed in range(5):
            random = Random(seed)
            gate = BoundedStaleness(s=s).gate(workers)
            clocks, running, widest = [0] * workers, set(range(workers)), 0
            for _ in range(300):
                pusher = random.choices(sorted(running), [1 + 5 * (w == 0) for w in sorted(running)])[0]
                running.remove(pusher)
                decision = gate.arrive(pusher, clocks[pusher])
                clocks[pusher] += 1
                running |= set(decision.answer)
                in_progress = [clocks[w] for w in running]
                widest = max(widest, max(in_progress) - min(clocks))
                assert widest <= s
                assert running == {w for w in range(workers) if clocks[w] - min(clocks) <= s}
            assert widest == s

    def test_a_pull_is_asked_for_as_well(self):
        """A resumed run in which A was ahead: it pulls, and must wait for B."""
        gate = BoundedStaleness(s=1).gate(2)
        gate.load_state(({}, {"clocks": [2, 0]}))
        assert gate.ask(0, 2) == NOTHING
        assert gate.ask(1, 0) == Decision(answer=(1,))
        assert gate.arrive(1, 0) == Decision(apply=(1,), answer=(0, 1))

    def test_nobody_waits_until_a_successor_has_caught_up(self):
        """Its step 0 is over when 0 has done five: its clock begins with 5."""
        gate = BoundedStaleness(s=1).gate(2)
        gate.arrive(0, 0)
        assert gate.arrive(0, 1) == Decision(apply=(0,))
        assert gate.leave(1) == Decision(answer=(0,))
        assert gate.arrive(0, 2) == Decision(apply=(0,), answer=(0,))
        gate.join(1)
        assert gate.ask(1, 0) == Decision(answer=(1,))
        assert gate.arrive(0, 3) == Decision(apply=(0,), answer=(0,))
        assert gate.arrive(0, 4) == Decision(apply=(0,), answer=(0,))  # nobody waits for its first step
        assert gate.arrive(1, 0) == Decision(apply=(1,), answer=(1,))
        assert gate.arrive(0, 5) == Decision(apply=(0,), answer=(0,))
        assert gate.arrive(0, 6) == Decision(apply=(0,))  # 7 against 5
        resumed = BoundedStaleness(s=1).gate(2)
        resumed.load_state(gate.state())
        assert resumed.arrive(1, 1) == Decision(
            apply=(1,), answer=(1,)
        )  # 0 has to ask again after a resumption
        assert gate.arrive(1, 1) == Decision(apply=(1,), answer=(0, 1))

    def test_two_successors_that_catch_up_do_not_hold_each_other_back(self):
        """Both are ten steps behind 0, and as quick: nobody ever waits."""
        gate = BoundedStaleness(s=3).gate(3)
        for lost in (1, 2):
            gate.leave(lost)
        for step in range(10):
            gate.arrive(0, step)
        for new in (1, 2):
            gate.join(new)
            assert gate.ask(new, 0).answer == (new,)
        for step in range(10):
            turns = [(0, step + 10), (1, step), (2, step)]
            for pusher, number in turns if step % 2 else reversed(turns):
                assert gate.arrive(pusher, number).answer == (pusher,)

    def test_who_is_left_of_successors_waits_for_none_that_is_through(self):
        """1 and 2 come late, 2 the later one, and 0 leaves. 1 is through first, and stays until 2 is."""
        gate = BoundedStaleness(s=3).gate(3)
        for lost in (1, 2):
            gate.leave(lost)
        for step in range(9):
            if step in {2, 7}:
                gate.join(1 if step == 2 else 2)
            gate.arrive(0, step)
            if step >= 2:
                gate.arrive(1, step - 2)
            if step >= 7:
                gate.arrive(2, step - 7)
        gate.leave(0)
        assert [gate.arrive(1, step).answer for step in (7, 8)] == [(1,)] * 2
        assert [gate.arrive(2, step).answer for step in range(2, 9)] == [(2,)] * 7

    def test_a_successor_never_waits_for_who_has_done_all_steps(self):
        """0 and 2 have done all three, and stay until 1 has as well."""
        gate = BoundedStaleness(s=1).gate(3)
        gate.leave(1)
        for step in range(3):
            for pusher in (0, 2):
                gate.arrive(pusher, step)
        gate.join(1)
        assert [gate.ask(1, 0).answer, *(gate.arrive(1, step).answer for step in range(3))] == [(1,)] * 4

    def test_s_0_is_the_synchronous_gate(self):
        for order in itertools.permutations(range(3)):
            ours, theirs = BoundedStaleness(s=0, cached_reads=True).gate(3), Synchronous().gate(3)
            assert [ours.arrive(p, 0) for p in order] == [theirs.arrive(p, 0) for p in order]
        assert BoundedStaleness(s=0).in_step()

    def test_cached_reads_travel_once_in_s_and_1_steps(self):
        """Two workers in turn, s = 2: the copy of the quicker one is read at 0, 3, 6 …"""
        gate = BoundedStaleness(s=2, cached_reads=True).gate(2)
        assert [gate.ask(p, 0).answer for p in (0, 1)] == [(0,), (1,)]
        fresh = {0: [], 1: []}
        for step in range(12):
            for pusher in (0, 1):
                decision = gate.arrive(pusher, step)
                assert (decision.answer or decision.acknowledge) == (pusher,)
                if decision.answer:
                    fresh[pusher].append(step + 1)
        assert fresh[1] == [3, 6, 9, 12]  # its copies hold all steps before its own
        assert fresh[0] == [3, 5, 7, 9, 11]  # those of the quicker one lack the other's step of that moment

    def test_alone_every_s_lets_everything_through(self):
        gate = BoundedStaleness(s=3).gate(1)
        assert all(gate.arrive(0, step).answer == (0,) for step in range(10))


EVERY = [Asynchronous(), Synchronous(), Backup(), Softsync(), BoundedStaleness()]


@pytest.mark.parametrize("consistency", EVERY, ids=str)
def test_a_new_gate_takes_back_the_state_of_another(consistency):
    gate = consistency.gate(4)
    gate.load_state(consistency.gate(4).state())
    found = gate.arrive(0, 0)
    assert found.answer == ((0,) if consistency.gathers(4) == 1 or isinstance(consistency, Softsync) else ())


@pytest.mark.parametrize(
    ("consistency", "in_step", "gathers", "updates", "spares"),
    [
        (Synchronous(), True, 4, 1, 4),
        (Asynchronous(), False, 1, 4, 4),
        (Backup(spare=1), False, 3, 1, 1),
        (Backup(spare=0), True, 4, 1, 4),
        (Softsync(n=1), False, 4, 1, 4),
        (Softsync(n=2), False, 2, 2, 4),
        (Softsync(n=3), False, 1, 4, 4),
        (BoundedStaleness(s=2), False, 1, 4, 4),
        (BoundedStaleness(s=0), True, 4, 1, 4),
    ],
    ids=str,
)
def test_what_consistencies_declare(consistency, in_step, gathers, updates, spares):
    found = (consistency.gathers(4), consistency.updates_per_step(4), consistency.spares(4))
    assert (consistency.in_step(), *found) == (in_step, gathers, updates, spares)


@pytest.mark.parametrize(
    ("spec", "workers", "complaint"),
    [
        ("ssp(s=-1)", 3, "strategy ssp: s should be greater than or equal to 0 (given -1)"),
        ("ssp(s=1.5)", 3, "strategy ssp: s should be a whole number (given 1.5)"),
        (
            "backup_workers(spare=3)",
            3,
            "backup(spare=3): spare is 3, but only 3 push: ask for 2 at most, or for more workers",
        ),
        (
            "backup_workers(spare=-1)",
            3,
            "strategy backup_workers: spare should be greater than or equal to 0 (given -1)",
        ),
        (
            "softsync(n=4)",
            3,
            "softsync(n=4): n is 4, but only 3 push: ask for 3 at most, which is asynchronous",
        ),
        ("softsync(n=0)", 3, "strategy softsync: n should be greater than or equal to 1 (given 0)"),
        (
            "mixed(consistency=bounded_staleness(s=2, cached_reads=True))",
            4,
            "bounded_staleness(s=2, cached_reads=True): replicas of a group share what their leader reads, and cannot "
            "each update a copy of their own: leave cached_reads out",
        ),
    ],
)
def test_what_cannot_be_is_one_line(spec, workers, complaint):
    with pytest.raises(RequestError) as error:
        strategy(spec).check(workers)
    assert str(error.value) == complaint
