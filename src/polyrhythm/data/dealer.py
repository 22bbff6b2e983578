"""Work that is drawn: an epoch is one seeded order of images, and the next batches go to whichever unit asks.

A *unit* is what takes a batch of its own: a worker, or a group of workers that takes its steps together.

    order     a b c d e f g h i j k l m n o p        one epoch; a cursor moves from left to right
    unit 0    a b . . e f g h . . . . . . . p        each `Grant` is a range of it: consecutive batches
    unit 1    . . c d . . . . i j k l . . . .
    unit 2    . . . . . . . . . . . . m n o .

Where R images of an epoch remain, a unit of speed v_i (images per second, as measured) is granted

    R v_i / (2 Σ v)     images, in whole batches, at least one, and at most as many batches as it has done before

which is weighted factoring (Hummel, Schonberg, Flynn, "Factoring: a method for scheduling parallel loops", CACM 35(8),
1992; weighted: Hummel, Schmidt, Uma, Wein, "Load-sharing in heterogeneous systems via weighted factoring", SPAA 1996).
Few messages are needed, and units finish within about a batch of each other however uneven they are. Guided chunks of
R/N let a slow unit take a quarter of an epoch first. The last bound keeps a speed that was measured over one batch
from deciding on half an epoch.

The R images left make k = ceil(R / batch) batches, of floor(R/k) or ceil(R/k) images each, so no batch is ragged.

A grant also contains the progress of the whole run at each of its batches, estimated from the speeds of all
units; learning rates follow it. (The place of a batch in its epoch would not do, since all units work in
different parts of it.)

A grant is a function of a unit and its number of steps, and a repeated request returns the same grant: a
resumed unit, a replacement and every member of a group get the same batches. A unit that has failed returns
the batches that it had not completed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from math import ceil
from typing import Any, NamedTuple

Range = tuple[int, int]
"""Places of an epoch's order, from the first to before the second."""


class DrawnBatch(NamedTuple):
    """A batch of a unit.

    Attributes:
        epoch: epoch of the order.
        start: position of the first image in that order.
        stop: position after the last image.
        reached: images completed by all units before this batch, estimated from their speeds.
    """

    epoch: int
    start: int
    stop: int
    reached: float


@dataclass(frozen=True, slots=True)
class Grant:
    """Consecutive batches of one epoch, for one unit.

    Attributes:
        step: number of the unit's steps before these batches.
        epoch: epoch of the order; the number of epochs if no work remains.
        start: position of the first image in that order.
        stop: position after the last image.
        batches: number of batches; 0 if no work remains.
        reached: images of the run completed by all units before the first batch, estimated from their speeds.
        until: images of the run completed by all units after the last batch, estimated in the same way.
    """

    step: int
    epoch: int
    start: int
    stop: int
    batches: int
    reached: int = 0
    until: int = 0

    @property
    def end(self) -> int:
        """The unit's steps after them."""
        return self.step + self.batches

    @property
    def images(self) -> int:
        """Images of all of them."""
        return self.stop - self.start

    def batch(self, step: int) -> DrawnBatch:
        """Return the batch of one of the unit's steps."""
        reached = self.reached + (self.until - self.reached) * (step - self.step) / self.batches
        return DrawnBatch(self.epoch, self._place(step), self._place(step + 1), reached)

    def before(self, step: int) -> Grant:
        """Return the part of the grant before a step."""
        return replace(self, stop=self._place(step), batches=step - self.step)

    def _place(self, step: int) -> int:
        return self.start + self.images * (step - self.step) // self.batches


