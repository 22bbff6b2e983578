"""The gates' decisions, one by one."""

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


class TestBackup:
    def test_the_last_ones_wait_for_no_more_than_there_are(self):
        gate = Backup(spare=1).gate(4)
        assert gate.arrive(0, 0) == NOTHING
        assert gate.leave(1) == NOTHING
        assert gate.leave(2) == NOTHING
        assert gate.arrive(3, 0) == Decision(apply=(0, 3), answer=(0, 3), step=1)


class TestBoundedStaleness:
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
