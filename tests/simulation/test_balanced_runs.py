"""Balance in whole runs: the steps are those of the global batch, whatever the parts, and uneven workers add up."""

from __future__ import annotations

import itertools
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from conformance.jobs import (
    blobs,
    make_job,
    resumed,
    shared_out,
    simulated,
    stop_at,
    strategy,
    uneven,
    vector_of,
)
from polyrhythm.api.simulate import simulate
from polyrhythm.data.balance import BALANCES, Balance, Decided, split
from polyrhythm.data.dealing import epoch_order
from polyrhythm.errors import RequestError
from polyrhythm.events import BatchesBalanced, Notice, RunEnded, WorkerProgress
from polyrhythm.roles.balance import balances
from polyrhythm.simulation.run import ConstantCluster
from polyrhythm.specs import build
from simulation.drawing import Drawn, drawn
from simulation.test_drawn_runs import check_end, told
from tolerances import REORDERED

WORKERS, WEIGHTS = 3, (3.0, 2.0, 1.0)
UNEVEN = ConstantCluster(step_s=uneven)
AS_ONE_BATCH = [
    "synchronous",
    "synchronous(collective=ring)",
    "lazy_synchronous",
    "parameter_server(consistency=synchronous)",
    "parameter_server(consistency=synchronous, servers=2)",
    "mixed(replicas=3)",
    "hierarchical",
    "local_sgd(steps=1)",
]
CLUSTER = """
name: uneven
hosts:
  - {name: fast, count: 3, cores: 8}
  - {name: slow, count: 1, cores: 8, speed: 0.2}
nic: {latency_s: 1.0e-6, bandwidth_bytes_per_s: 1.0e13}
inside: {latency_s: 1.0e-6, bandwidth_bytes_per_s: 1.0e13}
step_time: constant(seconds=0.1)
"""


def balance(spec: str) -> Balance:
    made = build("balance", spec, BALANCES)
    assert isinstance(made, Balance)
    return made


GIVEN = balance("given(weights=[3, 2, 1])")
GROUPS = "mixed(replicas=2)"


def balanced(spec: str, rule: Balance = GIVEN, **options):
    return replace(make_job(spec, WORKERS, dtype=torch.float64, **options), balance=rule)


def global_batches(job):
    """Every epoch's global batches, in order."""
    learning = job.learning
    for epoch in range(learning.epochs):
        order = epoch_order(len(job.dataset.train), epoch, learning.seed)
        yield from shared_out(order, WORKERS * learning.batch_size)


def gradient_step(job, model: nn.Module, optimizer: torch.optim.Optimizer, indices: Tensor) -> None:
    train = job.dataset.train
    optimizer.zero_grad()
    functional.cross_entropy(model(train.images(indices).double()), train.labels[indices]).backward()
    optimizer.step()


def started(job) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(job.learning.seed)
    model = job.make_model()
    return model, job.learning.optimizer.create(model.parameters())


def by_hand(job) -> Tensor:
    """One model on the whole global batches."""
    model, optimizer = started(job)
    for indices in global_batches(job):
        gradient_step(job, model, optimizer, indices)
    return vector_of(model)


@pytest.mark.parametrize("rule", ["given(weights=[3, 2, 1])", "given(weights=[1, 5, 5])", "measured"])
@pytest.mark.parametrize("spec", AS_ONE_BATCH)
def test_steps_are_those_of_the_global_batch(spec, rule):
    if spec.startswith("local_sgd"):  # a mean of models is that of their steps only without momentum
        job = balanced(
            spec, balance(rule), schedule="constant", optimizer="sgd(momentum=0, lr=0.1)", dataset=blobs(48)
        )
    else:
        # 53 images make steps of ten and eleven; of so few, measured parts change only where all steps are alike
        data = blobs(60) if rule == "measured" else None
        job = balanced(spec, balance(rule), schedule="constant", dataset=data)
    trained = simulated(job, UNEVEN)
    torch.testing.assert_close(vector_of(trained.models[0]), by_hand(job), **REORDERED)
    assert trained.result["images_not_seen"] == 0
    seen = sum(event.images for event in trained.events if isinstance(event, WorkerProgress))
    assert seen == len(job.dataset.train) * job.learning.epochs
    (first, *_) = [event for event in trained.events if isinstance(event, BatchesBalanced)]
    assert sum(first.sizes) == max(map(len, global_batches(job)))
    assert len(set(first.sizes)) > 1


