"""Groups of mixed mode as real processes: who speaks for a group is killed, its group goes on, and it comes back."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from conformance.jobs import result_of
from on_processes.faults.play import ask_to_stop, job_of, nothing, of, played, progress, send, steps_of
from polyrhythm.events import WorkerJoined, WorkerLost


@pytest.mark.parametrize(
    "spec",
    ["mixed(replicas=2, servers=2)", "mixed(replicas=3)", "mixed(replicas=2, inside=local_sgd(steps=3))"],
)
def test_a_group_goes_on_without_its_speaker_and_without_worker_0_and_with_their_successors(
    spec: str, tmp_path: Path
) -> None:
    """Worker 0 speaks for its group and for the run; worker 1 pushes in its place until it is killed as well."""
    job = job_of(spec, tmp_path, restarts=3)
    events = played(
        job,
        *progress((1,), reports=1),
        (steps_of(0), send(0, signal.SIGKILL)),
        (of(WorkerJoined), send(1, signal.SIGKILL)),
        (of(WorkerJoined), nothing),
        *progress((0, 1)),
        (steps_of(2), ask_to_stop),
    )
    result = result_of(events)
    assert [event.worker for event in events if isinstance(event, WorkerLost)] == [0, 1]
    assert (result["workers_lost"], result["workers_joined"]) == (2, 2)
    assert sum(result["messages_refused"].values()) == 0


def test_a_leaf_goes_on_without_a_worker_and_with_its_successor(tmp_path: Path) -> None:
    """Worker 1 shares its leaf with worker 0, which waits for nobody; at the end no step is missing."""
    job = job_of("hierarchical(servers=2)", tmp_path, restarts=1)
    events = played(
        job,
        (steps_of(1), send(1, signal.SIGKILL)),
        (of(WorkerJoined), nothing),
        *progress((0, 1)),
        (steps_of(2), ask_to_stop),
    )
    result = result_of(events)
    assert (result["workers_lost"], result["workers_joined"]) == (1, 1)
    assert sum(result["messages_refused"].values()) == 0
