"""Tiny jobs for every strategy, and the plain torch loop that they are measured against."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import cos, pi
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from polyrhythm.data.dataset import Dataset, TensorSplit
from polyrhythm.data.dealing import batch_indices, epoch_order
from polyrhythm.events import CheckpointSaved, Event
from polyrhythm.roles.job import CheckpointConfig, Job, Learning
from polyrhythm.simulation.run import ConstantCluster, simulate
from polyrhythm.specs import build, choices
from polyrhythm.strategies import FAMILIES
from polyrhythm.strategies.strategy import Strategy

OPTIMIZERS = "polyrhythm.training.optimizers"
JOINT_OPTIMIZERS = "polyrhythm.training.joint_optimizers"
SCHEDULES = "polyrhythm.training.schedules"
CLASSES = 3
SIDE = 4

# Beside every strategy's defaults, which are found by themselves.
VARIATIONS = [
    "parameter_server(servers=3)",
    "parameter_server(servers=2, replicas=2)",
    "parameter_server(consistency=synchronous)",
    "parameter_server(servers=2, consistency=synchronous, placement=dedicated)",
    "mixed(replicas=1)",
    "mixed(replicas=3, servers=2)",
    "mixed(replicas=2, consistency=synchronous)",
    "mixed(replicas=2, inside=local_sgd(steps=2))",
    "parameter_server(servers=2, consistency=bounded_staleness(s=1), merge=delay_compensated)",
    "synchronous(collective=ring)",
    "synchronous(transfer=bfloat16)",
    "synchronous(compress=top_k(density=0.2, dense_below=0, route=gathered))",
    "synchronous(compress=one_bit(dense_below=0))",
    "parameter_server(compress=one_bit(dense_below=0))",
    "parameter_server(servers=2, replicas=2, compress=one_bit(dense_below=0))",
    "downpour(servers=2, replicas=2)",
    "downpour(servers=2, compress=top_k(density=0.2, dense_below=0))",
    "local_sgd(steps=2, compress=top_k(density=0.2, dense_below=0, route=gathered))",
    "d_psgd(compress=top_k(density=0.2, dense_below=0))",
    "parameter_server(servers=2, consistency=synchronous, compress=top_k(density=0.2, dense_below=0))",
    "easgd(mode=synchronous, tau=1, servers=2)",
    "sgp(overlap=True)",
    "bmuf(steps=2, nesterov=True)",
]


def strategies() -> list[str]:
    """Gives the spec of every strategy, found by itself, and of some variations."""
    return [*(name for family in FAMILIES for name in choices(family)), *VARIATIONS]


def strategy(spec: str) -> Strategy:
    """Builds a strategy."""
    built = build("strategy", spec, *FAMILIES)
    assert isinstance(built, Strategy)
    return built


def in_step(workers: int) -> list[str]:
    """Gives the specs of those strategies in which so many workers go in step."""
    return [spec for spec in strategies() if strategy(spec).traits(workers).lockstep]


def agreeing(workers: int) -> list[str]:
    """Gives the specs of those strategies whose replicas are equal after every step."""
    return [spec for spec in strategies() if strategy(spec).traits(workers).identical]


def plain_alone() -> list[str]:
    """Gives the specs of those strategies of which one worker is plain training, bit for bit."""
    return [spec for spec in strategies() if is_plain_alone(spec)]


OTHERWISE_ALONE = {
    "admm", "decoupled_diloco", "diloco", "downpour", "eamsgd", "easgd", "ng_sgd", "periodic_averaging", "pipeline",
    "sandblaster", "slowmo",
}  # fmt: skip
"""Strategies that also change a single worker's arithmetic: outer steps, centers, their own optimizers."""


def is_plain_alone(spec: str) -> bool:
    """Gives whether one worker of a strategy is plain training, bit for bit."""
    name, _, options = spec.partition("(")
    return name not in OTHERWISE_ALONE and not (
        "inside=local_sgd" in options or (name == "parameter_server" and "compress=" in options)
    )


READS_OLD = {"ad_psgd", "decoupled_diloco", "gaia", "ssp"}
"""Strategies of which, with several workers, not every step ends with the newest parameters."""


def reads_newest(spec: str, workers: int) -> bool:
    """Gives whether every step ends with the newest parameters, so that all of them send equally many bytes."""
    name, _, options = spec.partition("(")
    alone = workers == 1 and name in ("ad_psgd", "gaia")
    return alone or not (name in READS_OLD or "inside=local_sgd" in options)


