"""All that an object counts and lists, JSON-able and back: for a copy that must go on as the object itself would.

A checkpoint's state leaves out what a resumed run finds out anew: who is there, who waits, what has been read. A copy
on another server, made in the middle of a run, must have that as well.
"""

from __future__ import annotations

from typing import Any


def exact_facts(thing: object) -> dict[str, Any]:
    """Gives all attributes of an object that are numbers, None, or lists and sets of numbers; others never change."""
    return {
        name: sorted(value) if isinstance(value, set) else _copied(value)
        for name, value in vars(thing).items()
        if value is None or isinstance(value, int | float | list | set)
    }


def take_exact_facts(thing: object, facts: dict[str, Any]) -> None:
    """Puts back what `exact_facts` gave of an equal object."""
    for name, value in facts.items():
        setattr(thing, name, set(value) if isinstance(getattr(thing, name), set) else _copied(value))


def _copied(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value
