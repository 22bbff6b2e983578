"""Balance on one worker: what it measures and tells the others, and the parts on which all decide.

    worker 1 ── [ns, images, steps, limit, cost] ──▶ worker 0 ── those of all ──▶ worker 1
                                 all: the same `Controller` on the same numbers

All workers do this after the same steps, so they change their parts together and nothing says which: they follow from
what all know. How often is agreed in the same way: so seldom that it takes at most 0.2 % of a step.

Workers that may be s steps ahead of the slowest (SSP) would wait for each other at a meeting, and then push at the same
moments over the same link. So once parts stay as they are, or where they began with what was given, they do not meet,
but tell at one step, hear at a later one, when the bound says that all have told, and decide at a third:

    step k          each tells worker 0
    step k + d      worker 0 has heard all of them, and tells all            d = s + 2
    step k + 2 d    each has heard worker 0, and decides

Where workers regroup, all begin anew with equal parts. With servers a run goes on without a lost worker, and nobody
regroups: worker 0 then says that parts are equal from here on, and so does everybody who finds worker 0 gone.

Groups whose workers draw together share their batches in the same way, each group by itself; its first worker is to it
what worker 0 is to all. A group that has lost somebody goes on with equal parts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from math import ceil
from typing import Any

import torch

from polyrhythm.communication.communicator import Clock, Communicator
from polyrhythm.communication.exchanger import Exchanger
from polyrhythm.communication.message import Kind, Message
from polyrhythm.data.balance import Balance, Controller, split
from polyrhythm.errors import PeerLost, RequestError
from polyrhythm.roles.world import World
from polyrhythm.strategies.strategy import Strategy

UNEVEN = 0.1
"""By what share workers must differ for their parts to follow them, where nobody has asked for it."""
_LEAST_S = 5.0
"""Of computing in an epoch: less says nothing about machines."""
_WARM_UP_STEPS, _FIRST_STEPS = 1, 2
_COST, _MOST_STEPS, _STEPS_APART = 0.002, 64, 10
_LONGEST_APART = 16 * _STEPS_APART
"""Workers that are at different steps wait for each other at every meeting: fewer, while parts stay as they are."""
_ON_THE_WAY = 2
"""Steps beyond the bound after which what a worker has told is there: it may still be about to tell it, or its answer
from the servers may be awaited in the middle of its next step."""
_TAG = 1 << 20
_NS = 1e9
_LEAVES = [-1, 0, 0, 0, 0]


def balances(
    balance: Balance,
    strategy: Strategy,
    workers: int,
    batch: int,
    *,
    compiled: bool = False,
    drawn: bool = True,
) -> bool:
    """Return whether workers' parts of global batches may differ.

    Args:
        balance: as asked for.
        strategy: of the run.
        workers: how many there are.
        batch: images of a global batch.
        compiled: whether full batches are compiled.
        drawn: whether workers draw their batches, where they go at their own pace.

    Raises:
        RequestError: it was asked for and cannot be had; with the reason and what would work.
    """
    balance.check(workers, batch)
    if workers == 1 or (balance.optional and not balance.follows):
        return False
    traits, reason = strategy.traits(workers), ""
    grouped = shares_in_groups(strategy, workers)
    if not (traits.lockstep or traits.skips_steps or traits.scales_parts or grouped):
        reason = f"workers of {strategy} go each at its own pace, which needs no balance: leave balance out"
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
    elif balance.optional and traits.skips_steps:  # nobody waits for a slow worker there
        reason = "late gradients are left out"
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
    """Return what balances one worker's parts; None where all are equal.

    Args:
        balance: as asked for.
        strategy: of the run.
        world: where this worker is.
        workers: the workers' communicator, with which the part was made.
        batch: images of a global batch; of this worker's group, where groups draw.
        compiled: whether full batches are compiled.
        drawn: whether workers draw their batches.
        least: images of a worker at least.
        compute_time: the seconds in which this worker has not stood still, from any beginning, by which whole steps are
            measured; None: nothing but passes takes time.
        exchanger: of this worker, where exchanges are entries of a log, as these meetings then are.
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
        exchanger=exchanger,
    )
    if world.rejoins and not regroups:  # the others know nothing of it, and may wait for its predecessor
        found.leave()
    return found


def shares_in_groups(strategy: Strategy, workers: int) -> bool:
    """Whether groups draw batches which their workers share, in step and all of them or none."""
    traits = strategy.traits(workers)
    # Leaf servers go on at once without a lost worker, whose part then nobody has.
    return traits.draws and not traits.leaves and any(len(group) > 1 for group in traits.groups)


