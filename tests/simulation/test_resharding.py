"""Runs that are resumed with another number of workers."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch.nn import functional

from conformance.jobs import blobs, make_job, perceptron, result_of, resumed, shared_out, uneven
from polyrhythm.data.dealing import epoch_order, left_of
from polyrhythm.data.seeding import sample_keys
from polyrhythm.errors import RequestError
from polyrhythm.events import Notice, RunStarted, WorkerProgress
from polyrhythm.roles.checkpointing.archive import Archive
from polyrhythm.simulation.layout import lay_out
from polyrhythm.simulation.run import ConstantCluster, simulate, simulate_on
from unit.simulation.clusters import cluster


@pytest.fixture(autouse=True)
def _only_training_looks_at_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report shows the first training pictures as they are augmented: that is no training."""
    monkeypatch.setattr(
        "polyrhythm.roles.leading.training_duties.pictures_json",
        lambda *_: '{"mistakes": [], "augmented": []}',
    )


IMAGES, BATCH_SIZE = 53, 4


def job_of(workers, folder, spec="synchronous", epochs=2, **options):
    return make_job(
        spec,
        workers,
        dataset=blobs(IMAGES),
        batch_size=BATCH_SIZE,
        folder=folder,
        epochs=epochs,
        model=perceptron,
        **options,
    )


def plain(job, parts):
    """Trains in plain torch; `parts` are pairs of workers that there are, and the images seen when they end."""
    learning, data = job.learning, job.dataset.train
    torch.manual_seed(learning.seed)
    model = job.make_model()
    optimizer = learning.optimizer.create(model.parameters())
    seen = 0
    for workers, until in parts:
        while seen < until:
            epoch, start = divmod(seen, IMAGES)
            left = epoch_order(IMAGES, epoch, learning.seed)[start:]
            for batch in shared_out(left, workers * BATCH_SIZE):
                if seen < until:
                    optimizer.zero_grad()
                    functional.cross_entropy(model(data.images(batch)), data.labels[batch]).backward()
                    optimizer.step()
                    seen += len(batch)
    assert seen == parts[-1][1]
    return torch.cat([value.detach().flatten() for value in model.parameters()])


def run(job, surroundings=None):
    """Runs a job; gives its events, and worker 0's parameters in the end."""
    models = []

    def make():
        models.append(perceptron())
        return models[-1]

    events = simulate(replace(job, make_model=make), surroundings)
    return events, torch.cat([value.detach().flatten() for value in models[0].parameters()])


def notices(events):
    return [event.text for event in events if isinstance(event, Notice)]


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 2)])
def test_a_run_goes_on_with_more_or_fewer_workers(tmp_path, before, after):
    schedule = {"schedule": "constant"}
    simulate(job_of(before, tmp_path, epochs=1, **schedule))
    job = resumed(job_of(after, tmp_path, epochs=3, **schedule))
    events, vector = run(job)
    assert torch.allclose(vector, plain(job, [(before, IMAGES), (after, 3 * IMAGES)]), atol=1e-5)
    result = result_of(events)
    assert (result["steps"], result["epochs"]) == (job.calendar.total_steps, 3)
    (notice,) = notices(events)
    assert notice.startswith(
        f"resumed with {after} workers in place of {before}: all continue from worker 0's parameters"
    )
    assert Archive(job).load().step == job.calendar.total_steps  # and not an older one with a higher number


@pytest.mark.parametrize(
    "chain",
    [
        [(2, 0.02), (3, None)],
        [(3, 0.035), (2, None)],
        [(3, 0.02), (1, 0.03), (2, None)],  # three times in one epoch
        [(2, 0.035), (3, 0.02), (1, 0.05), (4, None)],
    ],
)
@pytest.mark.parametrize(
    ("spec", "optimizer"),
    [
        ("synchronous", "sgd(lr=0.1, momentum=0)"),
        ("synchronous", "sgd(lr=0.1, momentum=0.9)"),
        ("lazy_synchronous", "adam"),
        ("parameter_server(servers=2, consistency=synchronous)", "sgd(lr=0.1, momentum=0.9)"),
        ("mixed(replicas=2, consistency=synchronous)", "adam"),
        ("hierarchical", "sgd(lr=0.1, momentum=0.9)"),
        ("hybrid", "sgd(lr=0.1, momentum=0.9)"),
        ("hybrid", "adam"),
    ],
)
def test_in_the_middle_of_an_epoch_what_is_left_is_dealt_out_anew(tmp_path, chain, spec, optimizer):
    options = {"schedule": "constant", "optimizer": optimizer, "spec": spec}
    parts = []
    for number, (workers, stop_s) in enumerate(chain):
        job = job_of(workers, tmp_path, **options)
        events, vector = run(
            resumed(job) if number else job, ConstantCluster(step_s=uneven, stop_at_s=stop_s)
        )
        assert events[-1].outcome == ("done" if stop_s is None else "interrupted")
        if number:
            notice = notices(events)[-1]
            left = (-parts[-1][1]) % IMAGES
            assert (
                f"; the {left} remaining images of epoch {parts[-1][1] // IMAGES + 1} are divided" in notice
            )
            assert notice.endswith(f"; a step now has {workers * BATCH_SIZE} images")
        snapshot = Archive(job).load()
        going = job.continued(snapshot.begun)
        left = sum(
            going.calendar.images(step, worker)
            for worker in range(workers)
            for step in range(snapshot.step, going.calendar.total_steps)
        )
        parts.append((workers, 2 * IMAGES - left))
    assert torch.allclose(vector, plain(job, parts), atol=1e-5)
    assert len({until for _, until in parts}) == len(parts)  # every part has done something
    assert result_of(events)["epochs"] == 2
    assert result_of(events)["images_not_seen"] == 0


