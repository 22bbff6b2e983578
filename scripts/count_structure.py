"""Count what a reader of the source has to find a way through: files, modules with one user, classes, functions.

python scripts/count_structure.py                      a table
python scripts/count_structure.py --json               the same figures for programs
python scripts/count_structure.py --list one_importer  the names behind a figure; see `LISTS`
python scripts/count_structure.py --root ../elsewhere  another working tree

Nothing is imported or run: everything is read from syntax trees, and found by names, so that files may move. The
few names of classes that figures depend on stand in the table at the top; a name that is nowhere is reported.

Definitions:

- importer of a module: another module of the package that imports it or a name of it, anywhere in its text (inside
  functions and under TYPE_CHECKING too). Packages (`__init__.py`) are no modules here, but may import.
- choice folder: a package that some string of the source names, in which every module holds a class of its own name;
  specs choose from such folders, so that their modules need no importer.
- one method: a class whose body defines exactly one function other than `__init__`, properties and special methods
  included. Apart: with and without bases; `Protocol` is a base. And of which sort: choices are what specs choose, a
  class a module of a choice folder; ports only say what others offer, in a method without statements, or one that
  is abstract or raises `NotImplementedError`; libraries' bases (torch's, pydantic's) ask for the method.
- function: every `def`, nested ones too; its length goes from `def` to its last line, with its docstring.
- comment line: a line that holds nothing but a comment; docstring lines: of modules, classes and functions.
- contract: what the author of a new strategy must know. `own` counts the public methods and properties in the bodies
  of the classes of `CONTRACT`, and their annotated fields that have no value. `with_bases` adds those of their bases
  in the project, except `BASES_OF_CHOICES`. `with_settings` adds the fields without a value of `SETTINGS` and `VALUES`.
  What others may ask a value is not for the author to write or to call; it stands apart, as `asked_of_values`.
- owned files: the modules that imports lead to from a strategy's module, and from no other strategy's module and no
  module outside the folder of strategies, on ways that do not pass through a package of `WATCHING`.
- private access: `x._y` where x is not self or cls, and where `_y` is not one of `PUBLIC_IN_SPITE`. Beside it:
  imports of names that begin with `_`, strings that name something private (for `setattr` and monkeypatching), and
  how many of all `x._y` there are when self and cls count as well.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import statistics
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

PACKAGE = "polyrhythm"
STRATEGY = "Strategy"
"""The class that every strategy's configuration derives from."""
CONTRACT = (STRATEGY, "WorkerPart", "ServerPart")
"""Who writes a strategy has these before them; add the classes that take their place or hold their declarations."""
SETTINGS = ("WorkerSetting", "ServerSetting")
"""What the parts are given."""
VALUES = ("Traits", "FaultPolicy")
"""What a strategy declares, and others read."""
BASES_OF_CHOICES = ("Config", "BaseModel", "Protocol", "NamedTuple")
"""Common to all choices, not to strategies; where a base's own names do not count."""
HARD = ("mixed", "ad_psgd", "gaia", "sandblaster")
"""Strategies whose own files are counted."""
WATCHING = ("simulation", "verification")
"""Packages that look at strategies without being part of them."""
VERBS = "cli"
"""The package of the command line."""
DIALECT_OPENINGS = ("Gives", "Takes back", "Whoever", "Who", "Says", "Tells", "Lets", "Hears")
"""Beginnings of docstrings that no other codebase has."""
DIALECT_PHRASES = ("whoever", "in vain", "what for", "gets over", "is told", "somebody", "anew")
"""The same, anywhere in the source; counted by lines."""
PUBLIC_IN_SPITE = {"_replace", "_asdict", "_fields", "_make", "_exit"}
"""Of named tuples and of `os`: documented, though they begin with an underscore."""
LISTS = (
    "one_importer",
    "no_importer",
    "one_method",
    "contract",
    "owned",
    "private_in_src",
    "private_in_tests",
)
"""What `--list` can show."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """A file of the source.

    Attributes:
        name: of the module, with dots.
        path: of the file.
        text: of the file.
        tree: of its syntax.
    """

    name: str
    path: Path
    text: str
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        """Whether it is the `__init__.py` of a folder."""
        return self.path.name == "__init__.py"

    @property
    def folder(self) -> str:
        """The package that a module is in."""
        return self.name.rpartition(".")[0]

    @property
    def room(self) -> str:
        """The uppermost folder, such as `launch`; the module's name for what lies beside the folders."""
        return [*self.name.split("."), ""][1]

    @property
    def lines(self) -> int:
        """Number of lines."""
        return len(self.text.splitlines())


