"""Means of gradients of which little travels, over simulated links."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from polyrhythm.communication.message import HEADER_BYTES
from polyrhythm.communication.transports.simulated.communicator import SimulatedCluster
from polyrhythm.communication.transports.simulated.network import ConstantNetwork
from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime
from polyrhythm.compression.compressor import COMPRESSORS
from polyrhythm.compression.compressors.power_sgd import orthonormal
from polyrhythm.compression.layout import Layout
from polyrhythm.specs import build, choices
from polyrhythm.strategies.compressed_mean import CompressedMean, merged_over
from polyrhythm.strategies.gradient_mean import GradientMean
from polyrhythm.strategies.worker_part import Step
from polyrhythm.training.flat_parameters import FlatParameters, shards

ROWS, COLUMNS, BIAS = 12, 10, 5
NUMBERS = ROWS * COLUMNS + BIAS


def compressor(spec):
    return build("compressor", spec, COMPRESSORS)


def dense_below_nothing(spec):
    """Gives a spec of a compressor that takes small matrices."""
    name, _, keys = spec.partition("(")
    return f"{name}(dense_below=0, {keys}" if keys else f"{name}(dense_below=0)"


class Members:
    """Members of a group in virtual time, who average their gradients step by step."""

    def __init__(self, count, spec):
        self.spec = None if spec is None else dense_below_nothing(spec)
        self.start(count)

    def start(self, count):
        self.time = VirtualTime()
        self.cluster = SimulatedCluster(self.time, ConstantNetwork(self.time), count)
        self.count = count
        shapes = [(ROWS, COLUMNS), (BIAS,)]
        self.flats = [
            FlatParameters(nn.ParameterList(torch.zeros(shape) for shape in shapes)) for _ in range(count)
        ]
        self.groups = [self.cluster.communicator(rank) for rank in range(count)]
        self.means = [self.mean(rank) for rank in range(count)]
        self.sent = [0] * count

    def mean(self, rank):
        communicator, flat = self.groups[rank], self.flats[rank]
        if self.spec is None:
            return GradientMean(communicator, flat)
        return CompressedMean(communicator, flat, compressor(self.spec))

    def step(self, gradients, number=0, weights=None, wishing=(), rate=0.0):
        """Averages once; gives what all found, the weight, whether to stop."""
        weights = weights or [1.0] * self.count
        found = {}

        def play(rank):
            mean, flat = self.means[rank], self.flats[rank]
            mean.prepare()
            flat.gradients.copy_(gradients[rank])
            step = Step(number, weights[rank], rank in wishing)
            mean.begin(step)
            mean.learning_rate = rate
            before = self.groups[rank].traffic.bytes_sent
            outgoing = mean.finish(step)
            self.sent[rank] = self.groups[rank].traffic.bytes_sent - before
            found[rank] = (flat.gradients.clone(), *outgoing)

        for rank in range(self.count):
            self.time.spawn(f"member {rank}", lambda rank=rank: play(rank))
        self.time.run()
        assert all(torch.equal(found[rank][0], found[0][0]) for rank in found)
        assert all(found[rank][1:] == found[0][1:] for rank in found)
        return found[0]


def random(seed):
    return torch.randn(NUMBERS, generator=torch.Generator().manual_seed(seed))


def kept_back(members):
    """Gives the sum of what all members hold back, of their own and of the sums that they make."""
    total = torch.zeros(NUMBERS)
    for mean in members.means:
        tensors, _ = merged_over([mean.state()], 1)
        total += tensors.get("own.residual", torch.zeros(NUMBERS))
    return total


FULL = ["top_k(density=1.0)", "random_k(density=1.0)", "dgc(density=1.0)"]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("spec", FULL)
def test_at_full_density_the_mean_is_that_of_whole_gradients_to_the_bit(spec, count):
    gradients = [torch.round(random(rank) * 8) / 8 for rank in range(count)]
    whole = Members(count, None).step(gradients)
    found = Members(count, spec).step(gradients)
    assert torch.equal(found[0], whole[0])
    assert found[1:] == whole[1:]


def test_at_full_rank_the_mean_is_that_of_whole_gradients_to_rounding(monkeypatch):
    made = compressor("power_sgd(rank=10, dense_below=0)")
    monkeypatch.setattr(type(made), "fits", lambda self, rows, columns: rows > 1)
    gradients = [random(rank) for rank in range(3)]
    found = Members(3, "power_sgd(rank=10)").step(gradients)[0]
    assert torch.allclose(found, sum(gradients) / 3, atol=1e-5)


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize(
    "spec", [spec for spec in choices(COMPRESSORS) if compressor(spec).feedback and spec != "dgc"]
)
def test_what_is_applied_and_what_is_kept_add_up_to_all_gradients(spec, count):
    members = Members(count, spec)
    outgoing, applied = torch.zeros(NUMBERS), torch.zeros(NUMBERS)
    for step in range(5):
        gradients = [random(10 * step + rank) for rank in range(count)]
        found, weight, _ = members.step(gradients, step, [1.0] * (count - 1) + [0.5])
        applied += found * weight
        outgoing += sum(gradients[:-1]) + 0.5 * gradients[-1]
    assert torch.allclose(applied + kept_back(members), outgoing, atol=2e-4)


@pytest.mark.parametrize("spec", choices(COMPRESSORS))
def test_members_hear_of_requests_to_stop_and_steps_without_weight_count_for_nobody(spec):
    members = Members(3, spec)
    gradients = [random(rank) for rank in range(3)]
    assert members.step(gradients, 0, wishing=[1])[1:] == (3.0, True)
    before = [mean.state()[0] for mean in members.means]
    found, weight, stop = members.step(gradients, 1, [0.0] * 3)
    assert (weight, stop) == (0.0, False)
    assert not bool(found.any())
    for mean, tensors in zip(members.means, before, strict=True):
        assert all(torch.equal(value, tensors[name]) for name, value in mean.state()[0].items())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("spec", choices(COMPRESSORS))
def test_a_gradient_that_is_not_finite_leaves_the_step_out_for_all(spec, bad):
    members, other = Members(3, spec), Members(3, spec)
    for each in (members, other):
        each.step([random(rank) for rank in range(3)], 0)
    gradients = [random(rank + 3) for rank in range(3)]
    gradients[1][7] = bad
    found, weight, _ = members.step(gradients, 1)
    assert weight == 0.0
    assert not bool(found.any())
    again = [random(rank + 6) for rank in range(3)]
    assert torch.equal(members.step(again, 2)[0], other.step(again, 2)[0])


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("spec", choices(COMPRESSORS))
def test_a_saved_state_goes_on_to_the_bit(spec, count):
    members = Members(count, spec)
    for step in range(2):
        members.step([random(10 * step + rank) for rank in range(count)], step, rate=0.1)
    resumed = Members(count, spec)
    for mean, old in zip(resumed.means, members.means, strict=True):
        mean.load_state(old.state())
    gradients = [random(90 + rank) for rank in range(count)]
    assert torch.equal(members.step(gradients, 2, rate=0.05)[0], resumed.step(gradients, 2, rate=0.05)[0])


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 4), (4, 3)])
@pytest.mark.parametrize("spec", ["top_k(density=0.1)", "one_bit", "int8", "power_sgd(rank=1)"])
def test_another_number_of_members_keeps_what_was_held_back_as_a_part_of_the_mean(spec, before, after):
    members = Members(before, spec)
    members.step([random(rank) for rank in range(before)])
    share = kept_back(members) / before
    merged = merged_over([mean.state() for mean in members.means], before)
    resumed = Members(after, spec)
    for rank, mean in enumerate(resumed.means):
        mean.load_state((merged[0], {"member": rank, "members": after}))
    assert torch.allclose(kept_back(resumed) / after, share, atol=1e-5)
    assert float(share.abs().max()) > 0


def test_a_majority_decides_and_a_tie_counts_as_plus_one():
    votes = torch.tensor([[1.0, -2.0, 0.1], [3.0, 0.5, -9.0], [-1.0, -7.0, -2.0]])
    gradients = [torch.cat([row, torch.zeros(NUMBERS - 3)]) for row in votes]
    members = Members(3, "sign_sgd")
    assert members.step(gradients)[0][:3].tolist() == [1.0, -1.0, -1.0]
    scaled = [gradient * factor for gradient, factor in zip(gradients, (100.0, 0.01, 7.0), strict=True)]
    assert torch.equal(members.step(scaled)[0][:120], members.step(gradients)[0][:120])
    assert Members(2, "sign_sgd").step(gradients[:2])[0][1] == 1.0  # -2 and 0.5
    # Less than half of the members cannot turn what all others agree on.
    flipped = [torch.ones(NUMBERS)] * 3 + [-torch.ones(NUMBERS)] * 2
    assert torch.equal(Members(5, "sign_sgd").step(flipped)[0][:120], torch.ones(120))


def test_factors_are_those_of_the_paper_and_left_is_what_the_mean_lacks():
    """Two steps of PowerSGD in plain torch: one matrix, error feedback with the common product."""
    count = 3
    members = Members(count, "power_sgd(rank=2)")
    made = compressor(members.spec)
    start = made.start(Layout.of_model(members.flats[0], made).place(0, torch.float32, {}))
    errors = [torch.zeros(ROWS, COLUMNS)] * count
    for step in range(3):
        gradients = [random(10 * step + rank) for rank in range(count)]
        matrices = [
            gradient[: ROWS * COLUMNS].view(ROWS, COLUMNS) + error
            for gradient, error in zip(gradients, errors, strict=True)
        ]
        left = orthonormal(sum(matrix @ start for matrix in matrices))
        right = sum(matrix.t() @ left for matrix in matrices) / count
        product = left @ right.t()
        errors = [matrix - product for matrix in matrices]
        start = right
        found = members.step(gradients, step)[0]
        assert torch.allclose(found[: ROWS * COLUMNS].view(ROWS, COLUMNS), product, atol=1e-5)
        assert torch.allclose(found[ROWS * COLUMNS :], sum(g[ROWS * COLUMNS :] for g in gradients) / count)


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("spec", ["top_k(density=0.1)", "int8", "one_bit", "qsgd", "dgc(density=0.1)"])
def test_bytes_sent_are_those_of_the_formulas(spec, count):
    members = Members(count, spec)
    members.step([random(rank) for rank in range(count)])
    made = compressor(members.spec)
    layout = Layout.of_model(members.flats[-1], made)
    if made.sparse or count == 2:  # to each other member the same
        expected = (count - 1) * (layout.nbytes(made, torch.float32) + HEADER_BYTES)
    else:  # to each its slice, and to all the sum of the own slice
        parts = [layout.part(made, part.start, part.stop) for part in shards(NUMBERS, count)]
        *others, own = (part.nbytes(made, torch.float32) for part in parts)
        expected = sum(others) + (count - 1) * own + 2 * (count - 1) * HEADER_BYTES
    assert members.sent[-1] == expected


def test_numbers_that_all_draw_alike_are_added_up_as_they_travel():
    count = 4
    members = Members(count, "random_k(density=0.1)")
    members.step([random(rank) for rank in range(count)])
    payload = (12 + BIAS + 3) * 4  # values, the bias, and weight, word and flag
    assert max(members.sent) < 2 * payload + 12 * HEADER_BYTES
