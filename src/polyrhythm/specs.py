"""Specs: `name` or `name(key=value, …)`, nestable; the same text in a recipe, on the command line and in Python.

A spec chooses one configuration out of a folder. The folder is the registry: every module in it is one choice, and
holds one class of the module's name (`tf1_rmsprop.py` holds `TF1RMSProp`), a `Config` with the keys as fields.

A class outside the package is chosen by its module and name, `my_module.MyClass(key=value)`. Text alone imports no such
module, since it may be that of a run folder: the class must be imported already, or its module be in `IMPORTS`.
"""

from __future__ import annotations

import ast
import importlib
import keyword
import os
import pkgutil
import re
import sys
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, ClassVar, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from polyrhythm.errors import RequestError, unknown

_Model = TypeVar("_Model", bound=BaseModel)
IMPORTS = "POLYRHYTHM_IMPORT"
"""Environment variable with the modules that specs may import for classes outside the package, separated by commas."""
_outside: set[str] = set()
"""Modules outside the package that have defined such classes in this process."""
_PACKAGE = __name__.partition(".")[0]
_RESERVED = re.compile(
    rf"""'[^']*'|"[^"]*"|\b({"|".join({*keyword.kwlist} - {"True", "False", "None"})})\b"""
)
"""Python's reserved words, such as `async`; quoted texts match first, as they may contain anything."""


@dataclass(frozen=True)
class Spec:
    """A parsed spec.

    Attributes:
        name: the choice.
        arguments: keys and values; a value is a number, a boolean, a text, None or another `Spec`.
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the text that parses back to this spec."""
        if not self.arguments:
            return self.name
        return f"{self.name}({', '.join(f'{key}={_text(value)}' for key, value in self.arguments.items())})"


def _text(value: Any) -> str:
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(_text, value)) + "]"
    if isinstance(value, str) and not value.isidentifier():
        return repr(value)
    return str(value)


def parse(text: str) -> Spec:
    """Parse a spec.

    Raises:
        RequestError: the text is not of the form `name` or `name(key=value, …)`.
    """
    unreadable = RequestError(f"cannot read {text!r:.200}: write name or name(key=value, …)")
    try:
        node = ast.parse(_RESERVED.sub(_unreserved, text.strip()), mode="eval").body
        if isinstance(node, ast.Call):
            return _call(node, text)
        if (name := _dotted(node)) is not None:
            return Spec(name)
    except RequestError:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise unreadable from None
    raise unreadable


def _unreserved(found: re.Match[str]) -> str:
    """Turn a reserved word into a name, so that `async` is answered by `asynchronous` instead of a syntax error."""
    return f"{found[1]}_" if found[1] else found[0]


def _name(identifier: str) -> str:
    return identifier.rstrip("_") if keyword.iskeyword(identifier.rstrip("_")) else identifier


def _dotted(node: ast.expr) -> str | None:
    """Return the name that an expression is, such as `ring` or `my_module.MyRing`; None if it is none."""
    if isinstance(node, ast.Name):
        return _name(node.id)
    if isinstance(node, ast.Attribute) and (module := _dotted(node.value)) is not None:
        return f"{module}.{node.attr}"
    return None


def _call(node: ast.Call, text: str) -> Spec:
    named = _dotted(node.func)
    if named is None or node.args or any(word.arg is None for word in node.keywords):
        raise RequestError(f"cannot read {text!r:.200}: every value needs its key, as in name(key=value)")
    arguments: dict[str, Any] = {}
    for word in node.keywords:
        key = _name(str(word.arg))
        if key in arguments:
            raise RequestError(f"cannot read {text!r:.200}: {key} is given twice")
        arguments[key] = _value(word.value, text)
    return Spec(named, arguments)


def _value(node: ast.expr, text: str) -> Any:
    if isinstance(node, ast.Name):
        return {"true": True, "false": False, "none": None}.get(node.id, _name(node.id))
    if isinstance(node, ast.Call):
        return _call(node, text)
    if (name := _dotted(node)) is not None:
        return name
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(element, text) for element in node.elts]
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise RequestError(
            f"cannot read {text!r:.200}: {ast.unparse(node)!r:.200} is not a value; put a text into quotes, as in "
            "key='a.csv'"
        ) from None


