"""A dry run sends the messages of real training, at the same virtual times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import nn

from conformance.jobs import OPTIMIZERS, make_job, out_of_step, perceptron, strategies, strategy, uneven
from polyrhythm.communication.message import Kind, Message
from polyrhythm.communication.transports.simulated.communicator import SimulatedCommunicator
from polyrhythm.compression.compressor import COMPRESSORS
from polyrhythm.partition.cut import cut
from polyrhythm.partition.ownership import sizes_of_cut
from polyrhythm.roles.dry_run import DryRun
from polyrhythm.roles.job import Job
from polyrhythm.roles.server import serve
from polyrhythm.roles.worker import work
from polyrhythm.roles.world import World
from polyrhythm.simulation.run import program_of
from polyrhythm.simulation.simulated_run import ConstantCluster, RankProgram, constant_run
from polyrhythm.specs import build, choices
from polyrhythm.strategies.divided_network import HasStages
from polyrhythm.strategies.role_assignment import roles_in_order
from polyrhythm.strategies.strategy import Strategy
from polyrhythm.strategies.worker_part import Step, WorkerPart, WorkerSetting
from polyrhythm.training.flat_parameters import FlatParameters
from polyrhythm.training.model_sizes import ModelSizes, sizes_of, time_shares
from polyrhythm.training.optimizer import OptimizerConfig

IMAGES, SHAPE = 53, (1, 4, 4)
SLOW = ConstantCluster(step_s=uneven, latency_s=1e-3, bandwidth_bytes_per_s=1e6)
APART = (Kind.EVENT, Kind.RECORD, Kind.ACCOUNT, Kind.REPORT)
"""What is said of a run beside the strategy: it weighs nothing here, since a dry run has less to say."""
Sent = list[tuple[float, str, int, int, int]]


def _free_if_apart(nbytes_of: Callable[[Message], int], message: Message) -> int:
    return 0 if message.kind in APART else nbytes_of(message)


class _NotedEnds:
    """A strategy whose workers are noted when they have taken their last step."""

    def __init__(self, inner: Strategy, ended: set[int]) -> None:
        self._inner = inner
        self._ended = ended

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def worker(self, setting: WorkerSetting) -> WorkerPart:
        part = self._inner.worker(setting)
        take_step = part.gradients_ready

        def noted(step: Step, learning_rate: float) -> bool:
            stop = take_step(step, learning_rate)
            if step.number + 1 == setting.steps:
                self._ended.add(setting.network.rank)
            return stop

        part.gradients_ready = noted  # type: ignore[method-assign]
        return part


def _sent(piece: RankProgram, workers: int, servers: int, ended: set[int], replicated: bool) -> Sent:
    """Plays, and gives the strategy's messages while workers take steps: worker 0 ends later in training, where it
    waits for the others first. What servers tell each other may be of any worker, and is given until one ends; so
    are all messages where servers are replicated, since answers wait for what these tell each other.
    """
    sent: Sent = []
    among_servers = set(roles_in_order(workers, servers).servers)
    send = SimulatedCommunicator.start_send

    def noted(self: SimulatedCommunicator, to: int, message: Message) -> object:
        source, target = self._home.rank, self._members[to]
        over = ended if replicated or {source, target} <= among_servers else ended & {source, target}
        if message.kind not in APART and not over and len(ended) < workers:
            nbytes = self._home.cluster.nbytes_of(message)
            sent.append((self.clock.now(), message.kind.name, source, target, nbytes))
        return send(self, to, message)

    weighed = replace(piece, nbytes_of=partial(_free_if_apart, piece.nbytes_of))
    with mock.patch.object(SimulatedCommunicator, "start_send", noted):
        constant_run(roles_in_order(workers, servers), weighed, lambda event: None, SLOW).play()
    return sent


def _play(job: Job, world: World) -> None:
    if world.is_worker:
        work(job, world)
    else:
        serve(job.strategy, world)


def _both(
    spec: str,
    model: Callable[[], nn.Module],
    bucket_bytes: int,
    epochs: int = 1,
    sizes: ModelSizes | None = None,
) -> tuple[Sent, Sent]:
    """Gives the messages of training and of its dry run, 3 workers each."""
    flats = partial(FlatParameters, bucket_bytes=bucket_bytes)
    job = make_job(spec, 3, model=model, epochs=epochs, optimizer="sgd(lr=0.01)", schedule="constant")
    ended: set[int] = set()
    plain = job.strategy
    noted = cast(Strategy, _NotedEnds(plain, ended))
    job = replace(job, strategy=noted, time_shares=partial(time_shares, image_shape=SHAPE))
    if sizes is None:
        made = model()
        flat = flats(made)
        numbers = tuple(min(bucket.stop, flat.size) - bucket.start for bucket in flat.buckets)
        shapes = tuple(tuple(view.parameter.shape) for view in flat.views)
        sizes = ModelSizes(numbers, time_shares(made, flat, SHAPE), shapes=shapes)
        if isinstance(plain, HasStages):
            sizes = plain.sizes_of_parts(sizes, made, SHAPE, 3)
        elif job.traits.cuts_network:
            image = torch.zeros(1, *SHAPE)
            sizes = sizes_of_cut(sizes, flat, cut(made, None), image, job.traits.trunk, 3)
    optimizer = build("optimizer", "sgd(lr=0.01)", OPTIMIZERS)
    assert isinstance(optimizer, OptimizerConfig)
    dry_run = DryRun(
        strategy=noted,
        workers=3,
        sizes=sizes,
        steps=epochs * job.steps_per_epoch,
        batch_size=4,
        epoch_images=IMAGES,
        optimizer=optimizer,
    )
    servers, replicated = job.traits.servers, bool(plain.faults(3).holders)
    with mock.patch("polyrhythm.roles.replica.FlatParameters", flats):
        real = _sent(RankProgram(partial(_play, job)), 3, servers, ended, replicated)
    ended.clear()
    return real, _sent(program_of(dry_run), 3, servers, ended, replicated)


def _assert_same(real: Sent, dry: Sent) -> None:
    assert [entry[1:] for entry in dry] == [entry[1:] for entry in real]
    assert [entry[0] for entry in dry] == pytest.approx([entry[0] for entry in real], rel=1e-9)


def _possible_specs() -> list[str]:
    """Gives the strategies whose messages do not depend on values, which a dry run without gradients lacks."""
    return [spec for spec in strategies() if not strategy(spec).traits(1).sends_by_value]


@pytest.mark.parametrize("spec", _possible_specs())
def test_a_small_model_is_run_dry_to_the_byte_and_the_instant(spec: str) -> None:
    real, dry = _both(spec, perceptron, bucket_bytes=16)
    if not strategy(spec).traits(1).one_host:  # whose workers share memory, and need no message
        assert len(real) > (15 if strategy(spec).traits(3).exchange_every == 1 else 1)
    _assert_same(real, dry)


def convolving(*norm: nn.Module) -> nn.Module:
    """Makes a network with two convolutions in front of its fully connected layer."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        *norm,
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 5, 3, padding=1),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(20, 3),
    )


