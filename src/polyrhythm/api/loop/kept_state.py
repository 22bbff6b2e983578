"""What a successor's loop takes over of schedulers and the like: plain values out of their `state_dict`.

Nothing is unpickled: what is no number, text or list of such (functions, tensors, counters) is as the successor's own
script has made it.
"""

from __future__ import annotations

from typing import Any, Protocol

_PLAIN = (bool, int, float, str, type(None))


class Kept(Protocol):
    """Something with a state, such as a learning-rate scheduler."""

    def state_dict(self) -> dict[str, Any]:
        """Gives the state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Takes it back."""


def plain_state(kept: Kept) -> dict[str, Any]:
    """Gives what of a state is plain, JSON-able."""
    found: dict[str, Any] = _plain(kept.state_dict())
    return found


def take_state(kept: Kept, handed: dict[str, Any]) -> None:
    """Puts what `plain_state` gave over a state."""
    kept.load_state_dict(_merged(kept.state_dict(), handed))


def _plain(value: Any) -> Any:
    """Gives the plain part of a value; of a list all or nothing, but for states in it."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items() if isinstance(key, str) and _is_plain(part)}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value)
    return isinstance(value, _PLAIN)


def _merged(own: Any, handed: Any) -> Any:
    if isinstance(own, dict) and isinstance(handed, dict):
        return {
            key: _merged(value, handed[key]) if key in handed else value for key, value in own.items()
        } | {key: value for key, value in handed.items() if key not in own}
    if isinstance(own, list | tuple) and isinstance(handed, list) and len(own) == len(handed):
        return type(own)(_merged(*pair) for pair in zip(own, handed, strict=True))
    return handed
