"""A loop of one's own without any launcher: one worker, which must be the plain loop, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyrhythm.api.join import Group, join
from polyrhythm.errors import RequestError
from polyrhythm.strategies.allreduce.synchronous import Synchronous
from polyrhythm.strategies.role_assignment import RoleAssignment
from unit.api.alone import flat, network, points, shuffled

Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "momentum": lambda groups: torch.optim.SGD(
        groups, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01, momentum=0.5),
}
criterion = nn.CrossEntropyLoss()


@pytest.fixture(autouse=True)
def _started_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "POLYRHYTHM_WORKERS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def group() -> Iterator[Group]:
    with join() as made:
        yield made


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Any,
    scheduler: Any = None,
    accumulate: int = 1,
) -> list[float]:
    losses = []
    for _ in range(3):
        for number, (x, y) in enumerate(batches):
            loss = criterion(model(x), y) / accumulate
            loss.backward()
            losses.append(float(loss.detach()))
            if (number + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
                if scheduler is not None:
                    scheduler.step()
    return losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_is_the_plain_loop_bit_for_bit(make: Make, dtype: torch.dtype) -> None:
    plain = network(dtype, dropout=0.3)
    torch.manual_seed(5)
    expected = train(plain, make(plain.parameters()), shuffled(43, 8, dtype))

    model = network(dtype, dropout=0.3)
    torch.manual_seed(5)
    with join(Synchronous()) as group:
        model, optimizer = group.distribute(model, make(model.parameters()))
        losses = train(model, optimizer, group.shard(shuffled(43, 8, dtype)))

    assert losses == expected
    assert torch.equal(flat(model), flat(plain))
    assert (group.rank, group.workers, group.leads, optimizer.steps) == (0, 1, True, 18)
    assert dict(group.staleness) == {0: 18}


@pytest.mark.parametrize("before", [True, False], ids=["scheduler before", "scheduler after"])
def test_schedulers_and_accumulated_gradients_are_those_of_the_plain_loop(before: bool) -> None:
    def two_groups(model: nn.Sequential) -> torch.optim.Optimizer:
        slow = {"params": model[0].parameters(), "lr": 0.01}
        return torch.optim.SGD([{"params": model[3].parameters()}, slow], lr=0.1, momentum=0.9)

    plain = network()
    reference = two_groups(plain)
    schedule = torch.optim.lr_scheduler.StepLR(reference, 2, gamma=0.5)
    train(plain, reference, list(shuffled(48, 8)), schedule, accumulate=2)

    model = network()
    with join() as group:
        optimizer: torch.optim.Optimizer = two_groups(model)
        if before:
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        model, optimizer = group.distribute(model, optimizer)
        if not before:
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        train(model, optimizer, list(shuffled(48, 8)), schedule, accumulate=2)

    rates = [entry["lr"] for entry in optimizer.param_groups]
    assert rates == [entry["lr"] for entry in reference.param_groups] == [0.1 * 0.5**4, 0.01 * 0.5**4]
    torch.testing.assert_close(flat(model), flat(plain), rtol=0, atol=0)


def test_a_closure_is_called_first_and_its_loss_given_back() -> None:
    plain, model = network(), network()
    x, y = points(8).tensors
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    expected = criterion(plain(x), y)
    expected.backward()
    reference.step()

    with join() as group:
        model, optimizer = group.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))

        def closure() -> float:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            return loss  # type: ignore[no-any-return]

        with torch.no_grad():
            loss = optimizer.step(closure)
    assert isinstance(loss, Tensor)
    assert torch.equal(loss, expected)
    assert torch.equal(flat(model), flat(plain))


@pytest.mark.parametrize("zero", ["model", "optimizer", "neither"])
def test_gradients_start_from_zero_whoever_zeroes_them(group: Group, zero: str) -> None:
    plain, model = network(), network()
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    model, optimizer = group.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x, y in list(shuffled(24, 8)):
        reference.zero_grad()
        criterion(plain(x), y).backward()
        reference.step()
        if zero == "model":
            model.zero_grad()
        elif zero == "optimizer":
            criterion(model(x), y).backward()
            optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    assert torch.equal(flat(model), flat(plain))


def test_weights_that_are_loaded_after_distribute_count(group: Group) -> None:
    source, model = network(), network()
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(1)
    model, optimizer = group.distribute(model, torch.optim.SGD(model.parameters(), lr=0.0))
    model.load_state_dict(source.state_dict())
    train(model, optimizer, group.shard(shuffled(8, 8)))
    assert torch.equal(flat(model), flat(source))


def test_saved_state_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    batches = list(shuffled(40, 8))

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, which: slice) -> None:
        for x, y in batches[which]:
            criterion(model(x), y).backward()
            optimizer.step()

    whole = network()
    with join() as group:
        whole, optimizer = group.distribute(whole, OPTIMIZERS["adam"](whole.parameters()))
        steps(whole, optimizer, slice(0, 3))
        for entry in optimizer.param_groups:
            entry["lr"] = 0.003
        torch.save({"model": whole.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
        steps(whole, optimizer, slice(3, 5))

    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    model = network()
    with join() as group:
        model, resumed = group.distribute(model, OPTIMIZERS["adam"](model.parameters()))
        model.load_state_dict(saved["model"])
        resumed.load_state_dict(saved["optimizer"])
        steps(model, resumed, slice(3, 5))
        assert resumed.steps == 5
        with pytest.raises(RequestError, match=r"right after group\.distribute"):
            resumed.load_state_dict(saved["optimizer"])
    assert resumed.param_groups[0]["lr"] == 0.003
    assert torch.equal(flat(model), flat(whole))


def test_states_of_something_else_are_refused(group: Group) -> None:
    model = network()
    model, optimizer = group.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    state = optimizer.state_dict()
    with pytest.raises(RequestError, match=r"is of parameter_server\(servers=2\), not of synchronous"):
        optimizer.load_state_dict(state | {"strategy": "parameter_server(servers=2)"})
    with pytest.raises(RequestError, match="is of a plain optimizer"):
        optimizer.load_state_dict(torch.optim.SGD(model.parameters(), lr=0.1).state_dict())
    with pytest.raises(RequestError, match="has 2 param groups, the optimizer 1"):
        optimizer.load_state_dict(state | {"param_groups": state["param_groups"] * 2})


def test_options_that_the_strategy_cannot_follow_are_refused() -> None:
    with join("local_sgd(optimizer_state=average)") as group:
        _refuse_options(group)


def _refuse_options(group: Group) -> None:
    model = network()
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[3].parameters(), "lr": 0.2}]
    model, optimizer = group.distribute(model, torch.optim.SGD(groups, momentum=0.9))
    optimizer.param_groups[1]["lr"] = 0.1
    with pytest.raises(RequestError, match=r"param groups 0 and 1 began with learning rates 0\.1 and 0\.2"):
        optimizer.step()
    optimizer.param_groups[1]["lr"] = 0.2
    optimizer.param_groups[1]["momentum"] = 0.8
    with pytest.raises(RequestError, match=r"momentum of param group 1 changed from 0\.9 to 0\.8"):
        optimizer.step()
    optimizer.param_groups[1]["momentum"] = 0.9
    with pytest.raises(RequestError, match="a parameter is not one of the distributed model"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(RequestError, match="distributes one model"):
        group.distribute(model, optimizer)


def test_several_optimizers_are_refused() -> None:
    model = network()
    several: Any = tuple(torch.optim.SGD(model[part].parameters(), lr=0.1) for part in (0, 3))
    with pytest.raises(RequestError, match=r"distributes one optimizer \(given tuple\)"), join() as group:
        group.distribute(model, several)


def test_a_ratio_that_nobody_can_know_is_refused() -> None:
    model = network()
    groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[3].parameters(), "lr": 0.2}]
    with (
        pytest.raises(RequestError, match="make the scheduler after"),
        join("local_sgd(optimizer_state=average)") as group,
    ):
        group.distribute(model, torch.optim.SGD(groups))


def test_what_comes_after_the_end_is_refused() -> None:
    model = network()
    with join() as group:
        model, optimizer = group.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert group.average(2.5, weight=3) == 2.5
    with pytest.raises(RequestError, match="inside the `with`"):
        optimizer.step()
    with pytest.raises(RequestError, match="inside the `with`"):
        group.average(1.0)


def test_an_error_in_the_body_passes_through_and_none_distributed_is_one() -> None:
    with pytest.raises(KeyError, match="mine"), join():
        raise KeyError("mine")
    with pytest.raises(RequestError, match="nothing was distributed"), join():
        pass


def test_requests_that_cannot_be_met_say_how_they_can() -> None:
    with pytest.raises(
        RequestError, match=r"needs 2 servers .*`polyrhythm run --workers 2 .*--nproc-per-node 4 "
    ):
        join("parameter_server(servers=2)")
    with pytest.raises(RequestError, match="unknown strategy 'synchronos': did you mean synchronous"):
        join("synchronos")
    with pytest.raises(RequestError, match=r"threads must be at least 1 \(given 0\)"):
        join(threads=0)


def test_a_strategy_that_computes_the_passes_itself_is_refused() -> None:
    model = network()
    words = "hybrid computes forward and backward passes itself, .*: use polyrhythm.train, or join with synchronous"
    with pytest.raises(RequestError, match=words), join("hybrid") as group:
        group.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_worker_that_waits_for_others_at_the_end_names_them(group: Group) -> None:
    model = network()
    group.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    group._world = replace(group._world, roles=RoleAssignment((0, 1, 2)))
    group._home.rendezvous.store.set("script/left/0", "")
    words = "worker 0 has left the loop after 0 steps and waits for worker 1, 2 to leave"
    assert group._missing_text() == words
    for worker in (1, 2):
        group._home.rendezvous.store.set(f"script/left/{worker}", "")
    assert group._missing_text() == ""


def test_images_reach_the_layers_with_channels_innermost(group: Group) -> None:
    seen = []
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 3))
    model[0].register_forward_hook(lambda _, inputs, output: seen.append((inputs[0], output)))
    model, _ = group.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), channels_last=True)
    images = torch.randn(5, 1, 8, 8)
    model(images)
    assert torch.equal(seen[0][0], images)
    assert seen[0][1].is_contiguous(memory_format=torch.channels_last)