def test_local_models_count_for_the_samples_of_their_round():
    job = balanced(
        "local_sgd(steps=2)", schedule="constant", dataset=blobs(48), optimizer="sgd(momentum=0, lr=0.1)"
    )
    first, _ = started(job)
    models = [deepcopy(first) for _ in range(WORKERS)]
    optimizers = [job.learning.optimizer.create(model.parameters()) for model in models]
    sizes = split(WORKERS * job.learning.batch_size, WEIGHTS)
    for step, indices in enumerate(global_batches(job), start=1):
        for model, optimizer, own in zip(models, optimizers, indices.split(list(sizes)), strict=True):
            gradient_step(job, model, optimizer, own)
        if step % 2 == 0:
            each = torch.stack([vector_of(model) for model in models])
            mean = (each * torch.tensor(sizes).double().unsqueeze(1)).sum(0) / sum(sizes)
            for model in models:
                nn.utils.vector_to_parameters(mean.clone(), model.parameters())
    trained = simulated(job, UNEVEN)
    torch.testing.assert_close(vector_of(trained.models[0]), vector_of(models[0]), **REORDERED)


def test_a_worker_with_a_larger_part_takes_more_steps_of_its_own():
    rule = balance("given(weights=[3, 2, 1], by=steps)")
    job = balanced(
        "local_sgd(steps=2)",
        rule,
        schedule="constant",
        dataset=blobs(48),
        optimizer="sgd(momentum=0.9, lr=0.05)",
    )
    first, _ = started(job)
    models = [deepcopy(first) for _ in range(WORKERS)]
    optimizers = [job.learning.optimizer.create(model.parameters()) for model in models]
    sizes = split(WORKERS * job.learning.batch_size, WEIGHTS)
    assert (sizes, job.learning.batch_size) == ((6, 4, 2), 4)
    for step, indices in enumerate(global_batches(job), start=1):
        for model, optimizer, own, steps in zip(
            models, optimizers, indices.split(list(sizes)), (2, 1, 1), strict=True
        ):
            for part in own.tensor_split(steps):
                gradient_step(job, model, optimizer, part)
        if step % 2 == 0:
            mean = torch.stack([vector_of(model) for model in models]).mean(0)
            for model in models:
                nn.utils.vector_to_parameters(mean.clone(), model.parameters())
    trained = simulated(job, UNEVEN)
    torch.testing.assert_close(vector_of(trained.models[0]), vector_of(models[0]), **REORDERED)


@pytest.mark.parametrize(
    "spec", ["synchronous", "local_sgd(steps=2)", "parameter_server(consistency=synchronous)"]
)
def test_a_balance_without_weights_leaves_the_bits_of_even_runs(spec):
    plain = make_job(spec, WORKERS, dataset=blobs(48))  # all batches of four images
    sha256 = simulated(plain).sha256
    for rule in ("auto", "measured"):
        trained = simulated(replace(plain, balance=balance(rule)))
        assert trained.sha256 == sha256
        assert not [event for event in trained.events if isinstance(event, BatchesBalanced)]