class Tree:
    """A working tree: its sources, and who imports whom.

    Args:
        root: of the repository.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.sources = {source.name: source for source in _read(root / "src")}

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """For each module, the modules of the package that it imports."""
        return {name: set(self._imported(source)) - {name} for name, source in self.sources.items()}

    @cached_property
    def importers(self) -> dict[str, set[str]]:
        """For each module, the modules that import it."""
        found: dict[str, set[str]] = defaultdict(set)
        for name, imported in self.imports.items():
            for other in imported:
                found[other].add(name)
        return found

    @property
    def modules(self) -> list[Source]:
        """All sources but packages."""
        return [source for source in self.sources.values() if not source.is_package]

    @cached_property
    def choice_folders(self) -> set[str]:
        """The packages that specs choose from."""
        named = {
            node.value
            for source in self.sources.values()
            for node in ast.walk(source.tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        inside: dict[str, list[Source]] = defaultdict(list)
        for source in self.modules:
            inside[source.folder].append(source)
        return {
            folder for folder, sources in inside.items() if folder in named and all(map(_is_choice, sources))
        }

    @cached_property
    def classes(self) -> list[tuple[Source, ast.ClassDef]]:
        """Every class with the file it is in."""
        return [
            (source, node)
            for source in self.sources.values()
            for node in ast.walk(source.tree)
            if isinstance(node, ast.ClassDef)
        ]

    def class_named(self, name: str) -> tuple[Source, ast.ClassDef] | None:
        """Return the class of this name; None if there is none, or more than one, of which none can be meant."""
        found = [(source, node) for source, node in self.classes if node.name == name]
        return found[0] if len(found) == 1 else None

    def reach(self, start: Iterable[str]) -> set[str]:
        """Return the modules that imports lead to from these, themselves included; not through `WATCHING` packages."""
        seen: set[str] = set()
        waiting = list(start)
        while waiting:
            name = waiting.pop()
            if name not in seen and self.sources[name].room not in WATCHING:
                seen.add(name)
                waiting += self.imports[name]
        return seen

    def _imported(self, source: Source) -> Iterator[str]:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name in self.sources)
            elif isinstance(node, ast.ImportFrom):
                home = _absolute(source, node)
                for alias in node.names:
                    inner = f"{home}.{alias.name}"
                    yield from (
                        name for name in (inner if inner in self.sources else home,) if name in self.sources
                    )


def _absolute(source: Source, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = source.name.split(".")
    kept = parts[: len(parts) - node.level + source.is_package]
    return ".".join(kept + ([node.module] if node.module else []))


def _read(folder: Path) -> Iterator[Source]:
    for path in sorted((folder / PACKAGE).rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        text = path.read_text()
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        yield Source(name, path, text, ast.parse(text))


def _is_choice(source: Source) -> bool:
    return any(
        isinstance(node, ast.ClassDef) and node.name.lower() == _bare(source) for node in source.tree.body
    )


def _bare(source: Source) -> str:
    """Return the name of a module without underscores, as that of its choice."""
    return source.name.rpartition(".")[2].replace("_", "")


def files(tree: Tree) -> dict[str, Any]:
    """Count files, lines, comments and docstrings."""
    texts = [source.text for source in tree.sources.values()]
    lines = sum(source.lines for source in tree.sources.values())
    comments = sum(_comment_lines(text) for text in texts)
    docstring_lines = sum(_docstring_lines(source.tree) for source in tree.sources.values())
    return {
        "source_files": len(tree.sources),
        "packages": len(tree.sources) - len(tree.modules),
        "choices": sum(source.folder in tree.choice_folders for source in tree.modules),
        "source_lines": lines,
        "median_lines": statistics.median(source.lines for source in tree.sources.values()),
        "comment_lines": comments,
        "comment_share": round(comments / lines, 4),
        "docstring_share": round(docstring_lines / lines, 4),
        "test_lines": sum(len(path.read_text().splitlines()) for path in (tree.root / "tests").rglob("*.py")),
    }


def _comment_lines(text: str) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type == tokenize.COMMENT and token.line.strip().startswith("#") for token in tokens)


def _docstrings(tree: ast.Module) -> Iterator[ast.Expr]:
    for node in ast.walk(tree):
        if isinstance(node, Function | ast.ClassDef | ast.Module) and ast.get_docstring(node) is not None:
            first = node.body[0]
            assert isinstance(first, ast.Expr)
            yield first


def _docstring_lines(tree: ast.Module) -> int:
    return sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in _docstrings(tree))


def importing(tree: Tree) -> dict[str, Any]:
    """Count the modules with one importer, and with none."""
    one = one_importer(tree)
    choices = [source for source in one if source.folder in tree.choice_folders]
    verbs = [source for source in one if source.room == VERBS and source not in choices]
    rest = [source for source in one if source not in choices and source not in verbs]
    none = [source for source in tree.modules if not tree.importers[source.name]]
    return {
        "one_importer": len(one),
        "of_choice_folders": len(choices),
        "of_verbs": len(verbs),
        "of_the_rest": len(rest),
        "in_the_same_folder": sum(map(_beside(tree), one)),
        "rest_in_the_same_folder": sum(map(_beside(tree), rest)),
        "no_importer": len(none),
        "no_importer_and_no_choice": sum(source.folder not in tree.choice_folders for source in none),
    }


def one_importer(tree: Tree) -> list[Source]:
    """Return the modules that exactly one other imports."""
    return [source for source in tree.modules if len(tree.importers[source.name]) == 1]


def _beside(tree: Tree) -> Any:
    def beside(source: Source) -> bool:
        importer = tree.sources[next(iter(tree.importers[source.name]))]
        return source.folder == (importer.name if importer.is_package else importer.folder)

    return beside


def classes(tree: Tree) -> dict[str, Any]:
    """Count classes, and those with one method beside `__init__`."""
    one = one_method(tree)
    sorts = Counter(sort_of_one_method(tree, source, node) for source, node in one)
    with_bases = sum(bool(node.bases) for _, node in one)
    return {
        "classes": len(tree.classes),
        "one_method": len(one),
        "one_method_without_bases": len(one) - with_bases,
        "one_method_with_bases": with_bases,
        **{f"one_method_{sort}": sorts[sort] for sort in ("choices", "ports", "of_libraries", "others")},
    }


def one_method(tree: Tree) -> list[tuple[Source, ast.ClassDef]]:
    """Return the classes with exactly one function beside `__init__` in their bodies."""

    def methods(node: ast.ClassDef) -> int:
        return sum(isinstance(inner, Function) and inner.name != "__init__" for inner in node.body)

    return [(source, node) for source, node in tree.classes if methods(node) == 1]


def sort_of_one_method(tree: Tree, source: Source, node: ast.ClassDef) -> str:
    """Return why a class has one method: one of `choices`, `ports`, `of_libraries` and `others`."""
    if source.folder in tree.choice_folders and node.name.lower() == _bare(source):
        return "choices"
    (method,) = (inner for inner in node.body if isinstance(inner, Function) and inner.name != "__init__")
    decorators = {ast.unparse(each).rpartition(".")[2] for each in method.decorator_list}
    if "abstractmethod" in decorators or all(map(_says_nothing, method.body)):
        return "ports"
    known = {each.name for _, each in tree.classes}
    foreign = [
        base for base in _base_names(node) if base not in known and base not in ("Generic", "NamedTuple")
    ]
    return "of_libraries" if foreign or decorators & {"model_validator", "field_validator"} else "others"


def _says_nothing(statement: ast.stmt) -> bool:
    raises = isinstance(statement, ast.Raise) and statement.exc is not None
    constant = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return constant or (raises and "NotImplementedError" in ast.unparse(statement))


def _base_names(node: ast.ClassDef) -> list[str]:
    """Return the last names of a class's bases, without type arguments."""
    bases = (base.value if isinstance(base, ast.Subscript) else base for base in node.bases)
    return [ast.unparse(base).rpartition(".")[2] for base in bases]


