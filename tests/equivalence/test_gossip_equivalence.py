"""Gossip against plain torch: a list of models, a matrix, and of ours only the shuffle and the optimizer's class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from conformance.jobs import batch, blobs, cosine, make_job, plain_loop, simulated, uneven, vector_of
from polyrhythm.roles.checkpointing.archive import FOLDER
from polyrhythm.roles.job import CheckpointConfig, Job
from polyrhythm.simulation.run import ConstantCluster
from polyrhythm.strategies.gossip.d_psgd import DPSGD
from polyrhythm.strategies.topology import Topology
from polyrhythm.training.checkpoint import checkpoints, load_checkpoint
from tolerances import REORDERED

WORKERS = 4
LENGTH = 3  # steps of an epoch: 48 images, 16 a step
UNEVEN = ConstantCluster(step_s=uneven)


class Apart(Topology):
    """Nobody talks to anybody: W = I. No user can ask for it, since workers would never agree."""

    def targets(self, peer: int, peers: int, turn: int = 0) -> Sequence[int]:
        return ()

    def check(self, peers: int) -> None:
        pass


def job_of(spec: str, workers: int = WORKERS, **options: object) -> Job:
    return make_job(spec, workers, dtype=torch.float64, dataset=blobs(train=12 * workers), **options)  # type: ignore[arg-type]


class Plain:
    """Models in plain torch, with a gradient each."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.models = []
        for _ in range(job.workers):
            torch.manual_seed(job.learning.seed)
            self.models.append(job.make_model())
        self.optimizers = [job.learning.optimizer.create(model.parameters()) for model in self.models]

    def compute(self, worker: int, step: int) -> None:
        model, steps = self.models[worker], LENGTH * self.job.learning.epochs
        images, labels = batch(self.job, step // LENGTH, step % LENGTH, worker, self.job.workers)
        for group in self.optimizers[worker].param_groups:
            group["lr"] = cosine(self.job, step, steps)
        model.zero_grad()
        functional.cross_entropy(model(images.double()), labels).backward()

    @property
    def vectors(self) -> Tensor:
        return torch.stack([parameters_to_vector(model.parameters()).detach() for model in self.models])

    def put(self, vectors: Tensor) -> None:
        for model, vector in zip(self.models, vectors, strict=True):
            vector_to_parameters(vector.clone(), model.parameters())

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def plain_d_psgd(job: Job, matrix: Callable[[int], Tensor]) -> Tensor:
    plain = Plain(job)
    for step in range(LENGTH * job.learning.epochs):
        for worker in range(job.workers):
            plain.compute(worker, step)
        plain.put(matrix(step) @ plain.vectors)
        plain.update()
    return plain.vectors


def plain_push_sum(job: Job, matrix: Callable[[int], Tensor]) -> tuple[Tensor, Tensor]:
    """Gives z of every worker, and the mean of all x."""
    plain = Plain(job)
    x, a = plain.vectors, torch.ones(job.workers, 1, dtype=torch.float64)
    for step in range(LENGTH * job.learning.epochs):
        plain.put(x / a)
        for worker in range(job.workers):
            plain.compute(worker, step)
        plain.put(x)
        plain.update()
        x, a = matrix(step) @ plain.vectors, matrix(step) @ a
    return x / a, x.mean(0)


def plain_late_push_sum(job: Job, matrix: Callable[[int], Tensor]) -> tuple[Tensor, Tensor]:
    """Push-sum message by message, where what is sent at a step is taken at the next.

    Gives z of every worker, and the mean of all x, with what is still under way.
    """
    plain = Plain(job)
    x, a = list(plain.vectors), [1.0] * job.workers
    under_way: list[tuple[int, Tensor, float]] = []
    for step in range(LENGTH * job.learning.epochs):
        plain.put(torch.stack([own / mass for own, mass in zip(x, a, strict=True)]))
        for worker in range(job.workers):
            plain.compute(worker, step)
        plain.put(torch.stack(x))
        plain.update()
        x, arriving, under_way = list(plain.vectors), under_way, []
        for worker in range(job.workers):
            for to in range(job.workers):
                share = float(matrix(step)[to, worker])
                if to != worker and share:
                    under_way.append((to, share * x[worker], share * a[worker]))
        for worker in range(job.workers):
            kept = float(matrix(step)[worker, worker])
            x[worker], a[worker] = kept * x[worker], kept * a[worker]
        for to, values, mass in arriving:
            x[to], a[to] = x[to] + values, a[to] + mass
    whole = sum(x) + sum(values for _, values, _ in under_way)
    return torch.stack([own / mass for own, mass in zip(x, a, strict=True)]), whole / job.workers


def trained(job: Job, folder: Path) -> tuple[Tensor, Tensor]:
    """Trains in virtual time; gives every worker's own parameters, from the last checkpoint, and the run's model."""
    kept = replace(job, checkpointing=CheckpointConfig(folder=folder, checkpoints=1))
    models = simulated(kept, UNEVEN).models
    tensors, facts = load_checkpoint(checkpoints(folder / FOLDER)[0])
    own = []
    for worker in range(job.workers):
        state = {name: tensors.get(f"worker.{worker}.part.{name}") for name in ("parameters", "numerator")}
        if state["numerator"] is not None:
            own.append(state["numerator"] / facts["workers"][str(worker)]["part"]["mass"])
        else:
            assert state["parameters"] is not None
            own.append(state["parameters"])
    return torch.stack(own), vector_of(models[0])


def assert_same(found: tuple[Tensor, Tensor], expected: Tensor, mean: Tensor) -> None:
    torch.testing.assert_close(found[0], expected, **REORDERED)
    torch.testing.assert_close(found[1], mean, **REORDERED)
    assert (expected[1] - expected[2]).abs().max() > 1e-4


def thirds(neighbors: dict[int, tuple[int, int]]) -> Tensor:
    matrix = torch.eye(WORKERS, dtype=torch.float64) / 3
    for worker, others in neighbors.items():
        matrix[worker, list(others)] = 1 / 3
    return matrix


RING = thirds({0: (1, 3), 1: (0, 2), 2: (1, 3), 3: (0, 2)})


def one_peer(step: int) -> Tensor:
    """Worker i hears i-1 in even steps and i-2 in odd ones."""
    away = torch.roll(torch.eye(WORKERS, dtype=torch.float64), [1, 2][step % 2], 0)
    return (torch.eye(WORKERS, dtype=torch.float64) + away) / 2


@pytest.mark.parametrize("optimizer", ["sgd", "adam(lr=0.01)"])
def test_d_psgd_on_a_ring(optimizer: str, tmp_path: Path) -> None:
    job = job_of("d_psgd", optimizer=optimizer)
    expected = plain_d_psgd(job, lambda step: RING)
    assert_same(trained(job, tmp_path), expected, expected.mean(0))


def test_d_psgd_with_directed_turns(tmp_path: Path) -> None:
    job = job_of("d_psgd(topology=one_peer_exponential)")
    expected = plain_d_psgd(job, one_peer)
    assert_same(trained(job, tmp_path), expected, expected.mean(0))


def test_d_psgd_apart_is_independent_training(tmp_path: Path) -> None:
    """Bit for bit what each worker's own loop comes to."""
    job = replace(job_of("synchronous"), strategy=DPSGD(topology=Apart()))
    plain = Plain(job)
    for step in range(LENGTH * job.learning.epochs):
        for worker in range(WORKERS):
            plain.compute(worker, step)
        plain.update()
    assert torch.equal(trained(job, tmp_path)[0], plain.vectors)


def test_a_step_of_d_psgd_moves_the_mean_as_synchronous_training_does() -> None:
    """From equal replicas; later gradients are taken at points that differ."""
    one, other = (
        vector_of(
            simulated(make_job(spec, WORKERS, dtype=torch.float64, dataset=blobs(16), epochs=1)).models[0]
        )
        for spec in ("d_psgd(topology=complete)", "synchronous")
    )
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("spec", ["sgp", "sgp(topology=ring)"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam(lr=0.01)"])
def test_sgp_on_regular_graphs(spec: str, optimizer: str, tmp_path: Path) -> None:
    job = job_of(spec, optimizer=optimizer)
    expected = plain_push_sum(job, one_peer if spec == "sgp" else lambda step: RING)
    assert_same(trained(job, tmp_path), *expected)


def irregular(folder: Path) -> tuple[Path, Tensor]:
    """Writes a directed graph in which some get more than they give; gives where, and its matrix."""
    path = folder / "graph.txt"
    path.write_text("0 1\n1 2\n2 3\n3 0\n1 0\n2 0\n")
    columns = {0: [0, 1], 1: [0, 1, 2], 2: [0, 2, 3], 3: [0, 3]}
    matrix = torch.zeros(WORKERS, WORKERS, dtype=torch.float64)
    for source, receivers in columns.items():
        matrix[receivers, source] = 1 / len(receivers)
    return path, matrix


def test_sgp_on_an_irregular_directed_graph(tmp_path: Path) -> None:
    path, matrix = irregular(tmp_path)
    job = job_of(f"sgp(topology=file(path='{path}', directed=True))")
    assert_same(trained(job, tmp_path), *plain_push_sum(job, lambda step: matrix))


@pytest.mark.parametrize("optimizer", ["sgd", "sgd(momentum=0)", "adam(lr=0.01)"])
@pytest.mark.parametrize("topology", ["one_peer_exponential", "ring"])
def test_overlapped_sgp_on_regular_graphs(topology: str, optimizer: str, tmp_path: Path) -> None:
    job = job_of(f"sgp(topology={topology}, overlap=True)", optimizer=optimizer)
    matrix = one_peer if topology == "one_peer_exponential" else lambda step: RING
    assert_same(trained(job, tmp_path), *plain_late_push_sum(job, matrix))


def test_overlapped_sgp_on_an_irregular_directed_graph(tmp_path: Path) -> None:
    path, matrix = irregular(tmp_path)
    job = job_of(f"sgp(topology=file(path='{path}', directed=True), overlap=True)")
    assert_same(trained(job, tmp_path), *plain_late_push_sum(job, lambda step: matrix))


def test_sgp_with_everybody_is_synchronous_training(tmp_path: Path) -> None:
    """All replicas are the mean after every step, and momentum is linear."""
    job = job_of("synchronous")
    reference = vector_of(plain_loop(job, together=WORKERS))
    torch.testing.assert_close(vector_of(simulated(job).models[0]), reference, **REORDERED)
    own, mean = trained(job_of("sgp(topology=complete)"), tmp_path)
    torch.testing.assert_close(own, reference.expand_as(own), **REORDERED)
    torch.testing.assert_close(mean, reference, **REORDERED)
