"""What changes in a folder of images between training and a later verb gives a right figure, or one line."""

from __future__ import annotations

import json
import os
import shutil
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import polyrhythm
from on_processes.commands import finished
from polyrhythm.errors import RequestError

CLASSES = ("ant", "bee", "cat")


def add(folder: Path, name: str, numbers: range, seed: int, prefix: str = "") -> None:
    """Adds images of pure noise."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    for number in numbers:
        pixels = np.random.default_rng([seed, number]).integers(0, 256, (12, 12, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name / f"{prefix}{number:03}.png")


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "photos"
    for seed, name in enumerate(CLASSES):
        add(folder, name, range(30), seed)
    return folder


def trained(photos: Path, **options: Any) -> Path:
    """Trains until the noise is known by heart."""
    given: dict[str, Any] = {
        "data": str(photos), "model": "mlp(hidden=[64])", "image_size": 12, "workers": 1, "epochs": 25,
        "batch_size": 24, "optimizer": "adam(lr=0.003)", "start_method": "fork", "out": photos.parent / "run",
    }  # fmt: skip
    run = polyrhythm.train(**(given | options))
    assert run is not None
    return run.folder


def again(run: Path, **options: Any) -> polyrhythm.Run:
    found = polyrhythm.train(resume=run, start_method="fork", **options)
    assert found is not None
    return found


def record(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "data.json").read_text())
    return found


def refused(act: Callable[[], object]) -> str:
    with pytest.raises(RequestError) as refusal:
        act()
    assert len(str(refusal.value).splitlines()) == 1
    return str(refusal.value)


def test_an_image_that_was_trained_on_is_never_tested(photos: Path) -> None:
    run = trained(photos)
    held_out = set(record(run)["held_out_images"])
    assert len(held_out) == 18
    before = polyrhythm.evaluate(run)
    assert before["test_top1"] < 0.7
    for name in CLASSES:
        (
            photos / name / min(set(os.listdir(photos / name)) - {Path(each).name for each in held_out})
        ).unlink()
        add(photos, name, range(10), 10, prefix="new")
    found = polyrhythm.evaluate(run)
    # Those held out before, and some of the new ones: none was learned by heart.
    assert 18 < found["images"] < 18 + 30
    assert found["test_top1"] < 0.7
    again(run, epochs=26)
    now = record(run)
    assert held_out <= set(now["held_out_images"])
    assert not held_out & set(now["trained"])
    assert polyrhythm.evaluate(run)["images"] == found["images"]


def test_an_image_that_returns_was_trained_on(photos: Path) -> None:
    run = trained(photos, epochs=1)
    gone = sorted(record(run)["trained"])[:10]
    for name in gone:
        (photos / name).rename(photos.parent / name.replace("/", "-"))
    again(run, epochs=2)
    for name in gone:
        (photos.parent / name.replace("/", "-")).rename(photos / name)
    again(run, epochs=3)
    assert set(gone) <= set(record(run)["trained"])


def test_held_out_images_stay_held_out_where_a_run_starts_from_anothers_weights(photos: Path) -> None:
    run = trained(photos, epochs=1)
    for name in CLASSES:
        add(photos, name, range(40), 10, prefix="new")
    other = trained(photos, epochs=1, weights=str(run), out=photos.parent / "other")
    assert not set(record(other)["held_out_images"]) & set(record(run)["trained"])


def test_training_images_that_are_moved_into_a_test_folder_are_not_tested(photos: Path) -> None:
    run = trained(photos, epochs=1)
    known = record(run)
    (photos.parent / "moved").mkdir()
    photos.rename(photos.parent / "moved" / "train")
    moved = (photos.parent / "moved").rename(photos)
    for name in [*known["held_out_images"], *known["trained"][:5]]:
        (moved / "test" / name).parent.mkdir(parents=True, exist_ok=True)
        (moved / "train" / name).rename(moved / "test" / name)
    assert polyrhythm.evaluate(run)["images"] == len(known["held_out_images"])


def test_a_file_of_weights_alone_does_not_test_data_that_have_changed(photos: Path) -> None:
    run = trained(photos, epochs=1)
    model = shutil.copy(run / "model.safetensors", photos.parent / "alone.safetensors")
    options: dict[str, Any] = {"model": "mlp(hidden=[64])", "image_size": 12}
    assert polyrhythm.evaluate(model, **options) == polyrhythm.evaluate(run) | {"weights": str(model)}
    (photos / "ant" / "000.png").unlink()
    text = refused(lambda: polyrhythm.evaluate(model, **options))
    assert f"{photos} has changed since {model} was trained" in text
    assert "name its run folder" in text


def test_test_images_that_are_gone_are_not_replaced_by_training_images(photos: Path) -> None:
    root = photos.parent / "root"
    root.mkdir()
    photos.rename(root / "train")
    add(root / "test", "ant", range(3), 7)
    run = trained(root, epochs=1)
    shutil.rmtree(root / "test")
    assert "which are gone: bring them back" in refused(lambda: polyrhythm.evaluate(run))


@pytest.fixture
def learned(photos: Path) -> Path:
    """A network that is right about classes of one tone each, and its run."""
    for number, name in enumerate(CLASSES):
        for path in (photos / name).iterdir():
            Image.new("RGB", (12, 12), (40 + 80 * number,) * 3).save(path)
    run = trained(photos)
    assert polyrhythm.evaluate(run)["test_top1"] == 1
    return run


def test_a_renamed_class_is_refused_by_every_verb(learned: Path, photos: Path) -> None:
    model = (learned / "model.safetensors").read_bytes()
    (photos / "bee").rename(photos / "zebra")
    acts: list[Callable[[], object]] = [
        lambda: polyrhythm.evaluate(learned),
        lambda: polyrhythm.evaluate(learned, calibrate=True),
        lambda: polyrhythm.evaluate(learned / "model.safetensors", model="mlp(hidden=[64])", image_size=12),
        lambda: polyrhythm.evaluate(next((learned / "checkpoints").iterdir())),
        lambda: polyrhythm.robustness(learned, images=3, kinds=["rotation"]),
        lambda: polyrhythm.average([learned, learned], out=photos.parent / "mean.safetensors"),
        lambda: polyrhythm.predict(next((photos / "ant").iterdir()), learned, data=str(photos)),
        lambda: again(learned, epochs=30),
        lambda: trained(photos, teacher=str(learned), out=photos.parent / "student"),
    ]
    for act in acts:
        text = refused(act)
        assert "3 classes (ant, bee, cat)" in text
        assert "zebra" in text
    assert (learned / "model.safetensors").read_bytes() == model
    assert not (learned / "model.calibration.json").exists()


@pytest.mark.parametrize("change", ["more", "fewer"])
def test_a_class_more_or_fewer_ends_a_resumed_run_in_one_line(
    change: str, learned: Path, photos: Path
) -> None:
    if change == "more":
        add(photos, "dog", range(5), 3)
    else:
        shutil.rmtree(photos / "bee")
    named = "has dog" if change == "more" else "lacks bee"
    assert named in refused(lambda: again(learned, epochs=30))
    # Runs from before there were records know the number of their parameters.
    (learned / "data.json").unlink()
    (learned / "model.safetensors").unlink()
    assert named in refused(lambda: again(learned, epochs=30))


def test_a_checkpoint_without_names_of_classes_is_refused_by_its_size(photos: Path) -> None:
    run = trained(photos, epochs=1)
    from polyrhythm.training.checkpoint import checkpoints, load_checkpoint, save_checkpoint

    path = checkpoints(run / "checkpoints")[0]
    assert path is not None
    tensors, facts = load_checkpoint(path)
    del facts["trained_on"]
    save_checkpoint(path, tensors, facts)
    (run / "data.json").unlink()
    (run / "model.safetensors").unlink()
    shutil.rmtree(photos / "bee")
    assert "parameters" in refused(lambda: again(run, epochs=3))


def test_a_class_that_is_gone_moves_no_other_to_its_output(learned: Path, photos: Path) -> None:
    shutil.rmtree(photos / "ant")
    assert polyrhythm.evaluate(learned)["test_top1"] == 1


def test_classes_of_a_teacher_are_matched_by_name(learned: Path, photos: Path) -> None:
    from polyrhythm.config.trained import load_trained
    from polyrhythm.data.open import open_data
    from polyrhythm.data.record import DataRecord

    data = open_data(str(photos), image_size=12)
    turned = DataRecord("", ("cat", "ant", "bee")).matched(data, "other")
    assert turned.train.labels[0] == 1  # an ant
    teacher = load_trained(learned, dataset=turned)
    images, labels = turned.test.images, turned.test.labels
    import torch

    assert torch.equal(teacher.model(images(torch.arange(len(labels)))).argmax(1), labels)


def test_a_run_of_today_keeps_its_split(photos: Path) -> None:
    """A folder without `data.json` and a model without a record come from before there were any."""
    from polyrhythm.config.trained import load_trained
    from polyrhythm.data.dealing import held_out
    from polyrhythm.data.open import open_data
    from polyrhythm.models.weights import read_metadata, save_weights

    run = trained(photos, epochs=1)
    known = load_trained(run)
    facts = read_metadata(run / "model.safetensors")
    del facts["trained_on"]
    save_weights(known.model, run / "model.safetensors", facts)
    (run / "data.json").unlink()
    files = sorted(str(path) for path in photos.rglob("*.png"))
    labels = open_data(str(photos), image_size=12).train.labels
    import torch

    every = torch.arange(3).repeat_interleave(30)
    assert sorted(set(labels.tolist())) == [0, 1, 2]
    wanted = [files[index] for index in held_out(every)[1].tolist()]
    assert load_trained(run).dataset.test.files == wanted  # type: ignore[attr-defined]
    again(run, epochs=2)
    assert record(run)["held_out_images"] == sorted(os.path.relpath(path, photos) for path in wanted)


def test_two_forms_of_a_name_are_one_class(photos: Path) -> None:
    for form in ("NFC", "NFD"):
        name = unicodedata.normalize(form, "café")
        add(photos.parent / "root" / "train", name, range(4), 1, prefix=form)
    add(photos.parent / "root" / "test", unicodedata.normalize("NFD", "café"), range(2), 2)
    for part, count in (("train", 8), ("test", 2)):
        add(photos.parent / "root" / part, "bar", range(count), 3)
    run = trained(photos.parent / "root", epochs=1)
    assert record(run)["classes"] == ["bar", unicodedata.normalize("NFC", "café")]
    assert record(run)["images"] == {"train": 16, "test": 4}


def test_a_damaged_record_is_refused_in_one_line(photos: Path) -> None:
    run = trained(photos, epochs=1)
    for text in ("[", "[]", '{"format": 2}', '{"format": 1, "classes": 3}', "[" * 100_000):
        (run / "data.json").write_text(text)
        refused(lambda: polyrhythm.evaluate(run))
        refused(lambda: again(run, epochs=2))


@pytest.fixture
def truncated(photos: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Photographs of which some are cut short, among so many that only headers are read at the start."""
    from polyrhythm.data import image_files

    monkeypatch.setattr(image_files, "DECODE_UP_TO", 20)
    files = sorted(photos.rglob("*.png"))
    for path in files:
        Image.open(path).save(path.with_suffix(".jpg"), quality=95)
        path.unlink()
    cut = [path.with_suffix(".jpg") for path in files[::10]]
    for path in cut:
        path.write_bytes(path.read_bytes()[:-200])
    return cut