def named(specs: list[str]) -> list[str]:
    """Gives those specs that are a strategy's name alone, for what no option changes."""
    return [spec for spec in specs if "(" not in spec]


def out_of_step(workers: int) -> list[str]:
    """Gives the specs of the other strategies."""
    return [spec for spec in strategies() if spec not in in_step(workers)]


def cuts_layers(job: Job) -> bool:
    """Whether shards of several servers cut layers that the optimizer has to see whole: such a job is refused."""
    return job.learning.optimizer.layerwise and job.traits.shards > 1


def blobs(train: int = 53, test: int = 40) -> Dataset:
    """Makes pictures of three classes that overlap a little."""
    generator = torch.Generator().manual_seed(7)
    centers = torch.randn(CLASSES, 1, SIDE, SIDE, generator=generator)

    def split(count: int) -> TensorSplit:
        labels = torch.randint(CLASSES, (count,), generator=generator)
        noise = torch.randn(count, 1, SIDE, SIDE, generator=generator)
        return TensorSplit(centers[labels] + noise, labels)

    return Dataset("blobs", split(train), split(test), ("a", "b", "c"), (1, SIDE, SIDE), default_epochs=2)


def perceptron() -> nn.Module:
    """Makes a network of 16 inputs, 5 hidden units and 3 outputs: 103 parameters."""
    return nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 5), nn.Tanh(), nn.Linear(5, CLASSES))


PARAMETERS = 103


def with_dropout() -> nn.Module:
    """Makes a network that draws random numbers in every step."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(SIDE * SIDE, 6), nn.Dropout(0.4), nn.ReLU(), nn.Linear(6, CLASSES)
    )


def with_batch_norm() -> nn.Module:
    """Makes a small convolutional network with batch normalization."""
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1),
        nn.BatchNorm2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * SIDE * SIDE, CLASSES),
    )


def with_dropout_and_batch_norm() -> nn.Module:
    """Makes a small network that draws random numbers in every step, and keeps statistics."""
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1),
        nn.BatchNorm2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.4),
        nn.Linear(2 * SIDE * SIDE, CLASSES),
    )


def make_job(
    spec: str,
    workers: int = 1,
    *,
    model: Callable[[], nn.Module] = perceptron,
    dataset: Dataset | None = None,
    folder: Path | None = None,
    checkpoints: int = 2,
    dtype: torch.dtype = torch.float32,
    **learning: Any,
) -> Job:
    """Makes a job of two short epochs; `learning` overrides the fields of `Learning`, specs as text."""
    chosen: dict[str, Any] = {
        "optimizer": "sgd",
        "schedule": "cosine",
        "epochs": 2,
        "batch_size": 4,
        "seed": 3,
    }
    chosen |= learning
    chosen["optimizer"] = build("optimizer", chosen["optimizer"], OPTIMIZERS, JOINT_OPTIMIZERS)
    chosen["schedule"] = build("schedule", chosen["schedule"], SCHEDULES)
    return Job(
        strategy=strategy(spec),
        workers=workers,
        dataset=dataset or blobs(),
        make_model=lambda: model().to(dtype),
        model_name=model.__name__,
        learning=Learning(**chosen),
        checkpointing=CheckpointConfig(folder=folder, checkpoints=checkpoints),
    )


def resumed(job: Job) -> Job:
    """Gives the job that goes on from the newest checkpoint."""
    return replace(job, checkpointing=replace(job.checkpointing, resume=True))


@dataclass(frozen=True)
class Trained:
    """What a simulated run left.

    Attributes:
        events: in their order.
        models: the replicas, worker 0's first.
    """

    events: list[Event]
    models: list[nn.Module]

    @property
    def result(self) -> dict[str, Any]:
        """The figures of the run."""
        return result_of(self.events)

    @property
    def sha256(self) -> str:
        """The digest of the final parameters."""
        return str(self.result["parameters_sha256"])

    @property
    def checkpoint_steps(self) -> list[int]:
        """The leader's step at each checkpoint."""
        return [event.step for event in self.events if isinstance(event, CheckpointSaved)]


def result_of(events: list[Event]) -> dict[str, Any]:
    """Gives the figures that a run ended with."""
    record = events[-1].to_json()
    assert record["event"] == "RunEnded"
    result: dict[str, Any] = record["result"]
    return result


def simulated(job: Job, surroundings: ConstantCluster | None = None) -> Trained:
    """Runs a job in virtual time and keeps its replicas."""
    models: list[nn.Module] = []

    def make() -> nn.Module:
        models.append(job.make_model())
        return models[-1]

    return Trained(simulate(replace(job, make_model=make), surroundings), models)


