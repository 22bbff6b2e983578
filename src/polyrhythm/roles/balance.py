"""Balance on one worker: its measurements, their exchange, and the shares on which all decide.

    worker 1 ── [ns, images, steps, limit, cost, left out] ──▶ worker 0 ── those of all ──▶ worker 1
                                 all: the same `Controller` on the same numbers

All workers do this after the same steps, so they change their shares together without further messages. The frequency
is agreed in the same way: one meeting in six steps, or as many as take 0.2 % of a step; fewer, where these would take
more than 1 %. A worker that becomes slower has been measured twice within 20 steps, and shares follow; where workers
do not meet, their measurements take 2 d steps more.

`auto` does the same, but judges a speed by a quarter of a second of computing at least, since shorter times depend
on the operating system's scheduler, leaves the longest of several steps out of a measurement, since it may have been
interrupted, and needs more certainty and gain for other shares (`Controller`). The next meeting is earlier after a
longest step of a quarter of a second, and after a measurement that deviates, which the workers then wait for.

Workers that may be s steps ahead of the slowest (SSP) would wait for each other at a meeting, and then push at the same
moments over the same link. So once shares are stable, or where they began with given ones, they do not meet,
but send at one step, receive at a later one, when the bound implies that all have sent, and decide at a third:

    step k          each sends to worker 0
    step k + d      worker 0 has received from all of them, and sends to all    d = s
    step k + 2 d    each has received from worker 0, and decides

Where workers regroup, all start again with equal shares. With servers a run continues without a failed worker, and
there is no regrouping: worker 0 then announces equal shares from here on, and a worker that finds worker 0 failed
sets equal shares itself.

Groups with dynamic batches divide them in the same way, each group by itself; its first worker has the
role of worker 0. A group without one of its workers continues with equal shares.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from math import ceil
from typing import Any

import torch

from polyrhythm.communication.communicator import Clock, Communicator, all_ranks
from polyrhythm.communication.exchanger import Exchanger
from polyrhythm.communication.message import Kind, Message
from polyrhythm.data.balance import Balance, Controller, split
from polyrhythm.errors import PeerLost, RequestError
from polyrhythm.roles.world import World
from polyrhythm.strategies.strategy import Strategy

_LEAST_S, _ENOUGH = 0.25, 1.2
"""Least seconds that the slowest worker has computed for a judgment of machines without an explicit option,
and by what factor meetings are further apart, so that steps which vary suffice."""
_WARM_UP_STEPS, _FIRST_STEPS = 1, 2
FIRST_MEETING = _WARM_UP_STEPS + _FIRST_STEPS
"""Steps until shares are decided for the first time."""
_COST, _MOST_COST = 0.002, 0.01
"""Shares of a step that meetings take where they are frequent, and at most."""
_FREQUENT_STEPS, _MOST_STEPS, _STEPS_APART = 6, 256, 10
_LONGEST_APART = 16 * _STEPS_APART
"""Most steps between meetings at which workers at different steps wait for each other; doubled while shares are
stable."""
_TAG = 1 << 20
_NS = 1e9
_LEAVES = [-1, 0, 0, 0, 0, 0]


def balances(
    balance: Balance,
    strategy: Strategy,
    workers: int,
    batch: int,
    *,
    compiled: bool = False,
    drawn: bool = True,
) -> bool:
    """Return whether workers' shares of global batches may differ.

    Args:
        balance: requested balance.
        strategy: strategy of the run.
        workers: number of workers.
        batch: images of a global batch.
        compiled: whether full batches are compiled.
        drawn: whether asynchronous workers draw their batches.

    Raises:
        RequestError: balance was requested and is not possible; with the reason and a remedy.
    """
    balance.check(workers, batch)
    if workers == 1 or (balance.optional and not balance.follows):
        return False
    traits, reason = strategy.traits(workers), ""
    grouped = shares_in_groups(strategy, workers)
    if not (traits.lockstep or traits.skips_steps or traits.scales_parts or grouped):
        reason = f"{strategy} is asynchronous and needs no balance: leave balance out"
    elif grouped and not drawn:
        reason = "groups share the batches that they draw: leave deal fixed out, or leave balance out"
    elif not traits.counts_samples:
        reason = (
            f"{strategy} counts all workers alike, however large their batches are: leave balance out, or choose "
            "synchronous, sync_replicas or local_sgd"
        )
    elif traits.cuts_network:
        reason = (
            f"workers of {strategy} compute together, at one speed: leave balance out, or choose synchronous"
        )
    elif balance.optional and traits.skips_steps:  # there is no waiting for a slow worker
        reason = "late gradients are dropped"
    elif batch < workers:
        reason = "batches are too small"
    elif balance.by_steps and not traits.local_steps:
        reason = (
            f"by=steps is for workers that take steps of their own between means of their models, as in local_sgd, and "
            f"those of {strategy} do not: leave it out"
        )
    elif balance.follows and not traits.exchange_every:
        reason = (
            f"workers of {strategy} meet at the end only and cannot agree before: give weights, as in "
            "given(weights=[3, 1])"
        )
    elif balance.follows and compiled:
        reason = (
            "every size of batch would be compiled again: leave compile out, or give weights, as in "
            "given(weights=[3, 1])"
        )
    if reason and not balance.optional:
        raise RequestError(f"balance {balance}: {reason}")
    return not reason


def balancer_for(
    balance: Balance,
    strategy: Strategy,
    world: World,
    workers: Communicator,
    batch: int,
    *,
    compiled: bool = False,
    drawn: bool = True,
    least: int = 1,
    compute_time: Callable[[], float] | None = None,
    exchanger: Exchanger[Any] | None = None,
) -> Balancer | None:
    """Return the balancer of one worker's shares; None where all are equal.

    Args:
        balance: requested balance.
        strategy: strategy of the run.
        world: context of this worker.
        workers: communicator of the workers, with which the part was made.
        batch: images of a global batch; of this worker's group, where groups draw.
        compiled: whether full batches are compiled.
        drawn: whether workers draw their batches.
        least: minimum number of images of a worker.
        compute_time: returns the seconds in which this worker was not blocked, from any origin, by which whole steps
            are measured; None: only passes take time.
        exchanger: exchanger of this worker, where exchanges are entries of a log, as these meetings then are.
    """
    everyone, own = workers.size, workers.rank
    if not balances(balance, strategy, everyone, batch, compiled=compiled, drawn=drawn):
        return None
    regroups = strategy.faults(everyone).regroups
    traits, group = strategy.traits(everyone), tuple[int, ...]()
    if shares_in_groups(strategy, everyone):
        group = next(unit for unit in traits.groups if own in unit)
        if len(group) == 1:
            return None
        ranks = [world.roles.workers[worker] for worker in group]
        workers = world.network.subgroup(f"balance of group {group[0]}", ranks)
    elif not regroups and balance.follows:
        workers = world.network.subgroup("balance", world.roles.workers)
    found = Balancer(
        balance,
        workers,
        batch,
        group=group,
        everyone=everyone,
        least=least,
        rests=0 if traits.lockstep or group else _STEPS_APART,
        ahead=traits.steps_ahead,
        waits=traits.waits_for_slower or bool(group),
        meets_every=max(1, traits.exchange_every),
        regroups=regroups,
        compute_time=compute_time,
        exchanger=exchanger if regroups else None,
    )
    if world.rejoins and not regroups:  # the others do not know of it, and may wait for its predecessor
        found.leave()
    return found


def shares_in_groups(strategy: Strategy, workers: int) -> bool:
    """Whether groups draw batches that their workers share, in lockstep and all of them or none."""
    traits = strategy.traits(workers)
    # Leaf servers continue at once without a failed worker, and its share is then lost.
    return traits.draws and not traits.leaves and any(len(group) > 1 for group in traits.groups)


class Balancer:
    """One worker's record of all workers' shares.

    Args:
        balance: requested balance; see `balances`.
        workers: communicator of all workers, or of a group; the tag of these messages must be unused.
        batch: images of a global batch.
        group: indices of the workers that share their batches, where not all do; empty: all.
        everyone: number of workers of the run; 0: these.
        least: minimum number of images of a worker.
        rests: minimum steps between two of these meetings, for workers that are at different steps otherwise.
        ahead: number of steps by which these may be ahead of the slowest; 0: there is no bound.
        waits: whether fast workers wait for slow ones from the first steps on, so that the first meeting is due then.
        regroups: whether workers regroup when one fails.
        meets_every: steps from one meeting of all workers to the next.
        compute_time: returns the seconds in which this worker was not blocked, from any origin: then whole steps are
            measured, with their data and updates; None: passes alone, by the clock.
        exchanger: see `balancer_for`.

    Attributes:
        group: the given group.
        sizes: relative shares of the present workers, in their order; empty: all equal.
        share: weight of this worker relative to equal shares: its share of a global batch, but 1 where it
            takes more steps with a larger one.
        limit: images that this worker's memory holds; 0: not known.
        compute_time: the given function, or the clock's.
        whole_steps: whether that is measured, and not passes alone.
        since_s: start of the current step or pass, by `compute_time`.
        unevenness: relative excess time of the slowest worker over the fastest, if equal shares were left for it in the
            last call of `after` without an explicit option; else 0.
    """

    def __init__(
        self,
        balance: Balance,
        workers: Communicator,
        batch: int,
        *,
        group: tuple[int, ...] = (),
        everyone: int = 0,
        least: int = 1,
        rests: int = 0,
        ahead: int = 0,
        waits: bool = True,
        regroups: bool = False,
        meets_every: int = 1,
        compute_time: Callable[[], float] | None = None,
        exchanger: Exchanger[Any] | None = None,
    ) -> None:
        self._balance, self._exchanger = balance, exchanger
        self._regroups = regroups
        self._least = least
        self.group = group
        self._everyone = everyone or workers.size
        self._rests, self._waits = rests, waits
        self._until_shared = ahead
        self._meets_every = meets_every
        self._clock: Clock = workers.clock
        self.compute_time = compute_time or self._clock.now
        self.whole_steps = compute_time is not None
        self.since_s = self.unevenness = 0.0
        self._longest: tuple[float, int] = (0.0, 0)
        self.limit = 0
        self.regroup(workers, group or all_ranks(workers.size), batch)

    @property
    def images(self) -> tuple[int, ...]:
        """Images of all workers of the run in a full global batch; 0 for those that are absent."""
        parts = split(self._batch, self.sizes or [1] * len(self._members))
        of = dict(zip(self._members, parts, strict=True))
        return tuple(of.get(worker, 0) for worker in range(self._everyone))

    def regroup(self, workers: Communicator, members: tuple[int, ...], batch: int, step: int = 0) -> None:
        """Begin with these workers: with equal shares, or those that were given, if only to begin with; all call it.

        Args:
            workers: communicator of the present workers.
            members: indices among all workers.
            batch: number of images of their global batch.
            step: steps done.
        """
        self._workers, self._members, self._batch = workers, members, batch
        self._worker = members[workers.rank]
        self._follows = self._balance.follows
        self._controller: Controller | None = None
        self._apart = self._rests
        self._left = max(0 if self._waits else self._rests, self._meetings(FIRST_MEETING))
        self._warm_up = _WARM_UP_STEPS
        self._cost_ns = self._own = 0
        self._table: list[list[int]] = []
        self._part = 0
        self._use(self._first(step))

    def lose(self, there: tuple[int, ...]) -> None:
        """Continue with these workers of the group, with equal parts unless those were given.

        Args:
            there: indices among all workers.
        """
        if self._balance.follows:
            self._members = there
            self._stop_following()

    @property
    def speaks(self) -> bool:
        """Whether this worker is the first of those present."""
        return self._worker == self._members[0]

    def meetings(self, before: int, done: int) -> int:
        """Return the number of meetings of all workers between two of this worker's steps."""
        return done // self._meets_every - before // self._meets_every

    def resize(self, batch: int, step: int) -> None:
        """Continue with `batch` images in a global batch, after `step` steps."""
        self._batch = batch
        if self._controller is not None:
            self._controller.resize(batch)
            if self.sizes:  # else they have never differed
                self._use(self._controller.sizes)
        else:
            self._use(self._first(step))

    def note(self, images: int, seconds: float) -> None:
        """Add the measurement of a step, if it had this worker's share: an epoch's steps differ by one image."""
        if self._warm_up:
            self._warm_up -= 1
        elif abs(images - self._own) <= 1:
            self._seconds += seconds
            self._images += images
            self._steps += 1
            self._longest = max(self._longest, (seconds, images))

    def after(self, step: int, meetings: int = 1) -> bool:
        """Return whether shares have changed; all workers call it after the same meetings.

        Args:
            step: steps done.
            meetings: number of meetings since the last call; several for a worker that skips steps.

        Raises:
            PeerLost: another worker has failed, where workers regroup.
        """
        before, self.unevenness = self.sizes, 0.0
        if not self._follows:
            self._use(self._given(step))
        else:
            self._left -= meetings
            while self._left <= 0 and self._follows:
                if self._until_shared and self._settled:
                    self._pass()
                else:
                    self._decide(self._exchanged())
        return self.sizes != before

    def leave(self) -> None:
        """Announce to the others, where they may wait for this worker's measurements, that there will be none."""
        if self._follows:
            self._stop_following()
            if self._workers.rank == 0:
                self._notify_all([_LEAVES] * self._workers.size)
            else:
                with suppress(PeerLost):
                    self._share(_LEAVES)

    @property
    def _settled(self) -> bool:
        """Whether shares have not changed at the last decision and are not in doubt, or began with given ones."""
        if self._controller is None:
            return bool(self._balance.begins_with) or self._apart > self._rests
        return self._apart > self._rests and not self._controller.doubts

    def _meetings(self, steps: float) -> int:
        return max(1, ceil(steps / self._meets_every))

    def _given(self, step: int) -> tuple[float, ...]:
        return self._of_members(self._balance.parts(step))

    def _first(self, step: int) -> tuple[float, ...]:
        """Return the shares before the first measurement."""
        return self._given(step) or self._of_members(self._balance.begins_with)

    def _of_members(self, parts: tuple[float, ...]) -> tuple[float, ...]:
        found = tuple(parts[member] for member in self._members) if parts else ()
        return found if all(found) else ()

    def _use(self, sizes: tuple[float, ...]) -> None:
        self.sizes = sizes
        own = self.images[self._worker]
        equal = not sizes or self._balance.by_steps
        self.share = 1.0 if equal else own * len(sizes) / self._batch
        if own != self._own:
            self._own = own
            self._forget()

    def _stop_following(self) -> None:
        self._follows = False
        self._controller = None
        self._use(())

    def _forget(self) -> None:
        self._seconds, self._images, self._steps = 0.0, 0, 0
        self._longest = 0.0, 0

    def _decide(self, table: list[list[int]]) -> None:
        """Change shares by the measurements of all, and set the time of the next decision."""
        if not self._follows:
            return
        self._observe(table)
        seconds = max(ns / max(1, steps) / _NS for ns, _, steps, *_ in table)
        left_out_s = max(longest for *_, longest in table) / _NS
        if left_out_s >= _LEAST_S:  # long enough for a judgment: perhaps the worker has become slower
            seconds = max(seconds, left_out_s)
        steps = self._steps_to_next(seconds, min(cost for *_, cost, _ in table) / _NS) if seconds > 0 else 1
        doubts = self._controller is not None and self._controller.doubts
        soon = doubts or (self._until_shared and self._settled)
        self._left += max(0 if soon else self._apart, self._meetings(steps))

    def _observe(self, table: list[list[int]]) -> None:
        if min(ns for ns, *_ in table) <= 0:  # a worker has not computed since the last time
            return
        careful = self._balance.optional
        if careful and max(ns for ns, *_ in table) < _LEAST_S * _NS:
            return
        if self._controller is None:
            self._controller = Controller(
                self._batch, len(table), least=self._least, weights=self.sizes, careful=careful
            )
        self._controller.most = [limit or float("inf") for *_, limit, _, _ in table]
        seconds = [ns / steps / _NS for ns, _, steps, *_ in table]
        if self._controller.observe(seconds, [images / steps for _, images, steps, *_ in table]):
            if careful and not self.sizes:
                self.unevenness = self._controller.unevenness
            self._use(self._controller.sizes)
            self._apart = self._rests
        elif self._rests:
            self._apart = min(2 * self._apart, _LONGEST_APART)

    def _steps_to_next(self, step_s: float, cost_s: float) -> float:
        """Return the steps until the next meeting.

        Args:
            step_s: seconds that the slowest worker computes in a step.
            cost_s: seconds of a meeting.
        """
        cost = cost_s / step_s
        steps = min(_MOST_STEPS, max(min(cost / _COST, _FREQUENT_STEPS), cost / _MOST_COST))
        return max(steps, _ENOUGH * _LEAST_S / step_s) if self._balance.optional else steps

    def _exchanged(self) -> list[list[int]]:
        """Return the measurements of all workers, in their order."""
        began_s = self._clock.now()
        if self._exchanger is not None:
            rows = self._exchanger.rows(self._measured())
            table = [rows.get(member, [0] * len(_LEAVES)) for member in self._members]
        else:
            self._send_own()
            self._answer()
            table = self._shared()
        self._cost_ns = round((self._clock.now() - began_s) * _NS)
        return table

    def _pass(self) -> None:
        """Do the next part of a meeting without waiting."""
        match self._part:
            case 0:
                self._send_own()
            case 1:
                self._answer()
            case _:
                self._decide(self._shared())
        self._part = (self._part + 1) % 3
        if self._part:
            self._left += self._until_shared

    def _send_own(self) -> None:
        """Send worker 0 the measurements of this worker."""
        own = self._measured()
        self._table = [own]
        if self._workers.rank > 0:
            try:
                self._share(own)
            except PeerLost as error:
                self._lost(error)

    def _measured(self) -> list[int]:
        """Return the measurements of this worker since the last time."""
        seconds, images, steps = self._seconds, float(self._images), self._steps
        left_out_ns = 0
        if self._balance.optional and steps > 1:
            # The longest step, which may have been interrupted, counts as the mean of the others.
            longest_s, most = self._longest
            seconds, images = ((each / (steps - 1)) * steps for each in (seconds - longest_s, images - most))
            left_out_ns = round(longest_s * _NS)
        own = [round(seconds * _NS), round(images), steps, self.limit, self._cost_ns, left_out_ns]
        self._forget()
        return own

    def _answer(self) -> None:
        """As worker 0, receive the measurements of all, and send them to all."""
        workers = self._workers
        if workers.rank > 0:
            return
        try:
            self._table += [self._received(source)[0] for source in range(1, workers.size)]
            if any(ns < 0 for ns, *_ in self._table):
                self._table = [_LEAVES] * workers.size
        except PeerLost as error:
            self._lost(error)
        self._notify_all(self._table)

    def _shared(self) -> list[list[int]]:
        """Return the measurements of all, once worker 0 has sent them."""
        if self._workers.rank > 0 and self._table[0][0] >= 0:
            try:
                self._table = self._received(0)
            except PeerLost as error:
                self._lost(error)
        if self._table[0][0] < 0:
            self._stop_following()
        return self._table

    def _lost(self, error: PeerLost) -> None:
        """Continue without meetings, unless workers regroup."""
        if self._regroups:
            raise error
        self._table = [_LEAVES] * self._workers.size

    def _received(self, source: int) -> list[list[int]]:
        numbers = self._workers.receive(source, _TAG)[1].tensor
        assert numbers is not None, "measurements are numbers"
        found: list[list[int]] = numbers.view(-1, len(_LEAVES)).tolist()
        return found

    def _share(self, own: list[int]) -> None:
        self._workers.send(0, Message(Kind.VECTOR, torch.tensor(own), tag=_TAG))

    def _notify_all(self, table: list[list[int]]) -> None:
        message = Message(Kind.VECTOR, torch.tensor(table).flatten(), tag=_TAG)
        for to in range(1, self._workers.size):
            try:
                self._workers.send(to, message)
            except PeerLost:
                if self._regroups:
                    raise