def functions(tree: Tree) -> dict[str, Any]:
    """Count functions and their lengths."""
    lengths = sorted(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for source in tree.sources.values()
        for node in ast.walk(source.tree)
        if isinstance(node, Function)
    )
    return {
        "functions": len(lengths),
        "median_length": statistics.median(lengths),
        "length_of_95_percent": lengths[int(0.95 * len(lengths))],
        "longest": lengths[-1],
        "at_most_3_lines": sum(length <= 3 for length in lengths),
    }


def dialect(tree: Tree) -> dict[str, Any]:
    """Count docstrings and lines in words that are this project's own."""
    openings: Counter[str] = Counter(dict.fromkeys(DIALECT_OPENINGS, 0))
    number = 0
    for source in tree.sources.values():
        for node in _docstrings(source.tree):
            number += 1
            text = ast.literal_eval(node.value).strip()
            openings.update(opening for opening in DIALECT_OPENINGS if re.match(rf"{opening}\b", text))
    lines = [line.lower() for source in tree.sources.values() for line in source.text.splitlines()]
    phrases = {
        phrase: sum(re.search(rf"\b{phrase}\b", line) is not None for line in lines)
        for phrase in DIALECT_PHRASES
    }
    return {
        "docstrings": number,
        "in_dialect": openings.total(),
        "openings": dict(openings),
        "lines_with": phrases,
    }


