"""What compositions of the parameter server have in common with each other, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from conformance.jobs import UNEVEN, blobs, make_job, plain_loop, played, simulated, vector_of
from polyrhythm.communication.transports.simulated.communicator import SimulatedCommunicator
from polyrhythm.errors import RequestError
from polyrhythm.simulation.run import ConstantCluster

FIGURES = ("parameters_sha256", "staleness", "test_loss", "bytes_sent_per_step", "seconds")
Trace = list[tuple[float, str, int, int, int, int]]


def figures(spec: str, workers: int = 3, **options: Any) -> dict[str, Any]:
    result = played(spec, workers, **options).result
    return {figure: result[figure] for figure in FIGURES}


def assert_same(one: str, other: str, workers: int = 3, **options: Any) -> None:
    assert figures(one, workers, **options) == figures(other, workers, **options)


def served(**parts: Any) -> str:
    return f"parameter_server({', '.join(f'{key}={value}' for key, value in parts.items())})"


@pytest.fixture
def sent() -> Iterator[Trace]:
    """Gives a list that fills with the run's messages: time, kind, sender, receiver, version, step."""
    trace: Trace = []
    send = SimulatedCommunicator.start_send

    def noted(self: SimulatedCommunicator, to: int, message: Any) -> Any:
        target = self._members[to]
        trace.append(
            (self.clock.now(), message.kind.name, self._home.rank, target, message.version, message.step)
        )
        return send(self, to, message)

    with mock.patch.object(SimulatedCommunicator, "start_send", noted):
        yield trace


@pytest.mark.parametrize("optimizer", ["sgd", "adam(lr=0.01)"])
@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize(
    "spec",
    [
        "backup_workers(spare=0, servers=2)",
        "ssp(s=0, servers=2)",
        served(servers=2, consistency="bounded_staleness(s=0)"),
        served(servers=2, consistency="synchronous", merge="delay_compensated"),
        served(servers=2, consistency="synchronous", merge="staleness_aware"),
    ],
)
def test_these_are_the_synchronous_server(spec: str, workers: int, optimizer: str) -> None:
    """1.6 with b = 0, 2.6 with s = 0; and merge rules, where nothing is stale."""
    assert_same(spec, served(servers=2, consistency="synchronous"), workers, optimizer=optimizer)


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize(
    "spec",
    [
        "dc_asgd(lambda0=0)",
        "dc_asgd(lambda0=0, variant=c)",
        "softsync(n={workers}, merge=plain)",
        served(consistency="bounded_staleness(s=1000)"),
    ],
)
def test_these_are_the_asynchronous_server(spec: str, workers: int) -> None:
    """2.5 with lambda0 = 0, 2.4 with n = lambda and a fixed rate, 2.6 with s beyond all steps."""
    assert_same(spec.format(workers=workers), "parameter_server", workers, optimizer="sgd(lr=0.05)")


@pytest.mark.parametrize("servers", [1, 2])
def test_ssp_without_a_bound_sends_the_messages_of_asynchronous_servers(sent: Trace, servers: int) -> None:
    traces = []
    for consistency in ("bounded_staleness(s=1000)", "asynchronous"):
        simulated(make_job(served(servers=servers, consistency=consistency), 3), UNEVEN)
        # the plan, the answer to a pull …: the configuration's text is the same for both
        traces.append([entry for entry in sent if entry[1] not in ("STATE", "EVENT", "REPORT")])
        sent.clear()
    assert traces[0] == traces[1]
    assert len(traces[0]) > 60


def test_with_a_bound_it_does_not(sent: Trace) -> None:
    """Else the test above could not fail."""
    one, other = (figures(served(consistency=f"bounded_staleness(s={s})")) for s in (1, 1000))
    assert one["parameters_sha256"] != other["parameters_sha256"]


def test_rates_by_staleness_change_nothing_as_long_as_nobody_is_older_than_1() -> None:
    """Two workers of equal speed: tau is 0 once and then 1."""
    job, other = (
        make_job(spec, 2, dataset=blobs(train=48)) for spec in ("staleness_aware", "parameter_server")
    )
    ours, plain = (simulated(each).result for each in (job, other))
    assert plain["staleness"]["max"] == 1
    assert ours["parameters_sha256"] == plain["parameters_sha256"]
    older = [figures(spec)["parameters_sha256"] for spec in ("staleness_aware", "parameter_server")]
    assert older[0] != older[1]