@pytest.mark.parametrize("spec", ["ssp(s=1)", "parameter_server(consistency=bounded_staleness(s=2))"])
def test_updates_of_unequal_parts_add_up_to_one_of_the_global_batch(spec):
    """Where each gradient is an update of its own. All read before the first of a single step is applied."""
    job = balanced(
        spec,
        schedule="constant",
        dataset=blobs(12),
        epochs=1,
        optimizer="sgd(momentum=0, lr=0.1)",
    )
    (indices,) = global_batches(job)
    model, optimizer = started(job)
    optimizer.param_groups[0]["lr"] *= WORKERS
    gradient_step(job, model, optimizer, indices)
    trained = simulated(job, UNEVEN)
    assert trained.result["steps"] == 1
    torch.testing.assert_close(vector_of(trained.models[0]), vector_of(model), **REORDERED)


@pytest.mark.parametrize("kill", ["kill(rank=1, at_s=3)", "kill(rank=1, at_s=3, restart_after_s=2)"])
def test_a_measured_ssp_run_goes_on_without_a_lost_worker(tmp_path, kill):
    figures, _ = dry(tmp_path, "ssp", "measured", faults=kill)
    assert figures["workers_lost"] == 1


def test_given_parts_resume_to_the_same_bits(tmp_path):
    whole = simulated(balanced("synchronous")).sha256
    job = balanced("synchronous", folder=tmp_path)
    stopped = simulated(job, stop_at(0.011))
    assert stopped.events[-1].outcome == "interrupted"
    assert simulated(resumed(job)).sha256 == whole


@pytest.mark.parametrize(
    ("spec", "rule"),
    [
        ("synchronous", "measured"),
        ("local_sgd(steps=2)", "measured"),
        ("local_sgd(steps=2)", "measured(by=steps)"),
        ("parameter_server(consistency=synchronous)", "measured"),
    ],
)
def test_decisions_of_a_run_are_played_again_to_the_same_bits(spec, rule):
    job = balanced(spec, balance(rule), epochs=6)  # local updates are measured once a round
    run = simulated(job, UNEVEN)
    changes = tuple(
        (event.step, tuple(event.sizes)) for event in run.events if isinstance(event, BatchesBalanced)
    )
    assert changes
    by = "steps" if job.balance.by_steps else "images"
    again = simulated(replace(job, balance=Decided(changes=changes, by=by)))  # all equally fast
    assert again.sha256 == run.sha256
    assert simulated(replace(job, balance=balance("off"))).sha256 != run.sha256


@pytest.mark.parametrize("at_s", [0.004, 0.009, 0.013])
def test_those_who_are_left_begin_with_equal_parts(at_s):
    from simulation.deaths import events_of

    job = replace(make_job("synchronous", WORKERS, dataset=blobs(120)), balance=GIVEN)
    events = events_of(job, [(at_s, 2)], [])
    assert isinstance(events[-1], RunEnded)
    assert events[-1].outcome == "done"
    found = [event.sizes for event in events if isinstance(event, BatchesBalanced)]
    assert found == [[6, 4, 2], [7, 5, 0]]
    assert events[-1].result["images_not_seen"] == 0


@pytest.mark.parametrize("rejoins_s", [None, 0.002])
@pytest.mark.parametrize("at_s", [0.003, 0.006, 0.009])
@pytest.mark.parametrize(
    "spec", ["synchronous", "parameter_server(consistency=synchronous)", "local_sgd(steps=2)"]
)
def test_a_measured_run_goes_on_without_a_lost_worker(spec, at_s, rejoins_s):
    from simulation.deaths import events_of

    job = replace(make_job(spec, WORKERS, dataset=blobs(120)), balance=balance("measured"))
    back = [] if rejoins_s is None else [(at_s + rejoins_s, 1)]
    for lost in ([(at_s, 1)],):
        events = events_of(job, lost, back)
        assert isinstance(events[-1], RunEnded)
        assert events[-1].outcome == "done"


