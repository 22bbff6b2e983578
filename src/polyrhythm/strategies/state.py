"""A strategy's state in a checkpoint, and how it is resharded for another number of workers.

    checkpoint of N workers ─▶ count: which of their steps count ─▶ the rest of the epoch is dealt out among K
    ─▶ merge: what K workers and the servers start from, field by field, and a summary for people

A strategy declares each field of its state: `keep`, `mean` or `reset`, per run, worker, server or pusher. Where these
words do not suffice (SGP divides by mass, `hybrid` joins what its workers had cut), a function takes their place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from polyrhythm.training.optimizer_state import mean_optimizer, weighted_mean

State = tuple[dict[str, Tensor], dict[str, Any]]
"""Named tensors and JSON-able facts: all that a resumed part needs."""


@dataclass(frozen=True)
class Held:
    """State of a strategy in a checkpoint.

    Attributes:
        parameters: flat vector of rank 0, `(n,)`.
        steps: number of steps reported by each worker; 0 without a report.
        workers: states of the workers' parts, by index, where one was reported; for `replicated` parts, that of rank 0.
        servers: the states of all servers.
    """

    parameters: Tensor
    steps: tuple[int, ...]
    workers: dict[int, State]
    servers: list[State]


@dataclass(frozen=True)
class Merged:
    """Checkpoint converted to a different number of workers.

    Attributes:
        held: converted checkpoint; workers without a state in it begin as at a run's start.
        text: user-readable description of the merged and dropped state.
    """

    held: Held
    text: str


Merge = Literal["keep", "mean", "reset"]
"""What becomes of an entry: it stays, it is the weighted mean over all workers, or it begins with another value."""

Per = Literal["run", "worker", "server", "pusher"]
"""Scope of an entry of a state.

