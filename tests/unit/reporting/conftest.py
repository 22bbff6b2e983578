"""A small run whose every figure can be computed by hand."""

import pytest

from polyrhythm.events import (
    CheckpointSaved,
    Evaluated,
    Notice,
    RunEnded,
    RunStarted,
    ServerProgress,
    WorkerProgress,
)


def worked(time_s, worker, *, epoch, step, steps, images, loss, wait_s=0.0, learning_rate=0.1):
    return WorkerProgress(
        time_s=time_s,
        worker=worker,
        epoch=epoch,
        step=step,
        steps=steps,
        images=images,
        loss=loss,
        learning_rate=learning_rate,
        wait_s=wait_s,
    )


@pytest.fixture
def story():
    """Two workers, two servers, two epochs of ten steps; worker 1 is the slower one."""
    return [
        RunStarted(
            time_s=0.0,
            strategy="parameter_server(servers=2, consistency=asynchronous)",
            data="fashion-mnist",
            model="lenet5",
            workers=2,
            servers=2,
            epochs=2,
            steps_per_epoch=10,
            parameters=61706,
        ),
        worked(2.0, 0, epoch=0, step=10, steps=10, images=400, loss=1.0, wait_s=0.5),
        worked(4.0, 1, epoch=0, step=10, steps=10, images=200, loss=2.5, wait_s=1.0),
        ServerProgress(time_s=4.0, server=0, version=12, staleness={0: 6, 1: 4, 2: 2}),
        ServerProgress(time_s=4.0, server=1, version=12, staleness={0: 8, 3: 4}),
        CheckpointSaved(time_s=4.0, path="checkpoints/epoch-1", epoch=1, step=10),
        Evaluated(time_s=4.5, epoch=1, test_loss=0.75, test_top1=0.8125, test_top5=0.96875),
        Notice(time_s=5.0, text="worker 1 is slow <b>today</b>"),
        worked(6.0, 0, epoch=1, step=18, steps=8, images=320, loss=0.5, learning_rate=0.05),
        worked(8.0, 1, epoch=1, step=15, steps=5, images=120, loss=0.25, wait_s=3.0, learning_rate=0.05),
        ServerProgress(time_s=8.0, server=0, version=20, staleness={1: 8}),
        Evaluated(time_s=9.0, epoch=2, test_loss=0.5, test_top1=0.90625, test_top5=0.984375),
    ]


@pytest.fixture
def ended():
    """The end of that run."""
    return RunEnded(
        time_s=10.0,
        outcome="done",
        result={
            "run": "runs/one",
            "seconds": 3725.0,
            "images_per_s": 5812.4,
            "test_top1": 0.904,
            "staleness": {"mean": 1.03, "max": 3, "histogram": {"0": 14}},
            "bytes_sent_per_step": 246824,
            "parameters_sha256": "9f86d081",
            "per_class": [
                {"name": "Coat", "images": 1000, "recall": 0.8125},
                {"name": "<script>alert(1)</script>", "images": 999, "recall": 0.5},
            ],
        },
    )
