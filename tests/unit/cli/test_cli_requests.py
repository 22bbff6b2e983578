"""What a wrong request to `train` looks like: one line that names what was given, and nothing written."""

from __future__ import annotations

import errno
import os
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

TINY = ("--data", "digits", "--model", "mlp", "--epochs", "1")
Refusal = Callable[..., str]

WRONG = {
    "data": (["--data", "digit"], "unknown data 'digit': did you mean digits?"),
    "data folder": (["--data", "no/folder"], "there is no folder no/folder"),
    "model": (["--model", "lenet"], "unknown model 'lenet': did you mean lenet5"),
    "key of a model": (["--model", "mlp(hiden=3)"], "unknown key of model mlp 'hiden': did you mean hidden?"),
    "strategy": (["--strategy", "synchronus"], "unknown strategy 'synchronus': did you mean synchronous?"),
    "key of a strategy": (["--strategy", "mixed(server=2)"], "'server': did you mean servers?"),
    "no keys": (["--strategy", "synchronous(collective=ring(a=1))"], "collective ring takes no keys"),
    "consistency": (
        ["--strategy", "parameter_server(consistency=async)"],
        "'async': did you mean asynchronous",
    ),
    "placement": (
        ["--strategy", "mixed(placement=share)"],
        "unknown placement 'share': did you mean shared?",
    ),
    "key twice": (
        ["--optimizer", "sgd(lr=1, lr=2)"],
        "optimizer: cannot read 'sgd(lr=1, lr=2)': lr is given twice",
    ),
    "key missing": (["--optimizer", "sgd(0.1)"], "every value needs its key"),
    "no spec": (
        ["--optimizer", "sgd(lr="],
        "optimizer: cannot read 'sgd(lr=': write name or name(key=value, …)",
    ),
    "empty spec": (["--optimizer", ""], "optimizer: cannot read ''"),
    "optimizer": (["--optimizer", "sdg"], "unknown optimizer 'sdg': did you mean sgd?"),
    "learning rate": (["--optimizer", "sgd(lr=-1)"], "optimizer sgd: lr should be greater than 0 (given -1)"),
    "not a rate": (["--optimizer", "sgd(lr=fast)"], "given 'fast'"),
    "schedule": (["--schedule", "cosin"], "unknown schedule 'cosin': did you mean cosine?"),
    "long warm-up": (["--schedule", "cosine(warmup_epochs=9)"], "warmup_epochs=9 is longer than the run"),
    "augmentation": (["--augment", "flop"], "unknown augmentation 'flop': did you mean flip"),
    "negative padding": (["--augment", "crop(padding=-1)"], "padding should be greater than or equal to 0"),
    "precision": (
        ["--precision", "half"],
        "unknown precision 'half': there are auto, bfloat16, float16, float32",
    ),
    "float16 on CPU": (["--device", "cpu", "--precision", "float16"], "float16 is not possible on cpu"),
    "device": (["--device", "gpu"], "unknown device 'gpu': there are auto, cpu, cuda"),
    "too many servers": (
        ["--strategy", "parameter_server(servers=4811)"],
        "4811 servers cannot share a model of 4810 parameters: ask for at most 4810",
    ),
    "too many workers": (["--workers", "1439"], "1439 workers cannot share 1438 training images"),
    "no port": (["--port", "65536"], "port should be less than or equal to 65535 (given '65536')"),
    "endless epochs": (["--epochs", "9" * 20], "epochs should be less than or equal to 1000000"),
    "endless silence": (["--silence-s", "inf"], "silence_s should be less than or equal to 86400"),
    "endless notice": (["--notice-s", "inf"], "notice_s should be less than or equal to 86400"),
    "huge image": (["--image-size", "99999999"], "image_size should be less than or equal to 16384"),
    "huge scale": (["--scale", "99999999"], "scale should be less than or equal to 16384"),
    "infinite temperature": (["--temperature", "inf"], "temperature should be a finite number"),
    "crowd of threads": (["--threads", "100000"], "threads should be less than or equal to 1024"),
    "no number": (["--label-smoothing", "much"], "label_smoothing should be a valid number (given 'much')"),
    "text without quotes": (
        ["--data", "manifest(file=a-b.csv)"],
        "'a - b.csv' is not a value; put a text into quotes, as in key='a.csv'",
    ),
    "huge seed": (["--seed", str(2**63)], "seed should be less than 9223372036854775808"),
    "all smoothed": (["--label-smoothing", "1"], "label_smoothing should be less than 1"),
    "not a recipe": (["nowhere.yaml"], "cannot read the recipe nowhere.yaml: No such file or directory"),
    "folder as recipe": (["."], "cannot read the recipe .: Is a directory"),
    "no run": (["--resume", "."], ". is not a run folder (it has no config.yaml): name the one to resume"),
    "no weights": (["--weights", "nowhere"], "there are no weights at nowhere"),
    "unknown option": (
        ["--wrokers", "2"],
        "No such option: --wrokers (Possible options: --min-workers, --workers)",
    ),
    "option without value": (["--workers"], "Option '--workers' requires an argument"),
    "too many arguments": (["a.yaml", "b.yaml"], "Got unexpected extra argument(s) (b.yaml)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_request_is_refused_on_one_line(name: str, refused: Refusal) -> None:
    options, complaint = WRONG[name]
    assert complaint in refused("train", *TINY, *options)


@pytest.mark.parametrize("value", ["0", "-1", "two", "2.5", "2.0", "", "true"])
@pytest.mark.parametrize("option", ["workers", "batch-size", "epochs", "threads", "image-size"])
def test_counts_are_whole_numbers_from_1(option: str, value: str, refused: Refusal) -> None:
    complaint = refused("train", *TINY, f"--{option}", value)
    assert complaint.startswith(f"the run: {option.replace('-', '_')} should be ")
    assert f"(given {value!r})" in complaint


@pytest.mark.parametrize("value", ["0", "-1", "two", "2.5", "2.0", "true"])
@pytest.mark.parametrize("key", ["servers", "replicas"])
def test_counts_in_a_strategy_are_whole_numbers_from_1(key: str, value: str, refused: Refusal) -> None:
    complaint = refused("train", *TINY, "--strategy", f"mixed({key}={value})")
    assert complaint.startswith(f"strategy mixed: {key} should be ")
    assert "given " in complaint


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "Missing command (see polyrhythm --help)"),
        (["trian"], "No such command 'trian'. Did you mean 'train'?"),
        (["evaluate"], "Missing argument 'RUN_OR_WEIGHTS'"),
        (["evaluate", "nowhere"], "there is no nowhere: name a run folder or a file of weights"),
        (["evaluate", "."], ". is not a run folder"),
        (["evaluate", "x", "--batch-size", "0"], "Invalid value for '--batch-size'"),
        (["strategies", "mixd"], "unknown strategy 'mixd': did you mean mixed?"),
        (
            ["evaluate", "x", "--batch-size", "many"],
            "should be a valid integer (see polyrhythm evaluate --help)",
        ),
        (["run"], "Missing argument 'SCRIPT'"),
    ],
)
def test_other_verbs_are_refused_alike(arguments: list[str], complaint: str, refused: Refusal) -> None:
    assert complaint in refused(*arguments)


