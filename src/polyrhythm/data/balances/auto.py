"""Equal parts, until an epoch has shown that workers are uneven by more than a tenth; then `measured`."""

from __future__ import annotations

from typing import ClassVar

from polyrhythm.data.balance import Balance


class Auto(Balance):
    """Equal parts on even machines, and parts by speed on uneven ones."""

    follows: ClassVar[bool] = True
    optional: ClassVar[bool] = True
