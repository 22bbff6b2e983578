"""The figures of a run, as `train --json` prints them."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import asdict
from typing import Any

from torch import Tensor

from polyrhythm.evaluation.evaluate import Evaluation
from polyrhythm.roles.worker_state import Account


def digest(vector: Tensor) -> str:
    """Gives the sha256 of a vector's values, in hexadecimal digits."""
    return hashlib.sha256(vector.detach().cpu().contiguous().numpy().tobytes()).hexdigest()


def staleness_figures(accounts: list[Account], reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Merges what the servers counted, one count a gradient and shard; without servers, what worker 0 did.

    Args:
        accounts: the workers', worker 0's first.
        reports: the servers'.
    """
    told = [report["staleness"] for report in reports] or [accounts[0].staleness]
    counted: Counter[int] = Counter()
    for histogram in told:
        counted.update({int(key): count for key, count in histogram.items()})
    total = sum(counted.values())
    return {
        "mean": sum(key * count for key, count in counted.items()) / total if total else 0.0,
        "max": max(counted, default=0),
        "histogram": {str(key): counted[key] for key in sorted(counted)},
    }


def bytes_per_step(accounts: list[Account], reports: list[dict[str, Any]]) -> float:
    """Bytes that workers and servers sent for the strategy, for each step of a worker, in this session."""
    sent = sum(account.bytes_sent for account in accounts) + sum(report["bytes_sent"] for report in reports)
    steps = sum(account.session_steps for account in accounts)
    return sent / steps if steps else 0.0


def train_loss(accounts: list[Account]) -> float:
    """Mean training loss of the epoch that the workers are in."""
    images = sum(account.epoch_images for account in accounts)
    return sum(account.epoch_loss for account in accounts) / images if images else 0.0


def test_figures(found: Evaluation) -> dict[str, Any]:
    """What a test came to."""
    return {
        "test_loss": found.loss,
        "test_top1": found.top1,
        "test_top5": found.top5,
        "per_class": [asdict(entry) for entry in found.per_class],
    }