def dry(tmp_path, spec: str, rule: str, steps: int = 100, cluster: str = CLUSTER, **options):
    tmp_path.mkdir(exist_ok=True)
    path = tmp_path / "cluster.yaml"
    path.write_text(cluster)
    events = []

    class Kept:
        def on_event(self, event):
            events.append(event)

        def close(self):
            pass

    run = simulate(
        cluster=path,
        gradients="none",
        steps=steps,
        strategy=spec,
        workers=4,
        batch_size=64,
        balance=rule,
        out=tmp_path / "run",
        observers=[Kept()],
        **{"data": "digits", "model": "mlp"} | options,
    )
    return run.figures, events


@pytest.mark.parametrize(
    ("spec", "longest_s"),
    [
        ("synchronous", 14),
        ("lazy_synchronous", 14),
        ("parameter_server(consistency=synchronous)", 14),
        ("local_sgd(steps=5)", 14.5),
        ("post_local_sgd", 14),
        ("ssp", 14),
        ("parameter_server(consistency=bounded_staleness(s=8))", 14),
        ("mixed(replicas=2)", 14),
        ("mixed(replicas=2, inside=local_sgd(steps=5))", 14.5),
    ],
)
def test_one_worker_five_times_slow_costs_what_it_lacks(tmp_path, spec, longest_s):
    """100 steps: 50 s in equal parts, 12.5 s if all speeds added up."""
    figures, _ = dry(tmp_path, spec, "measured")
    assert 12.5 <= figures["seconds"] < longest_s


def test_weights_as_the_speeds_are_reach_the_sum_of_speeds(tmp_path):
    figures, _ = dry(tmp_path, "synchronous", "given(weights=[5, 5, 5, 1])")
    assert figures["seconds"] == pytest.approx(12.5, rel=0.001)


def test_a_run_begins_with_the_speeds_of_a_profile_and_follows_what_it_measures(tmp_path):
    path = tmp_path / "cluster.yaml"
    figures, events = dry(tmp_path, "synchronous", f"measured(profile='{path}')")
    first, *later = [event for event in events if isinstance(event, BatchesBalanced)]
    assert (first.step, first.sizes) == (0, [80, 80, 80, 16])
    assert not later, "they were right"
    assert figures["seconds"] == pytest.approx(12.5, rel=0.005)
    figures, events = dry(tmp_path / "wrong", "synchronous", "measured(weights=[1, 1, 1, 5])")
    first, *later = [event for event in events if isinstance(event, BatchesBalanced)]
    assert first.sizes == [32, 32, 32, 160]
    assert later[0].step <= 4
    assert later[-1].sizes == pytest.approx([80, 80, 80, 16], abs=2)


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        ("measured(weights=[1, 2])", r"2 weights are not one for each of 4 workers: give 4"),
        ("measured(weights=[1, 2, 0, 1])", r"the weight 0 of worker 2 is not above 0"),
        (
            "measured(weights=[1, 2, 1, 1], profile='bsc')",
            r"weights and a profile both set the initial sizes",
        ),
        ("measured(profile='nowhere.yaml')", r"nowhere"),
        ("measured(profile='{two}')", r"have places for 2 of 4 workers: give weights"),
    ],
)
def test_beginnings_that_cannot_be_are_refused(tmp_path, rule, reason):
    two = tmp_path / "two.yaml"
    two.write_text(
        CLUSTER.replace("  - {name: slow, count: 1, cores: 8, speed: 0.2}\n", "").replace(
            "count: 3", "count: 2"
        )
    )
    with pytest.raises(RequestError, match=reason) as error:
        dry(tmp_path, "synchronous", rule.format(two=two))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("at_s", [0.004, 0.009])
def test_those_who_are_left_begin_again_with_what_was_given_to_begin_with(at_s):
    from simulation.deaths import events_of

    rule = balance("measured(weights=[3, 2, 1])")
    events = events_of(
        replace(make_job("synchronous", WORKERS, dataset=blobs(120)), balance=rule), [(at_s, 2)], []
    )
    assert events[-1].outcome == "done"
    found = [event.sizes for event in events if isinstance(event, BatchesBalanced)]
    assert found[0] == [6, 4, 2]
    assert [7, 5, 0] in found


