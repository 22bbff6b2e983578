import math
from dataclasses import replace

import numpy as np
import pytest

from polyrhythm.events import (
    CheckpointSaved,
    Evaluated,
    Notice,
    RunEnded,
    RunStarted,
    WorkerJoined,
    WorkerLost,
    WorkerProgress,
)
from polyrhythm.reporting.figures import RunFigures, Staleness
from polyrhythm.reporting.held_back import held_back
from polyrhythm.reporting.progress import training_line


def test_images_per_second_of_workers_and_of_all(story):
    figures = RunFigures.of(story)
    rates = {
        worker: [part.images_per_s for part in series.stretches] for worker, series in figures.workers.items()
    }
    assert rates == {0: [200.0, 80.0], 1: [50.0, 30.0]}
    assert figures.recent_images_per_s == 110.0
    assert figures.images_per_s == 1040 / 8
    assert figures.images_seen == 1040


def test_loss_curve_is_over_the_images_of_all_workers(story):
    figures = RunFigures.of(story)
    curve = [(part.images_seen, part.loss) for part in figures.together.stretches]
    assert curve == [(400, 1.0), (600, 2.5), (920, 0.5), (1040, 0.25)]
    assert figures.recent_loss == (320 * 0.5 + 120 * 0.25) / 440


def test_waiting_is_a_share_of_the_time_of_the_workers(story):
    figures = RunFigures.of(story)
    shares = {worker: series.total.waiting_share for worker, series in figures.workers.items()}
    assert shares == {0: 0.5 / 6, 1: 0.5}
    assert figures.waiting_share == 4.5 / 14


def test_staleness_of_servers_merges_into_one_histogram(story):
    figures = RunFigures.of(story)
    assert figures.staleness_of[0].histogram == {0: 6, 1: 12, 2: 2}
    assert figures.staleness.histogram == {0: 14, 1: 12, 2: 2, 3: 4}
    every_gradient = np.repeat([0, 1, 2, 3], [14, 12, 2, 4])
    assert figures.staleness.mean == every_gradient.mean()
    assert figures.staleness.max == 3
    assert figures.versions == {0: 20, 1: 12}


def test_no_gradients_have_no_mean_staleness():
    assert math.isnan(Staleness().mean)
    assert Staleness().max == 0
    fresh = Staleness()
    fresh.add({0: 3, 4: 0})
    assert (fresh.mean, fresh.max) == (0.0, 0)


@pytest.mark.parametrize(("free_running", "images"), [(False, 200), (True, 300)])
def test_images_of_a_copy_that_was_tested(free_running, images):
    """Worker 1 began 0.2 s later: where workers wait for each other, its next epoch follows the model of the test."""
    start = RunStarted(
        time_s=0, strategy="s", data="d", model="m", workers=2, servers=0, epochs=2, steps_per_epoch=1
    )
    figures = RunFigures()
    figures.add(replace(start, free_running=free_running))
    for worker, epoch, time_s in [(0, 0, 1.0), (1, 0, 0.8), (1, 1, 1.1), (0, 1, 1.3)]:
        figures.add(
            WorkerProgress(
                time_s=time_s,
                worker=worker,
                epoch=epoch,
                step=epoch + 1,
                steps=1,
                images=100,
                loss=1.0,
                learning_rate=0.1,
            )
        )
    figures.add(
        Evaluated(time_s=1.4, epoch=1, test_loss=1, test_top1=0.5, test_top5=1, step=1, snapshot_s=1.2)
    )
    assert figures.tested_images == images


def test_time_left_is_that_of_the_slowest_worker(story):
    figures = RunFigures.of(story)
    # Worker 0 has 2 steps left at 6 s for 18; worker 1 has 5 at 8 s for 15.
    assert figures.time_left_s == pytest.approx(5 * 8 / 15)
    assert figures.fraction_done == (18 + 15) / 40


