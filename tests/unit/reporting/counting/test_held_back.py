"""What held a run back, from events made by hand and from simulated runs of which one knows it."""

from __future__ import annotations

import re
from dataclasses import asdict, replace

import pytest

from conformance.jobs import blobs, make_job, simulated
from polyrhythm.events import (
    BatchesBalanced,
    Evaluated,
    InputWaited,
    RunEnded,
    ServerProgress,
    WorkerProgress,
)
from polyrhythm.reporting.figures import RunFigures
from polyrhythm.reporting.held_back import Bottleneck, held_back
from polyrhythm.simulation.run import ConstantCluster
from unit.reporting.counting.ten_steps import ten_steps


def found(
    workers: list[tuple[float, float]], *, busy: float = 0.0, queue: float = 0.0, staleness: int = 0
) -> Bottleneck:
    """Ten steps a worker: each computes and waits for so many seconds in all."""
    figures = ten_steps(workers, servers=1 if busy else 0)
    if busy:
        for part in (0.5, 1.5):  # two stretches, of which the second is three times as long
            figures.add(
                ServerProgress(
                    time_s=1,
                    server=0,
                    version=10,
                    staleness={staleness: 5},
                    seconds=part,
                    busy_share=busy,
                    queue=queue,
                )
            )
    told = held_back(figures)
    assert told is not None
    assert bool(told.remedy) == (told.cause != "compute"), "every bottleneck has a remedy"
    return told


def test_shares_add_up_to_all_time() -> None:
    told = found([(6, 4), (8, 2)])
    assert told.compute_share == pytest.approx(14 / 20)
    assert told.exchange_share == pytest.approx(0.2 * 20 / 20)  # the slower one waits 0.2 s a step
    assert told.slower_workers_share == pytest.approx(2 / 20)
    assert asdict(told)["gains"] == pytest.approx({"the network": 0.25, "slower workers": 0.25})
    assert told.gain == pytest.approx(0.25)


def test_computing_is_named_where_nothing_else_would_gain_a_tenth() -> None:
    told = found([(9.2, 0.8), (9.4, 0.6)])
    assert (told.cause, told.gain, told.bottleneck) == ("compute", 0.0, "computing")
    assert told.problem == "none: no cause but computing costs more than 6.0 % of the time"
    assert told.time == "93.0 % computing, 1.0 % waiting for slower workers, 6.0 % communication"


def test_the_largest_share_is_not_named_where_another_cause_would_gain() -> None:
    """Three of four workers wait half their time for the fourth: 62.5 % is computing, and twice the speed is lost."""
    told = found([(5, 5), (5, 5), (5, 5), (10, 0)])
    assert told.compute_share == pytest.approx(0.625)
    assert told.cause == "stragglers"
    assert told.gain == pytest.approx(1.0)
    assert told.problem == ("worker 3 is 2.0× slower than the median, and the others wait for it")
    assert told.time == "62.5 % computing, 37.5 % waiting for slower workers, 0.0 % communication"
    assert told.text == (
        f"{told.problem}; remedy: `--balance measured`, which gives it a smaller share, up to +42 % images/s"
    )
    # Three steps are measured. Of the others' 400 images 115 are the most of a fast worker: 0.575 s in place of 1 s.
    assert told.remedy_gain == pytest.approx(10 / (3 * 1 + 7 * 0.575) - 1)


def test_who_has_nothing_left_to_do_waits_for_the_end_of_the_run() -> None:
    figures = ten_steps([(2, 0), (2, 0), (9, 1)], servers=0)
    figures.add(RunEnded(time_s=10, outcome="done", result={}))
    told = held_back(figures)
    assert told is not None
    assert told.nothing_left_share == pytest.approx(16 / 30)
    assert told.compute_share + told.exchange_share + told.slower_workers_share == pytest.approx(14 / 30)
    assert told.cause == "nothing left"
    assert told.problem.endswith("finish early and idle")
    assert told.time.endswith(", 53.3 % idle at the end")
    assert told.text.endswith("up to +114 % images/s")


