"""Which images are whose where workers have different classes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.jobs import blobs, make_job, resumed, simulated
from polyrhythm.api.train import train
from polyrhythm.data.label_skew import LabelSkew
from polyrhythm.data.loader import Loader, Share
from polyrhythm.errors import RequestError
from polyrhythm.simulation.run import ConstantCluster

CLASSES = 10


def labels_of(n: int) -> torch.Tensor:
    return torch.arange(n) * 7 % CLASSES


def distance(alpha: float, workers: int = 8) -> float:
    """Gives how far the workers' mixtures are from that of all, as a mean over workers and seeds, from 0 to 1."""
    labels = labels_of(4000)
    found = [
        (torch.bincount(labels[own], minlength=CLASSES) / len(own) - 1 / CLASSES).abs().sum() / 2
        for seed in range(5)
        for own in LabelSkew(alpha, seed).owned(labels, workers)
    ]
    return float(torch.stack(found).mean())


@given(
    n=st.integers(1, 300),
    workers=st.integers(1, 12),
    alpha=st.floats(1e-6, 1e6),
    seed=st.integers(0, 2**32),
)
def test_each_image_has_one_owner_and_all_own_equally_many(n, workers, alpha, seed):
    skew = LabelSkew(alpha, seed)
    owned = skew.owned(labels_of(n), workers)
    assert torch.cat(owned).sort().values.tolist() == list(range(n))
    assert [len(own) for own in owned] == [len(range(worker, n, workers)) for worker in range(workers)]
    for epoch in range(2):
        order = skew.order(labels_of(n), epoch, workers)
        for worker, own in enumerate(owned):
            assert torch.equal(order[worker::workers].sort().values, own.sort().values)


def test_the_concentration_says_how_different_workers_are():
    assert distance(1e6) < 0.02
    assert 0.3 < distance(10) < 0.45  # uniform over all mixtures: 0.37
    assert distance(1e-3) > 0.75  # a class has 400 images, and a worker 500
    assert distance(10) < distance(1) < distance(0.1) < distance(1e-3)


def test_epochs_differ_in_their_order_and_seeds_in_the_owners():
    labels = labels_of(100)
    skew = LabelSkew(0.5, 3)
    assert not torch.equal(skew.order(labels, 0, 4), skew.order(labels, 1, 4))
    assert torch.equal(skew.order(labels, 1, 4), LabelSkew(0.5, 3).order(labels, 1, 4))
    mixtures = [torch.bincount(labels[LabelSkew(0.5, seed).owned(labels, 4)[0]]).tolist() for seed in (3, 4)]
    assert mixtures[0] != mixtures[1]


@pytest.mark.parametrize("images", [0, 48])
def test_a_worker_sees_its_own_images_in_every_epoch(images):
    split, skew = blobs(train=50).train, LabelSkew(0.1, 1)
    for worker, own in enumerate(skew.owned(split.labels, 3)):
        loader = Loader(split, Share(worker, 3, 4, 1, images=images), skew=skew)
        for epoch in range(2):
            batches = list(loader.epoch(epoch))
            seen = sorted(label for batch in batches for label in batch.labels.tolist())
            assert len(batches) == -(-(images or 50) // 12)
            if not images:
                assert seen == sorted(split.labels[own].tolist())


@given(
    n=st.integers(1, 300),
    workers=st.integers(1, 8),
    rounds=st.integers(1, 4),
    seed=st.integers(0, 2**32),
)
def test_in_an_epoch_each_client_is_sampled_once(n, workers, rounds, seed):
    """A worker has the images of as many clients as there are rounds, one client after the other."""
    skew, labels = LabelSkew(0.5, seed, clients=workers * rounds), labels_of(n)
    owner = torch.empty(n, dtype=torch.int64)
    for client, own in enumerate(skew.owned(labels, workers * rounds)):
        owner[own] = client
    for epoch in range(2):
        order = skew.order(labels, epoch, workers)
        assert order.sort().values.tolist() == list(range(n))
        played = [owner[order[worker::workers]].tolist() for worker in range(workers)]
        changes = [sum(a != b for a, b in pairwise(each)) for each in played]
        if n % (workers * rounds) == 0:  # else some images complete the shares of other workers
            assert changes == [rounds - 1] * workers
            assert sorted(client for each in played for client in set(each)) == list(range(workers * rounds))


def test_samples_of_clients_differ_between_epochs():
    labels, skew = labels_of(240), LabelSkew(0.1, 1, clients=12)
    firsts = [skew.order(labels, epoch, 3)[0::3].sort().values.tolist() for epoch in range(3)]
    assert firsts[0] != firsts[1] != firsts[2]
    assert torch.equal(skew.order(labels, 1, 12).sort().values, torch.arange(240))


def test_images_of_a_lost_worker_go_to_the_others():
    split, skew = blobs(train=50).train, LabelSkew(0.1, 1)
    seen = [
        label
        for place in range(2)
        for batch in Loader(split, Share(place, 2, 4, 1, together=12), skew=skew).epoch(0, start=2)
        for label in batch.labels.tolist()
    ]
    assert sorted(seen) == sorted(split.labels[skew.order(split.labels, 0, 3)[20:]].tolist())


def test_epochs_begun_with_others_keep_the_order_of_these():
    """Three workers did a step; the rest of the epoch, and nothing else, is shared by two."""
    split, skew = blobs(train=50).train, LabelSkew(0.1, 1)
    order = skew.order(split.labels, 0, 3)
    left = sorted(split.labels[order[10:]].tolist())  # 50 images in 5 steps
    seen = [
        label
        for worker in range(2)
        for batch in Loader(split, Share(worker, 2, 4, 1, begun=((1, 1, 1),)), skew=skew).epoch(0)
        for label in batch.labels.tolist()
    ]
    assert sorted(seen) == left


@pytest.mark.parametrize("spec", ["local_sgd(steps=2)", "d_psgd", "parameter_server", "mixed(replicas=2)"])
def test_a_run_continues_with_its_skew_and_with_no_other(spec, tmp_path):
    made = make_job(spec, 3, dataset=blobs(train=48), folder=tmp_path)
    skew = LabelSkew(0.1, made.learning.seed)
    job = replace(made, learning=replace(made.learning, label_skew=skew))
    whole = simulated(job, ConstantCluster()).result
    assert whole["images_not_seen"] == 0
    assert (
        simulated(resumed(job), ConstantCluster()).result["parameters_sha256"] == whole["parameters_sha256"]
    )
    with pytest.raises(RequestError, match=r"was trained with label skew 0.1, not none: resume with that"):
        simulated(resumed(made), ConstantCluster())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"strategy": "hybrid"}, "label_skew: workers of hybrid compute one network for the same images"),
        ({"strategy": "pipeline"}, "label_skew: workers of pipeline compute one network for the same images"),
        ({"strategy": "ad_psgd", "batches": "dynamic"}, "use --batches static"),
        ({"balance": "measured"}, "use --balance off"),
        ({"label_skew": 0}, "label_skew"),
        ({"clients": 1, "workers": 2}, "1 clients are fewer than 2 workers: give --clients 2 or more"),
        ({"label_skew": None, "clients": 4}, "clients: they differ by their classes: give --label-skew"),
        ({"label_skew": float("nan")}, "label_skew"),
    ],
)
def test_what_would_give_images_to_others_is_refused_in_a_line(options, text, tmp_path):
    with pytest.raises(RequestError, match=text) as refused:
        train(**{"data": "digits", "model": "mlp", "label_skew": 0.1, "out": str(tmp_path)} | options)
    assert "\n" not in str(refused.value)