def test_a_worker_that_slows_down_for_30_s_is_followed_within_five_steps(tmp_path):
    fault = "slow(rank=1, factor=4, from_s=20, to_s=50)"
    _, events = dry(tmp_path, "synchronous", "measured", steps=400, faults=fault)
    changes = [event for event in events if isinstance(event, BatchesBalanced)]
    down = [event for event in changes if 20 <= event.time_s < 50]
    up = [event for event in changes if event.time_s >= 50]
    assert 1 <= len(down) <= 4
    assert 1 <= len(up) <= 4
    # a step is 0.4 s at worst while the others wait, and 0.5 s at worst when parts are still those of before
    assert down[-1].time_s < 20 + 5 * 0.5
    assert up[-1].time_s < 50 + 5 * 0.5
    assert down[-1].sizes == pytest.approx([105, 26, 105, 20], abs=3)
    assert up[-1].sizes == pytest.approx([80, 80, 80, 16], abs=2)


EVEN = """
name: even
hosts:
  - {name: host, count: 4, cores: 8, server_takes: 0}
nic: {latency_s: 1.0e-4, bandwidth_bytes_per_s: 1.17e8}
inside: {latency_s: 2.0e-5, bandwidth_bytes_per_s: 4.0e9}
step_time: constant(seconds=0.2)
"""


def test_even_workers_that_may_be_ahead_of_each_other_lose_nothing_by_a_balance(tmp_path):
    """They push at different moments over a narrow link, and wait for it in the middle of their passes."""

    def run(rule: str):
        options = {"cluster": EVEN, "model": "resnet18", "data": "synthetic", "steps": 200}
        figures, events = dry(tmp_path / rule, "ssp", rule, **options)
        return figures["seconds"], [event.sizes for event in events if isinstance(event, BatchesBalanced)]

    off, _ = run("off")
    for rule in ("auto", "measured", "measured(weights=[1, 1, 1, 1])"):
        seconds, sizes = run(rule)
        assert seconds < 1.005 * off
        assert not [each for each in sizes if each != [64] * 4]


def test_a_worker_of_ssp_that_slows_down_is_followed_when_parts_have_stayed_for_long(tmp_path):
    fault = "slow(rank=1, factor=4, from_s=40, to_s=1000)"
    figures, events = dry(tmp_path, "ssp", "measured", steps=800, faults=fault)
    changes = [event for event in events if isinstance(event, BatchesBalanced)]
    assert changes[-1].sizes == pytest.approx([105, 26, 105, 20], abs=3)
    assert figures["workers_lost"] == 0


def notices(events) -> list[str]:
    return [event.text for event in events if isinstance(event, Notice) and "uneven" in event.text]


FOLLOWING = [
    "synchronous",
    "lazy_synchronous",
    "parameter_server(consistency=synchronous)",
    "local_sgd(steps=5)",
    "ssp",
    GROUPS,
]


@pytest.mark.parametrize("spec", FOLLOWING[::2])
def test_auto_follows_uneven_workers_from_the_first_steps_and_says_so(tmp_path, spec):
    figures, events = dry(tmp_path, spec, "auto")
    measured, _ = dry(tmp_path / "measured", spec, "measured")
    assert figures["seconds"] < 1.02 * measured["seconds"]
    (notice,) = notices(events)
    assert "are uneven: the slowest takes " in notice  # a server takes time of the slow one's host
    assert "--balance off" in notice
    assert spec != "synchronous" or "400 % longer" in notice


@pytest.mark.parametrize("spec", FOLLOWING[::2])
def test_auto_leaves_even_workers_their_equal_parts_however_their_steps_vary(tmp_path, spec):
    cluster = EVEN.replace("constant(seconds=0.2)", "log_normal(mean=0.2, sigma=0.1)")
    options = {"cluster": cluster, "steps": 200}
    figures, events = dry(tmp_path, spec, "auto", **options)
    off, _ = dry(tmp_path / "off", spec, "off", **options)
    assert not [event for event in events if isinstance(event, BatchesBalanced)]
    assert figures["seconds"] < 1.005 * off["seconds"]


