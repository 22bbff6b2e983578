"""What other numbers of workers begin with, on states made by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polyrhythm.specs import build
from polyrhythm.strategies import FAMILIES
from polyrhythm.strategies.parameter_server.consistency.asynchronous import Asynchronous
from polyrhythm.strategies.parameter_server.consistency.backup import Backup
from polyrhythm.strategies.parameter_server.consistency.bounded_staleness import BoundedStaleness
from polyrhythm.strategies.parameter_server.consistency.softsync import Softsync
from polyrhythm.strategies.parameter_server.serving.gate import Consistency
from polyrhythm.strategies.resharding import Held, Resharding, begun
from polyrhythm.strategies.state import Start, State
from polyrhythm.strategies.strategy import Strategy
from polyrhythm.training.optimizer_state import mean_optimizer

VECTOR = torch.tensor([1.0, 2.0])
SGD = {"optimizer": "SGD", "state": {}, "groups": [{}], "shapes": [[[2]]]}


def held(steps: tuple[int, ...], workers: dict[int, State], servers: list[State] | None = None) -> Held:
    return Held(VECTOR, steps, workers, servers or [])


def rule(strategy: str, before: int, after: int) -> Resharding:
    found = build("strategy", strategy, *FAMILIES)
    assert isinstance(found, Strategy)
    return found.resharding(before, after)


def server(steps: list[int], **facts: Any) -> State:
    tensors = {
        "values": VECTOR,
        "held.0": VECTOR,
        "merge.0": VECTOR,
        "merge.2": VECTOR,
        "optimizer.x": VECTOR,
    }
    kept = {"version": 9, "steps": steps, "held": [], "left_out": {}, "gate": {}, "staleness": {"0": 9}}
    return tensors, kept | facts


def test_where_all_hold_the_same_everybody_gets_it() -> None:
    own = ({"m": VECTOR}, {"k": 1})
    same = rule("synchronous", 2, 3)
    found = same.merged(held((4, 4), {0: own}), 2)
    assert found.held.workers == {0: own, 1: own, 2: own}
    assert same.counted(held((4, 0), {0: own})) == [4, 4]


def test_servers_forget_who_is_gone_and_what_they_held() -> None:
    entries = [[2, 8, 4, 1.0, 0.1], [0, 8, 6, 1.0, 0.1]]  # a gradient of worker 2, and one of worker 0
    states = [server([7, 5, 5], held=entries), server([6, 5, 5], held=[], left_out={"1": [[2, 3]]})]
    others = rule("parameter_server(servers=2)", 3, 2)
    known = held((7, 5, 5), {0: ({"o": VECTOR}, {}), 2: ({"o": VECTOR}, {})}, states)
    assert others.counted(known) == [6, 5, 5]
    found = others.merged(known, 3)
    tensors, facts = found.held.servers[0]
    assert set(tensors) == {"values", "merge.0", "optimizer.x"}
    assert (facts["steps"], facts["held"], facts["left_out"], facts["version"]) == ([3, 3], [], {}, 9)
    assert set(found.held.workers) == {0}
    assert "; 1 gradients that they held, of no update yet" in found.text
    assert found.text.endswith("; 1 gradients that not all servers had yet count as applied")


def test_a_groups_members_count_as_their_group() -> None:
    known = held((7, 7, 5), {}, [server([6, 5]), ({}, {})])
    others = rule("mixed(replicas=2, servers=2)", 3, 6)
    assert others.counted(known) == [6, 6, 5]
    found = others.merged(known, 4).held.servers
    assert found[0][1]["steps"] == [4, 4, 4]
    assert found[1] == ({}, {})


@pytest.mark.parametrize(
    ("consistency", "pushers", "state"),
    [
        (Asynchronous(), 2, {}),
        (Backup(spare=1), 3, {"step": 5}),
        (BoundedStaleness(s=2), 2, {"clocks": [5, 5], "credits": [0, 0]}),
        (Softsync(n=1), 2, {"held": []}),
    ],
)
def test_gates_begin_at_one_step(consistency: Consistency, pushers: int, state: dict[str, Any]) -> None:
    gate = consistency.gate(pushers)
    assert begun(gate.fields, Start(5, 0, pushers)) == state
    gate.load_state(({}, state))
    assert gate.state() == ({}, state)
    decision = gate.ask(0, 5)
    assert decision.answer == (0,)
    assert decision.step in (None, 5)


def test_groups_in_rounds_begin_with_what_servers_have() -> None:
    inner = {"vector": VECTOR, "optimizer.state.0.momentum_buffer": VECTOR}
    facts = {"apart": True, "rate": 0.1, "worker": 0, "weight": 1.0, "updated": 3, "optimizer": SGD}
    parts: dict[int, State] = {
        worker: (
            {f"part.{name}": value * (worker + 1) for name, value in inner.items()} | {"read": VECTOR},
            {"part": facts, "apart": True},
        )
        for worker in range(3)
    }
    shards = [
        ({"values": VECTOR[:1] * 10}, server([3, 2])[1]),
        ({"values": VECTOR[1:] * 10}, server([3, 2])[1]),
    ]
    known = held((8, 8, 5), parts, shards)
    others = rule("mixed(replicas=2, servers=2, inside=local_sgd(steps=2))", 3, 4)
    assert others.counted(known) == [6, 6, 4]
    found = others.merged(known, 5).held
    assert [facts["steps"] for _, facts in found.servers] == [[2, 2]] * 2  # rounds of two steps
    for worker in range(4):
        tensors, told = found.workers[worker]
        for name in ("vector", "read", "part.vector"):
            assert torch.equal(tensors[name], VECTOR * 10)
        assert torch.equal(tensors["part.optimizer.state.0.momentum_buffer"], VECTOR * 2)
        assert (told["apart"], told["part"]["apart"], told["part"]["worker"]) == (True, False, worker)


def test_slices_are_handed_on_with_their_places() -> None:
    def part(pieces: list[list[int]], value: float) -> State:
        tensors = {f"{number}.state.0.momentum_buffer": VECTOR * value for number in range(len(pieces))}
        return tensors, {"pieces": pieces, **{str(number): {"n": value} for number in range(len(pieces))}}

    known = held((4, 4), {0: part([[0, 4], [4, 6]], 1.0), 1: part([[0, 4], [6, 8]], 2.0)})
    others = rule("hybrid", 2, 3)
    assert others.counted(known) == [4, 4]
    tensors, facts = others.merged(known, 2).held.workers[2]
    assert facts == {"slices": [[0, 4, {"n": 1.0}], [4, 6, {"n": 1.0}], [6, 8, {"n": 2.0}]]}
    assert torch.equal(tensors["2.state.0.momentum_buffer"], VECTOR * 2)
    assert set(tensors) == {f"{number}.state.0.momentum_buffer" for number in range(3)}


def test_at_the_center_who_is_new_or_out_of_date_begins_anew() -> None:
    others = rule("easgd", 4, 4)
    known = held((6, 3, 5, 0), {0: ({"own": VECTOR}, {}), 1: ({"own": VECTOR}, {})}, [server([4, 4, 4, 2])])
    assert others.counted(known) == [6, 4, 4, 2]  # the second is older than its last exchange
    found = others.merged(known, 7)
    assert set(found.held.workers) == {0}
    assert found.held.servers[0][1]["steps"] == [7] * 4
    assert found.text.endswith(
        "1 workers keep their own parameters and optimizers; 3 begin at the center, without momentum"
    )
    assert rule("easgd", 2, 1).counted(held((6, 6), known.workers, [server([4, 4])])) == [6, 4]


def test_sums_that_fit_what_servers_have_are_kept() -> None:
    parts = {
        worker: ({"sum": VECTOR}, {"pushed": pushed, "summed": 2}) for worker, pushed in enumerate((4, 3, 4))
    }
    known = held((6, 5, 6), parts, [server([4, 4, 4]), server([4, 5, 4])])
    others = rule("downpour(servers=2)", 3, 2)
    assert others.counted(known) == [6, 5, 4]
    found = others.merged(known, 7)
    assert found.held.workers == {0: ({"sum": VECTOR}, {"pushed": 7, "summed": 2})}
    assert found.held.servers[1][1]["steps"] == [7, 7]


def test_rounds_go_on_from_the_mean_by_weight() -> None:
    def part(value: float, momentum: float | None, weight: float) -> State:
        tensors = {"vector": VECTOR * value, "beginning": VECTOR, "outer.buffer": VECTOR}
        if momentum is not None:
            tensors["optimizer.state.0.momentum_buffer"] = VECTOR * momentum
        facts = {"apart": True, "rate": 0.1, "worker": 5, "weight": weight, "updated": 3, "outer.": {}}
        return tensors, facts | {"optimizer": SGD}

    known = held((4, 4, 4), {0: part(1.0, None, 1.0), 1: part(4.0, 6.0, 1.0), 2: part(9.0, 8.0, 0.0)})
    found = rule("bmuf", 3, 2).merged(known, 3)
    assert torch.equal(found.held.parameters, VECTOR * 2.5)
    for worker in range(2):
        tensors, facts = found.held.workers[worker]
        assert torch.equal(tensors["vector"], VECTOR * 2.5)
        assert torch.equal(tensors["optimizer.state.0.momentum_buffer"], VECTOR * 3)
        assert torch.equal(tensors["beginning"], VECTOR)
        assert torch.equal(tensors["outer.buffer"], VECTOR)
        assert (facts["worker"], facts["weight"], facts["updated"], facts["apart"]) == (worker, 1.0, -1, True)
    assert found.text.endswith("in the same round, with the state of the outer rule")


@pytest.mark.parametrize(
    ("spec", "tensors", "facts"),
    [("admm", ["dual"], {}), ("scaffold", ["own", "common", "sum"], {"steps": 2})],
)
def test_corrections_of_gradients_stay_with_the_images_that_they_are_of(spec, tensors, facts) -> None:
    fresh = {"apart": True, "rate": 0.1, "worker": 0, "weight": 1.0, "updated": 3, "optimizer": SGD}
    corrections = {f"correction.{name}": VECTOR for name in tensors}
    state = {"vector": VECTOR, "beginning": VECTOR * 3} | corrections, fresh | {"correction.": facts}
    found = rule(spec, 2, 3).merged(held((4, 4), {0: state, 1: state}), 3)
    for worker in range(3):
        kept, noted = found.held.workers[worker]
        assert set(kept) == {"vector", "beginning"}
        assert "correction." not in noted
    assert found.text.endswith("in the same round, with corrections of gradients that start at 0")


def test_gossip_begins_anew_at_the_mean_by_mass() -> None:
    facts = {"mass": 0.5, "arrived": [0.25], "optimizer": SGD}
    first = {"numerator": VECTOR, "arrived.0": VECTOR * 2, "optimizer.state.0.momentum_buffer": VECTOR}
    second = {"numerator": VECTOR * 7, "optimizer.state.0.momentum_buffer": VECTOR * 3}
    known = held((4, 4), {0: (first, facts), 1: (second, facts | {"mass": 1.25, "arrived": []})})
    found = rule("sgp", 2, 3).merged(known, 2)
    tensors, noted = found.held.workers[2]
    assert torch.equal(tensors["numerator"], VECTOR * 5)  # (1 + 2 + 7) / (0.5 + 0.25 + 1.25)
    assert torch.equal(tensors["optimizer.state.0.momentum_buffer"], VECTOR * 2)
    assert (noted["mass"], noted["arrived"]) == (1.0, [])
    assert set(tensors) == {"numerator", "optimizer.state.0.momentum_buffer"}
    outer = {
        worker: (tensors | {"outer.u": VECTOR}, {"base": told, "outer": {}, "apart": True, "rate": 0.1})
        for worker, (tensors, told) in known.workers.items()
    }
    over = rule("slowmo(steps=3, base=sgp)", 2, 1).merged(held((4, 4), outer), 2).held.workers[0]
    assert torch.equal(over[0]["numerator"], VECTOR * 5)
    assert torch.equal(over[0]["outer.u"], VECTOR)
    assert (over[1]["apart"], over[1]["base"]["mass"]) == (True, 1.0)


def test_pairs_count_who_told_nothing_as_far_as_worker_0() -> None:
    parts = {worker: ({"parameters": VECTOR * worker}, {"optimizer": SGD}) for worker in (0, 2)}
    known = held((5, 0, 4), parts)
    others = rule("ad_psgd", 3, 1)
    assert others.counted(known) == [5, 5, 4]
    found = others.merged(known, 2)
    assert torch.equal(found.held.parameters, VECTOR)
    assert "; 1 sent none" in found.text


def test_the_shared_vector_is_worker_0s_copy_with_its_counts() -> None:
    parts = {worker: ({}, {"worker": worker, "counts": [4, 5 + worker]}) for worker in range(2)}
    known = held((4, 6), parts)
    others = rule("hogwild", 2, 3)
    assert others.counted(known) == [4, 5]
    found = others.merged(known, 2).held.workers
    assert {worker: facts["counts"] for worker, (_, facts) in found.items()} == {0: [2] * 3, 1: [2] * 3}


def test_a_batch_under_way_is_dealt_out_again() -> None:
    known = held((5, 5), {0: ({"sum": VECTOR}, {"pushed": 4})}, [server([4, 4], curvature={"k": 1})])
    others = rule("sandblaster", 2, 3)
    assert others.counted(known) == [4, 4]
    found = others.merged(known, 2).held
    assert found.workers == {}
    assert (found.servers[0][1]["steps"], found.servers[0][1]["curvature"]) == ([2] * 3, {"k": 1})


def test_sites_count_their_own_workers() -> None:
    known = held((5, 5, 4), {}, [server([4]), server([5]), server([5, 3]), server([5, 4])])
    others = rule("gaia(sites=2, servers=2)", 3, 4)  # workers 0 and 1, 2 before; 0, 1 and 2, 3 now
    assert others.counted(known) == [5, 5, 4]
    assert [facts["steps"] for _, facts in others.merged(known, 2).held.servers] == [[2, 2]] * 4


def test_the_mean_of_optimizers_leaves_counters_and_bases_alone() -> None:
    def state(value: float) -> Any:
        own = {"exp_avg": VECTOR * value, "step": torch.tensor(value), "basis": torch.eye(3) * value}
        return {f"state.0.{name}": tensor for name, tensor in own.items()}, SGD

    tensors, facts = mean_optimizer([state(1.0), state(4.0), ({}, SGD)], [1.0, 2.0, 1.0])
    assert torch.equal(tensors["state.0.exp_avg"], VECTOR * 2.25)
    assert float(tensors["state.0.step"]) == 1
    assert torch.equal(tensors["state.0.basis"], torch.eye(3))
    assert facts == SGD
    assert mean_optimizer([({}, {}), ({}, {})], [1.0, 1.0]) == ({}, {})
