import sys
from importlib import import_module

import pytest
import torch

from polyrhythm.models import create as torchvision_operators
from polyrhythm.models.create import define_missing_operators


def test_torchvision_can_be_imported_afterwards():
    define_missing_operators()
    define_missing_operators()
    assert import_module("torchvision.models").resnet18(num_classes=3).fc.out_features == 3


@pytest.mark.parametrize("imported", [True, False])
def test_nothing_is_defined_where_torchvision_brings_its_own(monkeypatch, imported):
    def define(*_):
        raise AssertionError("defined although torchvision has it")

    monkeypatch.setattr(torch.library, "Library", define)
    if imported:
        monkeypatch.setitem(sys.modules, "torchvision", torch)
    else:
        monkeypatch.delitem(sys.modules, "torchvision", raising=False)
        monkeypatch.setattr(torchvision_operators, "_compiled_library_loads", lambda: True)
    assert define_missing_operators.__wrapped__() is None


@pytest.mark.parametrize("loads", [True, False])
def test_the_compiled_library_is_tried(monkeypatch, tmp_path, loads):
    tried = []

    def load(file):
        tried.append(file)
        if not loads:
            raise OSError("undefined symbol")

    spec = type("Spec", (), {"submodule_search_locations": [str(tmp_path)]})
    (tmp_path / "_C.so").touch()
    monkeypatch.setattr(torchvision_operators, "find_spec", lambda name: spec)
    monkeypatch.setattr(torch.ops, "load_library", load)
    assert torchvision_operators._compiled_library_loads() is loads
    assert tried == [tmp_path / "_C.so"]
