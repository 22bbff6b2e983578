from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from polyrhythm.communication.transports.simulated.virtual_time import VirtualTime
from polyrhythm.errors import RequestError
from polyrhythm.simulation.cluster import StepWork, cluster_text, open_cluster, parse_cluster
from polyrhythm.simulation.layout import lay_out
from polyrhythm.simulation.simulated_run import check_slowness, step_times
from polyrhythm.strategies.placements.shared import Shared
from unit.simulation.clusters import cluster

GOOD = """
name: two
hosts:
  - {name: fast, count: 2, cores: 4}
  - {name: slow, count: 1, speed: 0.5, nic: {latency_s: 0.001, bandwidth_bytes_per_s: 1e6}}
nic: {latency_s: 0.0001, bandwidth_bytes_per_s: 1e8}
inside: {latency_s: 0, bandwidth_bytes_per_s: 1e9}
racks: {hosts: 2, oversubscription: 4}
step_time: exponential(mean=0.1)
slow: {1: 2.5}
passing_slowness: [{rank: 0, from_s: 1, to_s: 2, factor: 3}]
"""


def test_a_file_becomes_a_cluster(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    path.write_text(GOOD)
    cluster = open_cluster(path)
    assert [machine.name for machine in cluster.machines] == ["fast", "fast", "slow"]
    assert cluster.machines[2].nic is not None
    assert cluster.machines[2].nic.bandwidth_bytes_per_s == 1e6
    assert cluster.nic.bandwidth_bytes_per_s == 1e8
    assert str(cluster.step_time) == "exponential(mean=0.1)"
    assert cluster.slow == {1: 2.5}
    assert cluster.passing_slowness[0].factor == 3


def test_what_is_written_reads_back_the_same() -> None:
    cluster = parse_cluster(GOOD, "two")
    assert parse_cluster(cluster_text(cluster), "two") == cluster


def test_the_ready_ones_are_all_there_and_say_where_they_come_from() -> None:
    for name in ("bsc", "bsc_gpus", "deep_image", "h100_pair", "office", "spot", "ut_austin"):
        cluster = open_cluster(name)
        assert cluster.name == name
        assert cluster.source


def test_spot_instances_come_and_go() -> None:
    assert [str(fault) for fault in open_cluster("spot").faults] == [
        "kill(rank=any, every_s=600.0, restart_after_s=60.0)"
    ]


def test_the_papers_clusters_have_the_papers_figures() -> None:
    bsc, deep_image = open_cluster("bsc"), open_cluster("deep_image")
    assert [len(deep_image.machines), deep_image.machines[0].places] == [36, 4]
    assert [len(bsc.machines), bsc.machines[0].accelerators] == [8, 4]
    assert bsc.nic.bandwidth_bytes_per_s == 56e9 / 8
    assert deep_image.nic.bandwidth_bytes_per_s < 56e9 / 8
    assert str(bsc.step_time) == f"log_normal(mean={round(128 / 124.18, 4)}, sigma=0.1)"


def changed(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (changed("inside: {latency_s: 0, bandwidth_bytes_per_s: 1e9}", ""), "cluster c: inside is missing"),
        (changed("count: 2, ", ""), r"cluster c: hosts\[0\].count is missing"),
        (
            changed("count: 2", "count: 0"),
            r"hosts\[0\].count: should be greater than or equal to 1 \(given 0\)",
        ),
        (changed("count: 2", "count: true"), r"hosts\[0\].count: should be a number \(given True\)"),
        (changed("1e8", "-5"), r"nic.bandwidth_bytes_per_s: should be greater than 0 \(given -5\)"),
        (changed("1e8", "fast"), r"nic.bandwidth_bytes_per_s: should be a valid number.*'fast'"),
        (changed("1e8", ".inf"), "nic.bandwidth_bytes_per_s: should be a finite number"),
        (changed("cores: 4", "core: 4"), r"unknown key of cluster c, hosts\[0\], 'core': did you mean cores"),
        (changed("latency_s: 0.001", "latency: 1"), "'latency': did you mean latency_s"),
        (changed("racks", "rack"), "unknown key of cluster c 'rack': did you mean racks"),
        (changed(", oversubscription: 4", ""), "racks: give either oversubscription or uplink"),
        (changed("exponential", "exponental"), "unknown step time 'exponental': did you mean exponential"),
        (changed("mean=0.1", "mean=0"), "step_time: .*mean should be greater than 0"),
        (changed("{1: 2.5}", "{1: 0}"), r"slow\[1\]|slow.1: should be greater than 0"),
        (changed("to_s: 2", "to_s: 1"), r"passing_slowness\[0\]: to_s 1 must be later than from_s 1"),
        ("hosts: []", r"hosts: should have at least 1 item \(given \[\]\)"),
        ("hosts: 3", r"hosts: should be a list \(given 3\)"),
        ("hosts: [{name: a, count: few}]", r"hosts\[0\].count: should be a whole number \(given 'few'\)"),
        ("hosts: [", "cluster c is not YAML"),
        ("- 1", "must be lines of `key: value`"),
        ("", "must be lines of `key: value`"),
    ],
)
def test_what_cannot_be_is_said_in_one_line_with_its_place(text: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        parse_cluster(text, "c")
    assert "\n" not in str(caught.value)


def test_an_unknown_cluster_is_told_the_near_ones(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="unknown cluster 'ofice': did you mean office"):
        open_cluster("ofice")
    with pytest.raises(RequestError, match=r"cannot read the cluster file .*none\.yaml: No such file"):
        open_cluster(tmp_path / "none.yaml")


def test_a_measured_step_follows_the_arithmetic_of_others() -> None:
    """A quarter of 1 s is overhead; three times the arithmetic makes the rest three times as long."""
    measured = StepWork(model="lenet5", batch_size=64, multiply_adds=1e9, overhead_share=0.25)
    assert measured.factor(1e9) == 1.0
    assert measured.factor(3e9) == pytest.approx(0.25 + 0.75 * 3)
    peak = StepWork(peak_multiply_adds_per_s=4e12, share_of_peak=0.5)
    assert peak.factor(3e12) == pytest.approx(1.5)
    assert StepWork(model="resnet50", batch_size=128).factor(1e9) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{share_of_peak: 0.5}", "give both peak_multiply_adds_per_s and share_of_peak"),
        (
            "{multiply_adds: 1.0e+9, share_of_peak: 0.5, peak_multiply_adds_per_s: 1.0e+12}",
            "either multiply_adds, of a measured step, or a share of a peak",
        ),
        ("{overhead_share: 0.5}", "overhead_share is of a measured step: give its multiply_adds"),
        ("{multiply_ads: 3}", "multiply_adds"),
    ],
)
def test_work_of_a_step_that_cannot_be_is_refused(text: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        parse_cluster(f"{GOOD}\nstep_of: {text}", "here")


def test_all_ranks_of_a_host_are_slow_together() -> None:
    slow = [{"host": 1, "from_s": 0.0, "to_s": 5.0, "factor": 3.0}]
    layout = lay_out(cluster({"workers": 2, "count": 2}, passing_slowness=slow), 4, 0, Shared())
    check_slowness(layout)
    times = [step_times(layout, VirtualTime(), 0, rank)() for rank in range(4)]
    assert times == [1.0, 1.0, 3.0, 3.0]
    gone = lay_out(cluster({}, passing_slowness=[{**slow[0]}]), 1, 0, Shared())
    with pytest.raises(RequestError, match="names host 1, which does not exist: hosts are 0 to 0"):
        check_slowness(gone)
    with pytest.raises(ValidationError, match="either the rank or the host"):
        cluster({}, passing_slowness=[{**slow[0], "rank": 0}])


DOUBTFUL = """
name: units
hosts: [{name: box, count: 2, memory_bytes: 64}]
nic:
  latency_s: 50
  bandwidth_bytes_per_s: 1.0e+9
inside: {latency_s: 1.0e-5, bandwidth_bytes_per_s: 100}
server_bandwidth_bytes_per_s: 1.0e+10
step_time: constant(seconds=4000)
racks: {hosts: 2, uplink_bandwidth_bytes_per_s: 1.0e+11}
"""


CONTRADICTORY = """
name: units
hosts: [{name: box, count: 2, price_per_hour: 8760}]
nic: {latency_s: 1.0e-5, bandwidth_bytes_per_s: 1.0e+9}
inside: {latency_s: 1.0e-2, bandwidth_bytes_per_s: 1.0e+6}
step_time: log_normal(median=1e-8, sigma=9)
racks: {hosts: 4, oversubscription: 2}
server_bandwidth_bytes_per_s: 100
"""


def test_figures_that_contradict_each_other_are_reported_with_their_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parse_cluster(CONTRADICTORY, "units.yaml")
    found = [record.getMessage().removeprefix("cluster units.yaml, ") for record in caplog.records]
    assert (
        found[0]
        == "line 3: hosts.0.price_per_hour: 8760 an hour for one host: is it per year, or of all hosts?"
    )
    assert found[1].startswith("line 6: step_time: a step of ")
    assert found[1].endswith(" s on the fastest host: is it in seconds?")
    assert found[2].startswith("line 6: step_time: steps of ")
    assert found[3:] == [
        "line 5: inside.bandwidth_bytes_per_s: 1e+06 bytes/s inside a host, but 1e+09 between hosts",
        "line 5: inside.latency_s: 0.01 seconds inside a host, but 1e-05 between hosts",
        "line 7: racks.hosts: 4 hosts in a rack, but the cluster has 2",
        "line 8: server_bandwidth_bytes_per_s: 100 bytes/s: is it in another unit?",
    ]


@pytest.mark.parametrize(
    ("entry", "value", "reported"),
    [
        (
            "nic",
            "{latency_s: 1.0e-4, bandwidth_bytes_per_s: 1.17e+5}",
            "nic.bandwidth_bytes_per_s: 117000 bytes/s, with",
        ),
        (
            "inside",
            "{latency_s: 0.02, bandwidth_bytes_per_s: 4.0e+9}",
            "inside.latency_s: 0.02 seconds inside a host",
        ),
        (
            "hosts",
            "[{name: a, count: 1, tree: [{places: 2, latency_s: 1.0e-5, bandwidth_bytes_per_s: 16}]}]",
            "hosts.0.tree.0.bandwidth_bytes_per_s: 16 bytes/s",
        ),
        (
            "server_update",
            "{seconds: 5, bandwidth_bytes_per_s: 2.0e+9}",
            "server_update.seconds: 5: is it in ms",
        ),
        ("server_update", "{bandwidth_bytes_per_s: 2}", "server_update.bandwidth_bytes_per_s: 2: is it"),
        ("shared_slowness", "{sigma: 20, lasts_s: 5}", "shared_slowness.sigma: 20: is it in percent?"),
        ("racks", "{hosts: 1, oversubscription: 2, latency_s: 50}", "racks.latency_s: 50: is it in ms"),
        ("step_of", "{multiply_adds: 4.0e+3}", "step_time: a step of 0.05 s for 4000 multiply-adds"),
        ("step_of", "{multiply_adds: 4.0e+16}", "step_time: a step of 0.05 s for 4e+16 multiply-adds"),
        (
            "step_of",
            "{peak_multiply_adds_per_s: 2100, share_of_peak: 0.3}",
            "step_of.peak_multiply_adds_per_s: 2100: is it",
        ),
        ("nic", "{latency_s: 0.05, bandwidth_bytes_per_s: 1.17e+5}", ""),
        ("nic", "{latency_s: 0, bandwidth_bytes_per_s: 1.17e+5}", ""),
    ],
)
def test_a_value_a_thousand_times_off_is_reported_with_its_line(
    entry: str, value: str, reported: str, caplog: pytest.LogCaptureFixture
) -> None:
    entries = {
        "name": "units",
        "hosts": "[{name: box, count: 1}]",
        "nic": "{latency_s: 1.0e-4, bandwidth_bytes_per_s: 1.17e+8}",
        "inside": "{latency_s: 2.0e-5, bandwidth_bytes_per_s: 4.0e+9}",
        "step_time": "constant(seconds=0.05)",
    }
    entries[entry] = value
    line = list(entries).index("step_time" if reported.startswith("step_time") else entry) + 1
    parse_cluster("\n".join(f"{key}: {text}" for key, text in entries.items()), "units.yaml")
    assert len(caplog.messages) == bool(reported)
    assert all(text.startswith(f"cluster units.yaml, line {line}: {reported}") for text in caplog.messages)


def test_a_machine_that_its_price_list_describes_otherwise_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prices = tmp_path / "prices.yaml"
    prices.write_text(
        "currency: EUR\ndate: 2026\nsource: a test\nmachines:\n"
        "  card: {per_hour: 1, cores: 8, accelerators: 2, speed: 30}\n  box: {per_hour: 1}\n"
    )
    hosts = "hosts: [{name: a, count: 2, cores: 8, accelerators: 2, machine: card}, {name: b, count: 1, machine: box}]"
    text = DOUBTFUL.replace("hosts: [{name: box, count: 2, memory_bytes: 64}]", f"{hosts}\nprices: {prices}")
    parse_cluster(text, "units.yaml")
    found = [record.getMessage() for record in caplog.records if "price list" in record.getMessage()]
    assert found == [f"cluster units.yaml, line 3: hosts.0.speed: 1, but card has 30 in price list {prices}"]


def test_values_in_another_unit_are_reported_with_their_line(caplog: pytest.LogCaptureFixture) -> None:
    parse_cluster(DOUBTFUL, "units.yaml")
    latency, inside, memory, step, slower, racks, server = (record.getMessage() for record in caplog.records)
    assert latency.startswith(
        "cluster units.yaml, line 5: nic.latency_s: 50 seconds is more than any network takes"
    )
    assert inside.startswith("cluster units.yaml, line 7: inside.bandwidth_bytes_per_s: 100 bytes/s")
    assert slower.endswith("100 bytes/s inside a host, but 1e+09 between hosts")
    assert memory.startswith(
        "cluster units.yaml, line 3: hosts.0.memory_bytes: 64 bytes is less than a process needs"
    )
    assert step.startswith(
        "cluster units.yaml, line 9: step_time: a step of 4e+03 s on the fastest host: is it in ms?"
    )
    assert racks.startswith(
        "cluster units.yaml, line 10: racks.uplink_bandwidth_bytes_per_s: 1e+11 bytes/s, where the"
    )
    assert server.startswith(
        "cluster units.yaml, line 8: server_bandwidth_bytes_per_s: 1e+10 bytes/s is more than any"
    )