SCRIPT = """
import sys
import polyrhythm
from polyrhythm.data import image_files

image_files.DECODE_UP_TO = 20
polyrhythm.train(
    data=sys.argv[1], model="mlp", image_size=12, workers=2, epochs=2, batch_size=8, skip_unreadable=True,
    start_method="fork", out="run",
)
"""


def test_truncated_images_among_many_are_left_out_and_named(truncated: list[Path], photos: Path) -> None:
    from polyrhythm.reporting.event_log import read_events
    from polyrhythm.reporting.pages.report import write_report

    done = finished([sys.executable, "-c", SCRIPT, photos], photos.parent)
    assert done.status == 0, done.err
    run = photos.parent / "run"
    assert [path for path in truncated if f"{path} cannot be read" not in done.err] == []
    held_out = {str(photos / name) for name in record(run)["held_out_images"]}
    left = len(held_out - set(map(str, truncated)))
    assert 0 < left < len(held_out)
    assert polyrhythm.evaluate(run)["images"] == left
    notices = [getattr(event, "text", "") for event in read_events(run / "events.jsonl")]
    named = [text for text in notices if "left out, since" in text]
    assert [path for path in truncated if not any(str(path) in text for text in named)] == []
    page = write_report(run).read_text()
    assert [path for path in truncated if str(path) not in page] == []
    figures = again(run, epochs=3).figures
    assert figures["images_unreadable"] == len(truncated)  # once each, whichever worker or session met them


