"""The position of a worker's loop, and how a successor's loop reaches the position of the others.

Marks say where the loops of all workers are when an epoch begins. Positions say where loops that run in
lockstep are inside an epoch, so that a successor of worker 0 reaches the same batch:

    others     batch 4  step ✝ ───────────── new view ──── position(epoch 2, 4 batches taken, …) ── step, again
    successor                 ▷ gathering ── new view ──── ◀ waits for it ── leaves 4 batches out ── step

A worker notes its position whenever it comes to a step, or to the end of its share of an epoch: there, and
nowhere else, all are at the same line of the script. Each worker that has one of the steps at which all go on
leaves it in the store.

Of schedulers and the like a successor takes over the plain values in their `state_dict`. Nothing is
unpickled: what is not a number, a text or a list of such (functions, tensors, counters) stays as the
successor's own script has made it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from torch import Tensor

from polyrhythm.api.loop.distributed_optimizer import DistributedOptimizer
from polyrhythm.api.loop.random_state import RandomStateToRestore
from polyrhythm.api.loop.shard import Shard
from polyrhythm.api.loop.store_board import StoreBoard
from polyrhythm.errors import RequestError

_PLAIN = (bool, int, float, str, type(None))
_NUMBERS = (int, float, Tensor)


class Kept(Protocol):
    """Something with a state, such as a learning-rate scheduler."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take it back."""


def plain_state(kept: Kept, *, tensors: bool = False) -> dict[str, Any]:
    """Return what of a state is plain, JSON-able.

    Args:
        kept: whose.
        tensors: whether tensors count as plain as well; copies of them are returned.
    """
    found: dict[str, Any] = _plain(kept.state_dict(), (*_PLAIN, Tensor) if tensors else _PLAIN)
    return found


def take_state(kept: Kept, handed: dict[str, Any]) -> None:
    """Overwrite the plain values of a state."""
    kept.load_state_dict(_merged(kept.state_dict(), handed))


def _plain(value: Any, kinds: tuple[type, ...]) -> Any:
    """Return the plain part of a value; of a list all or nothing, but for states in it."""
    if isinstance(value, dict):
        return {
            key: _plain(part, kinds)
            for key, part in value.items()
            if isinstance(key, str) and _is_plain(part, kinds)
        }
    if isinstance(value, list | tuple):
        return [_plain(part, kinds) for part in value]
    return value.detach().clone() if isinstance(value, Tensor) else value


def _is_plain(value: Any, kinds: tuple[type, ...]) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(part, kinds) for part in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value)
    return isinstance(value, kinds)


def _merged(own: Any, handed: Any) -> Any:
    if isinstance(own, dict) and isinstance(handed, dict):
        return {
            key: _merged(value, handed[key]) if key in handed else value for key, value in own.items()
        } | {key: value for key, value in handed.items() if key not in own}
    if isinstance(own, list | tuple) and isinstance(handed, list) and len(own) == len(handed):
        return type(own)(_merged(*pair) for pair in zip(own, handed, strict=True))
    if isinstance(own, _NUMBERS) and not isinstance(handed, (*_NUMBERS, type(None))):
        raise RequestError(f"a saved state has {handed!r:.40} for the number {own}: take another")
    if isinstance(own, dict) and not isinstance(handed, dict):
        raise RequestError(f"a saved state has {handed!r:.40} for an object: take another")
    return handed


@dataclass(frozen=True)
class Mark:
    """One beginning, as whoever comes there first leaves it for all.

    Attributes:
        present: the workers that have a share of the epoch.
        entering: of those, successors that are let in now, where workers go in step.
        shards: how many epochs of each shard have been handed out.
        averages: how many averages have been taken.
        steps: that this worker has taken.
        rates: the learning rate of every parameter group.
        kept: plain states of what the loop keeps.
    """

    present: tuple[int, ...]
    entering: tuple[int, ...]
    shards: tuple[int, ...]
    averages: int
    steps: int
    rates: tuple[float, ...]
    kept: tuple[dict[str, Any], ...]

    def to_text(self) -> str:
        """Write it for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Mark:
        """Read what `to_text` wrote."""
        told: dict[str, Any] = json.loads(text)
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in told.items()
        }
        return cls(**values)


ALL = 1 << 62
"""Batches taken of an epoch of which nothing is left."""
UNKNOWN = -1
"""Batches taken where they do not come from a shard."""
_KEPT = 3
"""Positions: of the step under way, of the one before, which may have to be taken again, and of a share's end."""