def test_a_straggler_is_named() -> None:
    told = found([(2, 8), (2, 8), (9.6, 0.4)])
    assert told.cause == "stragglers"
    assert "worker 2 is 4.8× slower than the median" in told.problem


def test_steps_that_are_unequally_long_are_no_stragglers() -> None:
    told = found([(3, 7), (3.2, 6.8), (3.4, 0.2)])
    assert told.cause == "lock-step waiting"


@pytest.mark.parametrize(
    ("free_running", "cause", "slower"), [(False, "stragglers", 17 / 30), (True, "network", 0)]
)
def test_free_running_workers_wait_for_no_slower_one(free_running: bool, cause: str, slower: float) -> None:
    # The first one shares a host with the servers, say, and so hardly waits; but it computes slowly.
    told = held_back(ten_steps([(10, 0), (1, 9), (2, 8)], servers=0, free_running=free_running))
    assert told is not None
    assert (told.cause, told.slower_workers_share) == (cause, pytest.approx(slower))
    assert told.compute_share + told.slower_workers_share + told.exchange_share == pytest.approx(1)
    assert ("slower workers" in told.time) is not free_running


@pytest.mark.parametrize("spec", ["ad_psgd", "easgd", "parameter_server", "periodic_averaging(steps=2)"])
def test_a_slow_worker_holds_no_free_running_one_back(spec: str) -> None:
    around = ConstantCluster(step_s=lambda worker: 0.05 if worker == 1 else 0.01, bandwidth_bytes_per_s=2e4)
    assert simulated_cause(spec, around).slower_workers_share == 0


def test_busy_servers_are_told_from_a_slow_network() -> None:
    served = found([(2, 8), (2, 8)], busy=0.9, queue=4.5, staleness=1)
    assert served.cause == "servers"
    assert served.problem == "the servers are busy 90.0 % of the time, with a queue of 4.5 messages"
    assert "more servers" in served.remedy
    assert (served.servers_busy_share, served.server_queue) == (pytest.approx(0.9), pytest.approx(4.5))
    slow = found([(2, 8), (2, 8)], busy=0.1, queue=1, staleness=1)
    assert slow.cause == "network"
    assert slow.problem == ("communication with the servers, over links that all workers share")
    assert found([(2, 8), (2, 8)]).cause == "network"


def test_before_the_first_step_nothing_is_said() -> None:
    assert held_back(RunFigures()) is None


def simulated_cause(spec: str, around: ConstantCluster) -> Bottleneck:
    figures = RunFigures.of(simulated(make_job(spec, 3, dataset=blobs(train=144)), around).events)
    told = held_back(figures)
    assert told is not None
    return told


def test_known_causes_of_simulated_runs() -> None:
    synchronous = "parameter_server(consistency=synchronous)"

    def one_slow(worker: int) -> float:
        return 0.05 if worker == 1 else 0.01

    straggler = simulated_cause(synchronous, ConstantCluster(step_s=one_slow))
    assert straggler.cause == "stragglers"
    assert straggler.slower_workers_share == pytest.approx(2 * 0.04 / (3 * 0.05), rel=0.05)
    thin = ConstantCluster(bandwidth_bytes_per_s=2e4)  # 412 bytes take 21 ms
    assert simulated_cause(synchronous, thin).cause == "network"
    assert simulated_cause("parameter_server", ConstantCluster(bandwidth_bytes_per_s=1e9)).cause == "compute"


def test_a_run_is_not_advised_the_strategy_that_it_has() -> None:
    thin = ConstantCluster(bandwidth_bytes_per_s=2e4)
    often, rarely = (simulated_cause(spec, thin) for spec in ("synchronous", "local_sgd(steps=2)"))
    assert "`--strategy 'local_sgd(steps=4)'`" in often.remedy
    assert "local_sgd" not in rarely.remedy
    assert "a larger `steps`" in rarely.remedy


