from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import nn

from polyrhythm.config.recipe import as_command, configure, read_recipe, read_run, write_recipe
from polyrhythm.config.run_config import RunConfig
from polyrhythm.errors import RequestError
from polyrhythm.training.optimizers.sgd import SGD


def recipe(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_keys_are_as_on_the_command_line(tmp_path: Path) -> None:
    read = read_recipe(recipe(tmp_path, "batch-size: 3\nimage_size: 8\n"))
    assert read == {"batch_size": 3, "image_size": 8}


def test_later_layers_win() -> None:
    made = configure({"workers": 2, "seed": 1}, {"workers": 3}, {})
    assert (made.workers, made.seed, made.batch_size) == (3, 1, 64)


def test_how_long_is_said_by_the_last_layer_that_says_it() -> None:
    config = configure({"epochs": 3}, {"updates": 100}, {"seed": 1})
    assert (config.epochs, config.updates) == (None, 100)
    config = configure({"updates": 100}, {"epochs": 3, "updates": None})
    assert (config.epochs, config.updates) == (3, None)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a: [", "is not YAML: while parsing a flow node"),
        ("a: 1\n\tb: 2", "is not YAML"),
        ("\x00", "is not YAML"),
        ("- workers\n- 2", "must be lines of `key: value`"),
        ("workers", "must be lines of `key: value`"),
        ("", "must be lines of `key: value`"),
        ("3: 4", "must be lines of `key: value`"),
        ("!!python/object/apply:os.system ['true']", "is not YAML"),
    ],
)
def test_what_is_no_recipe_is_refused(text: str, complaint: str, tmp_path: Path) -> None:
    path = recipe(tmp_path, text)
    with pytest.raises(RequestError) as refusal:
        read_recipe(path)
    assert str(refusal.value).startswith(f"the recipe {path} ")
    assert complaint in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_recipe_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_bytes(b"\xff\xfe\x80")
    with pytest.raises(RequestError, match="is not YAML: 'utf-8' codec"):
        read_recipe(tmp_path / "recipe.yaml")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("wrokers: 2", "unknown key of the run 'wrokers': did you mean workers?"),
        ("batch size: 3", "unknown key of the run 'batch size': did you mean batch_size"),
        ("workers: two", "the run: workers should be a whole number (given 'two')"),
        ("workers: 2.5", "the run: workers should be a whole number (given 2.5)"),
        ("workers: 2.0", "the run: workers should be a whole number (given 2.0)"),
        ("workers: true", "the run: workers should be a whole number (given True)"),
        ("workers: [2]", "the run: workers should be a whole number (given [2])"),
        ("workers:", "the run: workers should be a whole number (given None)"),
        ("epochs: 0", "the run: epochs should be greater than or equal to 1 (given 0)"),
        ("seed: 1e3", "the run: seed should be a whole number (given '1e3')"),
        ("label_smoothing: true", "the run: label_smoothing should be a number (given True)"),
        ("augment: [flip]", "the run: augment should be a valid string (given ['flip'])"),
        ("skip_unreadable: 3", "the run: skip_unreadable should be a valid boolean"),
    ],
)
def test_wrong_values_are_refused(line: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError) as refusal:
        configure(read_recipe(recipe(tmp_path, line)))
    assert str(refusal.value).startswith(complaint)


@pytest.mark.parametrize(
    "values", [{}, {"workers": 3, "optimizer": SGD(lr=0.5, momentum=0.5), "augment": "crop; flip"}]
)
def test_a_written_recipe_gives_the_same_run(values: dict[str, Any], tmp_path: Path) -> None:
    made = configure(values)
    write_recipe(made, tmp_path / "config.yaml")
    again = configure(read_recipe(tmp_path / "config.yaml"))
    plain = {"optimizer": str(made.optimizer)} if made.optimizer is not None else {}
    assert again == made.model_copy(update=plain)


def test_objects_of_ones_own_are_said_to_be_so(tmp_path: Path) -> None:
    write_recipe(configure({"model": nn.Linear(1, 1)}), tmp_path / "config.yaml")
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["model"] == "<your own Linear>"


def test_every_field_says_what_it_is() -> None:
    for name, info in RunConfig.model_fields.items():
        assert info.description, name
        assert info.description.endswith("."), name


def test_a_command_has_every_option_that_is_set_and_can_be_pasted() -> None:
    options = {"batch_size": 8, "notice_s": 0, "drop_last": True, "listen": None, "timings": False}
    text = as_command(["train", "my recipe.yaml"], options | {"strategy": 'stages("easgd; ssp")'})
    command = ["--batch-size", "8", "--notice-s", "0", "--drop-last", "--strategy", 'stages("easgd; ssp")']
    assert shlex.split(text) == ["polyrhythm", "train", "my recipe.yaml", *command]


@pytest.mark.parametrize(("former", "today"), [("drawn", "dynamic"), ("fixed", "static"), ("auto", "auto")])
def test_former_names_of_options_are_accepted(tmp_path: Path, former: str, today: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"deal: {former}\n")
    assert configure({"deal": former}).batches == today
    assert configure({"pixels": "centred"}).pixels == "centered"
    assert configure({"batches": "auto"}, read_recipe(path)).batches == today
    assert configure(read_recipe(path), {"batches": "static"}).batches == "static"


def test_a_run_of_an_earlier_version_keeps_its_assignment(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("deal: drawn\n")
    assert configure(read_run(path)).batches == "dynamic"
    path.write_text("workers: 2\n")
    assert configure(read_run(path)).batches == "static"


def test_an_option_by_both_of_its_names_is_refused() -> None:
    with pytest.raises(RequestError, match=r"^deal is the former name of batches: leave it out$"):
        configure({"deal": "drawn", "batches": "dynamic"})