class Unit:
    """Grants and speed of one unit.

    Args:
        size: images of its full batch, in units of a worker's batch.
        step: number of its steps before its first grant.

    Attributes:
        size: the argument of that name.
        first: number of steps before its first remembered grant.
        grants: consecutive grants, without a gap.
        speed: images per second; None before it is known.
        gone: whether the unit has failed and has no replacement yet.
        former: grants of a failed predecessor with another step count, until its failure is reported.
    """

    def __init__(self, size: int, step: int = 0) -> None:
        self.size = size
        self.first = step
        self.grants: list[Grant] = []
        self.speed: float | None = None
        self.gone = False
        self.former: list[Grant] = []
        self._asked: tuple[float, int] | None = None
        self._images = 0

    @property
    def end(self) -> int:
        """Steps for which it has been granted batches."""
        return self.grants[-1].end if self.grants else self.first

    def grant_of(self, step: int) -> Grant:
        """Return the grant that holds one of its steps."""
        found = bisect_right(self.grants, step, key=lambda grant: grant.step) - 1
        if found < 0 or step >= self.grants[found].end:
            raise IndexError(
                f"no batch is known of step {step}: there are those of {self.first} to {self.end}"
            )
        return self.grants[found]

    def add(self, grant: Grant, now_s: float) -> None:
        """Note a grant that is asked for now, when the last batch of the one before has just begun."""
        done = self._images
        if self.grants:
            _, start, stop, _ = self.grants[-1].batch(self.end - 1)
            done -= stop - start
        if self._asked is not None and now_s > self._asked[0] and done > self._asked[1]:
            latest = (done - self._asked[1]) / (now_s - self._asked[0])
            self.speed = latest if self.speed is None else (self.speed + latest) / 2
        self._asked = now_s, done
        self._images += grant.images
        self.grants.append(grant)

    def outstanding(self, now_s: float) -> float:
        """Return the images granted and not completed yet, estimated from the unit's speed."""
        if not self.grants or self.gone:
            return 0.0
        images = self.grants[-1].images
        if self.speed is None or self._asked is None:
            return images
        return max(0.0, images - (now_s - self._asked[0]) * self.speed)

    def forget_pace(self) -> None:
        """Measure again: another process takes its place."""
        self._asked = None


@dataclass(frozen=True)
class Deck:
    """The work of a run: its images and batch sizes.

    Attributes:
        images: images of each epoch's order.
        batch_sizes: batch sizes of one worker, an epoch each.
    """

    images: tuple[int, ...]
    batch_sizes: tuple[int, ...]

    @property
    def epochs(self) -> int:
        """Return the number of epochs."""
        return len(self.images)

    @property
    def all_images(self) -> int:
        """Images of the run."""
        return sum(self.images)


