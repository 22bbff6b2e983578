"""Parts follow the workers' measured speeds, from the first steps on."""

from __future__ import annotations

from typing import ClassVar

from polyrhythm.data.balance import Balance


class Measured(Balance):
    """Parts by speed; see `data/balance.py`."""

    follows: ClassVar[bool] = True
