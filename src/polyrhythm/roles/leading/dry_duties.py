"""What the leader does for a dry run: it emits the run's events, and makes its figures of the workers' accounts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from polyrhythm.events import Event, Notice, RunEnded, RunStarted
from polyrhythm.roles.control_messages import Account
from polyrhythm.roles.dry_run import DryRun
from polyrhythm.roles.leading.leader import Duties, EventEmitter, Leader
from polyrhythm.roles.ledger import Attendance, Ledger, ServerLosses
from polyrhythm.roles.result import bytes_per_step, defence_figures, staleness_figures
from polyrhythm.roles.world import World
from polyrhythm.strategies.strategy import Remarks
from polyrhythm.strategies.worker_part import WorkerCalls


class DryDuties(Duties):
    """The leader's duties in a dry run: accounts and figures only.

    Args:
        dry_run: what is run.
        world: where this rank is.
        part: worker 0's, which lets the servers go.
        ledger: of the run so far.
    """

    dry = True

    def __init__(self, dry_run: DryRun, world: World, part: WorkerCalls, ledger: Ledger) -> None:
        self._dry_run = dry_run
        self._world = world
        self._part = part
        self._ledger = ledger
        self._emitter = EventEmitter(world, ledger)

    def say(self, event: Event) -> None:
        """Emit a loss or a successor."""
        self._emitter.say(event)

    def take_up(self) -> None:
        """Go on with the time of the run."""
        assert self._ledger.began_at_s is not None, "a leader has a successor when training has started"
        self._emitter.take_up(self._ledger.began_at_s)

    def begin(self, epoch: int) -> None:
        """Say that the run has started, unless that has been said."""
        if self._ledger.began:
            return
        dry_run, world = self._dry_run, self._world
        self._emitter.begin()
        world.emit(
            RunStarted(
                time_s=0,
                strategy=str(dry_run.strategy),
                data=dry_run.data,
                model=dry_run.model,
                workers=len(world.cast.workers),
                servers=len(world.cast.servers),
                epochs=dry_run.epochs,
                steps_per_epoch=dry_run.steps_per_epoch,
                parameters=dry_run.sizes.parameters,
                free_running=not dry_run.traits.waits_for_slower,
            )
        )
        strategy = dry_run.strategy
        if isinstance(strategy, Remarks) and (remark := strategy.remark(dry_run.workers)):
            world.emit(Notice(time_s=0, text=remark))

    def end(self) -> None:
        """Let the servers and then the workers go, and say what the run has come to."""
        leader = self.leader
        self._part.let_go()
        leader.servers.wait()
        leader.let_leave()
        seconds = self._emitter.elapsed_s
        found = DryFigures(
            [state.account for state in leader.workers.in_order],
            [leader.servers.reports[rank] for rank in sorted(leader.servers.reports)],
            leader.attendance,
            leader.servers.attendance.losses,
        )
        outcome = "interrupted" if any(entry.stopped for entry in found.accounts) else "done"
        figures = found.figures(self._dry_run, seconds)
        self._world.emit(RunEnded(time_s=seconds, outcome=outcome, result=figures))


@dataclass(frozen=True)
class DryFigures:
    """What the ranks of a dry run have handed in at its end.

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

    def figures(self, dry_run: DryRun, seconds: float) -> dict[str, Any]:
        """Return the figures of the run, as `train --json` prints them; what only training tells is None.

        Args:
            dry_run: what was run.
            seconds: that it took.
        """
        accounts, attendance = self.accounts, self.attendance
        steps, length = accounts[0].step, dry_run.steps_per_epoch
        images = sum(account.session_images for account in accounts) + attendance.images_of_lost
        return {
            "run": None,
            "strategy": str(dry_run.strategy),
            "data": dry_run.data,
            "model": dry_run.model,
            "workers": dry_run.workers,
            "servers": dry_run.traits.servers,
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


def dry_leader(dry_run: DryRun, world: World, part: WorkerCalls) -> Leader:
    """Return the control plane of worker 0 in a dry run.

    Args:
        dry_run: what is run.
        world: where this rank is.
        part: worker 0's.
    """
    ledger = world.ledger or Ledger.of(len(world.cast.workers))
    duties = DryDuties(dry_run, world, part, ledger)
    return Leader(world, dry_run.strategy, duties, ledger)
