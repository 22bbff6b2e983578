"""Equal parts until measurements show that other ones would be faster; then they follow speeds, as in `measured`."""

from __future__ import annotations

from typing import ClassVar

from polyrhythm.data.balance import Balance


class Auto(Balance):
    """Equal parts on even machines, and parts by speed on uneven ones."""

    follows: ClassVar[bool] = True
    optional: ClassVar[bool] = True
