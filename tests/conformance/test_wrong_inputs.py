"""Wrong requests are refused in one line, with status 2, at once, and leave nothing behind."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from conformance.wrong_inputs import CLUSTER, LONG, SIMULATE, TRAIN, Wrong, complaint_about, drawn
from polyrhythm.data.open import open_data
from polyrhythm.errors import RequestError, printable
from polyrhythm.user_files import check_new_folder, check_output, parse_yaml

SEEDS = range(100_000, 100_040)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_drawn_wrong_input_is_refused_in_one_line(seed: int) -> None:
    bad, took_s = complaint_about(drawn(seed))
    assert not bad, drawn(seed)
    assert took_s < 30


def written(name: str, text: str) -> Callable[[], None]:
    return lambda: [Path(name).write_text(text), None][1]


FOUND = {
    "300 letters": ([*TRAIN, "--out", LONG], None),
    "pipe as recipe": (["train", "pipe.yaml", "--out", "run"], lambda: os.mkfifo("pipe.yaml")),
    "device as recipe": (["train", "/dev/zero", "--out", "run"], None),
    "pipe as cluster": ([*SIMULATE, "pipe.yaml", "--out", "run"], lambda: os.mkfifo("pipe.yaml")),
    "a billion hosts": (
        [*SIMULATE, "c.yaml", "--out", "run"],
        written("c.yaml", CLUSTER.replace("count: 2", "count: 1000000000")),
    ),
    "key twice": (
        ["train", "r.yaml", *TRAIN[1:], "--out", "run"],
        written("r.yaml", "workers: 2\nworkers: 3\n"),
    ),
    "base 60": (["train", "r.yaml", *TRAIN[1:], "--out", "run"], written("r.yaml", "workers: 1:30\n")),
    "sites": ([*TRAIN, "--strategy", "gaia(sites=5)", "--out", "run"], None),
    "groups": ([*TRAIN, "--strategy", "hierarchical(groups=5)", "--out", "run"], None),
    "replicas": ([*TRAIN, "--strategy", "mixed(replicas=5)", "--out", "run"], None),
    "parts": ([*TRAIN, "--freeze", "body,foo", "--out", "run"], None),
    "option after a script": (["run", "s.py", "--workers", "0"], written("s.py", "")),
    "profile": (["profile", "--data", "digits", "--model", "mlp", "--out", "/proc/p.yaml"], None),
    "preview": (["augment", "flip", "--data", "digits", "--preview", "/proc/a.png"], None),
    "pipe as token": (
        [*TRAIN, "--listen", "0", "--token-file", "pipe", "--out", "run"],
        lambda: os.mkfifo("pipe"),
    ),
    "pipe as table": (["train", "--data", "pipe.csv", "--out", "run"], lambda: os.mkfifo("pipe.csv")),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_was_not_refused_well_is(name: str) -> None:
    arguments, prepare = FOUND[name]
    assert complaint_about(Wrong(name, arguments, prepare or (lambda: None)))[0] == ""


def test_a_pipe_among_pictures_is_named_and_not_waited_for(tmp_path: Path) -> None:
    for name in ("a", "b"):
        folder = tmp_path / "train" / name
        folder.mkdir(parents=True)
        for number in range(4):
            Image.new("L", (8, 8), number).save(folder / f"{number}.png")
    os.mkfifo(tmp_path / "train" / "b" / "pipe.png")
    with pytest.raises(RequestError, match=r"b/pipe\.png.*no file, but a pipe"):
        open_data(str(tmp_path), image_size=8)
    assert len(open_data(str(tmp_path), image_size=8, skip_unreadable=True).skipped) == 1


def test_names_of_classes_command_no_terminal(tmp_path: Path) -> None:
    for name in ("\x1b[31mred", "two\nlines", "plain é"):
        folder = tmp_path / "train" / name
        folder.mkdir(parents=True)
        for number in range(5):
            Image.new("L", (8, 8), number).save(folder / f"{number}.png")
    assert open_data(str(tmp_path), image_size=8).classes == ("\\x1b[31mred", "plain é", "two\\nlines")


def test_printable_text_stays() -> None:
    for text in ("ä … 漢字 \udce9", "", "C:\\n"):
        assert printable(text) == text
    assert printable("a\x1b]0;t\x07\r\x85\u2028") == "a\\x1b]0;t\\x07\\r\\x85\\u2028"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: 1:30", {"a": "1:30"}),
        ("a: 1:30.5", {"a": "1:30.5"}),
        ("a: 010", {"a": "010"}),
        ("a: [0, -3, 1_000, 0x10, 0b11]", {"a": [0, -3, 1000, 16, 3]}),
        ("a: [1.5, -0.25, 1.e+3, .5, .inf]", {"a": [1.5, -0.25, 1000.0, 0.5, float("inf")]}),
        ("a: [true, ~, text]", {"a": [True, None, "text"]}),
        ("a: &b {c: 1}\nd: {<<: *b, e: 2}", {"a": {"c": 1}, "d": {"c": 1, "e": 2}}),
    ],
)
def test_yaml_means_what_it_says(text: str, value: object) -> None:
    assert parse_yaml(text, "it") == value


def test_a_key_given_twice_is_named_with_its_line() -> None:
    with pytest.raises(RequestError, match=r"^it: b is given twice \(line 3\): leave one of them out$"):
        parse_yaml("a: 1\nb: 2\nb: 3\n", "it")


def test_outputs_are_tried_and_nothing_stays(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("kept")
    check_output(tmp_path / "there")
    check_output(tmp_path / "new")
    check_new_folder(tmp_path / "a" / "b")
    check_new_folder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    assert (tmp_path / "there").read_text() == "kept"
    for place in (tmp_path, tmp_path / "no" / "file", Path("/proc/file"), tmp_path / LONG):
        with pytest.raises(RequestError):
            check_output(place)
    for place in (tmp_path / "there" / "run", Path("/proc/run"), tmp_path / "c" / LONG):
        with pytest.raises(RequestError, match="cannot write into"):
            check_new_folder(place)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
