"""Loops that end sooner on some workers than on others, against plain torch on whatever batches there are."""

from __future__ import annotations

import time
from collections import Counter
from threading import Event

import pytest
import torch
from torch import Tensor, nn

from polyrhythm.api.join import Group
from polyrhythm.communication.transports.torch_distributed.communicator import TorchDistributedCommunicator
from polyrhythm.errors import PeerLost, RunError
from tolerances import REORDERED
from unit.api.loop.threads import Killed, run_in_threads

BATCHES = (3, 5, 4)
"""Of each worker in an epoch."""
EPOCHS = 2


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def batch(epoch: int, worker: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * epoch + 10 * worker + step)
    return torch.randn(6, 4, generator=generator, dtype=torch.float64), torch.arange(6) % 3


def plain(workers: int, clip: bool) -> Tensor:
    model, optimizer = made()
    for epoch in range(EPOCHS):
        for step in range(max(BATCHES[:workers])):
            having = [batch(epoch, worker, step) for worker in range(workers) if step < BATCHES[worker]]
            x, y = (torch.cat(parts) for parts in zip(*having, strict=True))
            nn.functional.cross_entropy(model(x), y).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def uneven(group: Group, clip: bool, network: tuple[nn.Module, torch.optim.Optimizer]) -> Tensor:
    with group:
        model, optimizer = group.distribute(*network)
        for epoch in range(EPOCHS):
            with group.join():
                for step in range(BATCHES[group.rank]):
                    x, y = batch(epoch, group.rank, step)
                    nn.functional.cross_entropy(model(x), y).backward()
                    if clip:
                        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                    optimizer.step()
                    optimizer.zero_grad()
            for options in optimizer.param_groups:
                options["lr"] *= 0.5
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("clip", [False, True], ids=["plain", "clipped"])
@pytest.mark.parametrize(
    "strategy", ["synchronous", "parameter_server(servers=2, consistency=synchronous)", "mixed(replicas=3)"]
)
def test_who_is_through_takes_part_with_nothing(strategy: str, clip: bool, workers: int) -> None:
    if strategy.startswith("mixed") and workers == 2:
        strategy = "mixed(replicas=2)"
    networks = [made() for _ in range(workers)]
    found = run_in_threads(strategy, workers, lambda group: uneven(group, clip, networks[group.rank]))
    expected = plain(workers, clip)
    for each in found:
        torch.testing.assert_close(each, expected, **REORDERED)


@pytest.mark.parametrize("strategy", ["local_sgd(steps=2)", "d_psgd", "parameter_server", "ad_psgd", "easgd"])
def test_all_come_to_the_end_where_workers_hold_other_models(strategy: str) -> None:
    networks = [made() for _ in range(3)]
    first, *others = run_in_threads(strategy, 3, lambda group: uneven(group, False, networks[group.rank]))
    assert all(torch.equal(first, each) for each in others)
    assert bool(first.isfinite().all())


