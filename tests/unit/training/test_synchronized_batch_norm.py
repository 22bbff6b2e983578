"""Synchronized batch normalization by threads that meet, against torch's layers on the batches of all of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from threading import Barrier, Thread

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from conformance.jobs import make_job, perceptron, simulated, strategies, strategy, with_batch_norm
from polyrhythm.errors import RequestError
from polyrhythm.roles.job import check_network_use
from polyrhythm.training.batch_norms.synchronized import Synchronized


class Threads:
    """Workers that are threads: each of them sees one of these, of the same places to meet."""

    def __init__(self, rank: int, size: int, places: list[Tensor | None], barrier: Barrier) -> None:
        self.rank, self.size = rank, size
        self._places, self._barrier = places, barrier

    def all_reduce(self, tensor: Tensor) -> None:
        self._places[self.rank] = tensor.clone()
        self._barrier.wait()
        total = sum(each for each in self._places if each is not None)
        self._barrier.wait()
        tensor.copy_(total)

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        raise AssertionError("nothing is passed on")


def together(sizes: list[int], act: Callable[[int, Threads], None]) -> None:
    """Lets workers act at the same time."""
    places: list[Tensor | None] = [None] * len(sizes)
    barrier, failed = Barrier(len(sizes), timeout=20), []

    def run(rank: int) -> None:
        try:
            act(rank, Threads(rank, len(sizes), places, barrier))
        except BaseException as error:
            failed.append(error)
            barrier.abort()

    threads = [Thread(target=run, args=(rank,)) for rank in range(len(sizes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def network(affine: bool = True, momentum: float | None = 0.1) -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.BatchNorm2d(3, affine=affine, momentum=momentum),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(12, 5),
        nn.BatchNorm1d(5),
        nn.Linear(5, 3),
    ).double()


@pytest.mark.parametrize("sizes", [[4, 4], [5, 2, 1], [3, 0, 6]])
@pytest.mark.parametrize("keys", [{}, {"affine": False}, {"momentum": None}])
def test_several_workers_have_the_norm_of_the_whole_batch(sizes: list[int], keys: dict[str, float]) -> None:
    """Outputs, the mean of all gradients and running statistics; one worker may have nothing, or one picture."""
    torch.manual_seed(0)
    images, labels = (
        torch.randn(2, sum(sizes), 1, 4, 4, dtype=torch.float64),
        torch.randint(3, (2, sum(sizes))),
    )
    whole = network(**keys)
    models = [Synchronized().prepare(network(**keys)) for _ in sizes]
    for step in range(2):
        whole.zero_grad()
        expected = whole(images[step])
        functional.cross_entropy(expected, labels[step]).backward()
        outputs: dict[int, Tensor] = {}

        def act(rank: int, workers: Threads, step: int = step, outputs: dict[int, Tensor] = outputs) -> None:
            model = models[rank]
            Synchronized().meet(model, workers)
            model.zero_grad()
            found = model(images[step].split(sizes)[rank])
            outputs[rank] = found.detach()
            truth = labels[step].split(sizes)[rank]
            loss = functional.cross_entropy(found, truth) if len(truth) else found.sum() * 0
            loss.backward()

        together(sizes, act)
        torch.testing.assert_close(torch.cat([outputs[rank] for rank in range(len(sizes))]), expected)
        for number, parameter in enumerate(whole.parameters()):
            gradients = [list(model.parameters())[number].grad for model in models]
            mean = sum(size * each for size, each in zip(sizes, gradients, strict=True)) / sum(sizes)
            torch.testing.assert_close(mean, parameter.grad, rtol=1e-9, atol=1e-12)
        for model in models:
            for (name, found), value in zip(model.named_buffers(), whole.buffers(), strict=True):
                torch.testing.assert_close(found, value, msg=name)
    for model in models:
        assert torch.equal(model.eval()(images[0]), copy.deepcopy(model)(images[0]))


def test_a_copy_takes_no_part() -> None:
    model = Synchronized().prepare(with_batch_norm())
    Synchronized().meet(model, Threads(0, 2, [None, None], Barrier(2, timeout=0.1)))
    plain = with_batch_norm()
    plain.load_state_dict(model.state_dict())
    images = torch.randn(4, 1, 4, 4)
    assert torch.equal(copy.deepcopy(model).train()(images), plain.train()(images))


def test_one_number_in_all_has_no_variance() -> None:
    model = Synchronized().prepare(nn.Sequential(nn.BatchNorm1d(2)))

    def act(rank: int, workers: Threads) -> None:
        model[0].forward.args[2].workers = workers
        model(torch.ones(1 - rank, 2))

    with pytest.raises(ValueError, match="of all workers together"):
        together([1, 0], act)


class Activated(nn.BatchNorm2d):
    """Does more than to normalise."""

    def forward(self, images: Tensor) -> Tensor:
        return torch.relu(super().forward(images))


@pytest.mark.parametrize(
    ("model", "why"), [(perceptron(), "no batch normalization"), (Activated(2), "more than normalize")]
)
def test_networks_without_plain_layers_are_refused(model: nn.Module, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        Synchronized().prepare(nn.Sequential(model))


def test_workers_that_do_not_go_together_are_refused() -> None:
    for spec in [each for each in strategies() if not strategy(each).traits(3).mean_updates]:
        job = make_job(spec, 3, model=with_batch_norm, batch_norm=Synchronized())
        with pytest.raises(RequestError, match="needs workers that take every step together"):
            check_network_use(job.strategy, 3, torch.float32, job.learning)


@pytest.mark.parametrize(
    ("keys", "why"),
    [({"accumulate": 2}, "leave accumulate and compile out"), ({"optimizer": "kfac"}, "use ghost or plain")],
)
def test_passes_that_are_not_one_a_step_are_refused(keys: dict[str, object], why: str) -> None:
    job = make_job("synchronous", 2, model=with_batch_norm, batch_norm=Synchronized(), **keys)
    with pytest.raises(RequestError, match=why):
        check_network_use(job.strategy, 2, torch.float32, job.learning)


def test_simulated_workers_cannot_meet_inside_a_pass() -> None:
    job = make_job("synchronous", 2, model=with_batch_norm, batch_norm=Synchronized())
    with pytest.raises(RequestError, match="or train for real"):
        simulated(job)
    alone = simulated(make_job("synchronous", 1, model=with_batch_norm, batch_norm=Synchronized()))
    assert alone.sha256 == simulated(make_job("synchronous", 1, model=with_batch_norm)).sha256
