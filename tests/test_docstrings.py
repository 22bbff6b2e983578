"""Every public method has a docstring of its own or overrides a method that has one."""

import importlib
import inspect
import pkgutil
from functools import cache, cached_property
from types import ModuleType

import pytest

import polyrhythm

OPTIONAL = ("tensorboard",)


@cache
def modules() -> list[ModuleType]:
    imported = []
    for found in pkgutil.walk_packages(polyrhythm.__path__, "polyrhythm."):
        if not found.name.endswith("__main__"):
            try:
                imported.append(importlib.import_module(found.name))
            except ImportError as error:
                if error.name not in OPTIONAL:
                    raise
    return imported


def undocumented(cls: type) -> list[str]:
    """Return the names of public methods that neither have nor inherit a docstring."""
    missing = []
    for name, value in vars(cls).items():
        function = inspect.unwrap(getattr(value, "fget", None) or getattr(value, "__func__", None) or value)
        if isinstance(value, cached_property):
            function = value.func
        written = inspect.isfunction(function) and function.__qualname__ == f"{cls.__qualname__}.{name}"
        if written and not name.startswith("_"):
            found = [vars(base)[name] for base in cls.__mro__ if name in vars(base)]
            if not any(getattr(method, "__doc__", None) for method in found):
                missing.append(f"{cls.__module__}.{cls.__qualname__}.{name}")
    return missing


def test_a_method_without_any_docstring_is_found() -> None:
    class Base:
        def said(self) -> None:
            """Do it."""

    class Child(Base):
        def said(self) -> None: ...

        def silent(self) -> None: ...

    (found,) = undocumented(Child)
    assert found.endswith("Child.silent")


@pytest.mark.parametrize("package", sorted({part.name for part in pkgutil.iter_modules(polyrhythm.__path__)}))
def test_public_methods_are_documented(package: str) -> None:
    inside = f"polyrhythm.{package}"
    missing = [
        text
        for module in modules()
        if module.__name__ == inside or module.__name__.startswith(inside + ".")
        for cls in vars(module).values()
        if inspect.isclass(cls) and cls.__module__ == module.__name__ and not cls.__name__.startswith("_")
        for text in undocumented(cls)
    ]
    assert missing == []