def test_a_truncated_image_among_many_ends_a_run_that_may_not_skip_it(
    truncated: list[Path], photos: Path
) -> None:
    text = refused(lambda: trained(photos, epochs=1))
    assert "leave such images out with --skip-unreadable" in text
    assert any(str(path) in text for path in truncated)


def test_fine_tuning_leaves_truncated_images_out(truncated: list[Path], photos: Path) -> None:
    from polyrhythm.reporting.event_log import read_events

    first = trained(photos, epochs=1, skip_unreadable=True)
    run = polyrhythm.train(
        data=str(photos), model="mlp(hidden=[64])", image_size=12, workers=1, skip_unreadable=True,
        weights=str(first), fine_tuning="head", start_method="fork", out=photos.parent / "tuned",
    )  # fmt: skip
    assert run is not None
    assert run.figures["images_unreadable"] == 9
    notices = [getattr(event, "text", "") for event in read_events(run.folder / "events.jsonl")]
    assert "9 images cannot be read any more, and are skipped" in notices
    assert polyrhythm.evaluate(run.folder)["images"] < len(record(run.folder)["held_out_images"])


def test_a_run_reports_what_it_did_not_read(photos: Path) -> None:
    from polyrhythm.reporting.event_log import read_events

    (photos / "ant" / "one.heic").write_bytes(b"")
    run = trained(photos, epochs=1)
    notices = [getattr(event, "text", "") for event in read_events(run / "events.jsonl")]
    assert f"1 file is not read, for an ending that no image has: {photos}/ant/one.heic" in notices


