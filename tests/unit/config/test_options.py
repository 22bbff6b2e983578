from __future__ import annotations

import typing
from pathlib import Path

import pytest

import polyrhythm
from polyrhythm.config.run_config import (
    EvaluateOptions,
    RunConfig,
    RunOptions,
    refuse_real_only,
    refuse_unknown,
)
from polyrhythm.errors import RequestError


def test_an_editor_sees_every_field_of_a_recipe_with_its_type() -> None:
    fields = {name: info.annotation for name, info in RunConfig.model_fields.items()}
    assert typing.get_type_hints(RunOptions) == fields


def test_options_are_told_from_unknown_ones() -> None:
    refuse_unknown(["dense", "image_size"], EvaluateOptions)
    with pytest.raises(RequestError, match="unknown option 'dens': did you mean dense"):
        refuse_unknown(["dens"], EvaluateOptions)


@pytest.mark.parametrize("verb", [polyrhythm.evaluate, polyrhythm.robustness])
def test_no_option_of_a_test_is_passed_over(verb: typing.Callable[..., object], tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="unknown option 'imagesize': did you mean image_size"):
        verb(tmp_path, imagesize=32)


def test_averaging_passes_over_no_option(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="unknown option 'imagesize'"):
        polyrhythm.average(tmp_path, tmp_path / "mean.safetensors", imagesize=32)


def test_simulations_refuse_what_is_about_processes() -> None:
    refuse_real_only(["workers"])
    with pytest.raises(RequestError, match="workers cannot join them: leave --notice-s out"):
        refuse_real_only(["workers", "notice_s"])


def test_sizes_of_tests_have_the_bounds_of_training(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="image_size should be less than or equal to 16384"):
        polyrhythm.evaluate(tmp_path, image_size=999999999)
    with pytest.raises(RequestError, match="batch_size should be less than or equal to 10000000"):
        polyrhythm.evaluate(tmp_path, batch_size=10**26)