@pytest.mark.parametrize("scheme", ["a", "b", "c"])
@pytest.mark.parametrize("trunk", ["channels", "height"])
def test_convolutions_that_are_cut_are_run_dry_to_the_byte_and_the_instant(trunk: str, scheme: str) -> None:
    real, dry = _both(f"hybrid(trunk={trunk}, scheme={scheme})", convolving, bucket_bytes=16)
    assert len(real) > 100
    _assert_same(real, dry)


@pytest.mark.parametrize("trunk", ["channels", "height"])
def test_sums_of_batch_normalization_are_run_dry(trunk: str) -> None:
    """Running statistics, which meet at the start and by channels at an epoch's end, are no numbers of a dry run."""
    real, dry = _both(f"hybrid(trunk={trunk})", lambda: convolving(nn.BatchNorm2d(4)), bucket_bytes=16)
    at_start = 3 * 2
    real = real[at_start:]
    assert [entry[1:] for entry in real[: len(dry)]] == [entry[1:] for entry in dry]


@pytest.mark.parametrize("spec", [spec for spec in out_of_step(3) if spec in _possible_specs()])
def test_epochs_end_as_in_training(spec: str) -> None:
    if spec == "decoupled_diloco":
        spec += "(quorum=1)"  # else a merge does not wait for workers that have ended
    _assert_same(*_both(spec, perceptron, bucket_bytes=16, epochs=2))


def of_size(numbers: int) -> nn.Module:
    """Makes a network with so many parameters, the last of which nothing uses."""

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = perceptron()
            self.padding = nn.Parameter(torch.zeros(numbers - 103))

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.inner(images) + 0 * self.padding[0]

    return Padded()