def test_a_class_that_grew_is_reported(photos: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = trained(photos, epochs=1)
    add(photos, "ant", range(4), 9, prefix="new")
    (photos / "bee" / "000.png").unlink()
    polyrhythm.evaluate(run)
    changed = f"{photos} has changed since {run} was trained: 4 images are new, and 1 are gone"
    assert changed in [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("how", ["not a number", "flipped"])
def test_a_model_that_is_damaged_or_has_diverged_is_refused(how: str, photos: Path) -> None:
    from polyrhythm.config.trained import load_trained
    from polyrhythm.models.weights import read_metadata, save_weights

    run = trained(photos, epochs=1)
    file = run / "model.safetensors"
    if how == "flipped":
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    else:
        known = load_trained(run)
        next(known.model.parameters()).data[0] = float("nan")
        save_weights(known.model, file, read_metadata(file))
    picture = photos / "ant" / "000.png"
    acts: list[Callable[[], object]] = [
        lambda: polyrhythm.evaluate(run),
        lambda: polyrhythm.predict(picture, run),
        lambda: polyrhythm.export(run, out=photos.parent / "model.pt2"),
        lambda: trained(photos, teacher=str(run), out=photos.parent / "student"),
    ]
    wanted = "was changed after it was written" if how == "flipped" else "infinite or not a number"
    for act in acts:
        assert wanted in refused(act)
