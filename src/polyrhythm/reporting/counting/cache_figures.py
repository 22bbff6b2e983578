"""Where training images came from: their files, or the decoded ones that were kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polyrhythm.reporting.quantities import percent, whole

if TYPE_CHECKING:
    from collections.abc import Mapping

    from polyrhythm.events import CacheUsed


class CacheFigures:
    """Adds up what workers tell of their caches.

    Attributes:
        images: that all workers have asked for.
        hits: of these, how many were kept.
    """

    def __init__(self) -> None:
        self.images = 0
        self.hits = 0
        self._kept_bytes: dict[int, int] = {}

    def __bool__(self) -> bool:
        return self.images > 0

    def add(self, event: CacheUsed) -> None:
        """Takes what a worker tells."""
        self.images += event.images
        self.hits += event.hits
        self._kept_bytes[event.worker] = event.kept_bytes

    def to_json(self) -> dict[str, Any]:
        """Gives it as a JSON-able dict; `kept_bytes` is what the worker that keeps most has, or shares with others."""
        return {
            "images": self.images,
            "hits": self.hits,
            "hit_share": self.hits / self.images if self.images else 0.0,
            "kept_bytes": max(self._kept_bytes.values(), default=0),
        }


def cache_line(cache: Mapping[str, Any]) -> str:
    """Writes it for people.

    Args:
        cache: as `CacheFigures.to_json` gives it.
    """
    return (
        f"{percent(cache['hit_share'])} of the {whole(cache['images'])} training images that were asked for came "
        f"decoded from memory ({cache['kept_bytes'] / 1e6:,.1f} MB)"
    )
