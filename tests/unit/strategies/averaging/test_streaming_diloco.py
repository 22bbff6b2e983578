"""Streaming DiLoCo against its rule in plain torch, and against the numbers that torchft publishes."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from conformance.jobs import batch, cosine, make_job, result_of, simulated, uneven, vector_of
from polyrhythm.communication.transports.simulated.communicator import SimulatedCluster
from polyrhythm.communication.transports.simulated.network import ConstantNetwork
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime
from polyrhythm.errors import RequestError
from polyrhythm.simulation.run import ConstantCluster
from polyrhythm.specs import build
from polyrhythm.strategies import FAMILIES
from polyrhythm.strategies.averaging.diloco import StreamingWorker, fragments_of
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.strategies.worker_part import Step, WorkerSetting
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizer_plan import OptimizerPlan
from simulation.deaths import AROUND, events_of

WORKERS, STEPS_PER_EPOCH, EPOCHS = 3, 5, 2
UNEVEN = ConstantCluster(step_s=uneven)


def diloco(**options):
    return f"diloco({', '.join(f'{key}={value}' for key, value in options.items())})"


def replayed(job, period, fragments, delay, mixing, lr, momentum):
    """Return what the rule makes of the job: every worker's own model in plain torch, in float64.

    The perceptron has two layers of weights and a bias: with two fragments each is one of these.
    """
    learning = job.learning
    torch.manual_seed(learning.seed)
    first = job.make_model()
    models = [job.make_model() for _ in range(WORKERS)]
    for model in models:
        model.load_state_dict(first.state_dict())
    optimizers = [learning.optimizer.create(model.parameters()) for model in models]
    layers = [[0, 1], [2, 3]] if fragments == 2 else [[0, 1, 2, 3]]
    common = [each.detach().clone() for each in first.parameters()]
    speed = [torch.zeros_like(each) for each in common]
    every, mean, moved = period // fragments, None, [False] * fragments

    def movement(fragment):
        own = [list(model.parameters()) for model in models]
        return {
            at: sum(common[at] - parameters[at].detach() for parameters in own) / WORKERS
            for at in layers[fragment]
        }

    def adopt(fragment, changes, kept):
        for at, change in changes.items():
            speed[at] = momentum * speed[at] + change
            common[at] = common[at] - lr * (change + momentum * speed[at])
            for model in models:
                parameter = list(model.parameters())[at]
                parameter.data = (1 - kept) * common[at] + kept * parameter.data
        moved[fragment] = kept > 0

    for step in range(EPOCHS * STEPS_PER_EPOCH):
        for worker, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            images, labels = batch(job, step // STEPS_PER_EPOCH, step % STEPS_PER_EPOCH, worker, WORKERS)
            optimizer.param_groups[0]["lr"] = cosine(job, step, EPOCHS * STEPS_PER_EPOCH)
            optimizer.zero_grad()
            functional.cross_entropy(model(images.double()), labels).backward()
            optimizer.step()
        moved = [True] * fragments
        place, turn = step % every + 1, step // every % fragments
        if place == every - delay:
            mean = movement(turn)
        if place == every:
            adopt(turn, mean, mixing)
            mean = None
    if mean is not None:
        adopt(turn, mean, 0.0)
    for fragment in range(fragments):
        if moved[fragment]:
            adopt(fragment, movement(fragment), 0.0)
    return torch.cat([each.flatten() for each in common])


@pytest.mark.parametrize("optimizer", ["sgd", "adam(lr=0.01)"])
@pytest.mark.parametrize(
    ("period", "fragments", "delay", "mixing"),
    [(3, 1, 1, 0.0), (3, 1, 2, 0.3), (4, 2, 0, 0.0), (4, 2, 1, 0.5), (6, 2, 1, 0.0), (6, 2, 2, 0.25)],
)
def test_the_rule_is_met_in_float64(period, fragments, delay, mixing, optimizer):
    spec = diloco(steps=period, fragments=fragments, delay=delay, mixing=mixing)
    options = {"dtype": torch.float64, "optimizer": optimizer}
    job = make_job(spec, WORKERS, **options)
    run = simulated(job, UNEVEN)
    expected = replayed(job, period, fragments, delay, mixing, 0.7, 0.9)
    for model in run.models[:1]:
        torch.testing.assert_close(vector_of(model), expected, rtol=1e-9, atol=1e-11)


def test_without_delay_and_mixing_one_fragment_is_diloco():
    options = {"dtype": torch.float64, "optimizer": "adam(lr=0.01)"}
    plain, streamed = (
        vector_of(simulated(make_job(spec, WORKERS, **options), UNEVEN).models[0])
        for spec in ("diloco(steps=3)", "diloco(steps=3, mixing=1e-300)")
    )
    torch.testing.assert_close(streamed, plain, rtol=1e-9, atol=1e-11)


PUBLISHED = {  # torchft's fixtures: delay, mixing -> fragment 0 after steps 3, 9 and 15
    (0, 0.0): (-11, -35, -59),
    (0, 0.5): (-8, -24.5, -40.25),
    (0, 1.0): (-5, -17, -29),
    (1, 0.0): (-7, -27, -47),
    (1, 0.5): (-6, -21.5, -35.75),
    (1, 1.0): (-5, -17, -29),
}


@pytest.mark.parametrize(("delay", "mixing"), PUBLISHED)
def test_the_published_trajectories_are_met(delay, mixing):
    """Two replicas of ones, each step takes 2 off, the outer rate is 2, H = 6, P = 2."""
    spec = diloco(steps=6, fragments=2, delay=delay, mixing=mixing, outer="sgd(lr=2, momentum=0)")
    time, seen = VirtualTime(), []
    cluster = SimulatedCluster(time, ConstantNetwork(time, 1e-4, 1e6), 2)

    def play(rank):
        model = nn.ParameterList(torch.ones(3) for _ in range(2))
        flat = FlatParameters(model)
        network = cluster.communicator(rank)
        plan = OptimizerPlan.of(torch.optim.SGD(model.parameters(), lr=1.0), flat)
        setting = WorkerSetting(network, network, RoleAssignment((0, 1)), flat, plan)
        part = build("strategy", spec, *FAMILIES).worker(setting)
        part.start(0)
        for number in range(15):
            flat.gradients.fill_(2.0)
            part.gradients_ready(Step(number), 1.0)
            if rank == 0:
                seen.append(flat.vector.tolist())

    for rank in range(2):
        time.spawn(f"worker {rank}", lambda rank=rank: play(rank))
    time.run()
    assert tuple(seen[step - 1][0] for step in (3, 9, 15)) == pytest.approx(
        PUBLISHED[delay, mixing], abs=1e-5
    )
    assert seen[4] == [seen[4][0]] * 3 + [-9.0] * 3  # the other fragment's turn is after step 6


def test_the_mean_of_a_fragment_travels_while_its_workers_go_on():
    slow = ConstantCluster(step_s=uneven, bandwidth_bytes_per_s=2e4)
    at_once, later = (
        simulated(make_job(diloco(steps=4, fragments=2, delay=delay), 2), slow).result["seconds"]
        for delay in (0, 1)
    )
    assert later < 0.9 * at_once


@pytest.mark.parametrize("compress", ["none", "int8(dense_below=0)", "top_k(density=0.3, dense_below=0)"])
def test_an_interrupted_run_goes_on_to_the_same_bits(compress, tmp_path):
    spec = diloco(steps=8, fragments=2, delay=3, mixing=0.5, compress=compress)
    job = make_job(spec, 2, optimizer="adam(lr=0.01)", folder=tmp_path)
    whole = simulated(replace(job, checkpointing=replace(job.checkpointing, folder=None)), UNEVEN)
    half = simulated(job, replace(UNEVEN, stop_at_s=0.05))
    assert half.result["steps"] < whole.result["steps"]
    again = replace(job, checkpointing=replace(job.checkpointing, resume=True))
    assert simulated(again, UNEVEN).sha256 == whole.sha256


@pytest.mark.parametrize("compress", ["none", "top_k(density=0.3, dense_below=0)"])
@pytest.mark.parametrize("back_after_s", [None, 0.0005, 0.02])
def test_others_go_on_from_one_common_point_whenever_a_worker_is_lost(back_after_s, compress, monkeypatch):
    """Means that are on their way are those of who is left; whoever missed one is given what came of it."""
    points = {}
    ready = StreamingWorker.gradients_ready

    def noted(self, step, learning_rate):
        stops = ready(self, step, learning_rate)
        if self._terms.ends(step.number):
            points.setdefault(step.number, set()).add(self._global.numpy().tobytes())
        return stops

    monkeypatch.setattr(StreamingWorker, "gradients_ready", noted)
    spec = diloco(steps=4, fragments=2, delay=1, mixing=0.5, compress=compress)
    job = make_job(spec, 3, optimizer="adam(lr=0.01)")
    whole_s = simulated(job, AROUND).result["seconds"]
    for moment in range(6):
        points.clear()
        models = []
        at_s = whole_s * moment / 6
        back = [] if back_after_s is None else [(at_s + back_after_s, 1)]
        events = events_of(replace(job, make_model=kept_in(models, job.make_model)), [(at_s, 1)], back)
        result = result_of(events)
        assert (events[-1].outcome, result["steps"]) == ("done", STEPS_PER_EPOCH * EPOCHS)
        assert sorted(points) == [1, 3, 5, 7, 9]
        assert {len(found) for found in points.values()} == {1}
        left = [vector_of(models[0]), vector_of(models[-1] if back_after_s is None else models[2])]
        assert torch.equal(*left)
        assert torch.isfinite(left[0]).all()


def kept_in(models, make):
    """Return what makes a model, and keeps it."""

    def made():
        models.append(make())
        return models[-1]

    return made


def test_the_mean_of_a_lost_worker_is_of_those_who_are_left():
    """Worker 1 is lost before it takes a step: two workers' rule, with what of three the other two are dealt."""
    spec = diloco(steps=2, fragments=1, delay=1, mixing=0.25)
    job = make_job(spec, 3, optimizer="sgd(lr=0.1)")
    models, common, after = [], [], []
    start, adopt = StreamingWorker._start, StreamingWorker._adopt
    sent = []

    def sending(self, number, movement, step):
        start(self, number, movement, step)
        sent.append(movement.clone())

    def adopting(self, number, mixing):
        common.append(self._global.clone())
        adopt(self, number, mixing)
        after.append(self._global.clone())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StreamingWorker, "_start", sending)
        patch.setattr(StreamingWorker, "_adopt", adopting)
        events_of(replace(job, make_model=kept_in(models, job.make_model)), [(0.001, 1)])
    mean = (sent[0] + sent[1]) / 2
    step = 0.7 * (mean + 0.9 * mean)  # Nesterov's first
    assert torch.allclose(after[0], common[0] - step, atol=1e-6)