@pytest.mark.parametrize("spec", [FOLLOWING[1], FOLLOWING[4]])
def test_auto_notices_a_worker_that_becomes_slow_within_20_steps(tmp_path, spec):
    fault = "slow(rank=1, factor=4, from_s=40, to_s=1000)"
    _, events = dry(tmp_path, spec, "auto", steps=400, cluster=EVEN, faults=fault)
    first, *_ = [event for event in events if isinstance(event, BatchesBalanced)]
    assert 40 < first.time_s < 40 + 20 * 0.8
    assert len(notices(events)) == 1


@pytest.mark.parametrize("spec", [FOLLOWING[0], FOLLOWING[4]])
@pytest.mark.parametrize("seed", range(3))
def test_auto_loses_little_where_a_worker_becomes_slow(tmp_path, spec, seed):
    """A step of 0.3 s after ones of 0.1 s is the longest of its measurement, which leaves it out."""
    cluster = EVEN.replace("constant(seconds=0.2)", "log_normal(mean=0.1, sigma=0.05)")
    fault = "slow(rank=3, factor=3, from_s=12, to_s=1000)"
    options = {"cluster": cluster, "steps": 235, "faults": fault, "seed": seed}
    figures, events = dry(tmp_path / "auto", spec, "auto", **options)
    measured, _ = dry(tmp_path / "measured", spec, "measured", **options)
    first, *_ = [event for event in events if isinstance(event, BatchesBalanced)]
    assert 12 < first.time_s < 12 + 20 * 0.3
    assert figures["seconds"] < 1.015 * measured["seconds"]


def test_auto_does_not_judge_machines_by_what_takes_less_than_a_quarter_of_a_second(tmp_path):
    short = CLUSTER.replace("seconds=0.1", "seconds=0.001")
    _, events = dry(tmp_path, "synchronous", "auto", steps=45, cluster=short)
    assert not [event for event in events if isinstance(event, BatchesBalanced)]
    _, events = dry(tmp_path / "longer", "synchronous", "auto", steps=200, cluster=short)
    assert [event for event in events if isinstance(event, BatchesBalanced)]


@pytest.mark.parametrize(
    ("spec", "rule", "reason"),
    [
        ("ad_psgd", "measured", "is asynchronous and needs no balance"),
        ("parameter_server", "given(weights=[1, 1, 1])", "is asynchronous and needs no balance"),
        ("d_psgd", "measured", "counts all workers alike"),
        ("easgd(mode=synchronous)", "measured", "counts all workers alike"),
        ("hybrid", "measured", "compute together"),
        ("parallel_sgd", "measured", "give weights"),
        ("slowmo(base=sgp)", "given(weights=[3, 2, 1])", "counts all workers alike"),
    ],
)
def test_a_balance_that_has_no_use_is_refused(spec, rule, reason):
    with pytest.raises(RequestError, match=reason):
        balances(balance(rule), strategy(spec), WORKERS, 24)
    assert not balances(balance("auto"), strategy(spec), WORKERS, 24)


@pytest.mark.parametrize("spec", ["synchronous", "post_local_sgd", "mixed(replicas=3)"])
@pytest.mark.parametrize("rule", ["measured(by=steps)", "given(weights=[3, 2, 1], by=steps)"])
def test_steps_of_their_own_are_for_workers_that_take_some(spec, rule):
    with pytest.raises(RequestError, match="by=steps is for workers that take steps of their own"):
        balances(balance(rule), strategy(spec), WORKERS, 24)
    assert balances(balance(rule), strategy("slowmo"), WORKERS, 24)