def test_a_lost_worker_keeps_nobody_waiting(story):
    figures = RunFigures.of([*story, WorkerLost(time_s=9.5, worker=1, rank=1, step=15)])
    assert figures.time_left_s == pytest.approx(2 * 6 / 18)
    assert figures.fraction_done == 18 / 20
    assert figures.recent_images_per_s == 80.0
    assert figures.recent_loss == 0.5
    assert figures.images_seen == 1040
    assert [notice.text for notice in figures.notices[1:]] == [
        "worker 1 (rank 1) is lost (last report: step 15), the others continue"
    ]
    figures.add(WorkerJoined(time_s=9.75, worker=1, rank=1))
    assert figures.fraction_done == (18 + 15) / 40
    assert figures.notices[-1].text == "a replacement of worker 1 (rank 1) has joined"


def test_a_worker_that_is_through_counts_no_longer_for_the_rate(story):
    through = WorkerProgress(
        time_s=10.0, worker=0, epoch=1, step=20, steps=2, images=80, loss=0.5, learning_rate=0.1
    )
    assert RunFigures.of([*story, through]).recent_images_per_s == 30.0


def test_nothing_yet_is_not_a_number():
    figures = RunFigures()
    unknown = [figures.images_per_s, figures.recent_loss, figures.waiting_share, figures.time_left_s]
    assert all(math.isnan(number) for number in unknown)
    assert (figures.fraction_done, figures.steps_per_worker) == (0.0, 0)


def test_the_last_of_everything_is_kept(story, ended):
    figures = RunFigures.of([*story, ended])
    assert figures.ended is ended or figures.ended == ended
    assert figures.time_s == 10.0
    assert [event.test_top1 for event in figures.evaluations] == [0.8125, 0.90625]
    assert [notice.text for notice in figures.notices] == ["worker 1 is slow <b>today</b>"]
    assert figures.checkpoint.path == "checkpoints/epoch-1"


def resumed(start_epoch):
    return RunStarted(
        time_s=0.0,
        strategy="s",
        data="d",
        model="m",
        workers=2,
        servers=2,
        epochs=2,
        steps_per_epoch=10,
        start_epoch=start_epoch,
    )


def redone(time_s, worker, step, images):
    return WorkerProgress(
        time_s=time_s,
        worker=worker,
        epoch=1,
        step=step,
        steps=5,
        images=images,
        loss=0.125,
        learning_rate=0.1,
    )


def test_a_resumed_run_does_not_count_twice_what_it_did_again(story):
    interrupted = RunEnded(time_s=9.0, outcome="interrupted", result={})
    again = [resumed(1), redone(1.0, 0, 15, 200), redone(2.0, 1, 15, 200)]
    figures = RunFigures.of([*story, interrupted, *again])
    # Kept: 400 + 200 images before the checkpoint at 4 s, then 400 images, 1 s and 2 s behind it.
    curve = [(part.end_s, part.images_seen) for part in figures.together.stretches]
    assert curve == [(2.0, 400), (4.0, 600), (5.0, 800), (6.0, 1000)]
    assert figures.workers[0].last.images_per_s == 200.0
    assert figures.workers[1].last.images_per_s == 100.0
    assert [event.epoch for event in figures.evaluations] == [1]
    assert figures.staleness.histogram == {0: 14, 1: 4, 2: 2, 3: 4}
    assert figures.ended is None
    assert figures.started.start_epoch == 1


def test_live_figures_count_what_a_restart_takes_again_once(story):
    """As it is watched, no event is dropped: the steps behind the checkpoint come a second time."""
    figures = RunFigures.of(story)
    furthest = figures.workers[0].last.step
    figures.add(redone(9.0, 0, step=furthest - 2, images=40))
    assert figures.images_seen == 1040
    figures.add(redone(9.5, 0, step=furthest + 3, images=50))
    assert figures.images_seen == 1040 + 30


