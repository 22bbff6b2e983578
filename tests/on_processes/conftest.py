"""What tests of real processes share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from on_processes.two_hosts import two_hosts
from polyrhythm.training.flat_optimizer import make_optimizers_quickly


@pytest.fixture(autouse=True, scope="session")
def _children_start_soon() -> None:
    """Spares every process that a test forks from importing torch's compiler."""
    make_optimizers_quickly()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Lets a test compute beside what it forks: a child of several threads' has none of them, and waits for ever."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Names two network namespaces with a cable between them; only root may make some."""
    with two_hosts() as names:
        yield names