def contract(tree: Tree) -> dict[str, Any]:
    """Count the names that the author of a strategy must know."""
    return {
        "own": len(contract_names(tree, bases=False)),
        "with_bases": len(contract_names(tree, bases=True)),
        "with_settings": len(contract_names(tree, bases=True) + settings_names(tree)),
        "asked_of_values": sum(len(list(_methods(node))) for name in VALUES for node in _only(tree, name)),
        "not_found": [name for name in (*CONTRACT, *SETTINGS, *VALUES) if tree.class_named(name) is None],
    }


def contract_names(tree: Tree, *, bases: bool) -> list[str]:
    """Return the methods and the fields without a value of the contract's classes, as `Class.name`."""
    found: dict[str, None] = {}  # a set in order: what a class overrides counts once
    for name in CONTRACT:
        for node in _with_bases(tree, name) if bases else _only(tree, name):
            found.update({f"{name}.{inner}": None for inner in (*_methods(node), *_required(node))})
    return list(found)


def settings_names(tree: Tree) -> list[str]:
    """Return the fields without a value of what parts are given and strategies declare, as `Class.name`."""
    classes = [(name, node) for name in (*SETTINGS, *VALUES) for node in _only(tree, name)]
    return [f"{name}.{inner}" for name, node in classes for inner in _required(node)]


def _only(tree: Tree, name: str) -> list[ast.ClassDef]:
    found = tree.class_named(name)
    return [] if found is None else [found[1]]


def _with_bases(tree: Tree, name: str) -> Iterator[ast.ClassDef]:
    for node in _only(tree, name):
        yield node
        for base in _base_names(node):
            if base not in BASES_OF_CHOICES:
                yield from _with_bases(tree, base)


def _methods(node: ast.ClassDef) -> Iterator[str]:
    for inner in node.body:
        if isinstance(inner, Function) and not inner.name.startswith("_"):
            yield inner.name


def _required(node: ast.ClassDef) -> Iterator[str]:
    for inner in node.body:
        if isinstance(inner, ast.AnnAssign) and inner.value is None and isinstance(inner.target, ast.Name):
            yield inner.target.id


def owned(tree: Tree) -> dict[str, Any]:
    """Count the files and lines that a hard strategy has to itself."""
    own = {name: owned_by(tree, name) for name in HARD}
    return {
        name: {"files": len(found), "lines": sum(tree.sources[each].lines for each in found)}
        for name, found in own.items()
    }


