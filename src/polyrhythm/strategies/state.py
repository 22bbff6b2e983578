"""What a part hands in for a checkpoint."""

from __future__ import annotations

from typing import Any

from torch import Tensor

State = tuple[dict[str, Tensor], dict[str, Any]]
"""Named tensors and JSON-able facts: all that a resumed part needs."""