@pytest.mark.parametrize(("spec", "servers", "key"), [
    ("decoupled_diloco(steps=10)", 2, "steps"),
    ("periodic_averaging", 1, "steps"),
    ("easgd", 1, "tau"),
    ("local_sgd", 0, "steps"),
])  # fmt: skip
def test_what_exchanges_rarely_is_advised_to_do_so_more_rarely(spec: str, servers: int, key: str) -> None:
    for waited_s, exchange_s in ((8, 8), (8, 0.1)):  # for the network; for each other
        figures = ten_steps([(2, waited_s), (2, waited_s)], servers=servers)
        assert figures.started is not None
        figures.started = replace(figures.started, strategy=spec)
        for worker in figures.workers.values():
            worker.last.exchange_s = exchange_s
        told = held_back(figures)
        assert told is not None
        assert told.cause in ("network", "lock-step waiting")
        assert f"a larger `{key}`" in told.remedy
        assert "local_sgd" not in told.remedy


def test_workers_wait_for_the_slower_ones_of_their_group() -> None:
    """Two groups of two: worker 3 computes three times as long, and worker 2 waits for it."""
    figures = ten_steps([(4, 1), (4, 1), (4, 9), (12, 1)], servers=1)
    assert figures.started is not None
    figures.started = replace(figures.started, strategy="mixed")
    told = held_back(figures)
    assert told is not None
    assert told.cause == "stragglers"
    assert told.problem.startswith("worker 3 is 3.0× slower")
    assert told.gain == pytest.approx(0.8)  # 1.3 s a step would be 0.5 s, in a group that has 26 of 36 s
    assert told.slower_workers_share * 36 == pytest.approx(8)
    assert told.exchange_share * 36 == pytest.approx(4)
    # With 150 and 50 images, its group's step takes 0.6 s less, from the fourth one on.
    assert told.remedy_gain == pytest.approx((1 + 13 / (3 * 1.3 + 7 * 0.7)) / 2 - 1)


def test_groups_that_wait_for_each_other_wait_for_the_slowest_worker_of_all() -> None:
    figures = ten_steps([(4, 9), (4, 9), (4, 9), (12, 1)], servers=1)
    assert figures.started is not None
    figures.started = replace(figures.started, strategy="mixed(consistency=synchronous)")
    told = held_back(figures)
    assert told is not None
    assert told.problem.startswith("worker 3 is 3.0× slower")
    assert told.gain == pytest.approx(1.3 / 0.5 - 1)
    assert told.exchange_share * 52 == pytest.approx(4)


def test_a_slow_network_of_groups_has_a_remedy_inside_them() -> None:
    figures = ten_steps([(2, 8), (2, 8)], servers=1)
    assert figures.started is not None
    for spec, remedy in (
        ("mixed", "`inside=local_sgd(steps=4)`"),
        ("mixed(inside=local_sgd(steps=4))", "a larger `steps` of `inside`"),
    ):
        figures.started = replace(figures.started, strategy=spec)
        told = held_back(figures)
        assert told is not None
        assert remedy in told.remedy


def test_a_single_worker_waits_for_nobody() -> None:
    figures = ten_steps([(2, 8)], servers=0)
    told = held_back(figures)
    assert told is not None
    assert (told.cause, told.time) == ("compute", "20.0 % computing, 80.0 % other waiting")
    assert figures.started is not None
    figures.started = replace(figures.started, threads=1, cores=2)
    figures.workers[0].last.processor_s = 1.5
    told = held_back(figures)
    assert told is not None
    assert (told.cause, told.remedy) == ("processor", "fewer other programs")


@pytest.mark.parametrize(("spec", "advised"), [
    ("synchronous", True),
    ("synchronous(compress=bfloat16)", False),
    ("mixed(replicas=1, servers=1)", False),
    ("local_sgd(steps=3, aggregator=trimmed_mean)", False),
])  # fmt: skip
def test_compression_is_advised_where_it_can_be_had_and_is_not(spec: str, advised: bool) -> None:
    figures = ten_steps([(2, 8), (2, 8)], servers=0)
    assert figures.started is not None
    figures.started = replace(figures.started, strategy=spec)
    told = held_back(figures)
    assert told is not None
    assert told.cause == "network"
    assert ("--compress" in told.remedy) is advised
    assert "--batch-size" in told.remedy