class Balancer:
    """One worker's view of all workers' parts.

    Args:
        balance: as asked for; see `balances`.
        workers: all workers, or those of a group, on a communicator of which nothing else uses the tag of these
            messages.
        batch: images of a global batch.
        group: the indices of the workers that share their batches, where not all do; empty: all.
        everyone: how many workers the run has; 0: these.
        least: images of a worker at least.
        rests: steps between two of these meetings at least, for workers that are at different steps else.
        ahead: by how many steps these may be ahead of the slowest; 0: there is no bound.
        waits: whether fast workers wait for slow ones from the first steps on, so that the first one is due then.
        regroups: whether workers regroup when one is lost.
        meets_every: steps from one meeting of all workers to the next.
        compute_time: the seconds in which this worker has not stood still, from any beginning: then whole steps are
            measured, with their data and updates; None: passes alone, by the clock.
        exchanger: see `balancer_for`.

    Attributes:
        group: as given.
        sizes: the present workers' relative parts, in their order; empty: all alike.
        share: what this worker counts, over what it would with equal parts: its part of a global batch, but 1 where it
            takes more steps with a larger one.
        limit: images that this worker's memory holds; 0: not known.
        compute_time: as given, or the clock's.
        whole_steps: whether that is measured, and not passes alone.
        since_s: when the step or pass under way began, by `compute_time`.
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
        self._until_told = ahead + _ON_THE_WAY if ahead else 0
        self._meets_every = meets_every
        self._clock: Clock = workers.clock
        self.compute_time = compute_time or self._clock.now
        self.whole_steps = compute_time is not None
        self.since_s = 0.0
        self.limit = 0
        self.regroup(workers, group or tuple(range(workers.size)), batch)

    @property
    def images(self) -> tuple[int, ...]:
        """Images of all workers of the run in a full global batch; 0 for those that are absent."""
        parts = split(self._batch, self.sizes or [1] * len(self._members))
        of = dict(zip(self._members, parts, strict=True))
        return tuple(of.get(worker, 0) for worker in range(self._everyone))

    def regroup(self, workers: Communicator, members: tuple[int, ...], batch: int, step: int = 0) -> None:
        """Begin with these workers, who all do so: with equal parts, or those that were given, if only to begin with.

        Args:
            workers: those who are there.
            members: their indices among all.
            batch: images that they have together.
            step: steps done.
        """
        self._workers, self._members, self._batch = workers, members, batch
        self._worker = members[workers.rank]
        self._follows = self._balance.follows and not self._balance.optional
        self._observes = self._balance.follows
        self._controller: Controller | None = None
        self._apart = self._rests
        self._left = max(0 if self._waits else self._rests, self._meetings(_WARM_UP_STEPS + _FIRST_STEPS))
        self._warm_up = _WARM_UP_STEPS
        self._cost_ns = self._own = 0
        self._table: list[list[int]] = []
        self._part = 0
        self._use(self._first(step))

    def lose(self, there: tuple[int, ...]) -> None:
        """Continue with these workers of the group, with equal parts unless those were given.

        Args:
            there: their indices among all.
        """
        if self._balance.follows:
            self._members = there
            self._stop_following()

    @property
    def speaks(self) -> bool:
        """Whether this worker is the first of those who are there."""
        return self._worker == self._members[0]

    def meetings(self, before: int, done: int) -> int:
        """Return how often all workers have met between two of this worker's steps."""
        return done // self._meets_every - before // self._meets_every

    def resize(self, batch: int, step: int) -> None:
        """Continue with so many images in a global batch, after so many steps."""
        self._batch = batch
        if self._controller is not None:
            self._controller.resize(batch)
            if self.sizes:  # else they have never differed
                self._use(self._controller.sizes)
        else:
            self._use(self._first(step))

    def note(self, images: int, seconds: float) -> None:
        """Add what this worker computed in a step, if that had its part: an epoch's steps differ by one image."""
        if self._warm_up:
            self._warm_up -= 1
        elif abs(images - self._own) <= 1:
            self._seconds += seconds
            self._images += images
            self._steps += 1

    def after(self, step: int, meetings: int = 1) -> bool:
        """Return whether parts have changed; all workers call it after the same meetings.

        Args:
            step: steps done.
            meetings: of all workers since the last call; a worker that skips steps is at several at once.

        Raises:
            PeerLost: another is gone, where workers regroup.
        """
        before = self.sizes
        if not self._observes:
            self._use(self._given(step))
        elif self._follows:
            self._left -= meetings
            while self._left <= 0 and self._observes:
                if self._until_told and self._settled:
                    self._pass()
                else:
                    self._decide(self._exchanged())
        return self.sizes != before

    def after_epoch(self) -> float:
        """Follow the workers' speeds from here on if the epoch has shown that they are uneven.

        Returns:
            By what share the slowest takes longer than the fastest, if that is why; else 0.

        Raises:
            PeerLost: another is gone, where workers regroup.
        """
        if self._follows or not self._observes:
            return 0.0
        table = self._exchanged()
        if not self._observes or min(images for _, images, *_ in table) == 0:
            return 0.0
        if max(ns for ns, *_ in table) < _LEAST_S * _NS:
            return 0.0
        each = [ns / images for ns, images, *_ in table]
        uneven = max(each) / min(each) - 1
        self._follows = uneven > UNEVEN
        if self._follows:
            self._decide(table)
        return uneven if self._follows else 0.0

    def leave(self) -> None:
        """Tell the others, where they may wait for this worker's measurements, that there will be none."""
        if self._observes:
            self._stop_following()
            if self._workers.rank == 0:
                self._tell_all([_LEAVES] * self._workers.size)
            else:
                with suppress(PeerLost):
                    self._tell(_LEAVES)

    @property
    def _settled(self) -> bool:
        """Whether parts have stayed as they were at the last decision, or began with what was given."""
        began_with = self._controller is None and bool(self._balance.begins_with)
        return began_with or self._apart > self._rests

    def _meetings(self, steps: float) -> int:
        return max(1, ceil(steps / self._meets_every))

    def _given(self, step: int) -> tuple[float, ...]:
        return self._of_members(self._balance.parts(step))

    def _first(self, step: int) -> tuple[float, ...]:
        """Return the parts before anything has been measured."""
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
        self._observes = self._follows = False
        self._controller = None
        self._use(())

    def _forget(self) -> None:
        self._seconds, self._images, self._steps = 0.0, 0, 0

    def _decide(self, table: list[list[int]]) -> None:
        """Change parts by what all have measured, and agree on when to do so again."""
        if not self._observes:
            return
        seconds = [ns / max(1, steps) / _NS for ns, _, steps, _, _ in table]
        cost_s = min(cost for *_, cost in table) / _NS
        steps = cost_s / (_COST * max(seconds)) if max(seconds) > 0 else 1
        self._left += max(self._apart, self._meetings(min(_MOST_STEPS, steps)))
        if min(seconds) <= 0:  # somebody has not computed since the last time
            return
        if self._controller is None:
            self._controller = Controller(self._batch, len(table), least=self._least, weights=self.sizes)
        self._controller.most = [limit or float("inf") for *_, limit, _ in table]
        if self._controller.observe(seconds, [images / steps for _, images, steps, _, _ in table]):
            self._use(self._controller.sizes)
            self._apart = self._rests
        elif self._rests:
            self._apart = min(2 * self._apart, _LONGEST_APART)

    def _exchanged(self) -> list[list[int]]:
        """Return what all workers have measured, in their order."""
        began_s = self._clock.now()
        if self._exchanger is not None:
            rows = self._exchanger.rows(self._measured())
            table = [rows.get(member, [0] * len(_LEAVES)) for member in self._members]
        else:
            self._tell_own()
            self._answer()
            table = self._told()
        self._cost_ns = round((self._clock.now() - began_s) * _NS)
        return table

    def _pass(self) -> None:
        """Do the next part of a meeting at which nobody waits."""
        match self._part:
            case 0:
                self._tell_own()
            case 1:
                self._answer()
            case _:
                self._decide(self._told())
        self._part = (self._part + 1) % 3
        if self._part:
            self._left += self._until_told

    def _tell_own(self) -> None:
        """Tell worker 0 what this worker has measured."""
        own = self._measured()
        self._table = [own]
        if self._workers.rank > 0:
            try:
                self._tell(own)
            except PeerLost as error:
                self._lost(error)

    def _measured(self) -> list[int]:
        """Return what this worker has measured since the last time."""
        own = [round(self._seconds * _NS), self._images, self._steps, self.limit, self._cost_ns]
        self._forget()
        return own

    def _answer(self) -> None:
        """As worker 0, hear what all have measured, and tell it to all."""
        workers = self._workers
        if workers.rank > 0:
            return
        try:
            self._table += [self._heard(source)[0] for source in range(1, workers.size)]
            if any(ns < 0 for ns, *_ in self._table):
                self._table = [_LEAVES] * workers.size
        except PeerLost as error:
            self._lost(error)
        self._tell_all(self._table)

    def _told(self) -> list[list[int]]:
        """Return what all have measured, once worker 0 has told it."""
        if self._workers.rank > 0 and self._table[0][0] >= 0:
            try:
                self._table = self._heard(0)
            except PeerLost as error:
                self._lost(error)
        if self._table[0][0] < 0:
            self._stop_following()
        return self._table

    def _lost(self, error: PeerLost) -> None:
        """Go on without meetings, unless workers regroup."""
        if self._regroups:
            raise error
        self._table = [_LEAVES] * self._workers.size

    def _heard(self, source: int) -> list[list[int]]:
        numbers = self._workers.receive(source, _TAG)[1].tensor
        assert numbers is not None, "measurements are numbers"
        found: list[list[int]] = numbers.view(-1, len(_LEAVES)).tolist()
        return found

    def _tell(self, own: list[int]) -> None:
        self._workers.send(0, Message(Kind.VECTOR, torch.tensor(own), tag=_TAG))

    def _tell_all(self, table: list[list[int]]) -> None:
        message = Message(Kind.VECTOR, torch.tensor(table).flatten(), tag=_TAG)
        for to in range(1, self._workers.size):
            try:
                self._workers.send(to, message)
            except PeerLost:
                if self._regroups:
                    raise