def plain_without(victim: int, at: int) -> Tensor:
    """The same in plain torch, on what those have who are there: the victim's batches end at a step of epoch 1."""
    model, optimizer = made()
    for epoch in range(EPOCHS):
        for step in range(max(BATCHES)):
            having = [
                batch(epoch, worker, step)
                for worker, count in enumerate(BATCHES)
                if step < count and not (worker == victim and (epoch, step) >= (1, at))
            ]
            if not having:
                continue
            x, y = (torch.cat(parts) for parts in zip(*having, strict=True))
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def mortal(group: Group, network: tuple[nn.Module, torch.optim.Optimizer], victim: int, at: int) -> Tensor:
    """As `uneven`; a worker dies before a step of epoch 1."""
    with group:
        model, optimizer = group.distribute(*network)
        for epoch in range(EPOCHS):
            with group.join():
                for step in range(BATCHES[group.rank]):
                    if (group.rank, epoch, step) == (victim, 1, at):
                        raise Killed
                    x, y = batch(epoch, group.rank, step)
                    nn.functional.cross_entropy(model(x), y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            for options in optimizer.param_groups:
                options["lr"] *= 0.5
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def check_others(found: list[Tensor], victim: int, at: int) -> None:
    expected = plain_without(victim, at)
    for worker, vector in enumerate(found):
        if worker != victim:
            torch.testing.assert_close(vector, expected, **REORDERED)


@pytest.mark.parametrize("strategy", ["synchronous", "parameter_server(servers=2, consistency=synchronous)"])
@pytest.mark.parametrize(("victim", "at"), [(1, 2), (1, 4), (2, 3)])
def test_a_worker_that_is_lost_meanwhile_is_not_waited_for(victim: int, at: int, strategy: str) -> None:
    """Before the others are through, when only it goes on, and when one is through."""
    networks = [made() for _ in BATCHES]
    found = run_in_threads(strategy, 3, lambda group: mortal(group, networks[group.rank], victim, at))
    check_others(found, victim, at)


MOST = BATCHES.index(max(BATCHES))
"""Whose state all take over."""
_BROADCAST = TorchDistributedCommunicator.broadcast


@pytest.mark.parametrize("sent", [0, 1])
def test_who_is_lost_while_others_take_its_state_over_leaves_it_whole_or_not_at_all(
    sent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state goes in two messages, of which the others have received some."""
    calls: Counter[int] = Counter()

    def dies(self: TorchDistributedCommunicator, tensor: Tensor, root: int = 0) -> None:
        calls[self.rank] += root == MOST
        if root == self.rank == MOST and calls[MOST] == sent + 1:
            raise Killed
        _BROADCAST(self, tensor, root)

    monkeypatch.setattr(TorchDistributedCommunicator, "broadcast", dies)
    networks = [made() for _ in BATCHES]
    found = run_in_threads("synchronous", 3, lambda group: mortal(group, networks[group.rank], -1, 0))
    check_others(found, MOST, 0)


def test_who_has_not_got_all_when_others_go_on_gets_it_from_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker 0 has taken the state over, and is in its next step; worker 2 has lost its source with the last part."""
    late, goes_on = 2, Event()
    calls: Counter[int] = Counter()
    groups: dict[int, Group] = {}

    def broadcast(self: TorchDistributedCommunicator, tensor: Tensor, root: int = 0) -> None:
        calls[self.rank] += root == MOST
        if self.rank == late and root == MOST and calls[late] == 2:
            _BROADCAST(self, tensor.clone(), root)
            assert goes_on.wait(20)
            until = time.monotonic() + 20
            while not groups[late]._home.is_lost(MOST) and time.monotonic() < until:
                time.sleep(0.001)
            raise PeerLost(MOST, "a broadcast")
        _BROADCAST(self, tensor, root)

    def loop(group: Group) -> Tensor:
        groups[group.rank] = group
        model, optimizer = networks[group.rank]
        if group.rank == 0:
            model.register_forward_pre_hook(lambda *_: goes_on.set() if calls[0] == 2 else None)
        return mortal(group, (model, optimizer), MOST, 0)

    monkeypatch.setattr(TorchDistributedCommunicator, "broadcast", broadcast)
    networks = [made() for _ in BATCHES]
    check_others(run_in_threads("synchronous", 3, loop), MOST, 0)


def test_a_loss_where_passes_cannot_be_told_from_steps_ends_the_run_in_a_line() -> None:
    """Who takes part with nothing does not know how many passes a step of the others has."""
    networks = [made() for _ in BATCHES]

    def loop(group: Group) -> None:
        with group:
            model, optimizer = group.distribute(*networks[group.rank])
            with group.join():
                for step in range(BATCHES[group.rank]):
                    if (group.rank, step) == (1, 4):
                        raise Killed
                    for x, y in (batch(0, group.rank, step), batch(1, group.rank, step)):
                        nn.functional.cross_entropy(model(x), y).backward()
                    optimizer.step()
                    optimizer.zero_grad()

    with pytest.raises(
        RunError, match=r"^a worker was lost in group\.join, where the loop takes several backward"
    ):
        run_in_threads("synchronous", 3, loop)