def test_softsync_that_gathers_all_has_no_barrier() -> None:
    """It averages as many gradients as lockstep does, but a quick worker gives two and nobody waits."""
    soft, hard = (
        simulated(make_job(spec, 3, dataset=blobs(train=48)), UNEVEN).result
        for spec in ("softsync(n=1, merge=plain)", served(consistency="synchronous"))
    )
    assert soft["parameters_sha256"] != hard["parameters_sha256"]
    assert (
        sum(soft["staleness"]["histogram"].values()) == sum(hard["staleness"]["histogram"].values()) == 3 * 8
    )
    assert soft["staleness"]["max"] > hard["staleness"]["max"] == 0


@pytest.mark.parametrize("s", [0, 1, 2, 5])
@pytest.mark.parametrize("optimizer", ["sgd", "sgd(momentum=0)", "adam(lr=0.01)"])
def test_one_worker_of_ssp_is_plain_training_for_every_bound(s: int, optimizer: str) -> None:
    job = make_job(f"ssp(s={s}, servers=2)", optimizer=optimizer)
    assert torch.equal(vector_of(simulated(job).models[0]), vector_of(plain_loop(job)))


@pytest.mark.parametrize(
    "spec",
    [
        "softsync(n=3)",
        "backup_workers(spare=2)",
        "dc_asgd(variant=c)",
        served(consistency="softsync(n=2)", merge="delay_compensated", servers=2),
        served(consistency="bounded_staleness(s=2, cached_reads=True)", merge="staleness_aware"),
    ],
)
def test_one_worker_is_plain_training_whatever_the_parts(spec: str) -> None:
    job = make_job(spec, optimizer="sgd(momentum=0.5)")
    assert torch.equal(vector_of(simulated(job).models[0]), vector_of(plain_loop(job)))


def test_a_gradient_of_an_own_copy_cannot_be_compensated_by_what_was_answered() -> None:
    """One worker would end 0.006 away from plain training."""
    spec = served(consistency="bounded_staleness(s=2, cached_reads=True)", merge="delay_compensated")
    with pytest.raises(RequestError, match=r"updates of their own: leave cached_reads out$"):
        make_job(spec, 1).strategy.check(1)


def test_a_trimmed_mean_that_trims_nothing_is_the_mean() -> None:
    assert_same(
        served(consistency="synchronous", aggregator="trimmed_mean(k=0)"),
        served(consistency="synchronous"),
        train=48,
    )


@pytest.mark.parametrize("spec", ["krum(f=1)", "multi_krum(f=1)", "bulyan(f=1)"])
def test_servers_that_exchange_distances_choose_as_one_does(spec: str) -> None:
    """The choice is the same, and so are the bits of what is made of it: sums go coordinate by coordinate."""
    one, three = (
        simulated(
            make_job(
                served(servers=count, consistency="synchronous", aggregator=spec), 7, dataset=blobs(train=56)
            ),
            UNEVEN,
        )
        for count in (1, 3)
    )
    assert one.sha256 == three.sha256
    assert one.result["bytes_sent_per_step"] < three.result["bytes_sent_per_step"]


def test_a_late_gradient_leaves_no_trace() -> None:
    """A worker that is always late: the others' run is the same, bit for bit, as without it (and its data)."""

    def one_late(worker: int) -> float:
        return 1.0 if worker == 2 else 0.01

    job = make_job("backup_workers(spare=1)", 3, dataset=blobs(train=48), batch_size=4)
    trained = simulated(job, ConstantCluster(step_s=one_late))
    assert sum(trained.result["staleness"]["histogram"].values()) == 8 * 2
    torch.manual_seed(job.learning.seed)
    assert trained.sha256 == _two_of_three(job)


def _two_of_three(job: Any) -> str:
    from torch import nn
    from torch.nn import functional

    from conformance.jobs import batch, cosine, sha256_of

    model = job.make_model()
    optimizer = job.learning.optimizer.create(model.parameters())
    for step in range(8):
        gradients = []
        for worker in (0, 1):
            images, labels = batch(job, step // 4, step % 4, worker, 3)
            model.zero_grad()
            functional.cross_entropy(model(images), labels).backward()
            gradients.append(nn.utils.parameters_to_vector([p.grad for p in model.parameters()]).clone())
        place = 0
        for parameter in model.parameters():
            size = parameter.numel()
            mean = (gradients[0] + gradients[1])[place : place + size] / 2
            parameter.grad = mean.view_as(parameter)
            place += size
        optimizer.param_groups[0]["lr"] = cosine(job, step, 8)
        optimizer.step()
    return sha256_of(vector_of(model))
