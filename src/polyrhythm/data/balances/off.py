"""All workers have equal parts of every global batch."""

from __future__ import annotations

from typing import ClassVar

from polyrhythm.data.balance import Balance


class Off(Balance):
    """Equal parts; those of a ragged batch differ by at most one image."""

    optional: ClassVar[bool] = True
