"""Momentum that makes up for asynchrony, against numpy, and on a quadratic that eight workers minimize."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from conformance.jobs import make_job, simulated, strategies, strategy, uneven
from polyrhythm.errors import RequestError
from polyrhythm.roles.job import check_network_use
from polyrhythm.simulation.run import ConstantCluster
from polyrhythm.strategies.parameter_server.composition.served import Served
from polyrhythm.training.closed_loop import ClosedLoopSGD
from polyrhythm.training.flat_optimizer import pack_optimizer_state, unpack_optimizer_state
from polyrhythm.training.optimizers.sgd import SGD

SLOPES = np.linspace(0.05, 1.0, 9)
START = np.linspace(-1.0, 2.0, 9)


def ages(count: int) -> list[int]:
    """Gives drawn ages, none beyond the updates that there were."""
    drawn = np.random.default_rng(3).geometric(1 / 6, count) - 1
    return [int(min(age, number)) for number, age in enumerate(drawn)]


def by_hand(
    steps: int, rate: float, target: float, gain: float, window: int, estimate: str
) -> tuple[np.ndarray, list[float]]:
    """Gives where a quadratic's stale gradients lead in numpy, and the explicit momentum of every step."""
    points, buffer, momentum = [START.copy()], np.zeros(9), target
    told = []
    for number, age in enumerate(ages(steps)):
        read = number - age
        gradient = SLOPES * points[read]
        if age == 0 and number:
            total = momentum
        elif read >= 1 and age <= window - 2:
            kept, moved = points[read + 1] - points[read] + rate * gradient, points[read] - points[read - 1]
            fitted = np.linalg.lstsq(moved[:, None], kept, rcond=None)[0][0]
            total = fitted if estimate == "projection" else np.sort(kept / moved)[4]
        else:
            total = target
        momentum = min(max(momentum + gain * (target - total), -0.95), 0.99)
        told.append(momentum)
        buffer = momentum * buffer + gradient
        points.append(points[-1] - rate * buffer)
    return points[-1], told


@pytest.mark.parametrize("estimate", ["median", "projection"])
@pytest.mark.parametrize(("target", "window"), [(0.9, 64), (0.5, 8)])
def test_updates_are_those_of_the_paper_and_of_least_squares(
    target: float, window: int, estimate: str
) -> None:
    expected, told = by_hand(300, 0.05, target, 0.02, window, estimate)
    parameter = torch.nn.Parameter(torch.tensor(START))
    optimizer = SGD(lr=0.05, momentum="auto", target=target, gain=0.02, estimate=estimate).create([parameter])
    optimizer.param_groups[0]["window"] = window
    points = [parameter.detach().clone()]
    found = []
    for number, age in enumerate(ages(300)):
        parameter.grad = torch.tensor(SLOPES) * points[number - age]
        optimizer.age = age
        optimizer.step()
        points.append(parameter.detach().clone())
        found.append(optimizer.state[parameter]["momentum"])
    assert found == pytest.approx(told, rel=1e-9)
    np.testing.assert_allclose(points[-1].numpy(), expected, rtol=1e-9)
    assert min(found) < target - 0.05


def minimized(
    momentum: float | str,
    noise: float,
    slopes: np.ndarray = SLOPES,
    start: np.ndarray = START,
    **keys: object,
) -> tuple[float, float, float]:
    """Minimises a quadratic with 8 workers that take turns.

    Gives the mean loss of the last steps, the median of the momentum in all, and the explicit one.
    """
    parameter, bent = torch.nn.Parameter(torch.tensor(start)), torch.tensor(slopes)
    optimizer = SGD(lr=0.02, momentum=momentum, **keys).create([parameter])
    generator = torch.Generator().manual_seed(1)
    held = [parameter.detach().clone() for _ in range(8)]
    losses, totals = [], []
    for number in range(1500):
        drawn = noise * torch.randn(len(bent), generator=generator, dtype=torch.float64)
        parameter.grad = bent * held[number % 8] + drawn
        if isinstance(optimizer, ClosedLoopSGD):
            optimizer.age = min(number, 7)
        optimizer.step()
        held[number % 8] = parameter.detach().clone()
        losses.append(float((bent * parameter.detach().square()).sum() / 2))
        totals.append(optimizer.state[parameter].get("total", 0.0))
    explicit = optimizer.state[parameter].get("momentum", 0.9)
    return float(np.mean(losses[-200:])), float(np.median(totals[-500:])), explicit


@pytest.mark.parametrize("estimate", ["median", "projection"])
@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_eight_workers_have_the_momentum_of_one_in_all(noise: float, estimate: str) -> None:
    """Where it is not corrected that of staleness comes on top, and the same rate diverges."""
    loss, total, explicit = minimized("auto", noise, estimate=estimate)
    assert loss < 1e-3
    assert total == pytest.approx(0.9, abs=0.02)
    assert explicit < 0.87
    assert minimized(0.9, noise)[0] > 1e6


