"""Sites that tell each other everything, and wait for each other, against one batch of all; and what stays at home."""

import pytest
import torch

from conformance.jobs import blobs, make_job, simulated, uneven, vector_of
from polyrhythm.communication.message import Kind
from polyrhythm.simulation.run import ConstantCluster
from polyrhythm.strategies.parameter_server.serving.session import ServerSession
from tolerances import REORDERED

UNEVEN = ConstantCluster(step_s=uneven)


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize(("workers", "sites"), [(2, 2), (4, 2), (3, 3)])
def test_without_threshold_and_lag_sites_add_up_their_means(workers, sites, servers):
    """Each site steps with its own mean, and all steps count: the mean of all, at as many times the rate."""
    images = blobs(train=4 * workers * 6)
    ours = make_job(
        f"gaia(sites={sites}, threshold=0, lag=0, servers={servers})",
        workers,
        dataset=images,
        optimizer="sgd(lr=0.05, momentum=0)",
        dtype=torch.float64,
    )
    together = make_job(
        "synchronous",
        workers,
        dataset=images,
        optimizer=f"sgd(lr={0.05 * sites}, momentum=0)",
        dtype=torch.float64,
    )
    found, expected = (vector_of(simulated(job, UNEVEN).models[0]) for job in (ours, together))
    torch.testing.assert_close(found, expected, **REORDERED)


def test_one_site_is_the_synchronous_server_bit_for_bit():
    digests = [
        simulated(make_job(spec, 3, optimizer="adam"), UNEVEN).sha256
        for spec in ("gaia(sites=1, servers=2)", "parameter_server(servers=2, consistency=synchronous)")
    ]
    assert digests[0] == digests[1]


def test_a_higher_threshold_sends_less_between_sites():
    sent = [
        simulated(make_job(f"gaia(threshold={threshold})", 4), UNEVEN).result["bytes_sent_per_step"]
        for threshold in (0, 0.01, 0.1, 1, 1e9)
    ]
    message = 103 * 4 + 64
    assert sent == sorted(sent, reverse=True)
    announced = 64
    assert sent[0] == 2 * message + 2 * (message + announced) / 4  # every site all of it to the other
    assert sent[-1] == 2 * message + 2 * 64 / 4  # only what time it is
    assert sent[0] > sent[2] > sent[-1]


@pytest.mark.parametrize("barrier", [0.0, 1.0])
def test_nobody_reads_between_an_announcement_and_its_packet(barrier, monkeypatch):
    seen = []
    inner = ServerSession.on_message

    def on_message(self, source, message):
        replies = inner(self, source, message)
        answers = sum(reply.kind is Kind.PARAMETERS for _, reply in replies)
        seen.append((id(self), source, message.kind, message.version, answers))
        return replies

    monkeypatch.setattr(ServerSession, "on_message", on_message)
    around = ConstantCluster(step_s=uneven, latency_s=1e-3, bandwidth_bytes_per_s=2e4)  # a packet takes 21 ms
    simulated(make_job(f"gaia(threshold=0, barrier={barrier})", 4), around)
    awaited, held = {}, 0
    for server, source, kind, version, answers in seen:
        if kind is Kind.ANNOUNCE:
            awaited[server, source] = version
        elif awaited.get((server, source), version + 1) <= version and kind in (Kind.DIFFERENCE, Kind.LEAVE):
            del awaited[server, source]
        if any(waiting == server for waiting, _ in awaited):
            assert answers == 0
            held += kind in (Kind.PUSH, Kind.PULL)
    assert (held > 0) == (barrier == 0.0)
