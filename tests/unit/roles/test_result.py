"""The figures of a run, by hand."""

import hashlib

import numpy as np
import pytest
import torch

from conformance.jobs import blobs, make_job
from polyrhythm.data.dealing import batch_indices
from polyrhythm.roles.checkpointing.worker_state import Account
from polyrhythm.roles.result import bytes_per_step, digest, images_not_seen, staleness_figures, train_loss


def account(worker=0, **changed):
    fields = {
        "worker": worker,
        "step": 10,
        "session_steps": 10,
        "session_images": 40,
        "epoch_images": 20,
        "epoch_loss": 30.0,
        "bytes_sent": 1000,
        "staleness": {},
    }
    return Account(**(fields | changed))


def test_digest_is_the_sha256_of_the_bytes():
    vector = torch.tensor([1.5, -2.0, 0.0])
    assert digest(vector) == hashlib.sha256(np.array([1.5, -2.0, 0.0], dtype="<f4").tobytes()).hexdigest()
    assert digest(vector.double()) != digest(vector)
    assert digest(torch.arange(6.0)[::2]) == digest(torch.tensor([0.0, 2.0, 4.0]))


def test_staleness_comes_from_the_servers_if_there_are_any():
    reports = [{"staleness": {"0": 2, "3": 1}}, {"staleness": {"3": 1, "10": 1}}]
    found = staleness_figures([account(staleness={"0": 99})], reports)
    assert found == {"mean": 16 / 5, "max": 10, "histogram": {"0": 2, "3": 2, "10": 1}}


def test_staleness_without_servers_is_that_of_all_workers():
    found = staleness_figures([account(staleness={"0": 4}), account(1, staleness={"0": 4})], [])
    assert found == {"mean": 0.0, "max": 0, "histogram": {"0": 8}}


def test_bytes_are_everybodys_for_a_step_of_one_worker():
    accounts = [account(session_steps=10), account(1, session_steps=6, bytes_sent=600)]
    assert bytes_per_step(accounts, [{"bytes_sent": 400}]) == 2000 / 16
    assert bytes_per_step([account(session_steps=0)], []) == 0.0


def test_lost_workers_are_taken_to_have_sent_as_much_as_the_others():
    # 10 steps with 1000 bytes of the worker that is left, 5 steps of a lost one; the server answered all 15
    assert bytes_per_step([account()], [{"bytes_sent": 1500}], steps_of_lost=5) == 100 + 100


@pytest.mark.parametrize("steps_done", [{}, {1: 0}, {0: 10, 1: 7, 2: 3}, {0: 10, 1: 10, 2: 9}])
def test_images_not_seen_are_those_of_the_batches_that_were_left_out(steps_done):
    job = make_job("parameter_server", 3, dataset=blobs(train=53), batch_size=4)  # 5 steps, the last ragged
    left_out = [
        index
        for worker, done in steps_done.items()
        for step in range(done, 10)
        for index in batch_indices(torch.arange(53), step % 5, worker, 3, 4)
    ]
    assert images_not_seen(job, steps_done) == len(left_out)


def test_train_loss_is_weighted_with_images():
    accounts = [account(epoch_images=20, epoch_loss=30.0), account(1, epoch_images=10, epoch_loss=60.0)]
    assert train_loss(accounts) == pytest.approx(3.0)
    assert train_loss([account(epoch_images=0, epoch_loss=0.0)]) == 0.0