def test_in_the_middle_of_an_epoch_a_run_is_resumed_bit_for_bit_by_as_many(tmp_path):
    """What other workers did of the epoch is known to those who resume it once more as well."""
    options = {"schedule": "cosine", "optimizer": "sgd(momentum=0.9)"}
    simulate(job_of(3, tmp_path / "a", **options), ConstantCluster(step_s=uneven, stop_at_s=0.02))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    _, whole = run(resumed(job_of(2, tmp_path / "a", **options)))
    events, _ = run(resumed(job_of(2, tmp_path / "b", **options)), ConstantCluster(stop_at_s=0.015))
    assert events[-1].outcome == "interrupted"
    events, vector = run(resumed(job_of(2, tmp_path / "b", **options)))
    assert torch.equal(vector, whole)
    assert notices(events) == []


def test_local_steps_go_on_from_the_mean_of_all_models(tmp_path):
    """Against plain torch: 3 workers train apart for an epoch and a step, then all becomes one, and 2 go on apart."""
    options = {"schedule": "constant", "optimizer": "sgd(lr=0.1, momentum=0.9)", "spec": "parallel_sgd"}
    hears = ConstantCluster(step_s=uneven, stop_at_s=0.02)  # after the first epoch
    simulate(job_of(3, tmp_path, **options), hears)
    job = job_of(2, tmp_path, **options)
    assert Archive(job).load().begun.epochs == {1: ((1, 1, 1),)}
    events, vector = run(resumed(job))
    torch.manual_seed(job.learning.seed)
    start = torch.nn.utils.parameters_to_vector(job.make_model().parameters())
    first, second = (epoch_order(IMAGES, epoch, job.learning.seed) for epoch in range(2))
    once = shared_out(second, 12)[0]
    ended = apart(job, [(first, 5), (second, 1)], 3, start, torch.zeros_like(start))
    means = (torch.stack(values).mean(0) for values in zip(*ended, strict=True))
    ended = apart(job, [(second[len(once) :], 6)], 2, *means)
    assert torch.allclose(vector, torch.stack([model for model, _ in ended]).mean(0), atol=1e-6)
    assert notices(events)[-1].startswith(
        "resumed with 2 workers in place of 3: all continue from the mean of 3 models and of their optimizers' momenta"
    )


def apart(job, orders, workers, vector, momentum):
    """Lets each of so many workers take its part of so many steps of each order, from the same point."""

    def own(worker):
        for order, steps in orders:
            places = shared_out(torch.arange(len(order)), workers * BATCH_SIZE)[:steps]
            yield from (order[batch[batch % workers == worker]] for batch in places)

    return [local_steps(job, vector, momentum, list(own(worker))) for worker in range(workers)]


def local_steps(job, vector, momentum, batches):
    """Takes steps of momentum SGD in plain torch; gives where they end, and the momentum."""
    model, data = job.make_model(), job.dataset.train
    vector, momentum = vector.clone(), momentum.clone()
    for batch in batches:
        if len(batch):
            torch.nn.utils.vector_to_parameters(vector, model.parameters())
            model.zero_grad()
            functional.cross_entropy(model(data.images(batch)), data.labels[batch]).backward()
            gradient = torch.cat([value.grad.flatten() for value in model.parameters()])
            momentum = 0.9 * momentum + gradient
            vector = (vector - 0.1 * momentum).detach()
    return vector, momentum


@pytest.mark.parametrize("schedule", ["cosine(warmup_epochs=1.5)", "step(at=[0.5])"])
def test_schedules_follow_the_images_that_were_seen(tmp_path, schedule):
    """Warm-up of half the run, and a rate that falls after an epoch, hold wherever the number of workers changes."""
    events = simulate(job_of(3, tmp_path, schedule=schedule), ConstantCluster(step_s=uneven, stop_at_s=0.03))
    done = result_of(events)["steps"]
    job = job_of(2, tmp_path, schedule=schedule)
    events = simulate(resumed(job), ConstantCluster(step_s=uneven))
    usual = job.length
    rates = {
        event.step: event.learning_rate
        for event in events
        if isinstance(event, WorkerProgress) and event.worker == 0
    }
    assert rates
    for step, rate in rates.items():
        assert rate == pytest.approx(
            job.learning.optimizer.lr * job.learning.schedule.factor(step - 1, usual)
        )
    started = next(event for event in events if isinstance(event, RunStarted))
    seen = done * 3 * BATCH_SIZE
    assert started.start_step - 1 <= seen / (2 * BATCH_SIZE) <= started.start_step + 1


