"""The verbs `train` and `evaluate` with real ranks, as a newcomer uses them."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from on_processes.commands import Result, shell
from polyrhythm.api.strategies import strategies
from polyrhythm.events import CheckpointSaved, RunEnded
from polyrhythm.reporting.event_log import read_events
from polyrhythm.reporting.quantities import percent

TRAIN = ["train", "--data", "digits", "--seed", "3", "--balance", "off", "--json"]
LENET = "lenet5(widths=[4, 8], hidden=16, dropout=0.5)"
WITH_DROPOUT = [*TRAIN, "--model", LENET, "--epochs", "2"]
DIVERGING = (
    "sgd(lr=0.1, weight_decay=100)"  # a step multiplies the weights by -9: infinite in the fourth epoch
)
KEYS = {
    *("run", "strategy", "data", "model", "workers", "servers", "steps", "epochs", "seconds", "images_per_s"),
    *(
        "train_loss",
        "test_loss",
        "test_top1",
        "test_top5",
        "bytes_sent_per_step",
        "staleness",
        "parameters_sha256",
    ),
}


@dataclass(frozen=True)
class Session:
    """What some commands left.

    Attributes:
        folder: where they ran.
        results: by name.
    """

    folder: Path
    results: dict[str, Result]

    @classmethod
    def of(cls, folder: Path, commands: dict[str, list[str]]) -> Session:
        """Runs commands in a folder."""
        return cls(folder, dict(zip(commands, shell(folder, *commands.values()), strict=True)))


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    """Good runs, one after the other."""
    commands = {
        "first": [*WITH_DROPOUT, "--out", "first"],
        "again": ["train", "first/config.yaml", "--json", "--out", "again"],
        "evaluate": ["evaluate", "first", "--json"],
        "other seed": [*WITH_DROPOUT, "--seed", "4"],
        "for people": ["train", "--data", "digits", "--model", "mlp", "--epochs", "1"],
        "all options": [
            *(*TRAIN, "--model", "mlp", "--epochs", "4", "--workers", "3", "--strategy", "mixed(replicas=2)"),
            *("--weight-average", "0.9", "--label-smoothing", "0.1", "--augment", "crop(padding=1); flip"),
            *("--schedule", "step(at=[0.5])", "--precision", "bfloat16", "--tensorboard", "--out", "options"),
        ],
        "evaluate all options": ["evaluate", "options", "--json"],
        "evaluate for people": ["evaluate", "first/model.safetensors"],
    }
    return Session.of(tmp_path_factory.mktemp("session"), commands)


class TestContract:
    def test_json_has_the_figures_of_the_run(self, session: Session) -> None:
        figures = session.results["first"].figures
        assert figures.keys() >= KEYS
        assert (figures["run"], figures["data"], figures["strategy"]) == ("first", "digits", "synchronous")
        assert (figures["workers"], figures["servers"], figures["epochs"], figures["steps"]) == (2, 0, 2, 24)
        assert figures["staleness"] == {"mean": 0.0, "max": 0, "histogram": {"0": 2 * 24}}  # each worker's
        assert 0 < figures["test_top1"] <= figures["test_top5"] <= 1
        # all-reduce over 2 ranks sends every number, and the 2 that travel along, once a rank and step
        parameters = 4 * 26 + 8 * 101 + 16 * 33 + 10 * 17
        assert figures["bytes_sent_per_step"] == 4 * (parameters + 2)

    def test_all_else_is_on_standard_error(self, session: Session) -> None:
        assert "epoch 2/2 done" in session.results["first"].err
        assert session.results["for people"].err.startswith("training mlp (4,810 parameters) on digits")

    def test_the_run_folder_holds_all(self, session: Session) -> None:
        found = {path.name for path in (session.folder / "first").iterdir()}
        assert found >= {
            *(
                "config.yaml",
                "environment.json",
                "events.jsonl",
                "checkpoints",
                "model.safetensors",
                "report.html",
                "predictions.csv",
                "pictures.json",
            )
        }
        lines = (session.folder / "first" / "predictions.csv").read_text().splitlines()[1:]
        right = sum(line.endswith(",1") for line in lines)
        assert right / len(lines) == session.results["first"].figures["test_top1"]
        assert [path.name for path in sorted((session.folder / "first" / "checkpoints").iterdir())] == [
            "step-00000012.safetensors",
            "step-00000024.safetensors",
        ]

    def test_its_recipe_gives_the_same_parameters(self, session: Session) -> None:
        first, again = session.results["first"].figures, session.results["again"].figures
        assert again["parameters_sha256"] == first["parameters_sha256"]
        assert again["test_loss"] == first["test_loss"]
        assert session.results["other seed"].figures["parameters_sha256"] != first["parameters_sha256"]

    @pytest.mark.parametrize(
        ("trained", "tested"), [("first", "evaluate"), ("all options", "evaluate all options")]
    )
    def test_evaluate_finds_what_train_reported(self, trained: str, tested: str, session: Session) -> None:
        reported, found = session.results[trained].figures, session.results[tested].figures
        for key in ("test_top1", "test_top5", "per_class", "model", "data"):
            assert found[key] == reported[key], key
        # `evaluate` computes with all cores, `train` with a worker's share of them: equal up to rounding in float32.
        assert found["test_loss"] == pytest.approx(reported["test_loss"], rel=1e-6)
        assert found["images"] == 359

    def test_without_out_there_is_a_new_folder_in_runs(self, session: Session) -> None:
        folder = Path(str(session.results["other seed"].figures["run"]))
        assert folder.parent == Path("runs")
        assert (session.folder / folder / "report.html").is_file()

    def test_people_get_lines(self, session: Session) -> None:
        result = session.results["for people"]
        assert result.status == 0
        lines = result.out.splitlines()
        labels = [line[:12].strip() for line in lines if not line.startswith(" ")]
        assert [label for label in labels if label not in ("remedy", "straggler")] == [
            "test",
            "trained in",
            "bottleneck",
            "time",
            "model",
            "report",
        ]
        assert max(len(line) for line in lines if line[:12].strip() not in ("model", "report")) <= 100

    def test_evaluate_shows_every_class(self, session: Session) -> None:
        result = session.results["evaluate for people"]
        assert result.status == 0, result.err
        assert "359 test images of digits" in result.out
        assert all(
            any(line.startswith(f"{digit} ") for line in result.out.splitlines()) for digit in range(10)
        )


@pytest.mark.parametrize("strategy", [entry["name"] for entry in strategies()])
def test_every_strategy_is_a_good_run_with_its_defaults(strategy: str, tmp_path: Path) -> None:
    (result,) = shell(tmp_path, [*TRAIN, "--model", "mlp", "--strategy", strategy, "--workers", "3"])
    figures = result.figures
    assert figures["test_top1"] >= 0.9
    assert figures["workers"] == 3


def test_tensorboard_files_can_be_read(session: Session) -> None:
    reader = EventAccumulator(str(session.folder / "options" / "tensorboard")).Reload()
    names = reader.Tags()["scalars"]
    top1 = next(name for name in names if name.endswith("top1"))
    assert reader.Scalars(top1)[-1].value == pytest.approx(
        session.results["all options"].figures["test_top1"]
    )


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Session:
    hot = [*WITH_DROPOUT, "--schedule", "constant", "--optimizer", "sgd(lr=1e20)"]
    servers = ["--strategy", "parameter_server(servers=2)"]
    return Session.of(
        tmp_path_factory.mktemp("failed"),
        {
            "at once": [*hot, "--out", "at-once"],
            "later": [*TRAIN, "--model", "mlp", "--optimizer", DIVERGING, "--out", "later"],
            "servers": [*hot, *servers, "--out", "servers"],
        },
    )


class TestAFailingRun:
    @pytest.mark.parametrize(
        ("name", "rate"), [("at once", "1e+20"), ("later", "0.09"), ("servers", "1e+20")]
    )
    def test_a_loss_that_is_not_finite_is_said(self, name: str, rate: str, failed: Session) -> None:
        result = failed.results[name]
        assert result.status == 2
        assert result.out == ""
        for part in (
            "the loss is ",
            "at step ",
            "of worker ",
            "(rank ",
            f"learning rate {rate}",
            "lower the learning",
        ):
            assert part in result.complaint

    def test_the_run_folder_says_so(self, failed: Session) -> None:
        end = read_events(failed.folder / "at-once" / "events.jsonl")[-1]
        assert isinstance(end, RunEnded)
        assert end.outcome == "failed"
        assert end.result["error"] == failed.results["at once"].complaint
        assert "failed" in (failed.folder / "at-once" / "report.html").read_text()

    def test_the_last_good_checkpoint_stays(self, failed: Session) -> None:
        events = read_events(failed.folder / "later" / "events.jsonl")
        saved = [event.path for event in events if isinstance(event, CheckpointSaved)]
        assert saved
        assert (failed.folder / "later" / saved[-1]).is_file()


@pytest.fixture(scope="module")
def resumed(session: Session, tmp_path_factory: pytest.TempPathFactory) -> Session:
    folder = tmp_path_factory.mktemp("resumed")
    copies = [
        "cut",
        "changed",
        "finished",
        "another",
        "whole",
        "other strategy",
    ]  # cut: both checkpoints; changed: the newest
    for name in copies:
        shutil.copytree(session.folder / "first", folder / name)
    for cut in (folder / "cut" / "checkpoints").iterdir():
        cut.write_bytes(cut.read_bytes()[:-1000])
    changed = folder / "changed" / "checkpoints" / "step-00000024.safetensors"
    content = bytearray(changed.read_bytes())
    content[-1000] ^= 1
    changed.write_bytes(content)
    more = ["--epochs", "3", "--json"]
    return Session.of(
        folder,
        {
            "finished": ["train", "--resume", "finished"],
            "finished before": ["train", "--out", "finished", "--resume", "auto", "--json"],
            "finished before, for people": ["train", "--out", "finished", "--resume", "auto"],
            "cut": ["train", "--resume", "cut", *more],
            "changed": ["train", "--resume", "changed", *more],
            "out": ["train", "--resume", "another", "--out", "elsewhere", *more],
            "over": [*WITH_DROPOUT, "--out", "another"],
            "strategy": ["train", "--resume", "other strategy", "--strategy", "parameter_server", *more],
            "seed": ["train", "--resume", "another", "--seed", "7", *more],
            "model": ["train", "--resume", "another", "--model", "mlp", *more],
            "optimizer": ["train", "--resume", "another", "--optimizer", "adam", *more],
            "whole": ["train", "--resume", "whole", *more],
        },
    )


class TestResuming:
    @pytest.mark.parametrize(
        ("name", "complaint"),
        [
            ("finished", "finished has done its 2 epochs: ask for more with --epochs to continue"),
            ("cut", "checkpoints/step-00000024.safetensors cannot be used: it was cut short"),
            ("out", "--out and --resume exclude each other"),
            ("over", "another already holds another run: name another with --out"),
            ("seed", "was trained with seed "),
            ("model", "was trained with model lenet5(widths=[4, 8], hidden=16, dropout=0.5), not mlp"),
            ("optimizer", "was trained with optimizer sgd, not adam"),
        ],
    )
    def test_what_cannot_be_resumed_is_said(self, name: str, complaint: str, resumed: Session) -> None:
        result = resumed.results[name]
        assert result.status == 2
        assert result.out == ""
        assert result.err.count("\n") == 1
        assert complaint in result.complaint

    def test_asked_for_once_more_a_finished_run_says_what_it_said(
        self, session: Session, resumed: Session
    ) -> None:
        found = resumed.results["finished before"]
        assert found.figures == session.results["first"].figures
        assert found.err == "notice: finished has done its 2 epochs already; --epochs asks for more\n"
        shown = resumed.results["finished before, for people"]
        assert (shown.status, shown.err) == (0, found.err)
        assert f"test        top-1 {percent(found.figures['test_top1'])}, top-5" in shown.out

    def test_from_a_damaged_checkpoint_a_run_falls_back_to_the_one_before(self, resumed: Session) -> None:
        result, folder = resumed.results["changed"], "changed/checkpoints"
        assert (
            f"checkpoint {folder}/step-00000024.safetensors cannot be used: it was changed after it was written (its "
            f"checksum differs); the newest complete one next to it is {folder}/step-00000012.safetensors, and the run "
            "continues from that: epoch 1, step 12"
        ) in result.err
        assert result.figures["steps"] == 36
        whole = resumed.results["whole"].figures  # which had done the second epoch at another learning rate
        assert result.figures["epochs"] == whole["epochs"]

    def test_another_strategy_goes_on(self, session: Session, resumed: Session) -> None:
        result = resumed.results["strategy"]
        assert (
            "parameter_server continues from the model of synchronous after 2 epochs, with its optimizer's state"
        ) in result.err
        assert (result.figures["strategy"], result.figures["epochs"]) == ("parameter_server", 3)
        before = session.results["first"].figures
        assert result.figures["test_loss"] < before["test_loss"] + 0.1
        assert result.figures["seconds"] > before["seconds"]

    def test_a_refused_resumption_changes_nothing(self, session: Session, resumed: Session) -> None:
        for name in ("finished", "cut", "another"):
            for file in ("config.yaml", "events.jsonl", "report.html", "environment.json"):
                before, after = session.folder / "first" / file, resumed.folder / name / file
                assert after.read_bytes() == before.read_bytes(), after

    def test_a_finished_run_goes_on_if_asked_for_more(self, resumed: Session) -> None:
        figures = resumed.results["whole"].figures
        assert (figures["steps"], figures["epochs"]) == (36, 3)


def test_unreadable_images_are_left_out_if_asked(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for part in ("train", "test"):
        for name in ("cat", "dog"):
            folder = tmp_path / "pets" / part / name
            folder.mkdir(parents=True)
            for number in range(4):
                pixels = random.integers(0, 256, (40, 40, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.jpg")
    broken = tmp_path / "pets" / "train" / "dog" / "3.jpg"
    broken.write_bytes(broken.read_bytes()[:-400])
    train = ["train", "--data", "./pets", "--image-size", "16", "--model", "mlp", "--epochs", "1", "--json"]
    refused, trained, tested = shell(
        tmp_path,
        train,
        [*train, "--skip-unreadable", "--out", "run"],
        ["evaluate", "run", "--json"],
    )
    assert refused.status == 2
    assert "pets/train/dog/3.jpg cannot be read (image file is truncated" in refused.complaint
    assert (trained.figures["steps"], trained.figures["images_unreadable"]) == (1, 1)
    assert tested.figures["images"] == 8
    assert tested.figures["test_top1"] == trained.figures["test_top1"]
    config = (tmp_path / "run" / "config.yaml").read_text()
    assert "skip_unreadable: true" in config
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["command"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pets", "run"]


def test_summary_why_and_report_name_the_same_bottleneck_with_the_same_gain(tmp_path: Path) -> None:
    train = [
        "train",
        "--data",
        "digits",
        "--model",
        "mlp",
        "--workers",
        "2",
        "--epochs",
        "300",
        "--out",
        "run",
    ]
    trained, why, shown, elsewhere = shell(
        tmp_path,
        [*train, "--json"],
        ["why", "run", "--json"],
        ["why", "run"],
        ["why", "run", "--cluster", "office"],
    )
    assert trained.status == why.status == 0
    link = json.loads((tmp_path / "run" / "environment.json").read_text())["link"]
    assert link["latency_s"] > 0
    assert link["bandwidth_bytes_per_s"] > 0
    assert why.figures["another"] is False
    bound, figures = trained.figures["held_back"], why.figures
    assert figures["rehearsed_images_per_s"] > 0
    assert [cause["what"] for cause in figures["causes"]] == list(bound["gains"])
    report = unescape((tmp_path / "run" / "report.html").read_text())
    assert bound["problem"][1:] in report
    assert figures["bottleneck"] == bound["problem"]
    assert bound["problem"] in " ".join(shown.out.split())
    if bound["gain"]:
        assert figures["causes"][0]["gain"] == pytest.approx(bound["gain"])
        gain = f"{100 * bound['gain']:+.0f} %"
        assert gain in " ".join(shown.out.split())  # in the table of causes
        assert f"{gain} images/s" in report
    assert "which --cluster names: other machines" in " ".join(elsewhere.out.split())
