"""L-BFGS on quadratics, in one piece and in shards."""

import pytest
import torch

from polyrhythm.communication.message import Kind, Message, pack_json, pack_tensors, unpack_tensors
from polyrhythm.strategies.parameter_server.sandblaster import Curvature, Sandblaster
from polyrhythm.strategies.parameter_server.serving.gate import Gate
from polyrhythm.strategies.parameter_server.serving.shard import OptimizedRule
from polyrhythm.training.flat_optimizer import Span
from polyrhythm.training.flat_parameters import shards
from polyrhythm.training.optimizer_plan import OptimizerPlan

NUMBERS = 8
EXACT = Sandblaster(memory=NUMBERS, trials=1, tolerance=0.0)


class Quadratic:
    """Half x'Ax - b'x, eigenvalues of A between 0.5 and 4."""

    def __init__(self):
        generator = torch.Generator().manual_seed(5)
        basis = torch.linalg.qr(torch.randn(NUMBERS, NUMBERS, generator=generator, dtype=torch.float64))[0]
        self.hessian = basis @ torch.diag(torch.linspace(0.5, 4.0, NUMBERS).double()) @ basis.T
        self.linear = torch.randn(NUMBERS, generator=generator, dtype=torch.float64)
        self.minimum = torch.linalg.solve(self.hessian, self.linear)

    def gradient(self, point):
        return self.hessian @ point - self.linear


class Servers:
    """Shards of which only scalar products are added up."""

    def __init__(self, count, search, start):
        self.slices = shards(NUMBERS, count)
        self.shards = [self._shard(start[place].clone()) for place in self.slices]
        self.parts = [Curvature(shard, search) for shard in self.shards]

    @staticmethod
    def _shard(values):
        made = OptimizedRule(Gate())
        plan = OptimizerPlan("SGD", (Span(0, len(values), {"lr": 1.0}),), 1.0)
        made.configure(Message(Kind.CONFIGURE, pack_json(plan.to_json())))
        made.begin(values)
        return made

    @property
    def values(self):
        return torch.cat([shard.values for shard in self.shards])

    def take(self, gradient, rate=1.0):
        products = [
            part.products(gradient[place]) for part, place in zip(self.parts, self.slices, strict=True)
        ]
        for part in self.parts:
            part.advance(sum(products), rate)


def residuals(loss, servers, batches):
    found = []
    for _ in range(batches):
        found.append(loss.gradient(servers.values).norm().item())
        servers.take(loss.gradient(servers.values))
    return found


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_quadratic_of_n_numbers_is_over_in_n_exact_steps(count):
    loss = Quadratic()
    found = residuals(loss, Servers(count, EXACT, torch.zeros(NUMBERS).double()), 2 * NUMBERS + 1)
    at_steps = found[::2]  # a step is a trial and its correction
    assert at_steps[NUMBERS] < 1e-9 * at_steps[0]
    assert at_steps[NUMBERS - 2] > 1e-4 * at_steps[0]


def test_steepest_descent_would_not_be():
    loss = Quadratic()
    plain = Sandblaster(memory=0, trials=1, tolerance=0.0)
    found = residuals(loss, Servers(1, plain, torch.zeros(NUMBERS).double()), 2 * NUMBERS + 1)
    assert found[-1] > 1e-3 * found[0]


@pytest.mark.parametrize(
    "search", [EXACT, Sandblaster(memory=3, trials=1, tolerance=0.5)], ids=["exact", "short"]
)
@pytest.mark.parametrize("count", [2, 3])
def test_shards_go_the_way_of_the_whole(count, search):
    loss = Quadratic()
    whole, cut = (Servers(servers, search, loss.minimum + 1) for servers in (1, count))
    for _ in range(9):
        gradient = loss.gradient(whole.values)
        whole.take(gradient, 0.7)
        cut.take(gradient, 0.7)
        torch.testing.assert_close(cut.values, whole.values, rtol=1e-9, atol=1e-9)


def test_only_the_newest_pairs_stay():
    loss = Quadratic()
    servers = Servers(1, Sandblaster(memory=2, trials=0, tolerance=0.0), loss.minimum + 1)
    kept = []
    for _ in range(5):
        servers.take(loss.gradient(servers.values), 0.1)
        kept.append(servers.parts[0].pairs)
    assert kept == [0, 1, 2, 2, 2]


def test_a_pair_that_bends_the_wrong_way_is_left_out():
    servers = Servers(1, Sandblaster(memory=5, trials=0, tolerance=0.0), torch.ones(NUMBERS).double())
    gradient = torch.ones(NUMBERS).double()
    for scale in (1.0, 2.0, 3.0):  # it grows on the way down: s'y < 0
        servers.take(scale * gradient, 0.1)
    assert servers.parts[0].pairs == 0
    torch.testing.assert_close(servers.values, (1 - 0.6) * gradient)


def test_numbers_that_are_none_leave_no_pair():
    servers = Servers(1, EXACT, torch.ones(NUMBERS).double())
    servers.take(torch.ones(NUMBERS).double(), 0.1)
    servers.take(torch.full((NUMBERS,), float("nan")).double(), 0.1)
    assert servers.parts[0].pairs == 0


@pytest.mark.parametrize("batches", range(6))
def test_state_goes_on_bit_for_bit(batches):
    """After a trial, after a correction, with and without pairs."""
    loss = Quadratic()
    search = Sandblaster(memory=2, trials=1, tolerance=0.0)
    first = Servers(1, search, loss.minimum + 1)
    residuals(loss, first, batches)
    second = Servers(1, search, first.values)
    second.parts[0].load_state(unpack_tensors(pack_tensors(*first.parts[0].state())))
    for servers in (first, second):
        residuals(loss, servers, 4)
    assert torch.equal(first.values, second.values)