def test_sites_without_workers_would_owe_the_others_for_ever(tmp_path):
    simulate(job_of(3, tmp_path, "gaia", epochs=1))
    with pytest.raises(
        RequestError,
        match=r"^gaia continues with as many workers as it had: resume with --workers 3, or begin a new run",
    ):
        Archive(resumed(job_of(1, tmp_path, "gaia"))).load()


@pytest.mark.parametrize(
    ("spec", "others"),
    [
        ("parameter_server(servers=2)", "parameter_server(servers=3)"),
        ("ssp(s=1, servers=2, replicas=2)", "ssp(s=1, servers=3)"),
        ("dc_asgd(servers=1)", "dc_asgd(servers=2)"),
    ],
)
def test_workers_and_servers_change_together(tmp_path, spec, others):
    options = {"optimizer": "sgd(momentum=0.9)"}
    simulate(job_of(3, tmp_path, spec, **options), ConstantCluster(step_s=uneven, stop_at_s=0.035))
    events = simulate(resumed(job_of(4, tmp_path, others, **options)), ConstantCluster(step_s=uneven))
    result = result_of(events)
    assert (result["workers"], result["images_not_seen"]) == (4, 0)
    assert sum(said.startswith("resumed with ") for said in notices(events)) == 2


@pytest.mark.parametrize("stop_s", [0.045, 0.11])
@pytest.mark.parametrize(
    "spec",
    [
        "backup_workers",
        "parameter_server(servers=2, consistency=backup(spare=2))",
        "softsync",
        "parameter_server(consistency=bounded_staleness(s=1, cached_reads=true))",
        "dc_asgd(servers=2)",
        "parameter_server(consistency=synchronous)",
    ],
)
def test_servers_apply_each_image_once_or_say_how_many_they_left_out(tmp_path, spec, stop_s):
    """With batches of one image a gradient is an image; the number of workers changes twice."""
    for workers, until_s in [(3, stop_s), (5, 0.05), (4, None)]:
        job = replace(job_of(workers, tmp_path, spec), learning=learning_of(job_of(workers, tmp_path, spec)))
        events = simulate(
            resumed(job) if workers != 3 else job, ConstantCluster(step_s=uneven, stop_at_s=until_s)
        )
    result = result_of(events)
    applied = sum(result["staleness"]["histogram"].values()) / job.traits.shards
    assert applied + result["images_not_seen"] == 2 * IMAGES
    assert (result["images_not_seen"] > 0) == job.strategy.traits(4).skips_steps


def learning_of(job):
    return replace(job.learning, batch_size=1)


@pytest.mark.parametrize(
    ("spec", "lost"),
    [
        *product(["parameter_server", "easgd(tau=1)", "downpour", "softsync"], [0, 1]),
        ("synchronous", 0),
        ("synchronous", 1),
        ("ad_psgd", 1),
    ],
)
def test_successors_know_what_others_did_of_an_epoch(tmp_path, spec, lost):
    """Worker 0's successor has it from what the run has said, and another's from the leader."""
    simulate(job_of(3, tmp_path, spec), ConstantCluster(step_s=uneven, stop_at_s=0.03))
    seen = Counter()

    def noted(images, keys):
        seen.update(keys.tolist())
        return images

    job = resumed(job_of(2, tmp_path, spec))
    job = replace(job, learning=replace(job.learning, transform=noted))
    begun = Archive(job).load().begun
    assert begun.epochs
    nic = {"latency_s": 1e-5, "bandwidth_bytes_per_s": 1e9}
    where = cluster(
        {"count": 3, "cores": 4}, nic=nic, faults=[f"kill(rank={lost}, at_s=1.5, restart_after_s=0.7)"]
    )
    events = []
    layout = lay_out(where, 2, job.strategy.traits(2).servers, job.strategy.traits(2).placement)
    simulate_on(layout, job, events.append)
    result = result_of(events)
    assert (result["workers_lost"], result["workers_joined"], result["images_not_seen"]) == (1, 1, 0)
    for epoch in range(min(begun.epochs), 2):
        left = left_of(epoch_order(IMAGES, epoch, job.learning.seed), begun.epochs.get(epoch, ()), BATCH_SIZE)
        keys = set(sample_keys("transform", job.learning.seed, epoch, left).tolist())
        assert keys <= seen.keys()
        assert sum(seen[key] - 1 for key in keys) <= 3 * BATCH_SIZE  # what was under way is computed again
    assert len(seen) == sum(
        job.continued(begun).calendar.images_left(epoch) for epoch in range(min(begun.epochs), 2)
    )
