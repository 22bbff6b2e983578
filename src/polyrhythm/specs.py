"""Specs: `name` or `name(key=value, …)`, nestable; the same text in a recipe, on the command line and in Python.

A spec chooses one configuration out of a folder. The folder is the registry: every module in it is one choice, and
holds one class of the module's name (`tf1_rmsprop.py` holds `TF1RMSProp`), a `Config` with the keys as fields.
"""

from __future__ import annotations

import ast
import importlib
import keyword
import pkgutil
import re
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, ClassVar, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from polyrhythm.errors import RequestError, unknown

_Model = TypeVar("_Model", bound=BaseModel)
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
        if isinstance(node, ast.Name):
            return Spec(_name(node.id))
        if isinstance(node, ast.Call):
            return _call(node, text)
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


def _call(node: ast.Call, text: str) -> Spec:
    if not isinstance(node.func, ast.Name) or node.args or any(word.arg is None for word in node.keywords):
        raise RequestError(f"cannot read {text!r:.200}: every value needs its key, as in name(key=value)")
    arguments: dict[str, Any] = {}
    for word in node.keywords:
        key = _name(str(word.arg))
        if key in arguments:
            raise RequestError(f"cannot read {text!r:.200}: {key} is given twice")
        arguments[key] = _value(word.value, text)
    return Spec(_name(node.func.id), arguments)


def _value(node: ast.expr, text: str) -> Any:
    if isinstance(node, ast.Name):
        return {"true": True, "false": False, "none": None}.get(node.id, _name(node.id))
    if isinstance(node, ast.Call):
        return _call(node, text)
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
        cls.name = cls.__module__.rpartition(".")[2]

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
    homes = {name: package for package in packages for name in _names(package)}
    if parsed.name not in homes:
        raise unknown(what, parsed.name, homes)
    kind = _config(f"{homes[parsed.name]}.{parsed.name}", parsed.name)  # the others need not be imported
    return validated(f"{what} {parsed.name}", kind, parsed.arguments)


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