def owned_by(tree: Tree, name: str) -> list[str]:
    """Return the modules that nothing but this strategy leads to, itself included; empty if there is no such module."""
    room = _room_of_strategies(tree)
    strategies = [
        source.name for source in tree.modules if source.room == room and source.folder in _families(tree)
    ]
    mine = [each for each in strategies if each.rpartition(".")[2] == name]
    if not mine:
        return []
    others = [each for each in strategies if each not in mine]
    outside = [source.name for source in tree.modules if source.room not in (room, *WATCHING)]
    return sorted(tree.reach(mine) - tree.reach(others + outside))


def _room_of_strategies(tree: Tree) -> str:
    found = tree.class_named(STRATEGY)
    return found[0].room if found else ""


def _families(tree: Tree) -> set[str]:
    """Return the choice folders in which a class derives from the strategies' base, however far."""
    derived = {STRATEGY}
    while True:
        more = {node.name for _, node in tree.classes if derived & {*_base_names(node)}} - derived
        if not more:
            break
        derived |= more
    homes = {source.folder for source, node in tree.classes if node.name in derived - {STRATEGY}}
    return homes & tree.choice_folders


def privacy(tree: Tree) -> dict[str, Any]:
    """Count what reaches into privates, in the source and in the tests."""
    return {where: _privacy(tree.root / where) for where in ("src", "tests")}


def _privacy(folder: Path) -> dict[str, int]:
    found = Counter({"accesses": 0, "imports": 0, "strings": 0, "with_self": 0})
    for path in sorted(folder.rglob("*.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and _is_private(node.attr):
                found["with_self"] += 1
                found["accesses"] += not _is_own(node)
            elif isinstance(node, ast.ImportFrom):
                found["imports"] += sum(_is_private(alias.name) for alias in node.names)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found["strings"] += re.fullmatch(r"([\w.]+\.)?_[a-z]\w*", node.value) is not None
    return dict(found)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC_IN_SPITE and name != "_"


def _is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def private_accesses(folder: Path) -> Iterator[str]:
    """Yield `file:line: x._y` of every access to another's private."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and _is_private(node.attr) and not _is_own(node):
                yield f"{path.relative_to(folder.parent)}:{node.lineno}: {ast.unparse(node)}"


def count(tree: Tree) -> dict[str, Any]:
    """Count everything."""
    return {
        "files": files(tree),
        "importers": importing(tree),
        "classes": classes(tree),
        "functions": functions(tree),
        "dialect": dialect(tree),
        "contract": contract(tree),
        "owned": owned(tree),
        "private": privacy(tree),
    }


def names(tree: Tree, kind: str) -> list[str]:
    """Return the names behind a figure, one of `LISTS`."""
    importers = tree.importers
    if kind == "one_importer":
        beside = _beside(tree)
        return [
            f"{source.name} <- {next(iter(importers[source.name]))}{' (same folder)' * beside(source)}"
            for source in one_importer(tree)
        ]
    if kind == "no_importer":
        return [
            source.name
            for source in tree.modules
            if not importers[source.name] and source.folder not in tree.choice_folders
        ]
    if kind == "one_method":
        return [
            f"{sort_of_one_method(tree, source, node)}: {source.name}: {node.name}({', '.join(_base_names(node))})"
            for source, node in one_method(tree)
        ]
    if kind == "contract":
        return contract_names(tree, bases=True) + settings_names(tree)
    if kind == "owned":
        return [f"{name}: {each}" for name in HARD for each in owned_by(tree, name)]
    return list(private_accesses(tree.root / kind.rpartition("_")[2]))


def rows(figures: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the lines of the table: a path of keys, and a figure."""
    for key, value in figures.items():
        if isinstance(value, dict):
            yield from rows(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def main() -> None:
    """Read the command line, count and print."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=Path(__file__).parent.parent, help="of the working tree")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--json", action="store_true", help="print the figures as JSON")
    shown.add_argument("--list", choices=LISTS, help="print the names behind a figure")
    options = parser.parse_args()
    tree = Tree(options.root.resolve())
    if options.list:
        print("\n".join(names(tree, options.list)))
    elif options.json:
        print(json.dumps(count(tree), indent=2))
    else:
        for key, value in rows(count(tree)):
            print(f"{key:42} {value}")


if __name__ == "__main__":
    main()