def uneven(worker: int) -> float:
    """Step times that never meet: worker 0 is the quickest."""
    return 0.01 * (1 + 0.37 * worker)


UNEVEN = ConstantCluster(step_s=uneven)


@lru_cache(maxsize=1000)
def played(
    spec: str, workers: int = 1, around: ConstantCluster = UNEVEN, *, train: int = 53, **options: Any
) -> Trained:
    """Gives what a job without a folder left, which is played once for all tests that look at it.

    Another run of the same job has the same events and bits (`test_same_seed_same_trace`). Nothing of what is given
    may be changed, and nothing of ours may be replaced meanwhile: such tests play their own.
    """
    return simulated(make_job(spec, workers, dataset=blobs(train), **options), around)


def vector_of(model: nn.Module) -> Tensor:
    """Gives a model's parameters as one vector, in their order."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def sha256_of(vector: Tensor) -> str:
    """Gives the digest of a vector's bytes."""
    return hashlib.sha256(vector.numpy().tobytes()).hexdigest()


def saved_vector(folder: Path) -> Tensor:
    """Reads the parameters that a run saved, in the order of `perceptron`."""
    weights = load_file(folder / "model.safetensors")
    return torch.cat([weights[name].reshape(-1) for name in ("1.weight", "1.bias", "3.weight", "3.bias")])


def batch(job: Job, epoch: int, step: int, worker: int = 0, workers: int = 1) -> tuple[Tensor, Tensor]:
    """Gives the pictures and labels of one worker's batch."""
    train = job.dataset.train
    order = epoch_order(len(train), epoch, job.learning.seed)
    indices = batch_indices(order, step, worker, workers, job.learning.batch_size)
    return train.images(indices), train.labels[indices]


def cosine(job: Job, step: int, total: int) -> float:
    """Gives the learning rate of a step: half a cosine wave over the run."""
    return job.learning.optimizer.lr * ((1 + cos(pi * (step / total))) / 2)


def shared_out(order: Tensor, most: int) -> list[Tensor]:
    """Cuts an order into as few batches of at most so many images as there can be, alike but for one image."""
    count = -(-len(order) // most)
    ends = [len(order) * number // count for number in range(count + 1)]
    return [order[start:stop] for start, stop in pairwise(ends)]


def gradient(job: Job, vector: Tensor, worker: int, step: int, epoch: int = 0) -> Tensor:
    """Gives the gradient of a worker's batch at a vector of the perceptron, by plain torch."""
    model = perceptron().to(vector.dtype)
    nn.utils.vector_to_parameters(vector, model.parameters())
    images, labels = batch(job, epoch, step, worker, job.workers)
    functional.cross_entropy(model(images.to(vector.dtype)), labels).backward()
    return torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])


def plain_loop(
    job: Job, together: int = 1, each: Callable[[nn.Module], None] = lambda model: None
) -> nn.Module:
    """Trains one model in plain torch, without anything of ours but the shuffle and the optimizer's class.

    Args:
        job: what to learn; its strategy is not looked at.
        together: how many workers' batches make one batch of this loop.
        each: called with the model after every step.
    """
    learning, train = job.learning, job.dataset.train
    torch.manual_seed(learning.seed)
    model = job.make_model()
    dtype = next(model.parameters()).dtype
    optimizer = learning.optimizer.create(model.parameters())
    size = learning.batch_size * together
    step = 0
    for epoch in range(learning.epochs):
        batches = shared_out(epoch_order(len(train), epoch, learning.seed), size)
        for indices in batches:
            for group in optimizer.param_groups:
                group["lr"] = cosine(job, step, len(batches) * learning.epochs)
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(train.images(indices).to(dtype)), train.labels[indices])
            loss.backward()
            optimizer.step()
            each(model)
            step += 1
    return model


@lru_cache(maxsize=500)
def plainly(together: int = 1, *, train: int = 53, **options: Any) -> Tensor:
    """Gives the parameters of the plain loop, which is run once for all strategies that are measured against it."""
    return vector_of(plain_loop(make_job("synchronous", dataset=blobs(train), **options), together))


def stop_at(seconds: float, step_s: Callable[[int], float] = uneven) -> ConstantCluster:
    """Gives surroundings in which everyone is asked to stop at a virtual time."""
    return ConstantCluster(step_s=step_s, stop_at_s=seconds)
