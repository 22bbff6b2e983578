"""What all ranks of a rehearsal have said at its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from polyrhythm.roles.attendance import Attendance
from polyrhythm.roles.keeping.worker_state import Account
from polyrhythm.roles.rehearsing.rehearsal import Rehearsal
from polyrhythm.roles.result import bytes_per_step, defence_figures, staleness_figures
from polyrhythm.roles.server_attendance import ServerLosses


@dataclass(frozen=True)
class LastWords:
    """The last words.

    Attributes:
        accounts: of the workers, in the order of their ranks.
        reports: of the servers, likewise.
        attendance: of the workers.
        losses: of servers.
    """

    accounts: list[Account]
    reports: list[dict[str, Any]]
    attendance: Attendance
    losses: ServerLosses

    def figures(self, rehearsal: Rehearsal, seconds: float) -> dict[str, Any]:
        """Gives the figures of the run, as `train --json` prints them; what only training tells is None.

        Args:
            rehearsal: what was rehearsed.
            seconds: that it took.
        """
        accounts, attendance = self.accounts, self.attendance
        steps, length = accounts[0].step, rehearsal.steps_per_epoch
        images = sum(account.session_images for account in accounts) + attendance.images_of_lost
        return {
            "run": None,
            "strategy": str(rehearsal.strategy),
            "data": rehearsal.data,
            "model": rehearsal.model,
            "workers": rehearsal.workers,
            "servers": rehearsal.strategy.server_count,
            "steps": steps,
            "epochs": steps // length if steps % length == 0 else round(steps / length, 3),
            "seconds": seconds,
            "images_per_s": images / seconds if seconds > 0 else 0.0,
            "train_loss": None,
            "test_loss": None,
            "test_top1": None,
            "test_top5": None,
            "workers_lost": attendance.lost,
            "workers_joined": attendance.joined,
            "servers_lost": self.losses.lost,
            "servers_joined": self.losses.joined,
            "bytes_sent_per_step": bytes_per_step(accounts, self.reports, attendance.steps_of_lost),
            "staleness": staleness_figures(accounts, self.reports),
            **defence_figures(self.reports),
            "parameters_sha256": None,
        }