class Dealer:
    """The single owner of a run's work assignment; a pure object without clock or messages.

    Args:
        deck: the work of the run.
        sizes: workers of each unit, which together take its batches.
        steps: number of steps of each unit so far; default: none.
        begun: remaining ranges of epochs that were begun elsewhere; other epochs are whole.
    """

    def __init__(
        self,
        deck: Deck,
        sizes: Sequence[int],
        *,
        steps: Sequence[int] = (),
        begun: Mapping[int, Iterable[Range]] | None = None,
    ) -> None:
        self.deck = deck
        self._units = [Unit(size, step) for size, step in zip(sizes, steps or [0] * len(sizes), strict=True)]
        self._free: list[list[Range]] = [
            [(start, stop) for start, stop in (begun or {}).get(epoch, [(0, images)]) if start < stop]
            for epoch, images in enumerate(deck.images)
        ]
        self._script: dict[int, list[Grant]] | None = None

    @property
    def units(self) -> int:
        """Return the number of units."""
        return len(self._units)

    @property
    def undealt(self) -> int:
        """Return the number of images that have not been granted yet, over all epochs."""
        return sum(stop - start for ranges in self._free for start, stop in ranges)

    @property
    def grants(self) -> list[list[Grant]]:
        """Return the grants of each unit."""
        return [list(unit.grants) for unit in self._units]

    def follow(self, script: Sequence[Sequence[Grant]]) -> None:
        """Grant what each unit was granted in another run, in place of deciding again."""
        self._script = {unit: list(grants) for unit, grants in enumerate(script)}

    def draw(self, unit: int, step: int, now_s: float) -> Grant:
        """Return the batches of a unit from one of its steps on, drawing new ones where it has none yet.

        Args:
            unit: number of the unit.
            step: the unit's steps before the first batch that it asks for.
            now_s: the time, in seconds; for speeds alone.

        Returns:
            The grant that contains the step; one without batches if no work remains.
        """
        asking = self._units[unit]
        if asking.first <= step < asking.end:
            return asking.grant_of(step)
        if step != asking.end or asking.gone:
            # Either more steps count than were known when the unit was declared failed, and others compute
            # those again, or a replacement restarts its step count because the previous count is unknown.
            if step != asking.end:
                if not asking.gone:
                    asking.former += asking.grants
                asking.grants.clear()
                asking.first = step
            asking.gone = False
            asking.forget_pace()
        grant = self._scripted(unit, step) if self._script is not None else self._drawn(asking, step, now_s)
        if grant is None:
            return Grant(step, self.deck.epochs, 0, 0, 0)
        self._take(grant)
        asking.add(grant, now_s)
        return grant

    def note(self, unit: int, grant: Grant) -> None:
        """Enter a grant that another owner of this deal has made; or what it took back, if that has no batches."""
        held = self._units[unit]
        if not grant.batches:
            self._note_returned(held, grant)
            return
        if grant.step != held.end:
            held.grants.clear()
            held.first = grant.step
        held.gone = False
        self._take(grant)
        held.grants.append(grant)

    def return_batches(self, unit: int, step: int) -> list[Grant]:
        """Take back the uncompleted batches of a failed unit; other units draw them.

        Args:
            unit: number of the unit.
            step: number of the unit's steps that count.

        Returns:
            The places that are free again, as grants without batches, from the last step to the first.
        """
        gone = self._units[unit]
        gone.gone = True
        found: list[Grant] = []
        while gone.grants and gone.grants[-1].end > max(step, gone.first):
            last = gone.grants.pop()
            kept = last.before(max(step, last.step))
            if kept.batches:
                gone.grants.append(kept)
            found.append(self._free_again(last, kept))
        return found

    def return_former(self, unit: int, step: int) -> list[Grant]:
        """Return what a former unit had not done, if the unit counts its steps otherwise; see `return_batches`."""
        held = self._units[unit]
        former, held.former = held.former, []
        return [
            self._free_again(grant, grant.before(max(step, grant.step)), at=held.end)
            for grant in former
            if grant.end > step
        ]

    def images_of(self, unit: int, step: int) -> int:
        """Return the images in the batch of one of a unit's steps."""
        batch = self._units[unit].grant_of(step).batch(step)
        return batch.stop - batch.start

    def steps_of(self, unit: int) -> range:
        """Return the steps of a unit for which batches have been granted, as far as that is remembered."""
        return range(self._units[unit].first, self._units[unit].end)

    def progress_of(self, unit: int, step: int) -> tuple[int, int]:
        """Return the epoch and the place in its order of a unit's step; the end of its last batch where it has none."""
        held = self._units[unit]
        if step in range(held.first, held.end):
            batch = held.grant_of(step).batch(step)
            return batch.epoch, batch.start
        if held.grants:
            return held.grants[-1].epoch, held.grants[-1].stop
        return next((epoch for epoch, ranges in enumerate(self._free) if ranges), self.deck.epochs), 0

    def advance_to(self, unit: int, step: int) -> int:
        """Return the latest epoch in which a unit had batches up to a step; the step's own epoch may be earlier."""
        return max((grant.epoch for grant in self._units[unit].grants if grant.step <= step), default=0)

    def left(self, steps: Sequence[int]) -> dict[int, list[Range]]:
        """Return the ranges of every epoch that remain after each unit has done `steps` steps.

        Completed epochs have no range; epochs that were not begun have one range, the whole epoch.
        """
        found = {epoch: list(ranges) for epoch, ranges in enumerate(self._free)}
        for unit, step in zip(self._units, steps, strict=True):
            for grant in unit.grants:
                if grant.end > step:
                    done = grant.before(max(step, grant.step))
                    found[grant.epoch].append((done.stop, grant.stop))
        return {epoch: merged(ranges) for epoch, ranges in found.items()}

    def to_json(self) -> dict[str, Any]:
        """Return the state as a JSON-able dict, without grants of epochs that no unit can return to.

        A resumed unit starts no earlier than at the beginning of its epoch; it has requested one or two
        grants more.
        """
        oldest = min((unit.grants[-3:][0].epoch for unit in self._units if unit.grants), default=0)
        return {
            "free": [[list(each) for each in ranges] for ranges in self._free],
            "units": [
                {
                    "end": unit.end,
                    "grants": [list(astuple(grant)) for grant in unit.grants if grant.epoch >= oldest],
                }
                for unit in self._units
            ],
        }

    @classmethod
    def from_json(cls, deck: Deck, sizes: Sequence[int], state: Mapping[str, Any]) -> Dealer:
        """Return the deal that `to_json` has written, of the same units; the deck may have other epochs behind it."""
        dealer = cls(deck, sizes)
        dealer.load(state)
        return dealer

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what `to_json` has written, of epochs that this deck has.

        Raises:
            ValueError: it cannot be a state of such a deal.
        """
        for epoch, ranges in enumerate(state["free"][: self.deck.epochs]):
            places = [
                0,
                *(place for start, stop in ranges for place in (start, stop)),
                self.deck.images[epoch],
            ]
            if places != sorted(places):
                raise ValueError(f"epoch {epoch} has no images {ranges!r:.60}")
            self._free[epoch] = [(start, stop) for start, stop in ranges]
        for unit, entry in zip(self._units, state["units"], strict=True):
            grants = [Grant(*values) for values in entry["grants"]]
            unit.grants = [grant for grant in grants if grant.epoch < self.deck.epochs]
            unit.first = unit.grants[0].step if unit.grants else entry["end"]
            end = unit.first
            for grant in unit.grants:
                images = self.deck.images[grant.epoch]
                fits = 0 <= grant.start < grant.stop <= images and 0 < grant.batches <= grant.images
                if not fits or grant.step < end or not 0 <= grant.reached <= grant.until:
                    raise ValueError(f"no unit has been granted {grant}")
                end = grant.end

    def _free_again(self, grant: Grant, kept: Grant, at: int | None = None) -> Grant:
        """Put what is not kept of a grant back; return it without batches, after the steps that its unit then has."""
        self._free[grant.epoch] = merged([*self._free[grant.epoch], (kept.stop, grant.stop)])
        return Grant(kept.end if at is None else at, grant.epoch, kept.stop, grant.stop, 0)

    def _note_returned(self, held: Unit, grant: Grant) -> None:
        """Enter places that are free again, found by position, since step counts may have restarted."""
        if grant.start < grant.stop:
            self._free[grant.epoch] = merged([*self._free[grant.epoch], (grant.start, grant.stop)])
        last = held.grants[-1] if held.grants else None
        if (
            last is not None
            and (last.epoch, last.stop) == (grant.epoch, grant.stop)
            and last.start <= grant.start
        ):
            held.gone = True
            held.grants.pop()
            if last.start < grant.start:
                held.grants.append(last.before(grant.step))
        elif grant.step != held.end:  # it counts again, and has got nothing yet
            held.grants.clear()
            held.first = grant.step

    def _take(self, grant: Grant) -> None:
        taken: list[Range] = []
        for start, stop in self._free[grant.epoch]:
            taken += [(start, min(stop, grant.start)), (max(start, grant.stop), stop)]
        self._free[grant.epoch] = [(start, stop) for start, stop in taken if start < stop]

    def _scripted(self, unit: int, step: int) -> Grant | None:
        assert self._script is not None
        return next((grant for grant in self._script[unit] if grant.step == step), None)

    def _drawn(self, asking: Unit, step: int, now_s: float) -> Grant | None:
        deck = self.deck
        epoch = next((epoch for epoch, ranges in enumerate(self._free) if ranges), None)
        if epoch is None:
            return None
        ranges = self._free[epoch]
        images, batch = sum(stop - start for start, stop in ranges), deck.batch_sizes[epoch] * asking.size
        batches = -(-images // batch)
        share = self._share(asking) / 2
        wanted = min(ceil(batches * share), max(1, asking.end - asking.first))
        start, stop = ranges[0]
        taken = min(images * wanted // batches, stop - start)
        # A range that was given back may be shorter than a batch.
        batches = min(wanted, max(1, -(-taken // batch)))
        others = sum(unit.outstanding(now_s) for unit in self._units if unit is not asking)
        reached = max(0, round(sum(deck.images) - self.undealt - others))
        until = min(deck.all_images, reached + round(taken / (2 * share)))
        return Grant(step, epoch, start, start + taken, batches, reached, until)

    def _share(self, asking: Unit) -> float:
        """Return the share of a unit in the speed of all that are there."""
        there = [unit for unit in self._units if not unit.gone]
        known = [unit.speed / unit.size for unit in there if unit.speed is not None]
        usual = sum(known) / len(known) if known else 1.0
        speeds = [usual * unit.size if unit.speed is None else unit.speed for unit in there]
        own = usual * asking.size if asking.speed is None else asking.speed
        return own / sum(speeds)


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Return ranges in order, those that touch as one, and without empty ones."""
    found: list[Range] = []
    for start, stop in sorted(each for each in ranges if each[0] < each[1]):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found