def test_compiled_sizes_stay():
    with pytest.raises(RequestError, match="leave compile out, or give weights"):
        balances(balance("measured"), strategy("synchronous"), WORKERS, 24, compiled=True)
    assert balances(GIVEN, strategy("synchronous"), WORKERS, 24, compiled=True)


def test_invariants_are_checked_in_equal_parts(tmp_path):
    figures, _ = dry(tmp_path, "synchronous", "auto", steps=4, check=True)
    assert figures["steps"] == 4
    with pytest.raises(RequestError, match="leave --balance measured out"):
        dry(tmp_path / "other", "synchronous", "measured", steps=4, check=True)


def in_groups(rule: Balance, spec: str = GROUPS, images: int = 96, **options):
    """Four workers in two groups that draw, each of which shares its batches."""
    job = make_job(spec, 4, dtype=torch.float64, dataset=blobs(images), **options)
    return replace(job, balance=rule, draws=True)


def sizes_of(events) -> list[list[int]]:
    return [event.sizes for event in events if isinstance(event, BatchesBalanced)]


def test_steps_of_a_group_are_those_of_the_batches_that_it_draws():
    """Groups take as long with unequal parts as with equal ones here, so all pushes come in the same order."""
    paces, shares = [0.01, 0.01, 0.013, 0.013], [1.5, 0.5, 0.75, 1.25]
    weights = balance("given(weights=[3, 1, 3, 5])")
    equal = simulated(in_groups(balance("off")), ConstantCluster(step_s=lambda worker: paces[worker]))
    cluster = ConstantCluster(step_s=lambda worker: paces[worker] / shares[worker])
    unequal = simulated(in_groups(weights), cluster)
    assert unequal.result["images_not_seen"] == 0
    torch.testing.assert_close(vector_of(unequal.models[0]), vector_of(equal.models[0]), **REORDERED)
    assert sizes_of(unequal.events) == [[6, 2, 0, 0], [0, 0, 3, 5]]
    progress = [event for event in unequal.events if isinstance(event, WorkerProgress)]
    images = [sum(event.images for event in progress if event.worker == worker) for worker in range(4)]
    assert sum(images) == 96 * 2
    assert images[0] == 3 * images[1]
    assert 5 * images[2] == 3 * images[3]


def test_each_group_follows_the_speeds_of_its_own_workers_and_can_be_played_again():
    job = in_groups(balance("measured"), images=480, batch_size=8)
    # Links take no time: what workers tell each other in the first run moves nothing.
    cluster = ConstantCluster(step_s=[0.01, 0.01, 0.01, 0.03].__getitem__, latency_s=0.0)
    run = simulated(job, cluster)
    assert run.result["images_not_seen"] == 0
    found = sizes_of(run.events)
    assert found
    assert all(sizes[:2] == [0, 0] for sizes in found)  # the first group is even
    assert found[-1] == [0, 0, 12, 4]
    changes = tuple(
        (event.step, tuple(event.sizes)) for event in run.events if isinstance(event, BatchesBalanced)
    )
    assert simulated(replace(job, balance=Decided(changes=changes)), cluster).sha256 == run.sha256


@pytest.mark.parametrize("rejoins_s", [None, 0.002])
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("rule", ["measured", "given(weights=[3, 1, 1, 3])"])
def test_a_group_that_shares_by_speed_goes_on_without_a_member_and_sees_all_images(rule, rank, rejoins_s):
    from simulation.deaths import events_of

    for at_s in (0.0, 0.004, 0.0215, 0.04):
        back = [] if rejoins_s is None else [(at_s + rejoins_s, rank)]
        events = events_of(in_groups(balance(rule), images=120), [(at_s, rank)], back)
        assert isinstance(events[-1], RunEnded)
        assert events[-1].outcome == "done"
        assert events[-1].result["images_not_seen"] == 0


def test_groups_with_fixed_shares_have_equal_parts():
    with pytest.raises(RequestError, match="leave deal fixed out"):
        balances(balance("measured"), strategy(GROUPS), 4, 24, drawn=False)
    assert not balances(balance("auto"), strategy(GROUPS), 4, 24, drawn=False)