def test_cuda_is_refused_where_there_is_none(refused: Refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "there is no CUDA device here" in refused("train", *TINY, "--device", "cuda")


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_port_in_use_is_refused(taken_port: int, refused: Refusal) -> None:
    complaint = refused("train", *TINY, "--port", str(taken_port))
    assert (
        complaint == f"port {taken_port} cannot be used (Address already in use): choose another with --port"
    )


class TestOut:
    def test_a_folder_that_holds_another_run(self, tmp_path: Path, refused: Refusal) -> None:
        (tmp_path / "config.yaml").write_text("model: mlp\n")
        complaint = refused("train", *TINY, "--out", tmp_path)
        assert f"{tmp_path} already holds another run: name another with --out" in complaint
        assert (tmp_path / "config.yaml").read_text() == "model: mlp\n"

    def test_a_folder_that_holds_something_else(self, tmp_path: Path, refused: Refusal) -> None:
        (tmp_path / "thesis.tex").touch()
        assert f"{tmp_path} is not empty, and holds no run: name another with --out" == refused(
            "train", *TINY, "--out", tmp_path
        )

    def test_a_file(self, tmp_path: Path, refused: Refusal) -> None:
        (tmp_path / "file").touch()
        assert f"{tmp_path / 'file'} is a file" in refused("train", *TINY, "--out", tmp_path / "file")

    def test_what_cannot_be_written(self, tmp_path: Path, refused: Refusal) -> None:
        (tmp_path / "file").touch()
        complaint = refused("train", *TINY, "--out", tmp_path / "file" / "run")
        assert complaint.startswith(f"cannot write into {tmp_path / 'file' / 'run'}: Not a directory")

    def test_together_with_resume(self, tmp_path: Path, refused: Refusal) -> None:
        (tmp_path / "config.yaml").write_text("model: mlp\ndata: digits\n")
        complaint = refused("train", "--resume", tmp_path, "--out", "elsewhere")
        assert complaint.startswith("--out and --resume exclude each other")


def test_a_run_without_checkpoints_cannot_be_resumed(tmp_path: Path, refused: Refusal) -> None:
    (tmp_path / "config.yaml").write_text("model: mlp\ndata: digits\n")
    assert "there is no checkpoint in" in refused("train", "--resume", tmp_path)


class TestWeights:
    def test_of_another_shape(self, tmp_path: Path, refused: Refusal) -> None:
        from polyrhythm.models.create import create_model

        wide = create_model("mlp(hidden=[32])", classes=10, image_shape=(1, 8, 8)).state_dict()
        save_file(wide, tmp_path / "wide.safetensors")
        complaint = refused(
            "train", *TINY, "--model", "mlp(hidden=[64])", "--weights", tmp_path / "wide.safetensors"
        )
        assert "does not fit the model" in complaint
        first = next(iter(wide))
        assert f"{first} is 32×64 where the model has 64×64" in complaint

    def test_of_another_model(self, tmp_path: Path, refused: Refusal) -> None:
        torch.save({"head.weight": torch.zeros(3)}, tmp_path / "other.pt")
        complaint = refused("train", *TINY, "--weights", tmp_path / "other.pt")
        assert "holds weights of another model" in complaint
        assert "head.weight" in complaint

    def test_garbage(self, tmp_path: Path, refused: Refusal) -> None:
        (tmp_path / "garbage.safetensors").write_bytes(b"not weights at all")
        assert "damaged or no weights file" in refused(
            "train", *TINY, "--weights", tmp_path / "garbage.safetensors"
        )


def test_a_model_for_which_there_is_no_room_is_refused_at_once(
    refused: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    complaint = refused("train", *TINY, "--out", "run")
    assert re.fullmatch(
        r"run has no room for the model, [\d,]+ bytes \(No space left on device\): make some, or name another folder "
        r"with --out",
        complaint,
    )