@pytest.mark.parametrize(("spec", "balanced", "advised"), [
    ("synchronous", False, True),
    ("synchronous", True, False),
    ("d_psgd", False, False),
])  # fmt: skip
def test_shares_by_speed_are_advised_where_they_can_be_had_and_are_not(
    spec: str, balanced: bool, advised: bool
) -> None:
    figures = ten_steps([(5, 5), (5, 5), (5, 5), (10, 0)], servers=0)
    assert figures.started is not None
    figures.started = replace(figures.started, strategy=spec)
    if balanced:
        figures.add(BatchesBalanced(time_s=1, step=3, sizes=[4, 4, 4, 3]))
    told = held_back(figures)
    assert told is not None
    assert told.cause == "stragglers"
    assert ("--balance" in told.remedy) is advised
    assert ("backup_workers" in told.remedy) is not advised


@pytest.mark.parametrize(
    ("busy_s", "name"), [(4.0, "decoding and augmentation of images"), (0.2, "reading of images")]
)
def test_slow_disks_are_told_from_heavy_decoding(busy_s: float, name: str) -> None:
    """Four of ten seconds of either worker waited for batches, and its process computed in them or did not."""
    figures = ten_steps([(10, 0), (10, 0)], servers=0)
    for worker in (0, 1):
        figures.add(InputWaited(time_s=10, worker=worker, seconds=4.0, busy_s=busy_s))
    told = held_back(figures)
    assert told is not None
    assert (told.cause, told.bottleneck, told.input_share) == ("input", name, pytest.approx(0.4))
    assert told.gain == pytest.approx(1 / 0.6 - 1)
    assert told.compute_share == pytest.approx(0.6)


@pytest.mark.parametrize(("busy_s", "decoders_s"), [(0.4, 0.0), (2.0, 0.6), (4.0, 1.2), (7.0, 1.2)])
def test_waits_for_a_core_that_decoders_have_end_with_decoding(busy_s: float, decoders_s: float) -> None:
    """Of ten seconds four are waits for batches; two are waits for a core, 1.2 of them outside those."""
    figures = ten_steps([], servers=0)
    assert figures.started is not None
    figures.started = replace(figures.started, workers=2, cores=2)
    for worker in (0, 1):
        figures.add(
            WorkerProgress(
                time_s=10,
                worker=worker,
                epoch=0,
                step=10,
                steps=10,
                images=10,
                loss=1.0,
                learning_rate=0.1,
                processor_s=2.0,
            )
        )
        figures.add(InputWaited(time_s=10, worker=worker, seconds=4.0, busy_s=busy_s))
    told = held_back(figures)
    assert told is not None
    assert told.gain == pytest.approx(10 / (6 - decoders_s) - 1)
    assert (told.input_share, told.processor_share, told.compute_share) == pytest.approx((0.4, 0.12, 0.48))
    others = told.gains.get("other programs on the same cores", 0.0)
    assert others == pytest.approx(10 / (8.8 + decoders_s) - 1)


def test_images_of_tests_count_as_reading_and_not_as_tests() -> None:
    """Ten steps of a second, five seconds of testing of which worker 0 read for four, ten steps, two of them waits."""
    figures = ten_steps([(10, 0), (10, 0)], servers=0)
    figures.add(Evaluated(time_s=15, epoch=1, test_loss=1.0, test_top1=0.5, test_top5=0.9))
    for worker, testing_s in enumerate((4.0, 1.0)):
        figures.add(
            WorkerProgress(
                time_s=25, worker=worker, epoch=1, step=20, steps=10, images=10, loss=1.0, learning_rate=0.1
            )
        )
        figures.add(InputWaited(time_s=25, worker=worker, seconds=2.0, busy_s=0.1, testing_s=testing_s))
    told = held_back(figures)
    assert told is not None
    assert (told.cause, told.bottleneck) == ("input", "reading of images")
    assert told.input_share == pytest.approx(6 / 25)
    assert told.tested_images_share == pytest.approx(4 / 25)
    assert told.testing_share == pytest.approx(1 / 25)
    assert told.gain == pytest.approx(25 / 19 - 1)
    assert told.compute_share == pytest.approx(18 / 25)


