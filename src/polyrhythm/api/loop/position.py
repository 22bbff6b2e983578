"""The position of a worker's loop, and how a replacement's loop reaches the position of the others.

Marks record the positions of the loops of all workers when an epoch begins. Positions record those of loops that run
in lockstep inside an epoch, so that a replacement of worker 0 reaches the same batch:

    others       batch 4  step ✝ ─────────── new view ──── position(epoch 2, 4 batches taken, …) ── step, again
    replacement               ▷ gathering ── new view ──── ◀ waits for it ── leaves 4 batches out ── step

A worker records its position at each step, and at the end of its share of an epoch: there, and
nowhere else, all are at the same line of the script. Each worker with a position at the step from which all continue
posts it in the store.

From schedulers and other kept objects a replacement takes over the plain values in their `state_dict`. Nothing is
unpickled: values other than numbers, texts and lists of these (functions, tensors, counters) stay as the
replacement's own script has made them.
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
    """Object with a state, such as a learning-rate scheduler."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Restore the state."""


def plain_state(kept: Kept, *, tensors: bool = False) -> dict[str, Any]:
    """Return the plain values of a state, JSON-able.

    Args:
        kept: object with the state.
        tensors: whether tensors count as plain as well; copies of them are returned.
    """
    found: dict[str, Any] = _plain(kept.state_dict(), (*_PLAIN, Tensor) if tensors else _PLAIN)
    return found


def take_state(kept: Kept, received: dict[str, Any]) -> None:
    """Overwrite the plain values of a state."""
    kept.load_state_dict(_merged(kept.state_dict(), received))


def _plain(value: Any, kinds: tuple[type, ...]) -> Any:
    """Return the plain part of a value; of a list all or nothing, except for states in it."""
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


def _merged(own: Any, received: Any) -> Any:
    if isinstance(own, dict) and isinstance(received, dict):
        return {
            key: _merged(value, received[key]) if key in received else value for key, value in own.items()
        } | {key: value for key, value in received.items() if key not in own}
    if isinstance(own, list | tuple) and isinstance(received, list) and len(own) == len(received):
        return type(own)(_merged(*pair) for pair in zip(own, received, strict=True))
    if isinstance(own, _NUMBERS) and not isinstance(received, (*_NUMBERS, type(None))):
        raise RequestError(f"a saved state has {received!r:.40} for the number {own}: take another")
    if isinstance(own, dict) and not isinstance(received, dict):
        raise RequestError(f"a saved state has {received!r:.40} for an object: take another")
    return received


@dataclass(frozen=True)
class Mark:
    """Beginning of an epoch, as posted for all by the first worker there.

    Attributes:
        present: workers that have a share of the epoch.
        entering: replacements among them that are admitted now, where workers are in lockstep.
        shards: number of epochs of each shard that have been handed out.
        averages: number of averages taken.
        steps: steps taken by this worker.
        rates: learning rate of every parameter group.
        kept: plain states of the loop's kept objects.
    """

    present: tuple[int, ...]
    entering: tuple[int, ...]
    shards: tuple[int, ...]
    averages: int
    steps: int
    rates: tuple[float, ...]
    kept: tuple[dict[str, Any], ...]

    def to_text(self) -> str:
        """Serialize it for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Mark:
        """Parse the result of `to_text`."""
        fields: dict[str, Any] = json.loads(text)
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
        }
        return cls(**values)


ALL = 1 << 62
"""Batches taken of an epoch without a rest."""
UNKNOWN = -1
"""Batches taken where they are not from a shard."""
_KEPT = 3
"""Positions: of the current step, of the previous one, which may have to be repeated, and of a share's end."""


@dataclass(frozen=True)
class Position:
    """Position of a loop.

    Attributes:
        loop: number of loops over epochs that the script has finished before.
        epoch: number of the epoch in this loop.
        steps: steps done.
        taken: batches of the epoch in those steps; `ALL` of them, or `UNKNOWN` without a shard.
        at_end: whether a share of the epoch has been handed out to its end.
        averages: number of averages taken.
        rates: learning rate of every parameter group.
        kept: plain states of the loop's kept objects.
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
        """Serialize it for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Position:
        """Parse the result of `to_text`."""
        values: dict[str, Any] = json.loads(text)
        return cls(**values | {"rates": tuple(values["rates"]), "kept": tuple(values["kept"])})


