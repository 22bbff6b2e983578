"""What a successor of the leader makes of what the others had handed in."""

from __future__ import annotations

import torch
from torch import Tensor

from polyrhythm.roles.checkpointing.worker_state import Account, WorkerState
from polyrhythm.roles.leading.training_duties import stock_of
from polyrhythm.strategies.state import State
from polyrhythm.strategies.worker_part import WorkerPart


class Holding(WorkerPart):
    """A part whose state holds its own model, unless that is a copy."""

    def model_in(self, state: State) -> Tensor | None:
        tensors, facts = state
        return None if facts.get("copy") else tensors["model"]


def state_of(worker: int, step: int, *numbers: float, copy: bool = False) -> WorkerState:
    account = Account(worker, step, step, 0, 0, 0.0, 0, {})
    return WorkerState(account, {}, {"model": torch.tensor(numbers)}, {"copy": copy})


def test_models_of_an_epochs_end_are_averaged_and_one_stands_for_worker_0s() -> None:
    states = {
        0: state_of(0, 8, 100.0, 100.0),
        3: state_of(3, 8, 5.0, 1.0),
        1: state_of(1, 8, 1.0, 3.0),
        2: state_of(2, 8, 9.0, 9.0, copy=True),
        4: state_of(4, 7, 50.0, 50.0),
    }
    stock = stock_of(states, Holding(), 8)
    assert stock is not None
    assert stock.mean.tolist() == [3.0, 2.0]
    assert sorted(stock.states) == [0, 1, 2, 3]
    assert [stock.states[worker].account.worker for worker in range(4)] == [0, 1, 2, 3]
    assert stock.states[0].part["model"].tolist() == [1.0, 3.0]


def test_without_a_model_of_that_step_there_is_none() -> None:
    states = {1: state_of(1, 8, 1.0, copy=True), 2: state_of(2, 7, 1.0)}
    assert stock_of(states, Holding(), 8) is None
    assert stock_of({1: state_of(1, 8, 1.0)}, WorkerPart(), 8) is None
