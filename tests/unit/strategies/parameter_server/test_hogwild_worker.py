"""Hogwild's workers on one simulated host: whatever the interleaving, nothing is lost where nothing can be."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from conformance.jobs import batch, make_job, simulated, uneven, vector_of
from polyrhythm.communication.transports.simulated.communicator import SimulatedCluster
from polyrhythm.communication.transports.simulated.network import ConstantNetwork
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime
from polyrhythm.errors import RequestError
from polyrhythm.simulation.layout import lay_out
from polyrhythm.simulation.run import simulate_on
from polyrhythm.simulation.simulated_run import ConstantCluster
from polyrhythm.strategies.parameter_server.hogwild import Hogwild
from polyrhythm.strategies.placements.shared import Shared
from polyrhythm.strategies.role_assignment import roles_in_order
from polyrhythm.strategies.worker_part import Step, WorkerSetting
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizer_plan import OptimizerPlan
from unit.simulation.clusters import cluster

WORKERS, STEPS = 3, 7
PACES = [
    lambda worker, step: 0.01,
    lambda worker, step: 0.01 * (1 + 0.37 * worker),
    lambda worker, step: 0.01 * (1 + (3 * worker + 5 * step) % 7),
]


def train(gradient, pace_s, workers=WORKERS, size=6, stop=lambda worker, step: False):
    """Lets workers step; gives their vectors at the end, their parts, and how many steps each has done."""
    time = VirtualTime()
    network = SimulatedCluster(time, ConstantNetwork(time), workers)
    roles = roles_in_order(workers, 0)
    vectors, parts, done = [None] * workers, [None] * workers, [0] * workers

    def work(worker):
        model = nn.Linear(size - 1, 1)
        for parameter in model.parameters():
            nn.init.constant_(parameter, float(worker))  # worker 0's count
        flat = FlatParameters(model)
        plan = OptimizerPlan.of(torch.optim.SGD(model.parameters(), lr=1.0), flat)
        mine = network.communicator(worker)
        part = Hogwild().worker(
            WorkerSetting(mine, mine.subgroup("workers", range(workers)), roles, flat, plan)
        )
        vectors[worker], parts[worker] = flat.vector, part
        for number in range(part.start(0), STEPS):
            step = Step(number, stop=stop(worker, number))
            flat.gradients.copy_(gradient(worker, number, flat.vector))
            time.sleep(pace_s(worker, number))
            stopped = part.gradients_ready(step, 1.0)
            done[worker] = number + 1
            if stopped:
                break
        part.settle()
        part.end()

    for worker in range(workers):
        time.spawn(f"worker {worker}", lambda worker=worker: work(worker))
    time.run()
    parts[0].release()
    return vectors, parts, done


@pytest.mark.parametrize("pace_s", PACES)
def test_workers_whose_gradients_touch_different_numbers_give_the_serial_result(pace_s):
    """Each worker descends 1/2 |w - target|^2 on two numbers of its own, in whole numbers: 3/4 of the way a step."""
    targets = torch.arange(6.0) * 4**STEPS

    def gradient(worker, step, vector):
        own = slice(2 * worker, 2 * worker + 2)
        found = torch.zeros_like(vector)
        found[own] = 0.75 * (vector[own] - targets[own])
        return found

    serial = torch.zeros(6)
    for worker in range(WORKERS):
        for step in range(STEPS):
            serial -= gradient(worker, step, serial)
    vectors, _, _ = train(gradient, pace_s)
    assert torch.equal(vectors[0], serial)
    assert torch.equal(serial, targets * (1 - 0.25**STEPS))


@pytest.mark.parametrize("pace_s", PACES)
def test_the_vector_ends_as_the_sum_of_all_updates(pace_s):
    generator = torch.Generator().manual_seed(2)
    table = torch.randint(-9, 10, (WORKERS, STEPS, 6), generator=generator).float()
    vectors, parts, done = train(lambda worker, step, vector: table[worker, step], pace_s)
    assert torch.equal(vectors[0], -table.sum((0, 1)))
    assert done == [STEPS] * WORKERS
    assert [sum(part.staleness.values()) for part in parts] == done


def test_two_workers_with_momentum_by_hand():
    """v_i = m v_i + g_i(copy_i), w -= lr v_i, in the order in which the steps end; then worker i copies w."""
    job = make_job(
        "hogwild",
        2,
        optimizer="sgd(lr=0.1, momentum=0.5)",
        epochs=1,
        schedule="constant",
        dtype=torch.float64,
    )
    torch.manual_seed(job.learning.seed)
    model = job.make_model()
    vector = vector_of(model)
    copies, velocities = [vector, vector], [torch.zeros_like(vector)] * 2
    for _, worker, step in sorted(
        ((step + 1) * uneven(worker), worker, step)
        for worker in (0, 1)
        for step in range(job.steps_per_epoch)
    ):
        torch.nn.utils.vector_to_parameters(copies[worker], model.parameters())
        model.zero_grad()
        images, labels = batch(job, 0, step, worker, 2)
        functional.cross_entropy(model(images.double()), labels).backward()
        gradient = torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])
        velocities[worker] = 0.5 * velocities[worker] + gradient
        vector = vector - 0.1 * velocities[worker]
        copies[worker] = vector
    trained = simulated(job, ConstantCluster(step_s=uneven))
    torch.testing.assert_close(vector_of(trained.models[0]), vector, rtol=0, atol=1e-12)
    assert trained.result["bytes_sent_per_step"] == 0


def test_across_hosts_it_is_refused_with_what_would_work():
    layout = lay_out(cluster({"count": 2}), 2, 0, Shared())
    with pytest.raises(RequestError) as caught:
        simulate_on(layout, make_job("hogwild", 2), lambda event: None)
    text = str(caught.value)
    assert "they are on 2 hosts" in text
    assert "run all workers on the CPUs of one host, or take parameter_server" in text
    assert "\n" not in text
    one = lay_out(cluster({"count": 1, "workers": 2}), 2, 0, Shared())
    simulate_on(one, make_job("hogwild", 2), lambda event: None)


def test_a_loaded_state_is_the_state_at_once_unless_it_is_another_workers():
    _, parts, _ = train(lambda worker, step, vector: torch.ones_like(vector), PACES[1])
    _, others, _ = train(lambda worker, step, vector: torch.ones_like(vector), PACES[0])
    facts, fresh = parts[1].state()[1], others[1]
    assert facts["counts"][1] == STEPS
    for state in (parts[1].state(), parts[2].state()):
        fresh.load_state(state)
        assert fresh.state()[1] == facts != parts[2].state()[1]