@dataclass(frozen=True)
class Position:
    """One of a loop.

    Attributes:
        loop: how many loops over epochs the script has been through before.
        epoch: in this loop.
        steps: that have been done.
        taken: batches of the epoch that those steps were made of; `ALL` of them, or `UNKNOWN` without a shard.
        at_end: whether a share of the epoch has been handed out to its end.
        averages: how many have been taken.
        rates: the learning rate of every parameter group.
        kept: plain states of what the loop keeps.
    """

    loop: int
    epoch: int
    steps: int
    taken: int
    at_end: bool
    averages: int
    rates: tuple[float, ...]
    kept: tuple[dict[str, Any], ...]

    def to_text(self) -> str:
        """Write it for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Position:
        """Read what `to_text` wrote."""
        told: dict[str, Any] = json.loads(text)
        return cls(**told | {"rates": tuple(told["rates"]), "kept": tuple(told["kept"])})


class Logbook:
    """Notes one worker's positions, and leaves them where a new leader of its formation looks for them.

    Args:
        board: where.
    """

    def __init__(self, board: StoreBoard) -> None:
        self._board = board
        self._latest: list[Position] = []
        self._told_to = 0
        self._owed: int | None = None

    def note(self, position: Position) -> None:
        """Note a position."""
        if (
            position not in self._latest[-1:]
        ):  # a step's exchange may begin in a backward pass, and again in the step
            self._latest = [*self._latest[1 - _KEPT :], position]
        if self._owed is not None:
            self._tell()
            if position.steps > self._owed:
                self._owed = None

    def formed(self, leader: int, steps: int) -> None:
        """A formation has been made, with the steps that count; who leads may have begun to, and have no position.

        Args:
            leader: how many have led before the one who leads it.
            steps: that this worker has done, as far as they count.
        """
        if leader:
            self._told_to, self._owed = leader, steps
            self._tell()

    def _tell(self) -> None:
        for position in self._latest:
            if position.steps == self._owed:
                self._board.post(_key(self._told_to, position.steps, position.at_end), position.to_text())


def find_position(board: StoreBoard, leader: int, steps: int, epoch: tuple[int, int]) -> Position | None:
    """Look for what workers have left for a new leader; None as long as nobody has.

    Args:
        board: where.
        leader: how many have led before it.
        steps: with which its formation goes on.
        epoch: loop and epoch that the last leader had begun; of two positions the one in there counts.
    """
    texts = [board.read(_key(leader, steps, at_end)) for at_end in (True, False)]
    found = [Position.from_text(text) for text in texts if text is not None]
    inside = [position for position in found if (position.loop, position.epoch) == epoch]
    return next(iter(inside or found), None)


def _key(leader: int, steps: int, at_end: bool) -> str:
    return f"script/position/{leader}/{steps}/{'end' if at_end else 'step'}"


class LoopProgress:
    """Counts how far one worker's loop has come.

    Attributes:
        averages: how many averages it has taken.
        kept: what the loop keeps that a successor must have, such as schedulers.
        handed: their states, where a resumed run begins with others than their own.
        optimizer: once there is one.
        in_step: whether workers take their steps together.
    """

    def __init__(self, *, in_step: bool = False) -> None:
        self.averages = 0
        self.in_step = in_step
        self.kept: Sequence[Kept] = ()
        self.handed: Sequence[dict[str, Any]] = ()
        self.optimizer: DistributedOptimizer | None = None
        self._shards: list[Shard | None] = []
        self._resumes: tuple[Sequence[dict[str, Any]], RandomStateToRestore] | None = None

    @property
    def next_shard(self) -> int:
        """The number of the next shard."""
        return len(self._shards)

    def add(self, shard: Shard) -> None:
        """Note another shard."""
        self._shards.append(shard)
        if self._resumes is not None:
            self._resume(len(self._shards) - 1)

    @property
    def steps_per_epoch(self) -> int:
        """Batches of the first shard in an epoch; 0 where that is not known."""
        first = next((shard for shard in self._shards if shard is not None), None)
        return 0 if first is None else first.steps

    def shard_names(self) -> list[str]:
        """Return what the shards are of."""
        return [shard.name for shard in self._shards if shard is not None]

    def keep(self, kept: Sequence[Kept]) -> None:
        """Keep these objects for successors; those of a resumed run get the states that they had there.

        Raises:
            RequestError: a resumed run had others.
        """
        if self.handed and len(self.handed) != len(kept):
            raise RequestError(
                f"group.epochs was given {len(self.handed)} objects to keep where this run goes on, and {len(kept)} "
                "here: give the same"
            )
        for each, handed in zip(kept, self.handed, strict=False):
            take_state(each, handed)
        self.kept, self.handed = kept, ()

    def shard_states(self, *, ends: bool) -> list[dict[str, Any]]:
        """Return where every shard is; see `Shard.state`."""
        return [{} if shard is None else shard.state(ends=ends) for shard in self._shards]

    def resume(self, shards: Sequence[dict[str, Any]], random: RandomStateToRestore) -> None:
        """Go on with every shard, those that are made later too, where another run was.

        Args:
            shards: where they were there.
            random: what this worker draws from.
        """
        self._resumes = shards, random
        for number in range(len(self._shards)):
            self._resume(number)

    def _resume(self, number: int) -> None:
        assert self._resumes is not None, "it is resumed"
        states, random = self._resumes
        shard = self._shards[number]
        if shard is not None and number < len(states) and states[number]:
            shard.resume(states[number], random)

    def mark(self, present: Sequence[int], entering: Sequence[int]) -> Mark:
        """Return where this loop is.

        Args:
            present: the workers that have a share of what comes next.
            entering: of those, who is let in now.
        """
        assert self.optimizer is not None, "a loop has something to train"
        return Mark(
            present=tuple(present),
            entering=tuple(entering),
            shards=tuple(1 if shard is None else shard.epoch for shard in self._shards),
            averages=self.averages,
            steps=self.optimizer.steps,
            rates=tuple(float(group["lr"]) for group in self.optimizer.param_groups),
            kept=tuple(map(plain_state, self.kept)),
        )

    def check_alike(self, mark: Mark) -> None:
        """Compare the learning rates with those of the worker that came first to the beginning of an epoch.

        Raises:
            RequestError: they differ, where workers take their steps together.
        """
        assert self.optimizer is not None, "a loop has something to train"
        own = tuple(float(group["lr"]) for group in self.optimizer.param_groups)
        if self.in_step and not self.optimizer.was_uneven and own != mark.rates:
            here, there = (", ".join(f"{rate:g}" for rate in rates) for rates in (own, mark.rates))
            raise RequestError(
                f"workers have different learning rates at the beginning of an epoch, {here} here and {there} on "
                "another: schedule by what is the same on all, such as "
                "scheduler.step(group.average(loss))"
            )

    def position(self, epoch: tuple[int, int], taken: int, *, at_end: bool = False) -> Position:
        """Return where this loop is, at a step or at the end of a share.

        Args:
            epoch: loop and epoch.
            taken: batches of it.
            at_end: whether a share of it has been handed out to its end.
        """
        assert self.optimizer is not None, "a loop has something to train"
        return Position(
            loop=epoch[0],
            epoch=epoch[1],
            steps=self.optimizer.steps,
            taken=taken,
            at_end=at_end,
            averages=self.averages,
            rates=tuple(float(group["lr"]) for group in self.optimizer.param_groups),
            kept=tuple(map(plain_state, self.kept)),
        )

    def come_to(self, position: Position) -> None:
        """Go on inside an epoch, to whose beginning it has gone, where the others are."""
        self.averages = position.averages
        self._take(position.kept, position.rates)

    def go_to(self, mark: Mark) -> None:
        """Go on where the others were at a mark, but for the steps that this worker has taken."""
        self.averages = mark.averages
        for shard, epoch in zip(self._shards, mark.shards, strict=False):
            if shard is not None:
                shard.epoch = epoch
        not_made = len(mark.shards) - len(self._shards)
        self._shards += [None] * not_made  # nor will this loop make them
        self._take(mark.kept, mark.rates)

    def _take(self, states: Sequence[dict[str, Any]], rates: Sequence[float]) -> None:
        assert self.optimizer is not None, "a loop has something to train"
        for kept, state in zip(self.kept, states, strict=True):
            take_state(kept, state)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
