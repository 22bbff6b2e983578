"""Nothing that comes from a disk or a wire is unpickled, evaluated, or extracted: whoever would do so is found here."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import polyrhythm

SOURCES = sorted(Path(polyrhythm.__file__).parent.rglob("*.py"))
FORBIDDEN_MODULES = {"cloudpickle", "dill", "jsonpickle", "joblib", "marshal", "pickle", "shelve"}
FORBIDDEN_CALLS = {
    *("eval", "exec", "extract", "extractall", "unpack_archive"),
    *("unsafe_load", "full_load", "all_gather_object", "broadcast_object_list", "gather_object"),
    *("recv_object_list", "scatter_object_list"),
}
ONLY_NAMES_ITS_ERROR = Path("launch/children.py")
"""A job that cannot be sent to a child; the child is this program's own."""
RUNS_THE_SCRIPT = Path("launch/rank_server.py")
"""The script that the user has named on the command line, in a fork instead of a new interpreter."""


def offences(code: str) -> list[str]:
    """Names what a module does that could execute what it reads."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names if name.name.split(".")[0] in FORBIDDEN_MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FORBIDDEN_MODULES:
            found.append(str(node.module))
        elif isinstance(node, ast.Call):
            found += called(node)
    return found


def called(node: ast.Call) -> list[str]:
    function = node.func
    if isinstance(function, ast.Name):
        return [function.id] if function.id in FORBIDDEN_CALLS else []
    if not isinstance(function, ast.Attribute):
        return []
    if function.attr in FORBIDDEN_CALLS - {"eval"}:  # a network's `eval` is harmless
        return [function.attr]
    owner = function.value.id if isinstance(function.value, ast.Name) else ""
    told = {given.arg: ast.unparse(given.value) for given in node.keywords}
    if (owner, function.attr) == ("yaml", "load"):
        loader = told.get("Loader") or "".join(map(ast.unparse, node.args[1:]))
        return [] if "Safe" in loader else ["yaml.load"]
    unpickles = (owner, function.attr) == ("torch", "load") and told.get("weights_only") != "True"
    return [f"{owner}.load"] if unpickles or told.get("allow_pickle", "False") != "False" else []


def test_no_module_executes_what_it_reads() -> None:
    suspicious = (*FORBIDDEN_MODULES, *FORBIDDEN_CALLS, ".load(")
    found = {}
    for path in SOURCES:
        code = path.read_text()
        if any(word in code for word in suspicious):
            found[path.relative_to(SOURCES[0].parent)] = offences(code)
    assert found.pop(ONLY_NAMES_ITS_ERROR) == ["pickle"]
    assert "pickle.load" not in (SOURCES[0].parent / ONLY_NAMES_ITS_ERROR).read_text()
    assert found.pop(RUNS_THE_SCRIPT) == ["exec"]
    assert len(found) > 3
    assert {path: each for path, each in found.items() if each} == {}


@pytest.mark.parametrize(
    ("code", "offence"),
    [
        ("import pickle", ["pickle"]),
        ("from pickle import loads", ["pickle"]),
        ("torch.load(file)", ["torch.load"]),
        ("torch.load(file, weights_only=False)", ["torch.load"]),
        ("torch.load(file, weights_only=True)", []),
        ("np.load(file)", []),
        ("np.load(file, allow_pickle=True)", ["np.load"]),
        ("yaml.load(text, yaml.Loader)", ["yaml.load"]),
        ("yaml.load(text, Loader=yaml.CSafeLoader)", []),
        ("archive.extractall(folder)", ["extractall"]),
        ("eval(text)", ["eval"]),
        ("model.eval()", []),
    ],
)
def test_what_could_is_found(code: str, offence: list[str]) -> None:
    assert offences(code) == offence
