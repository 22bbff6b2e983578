"""Where a strategy comes from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Paper:
    """Where a strategy comes from."""

    authors: str
    title: str
    venue: str
    year: int
    arxiv: str = ""

    @property
    def short(self) -> str:
        """First author and year."""
        first, others = self.authors.split(",")[0], "," in self.authors
        return f"{first}{' et al.' if others else ''} {self.year}"

    def __str__(self) -> str:
        """Gives the citation on one line."""
        number = f", arXiv {self.arxiv}" if self.arxiv else ""
        return f"{self.authors}, “{self.title}”, {self.venue} {self.year}{number}"
