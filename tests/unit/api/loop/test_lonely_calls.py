"""A call that only some workers make ends with one line once another has left, or waits for this one elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from polyrhythm.api.join import Group
from polyrhythm.errors import RequestError
from unit.api.alone import network, points
from unit.api.loop.threads import run_in_threads

IN_STEP = ["synchronous", "parameter_server(servers=1, consistency=synchronous)"]


def train(group: Group, between: Callable[[int], object], after: Callable[[], object] = lambda: None) -> None:
    model = network()
    with group:
        model, optimizer = group.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step, (x, y) in enumerate(group.shard(DataLoader(points(24), 4))):
            between(step)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        after()


CALLS: dict[str, Callable[[Group], Any]] = {
    "group.average": lambda group: group.average(1.0),
    "group.gather": lambda group: group.gather(1),
    "group.state_dict": lambda group: group.state_dict(),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("strategy", IN_STEP)
@pytest.mark.parametrize("alone", [0, 1])
def test_a_call_of_one_worker_while_the_other_exchanges(strategy: str, call: str, alone: int) -> None:
    def loop(group: Group) -> None:
        train(group, lambda step: CALLS[call](group) if step == 2 and group.rank == alone else None)

    with pytest.raises(
        RequestError,
        match=rf"^worker {alone} is in {call}, and worker {1 - alone} waits for this one in the exchange of step 2: "
        rf"call {call} at the same place on all workers",
    ):
        run_in_threads(strategy, 2, loop)


@pytest.mark.parametrize(
    "strategy", [*IN_STEP, "local_sgd(steps=2)", "parameter_server(servers=1)", "d_psgd"]
)
def test_a_call_of_one_worker_when_the_other_has_left(strategy: str) -> None:
    def loop(group: Group) -> None:
        train(group, lambda step: None, lambda: group.average(1.0) if group.rank == 0 else None)

    with pytest.raises(
        RequestError, match=r"^worker 0 is in group\.average, and worker 1 has left the loop: call"
    ):
        run_in_threads(strategy, 2, loop)


def test_calls_of_two_kinds_do_not_meet() -> None:
    def loop(group: Group) -> None:
        train(group, lambda step: group.average(1.0) if group.rank else group.gather(1))

    with pytest.raises(
        RequestError, match=r"workers call group\.average and group\.gather where all must call the same"
    ):
        run_in_threads("synchronous", 2, loop)


def test_who_takes_its_time_is_waited_for() -> None:
    """The other neither leaves nor waits: it comes once this one has asked it several times where it is."""
    asked = threading.Event()

    def loop(group: Group) -> list[float]:
        means: list[float] = []
        watched = group._coordination.means

        def between(step: int) -> None:
            if group.rank == 0 and step == 2:
                look = watched.check_others

                def counted(*given: Any) -> None:
                    look(*given)
                    if watched._asked:
                        asked.set()

                watched.check_others = counted  # type: ignore[method-assign]
            elif group.rank == 1 and step == 2:
                assert asked.wait(60)
            means.append(group.average(float(group.rank)))

        train(group, between)
        return means

    assert run_in_threads("synchronous", 2, loop) == [[0.5] * 3] * 2