@pytest.mark.parametrize(
    "spec",
    [
        "parameter_server",
        "parameter_server(servers=2)",
        "parameter_server(servers=4, consistency=synchronous)",
    ],
)
def test_every_number_of_a_stand_in_weighs_as_many_as_it_stands_for(spec: str) -> None:
    """8192 numbers are 8 times 1024, and every shard divides; the plans' texts have as many digits."""

    def model() -> nn.Module:
        return of_size(8192)

    stood_for = DryRun(
        strategy=strategy(spec), workers=3, sizes=ModelSizes((8192,), (1.0,)), steps=1
    ).stand_in
    assert (stood_for.numbers, stood_for.scale) == (1024, 8.0)
    real, dry = _both(spec, model, bucket_bytes=1 << 20)
    without_plans = [[entry for entry in sent if entry[1] != "CONFIGURE"] for sent in (real, dry)]
    assert [entry[1:] for entry in without_plans[1]] == [entry[1:] for entry in without_plans[0]]
    # a plan's text is a few bytes shorter, at 1 MB/s
    assert [entry[0] for entry in dry] == pytest.approx([entry[0] for entry in real], abs=1e-5)


COMPRESSED = [
    *(
        f"synchronous(compress={name})"
        for name in choices(COMPRESSORS)
        if name not in ("threshold", "adacomp", "sufficient_factors")
    ),
    *(f"parameter_server(servers=2, compress={name})" for name in ("top_k", "int8", "one_bit")),
    "parameter_server(compress=power_sgd(rank=2))",
    "synchronous(compress=power_sgd(rank=2, warm_up=3))",
    "synchronous(compress=random_k(density=0.3))",
    "local_sgd(steps=2, compress=top_k(density=0.1))",
    "diloco(steps=2, compress=int8)",
]


@pytest.mark.parametrize("spec", COMPRESSED)
def test_compressed_vectors_have_in_a_dry_run_the_bytes_that_their_shapes_give(spec: str) -> None:
    """A layer of 3 x 81,920 among small ones; the stand-in has 1,536 or 1,024 numbers."""

    def model() -> nn.Module:
        class Padded(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = perceptron()
                self.padding = nn.Parameter(torch.zeros(96, 2560))

            def forward(self, images: torch.Tensor) -> torch.Tensor:
                return self.inner(images) + 0 * self.padding[0, 0]

        return Padded()

    made = model()
    sizes = sizes_of(made, SHAPE, bucket_bytes=1 << 20)
    stood_for = DryRun(strategy=strategy(spec), workers=3, sizes=sizes, steps=1).stand_in
    assert stood_for.scale > 100
    real, dry = _both(spec, model, bucket_bytes=1 << 20, sizes=sizes)
    apart = "CONFIGURE"  # whose text says of a stand-in what it stands for
    travels, counted = ([entry[1:] for entry in sent if entry[1] != apart] for sent in (real, dry))
    assert [entry[:3] for entry in counted] == [entry[:3] for entry in travels]
    for found, expected in zip(counted, travels, strict=True):
        whole = expected[3] > sizes.parameters  # uncompressed, as at the start: as many as numbers stand for
        assert found[3] == (pytest.approx(expected[3], rel=0.02) if whole else expected[3])
    assert min(entry[3] for entry in travels if entry[3] > 500) < 4 * sizes.parameters / 2


def test_slices_of_an_all_reduce_weigh_as_many_as_they_stand_for() -> None:
    """The model and the two numbers that travel along are 9 times as many as in its dry run: 1538 and 13,842."""
    sizes = ModelSizes((9 * 1536,), (1.0,))
    assert DryRun(strategy=strategy("synchronous"), workers=3, sizes=sizes, steps=1).stand_in.scale == 9

    def model() -> nn.Module:
        return of_size(9 * 1538 - 2)

    real, dry = _both("synchronous", model, bucket_bytes=1 << 20, sizes=sizes)
    assert len(real) == 2 + 5 * 12  # a broadcast, and two messages of everyone to everyone a step
    assert sorted(entry[1:4] for entry in dry) == sorted(entry[1:4] for entry in real)
    # slices of 513, 513 and 512 numbers; the model's are 4614 each
    assert {entry[4] for entry in dry[2:]} == {64 + 4 * 9 * 513, 64 + 4 * 9 * 512}
    assert {entry[4] for entry in real[2:]} == {64 + 4 * 4614}
    assert dry[-1][0] == pytest.approx(real[-1][0], rel=1e-3)