def test_others_count_their_steps_anew(story):
    """One worker goes on in place of two: its steps are none of those before, and the second one is gone."""
    figures = RunFigures.of(story)
    assert len(figures.present) == 2
    before = figures.images_seen
    figures.add(replace(resumed(1), workers=1))
    figures.add(redone(9.0, 0, step=figures.workers[0].last.step, images=40))
    assert figures.images_seen == before + 40
    assert figures.present == [figures.workers[0]]


@pytest.mark.parametrize("before", [2, 3])
def test_a_run_resumed_with_other_workers_has_figures_since_then(story, before):
    """Its bottleneck is that of the workers that it has now."""
    first, *rest = [
        replace(event, workers=before, strategy="s") if isinstance(event, RunStarted) else event
        for event in story
    ]
    again = [resumed(1), redone(1.0, 0, 15, 200), redone(2.0, 1, 15, 200)]
    figures = RunFigures.of([first, *rest, RunEnded(time_s=9.0, outcome="interrupted", result={}), *again])
    whole = [part.images_seen for part in figures.together.stretches]
    assert whole == [400, 600, 800, 1000]
    steps = {worker: series.total.steps for worker, series in figures.latest.workers.items()}
    assert steps == ({0: 15, 1: 15} if before == 2 else {0: 5, 1: 5})
    assert (figures.latest is figures) == (before == 2)
    assert held_back(figures) == held_back(figures.latest)


def test_a_resumed_run_without_a_logged_checkpoint_is_cut_at_its_epoch(story):
    without = [event for event in story if not isinstance(event, CheckpointSaved)]
    figures = RunFigures.of([*without, resumed(1), redone(1.0, 0, 15, 200)])
    assert [part.end_s for part in figures.together.stretches] == [2.0, 4.0, 5.0]


def test_a_run_that_starts_over_in_the_same_log_keeps_only_notices(story):
    figures = RunFigures.of([*story, resumed(0), redone(1.0, 0, 5, 40)])
    assert figures.images_seen == 40
    assert figures.evaluations == []
    assert figures.staleness.histogram == {}
    assert len(figures.notices) == 1


def test_a_resumed_run_alone_knows_about_how_many_images_came_before():
    figures = RunFigures.of([resumed(1), redone(1.0, 0, 15, 200), Notice(time_s=1.0, text="")])
    # Ten steps of forty images by two workers, then these 200.
    assert figures.images_seen == 800 + 200


def progress(worker, time_s, step, images, steps=10):
    return WorkerProgress(
        time_s=time_s,
        worker=worker,
        epoch=0,
        step=step,
        steps=steps,
        images=images,
        loss=1.0,
        learning_rate=0.1,
    )


def test_the_sustained_rate_is_that_of_the_time_when_all_are_at_work():
    """Worker 0 ends at 30 s; worker 1 starts late, since its first step waited, and goes on alone."""
    figures = RunFigures.of(
        [
            *[progress(0, 10.0 * number, 10 * number, 1000) for number in (1, 2, 3)],
            *[progress(1, 15.0 + 10 * number, 10 * number + 10, 500) for number in range(4)],
        ]
    )
    # from 15 to 30 s: 100 images/s of worker 0, and 50 of worker 1
    assert figures.sustained_images_per_s == pytest.approx(150)
    assert figures.images_per_s == pytest.approx(5000 / 45)
    assert math.isnan(RunFigures.of([progress(0, 1.0, 10, 10)]).sustained_images_per_s)


def test_progress_of_drawn_work_is_by_images():
    start = RunStarted(
        time_s=0.0,
        strategy="s",
        data="d",
        model="m",
        workers=2,
        servers=1,
        epochs=1,
        steps_per_epoch=50,
        images=10_000,
    )
    fast, slow = progress(0, 10.0, 75, 7500, steps=75), progress(1, 10.0, 5, 500, steps=5)
    figures = RunFigures.of([start, fast, slow])
    assert figures.fraction_done == 0.8
    assert figures.time_left_s == pytest.approx(2000 / 800)
    assert figures.recent_images_per_s == 800  # the fast one has more than its even share, and goes on
    assert "8,000 of 10,000 images" in training_line(figures)
