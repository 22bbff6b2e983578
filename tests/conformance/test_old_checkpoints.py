"""Checkpoints that an earlier version wrote are resumed to what that version would have trained.

`checkpoints-0.1.tar.xz` holds, for every strategy and variation, the run folder of a small job that was interrupted in
the middle of an epoch (and, where there are rounds, of a round), and the parameters with which that version ended the
resumed run. They were computed on another processor, so they are compared up to rounding. Made by the version that
wrote them: `PYTHONPATH=src:tests python -m conformance.test_old_checkpoints`.
"""

from __future__ import annotations

import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from safetensors.torch import load_file, save_file

from conformance.jobs import UNEVEN, make_job, resumed, simulated, stop_at, strategies, vector_of
from polyrhythm.roles.job import Job

WORKERS = 3
ARCHIVE = Path(__file__).with_name("checkpoints-0.1.tar.xz")
NEWER = (
    "admm",
    "decoupled_diloco",
    "scaffold",
    "parameter_server(servers=2, replicas=2, compress=one_bit(dense_below=0))",
    "downpour(servers=2, replicas=2)",
    "downpour(servers=2, compress=top_k(density=0.2, dense_below=0))",
)
"""Strategies that that version did not have."""
SPECS = [spec for spec in strategies() if spec not in NEWER]
STOPPED_S = 0.047


def job_in(folder: Path, spec: str) -> Job:
    return make_job(spec, WORKERS, folder=folder, optimizer="sgd(lr=0.05, momentum=0.9)")


def folder_of(spec: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in spec)


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("old")
    with tarfile.open(ARCHIVE) as file:
        file.extractall(
            where, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {})
        )  # since 3.11.4
    return where


@pytest.mark.parametrize("spec", SPECS)
def test_a_run_of_an_earlier_version_ends_as_it_would_have(spec: str, archive: Path) -> None:
    folder = archive / folder_of(spec)
    expected = load_file(folder / "ended.safetensors")["vector"]
    ended = simulated(resumed(job_in(folder, spec)), UNEVEN)
    assert ended.events[-1].outcome == "done"
    torch.testing.assert_close(vector_of(ended.models[0]), expected, rtol=1e-3, atol=1e-4)


def main() -> None:
    with TemporaryDirectory() as temporary, tarfile.open(ARCHIVE, "w:xz") as file:
        for spec in SPECS:
            folder = Path(temporary, folder_of(spec))
            folder.mkdir()
            first = simulated(job_in(folder, spec), stop_at(STOPPED_S))
            print(spec, first.events[-1].outcome, first.checkpoint_steps, flush=True)
            file.add(folder, folder.name)
            ended = simulated(resumed(job_in(folder, spec)), UNEVEN)
            vector = Path(temporary, "ended.safetensors")
            save_file({"vector": vector_of(ended.models[0])}, vector)
            file.add(vector, f"{folder.name}/ended.safetensors")


if __name__ == "__main__":
    main()
