"""A process that has computed on several threads can be forked: its child computes on several, too."""

from __future__ import annotations

import multiprocessing

import pytest
import torch

from polyrhythm.launch.devices import computing_with

LARGE = torch.linspace(-1, 1, 1_000_000)
_PATIENCE_S = 20.0


def _computed() -> torch.Tensor:
    with computing_with(2):
        return torch.tanh(LARGE)


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs a system that forks")
def test_a_fork_of_a_process_that_has_computed_on_threads_computes_on_threads() -> None:
    ours = _computed()
    context = multiprocessing.get_context("fork")
    near, far = context.Pipe(duplex=False)
    child = context.Process(target=lambda: far.send_bytes(_computed().numpy().tobytes()), daemon=True)
    child.start()
    try:
        assert near.poll(_PATIENCE_S), "the child waits for threads that it has not"
        assert near.recv_bytes() == ours.numpy().tobytes()
    finally:
        child.kill()
        child.join()
    assert torch.equal(_computed(), ours)
