"""The public namespace: each name is there, documented, and costs nothing until it is used."""

import inspect
import subprocess
import sys

import pytest

import polyrhythm


@pytest.mark.parametrize("name", polyrhythm.__all__)
def test_every_public_name_is_there_and_documented(name):
    assert inspect.getdoc(getattr(polyrhythm, name))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        polyrhythm.trian  # noqa: B018


def test_importing_the_package_does_not_import_torch():
    code = "import sys, polyrhythm; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=100).returncode == 0


def test_a_public_function_is_not_hidden_by_a_folder_of_its_name() -> None:
    code = "import polyrhythm, polyrhythm.strategies.strategy; print(callable(polyrhythm.strategies))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "True\n"
    )