class Cramped(nn.Sequential):
    """A network whose pictures need more memory than there is, from some number of them on."""

    most = 0
    refused = 0

    def forward(self, images: Tensor) -> Tensor:
        if self.training and len(images) > self.most:
            type(self).refused += 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(images)


@pytest.mark.parametrize("spec", ["synchronous", "lazy_synchronous", "local_sgd(steps=2)"])
def test_a_batch_that_does_not_fit_is_halved_and_the_gradient_stays(spec):
    def cramped() -> nn.Module:
        Cramped.most, Cramped.refused = 3, 0
        return Cramped(nn.Flatten(), nn.Linear(16, 3))

    def roomy() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))

    options = {"dtype": torch.float64, "batch_size": 8, "dataset": blobs(96)}
    small = simulated(make_job(spec, WORKERS, model=cramped, **options))
    large = simulated(make_job(spec, WORKERS, model=roomy, **options))
    assert Cramped.refused == 2 * WORKERS  # 8 and 4 images, once on each worker: then it is remembered
    torch.testing.assert_close(vector_of(small.models[0]), vector_of(large.models[0]), **REORDERED)
    told = [event.text for event in small.events if isinstance(event, Notice) and "memory" in event.text]
    assert len(told) == WORKERS
    assert all("in pieces of 2 images from here on" in text for text in told)


def test_a_single_image_that_does_not_fit_ends_the_run():
    def cramped() -> nn.Module:
        Cramped.most = 0
        return Cramped(nn.Flatten(), nn.Linear(16, 3))

    with pytest.raises(torch.OutOfMemoryError):
        simulated(make_job("synchronous", 2, model=cramped))


def test_parts_stay_within_the_memory_of_a_worker():
    """Worker 0 is the fastest, and would have most of every global batch."""

    def cramped() -> nn.Module:
        Cramped.most = 10
        return Cramped(nn.Flatten(), nn.Linear(16, 3))

    job = make_job("synchronous", WORKERS, model=cramped, batch_size=8, dataset=blobs(720))
    paces = [0.01, 0.03, 0.03]
    trained = simulated(
        replace(job, balance=balance("measured")), ConstantCluster(step_s=lambda worker: paces[worker])
    )
    sizes = [event.sizes for event in trained.events if isinstance(event, BatchesBalanced)]
    assert max(map(max, sizes)) > 10
    assert max(sizes[-1]) <= 10
    assert sum(sizes[-1]) == 24


DRAWN = [
    "synchronous",
    "lazy_synchronous",
    "local_sgd",
    "post_local_sgd",
    "hierarchical_averaging",
    "parameter_server",
    "backup_workers",
    "mixed",
]


@dataclass(frozen=True, kw_only=True)
class MeasuredRun(Drawn):
    """A drawn run in which parts follow speeds."""

    def job(self, folder=None, **keeping):
        job = super().job(folder, **keeping)
        return replace(job, balance=balance("measured"), draws=job.traits.draws)


def drawn_runs(count: int):
    """Runs of strategies, options and workers that can be balanced."""
    for seed in itertools.count(1000):
        run = drawn(seed, only=DRAWN[seed % len(DRAWN)])
        with suppress(RequestError):
            if (
                balances(balance("measured"), run.strategy, run.workers, run.workers * 4)
                and not run.learning["rescale"]
            ):
                yield MeasuredRun(**{each.name: getattr(run, each.name) for each in fields(run)})
                count -= 1
        if not count:
            return


@pytest.mark.parametrize("run", list(drawn_runs(30)), ids=lambda run: str(run.seed))
def test_a_balanced_run_ends_whatever_goes_wrong_and_whenever_it_is_to_stop(run):
    events, error = told(run.train)
    assert events  # it began
    check_end(run, events, error)
