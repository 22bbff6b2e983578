"""Compressed pushes and pulls: what arrives, what is kept on both sides, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from conformance.jobs import make_job, simulated, strategy, uneven, vector_of
from polyrhythm.communication.message import Kind, Message, RefusedMessage, pack_json
from polyrhythm.compression.compressor import COMPRESSORS
from polyrhythm.compression.layout import Layout
from polyrhythm.config.assemble import strategy_from
from polyrhythm.errors import RequestError
from polyrhythm.simulation.run import ConstantCluster
from polyrhythm.specs import build
from polyrhythm.strategies.parameter_server.consistency.asynchronous import Asynchronous
from polyrhythm.strategies.parameter_server.consistency.synchronous import Synchronous
from polyrhythm.strategies.parameter_server.serving.compressed import compressed_session, shared_out
from polyrhythm.strategies.parameter_server.serving.shard import Handling, shard_session
from polyrhythm.strategies.resharding import Held
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.optimizer_plan import OptimizerPlan

UNEVEN = ConstantCluster(step_s=uneven)
NUMBERS = 40 * 10 + 10
WORKERS = (0, 1)
RATE = 0.5


def compressor(spec):
    return build("compressor", spec, COMPRESSORS)


def random(seed):
    return torch.randn(NUMBERS, generator=torch.Generator().manual_seed(seed))


class Server:
    """A synchronous server of two pushers, rank 2, fed by hand; plain SGD of rate 0.5."""

    def __init__(self, spec, consistency=None):
        self.made = compressor(spec)
        flat = FlatParameters(nn.ParameterList([torch.zeros(40, 10), torch.zeros(10)]))
        self.layout = Layout.of_model(flat, self.made)
        optimizer = torch.optim.SGD([view.parameter for view in flat.views], lr=RATE)
        plan = OptimizerPlan.of(optimizer, flat)
        self.plan = plan.to_json() | {"layout": self.layout.to_json()}
        self.session = shard_session(
            WORKERS, consistency or Synchronous(), Handling(), (2,), 0, compressed_session(self.made)
        )
        self.step = 0

    def start(self, values):
        self.session.on_message(0, Message(Kind.CONFIGURE, pack_json(self.plan)))
        self.session.on_message(0, Message(Kind.PARAMETERS, values.clone()))
        return self

    def pull(self, worker, final=False):
        [(to, answer)] = self.session.on_message(worker, Message(Kind.PULL, stop=final))
        assert to == worker
        return answer.tensor

    def push(self, gradients):
        replies = []
        for worker, gradient in zip(WORKERS, gradients, strict=True):
            payload = self.layout.encode(self.made, gradient, step=self.step, rank=worker)
            message = Message(Kind.PUSH, payload, self.session.version, self.step, 1.0, RATE)
            replies += self.session.on_message(worker, message)
        self.step += 1
        return dict(replies)


@pytest.mark.parametrize("spec", ["top_k(density=0.1)", "one_bit", "int8", "power_sgd(rank=1)", "qsgd"])
def test_workers_hold_what_the_server_thinks_and_the_gap_closes(spec):
    server = Server(spec).start(random(0))
    held = server.pull(0).clone()
    server.pull(1)
    for step in range(4):
        replies = server.push([random(2 * step + 1), random(2 * step + 2)])
        payloads = [replies[worker].tensor for worker in WORKERS]
        assert torch.equal(payloads[0], payloads[1])  # both hold the same
        assert payloads[0].numel() < 4 * NUMBERS
        held += server.layout.decode(server.made, payloads[0], torch.float32)
        assert torch.equal(server.pull(0), held)
    before = float((server.session.values - held).norm())
    for _ in range(6):  # nothing new: what did not fit follows
        replies = server.push([torch.zeros(NUMBERS)] * 2)
        held += server.layout.decode(server.made, replies[0].tensor, torch.float32)
    after = float((server.session.values - held).norm())
    assert after < before or after < 1e-5
    for worker in WORKERS:
        server.session.on_message(worker, Message(Kind.LEAVE))
    assert torch.equal(server.pull(0, final=True), server.session.values)  # whole, whatever workers hold


CUT = 400


def in_parts(server, worker, gradient, broken=False):
    """Push in two stretches; return the replies."""
    end, rest = (server.layout.stretch(server.made, *place) for place in ((CUT, NUMBERS), (0, CUT)))
    told = [
        layout.encode(server.made, gradient[place], step=server.step, rank=worker)
        for layout, place in ((end, slice(CUT, None)), (rest, slice(CUT)))
    ]
    if broken:
        told[0] = torch.zeros(1, dtype=torch.uint8)
    part = Message(Kind.PART, told[0], CUT, server.step)
    assert server.session.on_message(worker, part) == []
    push = Message(Kind.PUSH, told[1], server.session.version, server.step, 1.0, RATE)
    return server.session.on_message(worker, push)


@pytest.mark.parametrize("spec", ["top_k(density=0.1)", "qsgd", "power_sgd(rank=1)", "terngrad"])
def test_stretches_that_travel_by_themselves_are_the_whole(spec):
    whole, parts = (Server(spec).start(random(0)) for _ in range(2))
    for server in (whole, parts):
        for worker in WORKERS:
            server.pull(worker)
    for step in range(3):
        gradients = [random(2 * step + 1), random(2 * step + 2)]
        answers = whole.push(gradients)
        replies = [reply for worker in WORKERS for reply in in_parts(parts, worker, gradients[worker])]
        parts.step += 1
        assert torch.equal(parts.session.values, whole.session.values)
        told = [(to, reply.kind, reply.version if reply.kind is Kind.PART else None) for to, reply in replies]
        each = [(Kind.PARAMETERS, None), (Kind.PART, 0), (Kind.PART, CUT)]
        assert told == [(worker, *one) for worker in WORKERS for one in each]
        assert replies[0][1].tensor.numel() == 0
        if not whole.made.loud:
            pieces = [
                parts.layout.stretch(parts.made, *place).decode(parts.made, reply.tensor, torch.float32)
                for place, (_, reply) in zip(((0, CUT), (CUT, NUMBERS)), replies[1:3], strict=True)
            ]
            expected = whole.layout.decode(whole.made, answers[0].tensor, torch.float32)
            assert torch.equal(torch.cat(pieces), expected)


def test_a_push_of_which_a_part_is_not_finite_counts_for_nothing():
    server = Server("top_k(density=0.1)", Asynchronous()).start(random(0))
    server.pull(0)
    before = server.session.values.clone()
    in_parts(server, 0, random(1), broken=True)
    assert torch.equal(server.session.values, before)
    assert server.session.stats().not_finite == 1
    server.step += 1
    in_parts(server, 0, random(1))
    assert not torch.equal(server.session.values, before)


def test_a_part_out_of_its_turn_is_refused():
    server = Server("top_k(density=0.1)").start(random(0))
    server.pull(0)
    payload = server.layout.stretch(server.made, CUT, NUMBERS).encode(server.made, random(1)[CUT:])
    for start in (-1, NUMBERS, NUMBERS + 5):
        with pytest.raises(RefusedMessage):
            server.session.on_message(0, Message(Kind.PART, payload, start, 0))
    with pytest.raises(RefusedMessage):
        server.session.on_message(0, Message(Kind.PART, random(1)[CUT:], CUT, 0))


def test_a_state_that_was_saved_goes_on_with_what_workers_hold():
    server, other = Server("top_k(density=0.1)").start(random(0)), Server("top_k(density=0.1)")
    for worker in WORKERS:
        server.pull(worker)
    for step in range(2):
        server.push([random(2 * step + 1), random(2 * step + 2)])
    tensors, facts = server.session.state()
    other.session.load_state(({name: value.clone() for name, value in tensors.items()}, facts))
    other.start(torch.zeros(NUMBERS))
    other.step = server.step
    for worker in WORKERS:
        assert torch.equal(other.pull(worker), server.pull(worker))
    one, two = (each.push([random(8), random(9)]) for each in (server, other))
    assert torch.equal(one[1].tensor, two[1].tensor)


def test_an_empty_push_counts_for_nothing_and_one_of_noise_is_refused():
    server = Server("top_k(density=0.1)").start(random(0))
    for worker in WORKERS:
        server.pull(worker)
    before = server.session.values.clone()
    empty = Message(Kind.PUSH, torch.zeros(0, dtype=torch.uint8), 0, 0, 0.0, RATE)
    assert server.session.on_message(0, empty) == []
    noise = torch.randint(0, 256, (500,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for tensor in (noise, torch.zeros(NUMBERS), None):
        with pytest.raises(RefusedMessage):
            server.session.on_message(1, Message(Kind.PUSH, tensor, 0, 0, 1.0, RATE))
    server.session.on_message(1, empty)
    assert torch.equal(server.session.values, before)
    bare = pack_json({key: value for key, value in server.plan.items() if key != "layout"})
    with pytest.raises(RefusedMessage, match="without the layout"):
        server.session.on_message(0, Message(Kind.CONFIGURE, bare))


@pytest.mark.parametrize(("together", "divisor"), [(True, 3), (False, 2)])
def test_another_number_of_workers_shares_what_was_kept_back(together, divisor):
    name = "compression.0.residual"
    states = {worker: ({name: random(worker)}, {"shards": 1}) for worker in range(3)}
    held = Held(torch.zeros(NUMBERS), (5, 5, 5), states, [])
    found = shared_out(held, 2, together=together)
    assert sorted(found) == [0, 1]
    whole = random(0) + random(1) + random(2)
    for tensors, facts in found.values():
        assert torch.allclose(tensors[name], whole / divisor, atol=1e-6)
        assert facts == {"shards": 1}


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("consistency", ["synchronous", "asynchronous", "bounded_staleness(s=1)"])
def test_at_full_density_servers_do_what_they_do_uncompressed(consistency, servers):
    keys = f"servers={servers}, consistency={consistency}"
    plain = simulated(make_job(f"parameter_server({keys})", 3), UNEVEN)
    full = simulated(
        make_job(f"parameter_server({keys}, compress=top_k(density=1.0, dense_below=0))", 3), UNEVEN
    )
    if consistency == "synchronous":
        assert full.sha256 == plain.sha256
    torch.testing.assert_close(vector_of(full.models[0]), vector_of(plain.models[0]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("parameter_server(compress=sign_sgd)", "is a vote"),
        (
            "parameter_server(consistency=synchronous, aggregator=krum, compress=top_k)",
            "krum.* compares gradients",
        ),
        ("dc_asgd(compress=top_k)", "workers hold another vector"),
        ("backup_workers(compress=top_k)", "drops late gradients"),
        ("ssp(compress=top_k)", "without cached_reads"),
    ],
)
def test_what_would_be_wrong_with_servers_is_refused(spec, complaint):
    with pytest.raises(RequestError, match=complaint) as refused:
        strategy(spec).check(5)
    assert "\n" not in str(refused.value)


def test_a_strategy_without_a_decoder_is_refused_and_a_compressor_given_twice_is():
    with pytest.raises(RequestError, match="hogwild cannot be compressed"):
        strategy_from("hogwild", "top_k")
    with pytest.raises(RequestError, match="compress is given twice"):
        strategy_from("synchronous(compress=qsgd)", "top_k")
    assert (
        str(strategy_from("synchronous", "top_k(density=0.1)")) == "synchronous(compress=top_k(density=0.1))"
    )
    assert strategy_from("synchronous", "none") == strategy_from("synchronous")