def test_servers_say_what_they_have_done_until_the_end() -> None:
    events = simulated(
        make_job("backup_workers(servers=2)", 3), ConstantCluster(step_s=lambda w: 0.01 * (1 + w))
    ).events
    told = [event for event in events if isinstance(event, ServerProgress)]
    assert {event.server for event in told} == {0, 1}
    assert sum(sum(event.staleness.values()) for event in told) == 2 * 2 * 10
    assert {event.version for event in told if event.server == 0} >= {10}
    assert all(0 <= event.busy_share <= 1 and event.queue >= 1 for event in told)
    late = max(event.dropped for event in told)
    assert late > 0


def test_what_the_processor_and_other_stages_cost_is_told_apart_and_all_adds_up() -> None:
    figures = ten_steps([(6, 4), (8, 2)], servers=0)
    for worker, (stage_s, processor_s) in enumerate([(3.0, 1.0), (1.5, 2.0)]):
        figures.add(
            WorkerProgress(
                time_s=20,
                worker=worker,
                epoch=0,
                step=20,
                steps=10,
                images=10,
                loss=1.0,
                learning_rate=0.1,
                wait_s=4.0,
                stage_s=stage_s,
                processor_s=processor_s,
            )
        )
    told = held_back(figures)
    assert told is not None
    assert told.stage_share == pytest.approx(4.5 / 40)
    assert told.processor_share == pytest.approx(3 / 40)
    assert told.compute_share == pytest.approx((14 + 12 - 3) / 40)
    # Worker 1 waits 4.5 s for no stage, the other 5 s.
    assert told.network_share == pytest.approx(2 * 4.5 / 40)
    assert "7.5 % waiting for a core" in told.time
    shares = told.stage_share + told.processor_share + told.compute_share + told.network_share
    assert shares + told.slower_workers_share + told.server_share == pytest.approx(1)


def test_tests_between_epochs_are_no_computing() -> None:
    """Ten steps of a second each, five seconds of testing, ten steps: a fifth of 25 s."""
    figures = ten_steps([(10, 0), (10, 0)], servers=0)
    figures.add(Evaluated(time_s=15, epoch=1, test_loss=1.0, test_top1=0.5, test_top5=0.9))
    for worker in (0, 1):
        figures.add(
            WorkerProgress(
                time_s=25, worker=worker, epoch=1, step=20, steps=10, images=10, loss=1.0, learning_rate=0.1
            )
        )
    figures.add(Evaluated(time_s=40, epoch=2, test_loss=1.0, test_top1=0.5, test_top5=0.9))
    assert figures.testing_s == 5  # the last test keeps no worker from a step
    told = held_back(figures)
    assert told is not None
    assert told.cause == "tests"
    assert told.compute_share + told.testing_share == pytest.approx(1)
    assert (
        told.time == "80.0 % computing, 0.0 % waiting for slower workers, 0.0 % communication, 20.0 % tests"
    )


def test_more_processes_than_cores_wait_for_the_processor() -> None:
    assert found([(2, 0), (2, 0)]).processor_share == 0
    figures = ten_steps([(2, 0)], servers=0)
    figures.add(
        WorkerProgress(
            time_s=12,
            worker=0,
            epoch=0,
            step=20,
            steps=10,
            images=10,
            loss=1.0,
            learning_rate=0.1,
            processor_s=30.0,  # its other threads, say: never more than what it did not wait for others
        )
    )
    told = held_back(figures)
    assert told is not None
    assert (told.cause, told.processor_share, told.compute_share) == ("processor", 1, 0)