def split_outside(text: str, separators: str) -> list[str]:
    """Split a text at separators that are not inside brackets; empty parts are dropped."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        if letter in separators and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


class Config(BaseModel):
    """The keys of a choice: frozen, keyword-only, validated once. Subclasses add fields and behavior."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    name: ClassVar[str]
    former_keys: ClassVar[dict[str, str]] = {}
    """Keys by their names of earlier versions, which specs still accept until 0.2.0."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        inside = cls.__module__.partition(".")[0] == _PACKAGE
        cls.name = cls.__module__.rpartition(".")[2] if inside else f"{cls.__module__}.{cls.__qualname__}"
        if not inside:
            _outside.add(cls.__module__)

    def spec(self) -> Spec:
        """Return the spec that builds this configuration: all fields that differ from their defaults."""
        arguments = {}
        for key, info in type(self).model_fields.items():
            value = getattr(self, key)
            if value != info.default:
                arguments[key] = value.spec() if isinstance(value, Config) else value
        return Spec(self.name, arguments)

    def __str__(self) -> str:
        """Return the spec as text."""
        return str(self.spec())


@cache
def choices(package: str) -> dict[str, type[Config]]:
    """Return the configuration class of every module directly inside `package`, by name."""
    return {name: _config(f"{package}.{name}", name) for name in _names(package)}


@cache
def _names(package: str) -> tuple[str, ...]:
    """Return the names of the modules inside `package`, without importing them."""
    found = importlib.import_module(package)
    return tuple(sorted(info.name for info in pkgutil.iter_modules(found.__path__) if not info.ispkg))


@cache
def _config(module: str, name: str) -> type[Config]:
    for key, value in vars(importlib.import_module(module)).items():
        if key.lower() == name.replace("_", "") and isinstance(value, type) and issubclass(value, Config):
            return value
    raise AssertionError(f"{module} lacks its Config class")


_FORMER_NAMES = {
    "colour_casting": "color_casting",
    "colour_jitter": "color_jitter",
    "pca_colour": "pca_color",
    "synchronised": "synchronized",
}
"""Choices by their names of earlier versions, which specs still accept until 0.2.0."""


def build(what: str, spec: str | Spec, *packages: str) -> Config:
    """Build the configuration that a spec chooses.

    Args:
        what: the noun for error messages, such as `optimizer`.
        spec: the spec or its text.
        packages: the folders that hold the choices.

    Raises:
        RequestError: unknown name or key, or a value out of range.
    """
    parsed = _parsed(what, spec)
    parsed = replace(parsed, name=_FORMER_NAMES.get(parsed.name, parsed.name))
    if "." in parsed.name:
        return validated(f"{what} {parsed.name}", _own_class(what, parsed.name, packages), parsed.arguments)
    homes = {name: package for package in packages for name in _names(package)}
    if parsed.name not in homes:
        raise unknown(what, parsed.name, homes)
    kind = _config(f"{homes[parsed.name]}.{parsed.name}", parsed.name)  # the others need not be imported
    return validated(f"{what} {parsed.name}", kind, parsed.arguments)


def _own_class(what: str, name: str, packages: tuple[str, ...]) -> type[Config]:
    """Return the class `module.Class` of a user.

    Raises:
        RequestError: it is not imported, or is not of the kind of these packages' choices.
    """
    module, _, attribute = name.rpartition(".")
    if module in os.environ.get(IMPORTS, "").split(","):
        _import(module)
    kind = vars(sys.modules.get(module, object)).get(attribute)  # no `getattr`: a module may import on access
    if not (isinstance(kind, type) and issubclass(kind, Config)):
        raise RequestError(
            f"{what} {name} is of another script: put the class into a module of its own"
            if module == "__main__"
            else f"{what} {name} is not imported: import {module} first, or set {IMPORTS}={module} in the environment"
        )
    bases = [_base(package) for package in packages]
    if not issubclass(kind, tuple(bases)):
        raise RequestError(
            f"{name} is no {what}: it must derive from {bases[0].__module__}.{bases[0].__name__}"
        )
    return kind


def _base(package: str) -> type[Config]:
    """Return the class that all choices of a package derive from; `Config` if they share no other."""
    names = _names(package)
    first, last = (_config(f"{package}.{name}", name).__mro__ for name in (names[0], names[-1]))
    kinds = [kind for kind in first if kind in last and issubclass(kind, Config) and kind is not Config]
    return kinds[-1] if kinds else Config


def _import(module: str) -> None:
    """Import a module of the user, also from the working directory."""
    if "" not in sys.path:
        sys.path.append("")
    try:
        importlib.import_module(module)
    except Exception as error:  # a module can fail in any way
        raise RequestError(f"cannot import {module}: {type(error).__name__}: {error}") from error


def environment_of_classes() -> dict[str, str]:
    """Return variables with which a new interpreter builds the specs of classes that are defined in this one."""
    named = {*_outside, *filter(None, os.environ.get(IMPORTS, "").split(","))}
    return {IMPORTS: ",".join(sorted(named)), "PYTHONPATH": os.pathsep.join(sys.path)} if named else {}


def _parsed(what: str, spec: str | Spec) -> Spec:
    try:
        return parse(spec) if isinstance(spec, str) else spec
    except RequestError as error:
        raise RequestError(f"{what}: {error}") from None


def validated(where: str, kind: type[_Model], values: dict[str, Any]) -> _Model:
    """Return a validated pydantic model; the first invalid value is raised as a one-line `RequestError`."""
    former = kind.former_keys if issubclass(kind, Config) else {}
    values = {
        former.get(key, key) if former.get(key) not in values else key: given for key, given in values.items()
    }
    for key in values:
        if key not in kind.model_fields:
            keys = kind.model_fields
            raise unknown(f"key of {where}", key, keys) if keys else RequestError(f"{where} takes no keys")
    # Before pydantic, as it converts True to 1 and 2.0 to 2, which would hide a mistake.
    for key, value in values.items():
        _check_number(f"{where}: {key}", kind.model_fields[key].annotation, value)
    try:
        return kind(**values)
    except ValidationError as error:
        first = error.errors()[0]
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, RequestError):
            raise cause from None
        key = ".".join(str(part) for part in first["loc"])
        raise RequestError(
            f"{where}: {key} {plainly(first['msg'])} (given {first['input']!r:.200})".replace(":  ", ": ")
        ) from None


def plainly(complaint: str) -> str:
    """Remove from a pydantic message the parts about its own workings, and Python's type names."""
    for prefix in ("Value error, ", "Input ", "Tuple "):
        complaint = complaint.removeprefix(prefix)
    for end in (", unable to parse", " after validation"):
        complaint = complaint.partition(end)[0]
    return complaint.replace("a valid tuple", "a list").replace("a valid integer", "a whole number")


def _check_number(what: str, annotation: Any, value: Any) -> None:
    """Refuse values that pydantic would convert to a number but that are surely mistakes: `true`, 2.0 workers."""
    kinds = get_args(annotation) or (annotation,)
    if any(
        value in get_args(kind) for kind in kinds
    ):  # a string that a `Literal` allows in addition to numbers
        return
    if float in kinds:
        if isinstance(value, bool):
            raise RequestError(f"{what} should be a number (given {value})")
    elif int in kinds:
        digits = isinstance(value, str) and value.strip().lstrip("+-").isdecimal()
        if isinstance(value, bool | float) or (isinstance(value, str) and not digits):
            raise RequestError(f"{what} should be a whole number (given {value!r:.200})")


def chosen(what: str, *packages: str) -> BeforeValidator:
    """Return a validator for a field that accepts a spec itself.

    Used as `thing: Annotated[Thing, chosen("thing", "package.of.things")]`.
    """

    def convert(value: Any) -> Any:
        if isinstance(value, Config):
            return value
        return build(what, value if isinstance(value, Spec) else str(value), *packages)

    return BeforeValidator(convert)
