"""What a run saves while it trains on is what it was when it was saved, and a damaged file costs an epoch at most."""

import threading
from dataclasses import replace

import pytest

from conformance.jobs import make_job, resumed, simulated
from polyrhythm.events import CheckpointSaved, Evaluated, Notice
from polyrhythm.roles.checkpointing import archive
from polyrhythm.roles.checkpointing.archive import FOLDER, Archivist
from polyrhythm.roles.leading import training_duties as curator
from polyrhythm.training.checkpoint import best_checkpoint, checkpoints, load_checkpoint

PATIENCE_S = 30
LEARNING = {"optimizer": "sgd(momentum=0.9)", "weight_average": 0.9, "epochs": 3}


class OneByOne(Archivist):
    """Waits for each write before the next, so that no checkpoint is skipped."""

    def begin(self, snapshot, top1=None):
        self.wait()
        super().begin(snapshot, top1)


def written(folder):
    return {path.name: path.read_bytes() for path in (folder / FOLDER).iterdir()}


def first_saved_s(trained):
    return next(event.time_s for event in trained.events if isinstance(event, CheckpointSaved))


@pytest.mark.parametrize("spec", ["synchronous", "parameter_server(consistency=synchronous)", "easgd"])
def test_what_is_written_late_is_what_was_copied(spec, tmp_path, monkeypatch):
    trained_on = threading.Event()
    passes = []

    def transform(images, keys):
        passes.append(len(keys))
        if len(passes) > steps + 2:  # both workers are in the second epoch
            trained_on.set()
        return images

    def save_late(*arguments):
        assert trained_on.wait(PATIENCE_S)
        return save(*arguments)

    folders = [tmp_path / name for name in ("at once", "late")]
    jobs = [
        make_job(spec, 2, folder=folder, checkpoints=9, transform=transform, **LEARNING) for folder in folders
    ]
    steps = 2 * jobs[0].steps_per_epoch
    at_once = simulated(jobs[0])
    passes.clear()
    trained_on.clear()
    save = archive.save_checkpoint
    monkeypatch.setattr(archive, "save_checkpoint", save_late)
    monkeypatch.setattr(curator, "Archivist", lambda *given, beside: OneByOne(*given, beside=not beside))
    late = simulated(jobs[1])
    assert len(written(folders[1])) == 3
    assert written(folders[1]) == written(folders[0])
    assert late.sha256 == at_once.sha256
    assert late.checkpoint_steps == at_once.checkpoint_steps
    assert first_saved_s(late) > first_saved_s(at_once)


def test_a_run_whose_newest_checkpoint_is_damaged_ends_as_if_nothing_had_been(tmp_path):
    job = make_job("synchronous", 2, folder=tmp_path, **LEARNING)
    whole = simulated(job)
    newest, before = checkpoints(tmp_path / FOLDER)
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    again = simulated(resumed(job))
    assert again.sha256 == whole.sha256
    (notice,) = [event.text for event in again.events if isinstance(event, Notice)]
    assert notice.startswith(f"checkpoint {newest} cannot be used: it was changed")
    assert f"{before}, and the run continues from that: epoch 2, step " in notice


def accuracies(trained):
    return {event.epoch: event.test_top1 for event in trained.events if isinstance(event, Evaluated)}


def test_the_best_stays_besides_the_newest_and_over_a_resumption(tmp_path):
    options = {
        "optimizer": "sgd(lr=1.5)",
        "schedule": "constant",
        "folder": tmp_path,
        "checkpoints": 1,
    }
    job = make_job("synchronous", 2, epochs=6, **options)
    job = replace(job, checkpointing=replace(job.checkpointing, best=True))
    top1 = accuracies(simulated(job))
    best_epoch = max(top1, key=lambda epoch: top1[epoch])
    assert 1 < best_epoch < 6, "else this tests nothing"
    folder = tmp_path / FOLDER
    best = best_checkpoint(folder)
    assert best is not None
    assert load_checkpoint(best)[1]["epoch"] == best_epoch
    assert f"top1-{top1[best_epoch]:.6f}-" in best.name
    assert [load_checkpoint(path)[1]["epoch"] for path in checkpoints(folder)] == [6]
    later = accuracies(simulated(resumed(replace(job, learning=replace(job.learning, epochs=8)))))
    top1 |= later
    best_epoch = max(top1, key=lambda epoch: top1[epoch])
    (best,) = folder.glob("best-*")
    assert load_checkpoint(best)[1]["epoch"] == best_epoch
    assert sorted(later) == [7, 8]


def test_a_better_final_model_is_the_best(tmp_path):
    job = make_job("synchronous", 2, folder=tmp_path, checkpoints=1, epochs=2)
    job = replace(job, checkpointing=replace(job.checkpointing, best=True))
    top1 = accuracies(simulated(job))
    assert top1[2] > top1[1], "else this tests nothing"
    best = best_checkpoint(tmp_path / FOLDER)
    assert best is not None
    assert load_checkpoint(best)[1]["epoch"] == 2