def test_where_most_numbers_are_flat_the_projection_sees_what_the_median_does_not() -> None:
    """As in a network, where staleness bends few numbers of very many."""
    slopes = np.concatenate([SLOPES, np.full(91, 1e-6)])
    start = np.concatenate([START, np.full(91, 1e-3)])
    assert minimized("auto", 0.0, slopes, start, estimate="median")[0] > 1e6
    loss, _, explicit = minimized("auto", 0.0, slopes, start)
    assert loss < 1e-3
    assert explicit < 0.87


def test_nothing_is_measured_of_gradients_whose_age_nobody_tells() -> None:
    """Then it is SGD, bit for bit."""
    found = []
    for kind in (ClosedLoopSGD, torch.optim.SGD):
        torch.manual_seed(0)
        parameter = torch.nn.Parameter(torch.randn(20))
        optimizer = kind([parameter], lr=0.1, momentum=0.9, weight_decay=0.01)
        for _ in range(5):
            parameter.grad = torch.randn(20)
            optimizer.step()
        found.append(parameter.detach())
    assert torch.equal(*found)


def test_of_a_long_vector_some_numbers_are_looked_at() -> None:
    parameter = torch.nn.Parameter(torch.zeros(200_000))
    optimizer = ClosedLoopSGD([parameter])
    parameter.grad = torch.ones(200_000)
    optimizer.step()
    assert optimizer.state[parameter]["point.0"].shape == (50_000,)


def test_a_resumed_one_goes_on_to_the_same_bits() -> None:
    def stepped(optimizer: ClosedLoopSGD, parameter: torch.nn.Parameter, numbers: range) -> None:
        for number in numbers:
            parameter.grad = torch.tensor(SLOPES) * parameter.detach() + number % 3
            optimizer.age = min(number, 2)
            optimizer.step()

    whole, broken = (torch.nn.Parameter(torch.tensor(START)) for _ in range(2))
    optimizer = ClosedLoopSGD([whole])
    stepped(optimizer, whole, range(20))
    first = ClosedLoopSGD([broken])
    stepped(first, broken, range(9))
    second = ClosedLoopSGD([broken])
    unpack_optimizer_state(second, *pack_optimizer_state(first))
    stepped(second, broken, range(9, 20))
    assert torch.equal(whole, broken)


@pytest.mark.parametrize(
    "spec",
    [
        "parameter_server",
        "parameter_server(servers=2, replicas=2)",
        "parameter_server(consistency=bounded_staleness(s=2))",
    ],
)
def test_servers_tell_how_old_gradients_are(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    step = ClosedLoopSGD.step

    def watched(self: ClosedLoopSGD, closure: None = None) -> None:
        if self.param_groups[0]["params"][0].numel() > 2:  # and no plan that is only tried out
            seen.append(self.age)
        step(self, closure)

    monkeypatch.setattr(ClosedLoopSGD, "step", watched)
    result = simulated(
        make_job(spec, 3, optimizer="sgd(momentum=auto)"), ConstantCluster(step_s=uneven, latency_s=1e-3)
    ).result
    told = {int(age): count for age, count in result["staleness"]["histogram"].items()}
    assert max(told) > 0
    assert None not in seen
    assert set(told) <= set(seen)


@pytest.mark.parametrize(
    "spec", [each for each in strategies() if not strategy(each).traits(3).measures_staleness]
)
def test_a_strategy_that_does_not_tell_refuses_in_a_line(spec: str) -> None:
    job = make_job(spec, 3, optimizer="sgd(momentum=auto)")
    with pytest.raises(RequestError, match="momentum=auto follows the staleness of single gradients"):
        check_network_use(job.strategy, 3, torch.float32, job.learning)


def test_every_strategy_that_tells_has_servers() -> None:
    telling = [spec for spec in strategies() if strategy(spec).traits(3).measures_staleness]
    assert {"parameter_server", "parameter_server(servers=3)"} <= set(telling)
    assert all(isinstance(strategy(spec), Served) for spec in telling)


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"momentum": "auto", "nesterov": True}, "looks back and not ahead"),
        ({"target": 0.5}, "target is for momentum=auto"),
        ({"momentum": 0.5, "gain": 0.1}, "gain is for momentum=auto"),
        ({"momentum": 0.5, "estimate": "median"}, "estimate is for momentum=auto"),
    ],
)
def test_what_does_not_go_together_is_refused(keys: dict[str, object], why: str) -> None:
    with pytest.raises((RequestError, ValueError), match=why):
        SGD(**keys)
