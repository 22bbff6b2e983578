"""What users write to choose a strategy, and what they are told if it is wrong."""

import re

import pytest
import torch

from polyrhythm.api.strategies import strategies
from polyrhythm.communication.message import Kind, Message, RefusedMessage
from polyrhythm.errors import RequestError
from polyrhythm.specs import build, choices
from polyrhythm.strategies import FAMILIES
from polyrhythm.strategies.parameter_server.groups.group_server import GroupServer
from polyrhythm.strategies.placements.dedicated import Dedicated
from polyrhythm.strategies.placements.shared import Shared
from polyrhythm.strategies.role_assignment import RoleAssignment
from polyrhythm.strategies.server_part import ServerSetting
from polyrhythm.strategies.strategy import Strategy

NAMES = [name for family in FAMILIES for name in choices(family)]


def strategy(spec):
    return build("strategy", spec, *FAMILIES)


@pytest.mark.parametrize("name", NAMES)
def test_every_strategy_says_where_it_comes_from_and_what_it_costs(name):
    made = strategy(name)
    assert isinstance(made, Strategy)
    assert 1951 <= made.paper.year <= 2030
    assert str(made.paper).endswith(made.paper.arxiv)
    assert all((made.facts.bytes_per_step, made.facts.staleness, made.facts.use_it))
    [entry] = strategies(name)
    assert ("the run stops" in entry["when_a_worker_dies"]) == (not made.faults(4).continues)
    assert ("missing at once" in entry["when_a_worker_dies"]) == (0 < made.faults(4).spares < 3)


@pytest.mark.parametrize(
    "text",
    [
        "synchronous",
        "parameter_server",
        "parameter_server(servers=2)",
        "parameter_server(servers=2, consistency=synchronous)",
        "parameter_server(placement=dedicated)",
        "mixed(servers=7, replicas=4)",
        "mixed(consistency=synchronous)",
        "synchronous(collective=rabenseifner)",
        "synchronous(collective=two_level(group=4, inside=direct, between=segmented_chain(segments=3)))",
        "mixed(replicas=4, inside=synchronous(collective=auto))",
    ],
)
def test_specs_come_back_as_they_were_written(text):
    assert str(strategy(text)) == text
    assert strategy(str(strategy(text))) == strategy(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "parameter_server(servers=0)",
            r"strategy parameter_server: servers should be greater than or equal to 1 \(given 0\)",
        ),
        (
            "parameter_server(servers=2.5)",
            r"strategy parameter_server: servers should be a whole number \(given 2\.5\)",
        ),
        ("mixed(replicas=-1)", r"strategy mixed: replicas should be greater than or equal to 1 \(given -1\)"),
        ("mixed(servers=many)", r"strategy mixed: servers should be a .*\(given 'many'\)"),
        (
            "parameter_server(consistency=asynchron)",
            r"unknown consistency 'asynchron': did you mean asynchronous.*\?",
        ),
        ("parameter_server(placement=nowhere)", r"unknown placement 'nowhere': there are dedicated, shared"),
        (
            "parameter_server(server=2)",
            r"unknown key of strategy parameter_server 'server': did you mean servers\?",
        ),
        (
            "synchronous(servers=1)",
            r"unknown key of strategy synchronous 'servers': there are bucket_bytes, collective, compress, transfer",
        ),
        ("synchronous(collective=rign)", r"unknown collective 'rign': did you mean ring\?"),
        (
            "synchronous(collective=ring(group=2))",
            r"collective ring takes no keys",
        ),
        (
            "synchronous(collective=two_level(inside=flat))",
            r"two_level: inside=flat leaves no shards: use inside=ring or inside=direct",
        ),
        (
            "synchronous(collective=two_level(between=library))",
            r"two_level: between=library cannot run on shards: use one over messages, as between=ring",
        ),
        (
            "mixed(inside=synchronous(collective=segmented_chain(segments=0)))",
            r"collective segmented_chain: segments should be greater than or equal to 1 \(given 0\)",
        ),
        (
            "synchronous(collective=auto(latency_s=0.001))",
            r"auto: give both latency_s and bandwidth_bytes_per_s, or neither to measure them",
        ),
        (
            "synchronous(collective=auto(overhead_s=0.001))",
            r"auto: overhead_s goes with latency_s and bandwidth_bytes_per_s: give all three",
        ),
        ("paramter_server", r"unknown strategy 'paramter_server': did you mean parameter_server\?"),
        (
            "parameter_server(2)",
            r"strategy: cannot read 'parameter_server\(2\)': every value needs its key, as in name\(key=value\)",
        ),
    ],
)
def test_wrong_specs_are_told_in_one_line(text, message):
    with pytest.raises(RequestError) as caught:
        strategy(text)
    assert re.fullmatch(message, str(caught.value)), str(caught.value)


def test_synchronous_has_no_server():
    with pytest.raises(RequestError, match=r"^synchronous has no servers$"):
        strategy("synchronous").server(ServerSetting(0, RoleAssignment((0,))))


@pytest.mark.parametrize("name", NAMES)
def test_no_workers_are_refused(name):
    strategy(name).check(1)
    with pytest.raises(RequestError, match=r"^workers must be at least 1 \(given 0\)$"):
        strategy(name).check(0)


@pytest.mark.parametrize(
    ("spec", "workers", "in_step", "updates"),
    [
        ("synchronous", 5, True, 1),
        ("parameter_server", 1, False, 1),
        ("parameter_server", 5, False, 5),
        ("parameter_server(consistency=synchronous)", 5, True, 1),
        ("mixed", 2, True, 1),
        ("mixed", 5, False, 3),
        ("mixed(replicas=5)", 5, True, 1),
        ("mixed(replicas=1)", 5, False, 5),
        ("mixed(consistency=synchronous)", 5, True, 1),
    ],
)
def test_who_goes_in_step_and_how_many_updates_a_step_makes(spec, workers, in_step, updates):
    assert strategy(spec).traits(workers).lockstep is in_step
    assert strategy(spec).traits(workers).updates == updates


def test_placement_is_the_strategies_to_say():
    assert strategy("parameter_server(placement=dedicated)").traits(1).placement == Dedicated()
    assert strategy("mixed").traits(1).placement == Shared()


def test_servers_of_mixed_listen_to_the_groups_leaders_only():
    made = strategy("mixed(replicas=2, servers=2)")
    assert made.groups(5) == 3
    server = made.server(ServerSetting(0, RoleAssignment((0, 1, 2, 3, 4), (5, 6))))
    assert isinstance(server, GroupServer)
    assert server.steps == dict.fromkeys(range(5), 0)
    with pytest.raises(RefusedMessage, match="PUSH from rank 1, which is no group's sender"):
        server.on_message(1, Message(Kind.PUSH, torch.zeros(1)))