def test_quantized_means_are_near_the_exact_ones():
    exact, quantized = (
        vector_of(
            simulated(make_job(diloco(steps=4, fragments=2, compress=compress), WORKERS), UNEVEN).models[0]
        )
        for compress in ("none", "int8(dense_below=0)")
    )
    assert 0 < (exact - quantized).abs().max() < 0.02


def test_fragments_are_strided_and_cover_the_model_once():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2), nn.Linear(2, 1))
    flat = FlatParameters(model)
    first, second = fragments_of(flat, 2)
    assert first == (slice(0, 9), slice(17, 20))
    assert second == (slice(9, 17),)
    many = fragments_of(flat, 7)
    covered = torch.zeros(flat.size)
    for fragment in many:
        for place in fragment:
            covered[place] += 1
    assert (covered == 1).all()
    with pytest.raises(RequestError, match="21 fragments of a model of 20 numbers"):
        fragments_of(flat, 21)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"steps": 8, "fragments": 3}, "make steps a multiple of fragments"),
        ({"steps": 8, "fragments": 2, "delay": 4}, "give delay at most 3"),
        ({"mixing": 1.5}, "mixing"),
        ({"delay": -1}, "delay"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(options, said):
    with pytest.raises(RequestError, match=said):
        build("strategy", diloco(**options), *FAMILIES).check(2)