def test_waiting_for_cores_in_tests_is_not_counted_twice() -> None:
    """Ten steps of a second, five seconds of testing, ten steps; ten of the 25 s waited for a core, two in the test."""
    figures = ten_steps([(10, 0)], servers=0)
    figures.add(Evaluated(time_s=15, epoch=1, test_loss=1.0, test_top1=0.5, test_top5=0.9))
    figures.add(
        WorkerProgress(
            time_s=25,
            worker=0,
            epoch=1,
            step=20,
            steps=10,
            images=10,
            loss=1.0,
            learning_rate=0.1,
            processor_s=10.0,
        )
    )
    told = held_back(figures)
    assert told is not None
    assert (told.testing_share, told.processor_share) == (pytest.approx(0.2), pytest.approx(0.32))
    assert told.compute_share == pytest.approx(0.48)


def test_what_is_told_adds_up_to_all_time_although_little_things_have_no_name_there() -> None:
    """A server that takes 0.5 % of the time is not named; what it takes is."""
    figures = ten_steps([(6, 4), (6, 4)], servers=1)
    figures.add(
        ServerProgress(
            time_s=1, server=0, version=10, staleness={1: 20}, seconds=10, busy_share=0.05, updating_s=0.1
        )
    )
    told = held_back(figures)
    assert told is not None
    assert "for servers" not in told.time
    assert "0.5 % other waiting" in told.time
    shares = [float(part) for part in re.findall(r"([0-9.]+) %", told.time)]
    assert sum(shares) == pytest.approx(100, abs=0.11)


@pytest.mark.parametrize(
    ("workers", "threads", "cores", "kind", "gains"),
    [
        (2, 1, 2, "other programs on the same cores", True),
        (6, 1, 2, "more processes than cores", False),
        (2, 4, 2, "more compute threads than cores", False),
    ],
)
def test_other_programs_are_told_from_too_many_processes_and_threads(
    workers: int, threads: int, cores: int, kind: str, gains: bool
) -> None:
    """Half of every step waited for a core; what fewer of them would gain is unknown."""
    figures = ten_steps([(10, 0)] * workers, servers=0)
    assert figures.started is not None
    figures.started = replace(figures.started, threads=threads, cores=cores)
    for worker in range(workers):
        total = figures.workers[worker].last
        total.processor_s = 5.0
    told = held_back(figures)
    assert told is not None
    assert next(iter(told.gains)) == kind
    assert told.gain == (pytest.approx(1.0) if gains else 0.0)
    assert told.cause == "processor"


def test_exchanges_on_cores_of_other_programs_are_no_slow_network() -> None:
    """Exchanges take 5 of 10 s, 4 of which workers wait for a core; they compute for 4 s and wait for one in 1 s."""
    figures = ten_steps([(5, 5), (5, 5)], servers=0)
    assert figures.started is not None
    figures.started = replace(figures.started, threads=1, cores=2)
    for series in figures.workers.values():
        series.last.exchange_s, series.last.exchange_processor_s, series.last.processor_s = 5.0, 4.0, 1.0
    told = held_back(figures)
    assert told is not None
    assert told.bottleneck == "other programs on the same cores"
    assert (told.processor_share, told.network_share) == (pytest.approx(0.5), pytest.approx(0.1))
    assert told.gains["other programs on the same cores"] == pytest.approx(1.0)
    assert told.gains["the network"] == pytest.approx(1 / 0.9 - 1)


def test_low_waits_of_single_steps_tell_unequal_steps_from_a_slow_network() -> None:
    """Both workers wait 4 of 10 s: for each other, if the last one at an exchange waits a tenth of that."""
    figures = ten_steps([(6, 4), (6, 4)], servers=0)
    network = held_back(figures)
    assert network is not None
    assert network.cause == "network"
    for series in figures.workers.values():
        series.last.exchange_s = 0.4
    unequal = held_back(figures)
    assert unequal is not None
    assert unequal.cause == "lock-step waiting"
    assert unequal.gains["steps of unequal length"] == pytest.approx(1 / (1 - 0.36) - 1)
    assert unequal.gains["the network"] == pytest.approx(1 / (1 - 0.04) - 1)
