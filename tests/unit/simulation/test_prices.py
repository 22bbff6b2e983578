"""Price lists: rates of all kinds, the UT Austin report's, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyrhythm.errors import RequestError
from polyrhythm.simulation.cluster import (
    MachinePrice,
    cluster_text,
    open_prices,
    parse_cluster,
)

LIST = """
currency: EUR
date: 2025-01
source: invoices
machines:
  rented: {per_second: 0.0001}
  bought: {purchase: 8760, years: 2, watts: 500, electricity_per_kwh: 0.4}
"""
CLUSTER = """
hosts:
  - {name: a, count: 2, machine: rented}
  - {name: b, count: 1, machine: bought}
  - {name: c, count: 1, machine: rented, price_per_hour: 9}
nic: {latency_s: 0, bandwidth_bytes_per_s: 1e9}
inside: {latency_s: 0, bandwidth_bytes_per_s: 1e9}
step_time: constant(seconds=1)
"""


def test_every_rate_is_told_by_the_hour() -> None:
    assert MachinePrice(per_second=0.001).of_an_hour == pytest.approx(3.6)
    assert MachinePrice(per_minute=0.5).of_an_hour == 30
    assert MachinePrice(per_year=8760).of_an_hour == pytest.approx(1)
    own = MachinePrice(purchase=8760, years=2, watts=500, electricity_per_kwh=0.4)
    assert own.of_an_hour == pytest.approx(0.5 + 0.2)


def test_the_report_s_prices_are_those_of_its_table() -> None:
    """Table 1: 4 n1-standard-8 for a year 12,244.24; one with 4 K80 20,595.77."""
    found = open_prices("google_2017")
    assert (found.currency, found.date) == ("USD", "2017-08")
    assert 4 * 8760 * found.of_an_hour("n1-standard-8") == pytest.approx(12_244.24)
    assert 8760 * found.of_an_hour("n1-standard-8-4k80") == pytest.approx(20_595.77)


def test_hosts_have_the_prices_of_the_list_or_their_own(tmp_path: Path) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text(LIST)
    found = parse_cluster(f"{CLUSTER}\nprices: {file}", "here")
    assert [kind.price_per_hour for kind in found.hosts] == pytest.approx([0.36, 0.7, 9])
    assert found.currency == "EUR"
    assert parse_cluster(cluster_text(found), "here") == found.model_copy(update={"name": "here"})
    with pytest.raises(RequestError, match="its prices are in USD, those of"):
        parse_cluster(f"{CLUSTER}\ncurrency: USD\nprices: {file}", "here")


def test_what_is_missing_or_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="host a is a rented, but there is no price list"):
        parse_cluster(CLUSTER, "here")
    with pytest.raises(RequestError, match="google_2017"):
        parse_cluster(f"{CLUSTER}\nprices: google_2018", "here")
    file = tmp_path / "prices.yaml"
    file.write_text(LIST.replace("rented", "leased"))
    with pytest.raises(RequestError, match="rented"):
        parse_cluster(f"{CLUSTER}\nprices: {file}", "here")
    file.write_text(LIST.replace("{per_second: 0.0001}", "{per_second: 1, per_hour: 2}"))
    with pytest.raises(RequestError, match="give one of per_second"):
        open_prices(file)
    file.write_text(LIST.replace("years: 2, ", ""))
    with pytest.raises(RequestError, match="purchase goes with years"):
        open_prices(file)
    file.write_text(LIST.replace("per_second", "per_secnd"))
    with pytest.raises(
        RequestError, match=r"key of price list .*, machines\.rented, .*per_secnd.*per_second"
    ):
        open_prices(file)
    file.write_text(LIST.replace("source: invoices\n", ""))
    with pytest.raises(RequestError, match="source is missing"):
        open_prices(file)