class Logbook:
    """Records one worker's positions, and posts them for a new coordinator of its formation.

    Args:
        board: board of the workers.
    """

    def __init__(self, board: StoreBoard) -> None:
        self._board = board
        self._latest: list[Position] = []
        self._reported_to = 0
        self._owed: int | None = None

    def note(self, position: Position) -> None:
        """Note a position."""
        if (
            position not in self._latest[-1:]
        ):  # a step's exchange may begin in a backward pass, and again in the step
            self._latest = [*self._latest[1 - _KEPT :], position]
        if self._owed is not None:
            self._report()
            if position.steps > self._owed:
                self._owed = None

    def formed(self, leader: int, steps: int) -> None:
        """Handle a new formation, with the steps that count; its coordinator may have just begun, without a position.

        Args:
            leader: generation of the formation's coordinator.
            steps: steps of this worker that count.
        """
        if leader:
            self._reported_to, self._owed = leader, steps
            self._report()

    def _report(self) -> None:
        for position in self._latest:
            if position.steps == self._owed:
                self._board.post(_key(self._reported_to, position.steps, position.at_end), position.to_text())


def find_position(board: StoreBoard, leader: int, steps: int, epoch: tuple[int, int]) -> Position | None:
    """Return the position that workers have posted for a new coordinator; None as long as there is none.

    Args:
        board: board of the workers.
        leader: generation of the coordinator.
        steps: steps from which its formation continues.
        epoch: loop and epoch that the last coordinator had begun; of two positions the one in it counts.
    """
    texts = [board.read(_key(leader, steps, at_end)) for at_end in (True, False)]
    found = [Position.from_text(text) for text in texts if text is not None]
    inside = [position for position in found if (position.loop, position.epoch) == epoch]
    return next(iter(inside or found), None)


def _key(leader: int, steps: int, at_end: bool) -> str:
    return f"script/position/{leader}/{steps}/{'end' if at_end else 'step'}"


class LoopProgress:
    """Progress of one worker's loop.

    Attributes:
        averages: number of averages taken.
        kept: objects of the loop that a replacement needs, such as schedulers.
        received: states of these objects, if a resumed run begins with others than their own.
        optimizer: distributed optimizer; None before there is one.
        in_step: whether workers are synchronous.
    """

    def __init__(self, *, in_step: bool = False) -> None:
        self.averages = 0
        self.in_step = in_step
        self.kept: Sequence[Kept] = ()
        self.received: Sequence[dict[str, Any]] = ()
        self.optimizer: DistributedOptimizer | None = None
        self._shards: list[Shard | None] = []
        self._resumes: tuple[Sequence[dict[str, Any]], RandomStateToRestore] | None = None

    @property
    def next_shard(self) -> int:
        """Number of the next shard."""
        return len(self._shards)

    def add(self, shard: Shard) -> None:
        """Add another shard."""
        self._shards.append(shard)
        if self._resumes is not None:
            self._resume(len(self._shards) - 1)

    @property
    def steps_per_epoch(self) -> int:
        """Batches of the first shard in an epoch; 0 where that is not known."""
        first = next((shard for shard in self._shards if shard is not None), None)
        return 0 if first is None else first.steps

    def shard_names(self) -> list[str]:
        """Return the names of the shards."""
        return [shard.name for shard in self._shards if shard is not None]

    def keep(self, kept: Sequence[Kept]) -> None:
        """Keep these objects for replacements; those of a resumed run get the states that they had there.

        Raises:
            RequestError: a resumed run had a different number of them.
        """
        if self.received and len(self.received) != len(kept):
            raise RequestError(
                f"group.epochs was given {len(self.received)} objects to keep in the saved run, and {len(kept)} "
                "here: give the same"
            )
        for each, received in zip(kept, self.received, strict=False):
            take_state(each, received)
        self.kept, self.received = kept, ()

    def shard_states(self, *, ends: bool) -> list[dict[str, Any]]:
        """Return the state of every shard; see `Shard.state`."""
        return [{} if shard is None else shard.state(ends=ends) for shard in self._shards]

    def resume(self, shards: Sequence[dict[str, Any]], random: RandomStateToRestore) -> None:
        """Resume every shard, including those that are made later.

        Args:
            shards: states of the shards in the other run.
            random: random state of this worker.
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
        """Return the present position of this loop as a mark.

        Args:
            present: workers that have a share of the next epoch.
            entering: members that are admitted now.
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
        """Compare the learning rates with those of the worker that was first at the beginning of an epoch.

        Raises:
            RequestError: they differ, where workers are synchronous.
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
        """Return the position of this loop, at a step or at the end of a share.

        Args:
            epoch: loop and epoch.
            taken: number of batches taken of it.
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

    def advance_to(self, position: Position) -> None:
        """Continue inside an epoch at the others' position."""
        self.averages = position.averages
        self._take(position.kept, position.rates)

    def go_to(self, mark: Mark) -> None:
        """Continue at a mark of the others, except for the steps that this worker has taken."""
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