run: the same on all workers; if kept, that of rank 0. worker: one per worker; new workers have none.
server: one per server. pusher: each server has a list with one element per pusher, or one entry per pusher with a name
that ends in the pusher's number.
"""


@dataclass(frozen=True)
class Start:
    """Starting point of a different number of workers.

    Attributes:
        step: first step of all workers, in the new count of steps.
        index: index of the worker or server of the new state.
        pushers: pushers of the server.
    """

    step: int
    index: int
    pushers: int = 0


MergeFunction = Callable[[str, Sequence[State], Sequence[float]], State]
"""Return the entries of this name, made of the states of all workers and how much each counts."""


@dataclass(frozen=True)
class StateField:
    """Conversion rule of entries of a state for a different number of workers.

    Attributes:
        name: name of a tensor, a fact or both; a `*` at its end matches any suffix.
        merge: conversion of the entries.
        per: scope of the entries.
        to: function that returns the value of a fact after a reset; None: no reset value.
    """

    name: str
    merge: Merge | MergeFunction
    per: Per
    to: Callable[[Start], Any] | None = None

    def covers(self, entry: str) -> bool:
        """Whether an entry has this name."""
        return entry.startswith(self.name[:-1]) if self.name.endswith("*") else entry == self.name

    def stays(self, entry: str, start: Start) -> bool:
        """Whether an entry that it covers is kept in the state that it was in."""
        if self.merge != "keep" or self.per == "run":
            return False
        number = entry.removeprefix(self.name[:-1])
        return self.per != "pusher" or not number.isdigit() or int(number) < start.pushers

    def value(self, start: Start) -> Any:
        """Return what a fact is reset to."""
        assert self.to is not None, f"{self.name} begins as at a run's start"
        return [self.to(start)] * start.pushers if self.per == "pusher" else self.to(start)


STEPS = StateField("steps", "reset", "pusher", lambda start: start.step)
"""How many steps a server knows of each pusher."""


def mean_of_optimizers(name: str, states: Sequence[State], weights: Sequence[float]) -> State:
    """Return the mean of packed optimizer states: tensors below `name.`, and a fact of that name."""
    prefix = f"{name}."
    packed = [(below(prefix, tensors), facts[name]) for tensors, facts in states]
    tensors, facts = mean_optimizer(packed, weights)
    return {prefix + key: value for key, value in tensors.items()}, {name: facts}


def lockstep(held: Held) -> list[int]:
    """Count what worker 0 has done: it is what the others did."""
    return [held.steps[0]] * len(held.steps)


def own_steps(held: Held) -> list[int]:
    """Count all that each has done; of a worker that had handed in no state, as many as worker 0 has."""
    return [steps if worker in held.workers else held.steps[0] for worker, steps in enumerate(held.steps)]


def steps_of_servers(held: Held) -> list[int]:
    """Count those that the server knows of that knows of most; for servers that count steps by worker."""
    return [max(known) for known in steps_known(held.servers)]


def steps_known(servers: Sequence[State]) -> list[tuple[int, ...]]:
    """Return, for each worker, how many of its steps every server knows of."""
    return list(zip(*(facts["steps"] for _, facts in servers), strict=True))


WorkerStates = Callable[[Held, int], dict[int, State]]
"""Return the states of the workers that there are now, by index, from what a checkpoint held and their first step."""


@dataclass(frozen=True, kw_only=True)
class Resharding:
    """A strategy's way from a checkpoint to another number of workers.

    Attributes:
        after: new number of workers.
        text: message on merged and dropped state, with `{states}` for the number of saved states and `{kept}`
            for the number of workers that continue with one.
        newcomers: message on `{new}` workers that begin without a state.
        remark: function that returns a further message for a checkpoint.
        workers: fields of a worker's state; the first that covers an entry applies, and an uncovered entry
            begins as at a run's start. Or a function.
        servers: fields of a server's state.
        count: function that returns the number of each worker's steps that count; the rest is repeated by
            others.
        fits: function that returns the workers with a state that matches the servers' records: they keep it,
            and all of their steps count.
        pushers: number of pushers of each server; None: all workers.
        weight: name of the fact that weights a state in a mean; empty: equal weights.
        parameters: the tensor of worker 0's state that is the run's parameters; empty: they stay.
    """

    after: int
    text: str
    newcomers: str = ""
    remark: Callable[[Held], str] = lambda held: ""
    workers: tuple[StateField, ...] | WorkerStates = ()
    servers: tuple[StateField, ...] = ()
    count: Callable[[Held], list[int]] = lockstep
    fits: Callable[[Held], Collection[int]] | None = None
    pushers: Callable[[int], int] | None = None
    weight: str = ""
    parameters: str = ""

    def counted(self, held: Held) -> list[int]:
        """Return the number of each worker's steps that count.

        Args:
            held: state in the checkpoint.
        """
        found = self.count(held)
        if self.fits is not None:
            for worker in self._staying(held):
                found[worker] = held.steps[worker]
        return found

    def merged(self, held: Held, step: int) -> Merged:
        """Return the workers' states after resharding.

        Args:
            held: state in the checkpoint.
            step: first step of all workers, in the new count of steps.
        """
        workers = self.worker_states(held, step)
        pushers = self.pushers or (lambda server: self.after)
        servers = [
            _kept(self.servers, state, Start(step, index, pushers(index))) if state[1] else state
            for index, state in enumerate(held.servers)
        ]
        parameters = workers[0][0][self.parameters] if self.parameters else held.parameters
        text = self.text.format(states=len(held.workers), kept=len(workers))
        if len(workers) < self.after:
            text += self.newcomers.format(new=self.after - len(workers))
        found = replace(held, parameters=parameters, workers=workers, servers=servers)
        return Merged(found, text + self.remark(held))

    def worker_states(self, held: Held, step: int) -> dict[int, State]:
        """Return the states of the workers, by index; see `merged`."""
        if not isinstance(self.workers, tuple):
            return self.workers(held, step)
        if all(field.per != "run" for field in self.workers):
            staying = self._staying(held) if self.workers else ()
            return {index: _kept(self.workers, held.workers[index], Start(step, index)) for index in staying}
        tensors, facts = self._common(held)
        found: dict[int, State] = {}
        for index in range(self.after):
            _, own = _kept(self.workers, ({}, {}), Start(step, index))
            found[index] = tensors, facts | own
        return found

    def _staying(self, held: Held) -> list[int]:
        fits = held.workers if self.fits is None else self.fits(held)
        return [worker for worker in fits if worker < self.after]

    def _common(self, held: Held) -> State:
        states = [held.workers[index] for index in sorted(held.workers)] or [({}, {})]
        weights = [float(facts[self.weight]) if self.weight else 1.0 for _, facts in states]
        tensors: dict[str, Tensor] = {}
        facts: dict[str, Any] = {}
        assert isinstance(self.workers, tuple), "asked of fields"
        for field in self.workers:
            if isinstance(field.merge, str):
                of_tensors, of_facts = _covered(self.workers, field, states[0])
                if field.merge == "keep" and field.per == "run":
                    tensors |= of_tensors
                    facts |= of_facts
                elif field.merge == "mean":
                    for name, like in of_tensors.items():
                        tensors[name] = weighted_mean([own[name] for own, _ in states], weights, like)
            else:
                made, noted = field.merge(field.name, states, weights)
                tensors |= made
                facts |= noted
        return tensors, facts


def same_for_all(after: int) -> Resharding:
    """For equal workers without servers: all begin with worker 0's state."""
    text = "all continue from worker 0's parameters and optimizer"
    return Resharding(after=after, text=text, workers=(StateField("*", "keep", "run"),))


def below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with a name prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def without(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors without a name prefix."""
    return {name: value for name, value in tensors.items() if not name.startswith(prefix)}


def prefixed(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors with a prefix before their names, which `below` takes away."""
    return {prefix + name: tensor for name, tensor in tensors.items()}


def _first(fields: Iterable[StateField], entry: str) -> StateField | None:
    return next((field for field in fields if field.covers(entry)), None)


def _covered(fields: Sequence[StateField], field: StateField, state: State) -> State:
    """Return those entries of a state that this field is the first to cover."""
    tensors, facts = (
        {name: value for name, value in entries.items() if _first(fields, name) is field} for entries in state
    )
    return tensors, facts


def _kept(fields: Sequence[StateField], state: State, start: Start) -> State:
    """Return a state with the entries that stay, and with the facts that are reset."""
    kept: list[dict[str, Any]] = []
    for entries in state:
        found = {name: _first(fields, name) for name in entries}
        kept.append(
            {
                name: entries[name]
                for name, field in found.items()
                if field is not None and field.stays(name, start)
            }
        )
    tensors, facts = kept
    return tensors, facts | {field.name: field.value(start) for field in fields if field.to is not None}
